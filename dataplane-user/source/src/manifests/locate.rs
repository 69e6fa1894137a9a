//! Finds the position of a field in a document. It is searched only for a message.

use serde_saphyr::granit_parser::{Event, Parser};

/// A line and a column, both from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// The line, from 1.
    pub line: usize,
    /// The column in characters, from 1.
    pub column: usize,
}

impl Position {
    /// Returns the position in the file. `before`: the file's text before the document.
    #[must_use]
    pub fn after(self, before: &str) -> Self {
        let lines = before.matches('\n').count();
        let columns = match before.rfind('\n') {
            _ if self.line > 1 => 0,
            Some(end) => before[end + 1..].chars().count(),
            None => before.chars().count(),
        };
        Self {
            line: self.line + lines,
            column: self.column + columns,
        }
    }
}

/// A step of a field path.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Key(String),
    Index(usize),
}

/// Finds the positions of field paths such as `items[3].spec.ports[0].port` in the first document of `text`, YAML or
/// JSON (which YAML's grammar includes).
///
/// For a missing field, returns the position of the innermost present field around it.
pub fn locate(text: &str, paths: &[&str]) -> Vec<Option<Position>> {
    let wanted: Vec<Vec<Step>> = paths.iter().map(|path| steps(path)).collect();
    let mut found: Vec<Option<(usize, Position)>> = vec![None; paths.len()];
    walk(text, |here, position| {
        for (wanted, found) in wanted.iter().zip(&mut found) {
            // Compares from the end, because the last step differs most often.
            let depth = here.len();
            if depth <= wanted.len()
                && here.last() == wanted[..depth].last()
                && *here == wanted[..depth]
                && found.is_none_or(|(deepest, _)| depth > deepest)
            {
                *found = Some((depth, position));
            }
        }
    });
    found
        .into_iter()
        .map(|found| found.map(|(_, position)| position))
        .collect()
}

/// Returns the steps of a path. Keys with dots are written `["like.this"]`.
fn steps(path: &str) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut rest = path;
    while !rest.is_empty() {
        if let Some(quoted) = rest.strip_prefix("[\"") {
            let (key, after) = quoted.split_once("\"]").unwrap_or((quoted, ""));
            steps.push(Step::Key(key.to_owned()));
            rest = after;
        } else if let Some(index) = rest.strip_prefix('[') {
            let (index, after) = index.split_once(']').unwrap_or((index, ""));
            steps.extend(index.parse().map(Step::Index));
            rest = after;
        } else {
            let end = rest.find(['.', '[']).unwrap_or(rest.len());
            steps.push(Step::Key(rest[..end].to_owned()));
            rest = &rest[end..];
        }
        rest = rest.strip_prefix('.').unwrap_or(rest);
    }
    steps
}

/// A collection whose end was not reached.
enum Open {
    Sequence {
        next: usize,
    },
    Mapping {
        /// Whether the next node is a value, because its key was read.
        value: bool,
    },
    /// A collection as a key. Nodes inside it have no path.
    Key,
}

/// Calls `visit` with path and position of every node of the first document, parents first, until a syntax error.
fn walk(text: &str, mut visit: impl FnMut(&[Step], Position)) {
    let mut open: Vec<Open> = Vec::new();
    let mut path: Vec<Step> = Vec::new();
    let mut parser = Parser::new_from_str(text);
    while let Some(Ok((event, span))) = parser.next_event() {
        let position = Position {
            line: span.start.line(),
            column: span.start.col() + 1,
        };
        let (is_node, opens) = match &event {
            Event::Scalar(..) | Event::Alias(_) => (true, None),
            Event::SequenceStart(..) => (true, Some(Open::Sequence { next: 0 })),
            Event::MappingStart(..) => (true, Some(Open::Mapping { value: false })),
            Event::SequenceEnd | Event::MappingEnd => {
                // The value follows the key.
                if !matches!(open.pop(), Some(Open::Key)) {
                    close_node(&mut open, &mut path);
                }
                (false, None)
            }
            Event::DocumentEnd => return,
            _ => (false, None),
        };
        if !is_node {
            continue;
        }
        match open.last_mut() {
            Some(Open::Mapping {
                value: value @ false,
            }) => {
                // A key.
                *value = true;
                if let Event::Scalar(key, ..) = &event {
                    path.push(Step::Key(key.to_string()));
                } else {
                    path.push(Step::Key(String::new()));
                    if opens.is_some() {
                        open.push(Open::Key);
                    }
                }
                continue;
            }
            Some(Open::Key) => {
                if opens.is_some() {
                    open.push(Open::Key);
                }
                continue;
            }
            Some(Open::Sequence { next }) => {
                path.push(Step::Index(*next));
                *next += 1;
            }
            _ => {}
        }
        visit(&path, position);
        match opens {
            Some(collection) => open.push(collection),
            None => close_node(&mut open, &mut path),
        }
    }
}

/// Updates the state after the last event of a node.
fn close_node(open: &mut [Open], path: &mut Vec<Step>) {
    match open.last_mut() {
        Some(Open::Mapping {
            value: value @ true,
        }) if !path.is_empty() => {
            *value = false;
            path.pop();
        }
        Some(Open::Sequence { .. }) => _ = path.pop(),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str, path: &str) -> Option<(usize, usize)> {
        locate(text, &[path])[0].map(|position| (position.line, position.column))
    }

    #[test]
    fn fields_of_yaml() {
        let text = "items:\n- a: 1\n- a: [2, {b: 3}]\n  c.d/e: &x 4\n  ? [k, {l: m}]\n  : v\n  f: *x\nkind: List\n";
        assert_eq!(at(text, "items[0].a"), Some((2, 6)));
        assert_eq!(at(text, "items[1].a[1].b"), Some((3, 14)));
        assert_eq!(at(text, "items[1][\"c.d/e\"]"), Some((4, 13)));
        assert_eq!(at(text, "items[1].f"), Some((7, 6)));
        assert_eq!(at(text, "kind"), Some((8, 7)));
    }

    #[test]
    fn fields_of_json() {
        let text = "{\"items\": [\n\t{\"a\": 1},\n\t{\"a\": [2, {\"b\": 3}]}]}";
        assert_eq!(at(text, "items[0].a"), Some((2, 8)));
        assert_eq!(at(text, "items[1].a[1].b"), Some((3, 18)));
    }

    #[test]
    fn of_a_missing_field_the_innermost_around_it() {
        let text = "a:\n  b:\n  - c: 1\n";
        assert_eq!(at(text, "a.b[0].x"), Some((3, 5)));
        assert_eq!(at(text, "a.b[7].c"), Some((3, 5)));
        assert_eq!(at(text, ""), Some((1, 1)));
    }
}
