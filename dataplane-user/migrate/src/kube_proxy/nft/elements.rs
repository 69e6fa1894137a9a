//! Elements of kube-proxy's sets and maps.

use std::net::IpAddr;

use super::{
    super::leftover::At,
    Broken,
    tables::{Set, Table},
};
use crate::text::nft::words;

/// An address, protocol and port: a key of a map. The protocol is as it is written.
pub type Key<'t> = (IpAddr, &'t str, u16);

/// An element of a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Element<'t, K> {
    pub at: At,
    pub key: K,
    /// Empty if it has none.
    pub comment: &'t str,
    /// `goto` or `jump` and its chain, or a word such as `drop` alone.
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
            word @ ("goto" | "jump") => (word, self.words.next()?),
            word @ ("accept" | "continue" | "drop" | "return") => (word, ""),
            _ => return None,
        };
        Some((comment, verdict))
    }
}

/// The elements of a map by address, protocol and port. One after the other: all at once are as large as the text.
///
/// # Errors
///
/// The map has something else.
pub fn by_address<'t>(
    table: &'t Table<'_>,
    name: &'t str,
) -> impl Iterator<Item = Result<Element<'t, Key<'t>>, Broken>> {
    of_map(table, name, |reader, first| {
        let [ip, protocol, port] = reader.concatenated(first)?;
        Some((ip.parse().ok()?, protocol, port.parse().ok()?))
    })
}

/// The elements of a map by protocol and port.
///
/// # Errors
///
/// The map has something else.
pub fn by_port<'t>(
    table: &'t Table<'_>,
    name: &'t str,
) -> impl Iterator<Item = Result<Element<'t, (&'t str, u16)>, Broken>> {
    of_map(table, name, |reader, first| {
        let [protocol, port] = reader.concatenated(first)?;
        Some((protocol, port.parse().ok()?))
    })
}

fn of_map<'t, K>(
    table: &'t Table<'_>,
    name: &'t str,
    key: impl Fn(&mut Reader<'t>, &'t str) -> Option<K>,
) -> impl Iterator<Item = Result<Element<'t, K>, Broken>> {
    let mut reader = table.set(name).map(Reader::of);
    let mut lines = Lines::default();
    std::iter::from_fn(move || {
        let reader = reader.as_mut()?;
        let first = reader.words.next()?;
        let at = lines.at(reader, first);
        let element = key(reader, first).and_then(|key| {
            let (comment, verdict) = reader.rest()?;
            Some(Element {
                at,
                key,
                comment,
                verdict,
            })
        });
        let what = "kube-proxy writes no such element";
        Some(element.ok_or_else(|| Broken::element(at, name, first, what)))
    })
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

/// The addresses of a set.
///
/// # Errors
///
/// The set has something else.
pub fn addresses(table: &Table<'_>, name: &str) -> Result<Vec<IpAddr>, Broken> {
    let mut found = Vec::new();
    let Some(set) = table.set(name) else {
        return Ok(found);
    };
    let mut reader = Reader::of(set);
    while let Some(word) = reader.words.next() {
        let ip = word.parse();
        let broken = |_| Broken::element(reader.at(word), name, word, "the element is no address");
        found.push(ip.map_err(broken)?);
    }
    Ok(found)
}

/// The endpoints on this node: the elements of set `hairpin-connections`.
///
/// # Errors
///
/// The set has something else.
pub fn hairpins(table: &Table<'_>) -> Result<Vec<(IpAddr, String, u16)>, Broken> {
    const NAME: &str = "hairpin-connections";
    let mut found = Vec::new();
    let Some(set) = table.set(NAME) else {
        return Ok(found);
    };
    let mut reader = Reader::of(set);
    while let Some(first) = reader.words.next() {
        let element = reader.concatenated(first).and_then(|all| {
            let [ip, same, protocol, port]: [&str; 4] = all;
            let ip = ip.parse().ok().filter(|_| ip == same)?;
            Some((ip, protocol.to_owned(), port.parse().ok()?))
        });
        let what = "the element is no endpoint on this node";
        found.push(element.ok_or_else(|| Broken::element(reader.at(first), NAME, first, what))?);
    }
    Ok(found)
}
