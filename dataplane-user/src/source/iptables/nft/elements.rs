//! Elements of kube-proxy's sets and maps.

use std::net::IpAddr;

use super::{
    super::leftover::{At, Leftovers},
    tables::{Set, Table},
};
use crate::iptables::nft::words;

/// An address, protocol and port: a key of a map. The protocol is as it is written.
pub type Key<'t> = (IpAddr, &'t str, u16);

/// An element of a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Element<'t, K> {
    pub at: At,
    pub key: K,
    /// Empty if it has none.
    pub comment: &'t str,
    /// `goto` and its chain, or `drop` alone.
    pub verdict: (&'t str, &'t str),
}

/// Reads the words of elements one after the other.
struct Reader<'t> {
    words: Box<dyn Iterator<Item = &'t str> + 't>,
    text: &'t str,
    first: At,
}

impl<'t> Reader<'t> {
    fn of(set: &'t Set<'_>) -> Self {
        Self {
            words: Box::new(words(&set.elements)),
            text: &set.elements,
            first: set.at,
        }
    }

    /// The place of a word.
    fn at(&self, word: &str) -> At {
        match self.first {
            At::Line(first) => {
                let start = (word.as_ptr() as usize).saturating_sub(self.text.as_ptr() as usize);
                let before = self.text.get(..start).unwrap_or_default();
                At::Line(first + before.matches('\n').count())
            }
            other => other,
        }
    }

    /// The next words, with `.` between.
    fn concatenated<const N: usize>(&mut self, first: &'t str) -> Option<[&'t str; N]> {
        let mut all = [first; N];
        for word in &mut all[1..] {
            (self.words.next()? == ".").then_some(())?;
            *word = self.words.next()?;
        }
        Some(all)
    }

    /// Reads `[comment "…"] : VERDICT`.
    fn rest(&mut self) -> Option<(&'t str, (&'t str, &'t str))> {
        let mut word = self.words.next()?;
        let mut comment = "";
        if word == "comment" {
            comment = self.words.next()?.trim_matches('"');
            word = self.words.next()?;
        }
        (word == ":").then_some(())?;
        let verdict = match self.words.next()? {
            "goto" => ("goto", self.words.next()?),
            "drop" => ("drop", ""),
            _ => return None,
        };
        Some((comment, verdict))
    }
}

/// The elements of a map by address, protocol and port. Lists what is none, and what comes after it.
pub fn by_address<'t>(
    table: &'t Table<'_>,
    name: &str,
    leftovers: &mut Leftovers,
) -> Vec<Element<'t, Key<'t>>> {
    of_map(table, name, leftovers, |reader, first| {
        let [ip, protocol, port] = reader.concatenated(first)?;
        Some((ip.parse().ok()?, protocol, port.parse().ok()?))
    })
}

/// The elements of a map by protocol and port.
pub fn by_port<'t>(
    table: &'t Table<'_>,
    name: &str,
    leftovers: &mut Leftovers,
) -> Vec<Element<'t, (&'t str, u16)>> {
    of_map(table, name, leftovers, |reader, first| {
        let [protocol, port] = reader.concatenated(first)?;
        Some((protocol, port.parse().ok()?))
    })
}

fn of_map<'t, K>(
    table: &'t Table<'_>,
    name: &str,
    leftovers: &mut Leftovers,
    key: impl Fn(&mut Reader<'t>, &'t str) -> Option<K>,
) -> Vec<Element<'t, K>> {
    let mut found = Vec::new();
    let Some(set) = table.set(name) else {
        return found;
    };
    let mut reader = Reader::of(set);
    let mut lines = Lines::default();
    while let Some(first) = reader.words.next() {
        let at = lines.at(&reader, first);
        let element = key(&mut reader, first).and_then(|key| {
            let (comment, verdict) = reader.rest()?;
            Some(Element {
                at,
                key,
                comment,
                verdict,
            })
        });
        if let Some(element) = element {
            found.push(element);
        } else {
            let why =
                "it is no element that kube-proxy writes, so the rest of the map was not read";
            leftovers.add(at, &format!("{name}: {first} …"), why);
            break;
        }
    }
    found
}

/// The lines of words that follow each other: each is counted once.
#[derive(Default)]
struct Lines {
    byte: usize,
    lines: usize,
}

impl Lines {
    fn at(&mut self, reader: &Reader<'_>, word: &str) -> At {
        let At::Line(first) = reader.first else {
            return reader.first;
        };
        let start = (word.as_ptr() as usize).saturating_sub(reader.text.as_ptr() as usize);
        let passed = reader.text.get(self.byte..start).unwrap_or_default();
        self.lines += passed.matches('\n').count();
        self.byte = start;
        At::Line(first + self.lines)
    }
}

/// The addresses of a set. Lists what is none.
pub fn addresses(table: &Table<'_>, name: &str, leftovers: &mut Leftovers) -> Vec<IpAddr> {
    let mut found = Vec::new();
    let Some(set) = table.set(name) else {
        return found;
    };
    let mut reader = Reader::of(set);
    while let Some(word) = reader.words.next() {
        if let Ok(ip) = word.parse() {
            found.push(ip);
        } else {
            let why = "it is no address, so the rest of the set was not read";
            leftovers.add(reader.at(word), &format!("{name}: {word} …"), why);
            break;
        }
    }
    found
}

/// The endpoints on this node: the elements of set `hairpin-connections`.
pub fn hairpins(table: &Table<'_>, leftovers: &mut Leftovers) -> Vec<(IpAddr, String, u16)> {
    const NAME: &str = "hairpin-connections";
    let mut found = Vec::new();
    let Some(set) = table.set(NAME) else {
        return found;
    };
    let mut reader = Reader::of(set);
    while let Some(first) = reader.words.next() {
        let element = reader.concatenated(first).and_then(|all| {
            let [ip, same, protocol, port]: [&str; 4] = all;
            let ip = ip.parse().ok().filter(|_| ip == same)?;
            Some((ip, protocol.to_owned(), port.parse().ok()?))
        });
        if let Some(element) = element {
            found.push(element);
        } else {
            let why = "it is no endpoint on this node, so the rest of the set was not read";
            leftovers.add(reader.at(first), &format!("{NAME}: {first} …"), why);
            break;
        }
    }
    found
}
