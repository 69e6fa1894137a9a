//! The bounds on the inbound tunnels of the process, which listening sockets and clients share.
//!
//! Tunnels whose handshake is not finished have a bound of their own, because their peers have not proven an identity. A
//! listening socket has at most [`SHARE`] times as many tunnels as are free, so it leaves room for other sockets. A client
//! has at most [`SHARE`] times as many as are free for all, and as are free for its socket, so it leaves room for other
//! clients. The limits on connections are shared in the same way.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use relay::Client;

use super::Settings;

/// The maximum number of tunnels of a listening socket or client, in multiples of the free ones.
const SHARE: usize = 4;
/// The index of the counts of tunnels whose handshake is not finished.
const UNFINISHED: usize = 0;
/// The index of the counts of all tunnels.
const ALL: usize = 1;

/// A holder of tunnels. Each tunnel has one of each kind.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Holder {
    Process,
    Socket(u64),
    Client(Client),
    ClientOfSocket(u64, Client),
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
    /// The listening socket has its share, so the tunnel waits.
    Wait,
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

    /// Returns the number of a new listening socket.
    pub fn socket(&self) -> u64 {
        self.sockets.fetch_add(1, Ordering::Relaxed)
    }

    /// Counts a tunnel of this client at this listening socket until the place is dropped.
    pub fn admit(self: &Arc<Self>, socket: u64, client: &Client) -> Admission {
        let holders = [
            Holder::Process,
            Holder::Socket(socket),
            Holder::Client(client.clone()),
            Holder::ClientOfSocket(socket, client.clone()),
        ];
        let mut counts = self.lock();
        let count = |holder| counts.get(holder).copied().unwrap_or_default();
        let [process, of_socket, of_client, of_both] = holders.each_ref().map(count);
        let free = |stage: usize| self.most[stage].saturating_sub(process[stage]);
        let has_share = |stage: usize| of_socket[stage] < free(stage).saturating_mul(SHARE);
        if of_socket[ALL] >= self.most_of_socket || !has_share(UNFINISHED) || !has_share(ALL) {
            return Admission::Wait;
        }
        if of_both[ALL] >= self.most_of_client {
            return Admission::Refused(of_both[ALL], "tunnels to this workload");
        }
        for (stage, kind) in [
            (UNFINISHED, "unfinished TLS handshakes with this node"),
            (ALL, "tunnels to this node"),
        ] {
            let share = free(stage).saturating_mul(SHARE);
            let left = share.saturating_sub(of_socket[stage]).min(free(stage));
            if of_client[stage] >= share || of_both[stage] >= left.saturating_mul(SHARE) {
                return Admission::Refused(of_client[stage], kind);
            }
        }
        for holder in &holders {
            let count = counts.entry(holder.clone()).or_default();
            *count = count.map(|count| count + 1);
        }
        drop(counts);
        Admission::Admitted(Place {
            bounds: Arc::clone(self),
            holders,
            is_unfinished: true,
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Holder, [usize; 2]>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of a tunnel within the bounds.
pub struct Place {
    bounds: Arc<Bounds>,
    holders: [Holder; 4],
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
        for holder in &self.holders {
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
    fn fill(bounds: &Arc<Bounds>, socket: u64, client: &Client, is_finished: bool) -> Vec<Place> {
        let mut places = Vec::new();
        while let Admission::Admitted(mut place) = bounds.admit(socket, client) {
            if is_finished {
                place.finish();
            }
            places.push(place);
        }
        places
    }

    #[test]
    fn each_leaves_room_for_others() {
        for (unfinished, all, is_finished) in [(100, 1000, false), (1000, 100, true)] {
            let bounds = bounds(unfinished, all);
            let hog = fill(&bounds, 0, &client(1), is_finished);
            assert!((70..80).contains(&hog.len()), "{}", hog.len());
            let refused = bounds.admit(0, &client(1));
            assert!(matches!(refused, Admission::Refused(has, _) if has == hog.len()));
            let same_socket = fill(&bounds, 0, &client(2), is_finished);
            assert!(!same_socket.is_empty(), "another client of the workload");
            assert!(matches!(
                bounds.admit(1, &client(1)),
                Admission::Admitted(_)
            ));
            // Many clients fill the socket. Its tunnels wait, and other sockets still have room.
            let rest: Vec<_> = (3..100)
                .flat_map(|number| fill(&bounds, 0, &client(number), is_finished))
                .collect();
            assert!(matches!(bounds.admit(0, &client(200)), Admission::Wait));
            let other = fill(&bounds, 1, &client(200), is_finished);
            assert!(other.len() > 5, "{}", other.len());
            drop((hog, same_socket, rest, other));
            assert!(bounds.lock().is_empty(), "all places are back");
        }
    }

    #[test]
    fn a_finished_handshake_gives_its_place_back() {
        let bounds = bounds(5, 1000);
        let mut first = fill(&bounds, 0, &client(1), false);
        assert_eq!(first.len(), 4);
        first[0].finish();
        assert_eq!(fill(&bounds, 0, &client(1), false).len(), 1);
        first.iter_mut().for_each(Place::finish);
        assert_eq!(fill(&bounds, 0, &client(1), false).len(), 4);
    }
}
