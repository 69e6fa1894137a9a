//! The engine of tunnels: relays the connections that the proxy hands over, and accepts the tunnels to workloads.

mod arrive;
mod carry;
mod dial;
mod live;
mod proxy_header;
#[cfg(test)]
mod tests;

use std::{
    collections::HashSet,
    fmt,
    net::TcpListener,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    thread,
    time::{Duration, Instant},
};

use identity::Identities;
use model::{HBONE, Workload};
use relay::{
    Attached, Direction, Flag, Handed, Index, Listener, Relay, TunnelView, Tunnelling,
    socket::Patience,
};

use self::{arrive::Arrive, live::Live};
use super::{Tunnels, inbound::Listening};

/// The interval at which the engine ends connections whose deadline has passed, and tunnels whose destination is gone.
const TICK: Duration = Duration::from_secs(1);
/// The interval at which the engine updates counters, as a number of ticks.
const COUNTS: u32 = 5;
/// The interval at which a draining engine checks for open connections.
const POLL: Duration = Duration::from_millis(10);
/// The time limit for connections to end after the engine has reset them.
const LAST: Duration = Duration::from_secs(1);

/// The parameters of the engine's connections.
#[derive(Clone, Debug)]
pub struct Manner {
    /// The trust domain of the workloads' identities.
    pub trust_domain: Arc<str>,
    /// The mark of every socket that connects (`SO_MARK`).
    pub mark: Option<u32>,
    /// The mark of sockets that connect to applications from a client's address; `None`: these sockets connect from their
    /// own address.
    pub transparent_mark: Option<u32>,
    /// The time limit for an application to accept a connection.
    pub connect_timeout: Duration,
    /// The time without a byte after which a connection is reset; `None`: never.
    pub idle_timeout: Option<Duration>,
    /// The times after which the kernel gives up the peer of a plain socket that is gone.
    pub patience: Patience,
}

/// The state that all connections share.
#[derive(Debug)]
struct Shared {
    relay: Arc<Relay>,
    manner: Manner,
    /// The port at which peers accept tunnels.
    port: u16,
    live: Arc<Live>,
}

/// The listening sockets of an attachment.
struct Place {
    attachment: u64,
    listening: Vec<Listening>,
    /// The time at which the engine resets the remaining connections; `None`: the attachment accepts tunnels.
    deadline: Option<Instant>,
}

impl Place {
    fn shut(&mut self, deadline: Instant) {
        self.deadline = Some(deadline);
        self.listening.iter().for_each(Listening::begin_drain);
    }

    fn is_drained(&self) -> bool {
        self.listening.iter().all(Listening::is_drained)
    }
}

/// The engine of tunnels. Dropping it resets its connections.
pub struct Engine<I> {
    shared: Arc<Shared>,
    tunnels: Tunnels<I>,
    places: Mutex<Vec<Place>>,
}

impl<I> fmt::Debug for Engine<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("shared", &self.shared)
            .finish_non_exhaustive()
    }
}

impl<I: Identities + 'static> Engine<I> {
    /// Makes an engine for the connections of a relay, which go through these tunnels.
    pub fn new(tunnels: Tunnels<I>, relay: Arc<Relay>, manner: Manner) -> Arc<Self> {
        Self::with_port(tunnels, relay, manner, HBONE)
    }

    fn with_port(tunnels: Tunnels<I>, relay: Arc<Relay>, manner: Manner, port: u16) -> Arc<Self> {
        let (shared, per_workload) = tunnels.files();
        relay.limits.keep_for_tunnels(shared, per_workload);
        let engine = Arc::new(Self {
            shared: Arc::new(Shared {
                relay,
                manner,
                port,
                live: Arc::default(),
            }),
            tunnels,
            places: Mutex::default(),
        });
        let this = Arc::downgrade(&engine);
        engine.tunnels.outbound(|_| upkeep(this));
        engine
    }

    fn places(&self) -> MutexGuard<'_, Vec<Place>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Resets the connections of attachments whose deadline has passed, and forgets those that have drained.
    fn cut(&self, now: Instant) {
        let live = &self.shared.live;
        self.places().retain(|place| match place.deadline {
            Some(deadline) if deadline <= now => {
                live.cut(|attachment| attachment == place.attachment);
                false
            }
            Some(_) => !(place.is_drained() && live.is_empty(|id| id == place.attachment)),
            None => true,
        });
    }

    /// Ends the outbound tunnels of attachments that are gone. They come from the network namespaces of these attachments.
    fn end_detached(&self) {
        let places = self.places();
        let present: HashSet<_> = places.iter().map(|place| place.attachment).collect();
        drop(places);
        self.tunnels
            .end_outbound(|attachment, _| !present.contains(&attachment));
    }

    /// Ends the tunnels to workloads that are gone: another workload may get the address.
    fn end_gone(&self, index: &Index) {
        for tunnel in self.tunnels.tunnels() {
            let Some(uid) = &tunnel.workload else {
                continue;
            };
            let known = index.workloads_at(tunnel.address.ip());
            if !known.iter().any(|workload| id(workload) == **uid) {
                self.tunnels.end_outbound(|_, workload| workload == &**uid);
            }
        }
    }
}

/// Runs the periodic work of an engine until the engine is dropped.
async fn upkeep<I: Identities + 'static>(engine: Weak<Engine<I>>) {
    let (mut seen, mut judged, mut ticks) = (0, 0, 0_u32);
    loop {
        tokio::time::sleep(TICK).await;
        let Some(engine) = engine.upgrade() else {
            return;
        };
        let shared = &engine.shared;
        engine.cut(Instant::now());
        engine.end_detached();
        // Read before the index: the index then has at least these policies.
        let policies = shared.relay.policies_version();
        let (version, index) = shared.relay.index();
        if version != seen {
            seen = version;
            engine.end_gone(&index);
        }
        if policies != judged {
            judged = policies;
            shared.live.judge(&index);
        }
        ticks = ticks.wrapping_add(1);
        if ticks.is_multiple_of(COUNTS) {
            shared.live.count(shared.manner.idle_timeout);
        }
    }
}

/// Returns a unique name of a workload: no earlier workload with its name or address has the same.
fn id(workload: &Workload) -> String {
    match workload.uid {
        Some(uid) => uid.to_string(),
        None => workload.name.to_string(),
    }
}

impl<I: Identities + 'static> Tunnelling for Engine<I> {
    fn carry(&self, handed: Handed) {
        let shared = Arc::clone(&self.shared);
        self.tunnels
            .outbound(|outbound| carry::carry(shared, handed, outbound));
    }

    fn tunnels(&self) -> Vec<TunnelView> {
        let tunnels = self.tunnels.tunnels().into_iter();
        let views = tunnels.map(|tunnel| TunnelView {
            attachment: tunnel.attachment,
            direction: match tunnel.workload {
                Some(_) => Direction::Outbound,
                None => Direction::Inbound,
            },
            peer: tunnel.peer.identity.clone(),
            address: tunnel.address,
            streams: tunnel.streams(),
        });
        views.collect()
    }

    fn held(&self) -> [usize; 2] {
        self.tunnels.held()
    }

    fn take(&self, attached: &Arc<Attached>, listeners: &Arc<[Listener]>) {
        let domain = &self.shared.manner.trust_domain;
        let Some(own) = attached.workload.identity(domain) else {
            return;
        };
        let of = (attached.id, own);
        let mut place = Place {
            attachment: attached.id,
            listening: Vec::new(),
            deadline: None,
        };
        for listener in listeners.iter().filter(|listener| listener.is_tunnel) {
            let inbound = Arc::new(Arrive::new(&self.shared, attached, of.1.clone()));
            let socket = listener.socket.try_clone().map(TcpListener::from);
            let listening =
                socket.and_then(|socket| self.tunnels.listen(socket, of.clone(), inbound));
            match listening {
                Ok(listening) => place.listening.push(listening),
                Err(error) => {
                    let name = &attached.workload.name;
                    tracing::error!("{name}: cannot accept tunnels: {error}");
                }
            }
        }
        self.places().push(place);
    }

    fn shut(&self, attached: &Attached, deadline: Instant) {
        let mut places = self.places();
        let its = places.iter_mut();
        its.filter(|place| place.attachment == attached.id)
            .for_each(|place| place.shut(deadline));
    }

    fn begin_drain(&self) {
        for place in self.places().iter() {
            place.listening.iter().for_each(Listening::begin_drain);
        }
    }

    fn drain(&self, deadline: Instant) {
        self.begin_drain();
        let live = &self.shared.live;
        let is_drained = || live.is_empty(|_| true) && self.places().iter().all(Place::is_drained);
        while !is_drained() && Instant::now() < deadline {
            thread::sleep(POLL);
        }
        live.cut(|_| true);
        self.places().clear();
        // The connections write their log lines themselves.
        let last = Instant::now() + LAST;
        while !live.is_empty(|_| true) && Instant::now() < last {
            thread::sleep(POLL);
        }
    }
}

/// Returns the outcome of a connection that was reset. `by_socket`: the plain socket was reset, and not the stream.
fn reset(direction: Direction, by_socket: bool) -> Flag {
    // The plain socket is the client's, or the application's.
    match (direction, by_socket) {
        (Direction::Outbound, true) | (Direction::Inbound, false) => Flag::ClientReset,
        (Direction::Outbound, false) | (Direction::Inbound, true) => Flag::EndpointReset,
    }
}
