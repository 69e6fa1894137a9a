//! Collects faults for people. The lines are searched once all faults are known.

use std::{
    collections::BTreeMap,
    fmt::Write,
    path::{Path, PathBuf},
};

use super::{
    Errors, FAULTS_LISTED, Fault, files,
    locate::{Position, locate},
    parse::{self, Format},
};

/// The origin of an object.
#[derive(Clone, Copy, Debug)]
pub struct Origin {
    /// Index of the file.
    pub file: u32,
    /// Index of the document in the file.
    pub document: u32,
    /// Index in the document's list.
    pub item: Option<u32>,
}

impl Origin {
    /// Returns the path of a field of the object within the document.
    fn path(self, field: &str) -> String {
        match self.item {
            Some(item) if field.starts_with('[') => format!("items[{item}]{field}"),
            Some(item) => format!("items[{item}].{field}"),
            None => field.to_owned(),
        }
    }
}

/// A fault without a line.
struct Unplaced {
    origin: Origin,
    /// The path within the document.
    path: String,
    object: Option<String>,
    text: String,
    /// The position within the document, if the parser has it.
    position: Option<Position>,
    /// The origin of the other object, if the fault concerns two.
    other: Option<Origin>,
}

/// The faults found so far.
#[derive(Default)]
pub struct Faults {
    /// Faults of whole files.
    whole: Vec<Fault>,
    unplaced: Vec<Unplaced>,
    more: usize,
}

impl Faults {
    /// Returns whether there is no fault.
    pub fn is_empty(&self) -> bool {
        self.whole.is_empty() && self.unplaced.is_empty()
    }

    /// Adds a fault of a file or directory.
    pub fn whole(&mut self, file: PathBuf, text: String) {
        let path = String::new();
        self.whole.push(Fault {
            file,
            position: None,
            path,
            object: None,
            text,
        });
    }

    /// Adds a fault that ends the reading of a document.
    pub fn stop(&mut self, document: Origin, stop: parse::Stop) {
        self.add(Unplaced {
            origin: document,
            path: stop.path,
            object: None,
            text: stop.text,
            position: stop.position,
            other: None,
        });
    }

    /// Adds a fault of an object's field.
    pub fn field(&mut self, origin: Origin, field: &str, object: Option<String>, text: String) {
        let path = origin.path(field);
        self.add(Unplaced {
            origin,
            path,
            object,
            text,
            position: None,
            other: None,
        });
    }

    /// Adds an object that was already defined.
    pub fn twice(&mut self, origin: Origin, object: String, first: Origin) {
        self.add(Unplaced {
            origin,
            path: origin.path("metadata.name"),
            object: Some(object),
            text: "defined twice, first in".into(),
            position: None,
            other: Some(first),
        });
    }

    fn add(&mut self, fault: Unplaced) {
        if self.unplaced.len() < FAULTS_LISTED {
            self.unplaced.push(fault);
        } else {
            self.more += 1;
        }
    }

    /// Returns all faults for people. `read`: the files by index.
    pub fn place(self, read: &[PathBuf]) -> Errors {
        let positions = self.positions(read);
        let file = |origin: Origin| &read[origin.file as usize];
        let mut faults = self.whole;
        for (fault, (position, other)) in self.unplaced.into_iter().zip(positions) {
            let mut text = fault.text;
            if let Some(origin) = fault.other {
                _ = write!(text, " {}", file(origin).display());
                if let Some(Position { line, column }) = other {
                    _ = write!(text, ":{line}:{column}");
                }
            }
            faults.push(Fault {
                file: file(fault.origin).clone(),
                position,
                path: fault.path,
                object: fault.object,
                text,
            });
        }
        faults.sort_by(|a, b| (&a.file, a.position).cmp(&(&b.file, b.position)));
        let mut errors = Errors::of(faults);
        errors.more += self.more;
        errors
    }

    /// Returns the positions of the faults in their files, and of the other object if a fault concerns two.
    ///
    /// Reads the files again: a run without faults, which is the usual case, stores no text.
    fn positions(&self, read: &[PathBuf]) -> Vec<(Option<Position>, Option<Position>)> {
        // The paths to find in each document, and the fault of each.
        let mut asked: BTreeMap<(u32, u32), Vec<(usize, String)>> = BTreeMap::new();
        let faults = self.unplaced.len();
        for (number, fault) in self.unplaced.iter().enumerate() {
            let Origin { file, document, .. } = fault.origin;
            asked
                .entry((file, document))
                .or_default()
                .push((number, fault.path.clone()));
            if let Some(other) = fault.other {
                let path = other.path("metadata.name");
                asked
                    .entry((other.file, other.document))
                    .or_default()
                    .push((faults + number, path));
            }
        }
        let mut positions = vec![None; 2 * faults];
        let mut text = (None, String::new());
        for ((file, document), questions) in asked {
            let path: &Path = &read[file as usize];
            if text.0 != Some(file) {
                // A file that was removed in the meantime has no lines.
                text = (Some(file), files::read(path).unwrap_or_default());
            }
            let documents = parse::documents(&text.1, Format::of(path));
            let Some(document) = documents.get(document as usize) else {
                continue;
            };
            let before = &text.1[..document.as_ptr().addr() - text.1.as_ptr().addr()];
            let paths: Vec<&str> = questions.iter().map(|(_, path)| path.as_str()).collect();
            for ((number, _), found) in questions.iter().zip(locate(document, &paths)) {
                // The parser's position is more exact.
                let known = self.unplaced.get(*number).and_then(|fault| fault.position);
                positions[*number] = known.or(found).map(|position| position.after(before));
            }
        }
        let others = positions.split_off(faults);
        positions.into_iter().zip(others).collect()
    }
}
