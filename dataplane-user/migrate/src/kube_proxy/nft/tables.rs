//! kube-proxy's table of one family, with its chains, sets and maps. A rule has the words of `nft list ruleset`.

use std::collections::HashMap;

use super::super::rows::{Line, Rows};
use crate::text::nft::words;

/// kube-proxy's table of one family.
#[derive(Debug, Default)]
pub struct Table<'a> {
    /// Whether the family is IPv4.
    pub v4: bool,
    /// The rules of the table's chains, each with its line.
    pub rows: Rows<'a>,
    sets: HashMap<&'a str, Set<'a>>,
}

/// A set or a map.
#[derive(Debug)]
pub struct Set<'a> {
    /// The line of the first element.
    pub at: usize,
    /// The lifetime of an element, in seconds.
    pub timeout: Option<u64>,
    /// The elements, without the braces around them.
    pub elements: &'a str,
}

/// A rule.
#[derive(Clone, Debug)]
pub struct Rule<'t> {
    /// The line.
    pub at: usize,
    /// The text.
    pub text: &'t str,
    /// The words, without the comment.
    pub words: Vec<&'t str>,
}

impl<'a> Table<'a> {
    /// Creates an empty table of a family.
    pub fn new(v4: bool) -> Self {
        Self {
            v4,
            ..Self::default()
        }
    }

    /// Adds a set or a map.
    pub fn add_set(&mut self, name: &'a str, set: Set<'a>) {
        self.sets.insert(name, set);
    }

    /// Returns a set or a map.
    pub fn set(&self, name: &str) -> Option<&Set<'a>> {
        self.sets.get(name)
    }

    /// Returns the rules of a chain in their order, and marks the chain as read.
    pub fn rules(&self, chain: &str) -> impl Iterator<Item = Rule<'_>> {
        self.rows.of(chain).map(|Line { at, text }| {
            let mut words: Vec<&str> = words(text).collect();
            if let [.., "comment", comment] = words[..]
                && comment.starts_with('"')
            {
                words.truncate(words.len() - 2);
            }
            Rule { at, text, words }
        })
    }

    /// Returns the family's name in nft: `ip` or `ip6`.
    pub fn ip(&self) -> &'static str {
        if self.v4 { "ip" } else { "ip6" }
    }
}
