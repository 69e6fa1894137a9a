//! Objects in the form in which they are read.

use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_path_to_error::{Path, Segment};

use crate::objects::{
    Findings,
    wire::{Metadata, Named},
};

/// An object in the form in which it is read: the text of JSON.
#[derive(Clone, Copy, Debug)]
pub struct Text<'a>(pub &'a str);

impl Text<'_> {
    /// Reads the fields of `T`. `None` if one cannot be read, which becomes a fault.
    pub fn read<T: DeserializeOwned>(self, findings: &mut Findings) -> Option<T> {
        if let Some(read) = self.try_read() {
            return Some(read);
        }
        // Tracks the field. This is slower, so the first run does not do it.
        let mut json = serde_json::Deserializer::from_str(self.0);
        let error = serde_path_to_error::deserialize::<_, T>(&mut json).err();
        let fault = match error {
            Some(error) => {
                let text = plain(&error.inner().to_string());
                (shown(error.path()), format!("{text}{}", advice(&text)))
            }
            None => (String::new(), "cannot be read".to_owned()),
        };
        findings.faults.push(fault);
        None
    }

    fn try_read<T: DeserializeOwned>(self) -> Option<T> {
        serde_json::from_str(self.0).ok()
    }

    /// Returns the object's name and version, even if the rest cannot be read.
    pub fn metadata(self) -> Metadata {
        let name = self.try_read::<Named>().unwrap_or_default().metadata;
        let text = |value: Value| value.as_str().map(str::to_owned);
        Metadata {
            name: text(name.name),
            namespace: text(name.namespace),
            resource_version: text(name.resource_version),
            ..Metadata::default()
        }
    }
}

/// Returns a field's path: `spec.ports[0].port`, `metadata.labels["a.b/c"]`.
fn shown(path: &Path) -> String {
    let steps = path.iter().map(|step| match step {
        Segment::Seq { index } => format!("[{index}]"),
        Segment::Map { key } if key.contains(|c: char| !c.is_ascii_alphanumeric()) => {
            format!("[{key:?}]")
        }
        Segment::Map { key } => format!(".{key}"),
        Segment::Enum { .. } | Segment::Unknown => String::new(),
    });
    let path: String = steps.collect();
    path.strip_prefix('.').unwrap_or(&path).to_owned()
}

/// Returns what to write instead of a value, if its quotes are wrong.
fn advice(fault: &str) -> &'static str {
    let types = fault.strip_prefix("invalid type: ");
    let Some((found, expected)) = types.and_then(|types| types.rsplit_once(", expected ")) else {
        return "";
    };
    let is_number = |text: &str| text.parse::<i64>().is_ok();
    match (found.split(' ').next(), expected) {
        (Some("integer" | "floating" | "boolean"), "a string") => "; write it in quotes",
        (Some("string"), "a boolean") => "; write true or false, without quotes",
        (Some("string"), "a whole number") if found.split('"').nth(1).is_some_and(is_number) => {
            "; write it without quotes"
        }
        _ => "",
    }
}

/// Returns a parser's message without the position, which is that in the document and not in the file, and without
/// terms of Rust.
pub fn plain(text: &str) -> String {
    // A quoted value may have such words, too. The position comes after it.
    let start = text.rfind('"').unwrap_or_default();
    let cut = [" at line ", " at (line "]
        .iter()
        .filter_map(|mark| text[start..].find(mark))
        .min();
    let text = text[..cut.map_or(text.len(), |cut| start + cut)].trim_end();
    if text.starts_with("budget breached") {
        return "more aliases or deeper nesting than a manifest has".into();
    }
    match text {
        "invalid i32" | "invalid i64" => "not a whole number; expected one".into(),
        "expected mapping start" => "not an object; expected a mapping of fields".into(),
        "expected sequence start" => "not a list; expected one".into(),
        _ => text
            .replace(
                "rejected by the configured policy",
                "has no value; write text in quotes",
            )
            .replace("expected i32", "expected a whole number")
            .replace("expected i64", "expected a whole number")
            .replace("expected u32", "expected a whole number from 0"),
    }
}
