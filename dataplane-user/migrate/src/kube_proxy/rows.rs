//! The rules of a table's chains, for every form of rules.

use std::{borrow::Borrow, cell::Cell, collections::HashMap, hash::Hash};

/// The chains of a table by name, with their rules.
#[derive(Debug)]
pub struct Rows<N, R> {
    chains: HashMap<N, Chain>,
    /// Each rule with its chain's number. Sorted by chain after [`Rows::finish`], in the order of the rules.
    rows: Vec<(u32, R)>,
}

#[derive(Debug)]
struct Chain {
    number: u32,
    /// Whether [`Rows::of`] returned the chain's rules.
    read: Cell<bool>,
}

impl<N, R> Default for Rows<N, R> {
    fn default() -> Self {
        Self {
            chains: HashMap::new(),
            rows: Vec::new(),
        }
    }
}

impl<N: Borrow<str> + Hash + Eq, R> Rows<N, R> {
    /// Returns the number of a chain. Creates the chain if it is unknown.
    pub fn chain(&mut self, name: N) -> u32 {
        let number = u32::try_from(self.chains.len()).unwrap_or(u32::MAX);
        let read = Cell::new(false);
        self.chains
            .entry(name)
            .or_insert(Chain { number, read })
            .number
    }

    /// Appends a rule to a chain.
    pub fn add(&mut self, name: N, row: R) {
        let chain = self.chain(name);
        self.rows.push((chain, row));
    }

    /// Sorts the rules by chain. Call it after the last rule was added.
    pub fn finish(&mut self) {
        self.rows.sort_by_key(|(chain, _)| *chain);
    }

    /// Returns the names of all chains, each with whether [`Rows::of`] returned its rules.
    pub fn names(&self) -> impl Iterator<Item = (&str, bool)> {
        let chains = self.chains.iter();
        chains.map(|(name, chain)| (name.borrow(), chain.read.get()))
    }

    /// Returns a chain's name, if the table has the chain.
    pub fn name(&self, chain: &str) -> Option<&str> {
        let known = self.chains.get_key_value(chain);
        known.map(|(name, _)| name.borrow())
    }

    /// Returns all rules, sorted by chain.
    pub fn all(&self) -> impl Iterator<Item = &R> {
        self.rows.iter().map(|(_, row)| row)
    }

    /// Returns the rules of a chain in their order, and marks the chain as read.
    pub fn of(&self, chain: &str) -> impl Iterator<Item = &R> + use<'_, N, R> {
        if let Some(chain) = self.chains.get(chain) {
            chain.read.set(true);
        }
        self.unasked(chain)
    }

    /// Returns the rules of a chain in their order, without marking the chain as read.
    pub fn unasked(&self, chain: &str) -> impl Iterator<Item = &R> + use<'_, N, R> {
        let number = self.chains.get(chain).map(|chain| chain.number);
        let first = number.map_or(self.rows.len(), |number| {
            self.rows.partition_point(|(chain, _)| *chain < number)
        });
        let rows = self.rows[first..].iter();
        let rows = rows.take_while(move |(chain, _)| Some(*chain) == number);
        rows.map(|(_, row)| row)
    }
}
