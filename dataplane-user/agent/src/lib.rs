//! The agent: wires the source, the plan and the kernel together.
//!
//! One thread writes the tables of services (`sync`), one keeps programs on interfaces and capture in network
//! namespaces (`attacher`), one ends stale flows and sockets (`flows`), one reads the API, and one waits for signals,
//! changed files and requests to the endpoints (`waiter`): so none delays another. If one of them dies, or a thread
//! that relays connections, the agent ends with an error (`threads`).

#![forbid(unsafe_code)]

mod accepting;
pub mod addresses;
mod astray;
mod attacher;
pub mod cni_installer;
mod due;
mod earlier;
mod ending;
mod flows;
mod foreign;
mod handover;
mod input;
mod interfaces;
mod kept_addresses;
mod lookups;
mod mesh;
mod network;
mod node;
mod once;
mod own_rules;
mod path;
mod problems;
mod remembered;
pub mod roles;
mod source_checks;
mod start;
mod startup_taint;
mod supervisor;
mod sync;
mod waiter;

use std::{
    io,
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::{Arc, mpsc},
    time::Duration,
};

use accepting::Accepting;
pub use input::{Input, InputError, source};
use kernel::{ServiceTables, opener};
pub use mesh::{namespace_with, options as mesh_options};
pub use once::snapshot_of;
use plan::{AdoptError, Planner};
use settings::Settings;
use source::{OpenError, manifests};
use threads::Deaths;
use tracing::error;

/// Why the agent ended without a request to end.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The manifests cannot be served.
    #[error("{0}\nnothing was changed; correct the manifests and start the agent again")]
    Manifests(manifests::Errors),
    /// The source cannot be read for another reason, or the kernel does not return the node's facts.
    #[error(transparent)]
    Input(InputError),
    /// The agent cannot listen.
    #[error(transparent)]
    Listen(#[from] admin::ListenError),
    /// The kernel refused.
    #[error(transparent)]
    Kernel(#[from] kernel::Error),
    /// The existing tables are not ours, or broken.
    #[error("the tables in {}: {error}; `dataplane cleanup` removes them (services stop until the agent runs again)", bpffs.display())]
    Adopt {
        /// Where they are.
        bpffs: PathBuf,
        /// The reason.
        error: AdoptError,
    },
    /// The proxy cannot run.
    #[error(transparent)]
    Proxy(proxy::Error),
    /// The running agent cannot be replaced.
    #[error("cannot take over from the running agent: {0}; that agent keeps serving")]
    Replace(#[source] io::Error),
    /// It cannot be found out whether another agent has the turn.
    #[error("cannot find out whether another agent serves on this node: {0}")]
    Turn(#[source] io::Error),
    /// The process cannot be separated from its opener.
    #[error("cannot start the process that opens sockets in network namespaces: {0}")]
    Opener(#[source] io::Error),
    /// A thread cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] io::Error),
    /// The thread that waits ended.
    #[error("the agent's endpoints or signals failed: {0}")]
    Waiter(#[source] io::Error),
    /// A thread ended unexpectedly.
    #[error(
        "the agent's thread `{thread}` has died ({why}); the programs serve from the last tables; restart the \
         agent, and please report this"
    )]
    Died {
        /// The thread's name.
        thread: String,
        /// Its panic message.
        why: String,
    },
}

impl From<InputError> for Error {
    fn from(error: InputError) -> Self {
        match error {
            InputError::Open(OpenError::Manifests(errors)) => Self::Manifests(errors),
            other => Self::Input(other),
        }
    }
}

impl Error {
    /// Whether another agent runs on this node.
    pub fn is_busy(&self) -> bool {
        matches!(
            self,
            Self::Kernel(kernel::Error::Busy { .. })
                | Self::Listen(admin::ListenError::Busy { .. })
        )
    }
}

/// An event that the agent handles.
#[derive(Debug)]
enum Event {
    /// A signal to end.
    Stop(&'static str),
    /// SIGHUP.
    Reload,
    /// The source has a new view.
    Changed,
    /// The node's addresses may have changed.
    Addresses,
    /// The agent's proxy accepts tunnels to these Pods.
    Accepting(Accepting),
    /// Another agent asks to take this agent's place.
    Replace(UnixStream),
    /// Another agent has our place and our sockets.
    Replaced(UnixStream),
    /// The thread that waits cannot go on.
    Failed(io::Error),
    /// A thread has died, and why.
    Died(String, String),
}

/// How often to look at facts that may change without an event.
const LOOK: Duration = Duration::from_secs(30);
/// How often to look at listening sockets, while they decide what is served.
const LOOK_SOON: Duration = Duration::from_secs(1);
/// How soon to retry after a failure; doubled each time, up to [`LOOK`].
const RETRY: Duration = Duration::from_secs(1);
/// How long an ending agent waits for its predecessor to take its place back.
const RETURNING: Duration = Duration::from_secs(4);
/// Runs until a signal or a successor ends it. It changes nothing before all settings and objects have turned out to be
/// usable. `read`: reads the settings anew, for an agent that takes its place back.
///
/// # Errors
///
/// If it cannot start, or cannot go on. The programs go on serving from the tables that it had written.
pub fn run(
    mut settings: Settings,
    read: impl Fn() -> Result<Settings, String>,
) -> Result<(), Error> {
    kernel::process::return_large_allocations();
    // Before there are other threads, and before any input is read that others write.
    opener::separate().map_err(Error::Opener)?;
    let mut outdated = None;
    let mut back = None;
    loop {
        back = start::serve(&settings, outdated, back)?;
        if back.is_none() {
            return Ok(());
        }
        outdated = match read() {
            Ok(new) => {
                settings = new;
                None
            }
            Err(why) => {
                error!(
                    "cannot read the configuration again: {why}; serving with the earlier configuration"
                );
                Some(why)
            }
        };
    }
}

/// Reports the death of a thread as an event.
fn deaths(events: &mpsc::Sender<Event>) -> Deaths {
    let events = events.clone();
    Arc::new(move |thread, why| {
        // Fails only if the agent ends anyway.
        let _ = events.send(Event::Died(thread.to_owned(), why));
    })
}

/// Returns a planner that knows the contents of the kernel's tables.
fn adopt(
    tables: &ServiceTables,
    paths: &kernel::Paths,
    limits: kernel::tables::Limits,
) -> Result<Planner, Error> {
    let contents = tables.contents()?;
    // A running program may still read the slots that the earlier agent freed last.
    tables.grace()?;
    let planner = Planner::adopt(contents).map_err(|error| Error::Adopt {
        bpffs: paths.bpffs.clone(),
        error,
    })?;
    Ok(planner.with_room(limits.room()))
}
