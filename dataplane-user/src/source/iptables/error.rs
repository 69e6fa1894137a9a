//! Why rules have no services to serve.

use std::{fmt, path::PathBuf};

use super::leftover::Leftover;

/// As many lines are listed in an error.
const LISTED: usize = 20;

/// Why a text has no services to serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// A line is not of this format.
    Line {
        /// The text's origin.
        origin: String,
        /// The line's number, from 1.
        line: usize,
        /// The column, from 1, if a line is long.
        column: Option<usize>,
        /// The fault.
        what: String,
    },
    /// There are no rules of kube-proxy.
    NoRules(String),
    /// Table `nat` leads to kube-proxy's services, and table `filter` is missing or has nothing of kube-proxy.
    Half {
        /// The text's origin.
        origin: String,
        /// The family.
        family: &'static str,
    },
    /// Two texts have rules of kube-proxy for the same family.
    Twice {
        /// The first text's origin.
        first: String,
        /// The second text's origin.
        second: String,
        /// The family.
        family: &'static str,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line {
                origin,
                line,
                column,
                what,
            } => {
                write!(f, "{origin}:{line}:")?;
                if let Some(column) = column {
                    write!(f, "{column}:")?;
                }
                write!(f, " {what}")
            }
            Self::NoRules(origin) => write!(
                f,
                "{origin}: no rules of kube-proxy: neither a rule that leads to its chain KUBE-SERVICES in a table nat of \
                 iptables and no table kube-proxy of nf_tables"
            ),
            Self::Half { origin, family } => write!(
                f,
                "{origin}: table nat of {family} leads to kube-proxy's services, and no table filter with kube-proxy's chains \
                 is there, so services without endpoints are missing; save all tables"
            ),
            Self::Twice {
                first,
                second,
                family,
            } => write!(
                f,
                "kube-proxy has rules for {family} in {first} and in {second}; one of them is out of date: remove it first"
            ),
        }
    }
}

impl std::error::Error for Error {}

/// Why there are no rules to serve.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file cannot be read.
    #[error("{path}: {why}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// The kernel's rules cannot be had.
    #[error("cannot read kube-proxy's rules in the kernel: {0}")]
    Live(String),
    /// The text has no rules to serve.
    #[error(transparent)]
    Import(#[from] Error),
    /// Lines are not understood.
    #[error("{}", strict_text(.0, *.1))]
    Strict(Vec<Leftover>, usize),
}

fn strict_text(leftovers: &[Leftover], more: usize) -> String {
    let mut lines: Vec<String> = leftovers
        .iter()
        .take(LISTED)
        .map(Leftover::to_string)
        .collect();
    let more = more + leftovers.len().saturating_sub(LISTED);
    if more > 0 {
        lines.push(format!("and {more} more"));
    }
    lines.push("without --strict, the services that these lines concern are left out".to_owned());
    lines.join("\n")
}
