//! The position of our programs among other programs on an interface.

use std::{fmt, str::FromStr};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The position of our programs among other programs on an interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String")]
pub enum Order {
    /// Before all others.
    #[default]
    First,
    /// After all others.
    Last,
    /// Right before another program; before all others while that program is absent.
    Before(Anchor),
    /// Right after another program; after all others while that program is absent.
    After(Anchor),
}

/// Another program on an interface. TCX only, because the filters of clsact are ordered by preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// The program by its ID (`bpftool prog show`).
    Program(u32),
    /// The program by its link's ID (`bpftool link show`).
    Link(u32),
    /// The first program with this name.
    Name(Name),
}

/// A program's name in the kernel's form: at most fifteen bytes, then zeros.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Name([u8; 16]);

impl Name {
    /// Returns the name; `None` if it is empty, too long or has a colon.
    pub fn new(name: &str) -> Option<Self> {
        let mut bytes = [0; 16];
        bytes[..15]
            .get_mut(..name.len())?
            .copy_from_slice(name.as_bytes());
        (!name.is_empty() && !name.contains(':')).then_some(Self(bytes))
    }

    /// The name without the zeros.
    pub fn text(&self) -> &str {
        let end = self.0.iter().position(|byte| *byte == 0);
        std::str::from_utf8(&self.0[..end.unwrap_or_default()]).unwrap_or_default()
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.text().fmt(f)
    }
}

impl fmt::Display for Anchor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Program(id) => write!(f, "program:{id}"),
            Self::Link(id) => write!(f, "link:{id}"),
            Self::Name(name) => f.write_str(name.text()),
        }
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::First => f.write_str("first"),
            Self::Last => f.write_str("last"),
            Self::Before(anchor) => write!(f, "before:{anchor}"),
            Self::After(anchor) => write!(f, "after:{anchor}"),
        }
    }
}

impl FromStr for Order {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wanted = || {
            format!(
                "`{text}` is not an order; expected `first`, `last`, `before:ANCHOR` or `after:ANCHOR`. ANCHOR is the \
                 name of a program (at most 15 bytes), `program:ID` or `link:ID`"
            )
        };
        let anchor = |of: &str| match of.split_once(':') {
            Some(("program", id)) => id.parse().ok().map(Anchor::Program),
            Some(("link", id)) => id.parse().ok().map(Anchor::Link),
            _ => Name::new(of).map(Anchor::Name),
        };
        match text.split_once(':') {
            None if text == "first" => Ok(Self::First),
            None if text == "last" => Ok(Self::Last),
            Some(("before", of)) => anchor(of).map(Self::Before).ok_or_else(wanted),
            Some(("after", of)) => anchor(of).map(Self::After).ok_or_else(wanted),
            _ => Err(wanted()),
        }
    }
}

impl TryFrom<String> for Order {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Order> for String {
    fn from(order: Order) -> Self {
        order.to_string()
    }
}

impl Order {
    /// Returns the program that the order names.
    pub fn anchor(self) -> Option<Anchor> {
        match self {
            Self::First | Self::Last => None,
            Self::Before(anchor) | Self::After(anchor) => Some(anchor),
        }
    }

    /// Tells if the order names another program. Such an order needs TCX.
    pub fn is_relative(self) -> bool {
        self.anchor().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_as_they_are_written() {
        for text in [
            "first",
            "last",
            "before:cil_from_netdev",
            "after:program:17",
            "before:link:3",
        ] {
            assert_eq!(text.parse::<Order>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "firstly",
            "before:",
            "before",
            "after:link:x",
            "after:a:b",
            "before:more_than_fifteen",
        ] {
            assert!(text.parse::<Order>().is_err(), "{text}");
        }
    }
}
