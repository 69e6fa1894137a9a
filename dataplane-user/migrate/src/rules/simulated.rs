//! Simulates `iptables-restore --noflush`, for tests of its inputs.

use std::{fs, path::PathBuf};

/// Reads a file from the tests' data.
pub fn data(name: &str) -> String {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data");
    fs::read_to_string(root.join(name)).unwrap()
}

/// A table: its chains with their policies, in their order, and its rules.
struct Table<'a> {
    name: &'a str,
    chains: Vec<(&'a str, &'a str)>,
    rules: Vec<String>,
}

/// Applies an input to rules and returns the resulting rules, chain by chain.
///
/// # Panics
/// If `iptables-restore` would fail: a chain or a rule to be removed does not exist, or a chain is in use.
pub fn load(rules: &str, input: &str) -> String {
    let mut tables: Vec<Table<'_>> = Vec::new();
    for (text, is_input) in [(rules, false), (input, true)] {
        let mut at = 0;
        for line in text.lines().map(str::trim) {
            if let Some(name) = line.strip_prefix('*') {
                at = tables
                    .iter()
                    .position(|table| table.name == name)
                    .unwrap_or_else(|| {
                        tables.push(Table {
                            name,
                            chains: Vec::new(),
                            rules: Vec::new(),
                        });
                        tables.len() - 1
                    });
            } else if !line.is_empty() && !line.starts_with('#') && line != "COMMIT" {
                tables[at].apply(line, is_input);
            }
        }
    }
    tables.iter().map(Table::print).collect()
}

impl<'a> Table<'a> {
    fn apply(&mut self, line: &'a str, is_input: bool) {
        let words: Vec<&str> = line.splitn(3, ' ').collect();
        let chain = words.get(1).copied().unwrap_or_default();
        let is_in = |rule: &String, chain: &str| {
            rule.starts_with(&format!("-A {chain} ")) || *rule == format!("-A {chain}")
        };
        if let Some(name) = words[0].strip_prefix(':') {
            match self.chains.iter().any(|(known, _)| *known == name) {
                true if is_input => self.rules.retain(|rule| !is_in(rule, name)),
                true => {}
                false => self.chains.push((name, chain)),
            }
            return;
        }
        if words[0] != "-X" && !self.chains.iter().any(|(known, _)| *known == chain) {
            // A built-in chain that the text does not declare.
            self.chains.push((chain, "ACCEPT"));
        }
        match words[0] {
            "-A" => self.rules.push(line.to_owned()),
            "-D" => {
                let rule = line.replacen("-D", "-A", 1);
                let at = self.rules.iter().position(|known| *known == rule);
                self.rules
                    .remove(at.unwrap_or_else(|| panic!("no rule {rule}")));
            }
            "-I" => {
                let (number, rest) = words[2].split_once(' ').unwrap();
                let nth: usize = number.parse().unwrap();
                let all: Vec<usize> = (0..self.rules.len())
                    .filter(|at| is_in(&self.rules[*at], chain))
                    .collect();
                assert!(
                    (1..=all.len() + 1).contains(&nth),
                    "{line}: {} rules",
                    all.len()
                );
                let at = all.get(nth - 1).copied().unwrap_or(self.rules.len());
                self.rules.insert(at, format!("-A {chain} {rest}"));
            }
            "-X" => {
                let used = self
                    .rules
                    .iter()
                    .find(|rule| rule.split(' ').any(|word| word == chain));
                assert!(used.is_none(), "{chain} is in use: {used:?}");
                let at = self.chains.iter().position(|(known, _)| *known == chain);
                self.chains
                    .remove(at.unwrap_or_else(|| panic!("no chain {chain}")));
            }
            _ => panic!("{line}"),
        }
    }

    fn print(&self) -> String {
        let mut out = format!("*{}\n", self.name);
        let mut chains = self.chains.clone();
        chains.sort_unstable();
        for (chain, policy) in &chains {
            out += ":";
            out += chain;
            out += " ";
            out += policy;
            out += " [0:0]\n";
        }
        for (chain, _) in &chains {
            let prefix = format!("-A {chain} ");
            for rule in self.rules.iter().filter(|rule| rule.starts_with(&prefix)) {
                out += rule;
                out += "\n";
            }
        }
        out + "COMMIT\n"
    }
}
