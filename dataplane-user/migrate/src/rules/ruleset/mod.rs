//! Rules of every origin in one form: the text of `iptables-save` and of `nft list ruleset` becomes tables of rules that say
//! where packets go on, what is done to them, and by what an owner can be told. Pure; borrows from the text.

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
    /// How people call its origin: `iptables-nft`, `nft`.
    pub origin: &'a str,
    /// Its form.
    pub form: Form,
    /// The text.
    pub text: &'a str,
}

/// The form of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Of `iptables-save`.
    Saved,
    /// Of `nft list ruleset`.
    Nft,
}

impl Form {
    /// The form of a text, by its first line that says something.
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
    /// The line's number in what the program printed, from 1.
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
    /// Why.
    pub why: String,
    /// Whether the line is a rule, of which only the target is not known.
    #[serde(skip)]
    pub is_rule: bool,
}

fn for_a_terminal<S: Serializer>(text: &str, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&printable(text))
}

/// A table.
#[derive(Debug)]
pub struct Table<'a> {
    /// The origin of its text.
    pub origin: &'a str,
    /// With its family, where the origin does not tell: `nat`, `inet firewalld`.
    pub name: String,
    /// Its name alone, if it is a table of nf_tables that iptables does not know.
    pub native: Option<&'a str>,
    /// Its chains.
    pub chains: BTreeMap<&'a str, Chain>,
    /// Its rules, in their order.
    pub rules: Vec<Rule<'a>>,
    /// Where verdicts of maps with a name lead.
    maps: BTreeMap<&'a str, (Vec<&'a str>, Effects)>,
}

/// A chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// The hook that it is at: `forward`.
    pub hook: Option<String>,
    /// Whether it drops what no rule decides on, and on which line that is said.
    pub drops: Option<usize>,
}

/// What a rule does with a packet, besides letting it pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Effects {
    /// Drops or refuses it, or has somebody decide who may.
    pub refuses: bool,
    /// Gives it another destination.
    pub translates: bool,
    /// Keeps it from conntrack.
    pub untracks: bool,
}

/// Whether a destination is loopback's.
fn is_loopback(destination: &str) -> bool {
    let net = tree::net(destination);
    net.is_some_and(|net| match net {
        IpNet::V4(net) => net.network().is_loopback() && net.prefix_len() >= 8,
        IpNet::V6(net) => net.network().is_loopback() && net.prefix_len() == 128,
    })
}

/// Whether a destination is a link-local one.
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
    /// The number of its line.
    pub line: usize,
    /// Its chain.
    pub chain: &'a str,
    /// As it is written.
    pub text: Cow<'a, str>,
    /// Chains that it leads to.
    pub jumps: Vec<&'a str>,
    /// What it does.
    pub effects: Effects,
    /// Its comments.
    pub comments: Vec<Cow<'a, str>>,
    /// Sets that it asks.
    pub sets: Vec<&'a str>,
    /// Marks that it asks for, without those that it excludes, each with its mask.
    pub asks: Vec<(u32, u32)>,
    /// Marks of all kinds, also those that it sets.
    pub marks: Vec<u32>,
    /// Interfaces.
    pub interfaces: Vec<&'a str>,
    /// Ports of this host that it redirects to.
    pub to_ports: Vec<u16>,
    /// Whether it is for packets to loopback only.
    pub to_loopback: bool,
    /// Whether it is for packets to one destination that is not link-local.
    pub to_one: bool,
}

/// Targets of iptables without an effect that counts here (`extensions/lib*t_*.c` of iptables 1.8).
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
    /// A rule by its parts.
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

    /// How people call it: `iptables-nft nat`.
    pub fn title(&self) -> String {
        format!("{} {}", self.origin, self.name)
    }

    /// A line of it.
    pub fn line(&self, number: usize, text: Cow<'a, str>) -> Line<'a> {
        let table = self.title();
        Line {
            table,
            number,
            text,
        }
    }

    /// The hooks from which packets come to each chain.
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

/// Reads texts.
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

/// Follows verdicts of maps; and finds jumps that lead nowhere.
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
