//! Splits Rust source into words and marks. Leaves out comments, lifetimes and the contents of literals.

/// A word or mark of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Token<'a> {
    /// An identifier or keyword, without `r#`.
    Word(&'a str),
    /// `::`
    Separator,
    /// Any other single character.
    Mark(char),
    /// A string, character or byte.
    Literal,
}

/// Returns the tokens of a source, each with its line, counted from 1.
pub fn tokens(source: &str) -> Vec<(Token<'_>, usize)> {
    let mut reader = Reader {
        source,
        at: 0,
        line: 1,
    };
    let mut found = vec![];
    while let Some((token, line)) = reader.next() {
        found.push((token, line));
    }
    found
}

struct Reader<'a> {
    source: &'a str,
    at: usize,
    line: usize,
}

impl<'a> Reader<'a> {
    fn rest(&self) -> &'a str {
        &self.source[self.at..]
    }

    /// Goes on by so many bytes, and counts the lines in them.
    fn skip(&mut self, bytes: usize) {
        let end = (self.at + bytes).min(self.source.len());
        self.line += self.source[self.at..end].matches('\n').count();
        self.at = end;
    }

    fn next(&mut self) -> Option<(Token<'a>, usize)> {
        loop {
            let rest = self.rest();
            let line = self.line;
            let first = rest.chars().next()?;
            if first.is_whitespace() {
                self.skip(first.len_utf8());
            } else if rest.starts_with("//") {
                self.skip(rest.find('\n').unwrap_or(rest.len()));
            } else if rest.starts_with("/*") {
                self.skip(comment(rest));
            } else if let Some(length) = string(rest).or_else(|| character(rest)) {
                self.skip(length);
                return Some((Token::Literal, line));
            } else if first == '\'' {
                self.skip(1 + word(&rest[1..]));
            } else if let Some(raw) = rest.strip_prefix("r#") {
                let length = word(raw);
                self.skip(2 + length);
                return Some((Token::Word(&raw[..length]), line));
            } else if word(rest) > 0 {
                let length = word(rest);
                self.skip(length);
                return Some((Token::Word(&rest[..length]), line));
            } else if rest.starts_with("::") {
                self.skip(2);
                return Some((Token::Separator, line));
            } else {
                self.skip(first.len_utf8());
                return Some((Token::Mark(first), line));
            }
        }
    }
}

/// Length of the word that a text begins with.
fn word(text: &str) -> usize {
    text.find(|of: char| !of.is_alphanumeric() && of != '_')
        .unwrap_or(text.len())
}

/// Length of the block comment that a text begins with, with those in it.
fn comment(text: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < text.len() {
        let rest = &text.as_bytes()[at..];
        if rest.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest.starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    text.len()
}

/// Length of the string literal that a text begins with, of any kind.
fn string(text: &str) -> Option<usize> {
    let prefix = ["br", "cr", "b", "c", "r", ""]
        .into_iter()
        .find(|prefix| text.starts_with(prefix) && text[prefix.len()..].starts_with(['"', '#']))?;
    let body = &text[prefix.len()..];
    if prefix.ends_with('r') {
        let hashes = body.find(|of| of != '#').unwrap_or(body.len());
        let inside = body[hashes..].strip_prefix('"')?;
        let end = format!("\"{}", &body[..hashes]);
        let length = inside.find(&end).map_or(inside.len(), |at| at + end.len());
        return Some(prefix.len() + hashes + 1 + length);
    }
    let inside = body.strip_prefix('"')?;
    let mut escaped = false;
    for (at, byte) in inside.bytes().enumerate() {
        match byte {
            b'"' if !escaped => return Some(prefix.len() + 1 + at + 1),
            b'\\' => escaped = !escaped,
            _ => escaped = false,
        }
    }
    Some(text.len())
}

/// Length of the character or byte literal that a text begins with. A lifetime is none.
fn character(text: &str) -> Option<usize> {
    let prefix = usize::from(text.starts_with("b'"));
    let inside = text[prefix..].strip_prefix('\'')?;
    let before = prefix + 1;
    if let Some(escape) = inside.strip_prefix('\\') {
        let named = escape.chars().next()?.len_utf8();
        let end = escape[named..].find('\'')?;
        return Some(before + 1 + named + end + 1);
    }
    let first = inside.chars().next()?.len_utf8();
    inside[first..]
        .starts_with('\'')
        .then_some(before + first + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(source: &str) -> Vec<&str> {
        let only = |(token, _)| match token {
            Token::Word(word) => Some(word),
            _ => None,
        };
        tokens(source).into_iter().filter_map(only).collect()
    }

    #[test]
    fn comments_literals_and_lifetimes_have_no_words() {
        let source = r###"
            a // not this
            /* nor /* this */ one */ b
            "not \" this" c 'x' '\'' '\u{1f}' b'y' b"no\\" d
            r"no" r#"no "quotes" here"# br##"no"# still"## c"no" e<'life> f"###;
        assert_eq!(words(source), ["a", "b", "c", "d", "e", "f"]);
    }

    #[test]
    fn raw_words_and_prefixes_are_words() {
        assert_eq!(words("r#type b br r c"), ["type", "b", "br", "r", "c"]);
    }

    #[test]
    fn lines_are_counted_in_comments_and_strings() {
        let source = "/* 1\n2 */ a \"3\n\" b\n// 4\nc::d";
        let found = tokens(source);
        let expected = [
            (Token::Word("a"), 2),
            (Token::Literal, 2),
            (Token::Word("b"), 3),
            (Token::Word("c"), 5),
            (Token::Separator, 5),
            (Token::Word("d"), 5),
        ];
        assert_eq!(found, expected);
    }
}
