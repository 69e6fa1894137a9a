//! A file's documents, and their objects.

use std::path::Path;

use model::Node;
use serde::de::{DeserializeSeed, IgnoredAny};
use serde_path_to_error::Track;
use serde_saphyr::{budget, options};

use super::{
    document::{Document, Entry},
    locate::Position,
};

/// Paths of fields are much shorter; those of broken files need not be shown to their end.
const PATH_MAX: usize = 120;

/// How a file is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// YAML, of which JSON is a part.
    Yaml,
    /// JSON: its parser is faster.
    Json,
}

impl Format {
    /// By the file's name.
    pub fn of(path: &Path) -> Self {
        if path
            .extension()
            .is_some_and(|extension| extension == "json")
        {
            Self::Json
        } else {
            Self::Yaml
        }
    }
}

/// What keeps a document from being read to its end.
#[derive(Debug)]
pub struct Stop {
    /// Where, within the document.
    pub position: Option<Position>,
    /// The field that was being read.
    pub path: String,
    /// What is wrong.
    pub text: String,
}

/// The documents of a file, without those that hold nothing but comments.
///
/// YAML allows no line that starts with `---` inside of a document, not even in a quoted or block
/// string; so documents can be told apart before they are parsed, and one that is broken does not
/// hide what is wrong in the others.
pub fn documents(text: &str, format: Format) -> Vec<&str> {
    let mut documents = match format {
        Format::Yaml => yaml_documents(text),
        Format::Json => json_documents(text),
    };
    documents.retain(|document| !is_blank(document));
    documents
}

fn yaml_documents(text: &str) -> Vec<&str> {
    let mut documents = Vec::new();
    let mut start = 0;
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let marker = line
            .strip_prefix("---")
            .is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\r', '\n']));
        if marker && at > start && !is_prologue(&text[start..at]) {
            documents.push(&text[start..at]);
            start = at;
        }
        at += line.len();
    }
    documents.push(&text[start..]);
    documents
}

/// Directives such as `%YAML 1.2` belong to the document whose `---` comes next.
fn is_prologue(text: &str) -> bool {
    text.lines().any(|line| line.starts_with('%'))
        && text
            .lines()
            .all(|line| line.is_empty() || line.starts_with(['%', '#']))
}

fn json_documents(text: &str) -> Vec<&str> {
    let mut documents = Vec::new();
    let mut start = 0;
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<IgnoredAny>();
    while let Some(value) = values.next() {
        // What cannot be parsed is the last document, to its end: reading it tells the reason.
        let end = if value.is_ok() {
            values.byte_offset()
        } else {
            text.len()
        };
        documents.push(&text[start..end]);
        start = end;
        if value.is_err() {
            break;
        }
    }
    documents
}

fn is_blank(text: &str) -> bool {
    text.lines().all(|line| {
        let line = line.trim_start_matches('\u{feff}').trim();
        let line = line
            .strip_prefix("---")
            .or_else(|| line.strip_prefix("..."))
            .unwrap_or(line);
        let line = line.trim_start();
        line.is_empty() || line.starts_with('#')
    })
}

/// Reads a document's objects into `entries`: all of them, or those before the place where it
/// stops.
pub fn parse(
    text: &str,
    format: Format,
    node: &Node,
    entries: &mut Vec<Entry>,
) -> Result<(), Stop> {
    let fast = match format {
        Format::Yaml => yaml(text, |deserializer| {
            Document { node, entries }.deserialize(deserializer)
        })
        .is_ok(),
        Format::Json => json(text, |deserializer| {
            Document { node, entries }.deserialize(deserializer)
        })
        .is_ok(),
    };
    if fast {
        Ok(())
    } else {
        Err(explain(text, format, node))
    }
}

/// Reads it again, this time keeping track of the field: that costs time, so not on the first run.
fn explain(text: &str, format: Format, node: &Node) -> Stop {
    let mut track = Track::new();
    let document = Document {
        node,
        entries: &mut Vec::new(),
    };
    let (position, text) = match format {
        Format::Yaml => {
            let result = yaml(text, |deserializer| {
                document.deserialize(serde_path_to_error::Deserializer::new(
                    deserializer,
                    &mut track,
                ))
            });
            result.err().map(|error| describe_yaml(&error))
        }
        Format::Json => {
            let result = json(text, |deserializer| {
                document.deserialize(serde_path_to_error::Deserializer::new(
                    deserializer,
                    &mut track,
                ))
            });
            result.err().map(|error| describe_json(&error))
        }
    }
    .unwrap_or_else(|| (None, "cannot be read".into()));
    Stop {
        position,
        path: shown(&track.path().to_string()),
        text,
    }
}

fn yaml<F>(text: &str, read: F) -> Result<(), serde_saphyr::Error>
where
    F: FnOnce(serde_saphyr::Deserializer<'_, '_>) -> Result<(), serde_saphyr::Error>,
{
    // A file's size is limited already, and lists of thousands of objects are what it is for. What
    // stays limited is what can grow beyond the file: nesting, which takes stack, and aliases.
    let options = options! {
        budget: budget! {
            max_events: usize::MAX,
            max_nodes: usize::MAX,
            max_total_scalar_bytes: usize::MAX,
            max_recorded_anchor_events: 100_000,
        },
        with_snippet: false,
    };
    serde_saphyr::with_deserializer_from_str_with_options(text, options, read)
}

fn json<'de, F>(text: &'de str, read: F) -> Result<(), serde_json::Error>
where
    F: FnOnce(
        &mut serde_json::Deserializer<serde_json::de::StrRead<'de>>,
    ) -> Result<(), serde_json::Error>,
{
    let mut deserializer = serde_json::Deserializer::from_str(text);
    read(&mut deserializer)?;
    deserializer.end()
}

fn describe_yaml(error: &serde_saphyr::Error) -> (Option<Position>, String) {
    let position = error.location().and_then(|location| {
        Some(Position {
            line: location.line().try_into().ok().filter(|&line| line > 0)?,
            column: location.column().try_into().ok()?,
        })
    });
    let text = error.without_snippet().to_string();
    (position, plain(&text))
}

fn describe_json(error: &serde_json::Error) -> (Option<Position>, String) {
    let position = Position {
        line: error.line(),
        column: error.column().max(1),
    };
    let text = error.to_string();
    ((error.line() > 0).then_some(position), plain(&text))
}

/// The parsers' messages without the position within the document, which is not that in the file,
/// and without words that only those know who write Rust.
pub fn plain(text: &str) -> String {
    let cut = [" at line ", " at (line "]
        .iter()
        .filter_map(|mark| text.find(mark))
        .min();
    let text = text[..cut.unwrap_or(text.len())].trim_end();
    if text.starts_with("budget breached") {
        return "more aliases or deeper nesting than a manifest has".into();
    }
    match text {
        "invalid i32" | "invalid i64" => "not a whole number; expected one".into(),
        "expected mapping start" => "not an object; expected a mapping of fields".into(),
        "expected sequence start" => "not a list; expected one".into(),
        _ => text
            .replace("expected i32", "expected a whole number")
            .replace("expected u32", "expected a whole number from 0"),
    }
}

/// As the path in which the parser stopped, as far as it helps to find the place.
fn shown(path: &str) -> String {
    // What has no name yet.
    let path = path.trim_end_matches(['?', '.']);
    match path.char_indices().nth(PATH_MAX) {
        Some((end, _)) => format!("{}…", &path[..end]),
        None => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_of_yaml() {
        for (text, wanted) in [
            ("a: 1\n---\nb: 2\n", vec!["a: 1\n", "---\nb: 2\n"]),
            (
                "---\r\na: 1\r\n---\r\n# b\r\n--- # c\r\nd: 1",
                vec!["---\r\na: 1\r\n", "--- # c\r\nd: 1"],
            ),
            ("# a\n--- {b: 1}\n---", vec!["--- {b: 1}\n"]),
            (
                "%YAML 1.2\n---\na: |\n  ---\n----: 2\n",
                vec!["%YAML 1.2\n---\na: |\n  ---\n----: 2\n"],
            ),
            ("---\n---\n...\n\n", vec![]),
        ] {
            assert_eq!(documents(text, Format::Yaml), wanted, "{text:?}");
        }
    }

    #[test]
    fn documents_of_json() {
        for (text, wanted) in [
            ("{} ", vec!["{}"]),
            (
                "{\"a\": 1}\n{\"b\": 2}\n",
                vec!["{\"a\": 1}", "\n{\"b\": 2}"],
            ),
            ("{}{\"a\": }\n{}", vec!["{}", "{\"a\": }\n{}"]),
            (" \n", vec![]),
        ] {
            assert_eq!(documents(text, Format::Json), wanted, "{text:?}");
        }
    }
}
