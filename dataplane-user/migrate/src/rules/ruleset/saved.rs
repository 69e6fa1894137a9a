//! Rules of the text of `iptables-save`.

use super::{Line, Rule, Table, Text, Unread, is_link_local, is_loopback, mark};
use crate::text::{Entry, Rule as Saved, Word};

/// Reads a text.
pub(super) fn read<'a>(text: &Text<'a>, tables: &mut Vec<Table<'a>>, unread: &mut Vec<Unread<'a>>) {
    let first = tables.len();
    for entry in crate::text::entries(text.text) {
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
                Some("NOTRACK") => rule.effects.untracks = true,
                Some(target) if HARMLESS.contains(&target) => {}
                target => rule.jumps.extend(target),
            },
            "-d" | "--destination" => {
                rule.to_loopback = !option.negated && raw.is_some_and(is_loopback);
                rule.to_one = !option.negated && raw.is_some_and(|to| !is_link_local(to));
            }
            "--comment" => rule.comments.extend(first.map(Word::text)),
            "--notrack" => rule.effects.untracks = true,
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
