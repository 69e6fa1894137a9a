//! Objects in the form in which they are read.

use model::ServiceName;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_path_to_error::{Path, Segment};

use crate::objects::{
    self, Findings,
    wire::{Metadata, Named},
};

/// An object in the form in which it is read.
#[derive(Clone, Copy, Debug)]
pub enum Text<'a> {
    /// JSON.
    Json(&'a str),
    /// A value of JSON.
    Value(&'a Value),
}

impl Text<'_> {
    /// Reads the fields of `T`. `None` if one cannot be read, which becomes a fault.
    pub fn read<T: DeserializeOwned>(self, findings: &mut Findings) -> Option<T> {
        if let Some(read) = self.try_read() {
            return Some(read);
        }
        // Tracks the field. This is slower, so the first run does not do it.
        let error = match self {
            Self::Json(text) => {
                let mut json = serde_json::Deserializer::from_str(text);
                serde_path_to_error::deserialize::<_, T>(&mut json).err()
            }
            Self::Value(value) => serde_path_to_error::deserialize::<_, T>(value).err(),
        }?;
        let fault = (shown(error.path()), plain(&error.inner().to_string()));
        findings.faults.push(fault);
        None
    }

    fn try_read<T: DeserializeOwned>(self) -> Option<T> {
        match self {
            Self::Json(text) => serde_json::from_str(text).ok(),
            Self::Value(value) => T::deserialize(value).ok(),
        }
    }

    /// Returns the object's name and version, even if the rest cannot be read.
    pub fn metadata(self) -> Metadata {
        let name = self.try_read::<Named>().unwrap_or_default().metadata;
        Metadata {
            name: name.name,
            namespace: name.namespace,
            resource_version: name.resource_version,
            ..Metadata::default()
        }
    }

    /// Returns the object's name, even if the rest cannot be read.
    pub fn name(self) -> ServiceName {
        objects::object_name(&self.metadata())
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

/// Returns a parser's message without the position, which is that in the document and not in the file, and without
/// terms of Rust.
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
