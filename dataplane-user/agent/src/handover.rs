//! Hand-over from one agent to the next, and back: the listening sockets of the mesh's proxy, so that no connection is
//! refused in between, and the [`Turn`]. See [`proxy::handover`].
//!
//! An agent that stays idle after another agent has taken its place takes the place back when the other agent is gone.
//! The successor keeps its end of their connection for as long as it serves. When the successor is asked to end, it
//! first announces this ([`give_back`]), and hands the place and its sockets back as it would to any other agent. When
//! it is killed, it leaves the turn to the idle agents that wait for it.

use std::{
    fs::{self, File, TryLockError},
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::{fs::OpenOptionsExt as _, net::UnixStream},
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use proxy::handover::{self, Named};
use threads::may_panic;
use tokio::{
    runtime::Builder,
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};
use tracing::{info, warn};

use super::{Event, deaths, mesh::Mesh};

/// Only root opens the file of a [`Turn`].
const PRIVATE: u32 = 0o600;

/// Longer than any connection is relayed. (Clocks can still represent it.)
const FOR_GOOD: Duration = Duration::from_hours(365 * 24);

/// How often an idle agent checks whether it is its turn, if no other agent notifies it.
const LOOK: Duration = Duration::from_millis(50);
/// How long an agent whose place was taken accepts connections at most.
pub const LOADING: Duration = Duration::from_mins(1);
/// How long an agent waits for one that has the turn and does not hand over its place, because it starts or ends.
const STARTING: Duration = Duration::from_secs(10);
/// The pause before the next agent is accepted, after accepting failed.
const PAUSE: Duration = Duration::from_millis(100);
/// "I am ending: take your place back".
const ENDING: [u8; 1] = [4];
/// The name of a turn in a hand-over.
const TURN: &str = "turn";

/// The path at which an agent waits for its successor: beside its socket.
fn path(socket: &Path) -> PathBuf {
    socket.with_extension("handover")
}

/// The right to serve on this node. An agent has it from its start to its end and hands it to its successor; idle
/// agents wait for it. It is a lock on a file (`flock(2)`): the lock is released when the last copy of the descriptor,
/// in any process, is closed. So it goes from process to process without being free in between, and is free when the
/// process that has it is gone, however it ended.
#[derive(Debug)]
pub struct Turn(File);

impl Turn {
    /// Takes the turn; `None`: another agent has it. `socket`: the agent's socket, beside which the file is.
    ///
    /// # Errors
    /// If the file cannot be made or locked.
    pub fn take(socket: &Path) -> io::Result<Option<Self>> {
        let path = socket.with_extension(TURN);
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory)?;
        }
        let mut options = File::options();
        let file = options
            .create(true)
            .truncate(false)
            .write(true)
            .mode(PRIVATE)
            .open(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Self(file))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// The name and descriptor of the turn, for a successor.
    pub fn named(&self) -> (String, BorrowedFd<'_>) {
        (TURN.to_owned(), self.0.as_fd())
    }
}

/// The parts that an agent inherits from its predecessor.
#[derive(Debug, Default)]
pub struct Inherited {
    /// Its turn.
    pub turn: Option<Turn>,
    /// Its listening sockets.
    pub sockets: Named,
    /// While this connection is open, the predecessor accepts from the sockets, too. The agent has to notify it when it
    /// serves ([`handover::serves`]); if the agent ends before, the predecessor takes its place back.
    pub before: Option<UnixStream>,
}

/// Proxies of this process that have no listening sockets any more and still relay connections: one for each time that
/// the agent took its place back.
#[derive(Debug, Default)]
pub struct Draining(Vec<Receiver<()>>);

impl Draining {
    /// Returns the parts that an agent inherits from itself when it takes its place back. Its old proxy goes on
    /// accepting until the next proxy does, and relaying for as long as the process lives.
    pub fn behind(&mut self, mesh: Mesh) -> Inherited {
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
        Inherited {
            turn: None,
            sockets,
            before,
        }
    }

    /// Accepts no more connections, and relays the present ones for so long at most.
    pub fn drain(&mut self, mesh: Mesh, at_most: Duration) {
        let (relaying, done) = mpsc::channel();
        self.0.push(done);
        thread::spawn(move || {
            mesh.stop(at_most, false);
            drop(relaying);
        });
    }

    /// Waits until these proxies are done.
    pub fn end(self, deadline: Instant) {
        for relaying in self.0 {
            // Nothing is ever sent: the channel closes.
            let _ = relaying.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        }
    }
}

/// Takes the place of the running agent, if there is one. When this returns, that agent has given up everything, and
/// only still accepts connections.
///
/// # Errors
/// If it does not hand over its place; then it goes on serving.
pub fn take(socket: &Path) -> io::Result<Inherited> {
    let deadline = Instant::now() + STARTING;
    loop {
        if let Some((stream, named)) = handover::ask(&path(socket))? {
            let (turns, sockets): (Named, Named) =
                named.into_iter().partition(|(name, _)| name == TURN);
            info!(
                sockets = sockets.len(),
                "taking the place of the agent that runs"
            );
            let before = Some(handover::taken(stream)?);
            return Ok(Inherited {
                turn: turns.into_iter().next().map(|(_, fd)| Turn(fd.into())),
                sockets,
                before,
            });
        }
        if let Some(turn) = Turn::take(socket)? {
            return Ok(Inherited {
                turn: Some(turn),
                ..Inherited::default()
            });
        }
        // It does not listen for successors yet, or no longer.
        if Instant::now() > deadline {
            let text = "the other agent holds agent.turn and does not answer; end that agent and start again";
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        thread::sleep(LOOK);
    }
}

/// Asks the idle agent whose place this one has to take the place back. `false`: that agent is gone.
pub fn give_back(mut before: &UnixStream) -> bool {
    before.write_all(&ENDING).is_ok()
}

/// Waits until this agent has to take its place back. Either the agent in its place is gone, and this one gets the
/// turn; or that agent is ending (`None`), and this one has to [`take`] the place from it. `next`: the connection to
/// that agent.
///
/// # Errors
/// If it cannot be found out whether the turn is free.
pub fn idle(next: Option<UnixStream>, socket: &Path, bpffs: &Path) -> io::Result<Option<Turn>> {
    let mut next = next.filter(|stream| stream.set_read_timeout(Some(LOOK)).is_ok());
    loop {
        if let Some(turn) = Turn::take(socket)? {
            // A killed process may release the turn before the writer's lock.
            if kernel::writer(bpffs).is_none() {
                return Ok(Some(turn));
            }
            drop(turn);
            thread::sleep(LOOK);
        }
        let Some(stream) = &mut next else {
            thread::sleep(LOOK);
            continue;
        };
        let mut word = [0];
        match stream.read(&mut word) {
            Ok(1) if word == ENDING => return Ok(None),
            Ok(1) => {}
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) => {}
            // It is gone, or idle itself: the serving agent notifies the next in line.
            Ok(_) | Err(_) => next = None,
        }
    }
}

/// Called with the successor's connection if it has the sockets, or with the error.
type Tell = dyn Fn(io::Result<UnixStream>) + Send + Sync;

/// Hands listening sockets to a successor, on a thread of its own: the successor may be slow, and the served objects
/// change meanwhile.
pub struct Offers {
    tell: Arc<Tell>,
    /// Whether a hand-over is in progress.
    busy: Arc<AtomicBool>,
}

impl Offers {
    /// `tell` is called with the outcome of each hand-over.
    pub fn new(tell: impl Fn(io::Result<UnixStream>) + Send + Sync + 'static) -> Self {
        Self {
            tell: Arc::new(tell),
            busy: Arc::default(),
        }
    }

    /// Begins a hand-over. While one is in progress, another successor is turned away.
    pub fn offer<'a>(
        &self,
        stream: UnixStream,
        sockets: impl Iterator<Item = (String, BorrowedFd<'a>)>,
    ) {
        if let Err(error) = self.begin(stream, sockets) {
            (self.tell)(Err(error));
        }
    }

    fn begin<'a>(
        &self,
        stream: UnixStream,
        sockets: impl Iterator<Item = (String, BorrowedFd<'a>)>,
    ) -> io::Result<()> {
        if self.busy.swap(true, Ordering::Acquire) {
            return Err(io::Error::other("another agent already asks to take over"));
        }
        // Set back when the hand-over is over, in any way.
        let busy = Busy(Arc::clone(&self.busy));
        let copy = |(name, socket): (String, BorrowedFd<'_>)| {
            socket.try_clone_to_owned().map(|socket| (name, socket))
        };
        let sockets: Named = sockets.map(copy).collect::<io::Result<_>>()?;
        let tell = Arc::clone(&self.tell);
        let give = move || {
            let sockets = sockets.iter().map(|(name, fd)| (name.clone(), fd.as_fd()));
            let given = handover::offer(stream, &sockets.collect::<Vec<_>>());
            drop(busy);
            tell(given);
        };
        thread::Builder::new()
            .name("offer".to_owned())
            .spawn(give)
            .map(drop)
    }
}

/// Marks a hand-over as in progress.
#[derive(Debug)]
struct Busy(Arc<AtomicBool>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Waits for a successor. When this is dropped, no successor can come any more.
#[derive(Debug)]
pub struct Place(Option<PathBuf>);

impl Place {
    /// Passes successors on as events.
    ///
    /// # Errors
    /// If it cannot listen.
    pub fn open(socket: &Path, events: Sender<Event>) -> io::Result<Self> {
        let path = path(socket);
        let listener = handover::listen(&path)?;
        threads::start("handover", deaths(&events), move || {
            for stream in listener.incoming() {
                may_panic("handover");
                let sent = stream.map(|stream| events.send(Event::Replace(stream)));
                match sent {
                    Ok(Ok(())) => {}
                    Ok(Err(_)) => return,
                    Err(error) => {
                        warn!("cannot hear who wants to take over: {error}");
                        // If no file is left, accepting fails at once, again and again.
                        thread::sleep(PAUSE);
                    }
                }
            }
        })?;
        Ok(Self(Some(path)))
    }

    /// Another agent has the place, so the file there belongs to that agent.
    pub fn leave(mut self) {
        self.0 = None;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            // It may be gone already, and then there is nothing to do.
            let _ = fs::remove_file(path);
        }
    }
}

/// Does the remaining work at the end, unless a signal comes first: then the work is abandoned.
pub fn finish<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (done, finished) = oneshot::channel();
    thread::spawn(move || {
        // If a signal came, there is no receiver any more.
        let _ = done.send(work());
    });
    let wait = async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        Ok(tokio::select! {
            done = finished => done.ok(),
            _ = terminate.recv() => {
                warn!("SIGTERM: ending without waiting");
                None
            }
            _ = interrupt.recv() => {
                warn!("SIGINT: ending without waiting");
                None
            }
        })
    };
    let waited: io::Result<Option<T>> = Builder::new_current_thread()
        .enable_all()
        .build()
        .and_then(|runtime| runtime.block_on(wait));
    waited.unwrap_or_else(|error| {
        warn!("ending with work left: {error}");
        None
    })
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, os::unix::fs::PermissionsExt as _};

    use super::*;

    /// Longer than anything here takes, and shorter than the wait for an answer that never comes.
    const SOON: Duration = Duration::from_secs(5);

    /// A process that can open the file can lock it, and then no agent would start.
    #[test]
    fn only_root_takes_the_turn() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("agent.sock");
        let path = socket.with_extension(TURN);
        let _turn = Turn::take(&socket).unwrap().unwrap();
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            PRIVATE
        );
        assert!(Turn::take(&socket).unwrap().is_none());
    }

    #[test]
    fn who_asks_and_says_nothing_holds_up_nobody() {
        let (told, happened) = mpsc::channel();
        let offers = Offers::new(move |outcome| told.send(outcome).unwrap());
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let sockets = || [("outbound x".to_owned(), socket.as_fd())].into_iter();
        let pair = || UnixStream::pair().unwrap();
        let next = || happened.recv_timeout(SOON).unwrap();
        let started = Instant::now();
        let (silent, old) = pair();
        offers.offer(old, sockets());
        assert!(started.elapsed() < SOON);
        // Another successor is turned away at once, and may come again when the hand-over is over.
        let (_second, old) = pair();
        offers.offer(old, sockets());
        assert!(next().is_err());
        drop(silent);
        assert!(next().is_err());
        let (third, old) = pair();
        offers.offer(old, sockets());
        let third = thread::spawn(move || handover::taken(third).unwrap());
        let stream = next().unwrap();
        handover::gone(&stream);
        third.join().unwrap();
    }
}
