//! Splits a file into documents, and reads their objects.

use std::path::Path;

use serde::de::IgnoredAny;
use serde_path_to_error::{Deserializer as Tracked, Track};
use serde_saphyr::{budget, options};

use super::{
    document::{self, Document, Found, Sink},
    locate::Position,
};
use crate::ingest::plain;

/// Maximum length of a displayed path. Valid paths are much shorter.
const PATH_MAX: usize = 120;

/// Maximum number of bytes that aliases add to a document.
const ALIASED_MAX: usize = 4 << 20;

/// The format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// YAML, which includes JSON.
    Yaml,
    /// JSON, whose parser is faster.
    Json,
}

impl Format {
    /// Returns the format that the file's name suggests.
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

/// The reason why the reading of a document ended early.
#[derive(Debug)]
pub struct Stop {
    /// The position within the document.
    pub position: Option<Position>,
    /// The field that was being read.
    pub path: String,
    /// The fault.
    pub text: String,
}

/// Returns the documents of a file, without those that hold only comments.
///
/// In YAML no line inside a document may start with `---`, even in a quoted or block string. So the documents can be
/// separated before they are parsed, and a broken document does not hide faults in the others.
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

/// Returns whether a text is a directive such as `%YAML 1.2`, which belongs to the document after the next `---`.
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
        // Text that cannot be parsed is the last document. Reading it yields the fault.
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

/// Gives the objects of a file to `sink`, each with the index of its document. Returns the number of documents, and the
/// faults that ended the reading of one.
pub fn parse(
    text: &str,
    format: Format,
    sink: &mut dyn FnMut(usize, Option<usize>, Found<'_>),
) -> (usize, Vec<(usize, Stop)>) {
    let (mut number, mut rest, mut stops) = (0, text, Vec::new());
    while format == Format::Json && !rest.trim_start().is_empty() {
        let read = document::json(rest, &mut |item, found| sink(number, item, found));
        let Some(end) = read else { break };
        rest = &rest[end..];
        number += 1;
    }
    for text in documents(rest, format) {
        let read = document(text, format, &mut |item, found| sink(number, item, found));
        stops.extend(read.err().map(|stop| (number, stop)));
        number += 1;
    }
    (number, stops)
}

/// Gives a document's objects to `sink`: all of them, or those before the fault.
fn document(text: &str, format: Format, sink: &mut Sink<'_>) -> Result<(), Stop> {
    let read = match format {
        Format::Yaml => yaml(text, |deserializer| Document::read(deserializer, sink))
            .map_err(|error| describe_yaml(&error)),
        Format::Json => json(text, |deserializer| Document::read(deserializer, sink))
            .map_err(|error| describe_json(&error)),
    };
    let Err((position, fault)) = read else {
        return Ok(());
    };
    // Reads the document again and tracks the field. This is slower, so the first run does not do it.
    let mut track = Track::new();
    let sink: &mut Sink<'_> = &mut |_, _| {};
    match format {
        Format::Yaml => {
            _ = yaml(text, |of| {
                Document::read(Tracked::new(of, &mut track), sink)
            });
        }
        Format::Json => {
            _ = json(text, |of| {
                Document::read(Tracked::new(of, &mut track), sink)
            });
        }
    }
    Err(Stop {
        position,
        path: shown(&track.path().to_string()),
        text: fault,
    })
}

fn yaml<F>(text: &str, read: F) -> Result<(), serde_saphyr::Error>
where
    F: FnOnce(serde_saphyr::Deserializer<'_, '_>) -> Result<(), serde_saphyr::Error>,
{
    // The size of a file is already limited, and long lists are normal. The remaining limits are for growth beyond the
    // file: nesting, which needs stack, and aliases, whose text counts each time.
    let options = options! {
        budget: budget! {
            max_events: usize::MAX,
            max_nodes: usize::MAX,
            max_total_scalar_bytes: text.len() + ALIASED_MAX,
            max_recorded_anchor_events: 100_000,
        },
        // Words such as `no` and `y` are also names.
        strict_booleans: true,
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

/// Returns the path at which the parser stopped, as far as it helps to find the place.
fn shown(path: &str) -> String {
    // Steps without a name.
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
