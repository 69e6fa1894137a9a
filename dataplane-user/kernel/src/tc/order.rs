//! The position of our programs among other programs on an interface.

use std::{fmt, io, os::fd::AsFd as _, str::FromStr};

use aya_obj::generated::bpf_attach_type;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::sys::{self, Chain, Place};

/// Number of attempts to attach to a chain that changes meanwhile.
const ATTEMPTS: usize = 8;

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
    fn new(name: &str) -> Option<Self> {
        let mut bytes = [0; 16];
        bytes[..15]
            .get_mut(..name.len())?
            .copy_from_slice(name.as_bytes());
        (!name.is_empty() && !name.contains(':')).then_some(Self(bytes))
    }

    fn text(&self) -> &str {
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
    fn anchor(self) -> Option<Anchor> {
        match self {
            Self::First | Self::Last => None,
            Self::Before(anchor) | Self::After(anchor) => Some(anchor),
        }
    }

    /// Tells if the order names another program. Such an order needs TCX.
    pub fn is_relative(self) -> bool {
        self.anchor().is_some()
    }

    /// Tells if our program is on the wrong side of the program that the order names. Always false for `First` and
    /// `Last`: a program that is attached later may go before or after ours.
    pub fn is_broken(self, own: u32, chain: &Chain) -> bool {
        let place = |program: u32| chain.programs.iter().position(|id| *id == program);
        let anchor = self
            .anchor()
            .and_then(|anchor| position(anchor, chain, name_of));
        match (self, place(own), anchor) {
            (Self::Before(_), Some(own), Some(anchor)) => own > anchor,
            (Self::After(_), Some(own), Some(anchor)) => own < anchor,
            _ => false,
        }
    }

    fn place(self, chain: &Chain) -> Place {
        let before = matches!(self, Self::First | Self::Before(_));
        let at = self
            .anchor()
            .and_then(|anchor| position(anchor, chain, name_of));
        let relative = at.and_then(|at| chain.programs.get(at)).copied();
        Place {
            before,
            relative,
            // Whatever else changes, at the ends it is right.
            revision: relative.map_or(0, |_| chain.revision),
        }
    }

    /// Attaches a program at this position. If the chain changes meanwhile, reads the chain again, because a position is
    /// valid only for the revision of the chain that it was found in.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn attach(
        self,
        program: std::os::fd::BorrowedFd<'_>,
        ifindex: u32,
        attach_type: bpf_attach_type,
    ) -> io::Result<std::os::fd::OwnedFd> {
        let mut attempts = ATTEMPTS;
        loop {
            attempts -= 1;
            let chain = sys::tcx_chain(ifindex, attach_type)?;
            match sys::link_create_tcx_at(program, ifindex, attach_type, self.place(&chain)) {
                Err(error)
                    if attempts > 0
                        && matches!(error.raw_os_error(), Some(libc::ESTALE | libc::ENOENT)) => {}
                result => return result,
            }
        }
    }
}

/// Where in a chain a program is.
fn position(
    anchor: Anchor,
    chain: &Chain,
    name_of: impl Fn(u32) -> Option<String>,
) -> Option<usize> {
    match anchor {
        Anchor::Program(id) => chain.programs.iter().position(|program| *program == id),
        Anchor::Link(id) => chain.links.iter().position(|link| *link == id),
        Anchor::Name(name) => chain
            .programs
            .iter()
            .position(|program| name_of(*program).as_deref() == Some(name.text())),
    }
}

fn name_of(program: u32) -> Option<String> {
    let program = sys::prog_by_id(program).ok()?;
    Some(sys::prog_info(program.as_fd()).ok()?.name)
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

    #[test]
    fn a_place_is_true_of_a_revision() {
        let chain = Chain {
            programs: vec![7, 8, 9],
            links: vec![0, 80, 90],
            revision: 5,
        };
        let at = |anchor| position(anchor, &chain, |id| Some(format!("program{id}")));
        assert_eq!(at(Anchor::Program(8)), Some(1));
        assert_eq!(at(Anchor::Link(90)), Some(2));
        assert_eq!(at(Anchor::Name(Name::new("program9").unwrap())), Some(2));
        assert_eq!(at(Anchor::Program(1)), None);
        let place = |order: Order| order.place(&chain);
        let before = place(Order::Before(Anchor::Program(8)));
        assert_eq!(
            (before.before, before.relative, before.revision),
            (true, Some(8), 5)
        );
        let after = place(Order::After(Anchor::Link(7)));
        assert_eq!(
            (after.before, after.relative, after.revision),
            (false, None, 0)
        );
        let is_broken = |order: Order, own| order.is_broken(own, &chain);
        assert!(is_broken(Order::Before(Anchor::Program(7)), 8));
        assert!(!is_broken(Order::Before(Anchor::Program(9)), 8));
        assert!(is_broken(Order::After(Anchor::Program(9)), 8));
        assert!(!is_broken(Order::After(Anchor::Program(1)), 8));
        assert!(!is_broken(Order::First, 9));
    }
}
