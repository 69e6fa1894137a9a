//! Faults of manifests.

use std::{error::Error, fmt, path::PathBuf};

use super::locate::Position;

/// Maximum number of faults that are listed. Further faults are counted.
pub const FAULTS_LISTED: usize = 100;

/// A fault in a manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The file.
    pub file: PathBuf,
    /// The position in the file, if the fault has one.
    pub position: Option<Position>,
    /// The field, such as `items[3].spec.ports[0].port`. Empty if the fault concerns no field.
    pub path: String,
    /// The object, such as `Service default/web`, if its name could be read.
    pub object: Option<String>,
    /// The fault, and the expected value.
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

/// All faults of manifests. If there is a fault, no manifest is served, and the services from before stay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Errors {
    /// The faults in the order of files and lines, at most [`FAULTS_LISTED`].
    pub faults: Vec<Fault>,
    /// Number of further faults.
    pub more: usize,
}

impl Errors {
    /// Cuts the list to its maximum length.
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
