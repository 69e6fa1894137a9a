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
    /// The column, from 1, in a text that may have all rules in one line.
    pub column: Option<usize>,
    /// The rule.
    pub text: String,
    /// The reason.
    pub why: String,
}

impl Leftover {
    /// Returns the text's origin with line and column.
    pub fn place(&self) -> String {
        match (self.line, self.column) {
            (0, _) => self.origin.clone(),
            (line, None) => format!("{}:{line}", self.origin),
            (line, Some(column)) => format!("{}:{line}:{column}", self.origin),
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

/// A place in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// A line, from 1.
    Line(usize),
    /// A byte, in a text that may have all rules in one line.
    Byte(usize),
    /// No single place.
    Nowhere,
}

/// Returns the line and column, from 1, of a byte in a text.
pub fn locate(text: &str, byte: usize) -> (usize, usize) {
    let before = text.get(..byte).unwrap_or(text);
    let line = 1 + before.matches('\n').count();
    let start = before.rfind('\n').map_or(0, |end| end + 1);
    (line, before.len() - start + 1)
}

/// Collects lines that were not understood.
#[derive(Debug, Default)]
pub struct Leftovers {
    origin: String,
    listed: Vec<(At, Leftover)>,
    more: usize,
}

impl Leftovers {
    /// Starts a text.
    pub fn begin(&mut self, origin: &str) {
        origin.clone_into(&mut self.origin);
    }

    /// Adds a line.
    pub fn add(&mut self, at: At, text: &str, why: impl Into<String>) {
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
        let line = if let At::Line(line) = at { line } else { 0 };
        let leftover = Leftover {
            origin: self.origin.clone(),
            line,
            column: None,
            text: shown(text),
            why: shown(&why.into()),
        };
        self.listed.push((at, leftover));
    }

    /// Converts byte places in a text to lines and columns.
    pub fn locate(&mut self, text: &str) {
        let (mut byte, mut line, mut start) = (0, 1, 0);
        let of_text = self.listed.iter_mut();
        let mut open: Vec<_> = of_text
            .filter_map(|(at, leftover)| match *at {
                At::Byte(byte) => {
                    *at = At::Nowhere;
                    Some((byte, leftover))
                }
                _ => None,
            })
            .collect();
        open.sort_by_key(|(byte, _)| *byte);
        for (at, leftover) in open {
            let passed = text.get(byte..at).unwrap_or_default();
            line += passed.bytes().filter(|byte| *byte == b'\n').count();
            if let Some(end) = passed.rfind('\n') {
                start = byte + end + 1;
            }
            byte = at.max(byte);
            (leftover.line, leftover.column) = (line, Some(byte - start + 1));
        }
    }

    /// Returns the listed lines sorted by place, and the number of further lines.
    pub fn finish(self) -> (Vec<Leftover>, usize) {
        let mut all: Vec<Leftover> = self
            .listed
            .into_iter()
            .map(|(_, leftover)| leftover)
            .collect();
        all.sort_by(|a, b| (&a.origin, a.line, a.column).cmp(&(&b.origin, b.line, b.column)));
        (all, self.more)
    }
}
