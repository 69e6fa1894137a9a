//! Rules of every origin in one form: the text of `iptables-save` and of `nft list ruleset` becomes tables of rules that say
//! where packets go on, what is done to them, and by what an owner can be told. Pure; borrows from the text.

use std::{borrow::Cow, collections::BTreeMap};

use crate::iptables::{self, Entry, Rule as Saved, Word, nft};

/// A text with rules.
#[derive(Clone, Copy, Debug)]
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

/// A line of a text.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Line<'a> {
    /// The text's origin and the table: `iptables-nft nat`.
    pub table: String,
    /// The line's number, from 1.
    pub number: usize,
    /// The rule, with its chain.
    pub text: Cow<'a, str>,
}

/// A line that was not understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unread<'a> {
    /// The line.
    pub line: Line<'a>,
    /// Why.
    pub why: String,
    /// Whether the line is a rule, of which only the target is not known.
    pub is_rule: bool,
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
}

/// Whether a destination is loopback's.
fn is_loopback(destination: &str) -> bool {
    destination.starts_with("127.") || matches!(destination, "::1" | "::1/128")
}

impl Effects {
    fn or(self, other: Self) -> Self {
        Self {
            refuses: self.refuses || other.refuses,
            translates: self.translates || other.translates,
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
    /// Its comment.
    pub comment: Option<Cow<'a, str>>,
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
            Form::Saved => saved(text, &mut tables, &mut unread),
            Form::Nft => listed(text, &mut tables, &mut unread),
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

/// The text of `iptables-save`.
fn saved<'a>(text: &Text<'a>, tables: &mut Vec<Table<'a>>, unread: &mut Vec<Unread<'a>>) {
    let first = tables.len();
    for entry in iptables::entries(text.text) {
        match (entry, tables[first..].last_mut()) {
            (Ok(Entry::Table(name)), _) => {
                tables.push(Table::new(text.origin, name.to_owned(), None));
            }
            (
                Ok(Entry::Chain {
                    line, name, policy, ..
                }),
                Some(table),
            ) => {
                let chain = table.chains.entry(name).or_default();
                chain.hook = hook(name);
                chain.drops = (policy == Some("DROP")).then_some(line);
            }
            (Ok(Entry::Rule(rule)), Some(table)) => {
                // Not every text names the chains that are built in.
                if let Some(hook) = hook(rule.chain) {
                    table.chains.entry(rule.chain).or_default().hook = Some(hook);
                }
                table.rules.push(of_saved(rule));
            }
            (Err(error), table) => {
                let line = text.text.lines().nth(error.line - 1).unwrap_or_default();
                let table = table.map_or(text.origin.to_owned(), |table| table.title());
                unread.push(Unread {
                    line: Line {
                        table,
                        number: error.line,
                        text: line.trim().into(),
                    },
                    why: error.what.to_owned(),
                    is_rule: false,
                });
            }
            (Ok(_), _) => {}
        }
    }
}

/// The hook of a chain that is built in.
fn hook(chain: &str) -> Option<String> {
    let built_in = ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"];
    built_in
        .contains(&chain)
        .then(|| chain.to_ascii_lowercase())
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
    "NOTRACK",
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

fn of_saved(saved: Saved<'_>) -> Rule<'_> {
    let mut rule = Rule {
        line: saved.line,
        chain: saved.chain,
        text: Saved {
            counters: None,
            ..saved
        }
        .to_string()
        .into(),
        ..Rule::default()
    };
    for option in saved.options() {
        let first = option.values.first();
        let raw = first.map(|word| word.raw);
        match option.name.unwrap_or_default() {
            "-j" | "--jump" | "-g" | "--goto" => match raw {
                Some(target) if REFUSING.contains(&target) => rule.effects.refuses = true,
                Some(target) if TRANSLATING.contains(&target) => rule.effects.translates = true,
                Some(target) if HARMLESS.contains(&target) => {}
                target => rule.jumps.extend(target),
            },
            "-d" | "--destination" => {
                rule.to_loopback = !option.negated && raw.is_some_and(is_loopback);
            }
            "--comment" => rule.comment = first.map(Word::text),
            "--match-set" => rule.sets.extend(raw),
            "-i" | "-o" | "--in-interface" | "--out-interface" => rule.interfaces.extend(raw),
            "--to-ports" | "--to-port" | "--on-port" => {
                rule.to_ports
                    .extend(raw.and_then(|port| port.parse::<u16>().ok()));
            }
            "--mark" => {
                let mark = raw.and_then(mark);
                rule.marks.extend(mark.map(|(value, _)| value));
                rule.asks.extend(mark.filter(|_| !option.negated));
            }
            "--set-mark" | "--set-xmark" | "--or-mark" | "--tproxy-mark" => {
                rule.marks
                    .extend(raw.and_then(mark).map(|(value, _)| value));
            }
            _ => {}
        }
    }
    rule
}

/// `0x539`, `1337`, `0x111/0xfff`.
fn mark(text: &str) -> Option<(u32, u32)> {
    let (value, mask) = text.split_once('/').unwrap_or((text, "0xffffffff"));
    Some((number(value)?, number(mask)?))
}

fn number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

/// The text of `nft list ruleset`.
fn listed<'a>(text: &Text<'a>, tables: &mut Vec<Table<'a>>, unread: &mut Vec<Unread<'a>>) {
    let first = tables.len();
    for entry in nft::entries(text.text) {
        match (entry, tables[first..].last_mut()) {
            (Ok(nft::Entry::Table { family, name }), _) => {
                tables.push(Table::new(
                    text.origin,
                    format!("{family} {name}"),
                    Some(name),
                ));
            }
            (Ok(nft::Entry::Chain { name }), Some(table)) => {
                table.chains.entry(name).or_default();
            }
            (Ok(nft::Entry::Base { line, chain, text }), Some(table)) => {
                let words: Vec<&str> = text
                    .split([' ', ';'])
                    .filter(|word| !word.is_empty())
                    .collect();
                let after = |word: &str| {
                    words
                        .iter()
                        .position(|w| *w == word)
                        .and_then(|at| words.get(at + 1))
                };
                let found = table.chains.entry(chain).or_default();
                if let Some(hook) = after("hook") {
                    found.hook = Some((*hook).to_owned());
                }
                if after("policy") == Some(&"drop") {
                    found.drops = Some(line);
                }
            }
            (Ok(nft::Entry::Rule { line, chain, text }), Some(table)) => {
                let words: Vec<&str> = nft::words(text).collect();
                let of_iptables = |word: &&str| {
                    matches!(*word, "xt" | "[match]" | "[target]") || word.starts_with("xt_")
                };
                let is_compat = words.iter().any(of_iptables);
                if words.first() == Some(&"#") || is_compat {
                    let why = if is_compat {
                        "iptables-nft wrote it, and nf_tables does not show all of it"
                    } else {
                        "it does more than this program can say"
                    };
                    unread.push(Unread {
                        line: table.line(line, format!("{chain} {text}").into()),
                        why: why.to_owned(),
                        is_rule: true,
                    });
                }
                table.rules.push(of_nft(line, chain, text, &words));
            }
            (Ok(nft::Entry::Elements { name, text, .. }), Some(table)) => {
                let of_map = of_nft(0, name, text, &nft::words(text).collect::<Vec<_>>());
                let map = table.maps.entry(name).or_default();
                map.0.extend(of_map.jumps);
                map.1 = map.1.or(of_map.effects);
            }
            (Err(error), table) => unread.push(Unread {
                line: Line {
                    table: table.map_or(text.origin.to_owned(), |table| table.title()),
                    number: error.line,
                    text: error.text.into(),
                },
                why: error.what.to_owned(),
                is_rule: false,
            }),
            (Ok(_), None) => {}
        }
    }
}

fn of_nft<'a>(line: usize, chain: &'a str, text: &'a str, words: &[&'a str]) -> Rule<'a> {
    let mut rule = Rule {
        line,
        chain,
        text: format!(
            "{chain} {}",
            text.split_whitespace().collect::<Vec<_>>().join(" ")
        )
        .into(),
        ..Rule::default()
    };
    let unquoted = |word: &&'a str| word.trim_matches('"');
    let mut words = words.iter().peekable();
    while let Some(word) = words.next() {
        match *word {
            "jump" | "goto" => rule.jumps.extend(words.next()),
            "drop" | "reject" | "queue" | "synproxy" => rule.effects.refuses = true,
            "dnat" | "redirect" | "tproxy" => rule.effects.translates = true,
            "comment" => rule.comment = words.next().map(unquoted).map(Cow::Borrowed),
            "iifname" | "oifname" | "iif" | "oif" => {
                let name = words.find(|word| !matches!(**word, "!=" | "==" | "{" | ","));
                rule.interfaces.extend(name.map(unquoted));
            }
            "mark" => {
                // `mark and 0xfff != 0x539`, `mark set mark | 0x4000`
                let (mut excluded, mut sets, mut alters) = (false, false, false);
                let mut numbers = Vec::new();
                while let Some(word) = words.next_if(|word| {
                    let joins = ["set", "and", "or", "xor", "&", "|", "^", "==", "!="];
                    // Behind a comparison, the next statement begins.
                    let is_mark = matches!(**word, "meta" | "ct" | "mark");
                    let is_next = is_mark && !sets && !numbers.is_empty();
                    (joins.contains(word) || is_mark || number(word).is_some()) && !is_next
                }) {
                    excluded |= *word == "!=";
                    sets |= *word == "set";
                    alters |= matches!(*word, "|" | "^" | "or" | "xor");
                    numbers.extend(number(word));
                }
                if !sets && !alters {
                    rule.asks.extend(match (&numbers[..], excluded) {
                        (&[value], false) => Some((value, u32::MAX)),
                        (&[mask, value], false) => Some((value, mask)),
                        // The bit is there.
                        (&[mask, 0], true) if mask.is_power_of_two() => Some((mask, mask)),
                        _ => None,
                    });
                }
                rule.marks.extend(numbers);
            }
            word => {
                rule.sets.extend(word.strip_prefix('@'));
                let port = word
                    .strip_prefix(':')
                    .and_then(|port| port.parse::<u16>().ok());
                rule.to_ports.extend(port);
            }
        }
    }
    rule
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_of_nf_tables_asks_for_the_marks_that_it_compares() {
        let asks = |text: &str| {
            let words: Vec<&str> = text.split(' ').collect();
            of_nft(1, "c", text, &words).asks
        };
        let all = u32::MAX;
        for (text, wanted) in [
            ("meta mark 0x539 accept", vec![(0x539, all)]),
            ("meta mark & 0xfff == 0x539 accept", vec![(0x539, 0xfff)]),
            // The next statement begins behind a comparison.
            (
                "meta mark & 0xfff == 0x539 ct mark set ct mark & 0xfffff000 | 0x111",
                vec![(0x539, 0xfff)],
            ),
            ("meta mark 0x539 ct mark != 0x1 accept", vec![(0x539, all)]),
            ("ct mark 0x1 meta mark 0x2 accept", vec![(1, all), (2, all)]),
            // A bit that is there.
            (
                "meta mark & 0x4000 != 0x0 masquerade",
                vec![(0x4000, 0x4000)],
            ),
            ("meta mark & 0xfff != 0x111 masquerade", vec![]),
            ("meta mark != 0x1 accept", vec![]),
            // What is compared is no mark that the packet has.
            ("meta mark | 0x4000 == 0x5000 accept", vec![]),
            ("meta mark set meta mark ^ 0x4000", vec![]),
        ] {
            assert_eq!(asks(text), wanted, "{text}");
        }
    }
}
