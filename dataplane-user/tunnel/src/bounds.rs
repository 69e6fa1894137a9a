//! The bounds on the inbound tunnels of the process, which namespaces, listening sockets and clients share.
//!
//! Tunnels whose handshake is not finished have a bound of their own, because their peers have not proven an identity. The
//! workloads of a namespace together have at most [`SHARE`] times as many tunnels as are free, so they leave room for other
//! namespaces. A listening socket has at most [`SHARE`] times as many as are free for its namespace, so it leaves room for
//! other sockets. A client has at most [`SHARE`] times as many as are free for all, for the namespace and for the socket, so
//! it leaves room for other clients. The limits on connections are shared in the same way.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use relay::{Client, Exceeded};

use super::Settings;

/// The maximum number of tunnels of a namespace, listening socket or client, in multiples of the free ones.
const SHARE: usize = 4;
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

/// The bounds, and the number of tunnels of each holder.
#[derive(Debug)]
pub struct Bounds {
    most: [usize; 2],
    most_of_socket: usize,
    most_of_client: usize,
    counts: Mutex<HashMap<Holder, [usize; 2]>>,
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
            counts: Mutex::default(),
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

    /// Counts a tunnel of this client at this listening socket until the place is dropped.
    pub fn admit(self: &Arc<Self>, socket: &Socket, client: &Client) -> Admission {
        let (number, namespace) = (socket.number, || Arc::clone(&socket.namespace));
        let holders = [
            Holder::Process,
            Holder::Namespace(namespace()),
            Holder::Socket(number),
            Holder::Client(client.clone()),
            Holder::ClientOfNamespace(namespace(), client.clone()),
            Holder::ClientOfSocket(number, client.clone()),
        ];
        let mut counts = self.lock();
        let count = |holder| counts.get(holder).copied().unwrap_or_default();
        let [process, in_namespace, at_socket, has @ ..] = holders.each_ref().map(count);
        // The free tunnels for all, for the namespace, and for the socket.
        let free = [UNFINISHED, ALL].map(|stage| {
            let all = self.most[stage].saturating_sub(process[stage]);
            let of_namespace = left(all, in_namespace[stage]);
            [all, of_namespace, left(of_namespace, at_socket[stage])]
        });
        let wait = |holder, what| Admission::Wait(Exceeded { holder, what });
        if at_socket[ALL] >= self.most_of_socket {
            return wait("its listener", OF_SOCKET);
        }
        for (free, what) in free.iter().zip(WHAT) {
            match free {
                [0, ..] => return wait("the agent", what),
                [_, 0, _] => return wait("its namespace", what),
                [_, _, 0] => return wait("its listener", what),
                _ => {}
            }
        }
        let [of_client, _, of_both] = has;
        if of_both[ALL] >= self.most_of_client {
            return Admission::Refused(of_both[ALL], OF_SOCKET);
        }
        for (stage, free) in free.iter().enumerate() {
            let mut shares = has.iter().zip(free);
            if shares.any(|(has, free)| has[stage] >= free.saturating_mul(SHARE)) {
                return Admission::Refused(of_client[stage], WHAT[stage]);
            }
        }
        for holder in &holders {
            let count = counts.entry(holder.clone()).or_default();
            *count = count.map(|count| count + 1);
        }
        drop(counts);
        Admission::Admitted(Place {
            bounds: Arc::clone(self),
            holders: Box::new(holders),
            is_unfinished: true,
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Holder, [usize; 2]>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
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
    holders: Box<[Holder; 6]>,
    is_unfinished: bool,
}

impl Place {
    /// Notes that the handshake is finished.
    pub fn finish(&mut self) {
        if std::mem::take(&mut self.is_unfinished) {
            self.subtract(UNFINISHED);
        }
    }

    /// Returns whether the handshake is not finished.
    pub fn is_unfinished(&self) -> bool {
        self.is_unfinished
    }

    fn subtract(&self, stage: usize) {
        let mut counts = self.bounds.lock();
        for holder in &*self.holders {
            if let Some(count) = counts.get_mut(holder) {
                count[stage] -= 1;
                if count[ALL] == 0 {
                    counts.remove(holder);
                }
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.finish();
        self.subtract(ALL);
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;

    fn client(number: u8) -> Client {
        Client::Address(IpAddr::V4(Ipv4Addr::new(10, 0, 0, number)))
    }

    fn bounds(unfinished: usize, all: usize) -> Arc<Bounds> {
        let settings = Settings {
            unfinished,
            ..Settings::default()
        };
        Arc::new(Bounds::new(&settings, all))
    }

    /// Takes places until the bounds allow no more.
    fn fill(
        bounds: &Arc<Bounds>,
        socket: &Socket,
        client: &Client,
        is_finished: bool,
    ) -> Vec<Place> {
        let mut places = Vec::new();
        while let Admission::Admitted(mut place) = bounds.admit(socket, client) {
            if is_finished {
                place.finish();
            }
            places.push(place);
        }
        places
    }

    /// Returns the holder whose share makes a tunnel wait.
    fn waits_for(bounds: &Arc<Bounds>, socket: &Socket, client: &Client) -> &'static str {
        match bounds.admit(socket, client) {
            Admission::Wait(exceeded) => exceeded.holder,
            Admission::Admitted(_) | Admission::Refused(..) => "",
        }
    }

    #[test]
    fn each_leaves_room_for_others() {
        for (unfinished, all, is_finished) in [(100, 1000, false), (1000, 100, true)] {
            let bounds = bounds(unfinished, all);
            let [first, second] = [(); 2].map(|()| bounds.socket("shop"));
            let hog = fill(&bounds, &first, &client(1), is_finished);
            assert!((70..80).contains(&hog.len()), "{}", hog.len());
            let refused = bounds.admit(&first, &client(1));
            assert!(matches!(refused, Admission::Refused(has, _) if has == hog.len()));
            let same_socket = fill(&bounds, &first, &client(2), is_finished);
            assert!(!same_socket.is_empty(), "another client of the workload");
            let blog = bounds.socket("blog");
            assert!(matches!(
                bounds.admit(&blog, &client(1)),
                Admission::Admitted(_)
            ));
            // Many clients fill the socket. Its tunnels wait, and other sockets still have room.
            let rest: Vec<_> = (3..100)
                .flat_map(|number| fill(&bounds, &first, &client(number), is_finished))
                .collect();
            assert_eq!(waits_for(&bounds, &first, &client(200)), "its listener");
            let other = fill(&bounds, &second, &client(200), is_finished);
            assert!(!other.is_empty(), "another workload of the namespace");
            // Many workloads fill the namespace. Other namespaces still have room.
            let sockets: Vec<_> = (0..20).map(|_| bounds.socket("shop")).collect();
            let of_all = |number: u8| {
                let (bounds, sockets) = (&bounds, &sockets);
                let all = sockets.iter();
                all.flat_map(move |socket| fill(bounds, socket, &client(number), is_finished))
            };
            let many: Vec<_> = (3..100).flat_map(of_all).collect();
            let new = bounds.socket("shop");
            assert_eq!(waits_for(&bounds, &new, &client(201)), "its namespace");
            let others = fill(&bounds, &blog, &client(201), is_finished);
            assert!(others.len() > 5, "{}", others.len());
            drop((hog, same_socket, rest, other, many, others));
            assert!(bounds.lock().is_empty(), "all places are back");
        }
    }

    /// A client that fills the sockets of a namespace leaves room for the namespace's other clients.
    #[test]
    fn one_client_leaves_room_for_others_of_a_namespace() {
        let bounds = bounds(1000, 100);
        let sockets: Vec<_> = (0..20).map(|_| bounds.socket("shop")).collect();
        let all = sockets.iter();
        let hog: Vec<_> = all
            .flat_map(|socket| fill(&bounds, socket, &client(1), true))
            .collect();
        assert!(hog.len() > 70, "{}", hog.len());
        let new = bounds.socket("shop");
        assert!(matches!(
            bounds.admit(&new, &client(1)),
            Admission::Refused(..)
        ));
        assert!(matches!(
            bounds.admit(&new, &client(2)),
            Admission::Admitted(_)
        ));
    }

    #[test]
    fn a_finished_handshake_gives_its_place_back() {
        let bounds = bounds(9, 1000);
        let socket = bounds.socket("shop");
        let mut first = fill(&bounds, &socket, &client(1), false);
        let most = first.len();
        assert!((1..9).contains(&most), "{most}");
        first[0].finish();
        assert_eq!(fill(&bounds, &socket, &client(1), false).len(), 1);
        first.iter_mut().for_each(Place::finish);
        assert_eq!(fill(&bounds, &socket, &client(1), false).len(), most);
    }
}
