//! The upkeep of flows and sockets, on a thread of its own so that it delays nothing else: the thread removes flows
//! that are over, ends flows and sockets that lead to an endpoint that went away, removes session affinity that is over, and
//! checks where pods' sockets are and where the node's routes to pods lead.

mod affinity;
mod endings;
mod nf_conntrack;
mod pods;
mod sockets;
mod walk;

use std::{
    convert::Infallible,
    sync::{
        Arc,
        mpsc::{self, Sender},
    },
    thread::JoinHandle,
    time::Duration,
};

use admin::State;
use dataplane_common::Protocol;
use kernel::{DirectFlows, conntrack::Conntrack, sockets::Peers};
use plan::{Departed, Served};
use tokio::sync::watch;

pub use self::nf_conntrack::{Imported, import};
use self::{affinity::Affinity, endings::Endings, pods::Pods, sockets::Sockets, walk::Walk};
use super::{Event, attacher, deaths, interfaces::PacketSettings};

/// How long to rest between two walks through all flows.
const REST: Duration = Duration::from_secs(10);
/// A job that walks or looks rests afterwards, so that it takes at most one part in so many of one CPU.
const SHARE: u32 = 20;

/// The running thread.
#[derive(Debug)]
pub struct Flows {
    jobs: Sender<Job>,
    thread: JoinHandle<Option<()>>,
}

#[derive(Debug)]
enum Job {
    Departed(Departed),
    Stop,
}

/// The thread is to end.
struct Stopped;

impl Flows {
    /// Starts the thread. `destroy`: the protocols whose sockets to destroy if they are connected to endpoints that
    /// went away. `direct`: whether the programs look for flows that do not belong to a service. `attacher` learns when no flow
    /// is on the path through the stack any more.
    ///
    /// # Errors
    /// If the pinned tables are not ours, or the thread cannot be started.
    pub fn start(
        state: &Arc<State>,
        served: watch::Receiver<Served>,
        destroy: Vec<Protocol>,
        direct: Arc<DirectFlows>,
        packet: PacketSettings,
        attacher: Sender<attacher::Job>,
        events: &Sender<Event>,
    ) -> Result<Self, kernel::Error> {
        let bpffs = &state.paths.bpffs;
        let (jobs, received) = mpsc::channel();
        let mut worker = Worker {
            sockets: Sockets::open(Arc::clone(state))?,
            walk: Conntrack::open(bpffs)?
                .map(|_| Walk::new(Arc::clone(state), served.clone(), direct, attacher)),
            affinity: Affinity::new(Arc::clone(state), served.clone()),
            endings: Endings::new(
                received,
                Arc::clone(state),
                Peers::open(bpffs)?.filter(|_| !destroy.is_empty()),
                destroy,
            ),
            pods: Pods::new(Arc::clone(state), served, packet),
        };
        let thread = threads::start("flows", deaths(events), move || {
            let Err(Stopped) = worker.run();
        });
        let thread = thread.map_err(|source| kernel::Error::Io {
            what: "cannot start the thread that ends flows".to_owned(),
            source,
        })?;
        Ok(Self { jobs, thread })
    }

    /// Ends flows and sockets that lead to endpoints that went away, soon.
    pub fn departed(&self, departed: Departed) {
        if !departed.is_empty() {
            // Fails only if the thread is gone, which is reported when it is joined.
            let _ = self.jobs.send(Job::Departed(departed));
        }
    }

    /// Ends the thread.
    pub fn stop(self) {
        let _ = self.jobs.send(Job::Stop);
        let _ = self.thread.join();
    }
}

struct Worker {
    sockets: Sockets,
    /// `None`: there is no packet path.
    walk: Option<Walk>,
    affinity: Affinity,
    endings: Endings,
    pods: Pods,
}

impl Worker {
    /// Runs until the thread is to end. Endpoints that went away are handled whenever the other jobs rest.
    fn run(&mut self) -> Result<Infallible, Stopped> {
        self.sockets.purge();
        loop {
            if let Some(walk) = &mut self.walk {
                walk.run(|rest| self.endings.handle(rest))?;
            }
            self.affinity.expire();
            self.endings.handle(REST)?;
            self.sockets.sweep();
            self.pods.check();
        }
    }
}
