//! The rules of a table's chains, in whichever form they are.

use std::{borrow::Borrow, cell::Cell, collections::HashMap, hash::Hash};

/// The chains of a table, by their names, with their rules.
#[derive(Debug)]
pub struct Rows<N, R> {
    chains: HashMap<N, Chain>,
    /// By chain after [`Rows::finish`], and in their order.
    rows: Vec<(u32, R)>,
}

#[derive(Debug)]
struct Chain {
    number: u32,
    /// Whether its rules were asked for.
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
    /// The number of a chain, which is new if it was not known.
    pub fn chain(&mut self, name: N) -> u32 {
        let number = u32::try_from(self.chains.len()).unwrap_or(u32::MAX);
        let read = Cell::new(false);
        self.chains
            .entry(name)
            .or_insert(Chain { number, read })
            .number
    }

    /// Adds a rule at the end of a chain.
    pub fn add(&mut self, name: N, row: R) {
        let chain = self.chain(name);
        self.rows.push((chain, row));
    }

    /// Sorts the rules by chain. To be called when all are there.
    pub fn finish(&mut self) {
        self.rows.sort_by_key(|(chain, _)| *chain);
    }

    /// Every chain's name, with whether its rules were asked for.
    pub fn names(&self) -> impl Iterator<Item = (&str, bool)> {
        let chains = self.chains.iter();
        chains.map(|(name, chain)| (name.borrow(), chain.read.get()))
    }

    /// A chain's name, if the table has the chain.
    pub fn name(&self, chain: &str) -> Option<&str> {
        let known = self.chains.get_key_value(chain);
        known.map(|(name, _)| name.borrow())
    }

    /// All rules, in the order of their chains.
    pub fn all(&self) -> impl Iterator<Item = &R> {
        self.rows.iter().map(|(_, row)| row)
    }

    /// The rules of a chain in their order, which are asked for now.
    pub fn of(&self, chain: &str) -> impl Iterator<Item = &R> + use<'_, N, R> {
        if let Some(chain) = self.chains.get(chain) {
            chain.read.set(true);
        }
        self.unasked(chain)
    }

    /// The rules of a chain in their order.
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
