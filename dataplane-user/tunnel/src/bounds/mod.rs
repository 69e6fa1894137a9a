//! The bounds on the inbound tunnels of the process, which namespaces, listening sockets and clients share.
//!
//! Tunnels whose handshake is not finished have a bound of their own, because their peers have not proven an identity. The
//! workloads of a namespace together have at most [`SHARE`] times as many tunnels as are free, so they leave room for other
//! namespaces. A listening socket has at most [`SHARE`] times as many as are free for its namespace, so it leaves room for
//! other sockets. A client has at most [`SHARE`] times as many as are free for all, for the namespace and for the socket, so
//! it leaves room for other clients. The limits on connections are shared in the same way.
//!
//! Several clients together can use up such a share. A client with few tunnels then takes the place of a tunnel of the client
//! with the most, if that tunnel carries no connection. Each time, the numbers of the clients' tunnels become more equal, so
//! clients cannot take places from each other in turn, without end. A namespace takes no place of a namespace that has fewer
//! tunnels, and a listening socket none of a socket that has fewer.

#[cfg(test)]
mod tests;

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use relay::{Client, Exceeded};
use tokio::sync::Notify;

use super::{PAUSE, Settings, tunnel::Tunnel};

/// The maximum number of tunnels of a namespace, listening socket or client, in multiples of the free ones.
const SHARE: usize = 4;
/// A client with at least so many tunnels takes no place of another client's tunnel. Clients with many are then refused without
/// a search.
const FEW: usize = 4;
/// The time after the handshake in which a tunnel without a stream keeps its place.
const NEW: Duration = Duration::from_secs(1);
/// The number of failed searches after which old ones are forgotten.
const FAILED: usize = 1024;
/// The index of the counts of tunnels whose handshake is not finished.
const UNFINISHED: usize = 0;
/// The index of the counts of all tunnels.
const ALL: usize = 1;
/// The names of the shared limits, by index.
const WHAT: [&str; 2] = [
    "unfinished TLS handshakes with this node",
    "tunnels to this node",
];
/// The name of the limit of a listening socket.
const OF_SOCKET: &str = "tunnels to this workload";
/// The index of the listening socket among the holders that are no clients.
const SOCKET: usize = 2;
/// The names of these holders: the process, the namespace and the listening socket.
const WHOSE: [&str; 3] = ["the agent", "its namespace", "its listener"];

/// A holder of tunnels. Each tunnel has one of each kind.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Holder {
    Process,
    Namespace(Arc<str>),
    Socket(u64),
    Client(Client),
    ClientOfNamespace(Arc<str>, Client),
    ClientOfSocket(u64, Client),
}

/// A listening socket of a workload.
#[derive(Debug)]
pub struct Socket {
    number: u64,
    namespace: Arc<str>,
}

/// A tunnel that has a place.
#[derive(Debug)]
struct Held {
    /// The process, the namespace and the listening socket, and then the client's share of each.
    holders: [Holder; 6],
    /// The tunnel, and the time of the end of its handshake.
    tunnel: OnceLock<(Arc<Tunnel>, Instant)>,
    /// Notified when a tunnel of another client takes the place.
    lost: Notify,
}

impl Held {
    /// Returns whether another tunnel may take the place, so that a tunnel less is counted at this stage. The first stream of a new
    /// tunnel may be on its way.
    fn may_end(&self, stage: usize) -> bool {
        self.tunnel.get().is_none_or(|(tunnel, since)| {
            let is_new = tunnel.opened() == 0 && since.elapsed() < NEW;
            stage == ALL && tunnel.streams() == 0 && !is_new
        })
    }
}

/// The tunnels that have a place.
#[derive(Debug, Default)]
struct Table {
    counts: HashMap<Holder, [usize; 2]>,
    /// The tunnels by age.
    held: BTreeMap<u64, Arc<Held>>,
    next: u64,
    /// The clients for which no place was found lately, and when.
    failed: HashMap<Holder, Instant>,
}

impl Table {
    fn count(&self, holder: &Holder) -> [usize; 2] {
        self.counts.get(holder).copied().unwrap_or_default()
    }

    fn add(&mut self, holders: [Holder; 6]) -> (u64, Arc<Held>) {
        for holder in &holders {
            let count = self.counts.entry(holder.clone()).or_default();
            *count = count.map(|count| count + 1);
        }
        let held = Arc::new(Held {
            holders,
            tunnel: OnceLock::new(),
            lost: Notify::new(),
        });
        let number = self.next;
        self.next += 1;
        self.held.insert(number, Arc::clone(&held));
        (number, held)
    }

    fn subtract(&mut self, held: &Held, stage: usize) {
        for holder in &held.holders {
            if let Some(count) = self.counts.get_mut(holder) {
                count[stage] -= 1;
                if count[ALL] == 0 {
                    self.counts.remove(holder);
                }
            }
        }
    }

    /// Removes a tunnel. Has no effect if another tunnel has taken its place.
    fn remove(&mut self, number: u64) {
        let Some(held) = self.held.remove(&number) else {
            return;
        };
        if held.tunnel.get().is_none() {
            self.subtract(&held, UNFINISHED);
        }
        self.subtract(&held, ALL);
        held.lost.notify_one();
    }

    /// Ends the oldest tunnel that [may end](Held::may_end) of the client that has the most tunnels of the `scope`, an index of
    /// the holders. Has no effect, and returns `false`, if no client has at least two tunnels more than the client of `holders`,
    /// or if nothing was found for this client a moment ago: the search looks at all tunnels.
    fn displace(&mut self, holders: &[Holder; 6], (scope, stage): (usize, usize)) -> bool {
        let client = &holders[scope + WHOSE.len()];
        if self
            .failed
            .get(client)
            .is_some_and(|at| at.elapsed() < PAUSE)
        {
            return false;
        }
        let has = |of: &[Holder; 6]| self.count(&of[scope + WHOSE.len()])[stage];
        let part = (scope + 1).min(SOCKET);
        let own = self.count(&holders[part])[stage];
        let leaves_part = |of: &Holder| *of == holders[part] || self.count(of)[stage] > own;
        let others = self.held.iter().filter(|(_, held)| {
            held.holders[scope] == holders[scope]
                && held.may_end(stage)
                && leaves_part(&held.holders[part])
        });
        let most = others
            .map(|(number, held)| (has(&held.holders), Reverse(*number)))
            .max();
        match most {
            Some((most, Reverse(number))) if most > has(holders) + 1 => {
                self.remove(number);
                true
            }
            _ => {
                if self.failed.len() >= FAILED {
                    self.failed.retain(|_, at| at.elapsed() < PAUSE);
                }
                self.failed.insert(client.clone(), Instant::now());
                false
            }
        }
    }
}

/// The bounds, and the number of tunnels of each holder.
#[derive(Debug)]
pub struct Bounds {
    most: [usize; 2],
    most_of_socket: usize,
    most_of_client: usize,
    table: Mutex<Table>,
    sockets: AtomicU64,
}

/// The answer to a new tunnel.
pub enum Admission {
    /// The tunnel has a place.
    Admitted(Place),
    /// The listening socket or its namespace has its share, so the tunnel waits.
    Wait(Exceeded),
    /// The client has this many tunnels of this kind, which is its share.
    Refused(usize, &'static str),
}

impl Bounds {
    /// Makes the bounds. `all`: the maximum number of tunnels of the process.
    pub fn new(settings: &Settings, all: usize) -> Self {
        Self {
            most: [settings.unfinished, all],
            most_of_socket: settings.tunnels,
            most_of_client: settings.tunnels_of_address,
            table: Mutex::default(),
            sockets: AtomicU64::new(0),
        }
    }

    /// Returns a new listening socket of a workload in this namespace.
    pub fn socket(&self, namespace: &str) -> Socket {
        Socket {
            number: self.sockets.fetch_add(1, Ordering::Relaxed),
            namespace: namespace.into(),
        }
    }

    /// Counts a tunnel of this client at this listening socket until the place is dropped, or another tunnel takes the place.
    /// `has_waited`: the tunnel has waited before, and takes no place of another tunnel.
    pub fn admit(
        self: &Arc<Self>,
        socket: &Socket,
        client: &Client,
        has_waited: bool,
    ) -> Admission {
        let (number, namespace) = (socket.number, || Arc::clone(&socket.namespace));
        let holders = [
            Holder::Process,
            Holder::Namespace(namespace()),
            Holder::Socket(number),
            Holder::Client(client.clone()),
            Holder::ClientOfNamespace(namespace(), client.clone()),
            Holder::ClientOfSocket(number, client.clone()),
        ];
        let mut table = self.lock();
        let counts = holders.each_ref().map(|holder| table.count(holder));
        let [process, in_namespace, at_socket, has @ ..] = counts;
        if has[SOCKET][ALL] >= self.most_of_client {
            return Admission::Refused(has[SOCKET][ALL], OF_SOCKET);
        }
        // The free tunnels for all, for the namespace, and for the socket.
        let free = [UNFINISHED, ALL].map(|stage| {
            let all = self.most[stage].saturating_sub(process[stage]);
            let of_namespace = left(all, in_namespace[stage]);
            [all, of_namespace, left(of_namespace, at_socket[stage])]
        });
        if let Some((scope, stage, what)) = self.used_up(&free, at_socket[ALL]) {
            let has = has[scope][stage];
            let may_displace = has < FEW && !has_waited;
            // The tunnel takes exactly the place of the other one: no share becomes larger.
            if !(may_displace && table.displace(&holders, (scope, stage))) {
                let holder = WHOSE[scope];
                return match counts[WHOSE.len() + SOCKET][stage] {
                    0 => Admission::Wait(Exceeded { holder, what }),
                    // Others would wait behind this client.
                    _ => Admission::Refused(has, what),
                };
            }
        } else {
            for (stage, free) in free.iter().enumerate() {
                let mut shares = has.iter().zip(free);
                if shares.any(|(has, free)| has[stage] >= free.saturating_mul(SHARE)) {
                    return Admission::Refused(has[0][stage], WHAT[stage]);
                }
            }
        }
        let (number, held) = table.add(holders);
        drop(table);
        Admission::Admitted(Place {
            bounds: Arc::clone(self),
            number,
            held,
        })
    }

    /// Returns the holder whose share is used up, as an index of the holders, the stage, and the name of the limit.
    fn used_up(
        &self,
        free: &[[usize; 3]; 2],
        at_socket: usize,
    ) -> Option<(usize, usize, &'static str)> {
        let own = (at_socket >= self.most_of_socket).then_some((SOCKET, ALL, OF_SOCKET));
        let shared = [UNFINISHED, ALL].into_iter().filter_map(|stage| {
            let scope = free[stage].iter().position(|free| *free == 0)?;
            Some((scope, stage, WHAT[stage]))
        });
        // A tunnel of the smallest holder is also one of the larger holders, and an unfinished one counts at both stages.
        own.into_iter()
            .chain(shared)
            .reduce(|(scope, stage, what), other| (scope.max(other.0), stage.min(other.1), what))
    }

    /// Returns the number of handshakes that are not finished.
    #[cfg(test)]
    pub fn unfinished(&self) -> usize {
        self.lock().count(&Holder::Process)[UNFINISHED]
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns how many tunnels are left for a holder that has `has`, if `free` are free.
fn left(free: usize, has: usize) -> usize {
    let share = free.saturating_mul(SHARE);
    share.saturating_sub(has).min(free)
}

/// The place of a tunnel within the bounds.
pub struct Place {
    bounds: Arc<Bounds>,
    number: u64,
    held: Arc<Held>,
}

impl Place {
    /// Notes that the handshake is finished: the tunnel is established.
    pub fn finish(&self, tunnel: &Arc<Tunnel>) {
        let mut table = self.bounds.lock();
        let finished = (Arc::clone(tunnel), Instant::now());
        if table.held.contains_key(&self.number) && self.held.tunnel.set(finished).is_ok() {
            table.subtract(&self.held, UNFINISHED);
        }
    }

    /// Returns whether the place counts as an unfinished handshake.
    pub fn is_unfinished(&self) -> bool {
        self.held.tunnel.get().is_none() && self.bounds.lock().held.contains_key(&self.number)
    }

    /// Waits until a tunnel of another client has taken the place. Returns the kind of tunnels of which the client has the most.
    pub async fn until_lost(&self) -> &'static str {
        self.held.lost.notified().await;
        WHAT[usize::from(self.held.tunnel.get().is_some())]
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.bounds.lock().remove(self.number);
    }
}
