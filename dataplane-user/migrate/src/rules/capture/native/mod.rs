//! Istio's rules in its own tables of nf_tables, in the words of iptables: Istio makes the same rules in both, so one reader is
//! enough. Pure: from the text of `nft list ruleset` to that of `iptables-save`.
//!
//! Each rule stays in its line. A rule of a table `inet` that names no address applies to both families. A statement that Istio does
//! not write is an error.

mod statements;

use std::collections::BTreeSet;

use self::statements::{name, options};
use super::NODES;
use crate::text::nft::{self, Entry};

/// How the names of Istio's tables begin.
const PREFIXES: [&str; 2] = ["istio-proxy-", "istio-ambient-"];

/// Whether a table is Istio's.
pub fn is_istios(name: &str) -> bool {
    PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// The rules of both families.
#[derive(Debug, Default)]
pub struct Families {
    /// As `iptables-save` and `ip6tables-save` would print them, with the rules in the lines that they have in the listing.
    pub texts: [String; 2],
    /// Whether a rule names an address of the family. If none does, Istio does not capture this family.
    pub are_named: [bool; 2],
    /// The first rule, with its line.
    pub first: Option<(usize, String)>,
}

/// A line's number, what is wrong with it, and its text.
pub type Wrong = (usize, String, String);

/// Returns Istio's rules in a listing. `None`: it has no table of Istio's.
///
/// # Errors
/// A rule is not one of Istio's, or the listing cannot be read.
pub fn in_iptables_words(text: &str) -> Result<Option<Families>, Wrong> {
    let count = text.lines().count() + 2;
    let mut lines = [vec![String::new(); count], vec![String::new(); count]];
    let mut are_named = [false; 2];
    let mut table: Option<&str> = None;
    let mut first = None;
    let mut hooked = BTreeSet::new();
    let (mut is_there, mut last, mut begins) = (false, 0, false);
    for entry in nft::entries(text) {
        let entry = entry.map_err(|error| {
            let text = error.text.trim().to_owned();
            (error.line, error.what.to_owned(), text)
        })?;
        let (line, chain, rule) = match entry {
            Entry::Table { name, .. } => {
                let its = PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix));
                commit(&mut lines, table, last);
                (table, last, begins) = (its, 0, true);
                hooked.clear();
                is_there |= its.is_some();
                continue;
            }
            Entry::Base { line, chain, text } => (line, chain, Err(text)),
            Entry::Rule { line, chain, text } => (line, chain, Ok(text)),
            Entry::Chain { .. } | Entry::Elements { .. } => continue,
        };
        let Some(table) = table else { continue };
        if begins {
            // The chain begins there.
            for of in &mut lines {
                of[line - 2] = format!("*{table}");
            }
            begins = false;
        }
        last = line;
        match rule {
            Err(base) => {
                let is_usual = matches!(chain, "prerouting" | "output" | "postrouting")
                    && base.contains(&format!(" hook {chain} "))
                    && !base.contains("policy drop");
                if !is_usual {
                    let what = format!("chain {chain} is not as Istio makes it");
                    return Err((line, what, base.to_owned()));
                }
                hooked.insert(chain);
            }
            Ok(rule) => {
                first.get_or_insert((line, rule));
                if chain == "postrouting" {
                    return Err((line, NODES.to_owned(), rule.to_owned()));
                }
                if !hooked.contains(chain) && !chain.starts_with("istio-") {
                    let what = format!("chain {chain} is not as Istio makes it");
                    return Err((line, what, rule.to_owned()));
                }
                let wrong = |what: String| {
                    let words: Vec<_> = rule.split_whitespace().collect();
                    (line, what, words.join(" "))
                };
                let (options, family) = options(rule).map_err(wrong)?;
                let chain = name(chain);
                for (v4, of) in [true, false].into_iter().zip(&mut lines) {
                    if family.is_none_or(|family| family == v4) {
                        of[line - 1] = format!("-A {chain} {options}");
                        are_named[usize::from(!v4)] |= family.is_some();
                    }
                }
            }
        }
    }
    commit(&mut lines, table, last);
    Ok(is_there.then(|| Families {
        texts: lines.map(|lines| lines.join("\n") + "\n"),
        are_named,
        first: first.map(|(line, rule)| (line, rule.to_owned())),
    }))
}

/// Ends a table behind its last rule: its chain's end is there. `last`: the rule's number, 0 if there is none.
fn commit(lines: &mut [Vec<String>; 2], table: Option<&str>, last: usize) {
    for of in lines {
        if table.is_some() && last != 0 {
            "COMMIT".clone_into(&mut of[last]);
        }
    }
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
        let found = in_iptables_words(text).unwrap().unwrap();
        let at = |of: usize, number: usize| found.texts[of].lines().nth(number - 1).unwrap();
        assert_eq!(at(0, 7), "*nat");
        assert_eq!(at(1, 9), "-A OUTPUT -j ISTIO_OUTPUT");
        assert_eq!(at(0, 13), "-A ISTIO_OUTPUT -d 127.0.0.1 -j RETURN");
        assert_eq!((at(1, 13), at(0, 14)), ("", "COMMIT"));
        assert_eq!((at(0, 17), at(0, 19)), ("*raw", "COMMIT"));
        assert_eq!(found.are_named, [true, false]);
        assert!(
            in_iptables_words("table ip other {\n}\n")
                .unwrap()
                .is_none()
        );
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
            let (line, ..) = in_iptables_words(&text.replace(from, to)).unwrap_err();
            assert_eq!(line, wrong, "{to}");
        }
        let (line, _, rule) =
            in_iptables_words(&text.replace("counter jump", "foo  jump")).unwrap_err();
        assert_eq!((line, &*rule), (9, "foo jump istio-output"));
    }
}
