//! Errors of a lab.

use std::{io, path::PathBuf, process::ExitStatus};

/// A lab's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a lab could not be built or used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The description of the lab contradicts itself.
    #[error("this lab cannot be built: {0}")]
    Description(String),
    /// The machine lacks something that a lab needs.
    #[error("this machine cannot run a lab: {0}")]
    Requirement(String),
    /// The operating system refused.
    #[error("cannot {doing}: {source}")]
    Io {
        /// The attempted action, as a verb phrase: "create cgroup /sys/fs/cgroup/x".
        doing: String,
        /// The operating system's error.
        source: io::Error,
    },
    /// A program that the lab ran failed.
    #[error("{program} failed with {status}: {stderr}")]
    Failed {
        /// The program and its task.
        program: String,
        /// How it ended.
        status: ExitStatus,
        /// Its stderr, or its input if this explains more.
        stderr: String,
    },
    /// A program of this workspace has not been built.
    #[error(
        "the program {name} is not at {}: build it with `{build}`, or name it in {variable}",
        path.display()
    )]
    NotBuilt {
        /// The program.
        name: &'static str,
        /// Where it was looked for.
        path: PathBuf,
        /// How to build it.
        build: &'static str,
        /// The environment variable that names another place.
        variable: &'static str,
    },
    /// A program's answer does not have the promised form.
    #[error("{program} answered what cannot be understood ({reason}): {answer}")]
    Answer {
        /// The program.
        program: String,
        /// The reason.
        reason: String,
        /// The beginning of the answer.
        answer: String,
    },
    /// The agent did not become ready.
    #[error("the agent of {node} is not ready: {reason}\nits log:\n{log}")]
    AgentNotReady {
        /// The node.
        node: String,
        /// Exited, or which limit passed.
        reason: String,
        /// The end of its log.
        log: String,
    },
}

/// Adds the attempted action to an [`io::Error`].
pub(crate) trait Doing<T> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<io::Error>> Doing<T> for std::result::Result<T, E> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::Io {
            doing: what(),
            source: source.into(),
        })
    }
}
