//! Reads the text of `nft list ruleset` by its braces: tables, chains, rules, and the elements of sets and maps. Does
//! not split rules into parts.

/// A line that does not have this format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Error<'a> {
    /// The line's number, from 1.
    pub line: usize,
    /// The line.
    pub text: &'a str,
    /// The fault.
    pub what: &'static str,
}

/// A part of a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry<'a> {
    /// A table begins.
    Table {
        /// `ip`, `inet`…
        family: &'a str,
        /// The table's name.
        name: &'a str,
    },
    /// A chain of the table begins.
    Chain {
        /// The chain's name.
        name: &'a str,
    },
    /// The line that registers the chain at a hook.
    Base {
        /// The line's number, from 1.
        line: usize,
        /// The chain's name.
        chain: &'a str,
        /// `type filter hook forward priority filter; policy drop;`
        text: &'a str,
    },
    /// A rule.
    Rule {
        /// The number of the rule's first line, from 1.
        line: usize,
        /// The chain's name.
        chain: &'a str,
        /// The rule, which may span several lines.
        text: &'a str,
    },
    /// A set or a map, with its properties and elements.
    Elements {
        /// The number of the first line, from 1.
        line: usize,
        /// The name of the set or the map.
        name: &'a str,
        /// The lines between the braces.
        text: &'a str,
    },
}

/// The kind of a block, and its name.
#[derive(Clone, Copy)]
enum Block<'a> {
    Chain(&'a str),
    /// The name, the byte at which the first line in the block starts, and this line's number.
    Set(&'a str, usize, usize),
    /// A flowtable, counter, limit or other block.
    Other,
}

/// Reads the parts of a listing. An error concerns one line, and reading continues with the next line.
pub fn entries(text: &str) -> impl Iterator<Item = Result<Entry<'_>, Error<'_>>> {
    let mut reader = Reader {
        text,
        at: 0,
        number: 0,
        in_table: false,
        dormant: false,
        block: None,
    };
    std::iter::from_fn(move || reader.next())
}

struct Reader<'a> {
    text: &'a str,
    /// The byte at which the next line starts. `number` is the number of the line before it.
    at: usize,
    number: usize,
    in_table: bool,
    /// Whether the table is switched off (`flags dormant`). The kernel then registers none of its chains at a hook.
    dormant: bool,
    block: Option<Block<'a>>,
}

impl<'a> Reader<'a> {
    /// Returns the next line, with the byte at which it starts.
    fn line(&mut self) -> Option<(usize, &'a str)> {
        let start = self.at;
        let rest = self.text.get(start..).filter(|rest| !rest.is_empty())?;
        let line = rest.split_inclusive('\n').next()?;
        self.at += line.len();
        self.number += 1;
        Some((start, line.trim()))
    }

    fn next(&mut self) -> Option<Result<Entry<'a>, Error<'a>>> {
        loop {
            let Some((start, line)) = self.line() else {
                let open = self.in_table || self.block.is_some();
                (self.in_table, self.block) = (false, None);
                return open.then(|| self.error("", "a block has no end"));
            };
            // Skips comments that nft and iptables print beside the rules. In a chain, such a line stands for a rule
            // that nft cannot print.
            if line.is_empty() || line.starts_with('#') && self.block.is_none() {
                continue;
            }
            match (self.in_table, self.block) {
                (false, _) => match header(line) {
                    Some(["table", family, name]) => {
                        (self.in_table, self.dormant) = (true, false);
                        return Some(Ok(Entry::Table { family, name }));
                    }
                    _ => return Some(self.error(line, "the line is outside of a table")),
                },
                (true, None) if line == "}" => self.in_table = false,
                (true, None) => {
                    self.dormant |= line.starts_with("flags ") && line.contains("dormant");
                    let (block, entry) = match header(line) {
                        Some(_) if self.dormant => (Block::Other, None),
                        Some(["chain", name, ""]) => {
                            (Block::Chain(name), Some(Entry::Chain { name }))
                        }
                        Some(["set" | "map", name, ""]) => {
                            (Block::Set(name, self.at, self.number + 1), None)
                        }
                        // `ct helper NAME {`, `flowtable NAME {`, `counter NAME {`
                        Some(_) => (Block::Other, None),
                        // nft accepts this form as input, but does not print it.
                        None if ["chain ", "set ", "map "]
                            .iter()
                            .any(|kind| line.starts_with(kind)) =>
                        {
                            return Some(self.error(line, "the block is not in lines of its own"));
                        }
                        // `comment "…"`, `flags dormant`
                        None => continue,
                    };
                    self.block = Some(block);
                    if let Some(entry) = entry {
                        return Some(Ok(entry));
                    }
                }
                (true, Some(block)) => {
                    if line == "}" {
                        self.block = None;
                        if let Block::Set(name, first, line) = block {
                            let text = &self.text[first..start];
                            return Some(Ok(Entry::Elements { line, name, text }));
                        }
                        continue;
                    }
                    let number = self.number;
                    let end = self.close_braces(line);
                    let text = self.text[start..end].trim();
                    let Block::Chain(chain) = block else {
                        continue;
                    };
                    if text.starts_with("comment ") {
                        continue;
                    }
                    return Some(Ok(
                        if text.starts_with("type ") && text.contains(" hook ") {
                            Entry::Base {
                                line: number,
                                chain,
                                text,
                            }
                        } else {
                            Entry::Rule {
                                line: number,
                                chain,
                                text,
                            }
                        },
                    ));
                }
            }
        }
    }

    /// Reads lines until the braces that `line` opens are closed. Returns the byte after them.
    fn close_braces(&mut self, line: &str) -> usize {
        let mut open = braces(line);
        while open > 0 {
            match self.line() {
                Some((_, line)) => open += braces(line),
                None => break,
            }
        }
        self.at
    }

    fn error(&self, text: &'a str, what: &'static str) -> Result<Entry<'a>, Error<'a>> {
        let line = self.number.max(1);
        Err(Error { line, text, what })
    }
}

/// Returns the words before the brace that ends a line. A line has two or three words; if there are two, the third is
/// empty.
fn header(line: &str) -> Option<[&str; 3]> {
    // On request, nft 1.1 prints a handle after the brace: `{ # handle 3`.
    let line = line.split(" # ").next()?.trim_end();
    let mut words = line.strip_suffix('{')?.split_whitespace();
    Some([
        words.next()?,
        words.next()?,
        words.next().unwrap_or_default(),
    ])
}

/// Returns the number of braces that a line opens, minus the number that it closes. Does not count braces in quotes.
fn braces(line: &str) -> i64 {
    let mut quoted = false;
    let count = |byte| match byte {
        b'"' => {
            quoted = !quoted;
            0
        }
        b'{' if !quoted => 1,
        b'}' if !quoted => -1,
        _ => 0,
    };
    line.bytes().map(count).sum()
}

/// Returns the words of a rule. A quoted text is one word, including the quotes. A `;` or `,` ends a word.
pub fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        rest = rest.trim_start_matches(|c: char| c.is_whitespace() || c == ',' || c == ';');
        let end = match rest.strip_prefix('"') {
            Some(quoted) => quoted.find('"').map_or(rest.len(), |end| end + 2),
            None => rest
                .find(|c: char| c.is_whitespace() || c == ',' || c == ';')
                .unwrap_or(rest.len()),
        };
        let (word, after) = rest.split_at(end);
        rest = after;
        (!word.is_empty()).then_some(word)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTING: &str = "table ip one {\n\tcomment \"{\"\n\tmap m {\n\t\ttype ipv4_addr : verdict\n\t\telements = { 10.0.0.1 : drop,\n\
        \t\t\t     10.0.0.2 : goto x }\n\t}\n\n\tct helper h {\n\t\ttype \"ftp\" protocol tcp\n\t}\n\n\tchain x {\n\
        \t\ttype filter hook forward priority filter; policy drop;\n\t\ttcp dport { 1,\n\t\t\t2 } drop\n\
        \t\tcomment \"x\"\n\t\tmeta mark 1 comment \"a } b\" accept\n\t}\n}\n# Warning: table ip nat is managed by iptables-nft\n\
        table inet two {\n}\n";

    #[test]
    fn a_listing_is_read() {
        let all: Vec<_> = entries(LISTING).collect::<Result<_, _>>().unwrap();
        let rule = |line, text| Entry::Rule {
            line,
            chain: "x",
            text,
        };
        let wanted = [
            Entry::Table {
                family: "ip",
                name: "one",
            },
            Entry::Elements {
                line: 4,
                name: "m",
                text: "\t\ttype ipv4_addr : verdict\n\t\telements = { 10.0.0.1 : drop,\n\t\t\t     10.0.0.2 : goto x }\n",
            },
            Entry::Chain { name: "x" },
            Entry::Base {
                line: 14,
                chain: "x",
                text: "type filter hook forward priority filter; policy drop;",
            },
            rule(15, "tcp dport { 1,\n\t\t\t2 } drop"),
            rule(18, "meta mark 1 comment \"a } b\" accept"),
            Entry::Table {
                family: "inet",
                name: "two",
            },
        ];
        assert_eq!(all, wanted);
        let words: Vec<_> = words("tcp dport { 1,\n2 } comment \"a } b\" drop;").collect();
        assert_eq!(
            words,
            [
                "tcp",
                "dport",
                "{",
                "1",
                "2",
                "}",
                "comment",
                "\"a } b\"",
                "drop"
            ]
        );
    }

    /// The kernel registers none of the table's chains at a hook.
    #[test]
    fn a_dormant_table_has_no_rules() {
        let text = "table ip one {\n\tflags dormant\n\tchain x {\n\t\ttype filter hook input priority filter; policy drop;\n\
                    \t\ttcp dport 1 drop\n\t}\n}\ntable ip two {\n\tchain y {\n\t\tdrop\n\t}\n}\n";
        let all: Vec<_> = entries(text).collect::<Result<_, _>>().unwrap();
        let table = |name| Entry::Table { family: "ip", name };
        let wanted = [
            table("one"),
            table("two"),
            Entry::Chain { name: "y" },
            Entry::Rule {
                line: 10,
                chain: "y",
                text: "drop",
            },
        ];
        assert_eq!(all, wanted);
    }

    #[test]
    fn errors_have_their_line() {
        for (text, line) in [
            ("hello\n", 1),
            ("table ip a {\n}\n}\n", 3),
            ("table ip a {\n\tchain b {\n", 2),
            ("table ip a {\n\tset b {\n\t\telements = { 1,\n", 3),
            (
                "table ip a {\n\tchain b { type nat hook output priority 0; }\n}\n",
                2,
            ),
        ] {
            let errors: Vec<_> = entries(text).filter_map(Result::err).collect();
            assert_eq!(errors.len(), 1, "{text}: {errors:?}");
            assert_eq!(errors[0].line, line, "{text}");
        }
    }
}
