//! kube-proxy's table of one family: its chains, sets and maps, whatever form they were read from. A rule is in the words of
//! `nft list ruleset`.

use std::{borrow::Cow, cell::Cell, collections::HashMap};

use super::super::leftover::At;
use crate::text::nft::words;

/// kube-proxy's table of one family.
#[derive(Debug, Default)]
pub struct Table<'a> {
    /// Whether the family is IPv4.
    pub v4: bool,
    chains: HashMap<Cow<'a, str>, Chain>,
    /// By chain after [`Table::finish`], and in their order.
    rows: Vec<Row<'a>>,
    sets: HashMap<Cow<'a, str>, Set<'a>>,
}

#[derive(Debug)]
struct Chain {
    number: u32,
    /// Whether its rules were asked for.
    read: Cell<bool>,
}

#[derive(Debug)]
struct Row<'a> {
    chain: u32,
    at: At,
    text: Cow<'a, str>,
}

/// A set or a map.
#[derive(Debug)]
pub struct Set<'a> {
    /// The place of its first element.
    pub at: At,
    /// How long an element stays, in seconds.
    pub timeout: Option<u64>,
    /// The elements, without the braces around them.
    pub elements: Cow<'a, str>,
}

/// A rule.
#[derive(Clone, Debug)]
pub struct Rule<'t> {
    /// Its place.
    pub at: At,
    /// As it is written.
    pub text: &'t str,
    /// Its words, without its comment.
    pub words: Vec<&'t str>,
}

impl<'a> Table<'a> {
    /// An empty table of a family.
    pub fn new(v4: bool) -> Self {
        Self {
            v4,
            ..Self::default()
        }
    }

    /// The number of a chain, which is new if it was not known.
    pub fn chain(&mut self, name: Cow<'a, str>) -> u32 {
        let next = u32::try_from(self.chains.len()).unwrap_or(u32::MAX);
        let read = Cell::new(false);
        let chain = self.chains.entry(name);
        chain.or_insert(Chain { number: next, read }).number
    }

    /// Adds a rule at the end of a chain.
    pub fn add(&mut self, chain: u32, at: At, text: Cow<'a, str>) {
        self.rows.push(Row { chain, at, text });
    }

    /// Adds a set or a map.
    pub fn add_set(&mut self, name: Cow<'a, str>, set: Set<'a>) {
        self.sets.insert(name, set);
    }

    /// Sorts the rules by chain. To be called when all are there.
    pub fn finish(&mut self) {
        self.rows.sort_by_key(|row| row.chain);
    }

    /// Every chain's name.
    pub fn chains(&self) -> impl Iterator<Item = &str> {
        self.chains.keys().map(|name| &**name)
    }

    /// The names of the chains whose rules nobody asked for.
    pub fn unread(&self) -> Vec<&str> {
        let chains = self.chains.iter();
        let unread = chains.filter(|(_, chain)| !chain.read.get());
        unread.map(|(name, _)| &**name).collect()
    }

    /// A set or a map.
    pub fn set(&self, name: &str) -> Option<&Set<'a>> {
        self.sets.get(name)
    }

    /// The rules of a chain in their order.
    pub fn rules(&self, chain: &str) -> impl Iterator<Item = Rule<'_>> {
        let chain = self.chains.get(chain);
        let number = chain.map(|chain| {
            chain.read.set(true);
            chain.number
        });
        let first = number.map_or(self.rows.len(), |number| {
            self.rows.partition_point(|row| row.chain < number)
        });
        let rows = self.rows[first..].iter();
        let rows = rows.take_while(move |row| Some(row.chain) == number);
        rows.map(|row| {
            let mut words: Vec<&str> = words(&row.text).collect();
            if let [.., "comment", comment] = words[..]
                && comment.starts_with('"')
            {
                words.truncate(words.len() - 2);
            }
            Rule {
                at: row.at,
                text: &row.text,
                words,
            }
        })
    }

    /// `ip` or `ip6`.
    pub fn ip(&self) -> &'static str {
        if self.v4 { "ip" } else { "ip6" }
    }
}
