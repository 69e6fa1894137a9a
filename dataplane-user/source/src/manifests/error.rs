//! What is wrong with manifests.

use std::{error::Error, fmt, path::PathBuf};

use super::locate::Position;

/// How many faults are listed; the rest are counted.
pub const FAULTS_LISTED: usize = 100;

/// One thing that is wrong in a manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The file.
    pub file: PathBuf,
    /// Where in it, if it is about a place in it.
    pub position: Option<Position>,
    /// The field, such as `items[3].spec.ports[0].port`; empty if it is about no field.
    pub path: String,
    /// The object, such as `Service default/web`, if that much could be read.
    pub object: Option<String>,
    /// What is wrong, and what is expected.
    pub text: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.file.display())?;
        if let Some(Position { line, column }) = self.position {
            write!(f, "{line}:{column}:")?;
        }
        if let Some(object) = &self.object {
            write!(f, " {object}:")?;
        }
        if !self.path.is_empty() {
            write!(f, " {}:", self.path)?;
        }
        write!(f, " {}", self.text)
    }
}

/// All that is wrong in manifests: with any of it, none of them is served, and what was served
/// before still is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Errors {
    /// In the order of files and lines; at most [`FAULTS_LISTED`].
    pub faults: Vec<Fault>,
    /// How many more there are.
    pub more: usize,
}

impl Errors {
    /// All of them, cut to what is listed.
    pub fn of(mut faults: Vec<Fault>) -> Self {
        let more = faults.len().saturating_sub(FAULTS_LISTED);
        faults.truncate(FAULTS_LISTED);
        Self { faults, more }
    }
}

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, fault) in self.faults.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            write!(f, "{fault}")?;
        }
        if self.more > 0 {
            write!(f, "\nand {} more", self.more)?;
        }
        Ok(())
    }
}

impl Error for Errors {}
