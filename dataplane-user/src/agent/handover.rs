//! From one agent to the next: the listening sockets of the mesh's proxy, so that no connection is
//! refused in between. See [`crate::proxy::handover`].

use std::{
    io,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::mpsc::Sender,
    thread,
};

use tokio::{
    runtime::Builder,
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};
use tracing::{info, warn};

use super::Event;
use crate::proxy::handover::{self, Named};

/// Where an agent waits for the one that will take its place: beside its socket.
fn path(socket: &Path) -> PathBuf {
    socket.with_extension("handover")
}

/// What an agent has from the one before.
#[derive(Debug, Default)]
pub struct Given {
    /// Its listening sockets.
    pub sockets: Named,
    /// As long as this is there, that one accepts from them, too.
    pub before: Option<UnixStream>,
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
pub fn finish(work: impl FnOnce() + Send + 'static) {
    let (done, finished) = oneshot::channel();
    thread::spawn(move || {
        work();
        // Nobody waits any more if a signal came.
        let _ = done.send(());
    });
    let wait = async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        tokio::select! {
            _ = finished => {}
            _ = terminate.recv() => warn!("SIGTERM again: not waiting any more"),
            _ = interrupt.recv() => warn!("SIGINT again: not waiting any more"),
        }
        Ok(())
    };
    let waited: io::Result<()> = Builder::new_current_thread()
        .enable_all()
        .build()
        .and_then(|runtime| runtime.block_on(wait));
    if let Err(error) = waited {
        warn!("not waiting for what the proxy relays: {error}");
    }
}
