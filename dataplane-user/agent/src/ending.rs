//! The end of an agent, by a signal or by another agent that takes its place.

use std::{
    io,
    os::unix::net::UnixStream,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use kernel::Kernel;
use proxy::handover::Outcome;
use settings::{OnExit, Settings};
use tracing::{info, warn};

use crate::{
    Error, cni_installer,
    handover::{self, Draining, Inherited, LOADING, Place, Turn},
    mesh::Mesh,
};

/// How long connections that the proxy relays may go on after a signal, and after another agent has
/// taken over.
const DRAIN: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(30)];
/// How long the kernel may take to close the files of a process that is gone.
const DYING: Duration = Duration::from_secs(2);

/// Why the agent ends.
#[derive(Debug)]
pub enum End {
    /// A signal.
    Told,
    /// Another agent has our sockets, and has to be notified when everything else is free. `told`: this agent was about
    /// to end anyway.
    Replaced { by: UnixStream, told: bool },
}

/// The parts that an agent has when it takes its place back.
#[derive(Default)]
pub struct Back {
    /// Its inheritance; `None`: the agent asks the ending agent in its place for it.
    pub given: Option<Inherited>,
    pub left: Draining,
}

/// An agent whose threads have ended, except the proxy's.
pub struct Ended {
    pub end: End,
    pub kernel: Kernel,
    pub mesh: Option<Mesh>,
    pub turn: Option<Turn>,
    pub place: Place,
}

impl Ended {
    /// Ends the rest. Returns what this process begins anew with if it takes its place back. `left`: the proxies that
    /// earlier agents of this process have left.
    pub fn end(
        self,
        settings: &Settings,
        bpffs: &Path,
        socket: &Path,
        left: Draining,
    ) -> Result<Option<Back>, Error> {
        let Self {
            end,
            kernel,
            mesh,
            turn,
            place,
        } = self;
        match end {
            End::Told => {
                drop(place);
                let detach = settings.on_exit.unwrap_or_default() == OnExit::Detach;
                if detach {
                    // Before pods wait for an agent that does not come back.
                    if let Some(cni) = &settings.cni
                        && let Err(why) = cni_installer::leave(&cni.conf_dir())
                    {
                        warn!("CNI plug-in: {why}; `dataplane cni uninstall` takes it out");
                    }
                    kernel.detach()?;
                    info!("ended; the programs are detached");
                } else {
                    drop(kernel);
                    info!("ended; the programs go on serving from the tables as they are");
                }
                finish(left, DRAIN[0], move |at_most| {
                    let Some(mesh) = mesh else { return };
                    if detach {
                        mesh.stop(at_most, true);
                    } else {
                        mesh.stop_last(at_most);
                    }
                    // No other agent can listen before.
                    drop(turn);
                });
                Ok(None)
            }
            End::Replaced { by, told } => {
                // The successor keeps copies of our sockets, so closing ours closes no listener.
                place.leave();
                drop((kernel, turn));
                let stay = settings.stay && !told;
                watch_successor(by, told, stay, mesh, (bpffs, socket), left)
            }
        }
    }
}

/// Lets the successor `by` take over, and takes its place back if it fails; with `stay` also if it ends later.
fn watch_successor(
    by: UnixStream,
    told: bool,
    stay: bool,
    mesh: Option<Mesh>,
    (bpffs, socket): (&Path, &Path),
    mut left: Draining,
) -> Result<Option<Back>, Error> {
    proxy::handover::gone(&by);
    info!("another agent has taken over");
    let next = by.try_clone().ok();
    // The successor loads its programs now: until it accepts, connections would wait.
    let outcome = handover::finish(|| proxy::handover::outcome(by, LOADING));
    let Some(outcome) = outcome else {
        return Ok(None);
    };
    // Another agent may have come meanwhile.
    if outcome == Outcome::Gone
        && !told
        && let Some(turn) = given_up(bpffs, socket).map_err(Error::Turn)?
    {
        warn!("the agent that took over ended before it served: taking over again");
        let given = mesh.map(|mesh| left.behind(mesh)).unwrap_or_default();
        let given = Some(Inherited {
            turn: Some(turn),
            ..given
        });
        return Ok(Some(Back { given, left }));
    }
    if !stay {
        finish(left, DRAIN[usize::from(!told)], move |at_most| {
            if let Some(mesh) = mesh {
                mesh.stop(at_most, false);
            }
        });
        return Ok(None);
    }
    if let Some(mesh) = mesh {
        left.drain(mesh, DRAIN[1]);
    }
    info!("another agent serves: idle until that agent ends or this agent gets a signal");
    let (socket, bpffs) = (socket.to_owned(), bpffs.to_owned());
    let Some(turn) = handover::finish(move || handover::idle(next, &socket, &bpffs)) else {
        return Ok(None);
    };
    let turn = turn.map_err(Error::Turn)?;
    warn!(
        "the agent that took over {}: taking over again",
        if turn.is_some() { "is gone" } else { "ends" }
    );
    let given = turn.map(|turn| Inherited {
        turn: Some(turn),
        ..Inherited::default()
    });
    Ok(Some(Back { given, left }))
}

/// Returns the turn of an agent that is gone, unless another agent has taken it. A killed process releases it after a
/// delay.
fn given_up(bpffs: &Path, socket: &Path) -> io::Result<Option<Turn>> {
    let deadline = Instant::now() + DYING;
    loop {
        if kernel::writer(bpffs).is_none()
            && let Some(turn) = Turn::take(socket)?
        {
            return Ok(Some(turn));
        }
        if Instant::now() > deadline {
            return Ok(None);
        }
        thread::sleep(DYING / 100);
    }
}

/// Lets proxies relay their connections to the end, for so long at most, unless a signal comes first. `stop`: stops the
/// proxy that has listening sockets.
fn finish(left: Draining, at_most: Duration, stop: impl FnOnce(Duration) + Send + 'static) {
    let deadline = Instant::now() + at_most;
    handover::finish(move || {
        stop(at_most);
        left.end(deadline);
    });
}
