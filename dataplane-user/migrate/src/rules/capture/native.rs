//! Reads Istio's rules from its own tables of nf_tables. Istio writes equal rules in nf_tables and in iptables, so the
//! chains and tables get the names that they have in iptables. Pure.
//!
//! A rule in a table `inet` that names no address applies to both families. A statement that Istio does not write is an
//! error.

use std::collections::BTreeSet;

use super::{NODES, Row, family::Wrong};
use crate::text::{
    nft::{self, Entry},
    tree::{self, Key},
};

/// Prefixes of the names of Istio's tables.
const PREFIXES: [&str; 2] = ["istio-proxy-", "istio-ambient-"];

/// Returns true if a table is Istio's.
pub fn is_istios(name: &str) -> bool {
    PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// The rules, sorted by family.
#[derive(Debug, Default)]
pub struct Families<'a> {
    /// For each family, the tables that have rules: the table's name in iptables, and its rules.
    pub tables: [Vec<(&'a str, Vec<Row<'a>>)>; 2],
    /// For each family, whether a rule names one of its addresses. If no rule does, Istio does not capture the family.
    pub are_named: [bool; 2],
    /// The first rule.
    pub first: Option<Row<'a>>,
}

/// Returns a chain's name in iptables: `ISTIO_IN_REDIRECT` for `istio-in-redirect`.
fn name(chain: &str) -> String {
    match chain {
        "istio-prerouting" => "ISTIO_PRERT".to_owned(),
        chain => chain.to_ascii_uppercase().replace('-', "_"),
    }
}

/// Returns Istio's rules in a listing. Returns `None` if the listing has no table of Istio's.
///
/// # Errors
/// If a rule is not one of Istio's, or the listing cannot be read.
pub fn read(text: &str) -> Result<Option<Families<'_>>, Wrong> {
    let mut found = Families::default();
    let mut table: Option<&str> = None;
    let mut hooked = BTreeSet::new();
    let mut is_there = false;
    for entry in nft::entries(text) {
        let entry = entry.map_err(|error| {
            let text = error.text.trim().to_owned();
            (error.line, error.what.to_owned(), text)
        })?;
        let unusual = |line, chain, text: &str| {
            let what = format!("chain {chain} is not as Istio makes it");
            Err((line, what, text.to_owned()))
        };
        match (entry, table) {
            (Entry::Table { name, .. }, _) => {
                table = PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix));
                hooked.clear();
                is_there |= table.is_some();
                for tables in &mut found.tables {
                    tables.extend(table.map(|table| (table, Vec::new())));
                }
            }
            (Entry::Base { line, chain, text }, Some(_)) => {
                let is_usual = matches!(chain, "prerouting" | "output" | "postrouting")
                    && text.contains(&format!(" hook {chain} "))
                    && !text.contains("policy drop");
                if !is_usual {
                    return unusual(line, chain, text);
                }
                hooked.insert(chain);
            }
            (Entry::Rule { line, chain, text }, Some(_)) => {
                let words: Vec<_> = text.split_whitespace().collect();
                let mut rule = tree::listed(text);
                for part in &mut rule.parts {
                    match part.key {
                        Key::Chain => {
                            part.key = Key::Target;
                            part.value = name(&part.value).into();
                        }
                        Key::In | Key::Out => part.value = part.value.replace('*', "+").into(),
                        _ => {}
                    }
                }
                let row = Row {
                    line,
                    chain: name(chain).into(),
                    text: words.join(" "),
                    parts: rule.parts,
                };
                if chain == "postrouting" {
                    return Err(row.wrong(NODES));
                }
                if !hooked.contains(chain) && !chain.starts_with("istio-") {
                    return unusual(line, chain, &row.text);
                }
                if let Some(fault) = rule.fault {
                    return Err(row.wrong(&fault));
                }
                found.first.get_or_insert_with(|| row.clone());
                for (of, v4) in [true, false].into_iter().enumerate() {
                    if rule.v4.is_none_or(|only| only == v4) {
                        let rows = found.tables[of].last_mut();
                        rows.expect("of this table").1.push(row.clone());
                        found.are_named[of] |= rule.v4.is_some();
                    }
                }
            }
            _ => {}
        }
    }
    Ok(is_there.then_some(found))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_keep_their_lines() {
        let text = "table ip other {\n\tchain x {\n\t\tfoo\n\t}\n}\ntable inet istio-proxy-nat {\n\tchain output {\n\
                    \t\ttype nat hook output priority dstnat; policy accept;\n\t\tcounter jump istio-output\n\t}\n\n\
                    \tchain istio-output {\n\t\tip daddr 127.0.0.1 return\n\t}\n}\ntable inet istio-proxy-raw {\n\
                    \tchain istio-output-dns {\n\t\tudp dport 53 ct zone set 1\n\t}\n}\n";
        let found = read(text).unwrap().unwrap();
        let at = |of: usize, number: usize| {
            let mut tables = found.tables[of].iter();
            tables.find_map(|(table, rows)| {
                let row = rows.iter().find(|row| row.line == number)?;
                let parts = row.parts.iter();
                let words = parts.map(|part| format!(" {} {}", part.name, part.value));
                Some(format!(
                    "{table} {}{}",
                    row.chain,
                    words.collect::<String>()
                ))
            })
        };
        let wanted = |rule: &str| Some(rule.to_owned());
        assert_eq!(at(1, 9), wanted("nat OUTPUT jump ISTIO_OUTPUT"));
        assert_eq!(
            at(0, 13),
            wanted("nat ISTIO_OUTPUT daddr 127.0.0.1 return RETURN")
        );
        assert_eq!(at(1, 13), None);
        assert_eq!(
            at(0, 18),
            wanted("raw ISTIO_OUTPUT_DNS udp udp dport 53 zone CT")
        );
        assert_eq!(found.are_named, [true, false]);
        assert!(read("table ip other {\n}\n").unwrap().is_none());
        for (from, to, wrong) in [
            ("hook output", "hook input", 8),
            ("policy accept", "policy drop", 8),
            (
                "type nat hook output priority dstnat; policy accept;",
                "counter jump istio-output",
                8,
            ),
            ("chain istio-output-dns", "chain other", 18),
        ] {
            let (line, ..) = read(&text.replace(from, to)).unwrap_err();
            assert_eq!(line, wrong, "{to}");
        }
        let (line, _, rule) = read(&text.replace("counter jump", "foo  jump")).unwrap_err();
        assert_eq!((line, &*rule), (9, "foo jump istio-output"));
    }
}
