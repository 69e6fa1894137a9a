//! The rules of a table's chains, for every form of rules.

use std::{cell::Cell, collections::HashMap};

/// The chains of a table by name, with their rules.
#[derive(Debug, Default)]
pub struct Rows<'a> {
    chains: HashMap<&'a str, Chain>,
    /// Each rule with its chain's number and its line's number. Sorted by chain after [`Rows::finish`], in the order of
    /// the rules.
    rows: Vec<(u32, u32, &'a str)>,
}

#[derive(Debug)]
struct Chain {
    number: u32,
    /// Whether [`Rows::of`] returned the chain's rules.
    read: Cell<bool>,
}

/// A rule with its place.
#[derive(Clone, Copy, Debug)]
pub struct Line<'a> {
    /// The line's number.
    pub at: usize,
    /// The rule without its chain, as written.
    pub text: &'a str,
}

impl<'a> Rows<'a> {
    /// Returns the number of a chain. Creates the chain if it is unknown.
    pub fn chain(&mut self, name: &'a str) -> u32 {
        let number = u32::try_from(self.chains.len()).unwrap_or(u32::MAX);
        let read = Cell::new(false);
        self.chains
            .entry(name)
            .or_insert(Chain { number, read })
            .number
    }

    /// Appends a rule to a chain.
    pub fn add(&mut self, name: &'a str, line: usize, text: &'a str) {
        let chain = self.chain(name);
        let line = u32::try_from(line).unwrap_or(u32::MAX);
        self.rows.push((chain, line, text));
    }

    /// Sorts the rules by chain. Call it after the last rule was added.
    pub fn finish(&mut self) {
        self.rows.sort_by_key(|(chain, ..)| *chain);
    }

    /// Returns the names of all chains, each with whether [`Rows::of`] returned its rules.
    pub fn names(&self) -> impl Iterator<Item = (&'a str, bool)> {
        let chains = self.chains.iter();
        chains.map(|(name, chain)| (*name, chain.read.get()))
    }

    /// Returns a chain's name, if the table has the chain.
    pub fn name(&self, chain: &str) -> Option<&'a str> {
        let known = self.chains.get_key_value(chain);
        known.map(|(name, _)| *name)
    }

    /// Returns all rules, sorted by chain.
    pub fn texts(&self) -> impl Iterator<Item = &'a str> {
        self.rows.iter().map(|(.., text)| *text)
    }

    /// Returns the rules of a chain in their order, and marks the chain as read.
    pub fn of(&self, chain: &str) -> impl Iterator<Item = Line<'a>> + use<'a, '_> {
        if let Some(chain) = self.chains.get(chain) {
            chain.read.set(true);
        }
        self.unasked(chain)
    }

    /// Returns the rules of a chain in their order, without marking the chain as read.
    pub fn unasked(&self, chain: &str) -> impl Iterator<Item = Line<'a>> + use<'a, '_> {
        let number = self.chains.get(chain).map(|chain| chain.number);
        let first = number.map_or(self.rows.len(), |number| {
            self.rows.partition_point(|(chain, ..)| *chain < number)
        });
        let rows = self.rows[first..].iter();
        let rows = rows.take_while(move |(chain, ..)| Some(*chain) == number);
        rows.map(|&(_, line, text)| Line {
            at: line as usize,
            text,
        })
    }
}
