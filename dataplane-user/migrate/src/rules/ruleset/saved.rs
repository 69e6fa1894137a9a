//! Reads rules from the text of `iptables-save`.

use super::{Line, Rule, Table, Text, Unread};
use crate::text::{BUILT_IN, Entry, tree};

/// Reads the tables of a text. Lines that are not understood are added to `unread`.
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
                // Some texts do not declare the built-in chains.
                if let Some(hook) = hook(rule.chain) {
                    table.chains.entry(rule.chain).or_default().hook = Some(hook);
                }
                let parts = tree::saved(rule.text);
                let rule = Rule::of(rule.line, rule.chain, rule.to_string(), parts);
                table.rules.push(rule);
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

/// Returns the hook of a built-in chain.
fn hook(chain: &str) -> Option<String> {
    let is_built_in = BUILT_IN.contains(&chain);
    is_built_in.then(|| chain.to_ascii_lowercase())
}
