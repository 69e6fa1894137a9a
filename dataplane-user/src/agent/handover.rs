//! From one agent to the next: the listening sockets of the mesh's proxy, so that no connection is
//! refused in between. See [`crate::proxy::handover`].

use std::{
    io,
    os::{fd::BorrowedFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    sync::mpsc::{self, Receiver, Sender},
    thread,
    time::{Duration, Instant},
};

use tokio::{
    runtime::Builder,
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};
use tracing::{info, warn};

use super::{Event, LOADING, mesh::Mesh};
use crate::proxy::handover::{self, Named};

/// Longer than anything is relayed. (A time that is never over, and that clocks can still count.)
const FOR_GOOD: Duration = Duration::from_hours(365 * 24);

/// Where an agent waits for the one that will take its place: beside its socket.
fn path(socket: &Path) -> PathBuf {
    socket.with_extension("handover")
}

/// What an agent has from the one before.
#[derive(Debug, Default)]
pub struct Given {
    /// Its listening sockets.
    pub sockets: Named,
    /// As long as this is there, that one accepts from them, too. It is to be told when this one serves
    /// ([`handover::serves`]); if this one ends before, that one takes its place back.
    pub before: Option<UnixStream>,
}

/// What proxies of this process relay that have no listening sockets any more: one for each time that the agent
/// took its place back.
#[derive(Debug, Default)]
pub struct Left(Vec<Receiver<()>>);

impl Left {
    /// What an agent that takes its place back has from itself. Its proxy goes on accepting until the next one does, and
    /// relaying for as long as the process lives.
    pub fn behind(&mut self, mesh: Mesh) -> Given {
        let copy = |(name, socket): (String, BorrowedFd<'_>)| {
            Some((name, socket.try_clone_to_owned().ok()?))
        };
        let sockets = mesh.sockets().filter_map(copy).collect();
        let pair = UnixStream::pair().ok();
        let (before, next) = pair.map_or((None, None), |(a, b)| (Some(a), Some(b)));
        let (relaying, done) = mpsc::channel();
        self.0.push(done);
        thread::spawn(move || {
            if let Some(next) = next {
                handover::outcome(next, LOADING);
            }
            mesh.stop(FOR_GOOD, false);
            drop(relaying);
        });
        Given { sockets, before }
    }

    /// Waits until that is over.
    pub fn end(self, deadline: Instant) {
        for relaying in self.0 {
            // Nothing is ever sent.
            let _ = relaying.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        }
    }
}

/// Takes the place of the agent that runs, if one does: when this returns nothing is its any more, but
/// that it accepts connections.
///
/// # Errors
/// If it does not give its place away; then it goes on.
pub fn take(socket: &Path) -> io::Result<Given> {
    let Some((stream, sockets)) = handover::ask(&path(socket))? else {
        return Ok(Given::default());
    };
    info!(
        sockets = sockets.len(),
        "taking the place of the agent that runs"
    );
    let before = Some(handover::taken(stream)?);
    Ok(Given { sockets, before })
}

/// Waits for the one that will take this one's place. Dropped, nobody can any more.
#[derive(Debug)]
pub struct Place(Option<PathBuf>);

impl Place {
    /// Passes on who asks.
    ///
    /// # Errors
    /// If it cannot listen.
    pub fn open(socket: &Path, events: Sender<Event>) -> io::Result<Self> {
        let path = path(socket);
        let listener = handover::listen(&path)?;
        thread::Builder::new()
            .name("handover".to_owned())
            .spawn(move || {
                for stream in listener.incoming() {
                    let sent = stream.map(|stream| events.send(Event::Replace(stream)));
                    match sent {
                        Ok(Ok(())) => {}
                        Ok(Err(_)) => return,
                        Err(error) => warn!("cannot hear who wants to take over: {error}"),
                    }
                }
            })?;
        Ok(Self(Some(path)))
    }

    /// Another agent has it: what is there is that one's.
    pub fn leave(mut self) {
        self.0 = None;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            // It may be gone already, and then there is nothing to do.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Does what is left to do at the end, unless a signal comes first: then it is left at that.
pub fn finish<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (done, finished) = oneshot::channel();
    thread::spawn(move || {
        // Nobody waits any more if a signal came.
        let _ = done.send(work());
    });
    let wait = async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        Ok(tokio::select! {
            done = finished => done.ok(),
            _ = terminate.recv() => {
                warn!("SIGTERM: not waiting any more");
                None
            }
            _ = interrupt.recv() => {
                warn!("SIGINT: not waiting any more");
                None
            }
        })
    };
    let waited: io::Result<Option<T>> = Builder::new_current_thread()
        .enable_all()
        .build()
        .and_then(|runtime| runtime.block_on(wait));
    waited.unwrap_or_else(|error| {
        warn!("not waiting for what is left to do: {error}");
        None
    })
}
