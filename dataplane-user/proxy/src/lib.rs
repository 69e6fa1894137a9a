//! The L4 proxy: accepts captured connections, whose original destination the capture programs recorded, chooses their
//! endpoints by the [`Snapshot`], and relays them in plaintext.
//!
//! [`relay`] has the decision, the limits, the counters and the access log. This crate has the engine that relays the
//! bytes: workers, each a thread with its own epoll.
//!
//! The proxy opens no listening socket. An [`Attachment`] brings the sockets of its workload, which may be in any
//! network namespace.
//!
//! The proxy accepts a connection before it connects to an endpoint, so the client's `connect()` always succeeds, and a
//! refusal is a reset right after it. If this matters, the kernel must decide, at connect time.

#![forbid(unsafe_code)]

pub mod admin;
mod buffers;
mod connection;
mod dump;
mod engines;
pub mod handover;
mod metrics;
mod pump;
mod shared;
mod table;
#[cfg(test)]
mod tests;
mod worker;
mod workers;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    io::{self, Write},
    net::SocketAddr,
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

pub use dump::Dump;
use model::{ServiceName, Snapshot, WorkloadName, authorization::PolicyName};
use prometheus_client::{encoding::DescriptorEncoder, registry::Registry};
use relay::{
    AccessLog, AttachError, Attachment, Bounded, Connections, DnsFiles, Exceeded, Found, Limits,
    Log, Neighbour, Relay, TunnelView, Tunnelling, raise_open_files, socket::Patience,
};
use serde_json::Value;
use threads::{Deaths, Page};

use self::{engines::Engines, shared::Shared, workers::Workers};

/// The proxy's settings.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The number of workers; 0: one for each CPU.
    pub workers: usize,
    /// The mark of every socket that connects further (`SO_MARK`). The capture leaves connections with
    /// this mark alone. Takes `CAP_NET_ADMIN`.
    pub mark: Option<u32>,
    /// The mark of sockets that connect from a client's address, by which answers find their way back;
    /// `None`: `mark`.
    pub transparent_mark: Option<u32>,
    /// Whether inbound connections are made from the client's address (`IP_TRANSPARENT`). Takes
    /// `CAP_NET_ADMIN`, and routes that lead the answers back.
    pub transparent: bool,
    /// The number of a service's endpoints that are tried before the client is refused.
    pub attempts: usize,
    /// How long each endpoint has to answer.
    pub connect_timeout: Duration,
    /// How long a connection waits for a snapshot that has its destination, if it is refused only because the destination is
    /// not known.
    pub hold: Duration,
    /// The time without a byte after which a connection is reset; `None`: never.
    pub idle_timeout: Option<Duration>,
    /// The times after which the kernel gives up a peer that is gone.
    pub patience: Patience,
    /// The maximum number of connections; `None`: as many as the limit of open files allows.
    pub max_connections: Option<usize>,
    /// Open files that are reserved for the DNS server of the same process.
    pub dns_files: DnsFiles,
    /// The maximum number of connections of one workload; `None`: only the common limit applies.
    pub max_per_workload: Option<usize>,
    /// Bytes that all connections together may hold for readers that do not keep up.
    pub max_held: usize,
    /// The access log.
    pub access_log: AccessLog,
    /// The trust domain of the identities by which connections between two workloads of this node are judged, without a tunnel;
    /// `None`: these connections go through tunnels.
    pub attests: Option<Arc<str>>,
}

/// The bytes that connections may hold: as many as a thousand connections hold whose readers have stalled.
const MAX_HELD: usize = 128 << 20;

impl Default for Settings {
    fn default() -> Self {
        Self {
            workers: 0,
            mark: None,
            transparent_mark: None,
            transparent: false,
            attempts: 3,
            connect_timeout: Duration::from_secs(5),
            hold: Duration::ZERO,
            idle_timeout: None,
            patience: Patience {
                keepalive: Some(Duration::from_mins(3)),
                user_timeout: None,
            },
            max_connections: None,
            dns_files: DnsFiles::default(),
            max_per_workload: None,
            max_held: MAX_HELD,
            access_log: AccessLog::Text,
            attests: None,
        }
    }
}

/// Why the proxy cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A worker cannot be started.
    #[error("cannot start the proxy's workers: {0}")]
    Start(io::Error),
    /// The limit of open files is too low.
    #[error(
        "{wanted} connections take {needed} open files, and this process may have {allowed}: raise its limit (`ulimit -Hn`, LimitNOFILE=), or ask for fewer"
    )]
    Files {
        /// The requested number of connections.
        wanted: usize,
        /// The files that they take.
        needed: usize,
        /// The files that the process may open.
        allowed: usize,
    },
}

/// The proxy. Dropping it resets all connections; [`Proxy::drain`] waits for them.
#[derive(Debug)]
pub struct Proxy {
    relay: Arc<Relay>,
    engines: Engines,
    /// The thread that writes the access log.
    writer: Option<JoinHandle<Option<()>>>,
}

impl Proxy {
    /// Starts the workers, without workloads. The access log goes to standard output. A thread that dies reports to
    /// `deaths`.
    ///
    /// # Errors
    /// If the workers cannot be started, or the settings ask for more connections than the limit of
    /// open files allows.
    pub fn start(settings: Settings, deaths: &Deaths) -> Result<Self, Error> {
        Self::start_logging_to(settings, io::stdout(), deaths)
    }

    /// Starts the workers, without workloads. The access log goes to `log`.
    ///
    /// # Errors
    /// As for [`Proxy::start`].
    pub fn start_logging_to(
        settings: Settings,
        log: impl Write + Send + 'static,
        deaths: &Deaths,
    ) -> Result<Self, Error> {
        let files = raise_open_files().map_err(Error::Start)?;
        if let Some(wanted) = settings.max_connections
            && wanted > Limits::connections(files, 1, DnsFiles::default())
        {
            return Err(Error::Files {
                wanted,
                needed: Limits::files(wanted),
                allowed: files,
            });
        }
        let count = match settings.workers {
            0 => thread::available_parallelism().map_or(1, Into::into),
            count => count,
        };
        let (log, writer) =
            Log::start(settings.access_log, log, Arc::clone(deaths)).map_err(Error::Start)?;
        let limits = Limits::new(settings.max_connections, settings.max_per_workload, files)
            .beside(settings.dns_files);
        let relay = Arc::new(Relay::new(limits, log));
        let (shared, mailboxes) =
            Shared::new(Arc::clone(&relay), settings, count).map_err(Error::Start)?;
        let workers = Workers::start(Arc::new(shared), mailboxes, deaths).map_err(Error::Start)?;
        Ok(Self {
            relay,
            engines: Engines(workers),
            writer,
        })
    }

    /// Hands connections over to an engine of tunnels if their endpoints are reached through tunnels. Only the first
    /// call has an effect, and only before the first workload.
    pub fn tunnel_by(&self, tunnels: Arc<dyn Tunnelling>) {
        // Fails if the proxy has such an engine.
        let _ = self.engines.shared().tunnels.set(tunnels);
    }

    /// Returns the relay, which an engine of tunnels shares with the proxy.
    pub fn relay(&self) -> &Arc<Relay> {
        &self.relay
    }

    /// Routes new connections by this snapshot. Existing connections stay with their endpoints.
    pub fn set_snapshot(&self, snapshot: Snapshot) {
        self.engines.shared().set_snapshot(snapshot);
    }

    /// Sets the snapshot from another thread.
    pub fn routes(&self) -> Routes {
        Routes(Arc::clone(self.engines.shared()))
    }

    /// Accepts the connections of a workload.
    ///
    /// # Errors
    /// If the workload is attached already, or a socket cannot be used.
    pub fn add(&self, attachment: Attachment) -> Result<(), AttachError> {
        self.relay.add(attachment, &self.engines)
    }

    /// Stops accepting connections of a workload, and resets its remaining connections at the deadline. Returns at
    /// once. Has no effect if the workload is not attached.
    pub fn remove(&self, workload: &WorkloadName, deadline: Duration) {
        self.relay.remove(workload, deadline, &self.engines);
    }

    /// Stops accepting connections, waits until all have ended, and resets the remaining ones at the deadline.
    pub fn drain(mut self, deadline: Duration) {
        self.stop(deadline);
    }

    /// Whether connections are left of an attachment of this workload that was removed.
    pub fn drains(&self, workload: &WorkloadName) -> bool {
        self.relay.drains(workload)
    }

    /// Describes the resources that are missing for as many connections as the settings ask for; `None` if none are.
    pub fn shortage(&self) -> Option<String> {
        self.relay.shortage()
    }

    /// A view of the proxy for metrics and the admin endpoint.
    pub fn observer(&self) -> Observer {
        Observer(Arc::clone(self.engines.shared()))
    }

    /// The number of connections now.
    pub fn connections(&self) -> usize {
        self.relay.limits.open()
    }

    fn stop(&mut self, deadline: Duration) {
        self.relay.drain(deadline, &mut self.engines);
        self.relay.log.close();
        if let Some(writer) = self.writer.take() {
            // A writer that panicked has reported it.
            let _ = writer.join();
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop(Duration::ZERO);
    }
}

/// Sets the snapshot by which a proxy routes new connections.
#[derive(Clone, Debug)]
pub struct Routes(Arc<Shared>);

impl Routes {
    /// See [`Proxy::set_snapshot`].
    pub fn set_snapshot(&self, snapshot: Snapshot) {
        self.0.set_snapshot(snapshot);
    }
}

/// A view of a proxy for metrics and the admin endpoint.
#[derive(Clone, Debug)]
pub struct Observer(Arc<Shared>);

impl Observer {
    /// Adds the proxy's metrics to a registry.
    pub fn register(&self, registry: &mut Registry) {
        metrics::register(registry, &self.0);
    }

    /// Returns the totals of connections.
    pub fn connections(&self) -> Connections {
        self.0.relay.connections()
    }

    /// Writes the proxy's metrics other than [`Observer::connections`].
    ///
    /// # Errors
    /// The encoder's.
    pub fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        metrics::encode_proxy(&self.0, encoder)
    }

    /// Returns the established tunnels of each workload that has some.
    pub fn tunnels(&self) -> BTreeMap<WorkloadName, Vec<TunnelView>> {
        let mut by_attachment = self.0.tunnels();
        let mut all: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for attached in self.0.relay.entries().iter().map(|entry| &entry.attached) {
            if let Some(tunnels) = by_attachment.remove(&attached.id) {
                let name = attached.workload.name.clone();
                all.entry(name).or_default().extend(tunnels);
            }
        }
        all
    }

    /// The proxy's settings and state.
    pub fn dump(&self) -> Dump {
        Dump::of(&self.0)
    }

    /// Whether the proxy has a snapshot and accepts connections.
    pub fn is_ready(&self) -> bool {
        let relay = &self.0.relay;
        let entries = relay.entries();
        relay.version() > 0 && entries.iter().any(|entry| entry.listeners.is_some())
    }

    /// Workloads that get no further connection for now, each with the number that it has.
    pub fn at_limit(&self) -> Vec<(WorkloadName, usize)> {
        self.0.relay.at_limit()
    }

    /// Workloads some of whose connections were ended lately because their readers had stalled, each with the number of
    /// these connections since the workload was attached.
    pub fn stalled(&self) -> Vec<(WorkloadName, u64)> {
        self.0.relay.stalled()
    }

    /// Returns the bytes that connections in tunnels hold for readers that do not keep up, and their maximum, if that is more
    /// than half of the maximum: windows are then small.
    pub fn tunnels_hold_much(&self) -> Option<[usize; 2]> {
        let held = self.0.tunnels.get().map(|tunnels| tunnels.held());
        held.filter(|[held, max]| *held > max / 2)
    }

    /// Workloads to which tunnels were refused or had to wait lately, each with the numbers since the workload was attached
    /// and the last reason.
    pub fn bounded(&self) -> Vec<(WorkloadName, Bounded, Exceeded)> {
        self.0.relay.bounded()
    }

    /// Returns the Gateway to whose waypoint a connection of this workload (`NAMESPACE/NAME`) goes, and the waypoint's address.
    /// `None`: the connection goes to no waypoint. The error names the Gateway, and says why the proxy refuses the connection.
    pub fn waypoint(
        &self,
        workload: &str,
        to: SocketAddr,
    ) -> Option<Result<(ServiceName, SocketAddr), String>> {
        let relay = &self.0.relay;
        let mut attached = relay.entries().into_iter().map(|entry| entry.attached);
        let own = attached.find(|of| of.workload.name.to_string() == workload)?;
        relay.index().1.waypoint(&own.workload, to)
    }

    /// Returns the workloads of this node at which a connection of this workload (`NAMESPACE/NAME`) may arrive without a tunnel, each
    /// with its endpoint.
    pub fn neighbours(&self, workload: &str, to: SocketAddr) -> Vec<(SocketAddr, Neighbour)> {
        let mut attached = self.0.relay.entries().into_iter().map(|of| of.attached);
        let Some(from) = attached.find(|of| of.workload.name.to_string() == workload) else {
            return Vec::new();
        };
        let index = self.0.relay.index().1;
        let endpoints = match index.find(to) {
            Found::Service(target) => target.endpoints(to.is_ipv4()).collect(),
            Found::Known | Found::Unknown => vec![to],
            Found::UnknownPort => Vec::new(),
        };
        let endpoints: BTreeSet<SocketAddr> = endpoints.into_iter().collect();
        let own = &from.workload.addresses;
        let others = endpoints.into_iter().filter(|at| !own.contains(&at.ip()));
        let here = others.filter_map(|at| {
            let neighbour = self.0.neighbour(&from, at.ip(), &index)?;
            Some((at, neighbour))
        });
        here.collect()
    }

    /// Returns whether the proxy accepts inbound connections of a workload, and so enforces its policies.
    pub fn takes_inbound(&self, workload: &WorkloadName) -> bool {
        self.0.relay.takes_inbound(workload)
    }

    /// Returns refused connections from a number on, `most` at most; without a number, those from now on.
    pub fn refusals(&self, from: Option<u64>, most: usize) -> Page<Value> {
        self.0.relay.log.refusals.read(from, most)
    }

    /// Counts connections to a workload that the kernel refused by a policy. `by`: the policy. `None`: no policy with ALLOW matches.
    pub fn count_in_kernel(&self, workload: &WorkloadName, by: Option<&PolicyName>, count: u64) {
        let index = self.0.relay.index().1;
        index.denials().count_in_kernel(workload, by, count);
    }

    /// The maximum number of connections.
    pub fn max_connections(&self) -> usize {
        self.0.relay.limits.max()
    }
}
