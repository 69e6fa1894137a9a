//! Brings rules of every origin into one form. Reads the text of `iptables-save` and of `nft list ruleset` into tables
//! of rules, with their jumps, their effects on packets, and the signs of their owners. Pure; borrows from the text.

mod listed;
mod saved;

use std::{borrow::Cow, collections::BTreeMap};

use ipnet::IpNet;
use serde::{Serialize, Serializer};

use crate::text::{
    printable,
    tree::{self, Key, Part},
};

/// A text with rules.
#[derive(Clone, Copy, Debug)]
#[expect(
    clippy::struct_field_names,
    reason = "a text is made of its text, and where it is from"
)]
pub struct Text<'a> {
    /// Name of the origin, for messages: `iptables-nft`, `nft`.
    pub origin: &'a str,
    /// The form.
    pub form: Form,
    /// The text.
    pub text: &'a str,
}

/// The form of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The output of `iptables-save`.
    Saved,
    /// The output of `nft list ruleset`.
    Nft,
}

impl Form {
    /// Determines a text's form from the first line that is not empty and not a comment.
    pub fn of(text: &str) -> Self {
        let first = text
            .lines()
            .map(str::trim)
            .find(|line| !line.is_empty() && !line.starts_with('#'));
        match first {
            Some(line) if line.starts_with("table ") => Self::Nft,
            _ => Self::Saved,
        }
    }
}

/// A line of a text.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Line<'a> {
    /// The text's origin and the table: `iptables-nft nat`.
    pub table: String,
    /// The line's number in the program's output, from 1.
    #[serde(rename = "line")]
    pub number: usize,
    /// The rule, with its chain.
    #[serde(serialize_with = "for_a_terminal")]
    pub text: Cow<'a, str>,
}

/// A line that was not understood.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unread<'a> {
    /// The line.
    #[serde(flatten)]
    pub line: Line<'a>,
    /// The reason.
    pub why: String,
    /// Whether the line is a rule of which only the target is unknown.
    #[serde(skip)]
    pub is_rule: bool,
}

fn for_a_terminal<S: Serializer>(text: &str, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&printable(text))
}

/// A table.
#[derive(Debug)]
pub struct Table<'a> {
    /// The origin of the table's text.
    pub origin: &'a str,
    /// The name, with the family unless the origin implies it: `nat`, `inet firewalld`.
    pub name: String,
    /// The name alone, if the table is a native table of nf_tables, which iptables does not know.
    pub native: Option<&'a str>,
    /// The chains.
    pub chains: BTreeMap<&'a str, Chain>,
    /// The rules, in their order.
    pub rules: Vec<Rule<'a>>,
    /// For each named map, the chains and effects of its verdicts.
    maps: BTreeMap<&'a str, (Vec<&'a str>, Effects)>,
}

/// A chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// The hook, if it is a base chain: `forward`.
    pub hook: Option<String>,
    /// The number of the line with the policy, if the policy is drop.
    pub drops: Option<usize>,
}

/// The effects of a rule on a packet, besides an accept verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Effects {
    /// Drops or rejects the packet, or asks another component for the verdict.
    pub refuses: bool,
    /// Changes the destination.
    pub translates: bool,
    /// Exempts the packet from conntrack.
    pub untracks: bool,
}

/// Returns true if all addresses of a destination are loopback addresses.
fn is_loopback(destination: &str) -> bool {
    let net = tree::net(destination);
    net.is_some_and(|net| match net {
        IpNet::V4(net) => net.network().is_loopback() && net.prefix_len() >= 8,
        IpNet::V6(net) => net.network().is_loopback() && net.prefix_len() == 128,
    })
}

/// Returns true if a destination is a link-local address.
fn is_link_local(destination: &str) -> bool {
    destination.starts_with("169.254.") || destination.starts_with("fe80:")
}

impl Effects {
    fn or(self, other: Self) -> Self {
        Self {
            refuses: self.refuses || other.refuses,
            translates: self.translates || other.translates,
            untracks: self.untracks || other.untracks,
        }
    }
}

/// A rule.
#[derive(Debug, Default)]
pub struct Rule<'a> {
    /// The line's number.
    pub line: usize,
    /// The chain.
    pub chain: &'a str,
    /// The text of the rule.
    pub text: Cow<'a, str>,
    /// Chains that the rule jumps to.
    pub jumps: Vec<&'a str>,
    /// The effects.
    pub effects: Effects,
    /// The comments.
    pub comments: Vec<Cow<'a, str>>,
    /// Sets and maps that the rule refers to.
    pub sets: Vec<&'a str>,
    /// Marks that the rule matches, each with its mask. Excluded marks (`!`) are not among them.
    pub asks: Vec<(u32, u32)>,
    /// All marks in the rule, including the marks that it sets.
    pub marks: Vec<u32>,
    /// Interfaces that the rule names.
    pub interfaces: Vec<&'a str>,
    /// Local ports that the rule redirects to.
    pub to_ports: Vec<u16>,
    /// Whether the rule matches only packets to loopback.
    pub to_loopback: bool,
    /// Whether the rule matches only packets to one destination that is not link-local.
    pub to_one: bool,
}

/// Targets of iptables that have none of the [`Effects`] (`extensions/lib*t_*.c` of iptables 1.8).
const HARMLESS: &[&str] = &[
    "ACCEPT",
    "AUDIT",
    "CHECKSUM",
    "CLASSIFY",
    "CONNMARK",
    "CONNSECMARK",
    "CT",
    "DSCP",
    "ECN",
    "HL",
    "HMARK",
    "IDLETIMER",
    "LED",
    "LOG",
    "MARK",
    "MASQUERADE",
    "NFLOG",
    "RATEEST",
    "RETURN",
    "SECMARK",
    "SET",
    "SNAT",
    "SNPT",
    "TCPMSS",
    "TCPOPTSTRIP",
    "TEE",
    "TOS",
    "TRACE",
    "TTL",
    "ULOG",
];
const REFUSING: &[&str] = &["DROP", "REJECT", "QUEUE", "NFQUEUE", "SYNPROXY", "TARPIT"];
const TRANSLATING: &[&str] = &["DNAT", "REDIRECT", "TPROXY", "NETMAP", "CLUSTERIP", "DNPT"];

impl<'a> Rule<'a> {
    /// Builds a rule from its parts.
    fn of(
        line: usize,
        chain: &'a str,
        text: String,
        parts: impl IntoIterator<Item = Part<'a>>,
    ) -> Self {
        let mut rule = Self {
            line,
            chain,
            text: text.into(),
            ..Self::default()
        };
        for part in parts {
            let (not, plain) = (part.not, part.plain());
            let value = &*part.value;
            match part.key {
                Key::Target if REFUSING.contains(&value) => rule.effects.refuses = true,
                Key::Target if TRANSLATING.contains(&value) => rule.effects.translates = true,
                Key::Target if value == "NOTRACK" => rule.effects.untracks = true,
                Key::Target if HARMLESS.contains(&value) => {}
                Key::Target | Key::Chain => {
                    rule.jumps.extend(plain.filter(|to| !to.is_empty()));
                }
                Key::Destination => {
                    let mut of_set = value.split(',');
                    rule.to_loopback |= !not && of_set.clone().all(is_loopback);
                    rule.to_one |= !not && of_set.any(|to| !is_link_local(to));
                }
                Key::Set => rule.sets.extend(plain),
                Key::In | Key::Out => rule.interfaces.extend(plain),
                Key::ToPort => rule.to_ports.extend(value.parse::<u16>().ok()),
                Key::Mark | Key::ConnMark => {
                    let mark = tree::mark(value);
                    rule.marks.extend(mark.map(|(value, _)| value));
                    rule.asks.extend(mark.filter(|_| !not));
                }
                Key::SetMark | Key::Bits => {
                    rule.marks.extend(tree::mark(value).map(|(value, _)| value));
                }
                Key::Comment => rule.comments.push(part.value),
                Key::Other if part.name == "--notrack" => rule.effects.untracks = true,
                _ => {}
            }
        }
        rule
    }
}

impl<'a> Table<'a> {
    fn new(origin: &'a str, name: String, native: Option<&'a str>) -> Self {
        Self {
            origin,
            name,
            native,
            chains: BTreeMap::new(),
            rules: Vec::new(),
            maps: BTreeMap::new(),
        }
    }

    /// Returns the table's name for messages: `iptables-nft nat`.
    pub fn title(&self) -> String {
        format!("{} {}", self.origin, self.name)
    }

    /// Returns a line of the table.
    pub fn line(&self, number: usize, text: Cow<'a, str>) -> Line<'a> {
        let table = self.title();
        Line {
            table,
            number,
            text,
        }
    }

    /// Returns, for each chain, the hooks from which packets can reach it.
    pub fn hooks(&self) -> BTreeMap<&'a str, Vec<String>> {
        let mut jumps: BTreeMap<&str, Vec<&'a str>> = BTreeMap::new();
        for rule in &self.rules {
            jumps.entry(rule.chain).or_default().extend(&rule.jumps);
        }
        let mut found: BTreeMap<&'a str, Vec<String>> = BTreeMap::new();
        for (base, hook) in self
            .chains
            .iter()
            .filter_map(|(name, c)| Some((*name, c.hook.as_ref()?)))
        {
            let mut open = vec![base];
            while let Some(chain) = open.pop() {
                let hooks = found.entry(chain).or_default();
                if !hooks.contains(hook) {
                    hooks.push(hook.clone());
                    open.extend(jumps.get(chain).into_iter().flatten());
                }
            }
        }
        found
    }
}

/// Reads texts. Returns their tables and the lines that were not understood.
pub fn read<'a>(texts: &[Text<'a>]) -> (Vec<Table<'a>>, Vec<Unread<'a>>) {
    let (mut tables, mut unread) = (Vec::new(), Vec::new());
    for text in texts {
        let first = tables.len();
        match text.form {
            Form::Saved => saved::read(text, &mut tables, &mut unread),
            Form::Nft => listed::read(text, &mut tables, &mut unread),
        }
        for table in &mut tables[first..] {
            finish(table, &mut unread);
        }
    }
    (tables, unread)
}

/// Adds the verdicts of maps to the rules that use them, and finds jumps to chains that do not exist.
fn finish<'a>(table: &mut Table<'a>, unread: &mut Vec<Unread<'a>>) {
    for rule in &mut table.rules {
        for (verdicts, effects) in rule.sets.iter().filter_map(|set| table.maps.get(set)) {
            rule.jumps.extend(verdicts);
            rule.effects = rule.effects.or(*effects);
        }
    }
    for rule in &table.rules {
        if let Some(to) = rule.jumps.iter().find(|to| !table.chains.contains_key(*to)) {
            let line = table.line(rule.line, rule.text.clone());
            let why = format!("{to} is neither a chain of the table nor a target that is known");
            unread.push(Unread {
                line,
                why,
                is_rule: true,
            });
        }
    }
}
