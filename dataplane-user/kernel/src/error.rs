//! Errors between the agent and the kernel. Each message names the remedy.

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
        "another agent{} already uses {directory}, and one directory can have only one agent: stop the other agent \
         first, use --replace, or give this agent its own --bpffs and --cgroup",
        pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default()
    )]
    Busy {
        /// The directory with the pins.
        directory: PathBuf,
        /// The process of the other agent, if `/proc/locks` names it.
        pid: Option<u32>,
    },
    /// The directory for pins is not on a bpffs.
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
        /// A cgroup v2 that process 1 sees, if there is one.
        hidden: Option<PathBuf>,
    },
    /// The directory that was set as the cgroup is not on a cgroup v2 file system.
    #[error(
        "{path} is not a directory on a cgroup v2 file system; nothing was changed{}",
        root.as_ref().map(|root| format!(". Set --cgroup to a directory at or below {}", root.display()))
            .unwrap_or_default()
    )]
    NotCgroup2 {
        /// The directory.
        path: PathBuf,
        /// The directory that a cgroup v2 is mounted at.
        root: Option<PathBuf>,
    },
    /// A pin that the agent did not make.
    #[error(
        "the pin {path} is not dataplane's: found {found}, expected {wanted}. Nothing was changed; move the pin \
             away, or choose another directory with --bpffs"
    )]
    Foreign {
        /// The pin.
        path: PathBuf,
        /// The kind of object that was found.
        found: String,
        /// The kind of object that was expected.
        wanted: String,
    },
    /// Our own pins are incomplete while programs are attached.
    #[error(
        "{path}: {what}, but dataplane's programs are attached. Nothing was changed; run `dataplane cleanup`, which \
             removes the remaining pins and programs, and start the agent again"
    )]
    Damaged {
        /// The pin.
        path: PathBuf,
        /// The fault.
        what: String,
    },
    /// Programs serve to which the guard of `dataplane guard` cannot be added.
    #[error(
        "programs of another version, or of an agent without a mesh, are attached by the pins in {directory}, and the \
         guard cannot be added to them. Nothing was changed; start the agent, or run `dataplane cleanup` first"
    )]
    OthersServe {
        /// The directory with the pins.
        directory: PathBuf,
    },
    /// A table would have to be larger than its limit.
    #[error(
        "table {table} is full: {needed} entries are needed, the limit is {limit}. The tables keep serving without \
             this change; raise {knob}"
    )]
    TableFull {
        /// Its name.
        table: &'static str,
        /// How many entries are needed.
        needed: u64,
        /// How many are allowed.
        limit: u32,
        /// The setting that raises the limit.
        knob: &'static str,
    },
    /// Services have more source ranges than there is room for.
    #[error(
        "table SOURCES is full: loadBalancerSourceRanges of all services need {needed} entries, the limit is {limit}. \
             The tables keep serving without this change; use fewer ranges"
    )]
    SourcesFull {
        /// How many are needed.
        needed: u32,
        /// How many there is room for.
        limit: u32,
    },
    /// The kernel refused to make a larger table.
    #[error(
        "table {table} could not grow to {capacity} entries: {source}. The tables keep serving without this change, \
             and the agent tries again"
    )]
    Grow {
        /// Its name.
        table: &'static str,
        /// How many entries it was to have.
        capacity: u32,
        /// The kernel's error.
        source: io::Error,
    },
    /// A program was not loaded.
    #[error("the kernel refused program {program}: {source}")]
    Load {
        /// Its name.
        program: &'static str,
        /// The kernel's error, with the verifier's log.
        source: Box<aya::programs::ProgramError>,
    },
    /// The object with the programs could not be parsed, or its maps could not be created.
    #[error("the kernel programs could not be prepared: {0}")]
    Object(#[from] Box<aya::EbpfError>),
    /// A call failed.
    #[error("{what}: {source}")]
    Io {
        /// The operation and its object.
        what: String,
        /// The kernel's error.
        source: io::Error,
    },
}

/// Returns the advice for a system without a mounted cgroup v2. `hidden` is a cgroup v2 that process 1 sees.
fn mount_advice(hidden: Option<&Path>) -> String {
    match hidden {
        Some(path) => format!(
            "process 1 has one at {}, but the mount namespace of this process hides it (`ip netns exec` mounts \
             a /sys of its own); enter the network namespace with `nsenter --net=/run/netns/NAME` instead",
            path.display()
        ),
        None => "mount one (`mount -t cgroup2 none /sys/fs/cgroup`), or boot with \
                 systemd.unified_cgroup_hierarchy=1"
            .to_owned(),
    }
}

impl Error {
    /// Tells if the cause is a missing privilege.
    pub fn is_permission(&self) -> bool {
        let denied = |e: &io::Error| e.kind() == io::ErrorKind::PermissionDenied;
        match self {
            Self::Io { source, .. } | Self::Grow { source, .. } => denied(source),
            _ => false,
        }
    }
}

/// Adds the operation to the error of a failed call.
pub trait Doing<T> {
    /// Adds `what` to an I/O error.
    ///
    /// # Errors
    /// The same error with the operation.
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
