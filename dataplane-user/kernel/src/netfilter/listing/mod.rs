//! A table of nf_tables in the words of `nft list table`, read by netlink: nodes and images have no `nft`. What it says of a rule
//! is all of the rule; a rule with an expression that it does not know becomes a line that begins with `#`, as nft has it, which
//! readers list as not understood.
//!
//! It leaves out what rules remember (elements of sets that rules fill for a time), flow tables and stateful objects. Elements are sorted.

mod actions;
mod expressions;
mod keys;
mod messages;
mod sets;
mod types;

use std::{collections::BTreeMap, fmt::Write as _, io};

use expressions::Reader;
use messages::{content, number, text};
use netlink_sys::protocols::NETLINK_NETFILTER;
use sets::Set;

use super::nf_tables::{
    GET_CHAIN, GET_ELEMENTS, GET_RULE, GET_SET, GET_TABLE, HEADER, TABLES, TRIES, about, number_of,
};
use crate::netlink::{Netlink, attributes};

/// `NFT_MSG_GETGEN`.
const GET_GENERATION: u16 = TABLES | 0x10;

/// A base chain's priorities with a name, and the hook that alone has the name (`std_prios` of nft).
const PRIORITIES: [(i32, &str, Option<&str>); 6] = [
    (-300, "raw", None),
    (-150, "mangle", None),
    (-100, "dstnat", Some("prerouting")),
    (0, "filter", None),
    (50, "security", None),
    (100, "srcnat", Some("postrouting")),
];

/// The most bytes that are read of a table's messages: a pod with CAP_NET_ADMIN may have made sets of any size.
const LIMIT: usize = 256 * 1024 * 1024;

/// `NFPROTO_BRIDGE`.
const BRIDGE: u8 = 7;

/// What a name must not have, so that a text with it is read as it was meant.
const ODD: [char; 5] = ['"', '{', '}', ';', ','];

/// The generation of all rules: another after each change.
fn generation(netlink: &mut Netlink) -> io::Result<Option<u32>> {
    let mut generation = None;
    netlink.get(GET_GENERATION, &[0; HEADER], |message| {
        let rest = message.get(HEADER..).unwrap_or_default();
        generation = content(rest, 1).and_then(number);
    })?;
    Ok(generation)
}

/// A table of a family (`ip`, `inet`…) as text.
///
/// # Errors
///
/// As [`list`]'s; `Interrupted` if rules change each time that they are read.
pub fn listed(family: &str, name: &str) -> io::Result<String> {
    let Some(number) = number_of(family) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let mut netlink = Netlink::open(NETLINK_NETFILTER)?;
    for _ in 1..TRIES {
        match list(&mut netlink, number, name) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // A set or a chain went meanwhile, or the table itself.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            listed => return listed,
        }
    }
    list(&mut netlink, number, name)
}

/// A table as text.
///
/// # Errors
///
/// [`io::ErrorKind::Interrupted`] if rules changed meanwhile, `NotFound` if there is no such table, `FileTooLarge` if it is larger
/// than [`LIMIT`], `InvalidData` if a name in it cannot be written.
fn list(netlink: &mut Netlink, family: u8, name: &str) -> io::Result<String> {
    let before = generation(netlink)?;
    let table = (family, name.to_owned());
    let mut listing = Listing::new(family, name)?;
    let mut found = false;
    netlink.dump(GET_TABLE, &about(&table, &[]), |message| {
        found |= listing.table(message);
    })?;
    if !found {
        return Err(io::ErrorKind::NotFound.into());
    }
    netlink.dump(GET_SET, &about(&table, &[(1, &table.1)]), |message| {
        listing.set(message);
    })?;
    let names: Vec<String> = listing
        .sets
        .values()
        .filter(|set| !set.remembers())
        .map(|set| set.name.clone())
        .collect();
    for name in names {
        let request = about(&table, &[(1, &table.1), (2, &name)]);
        netlink.dump(GET_ELEMENTS, &request, |message| {
            listing.elements(&name, message);
        })?;
    }
    listing.sets.values_mut().for_each(Set::sort);
    netlink.dump(GET_CHAIN, &about(&table, &[(1, &table.1)]), |message| {
        listing.chain(message);
    })?;
    listing.begin()?;
    let chains = std::mem::take(&mut listing.chains);
    for chain in &chains {
        listing.begin_chain(chain)?;
        // The kernel walks a list from its beginning for each datagram, so that one list of all rules takes time by the square.
        let request = about(&table, &[(1, &table.1), (2, &chain.name)]);
        netlink.dump(GET_RULE, &request, |message| listing.rule(message))?;
        listing.end_block();
    }
    if generation(netlink)? != before {
        return Err(io::ErrorKind::Interrupted.into());
    }
    if listing.size > LIMIT {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    Ok(listing.finish())
}

struct Chain {
    name: String,
    /// `type nat hook prerouting priority dstnat; policy accept;`
    base: Option<String>,
    comment: Option<String>,
}

/// A table, while it is read. Pure.
struct Listing {
    family: u8,
    name: String,
    comment: Option<String>,
    /// Whether its chains are not hooked in.
    is_dormant: bool,
    /// Bytes of the kernel's messages so far.
    size: usize,
    sets: BTreeMap<String, Set>,
    /// The sets' names in the kernel's order.
    order: Vec<String>,
    chains: Vec<Chain>,
    text: String,
}

impl Listing {
    fn new(family: u8, name: &str) -> io::Result<Self> {
        Ok(Self {
            family,
            name: checked(name)?.to_owned(),
            comment: None,
            is_dormant: false,
            size: 0,
            sets: BTreeMap::new(),
            order: Vec::new(),
            chains: Vec::new(),
            text: String::new(),
        })
    }

    /// The attributes of a message about this table, of which this one is the name of the table.
    fn ours<'m>(&self, message: &'m [u8], attribute: u16) -> Option<&'m [u8]> {
        let rest = message.get(HEADER..)?;
        let ours =
            message.first() == Some(&self.family) && text(content(rest, attribute)?) == self.name;
        ours.then_some(rest)
    }

    /// Takes a table's message; whether it is of this table.
    fn table(&mut self, message: &[u8]) -> bool {
        let Some(rest) = self.ours(message, 1) else {
            return false;
        };
        self.comment = comment(content(rest, 6).unwrap_or_default(), 0);
        // `NFT_TABLE_F_DORMANT`
        let flags = content(rest, 2).and_then(number);
        self.is_dormant = flags.is_some_and(|flags| flags & 1 != 0);
        true
    }

    /// Counts a message; whether there is room for it.
    fn takes(&mut self, message: &[u8]) -> bool {
        self.size = self.size.saturating_add(message.len());
        self.size <= LIMIT
    }

    fn set(&mut self, message: &[u8]) {
        if !self.takes(message) {
            return;
        }
        if let Some(set) = self.ours(message, 1).and_then(Set::of) {
            self.order.push(set.name.clone());
            self.sets.insert(set.name.clone(), set);
        }
    }

    fn elements(&mut self, set: &str, message: &[u8]) {
        if !self.takes(message) {
            return;
        }
        let Some(set) = self.sets.get_mut(set) else {
            return;
        };
        let rest = message.get(HEADER..).unwrap_or_default();
        for (_, element) in attributes(content(rest, 3).unwrap_or_default()) {
            set.add(element);
        }
    }

    fn chain(&mut self, message: &[u8]) {
        if !self.takes(message) {
            return;
        }
        let Some(rest) = self.ours(message, 1) else {
            return;
        };
        let Some(name) = content(rest, 3).map(text) else {
            return;
        };
        self.chains.push(Chain {
            name,
            base: base(self.family, rest),
            comment: comment(content(rest, 12).unwrap_or_default(), 0),
        });
    }

    /// Writes what stands before the chains.
    fn begin(&mut self) -> io::Result<()> {
        let family = super::nf_tables::family(self.family);
        let _ = writeln!(self.text, "table {family} {} {{", self.name);
        if self.is_dormant {
            self.text.push_str("\tflags dormant\n");
        }
        if let Some(comment) = &self.comment {
            let _ = writeln!(self.text, "\tcomment \"{comment}\"");
        }
        for name in &self.order {
            if let Some(set) = self.sets.get(name).filter(|set| !set.is_anonymous()) {
                checked(name)?;
                set.write(&mut self.text);
            }
        }
        Ok(())
    }

    fn begin_chain(&mut self, chain: &Chain) -> io::Result<()> {
        let _ = writeln!(self.text, "\tchain {} {{", checked(&chain.name)?);
        if let Some(comment) = &chain.comment {
            let _ = writeln!(self.text, "\t\tcomment \"{comment}\"");
        }
        if let Some(base) = &chain.base {
            let _ = writeln!(self.text, "\t\t{base}");
        }
        Ok(())
    }

    /// Writes a rule.
    fn rule(&mut self, message: &[u8]) {
        if !self.takes(message) {
            return;
        }
        let rest = message.get(HEADER..).unwrap_or_default();
        let read = Reader::new(self.family, &self.sets).read(content(rest, 4).unwrap_or_default());
        let comment = comment(content(rest, 7).unwrap_or_default(), 0);
        let comment = comment.map(|comment| format!(" comment \"{comment}\""));
        let comment = comment.unwrap_or_default();
        let _ = match read {
            Ok(rule) => writeln!(self.text, "\t\t{}", format!("{rule}{comment}").trim_start()),
            Err(said) => writeln!(self.text, "\t\t# {said}{comment}"),
        };
    }

    fn end_block(&mut self) {
        self.text.push_str("\t}\n\n");
    }

    fn finish(mut self) -> String {
        while self.text.ends_with("\n\n") {
            self.text.pop();
        }
        self.text.push_str("}\n");
        self.text
    }
}

/// How a chain is hooked in, if it is.
fn base(family: u8, chain: &[u8]) -> Option<String> {
    let hook = content(chain, 4)?;
    let name = super::nf_tables::hook(family, chain)?;
    let priority = content(hook, 2).and_then(number)?.cast_signed();
    // The names of bridges' priorities are others.
    let mut named = PRIORITIES.iter().filter(|_| family != BRIDGE);
    let near =
        named.find(|(of, _, at)| at.is_none_or(|at| at == name) && priority.abs_diff(*of) <= 10);
    let priority = match near {
        Some((of, word, _)) if *of == priority => (*word).to_owned(),
        Some((of, word, _)) if priority > *of => format!("{word} + {}", priority - of),
        Some((of, word, _)) => format!("{word} - {}", of - priority),
        None => priority.to_string(),
    };
    let kind = content(chain, 7).map(text).unwrap_or_default();
    let device = content(hook, 3).map(|name| format!(" device \"{}\"", types::plain(&text(name))));
    let device = device.unwrap_or_default();
    let policy = match content(chain, 5).and_then(number) {
        Some(0) => "drop",
        _ => "accept",
    };
    let kind = types::plain(&kind);
    Some(format!(
        "type {kind} hook {name}{device} priority {priority}; policy {policy};"
    ))
}

/// A name that can be written.
fn checked(name: &str) -> io::Result<&str> {
    let odd = |c: char| c.is_whitespace() || c.is_control() || ODD.contains(&c);
    if name.is_empty() || name.contains(odd) || name.starts_with('#') {
        let what = format!("a name in it cannot be written: {name:?}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    Ok(name)
}

/// What user space left with an object under a number: a type, a length and so many bytes, again and again.
fn user(data: &[u8], wanted: u8) -> Option<&[u8]> {
    let mut rest = data;
    while let [kind, length, after @ ..] = rest {
        let value = after.get(..usize::from(*length))?;
        if *kind == wanted {
            return Some(value);
        }
        rest = &after[usize::from(*length)..];
    }
    None
}

/// A comment that user space left with an object.
fn comment(data: &[u8], kind: u8) -> Option<String> {
    user(data, kind).map(|comment| types::plain(&text(comment)))
}

/// A verdict in the words of nft, if these data have one.
fn verdict(data: &[u8]) -> Option<String> {
    let verdict = content(data, 2)?;
    let chain = || content(verdict, 2).map(text);
    let named =
        |word: &str, chain: String| checked(&chain).is_ok().then(|| format!("{word} {chain}"));
    match content(verdict, 1).and_then(number)?.cast_signed() {
        -1 => Some("continue".to_owned()),
        -3 => named("jump", chain()?),
        -4 => named("goto", chain()?),
        -5 => Some("return".to_owned()),
        0 => Some("drop".to_owned()),
        1 => Some("accept".to_owned()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::netlink::attribute;

    fn string(kind: u16, text: &str) -> Vec<u8> {
        attribute(kind, &[text.as_bytes(), &[0]].concat())
    }

    fn expression(name: &str, content: &[u8]) -> Vec<u8> {
        attribute(1, &[string(1, name), attribute(2, content)].concat())
    }

    fn word(kind: u16, number: u32) -> Vec<u8> {
        attribute(kind, &number.to_be_bytes())
    }

    fn read(family: u8, expressions: &[Vec<u8>]) -> Result<String, String> {
        Reader::new(family, &BTreeMap::new()).read(&expressions.concat())
    }

    /// A register of four words is the same as the first of its words, and a number in this machine's order stays one.
    #[test]
    fn registers_have_two_names() {
        let load = |register| expression("meta", &[word(1, register), word(2, 3)].concat());
        let value = attribute(3, &attribute(1, &0x539_u32.to_ne_bytes()));
        let compare = |register| {
            expression(
                "cmp",
                &[word(1, register), word(2, 1), value.clone()].concat(),
            )
        };
        for (to, from) in [(1, 8), (9, 9), (2, 12), (4, 20)] {
            let said = read(2, &[load(to), compare(from)]);
            assert_eq!(said.as_deref(), Ok("meta mark != 0x00000539"));
        }
        // Nothing was loaded there.
        assert_eq!(read(2, &[load(1), compare(9)]), Err("[cmp]".to_owned()));
        assert_eq!(read(2, &[load(24)]), Err("[meta]".to_owned()));
    }

    #[test]
    fn names_that_would_be_read_otherwise_are_errors() {
        for name in ["", "a b", "a{", "x\"", "#x", "a\n}", "a,b", "a;"] {
            assert!(checked(name).is_err(), "{name:?}");
            let jump = [word(1, (-3_i32).cast_unsigned()), string(2, name)].concat();
            assert_eq!(verdict(&attribute(2, &jump)), None, "{name:?}");
        }
        assert!(checked("service-BWYT44RG-bench/extip/tcp/p__10.0.0.1/80").is_ok());
        let remark = [&[0, 6][..], b"a\"b\n}\0"].concat();
        assert_eq!(comment(&remark, 0).as_deref(), Some("a?b?}"));
    }

    const NAMES: [&str; 16] = [
        "meta",
        "ct",
        "payload",
        "fib",
        "numgen",
        "immediate",
        "bitwise",
        "cmp",
        "range",
        "lookup",
        "dynset",
        "nat",
        "masq",
        "tproxy",
        "reject",
        "log",
    ];

    fn any_attributes() -> impl Strategy<Value = Vec<u8>> {
        let leaf = (0_u16..12, prop::collection::vec(any::<u8>(), 0..20))
            .prop_map(|(kind, content)| attribute(kind, &content));
        let number = (0_u16..12, prop_oneof![0_u32..25, any::<u32>()])
            .prop_map(|(kind, number)| word(kind, number));
        prop_oneof![leaf, number].prop_recursive(3, 20, 5, |inner| {
            (0_u16..12, prop::collection::vec(inner, 0..5))
                .prop_map(|(kind, all)| attribute(kind, &all.concat()))
        })
    }

    proptest! {
        /// The kernel's messages are trusted, but a reader that ends the agent is no answer to a surprise. A rule is one line.
        #[test]
        fn any_expressions_and_sets_are_read(
            family in 0_u8..11,
            all in prop::collection::vec((0_usize..NAMES.len(), prop::collection::vec(any_attributes(), 0..6)), 0..8),
            set in prop::collection::vec(any_attributes(), 0..10),
            bytes in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            let mut sets = BTreeMap::new();
            let about = [string(2, "s"), set.concat()].concat();
            if let Some(mut set) = Set::of(&about) {
                for element in [&bytes[..], &about, &all.first().map(|(_, a)| a.concat()).unwrap_or_default()] {
                    set.add(element);
                }
                set.sort();
                set.write(&mut String::new());
                sets.insert("s".to_owned(), set);
            }
            let expressions: Vec<u8> = all.iter().flat_map(|(name, a)| expression(NAMES[*name], &a.concat())).collect();
            for expressions in [&expressions[..], &bytes] {
                let (Ok(rule) | Err(rule)) = Reader::new(family, &sets).read(expressions);
                prop_assert!(!rule.contains('\n'), "{rule:?}");
            }
        }
    }
}
