//! Reads the elements of kube-proxy's sets and maps.

use std::net::IpAddr;

use super::{
    Broken,
    tables::{Set, Table},
};
use crate::text::nft::words;

/// An address, protocol and port: a key of a map. The protocol is the original word.
pub type Key<'t> = (IpAddr, &'t str, u16);

/// An element of a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Element<'t, K> {
    pub at: usize,
    pub key: K,
    /// The comment; empty if the element has none.
    pub comment: &'t str,
    /// `goto` or `jump` with its chain, or a single word such as `drop`.
    pub verdict: (&'t str, &'t str),
}

/// Reads the words of elements in sequence.
struct Reader<'t> {
    words: Box<dyn Iterator<Item = &'t str> + 't>,
    text: &'t str,
    /// The line of the first element.
    first: usize,
    /// The number of lines so far, and the byte up to which they were counted.
    passed: (usize, usize),
}

impl<'t> Reader<'t> {
    fn of(set: &'t Set<'_>) -> Self {
        Self {
            words: Box::new(words(set.elements)),
            text: set.elements,
            first: set.at,
            passed: (0, 0),
        }
    }

    /// Returns the line of a word after the previous words. Counts each line once.
    fn at(&mut self, word: &str) -> usize {
        let start = (word.as_ptr() as usize).saturating_sub(self.text.as_ptr() as usize);
        let (lines, byte) = &mut self.passed;
        let passed = self.text.get(*byte..start).unwrap_or_default();
        *lines += passed.matches('\n').count();
        *byte = start;
        self.first + *lines
    }

    /// Reads further words that are joined by `.`.
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

/// Iterates over the elements of a map by address, protocol and port. Reads them one at a time, because all elements
/// together take as much memory as the text.
///
/// # Errors
///
/// If the map has an element of another form.
pub fn by_address<'t>(
    table: &'t Table<'_>,
    name: &'t str,
) -> impl Iterator<Item = Result<Element<'t, Key<'t>>, Broken>> {
    of_map(table, name, |reader, first| {
        let [ip, protocol, port] = reader.concatenated(first)?;
        Some((ip.parse().ok()?, protocol, port.parse().ok()?))
    })
}

/// Iterates over the elements of a map by protocol and port.
///
/// # Errors
///
/// If the map has an element of another form.
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
    let what = "kube-proxy writes no such element";
    all(table, name, what, move |reader, at, first| {
        let key = key(reader, first)?;
        let (comment, verdict) = reader.rest()?;
        Some(Element {
            at,
            key,
            comment,
            verdict,
        })
    })
}

/// Iterates over the elements of a set or a map. `read` reads an element from its line and first word.
fn all<'t, E>(
    table: &'t Table<'_>,
    name: &'t str,
    what: &'static str,
    read: impl Fn(&mut Reader<'t>, usize, &'t str) -> Option<E>,
) -> impl Iterator<Item = Result<E, Broken>> {
    let mut reader = table.set(name).map(Reader::of);
    std::iter::from_fn(move || {
        let reader = reader.as_mut()?;
        let first = reader.words.next()?;
        let at = reader.at(first);
        let element = read(reader, at, first);
        Some(element.ok_or_else(|| Broken::element(at, name, first, what)))
    })
}

/// Returns the addresses in a set.
///
/// # Errors
///
/// If the set has an element of another form.
pub fn addresses(table: &Table<'_>, name: &str) -> Result<Vec<IpAddr>, Broken> {
    let what = "the element is no address";
    all(table, name, what, |_, _, word| word.parse().ok()).collect()
}

/// Returns the endpoints on this node: the elements of set `hairpin-connections`.
///
/// # Errors
///
/// If the set has an element of another form.
pub fn hairpins<'t>(table: &'t Table<'_>) -> Result<Vec<Key<'t>>, Broken> {
    let what = "the element is no endpoint on this node";
    let elements = all(table, "hairpin-connections", what, |reader, _, first| {
        let [ip, same, protocol, port] = reader.concatenated(first)?;
        let ip = ip.parse().ok().filter(|_| ip == same)?;
        Some((ip, protocol, port.parse().ok()?))
    });
    elements.collect()
}
