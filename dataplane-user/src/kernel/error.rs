//! What can go wrong between us and the kernel, in words that say what to do.

use std::{
    io,
    path::{Path, PathBuf},
};

/// An error of the kernel room.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The binary carries no programs.
    #[error(transparent)]
    BuiltWithoutPrograms(#[from] super::object::BuiltWithoutPrograms),
    /// Another agent holds the tables.
    #[error(
        "another agent{} runs on {directory}: one node has one; stop it first, or give this one \
         its own --bpffs and --cgroup",
        pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default()
    )]
    Busy {
        /// The directory with the pins.
        directory: PathBuf,
        /// Who, as far as `/proc/locks` tells.
        pid: Option<u32>,
    },
    /// The directory for pins is on no bpffs.
    #[error(
        "{path} is not on a BPF filesystem: mount one (`mount -t bpf bpf {path}`), or choose \
             a directory on one with --bpffs"
    )]
    NotBpffs {
        /// The directory.
        path: PathBuf,
    },
    /// No cgroup v2 is mounted.
    #[error("no cgroup v2 is mounted here: {}", mount_advice(hidden.as_deref()))]
    NoCgroup2 {
        /// Where process 1 sees one, if it does.
        hidden: Option<PathBuf>,
    },
    /// What was given as a cgroup is none of version 2.
    #[error(
        "{path} is no directory of a cgroup v2 file system{}; nothing was changed",
        root.as_ref().map(|root| format!(": give --cgroup one at or below {}", root.display()))
            .unwrap_or_default()
    )]
    NotCgroup2 {
        /// The directory.
        path: PathBuf,
        /// Where a cgroup v2 is mounted.
        root: Option<PathBuf>,
    },
    /// A pin is there that is not ours.
    #[error(
        "{path} is not ours: {found}, where {wanted} was expected. It was left alone; move it \
             away, or choose another directory with --bpffs"
    )]
    Foreign {
        /// The pin.
        path: PathBuf,
        /// What it is.
        found: String,
        /// What it should be.
        wanted: String,
    },
    /// Our own pins are incomplete while programs are attached.
    #[error(
        "{path}: {what}, while our programs are attached. Nothing was changed; `dataplane \
             cleanup` removes what is left, after which the agent starts afresh"
    )]
    Damaged {
        /// The pin.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A table would have to be larger than its limit.
    #[error(
        "table {table} is full: {needed} entries are needed, the limit is {limit} (raise it \
             with {knob}). The tables serve on as they were"
    )]
    TableFull {
        /// Its name.
        table: &'static str,
        /// How many entries are needed.
        needed: u64,
        /// How many are allowed.
        limit: u32,
        /// The option that raises the limit.
        knob: &'static str,
    },
    /// Services have more source ranges than there is room for.
    #[error(
        "table SOURCES is full: loadBalancerSourceRanges of all services need {needed} entries, \
             there is room for {limit}. The tables serve on as they were"
    )]
    SourcesFull {
        /// How many are needed.
        needed: u32,
        /// How many there is room for.
        limit: u32,
    },
    /// The kernel would not make a larger table.
    #[error(
        "table {table} could not grow to {capacity} entries: {source}. The tables serve on as \
             they were"
    )]
    Grow {
        /// Its name.
        table: &'static str,
        /// How many entries it was to have.
        capacity: u32,
        /// The kernel's word.
        source: io::Error,
    },
    /// A program was not loaded.
    #[error("the kernel refused program {program}: {source}")]
    Load {
        /// Its name.
        program: &'static str,
        /// The kernel's word, with the verifier's log.
        source: Box<aya::programs::ProgramError>,
    },
    /// The object with the programs was not understood, or its maps not created.
    #[error("the kernel programs could not be prepared: {0}")]
    Object(#[from] Box<aya::EbpfError>),
    /// A call failed.
    #[error("{what}: {source}")]
    Io {
        /// What was being done, to what.
        what: String,
        /// The kernel's word.
        source: io::Error,
    },
}

/// What to do where no cgroup v2 is mounted; `hidden`: where process 1 sees one.
fn mount_advice(hidden: Option<&Path>) -> String {
    match hidden {
        Some(path) => format!(
            "process 1 has one at {}, which the mount namespace of this process hides, as `ip netns \
             exec` does with a /sys of its own; enter the network namespace with `nsenter \
             --net=/run/netns/NAME` instead",
            path.display()
        ),
        None => "mount one (`mount -t cgroup2 none /sys/fs/cgroup`), or boot with \
                 systemd.unified_cgroup_hierarchy=1"
            .to_owned(),
    }
}

impl Error {
    /// Whether the cause is want of privilege.
    pub fn is_permission(&self) -> bool {
        let denied = |e: &io::Error| e.kind() == io::ErrorKind::PermissionDenied;
        match self {
            Self::Io { source, .. } | Self::Grow { source, .. } => denied(source),
            _ => false,
        }
    }
}

/// Says what was being done when a call failed.
pub trait Doing<T> {
    /// Adds `what` to an I/O error.
    ///
    /// # Errors
    /// The same error, explained.
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, Error>;
}

impl<T, E: Into<io::Error>> Doing<T> for Result<T, E> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, Error> {
        self.map_err(|source| Error::Io {
            what: what(),
            source: source.into(),
        })
    }
}
