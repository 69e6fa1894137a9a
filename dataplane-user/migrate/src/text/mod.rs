//! Reads and prints the text of `iptables-save` and `ip6tables-save`, which their `-restore` commands load, line by
//! line. Pure: borrows from the text, allocates no memory for a line, and leaves unknown options unchanged. A rule
//! prints as the line that it was read from, without counters.

#[cfg(test)]
pub mod chance;
#[cfg(test)]
mod fuzz;
pub mod nft;
pub mod tree;
mod words;

use std::fmt;

use tree::Part;
pub use words::Words;

/// The built-in chains, which are registered at hooks.
pub const BUILT_IN: &[&str] = &["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"];

/// A line that does not have this format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Error {
    /// The line's number, from 1.
    pub line: usize,
    /// The fault.
    pub what: &'static str,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.what)
    }
}

impl std::error::Error for Error {}

/// The content of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry<'a> {
    /// A table begins.
    Table(&'a str),
    /// A chain of the table.
    Chain {
        /// The line's number, from 1.
        line: usize,
        /// The chain's name.
        name: &'a str,
        /// The policy of a built-in chain.
        policy: Option<&'a str>,
    },
    /// A rule, to append to a chain (`-A`) or to insert in it (`-I`).
    Rule(Rule<'a>),
    /// The table ends.
    Commit,
}

/// A rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule<'a> {
    /// The line's number, from 1.
    pub line: usize,
    /// The chain that has the rule.
    pub chain: &'a str,
    /// The number of the rule, from 1, before which this rule is inserted (`-I`); `None` for a rule to append (`-A`).
    pub before: Option<u32>,
    /// The options, as written.
    pub text: &'a str,
}

impl fmt::Display for Rule<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.before {
            None => write!(f, "-A {}", self.chain)?,
            Some(number) => write!(f, "-I {} {number}", self.chain)?,
        }
        if !self.text.is_empty() {
            write!(f, " {}", self.text)?;
        }
        Ok(())
    }
}

impl<'a> Rule<'a> {
    /// Returns the rule's known and unknown parts in their order.
    pub fn parts(&self) -> impl Iterator<Item = Part<'a>> + use<'a> {
        tree::saved(self.text)
    }
}

/// Reads the entries of a text. An error concerns one line, and reading continues with the next line.
pub fn entries(text: &str) -> impl Iterator<Item = Result<Entry<'_>, Error>> {
    let mut table: Option<usize> = None;
    let mut lines = text.lines().enumerate();
    std::iter::from_fn(move || {
        loop {
            let Some((index, line)) = lines.next() else {
                let what = "the table has no COMMIT";
                return table.take().map(|line| Err(Error { line, what }));
            };
            let line = line.trim_ascii();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let number = index + 1;
            let entry = entry(number, line, table.is_some());
            match entry {
                Ok(Entry::Table(_)) => table = Some(number),
                Ok(Entry::Commit) => table = None,
                Ok(_) | Err(_) => {}
            }
            return Some(entry.map_err(|what| Error { line: number, what }));
        }
    })
}

fn entry(number: usize, line: &str, in_table: bool) -> Result<Entry<'_>, &'static str> {
    if let Some(name) = line.strip_prefix('*') {
        let name = name.trim_ascii();
        return match name.is_empty() || name.contains(char::is_whitespace) {
            _ if in_table => Err("a table begins before the COMMIT of the table before"),
            true => Err("a table needs one name"),
            false => Ok(Entry::Table(name)),
        };
    }
    if !in_table && line.starts_with('{') {
        return Err("this is JSON: print the rules with `nft list ruleset`, without `-j`");
    }
    if !in_table {
        return Err("the line is outside of a table");
    }
    if line == "COMMIT" {
        return Ok(Entry::Commit);
    }
    if let Some(chain) = line.strip_prefix(':') {
        return self::chain(number, chain);
    }
    let rest = match line.strip_prefix('[') {
        None => line,
        Some(rest) => {
            let (inside, rest) = rest.split_once(']').ok_or("the counters have no end")?;
            check_counters(inside)?;
            rest.trim_ascii_start()
        }
    };
    let (command, rest) = cut(rest);
    let (name, text) = cut(rest);
    if name.is_empty() {
        return Err("the command names no chain");
    }
    if let Some(error) = Words::new(text).find_map(Result::err) {
        return Err(error);
    }
    let rule = |before, text| {
        Ok(Entry::Rule(Rule {
            line: number,
            chain: name,
            before,
            text,
        }))
    };
    match command {
        "-A" | "--append" => rule(None, text),
        "-I" | "--insert" => match cut(text) {
            (before, text) if before.starts_with(|c: char| c.is_ascii_digit()) => {
                let before = before.parse().ok().filter(|number| *number > 0);
                let before =
                    before.ok_or("the number of the rule before which this one goes is wrong")?;
                rule(Some(before), text)
            }
            _ => rule(Some(1), text),
        },
        "-N" | "--new-chain" if text.is_empty() => Ok(Entry::Chain {
            line: number,
            name,
            policy: None,
        }),
        _ => Err("the line is no table, chain, rule, comment or COMMIT"),
    }
}

fn chain(line: usize, text: &str) -> Result<Entry<'_>, &'static str> {
    let (name, rest) = cut(text);
    let (policy, rest) = cut(rest);
    if name.is_empty() || policy.is_empty() {
        return Err("a chain needs a name and a policy");
    }
    match rest.strip_prefix('[').map(|rest| rest.strip_suffix(']')) {
        None if rest.is_empty() => {}
        Some(Some(inside)) => check_counters(inside)?,
        _ => return Err("counters are [PACKETS:BYTES]"),
    }
    Ok(Entry::Chain {
        line,
        name,
        policy: (policy != "-").then_some(policy),
    })
}

fn check_counters(inside: &str) -> Result<(), &'static str> {
    let is_number = |text: &str| text.parse::<u64>().is_ok();
    match inside.split_once(':') {
        Some((packets, bytes)) if is_number(packets) && is_number(bytes) => Ok(()),
        _ => Err("counters are [PACKETS:BYTES]"),
    }
}

/// Splits off the first word.
fn cut(text: &str) -> (&str, &str) {
    let (word, rest) = text
        .split_once(|c: char| c.is_ascii_whitespace())
        .unwrap_or((text, ""));
    (word, rest.trim_ascii_start())
}

/// Replaces control characters, so that an untrusted text can be printed to a terminal.
pub fn printable(text: &str) -> String {
    let printed = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    text.chars().map(printed).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAVED: &str = "# Generated by iptables-save v1.8.9\n*nat\n:OUTPUT ACCEPT [7:420]\n:KUBE-SVC - [0:0]\n\
        [3:180] -A KUBE-SVC ! -s 10.244.0.0/16 -m comment --comment \"ns/web:\\\"a b\\\" x\" -j KUBE-MARK-MASQ\n\
        -A OUTPUT -m later --unknown 1 2 -j KUBE-SVC\nCOMMIT\n";

    #[test]
    fn a_saved_table_is_read() {
        let all: Vec<Entry<'_>> = entries(SAVED).collect::<Result<_, _>>().unwrap();
        assert_eq!(all.len(), 6);
        assert_eq!(all[0], Entry::Table("nat"));
        let output = Entry::Chain {
            line: 3,
            name: "OUTPUT",
            policy: Some("ACCEPT"),
        };
        assert_eq!(all[1], output);
        let Entry::Rule(rule) = all[3] else {
            panic!("{:?}", all[3])
        };
        assert_eq!((rule.line, rule.chain), (5, "KUBE-SVC"));
        let parts: Vec<_> = rule.parts().collect();
        assert_eq!((parts[0].not, parts[0].name), (true, "-s"));
        assert_eq!(parts[2].value, "ns/web:\"a b\" x");
        assert_eq!(parts.len(), 4);
        let Entry::Rule(rule) = all[4] else {
            panic!("{:?}", all[4])
        };
        let unknown = rule.parts().nth(1).unwrap();
        let Part {
            name, value, more, ..
        } = unknown;
        assert_eq!((name, &*value, more), ("--unknown", "1", Some("2")));
    }

    #[test]
    fn errors_have_their_line() {
        for (text, line) in [
            ("-A X -j Y", 1),
            ("*nat\n:X", 2),
            ("*nat\n\n:X - [1]\nCOMMIT", 3),
            ("*nat\n-A X --comment \"a", 2),
            ("*nat\n[1:2 -A X", 2),
            ("*nat\n-F X\nCOMMIT", 2),
            ("*nat\n*filter", 2),
            ("*nat\n:X - [0:0]\n", 1),
            ("*\n", 1),
            ("*nat\n-I X 0 -j Y\nCOMMIT", 2),
            ("*nat\n-I X 4294967296 -j Y\nCOMMIT", 2),
        ] {
            let error = entries(text).find_map(Result::err);
            assert_eq!(error.map(|error| error.line), Some(line), "{text}");
        }
    }

    #[test]
    fn an_error_ends_nothing() {
        let text = "*nat\nwhat?\n-I X 2 -j Y\n*filter\n-I X -j Y\nCOMMIT\nCOMMIT\n";
        let all: Vec<_> = entries(text).collect();
        let errors: Vec<usize> = (all.iter())
            .filter_map(|entry| entry.err().map(|error| error.line))
            .collect();
        assert_eq!(errors, [2, 4, 7]);
        let printed: Vec<String> = all.iter().flatten().map(Entry::to_string).collect();
        assert_eq!(printed, ["*nat", "-I X 2 -j Y", "-I X 1 -j Y", "COMMIT"]);
    }
}
