//! Lines that the import did not understand, with their places.

use std::fmt;

use crate::text::printable;

/// Maximum number of listed lines. Further lines are only counted.
const LISTED: usize = 1000;
/// Maximum number of characters shown of a line.
const SHOWN: usize = 300;

/// A line of kube-proxy's that was not understood, or a service that was left out.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Leftover {
    /// The text's origin.
    pub origin: String,
    /// The line's number, from 1; 0 if no line is concerned.
    pub line: usize,
    /// The rule.
    pub text: String,
    /// The reason.
    pub why: String,
}

impl Leftover {
    /// Returns the text's origin with the line.
    pub fn place(&self) -> String {
        match self.line {
            0 => self.origin.clone(),
            line => format!("{}:{line}", self.origin),
        }
    }

    /// Returns the rule and the reason why the import did not understand it.
    pub fn what(&self) -> String {
        if self.text.is_empty() {
            self.why.clone()
        } else {
            format!("{}: {}", self.why, self.text)
        }
    }
}

impl fmt::Display for Leftover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place(), self.what())
    }
}

/// Collects lines that were not understood.
#[derive(Debug, Default)]
pub struct Leftovers {
    origin: String,
    listed: Vec<Leftover>,
    more: usize,
}

impl Leftovers {
    /// Starts a text.
    pub fn begin(&mut self, origin: &str) {
        origin.clone_into(&mut self.origin);
    }

    /// Adds a line. `at` is the line's number, from 1; 0 if no single line is concerned.
    pub fn add(&mut self, at: usize, text: &str, why: impl Into<String>) {
        if self.listed.len() == LISTED {
            self.more += 1;
            return;
        }
        let shown = |text: &str| -> String {
            let mut words: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
            if let Some((end, _)) = words.char_indices().nth(SHOWN) {
                words.truncate(end);
                words.push('…');
            }
            printable(&words)
        };
        self.listed.push(Leftover {
            origin: self.origin.clone(),
            line: at,
            text: shown(text),
            why: shown(&why.into()),
        });
    }

    /// Returns the listed lines sorted by place, and the number of further lines.
    pub fn finish(self) -> (Vec<Leftover>, usize) {
        let mut all = self.listed;
        all.sort_by(|a, b| (&a.origin, a.line).cmp(&(&b.origin, b.line)));
        (all, self.more)
    }
}
