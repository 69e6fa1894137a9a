//! Reads rules from the text of `nft list ruleset`.

use super::{Line, Rule, Table, Text, Unread};
use crate::text::{nft, tree};

/// Reads the tables of a text. Lines that are not understood are added to `unread`.
pub(super) fn read<'a>(text: &Text<'a>, tables: &mut Vec<Table<'a>>, unread: &mut Vec<Unread<'a>>) {
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
                let of_iptables = |word: &&str| *word == "xt" || word.starts_with("xt_");
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
                table.rules.push(of_nft(line, chain, text));
            }
            (Ok(nft::Entry::Elements { name, text, .. }), Some(table)) => {
                let of_map = of_nft(0, name, text);
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

fn of_nft<'a>(line: usize, chain: &'a str, text: &'a str) -> Rule<'a> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let whole = format!("{chain} {}", words.join(" "));
    Rule::of(line, chain, whole, tree::listed(text).parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_about_translated_connections_translates_none() {
        let translates = |text: &str| of_nft(1, "c", text).effects.translates;
        assert!(!translates("ct status dnat accept"));
        assert!(!translates("ct status & dnat == dnat masquerade"));
        assert!(translates("ct status dnat tcp dport 80 dnat to 10.0.0.1"));
    }

    #[test]
    fn what_follows_a_limit_counts() {
        for text in [
            "udp dport 53 limit rate over 10/second burst 5 packets drop",
            "limit rate over 1 mbytes/second burst 512 bytes drop",
            "quota over 1000 bytes drop",
            "log prefix \"a # handle 1\" drop",
            "counter packets 0 bytes 0 drop # handle 7",
        ] {
            assert!(of_nft(1, "c", text).effects.refuses, "{text}");
        }
        let rule = of_nft(1, "c", "limit rate 25/minute burst 5 packets jump web");
        assert_eq!(rule.jumps, ["web"]);
    }

    /// If a rule's destination is unclear, the rule counts as one for any address, which may be a service's.
    #[test]
    fn destinations_of_a_rule_are_told_apart() {
        for (text, to_loopback, to_one) in [
            ("ip daddr 127.0.0.1 drop", true, true),
            ("ip daddr { 127.0.0.1, 127.0.0.53 } drop", true, true),
            ("ip daddr { 127.0.0.1, 10.0.0.1 } drop", false, true),
            ("ip daddr != 127.0.0.1 drop", false, false),
            ("ip daddr 169.254.20.10 notrack", false, false),
            (
                "ip daddr { 169.254.20.10, 10.96.0.10 } notrack",
                false,
                true,
            ),
            ("ip daddr @dns notrack", false, true),
            (
                "ip daddr . udp dport { 10.96.0.10 . 53 } notrack",
                false,
                true,
            ),
            ("ip saddr 127.0.0.1 drop", false, false),
            ("ip daddr 127.0.0.0-191.255.255.255 drop", false, true),
            ("ip daddr 127.0.0.0/7 drop", false, true),
            ("ct original ip daddr 127.0.0.1 drop", false, false),
        ] {
            let rule = of_nft(1, "c", text);
            let found = (rule.to_loopback, rule.to_one);
            assert_eq!(found, (to_loopback, to_one), "{text}");
        }
    }

    #[test]
    fn a_rule_of_nf_tables_asks_for_the_marks_that_it_compares() {
        let asks = |text: &str| of_nft(1, "c", text).asks;
        let all = u32::MAX;
        for (text, wanted) in [
            ("meta mark 0x539 accept", vec![(0x539, all)]),
            ("meta mark & 0xfff == 0x539 accept", vec![(0x539, 0xfff)]),
            // After a comparison, the next statement starts.
            (
                "meta mark & 0xfff == 0x539 ct mark set ct mark & 0xfffff000 | 0x111",
                vec![(0x539, 0xfff)],
            ),
            ("meta mark 0x539 ct mark != 0x1 accept", vec![(0x539, all)]),
            ("ct mark 0x1 meta mark 0x2 accept", vec![(1, all), (2, all)]),
            // The bit is set.
            (
                "meta mark & 0x4000 != 0x0 masquerade",
                vec![(0x4000, 0x4000)],
            ),
            ("meta mark & 0xfff != 0x111 masquerade", vec![]),
            ("meta mark != 0x1 accept", vec![]),
            // The rule compares the result, not the packet's mark.
            ("meta mark | 0x4000 == 0x5000 accept", vec![]),
            ("meta mark set meta mark ^ 0x4000", vec![]),
        ] {
            assert_eq!(asks(text), wanted, "{text}");
        }
    }
}
