//! Splits a rule into words, with the quoting rules of `iptables-restore` (`add_param_to_argv` in
//! `iptables/xshared.c`): a quote opens anywhere, the closing quote ends the word, and a backslash inside quotes
//! escapes the next character.

use std::borrow::Cow;

/// A word as it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word<'a> {
    /// The word with its quotes and backslashes.
    pub raw: &'a str,
}

impl<'a> Word<'a> {
    /// Returns the word without quotes and backslashes.
    pub fn text(&self) -> Cow<'a, str> {
        let inside = self
            .raw
            .strip_prefix('"')
            .and_then(|raw| raw.strip_suffix('"'));
        match inside {
            Some(inside) if !inside.contains(['"', '\\']) => return Cow::Borrowed(inside),
            _ if !self.raw.contains('"') => return Cow::Borrowed(self.raw),
            _ => {}
        }
        let (mut text, mut quoted) = (String::with_capacity(self.raw.len()), false);
        let mut chars = self.raw.chars();
        while let Some(c) = chars.next() {
            match c {
                '"' => quoted = !quoted,
                '\\' if quoted => text.extend(chars.next()),
                c => text.push(c),
            }
        }
        Cow::Owned(text)
    }

    pub(super) fn is(&self, word: &str) -> bool {
        self.raw == word
    }

    pub(super) fn is_option(&self) -> bool {
        self.raw.len() > 1 && self.raw.starts_with('-')
    }
}

/// An iterator over the words of a text.
#[derive(Clone, Debug)]
pub struct Words<'a> {
    rest: &'a str,
}

impl<'a> Words<'a> {
    /// Creates an iterator over the words of `text`.
    pub fn new(text: &'a str) -> Self {
        Self { rest: text }
    }
}

impl<'a> Iterator for Words<'a> {
    type Item = Result<Word<'a>, &'static str>;

    fn next(&mut self) -> Option<Self::Item> {
        let text = self.rest.trim_ascii_start();
        if text.is_empty() {
            return None;
        }
        let (mut quoted, mut escaped) = (false, false);
        let mut end = text.len();
        for (at, byte) in text.bytes().enumerate() {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = quoted,
                b'"' if quoted => {
                    quoted = false;
                    end = at + 1;
                    break;
                }
                b'"' => quoted = true,
                byte if !quoted && byte.is_ascii_whitespace() => {
                    end = at;
                    break;
                }
                _ => {}
            }
        }
        let (raw, rest) = text.split_at(end);
        self.rest = rest;
        Some(if quoted {
            Err("a quote has no end")
        } else {
            Ok(Word { raw })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `iptables-restore` 1.8.9 treats `b` in the first text as a separate argument.
    #[test]
    fn quotes_are_those_of_iptables_restore() {
        for (text, wanted) in [
            (r#""a"b"#, &["a", "b"][..]),
            (r#"a"b c" d"#, &["ab c", "d"]),
            (r#""a\"b" c"#, &["a\"b", "c"]),
            (r"a\\b", &[r"a\\b"]),
            (r#""" x"#, &["", "x"]),
        ] {
            let words: Result<Vec<_>, _> = Words::new(text).collect();
            let words = words.unwrap();
            let words: Vec<_> = words.iter().map(Word::text).collect();
            assert_eq!(words, wanted, "{text}");
        }
        assert!(Words::new(r#"a "b"#).any(|word| word.is_err()));
    }
}
