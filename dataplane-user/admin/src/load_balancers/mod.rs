//! The ports that load balancers outside of the cluster ask: whether this node may serve traffic, and whether it has
//! endpoints of a service.
//!
//! They are kube-proxy's ports with kube-proxy's answers, and kube-proxy may still have them while it is being
//! replaced, or come back. So a port that cannot be opened is a problem in `status`, which is retried, and never a
//! reason not to serve.

mod healthz;
mod services;

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fmt,
    future::pending,
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Router, routing::any};
use model::{Gravity, Problem, ServiceName, Snapshot};
use services::Checks;
use tokio::{
    task::{AbortHandle, JoinError, JoinSet},
    time::{Instant, sleep, sleep_until},
};
use tracing::{error, info, warn};

use super::{
    State,
    limits::{all_checks, serve_checks},
    places::Shared,
};

/// How soon to retry a port that could not be opened.
const RETRY: Duration = Duration::from_secs(5);

/// How long a port takes to close.
const CLOSING: Duration = Duration::from_millis(50);

/// kube-proxy's headers.
const HEADERS: [(&str, &str); 2] = [
    ("Content-Type", "application/json"),
    ("X-Content-Type-Options", "nosniff"),
];

/// The topic of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Topic {
    /// `/healthz` and `/livez`.
    Node,
    /// `/proxyMode`.
    ProxyMode,
    /// Endpoints of a service.
    Service(ServiceName),
}

impl fmt::Display for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node => f.write_str("/healthz and /livez"),
            Self::ProxyMode => f.write_str("/proxyMode"),
            Self::Service(name) => write!(f, "the health check of Service {name}"),
        }
    }
}

/// An open port. Dropping it closes it.
#[derive(Debug)]
struct Door {
    topic: Topic,
    count: Arc<AtomicUsize>,
    /// The task that answers.
    answering: AbortHandle,
}

impl Drop for Door {
    fn drop(&mut self) {
        self.answering.abort();
    }
}

/// The mode of kube-proxy that the services correspond to: above all, where node ports are answered.
const PROXY_MODE: &str = "nftables";

/// Routes that tools ask kube-proxy for.
pub fn proxy_mode() -> Router {
    Router::new().route("/proxyMode", any(|| async { PROXY_MODE }))
}

/// Opens and closes ports as services change, for ever. `healthz` and `proxy_mode`: the addresses of `/healthz` and
/// `/proxyMode`.
pub async fn serve(healthz: Option<SocketAddr>, proxy_mode: Option<SocketAddr>, state: Arc<State>) {
    let mut desk = Desk {
        healthz,
        proxy_mode,
        state: Arc::clone(&state),
        checks: Checks::default(),
        open: BTreeMap::new(),
        refused: BTreeMap::new(),
        shared: all_checks(),
        tasks: JoinSet::new(),
    };
    let mut changes = state.changes();
    loop {
        let snapshot = changes.borrow_and_update().snapshot.clone();
        desk.checks.update(&snapshot);
        desk.arrange(&snapshot).await;
        let retry = desk.refused.values().map(|refusal| refusal.again).min();
        tokio::select! {
            Ok(()) = changes.changed() => {}
            () = until(retry) => {}
            Some(ended) = desk.tasks.join_next() => desk.close(ended),
        }
    }
}

async fn until(when: Option<Instant>) {
    match when {
        Some(when) => sleep_until(when).await,
        None => pending().await,
    }
}

/// Why a port is not open.
#[derive(Debug)]
struct Refusal {
    topic: Topic,
    why: String,
    again: Instant,
}

struct Desk {
    healthz: Option<SocketAddr>,
    proxy_mode: Option<SocketAddr>,
    state: Arc<State>,
    checks: Checks,
    open: BTreeMap<SocketAddr, Door>,
    refused: BTreeMap<SocketAddr, Refusal>,
    /// The connections that services' ports share.
    shared: Arc<Shared>,
    tasks: JoinSet<()>,
}

impl Desk {
    /// Handles the end of a task: because its port was closed, or by a fault. After a fault, the port has to be opened
    /// anew.
    fn close(&mut self, ended: Result<(), JoinError>) {
        let Err(died) = ended else { return };
        self.open.retain(|at, door| {
            let answers = !door.answering.is_finished();
            if !answers {
                let topic = &door.topic;
                error!(
                    "nobody answers at {at} for {topic}: {died}; listening anew. Please report this"
                );
            }
            answers
        });
    }

    /// Opens missing ports, closes unwanted ones, and passes on the counts.
    async fn arrange(&mut self, snapshot: &Snapshot) {
        let (wanted, mut problems) = self.wanted(&snapshot.node.addresses);
        let stays =
            |at: &SocketAddr, topic: &Topic| wanted.get(at).is_some_and(|(new, _)| new == topic);
        let before = self.open.len();
        self.open.retain(|at, door| stays(at, &door.topic));
        self.refused.retain(|at, r| stays(at, &r.topic));
        if self.open.len() < before {
            // Another service may have taken over the port, which is free after its task has ended.
            sleep(CLOSING).await;
        }
        for (at, (topic, count)) in wanted {
            if let Some(door) = self.open.get(&at) {
                door.count.store(count, Ordering::Relaxed);
                continue;
            }
            let now = Instant::now();
            if self.refused.get(&at).is_some_and(|r| r.again > now) {
                continue;
            }
            match self.open(at, topic.clone(), count) {
                Ok(door) => {
                    if self.refused.remove(&at).is_some() {
                        info!("listening on {at} for {topic} at last");
                    }
                    self.open.insert(at, door);
                }
                Err(error) => {
                    let why =
                        format!("cannot listen on {at}: {error}; trying again every {RETRY:?}");
                    let again = now + RETRY;
                    let refusal = Refusal { topic, why, again };
                    match self.refused.entry(at) {
                        Entry::Vacant(first) => {
                            warn!("{}: {}", refusal.topic, refusal.why);
                            first.insert(refusal);
                        }
                        Entry::Occupied(mut known) => _ = known.insert(refusal),
                    }
                }
            }
        }
        problems.extend(self.refused.values().map(|refusal| Problem {
            gravity: Gravity::Warning,
            place: refusal.topic.to_string(),
            text: refusal.why.clone(),
        }));
        self.state.load_balancers_cannot_ask(problems);
    }

    /// Returns the ports to open with their topics and counts; and problems with ports that are claimed twice.
    fn wanted(&self, node: &[IpAddr]) -> (BTreeMap<SocketAddr, (Topic, usize)>, Vec<Problem>) {
        let mut wanted = BTreeMap::new();
        let mut problems = Vec::new();
        wanted.extend(self.healthz.map(|at| (at, (Topic::Node, 0))));
        wanted.extend(self.proxy_mode.map(|at| (at, (Topic::ProxyMode, 0))));
        for (name, check) in &self.checks.by_service {
            for &addr in node {
                let count = if addr.is_ipv4() { check.v4 } else { check.v6 };
                let Some(count) = count else { continue };
                let topic = Topic::Service(name.clone());
                match wanted.entry(SocketAddr::new(addr, check.port)) {
                    Entry::Vacant(free) => _ = free.insert((topic, count)),
                    Entry::Occupied(taken) => problems.push(Problem {
                        gravity: Gravity::Warning,
                        place: topic.to_string(),
                        text: format!("{} is taken by {}", taken.key(), taken.get().0),
                    }),
                }
            }
        }
        (wanted, problems)
    }

    fn open(&mut self, at: SocketAddr, topic: Topic, count: usize) -> io::Result<Door> {
        let listener = bind(at)?;
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let is_of_service = matches!(topic, Topic::Service(_));
        let shared = is_of_service.then(|| Arc::clone(&self.shared));
        let count = Arc::new(AtomicUsize::new(count));
        let routes: Router = match &topic {
            Topic::Node => healthz::routes(&self.state),
            Topic::ProxyMode => proxy_mode(),
            Topic::Service(name) => services::routes(&self.state, name, &count),
        };
        let answering = self.tasks.spawn(serve_checks(listener, routes, shared));
        Ok(Door {
            topic,
            count,
            answering,
        })
    }
}

/// Listens. `0.0.0.0` is every address of both families where there is IPv6, as for kube-proxy.
fn bind(at: SocketAddr) -> io::Result<TcpListener> {
    if at.ip().is_unspecified() && at.is_ipv4() {
        let both = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), at.port());
        match TcpListener::bind(both) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => return Err(e),
            Ok(listener) => return Ok(listener),
            Err(_) => {}
        }
    }
    TcpListener::bind(at)
}
