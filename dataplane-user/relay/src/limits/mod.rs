//! Limits on the number of connections.

#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    io,
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use model::WorkloadName;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::direction::Direction;

/// File descriptors of the process itself: tables, links, the API, clients of the HTTP endpoints.
const CONTROL: usize = 256;
/// File descriptors of a workload without tunnels: four listening sockets, for both directions and families; a copy of each for the
/// agent's successor, and a second copy during the handover; the network namespace three times; one to spare.
const WORKLOAD: usize = 16;
/// File descriptors of a connection: the client's socket and the endpoint's.
const EACH: usize = 2;
/// A workload among others, and a namespace among others, has at most this many times as many connections as are free,
/// so one alone gets four fifths of all, two get four ninths each, and there is room for each further one (dynamic
/// thresholds: Choudhury and Hahne, 1998). This limit also holds for a client among others: the free connections are
/// then those of the workload that it connects to, and of the workload's namespace.
const SHARE: usize = 4;

/// Raises the limit of open files as far as this process may, and returns it.
///
/// # Errors
/// If the limit cannot be read.
pub fn raise_open_files() -> io::Result<usize> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let reached = if soft < hard && setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok() {
        hard
    } else {
        soft
    };
    Ok(usize::try_from(reached).unwrap_or(usize::MAX))
}

/// Open files that the process keeps for its DNS server, and not for connections of the proxy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DnsFiles {
    /// Files that all workloads share.
    pub shared: usize,
    /// Files of each workload.
    pub per_workload: usize,
}

/// Returns the number of open files that are reserved, so that connections do not use them. `tunnels`: the files of all
/// tunnels, and those of each workload.
fn reserved(workloads: usize, dns: DnsFiles, tunnels: [usize; 2]) -> usize {
    let each = (WORKLOAD + tunnels[1]).saturating_add(dns.per_workload);
    let shared = (CONTROL + tunnels[0]).saturating_add(dns.shared);
    shared.saturating_add(workloads.saturating_mul(each))
}

/// The number of connections, and its limits.
#[derive(Debug)]
pub struct Limits {
    open: AtomicUsize,
    max: AtomicUsize,
    per_workload: Option<usize>,
    /// Workloads that share the connections.
    workloads: AtomicUsize,
    /// Namespaces that do.
    namespaces: AtomicUsize,
    /// The configured limit.
    wanted: Option<usize>,
    open_files: usize,
    dns: DnsFiles,
    /// Open files of all tunnels, and those of each workload.
    tunnels: [AtomicUsize; 2],
}

impl Limits {
    /// The number of connections that `open_files` allow beside `workloads`.
    pub fn connections(open_files: usize, workloads: usize, dns: DnsFiles) -> usize {
        let reserved = reserved(workloads, dns, [0; 2]);
        (open_files.saturating_sub(reserved) / EACH).max(1)
    }

    /// The number of open files that `connections` take beside one workload.
    pub fn files(connections: usize) -> usize {
        let reserved = reserved(1, DnsFiles::default(), [0; 2]);
        connections.saturating_mul(EACH).saturating_add(reserved)
    }

    /// Allows as many connections as are `wanted`, or else as `open_files` allow, and of these at most
    /// `per_workload` for one workload.
    pub fn new(wanted: Option<usize>, per_workload: Option<usize>, open_files: usize) -> Self {
        let limits = Self {
            open: AtomicUsize::new(0),
            max: AtomicUsize::new(0),
            per_workload,
            workloads: AtomicUsize::new(0),
            namespaces: AtomicUsize::new(0),
            wanted,
            open_files,
            dns: DnsFiles::default(),
            tunnels: Default::default(),
        };
        limits.reserve(0, 0);
        limits
    }

    /// Keeps open files for a DNS server, too.
    #[must_use]
    pub fn beside(mut self, dns: DnsFiles) -> Self {
        self.dns = dns;
        self.reserve(0, 0);
        self
    }

    /// Keeps open files for tunnels: `shared` of all tunnels, and so many of each workload.
    pub fn keep_for_tunnels(&self, shared: usize, per_workload: usize) {
        self.tunnels[0].store(shared, Ordering::Relaxed);
        self.tunnels[1].store(per_workload, Ordering::Relaxed);
        self.reserve(0, 0);
    }

    fn reserved(&self, workloads: usize) -> usize {
        let tunnels = self.tunnels.each_ref();
        let tunnels = tunnels.map(|files| files.load(Ordering::Relaxed));
        reserved(workloads, self.dns, tunnels)
    }

    /// Reserves open files for this many workloads in this many namespaces. Existing connections continue: if there are
    /// more than the new limit, no further one is accepted until enough have ended.
    pub fn reserve(&self, workloads: usize, namespaces: usize) {
        let possible = self.open_files.saturating_sub(self.reserved(workloads)) / EACH;
        let possible = possible.max(1);
        let max = self.wanted.map_or(possible, |wanted| wanted.min(possible));
        self.max.store(max, Ordering::Relaxed);
        self.workloads.store(workloads, Ordering::Relaxed);
        self.namespaces.store(namespaces, Ordering::Relaxed);
    }

    /// Returns a message with the number of missing open files for this many workloads; `None` if the files suffice.
    pub fn shortage(&self, workloads: usize) -> Option<String> {
        let (files, reserved) = (self.open_files, self.reserved(workloads));
        let max = self.max();
        let wanted = self.wanted.unwrap_or(1);
        if files > reserved && max >= wanted {
            return None;
        }
        let needed = reserved.saturating_add(wanted.saturating_mul(EACH));
        let dns = if self.dns.shared > 0 {
            ", its DNS server"
        } else {
            ""
        };
        let has_tunnels = self.tunnels[0].load(Ordering::Relaxed) > 0;
        let tunnels = if has_tunnels { ", tunnels" } else { "" };
        Some(format!(
            "open files are short: the proxy takes {max} connections at the same time, because {workloads} \
             workloads{dns}{tunnels} and the agent itself take {reserved} of the {files} files that it may have open; \
             raise its limit to at least {needed} (LimitNOFILE=, `ulimit -Hn`)"
        ))
    }

    /// Counts another connection. `of`: how many its workload has, and how many its namespace has. Returns whether the
    /// limits allow the connection; if they do not, it is not counted.
    pub fn acquire(&self, of: &Holders, direction: Direction) -> bool {
        let way = direction as usize;
        // Counted first, so that workers that accept at the same time do not exceed it together.
        let free = (self.max()).saturating_sub(self.open.fetch_add(1, Ordering::Relaxed));
        let workload = of.workload[way].fetch_add(1, Ordering::Relaxed);
        let namespace = of.namespace.connections[way].fetch_add(1, Ordering::Relaxed);
        let fits = free > 0
            && workload < self.of_workload(free, of)
            && namespace < self.of_namespace(free);
        if !fits {
            self.release(of, direction);
        }
        fits
    }

    /// Counts an inbound connection, which was acquired, for its client. Returns whether the client's shares of the connections
    /// of the workload and of its namespace allow it; if not, it is not counted.
    pub fn admit(&self, of: &Holders, client: &Client) -> bool {
        let free = self.max().saturating_sub(self.open());
        let has_share = |has: usize, connections: &[AtomicUsize; 2], limit: usize| {
            let now = connections[Direction::Inbound as usize].load(Ordering::Relaxed);
            let left = limit.min(now.saturating_add(free)).saturating_sub(now);
            // Includes the connection that is about to be counted.
            has < left.saturating_add(1).saturating_mul(SHARE)
        };
        let [mut own, mut namespace] = of.lock_clients();
        let fits = has_share(own.of(client), &of.workload, self.of_workload(free, of))
            && has_share(
                namespace.of(client),
                &of.namespace.connections,
                self.of_namespace(free),
            );
        if fits {
            own.add(client);
            namespace.add(client);
        }
        fits
    }

    /// Subtracts a connection.
    pub fn release(&self, of: &Holders, direction: Direction) {
        let way = direction as usize;
        self.open.fetch_sub(1, Ordering::Relaxed);
        of.namespace.connections[way].fetch_sub(1, Ordering::Relaxed);
        of.workload[way].fetch_sub(1, Ordering::Release);
    }

    /// The number of connections now.
    pub fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// The maximum number of connections.
    pub fn max(&self) -> usize {
        self.max.load(Ordering::Relaxed)
    }

    /// Returns the maximum number of connections of one workload in one direction while `free` are free.
    fn of_workload(&self, free: usize, of: &Holders) -> usize {
        share(free, &self.workloads, of.both).min(self.per_workload())
    }

    /// Returns the maximum number of connections of all workloads of one namespace in one direction while `free` are
    /// free.
    fn of_namespace(&self, free: usize) -> usize {
        share(free, &self.namespaces, false)
    }

    /// Whether a workload with these connections gets no further one for now, in one of the directions.
    pub fn is_reached(&self, of: &Holders) -> bool {
        let free = self.max().saturating_sub(self.open());
        let ways = of.workload.iter().zip(&of.namespace.connections);
        ways.map(|(workload, namespace)| {
            let now = |count: &AtomicUsize| count.load(Ordering::Relaxed);
            (now(workload), now(namespace))
        })
        .any(|(workload, namespace)| {
            workload > 0
                && (workload >= self.of_workload(free, of) || namespace >= self.of_namespace(free))
        })
    }

    /// The maximum number of connections of one workload.
    pub fn per_workload(&self) -> usize {
        self.per_workload.unwrap_or(usize::MAX).min(self.max())
    }
}

/// Returns the maximum number of connections of one of `several` holders while `free` are free. `both`: also a single
/// holder leaves a share, for the other direction.
fn share(free: usize, several: &AtomicUsize, both: bool) -> usize {
    match several.load(Ordering::Relaxed) {
        0 | 1 if !both => usize::MAX,
        _ => free.saturating_mul(SHARE),
    }
}

/// The client of a workload.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Client {
    /// A workload, with all its addresses.
    Workload(WorkloadName),
    /// An address of no workload, or the first of an IPv6 network ([`Index::client`](super::Index::client)).
    Address(IpAddr),
}

/// The number of inbound connections that each client has.
#[derive(Debug, Default)]
struct Clients(HashMap<Client, usize>);

impl Clients {
    fn of(&self, client: &Client) -> usize {
        self.0.get(client).copied().unwrap_or_default()
    }

    fn add(&mut self, client: &Client) {
        *self.0.entry(client.clone()).or_default() += 1;
    }

    fn remove(&mut self, client: &Client) {
        if let Some(has) = self.0.get_mut(client) {
            *has -= 1;
            if *has == 0 {
                self.0.remove(client);
            }
        }
    }
}

/// The connections of all workloads of a namespace, by [`Direction`], and their clients.
#[derive(Debug, Default)]
struct Namespace {
    connections: [AtomicUsize; 2],
    clients: Mutex<Clients>,
}

/// The connections of a workload and of its namespace, by [`Direction`]. Connections that others open to a workload take
/// nothing from those that it opens itself.
#[derive(Debug, Default)]
pub struct Holders {
    clients: Mutex<Clients>,
    workload: [AtomicUsize; 2],
    namespace: Arc<Namespace>,
    /// Whether there are connections of both directions.
    both: bool,
}

impl Holders {
    /// Returns the counts for another workload of the same namespace.
    pub fn beside(&self) -> Self {
        Self {
            namespace: Arc::clone(&self.namespace),
            ..Self::default()
        }
    }

    /// Returns the counts for a workload with connections of both directions, or of one.
    #[must_use]
    pub fn of_both(self, both: bool) -> Self {
        Self { both, ..self }
    }

    /// Subtracts a client's connection.
    pub fn forget(&self, client: &Client) {
        for mut clients in self.lock_clients() {
            clients.remove(client);
        }
    }

    /// The clients of the workload and of its namespace, always locked in this order.
    fn lock_clients(&self) -> [MutexGuard<'_, Clients>; 2] {
        [&self.clients, &self.namespace.clients]
            .map(|clients| clients.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the number of the workload's connections. If it is 0, the effects of their release are visible to the
    /// caller.
    pub fn connections(&self) -> usize {
        let all = self.workload.iter();
        all.map(|count| count.load(Ordering::Acquire)).sum()
    }
}
