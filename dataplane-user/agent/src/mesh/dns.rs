//! The agent's DNS server in workloads' network namespaces: its sockets are opened, adopted, handed over and closed.
//!
//! A socket is in the workload's network namespace, at loopback. So the programs see at each query whether the socket
//! is there, a query does not leave the namespace, and a query's workload does not depend on addresses, which a
//! workload can set.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    thread,
};

use dataplane_common::capture::Enrolled;
use dns::{
    AWAY, Basis, Captured, Client, Listener, LowerName, Observer, ResolvConf, Room, Server,
    Settings, Ttls, Zone, Zones,
};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use kernel::{
    capture::{Namespace, QueryLease, QuerySockets},
    namespaces,
};
use model::{DNS, DnsPolicy, Egress, Names, Reachable, Snapshot, WorkloadName};
use plan::{
    Resolvers,
    enrol::{Member, Problem},
};
use relay::DnsFiles;
use threads::Deaths;
use tracing::{debug, info, warn};

use super::{guest_queries::GuestQueries, problems::Problems, published::Published};

/// Open files of a workload: two sockets for each family; a copy of each for the agent's successor, and a further copy
/// during the hand-over.
const WORKLOAD: usize = 12;
/// The most ranges of a workload's rules with which queries to any address are captured, because each workload has a copy
/// of its ranges in table RANGES, beside its policy's.
const STATED: usize = 16;
/// Threads, at most.
const WORKERS: usize = 4;

/// The files that a server with this room has.
pub(super) fn files(room: Room) -> DnsFiles {
    DnsFiles {
        shared: room.files(),
        per_workload: WORKLOAD,
    }
}

/// Queries to capture: of the workload in a network namespace, to these addresses.
pub(super) type Queries = Vec<(u64, Resolvers)>;

/// A socket for datagrams, and one for connections.
type Both = (UdpSocket, TcpListener);

/// The server and its sockets.
pub(super) struct Dns {
    port: u16,
    /// By the network namespace's cookie. Declared before the server, which ends when it has no clients left.
    answered: BTreeMap<u64, Answered>,
    /// Workloads that are captured by their packets. Declared before the server, too.
    guests: GuestQueries,
    server: Server,
    basis: Basis,
    /// The cluster's DNS, after [`Dns::answer_enrolled`].
    cluster: Vec<SocketAddr>,
    /// The addresses of the pods that are the cluster's DNS or one of the node's resolvers, after [`Dns::answer_enrolled`].
    servers: BTreeSet<IpAddr>,
    resolv_conf: PathBuf,
    /// Why the file cannot be read, or why queries to its resolvers cannot be captured.
    unread: Option<String>,
    /// Whether queries to any address are captured.
    any_destination: bool,
    /// The destinations that workloads whose egress is denied may ask.
    reachable: Reachable,
    names: Names,
}

/// A thread that goes on after the lease has ended counts as one that was stuck.
const _: () = assert!(AWAY.as_nanos() <= QueryLease::LENGTH.as_nanos());

/// A workload whose queries are answered.
struct Answered {
    client: Client,
    /// Whether its queries by IPv4 are captured, and those by IPv6.
    families: [bool; 2],
    sockets: Vec<Listener>,
    _captured: Captured,
}

impl Dns {
    /// Starts the server. It does not answer any queries yet.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn start(
        config: &settings::Dns,
        reachable: Reachable,
        lease: QueryLease,
        room: Room,
        deaths: &Deaths,
    ) -> io::Result<Self> {
        let basis = Basis {
            // Validation of the configuration has checked the domain.
            domain: LowerName::parse(config.domain()).unwrap_or_else(|_| LowerName::root()),
            cluster_dns: config.cluster_dns.clone(),
            node: ResolvConf::default(),
            ttls: Ttls {
                services: config.ttl(),
                entries: config.service_entry_ttl(),
            },
        };
        let cpus = thread::available_parallelism().map_or(1, Into::into);
        let settings = Settings {
            workers: cpus.min(WORKERS),
            cache_bytes: config.cache_bytes(),
            stale: config.stale(),
            longest: config.max_ttl(),
            room,
            cluster_dns: Vec::new(),
            node: ResolvConf::default(),
            resolvers: None,
        };
        let zone = Zone::new(Names::default(), basis.ttls);
        let renew = Box::new(move |ago| lease.renew(ago));
        let server = Server::start(settings, zone, renew, deaths)?;
        Ok(Self {
            port: config.port(),
            server,
            basis,
            resolv_conf: config.resolv_conf().to_owned(),
            unread: None,
            any_destination: config.is_for_any_destination(),
            reachable,
            names: Names::default(),
            answered: BTreeMap::new(),
            guests: GuestQueries::default(),
            cluster: Vec::new(),
            servers: BTreeSet::new(),
        })
    }

    /// The reason why the agent cannot read the node's resolvers, or capture queries to them.
    pub fn unread(&self) -> Option<&String> {
        self.unread.as_ref()
    }

    /// Publishes the names from which the server answers.
    pub fn zones(&self) -> (Zones, Basis) {
        (self.server.zones(), self.basis.clone())
    }

    /// Looks at the server's figures.
    pub fn observer(&self) -> Observer {
        self.server.observer()
    }

    /// Answers the queries of these workloads, and of no others. If a workload's sockets cannot be opened, it has a
    /// problem, and its queries go to its resolvers. `given`: an earlier agent's sockets.
    pub fn answer_enrolled(
        &mut self,
        snapshot: &Snapshot,
        published: &Published,
        enrolled: &[(&Member, &Namespace, u32)],
        given: &mut HashMap<String, OwnedFd>,
        problems: &mut Problems,
    ) -> Queries {
        let before = self.unread.clone();
        self.read_resolv_conf();
        self.names = published.names();
        let zone = Zone::new(self.names.clone(), self.basis.ttls);
        self.cluster = self.basis.cluster_dns(snapshot);
        self.servers = self.servers();
        let mut queries = Queries::new();
        let mut lost = Vec::new();
        for (member, namespace, flags) in enrolled {
            let is_asked = flags & Enrolled::CAPTURED != 0 || member.policy.only_queries;
            let addresses = &member.workload.addresses;
            if !is_asked || addresses.is_empty() || self.is_server(addresses) {
                continue;
            }
            let client = self.client(member, &zone);
            if client.resolvers.is_empty() {
                let resolution = member.workload.resolution.as_deref();
                let is_of_node = resolution.is_some_and(|said| said.policy == DnsPolicy::Node);
                let is_lost = is_of_node && !member.policy.without_dns;
                lost.extend(is_lost.then_some(&member.workload.name));
                continue;
            }
            let to = self.destinations(member, &client);
            match self.answer(namespace, client, &to, given) {
                Ok(()) => queries.push((namespace.cookie, to)),
                Err(problem) => problems.add(&member.workload.name, problem),
            }
        }
        self.tell_lost(&lost, before.as_ref());
        published.forget_clients();
        let wanted: BTreeSet<u64> = queries.iter().map(|(cookie, _)| *cookie).collect();
        self.answered.retain(|cookie, _| wanted.contains(cookie));
        queries
    }

    /// The addresses of all resolvers, and of the endpoints of those that are services.
    fn servers(&self) -> BTreeSet<IpAddr> {
        let resolvers = self.cluster.iter().chain(&self.basis.node.resolvers);
        let resolvers = resolvers.map(SocketAddr::ip);
        let all = resolvers.flat_map(|resolver| {
            let services = self.names.of_address(resolver);
            let services = services.filter(move |service| service.cluster_ips.contains(&resolver));
            let ports = services.flat_map(|service| &service.ports);
            let endpoints = ports.flat_map(|port| &port.endpoints);
            endpoints.map(|endpoint| endpoint.addr).chain([resolver])
        });
        all.collect()
    }

    /// Whether a workload with these addresses is a resolver of others. Such a pod asks servers that its clients do not ask,
    /// and names that only this node knows are not for clients on other nodes.
    fn is_server(&self, addresses: &[IpAddr]) -> bool {
        addresses.iter().any(|addr| self.servers.contains(addr))
    }

    /// The addresses to which a workload's queries are captured.
    fn destinations(&self, member: &Member, client: &Client) -> Resolvers {
        let Member {
            policy, workload, ..
        } = member;
        let resolvers = client.resolvers.iter().map(|at| (at.ip().into(), true));
        if !self.any_destination || policy.outbound_ranges.len() > STATED {
            return resolvers.collect();
        }
        // Ports decide before ranges.
        let by_range = !policy.outbound_ports.contains_key(&DNS);
        let stated = policy.outbound_ranges.iter().filter(|_| by_range);
        let stated = stated.map(|(range, is_captured)| (*range, *is_captured));
        // A DNS server in the pod itself asks other servers, and the pod's clients may ask it directly.
        let own = workload.addresses.iter().copied().map(IpNet::from);
        let own = own.chain(loopback()).map(|range| (range, false));
        let any = [IpNet::V4(Ipv4Net::default()), IpNet::V6(Ipv6Net::default())];
        let any = any.map(|range| (range, true));
        any.into_iter()
            .chain(stated)
            .chain(resolvers)
            .chain(own)
            .collect()
    }

    /// Answers the queries of workloads that are captured by their packets, after [`Dns::answer_enrolled`]. Returns the resolvers to
    /// which the agent captures the queries of each workload. `own`: the node's addresses.
    pub fn answer_guests(
        &mut self,
        guests: &[&Member],
        mark: u32,
        own: &BTreeSet<IpAddr>,
        given: &mut HashMap<String, OwnedFd>,
        problems: &mut Problems,
    ) -> Vec<Resolvers> {
        let zone = Zone::new(self.names.clone(), self.basis.ttls);
        let guests = guests.iter().map(|member| {
            let mut client = self.client(member, &zone);
            if self.is_server(&member.workload.addresses) {
                client.resolvers.clear();
            }
            (*member, client)
        });
        let guests: Vec<_> = guests.collect();
        self.guests
            .answer(&self.server, &guests, mark, own, given, problems)
    }

    /// How a workload looks up names, with the resolvers whose queries are captured.
    fn client(&self, member: &Member, zone: &Zone) -> Client {
        let Member {
            workload, policy, ..
        } = member;
        let mut client =
            Client::of_captured(workload, &zone.domain, &self.cluster, &self.basis.node);
        // The server may ask each resolver for the workload, so the list has no resolver that the workload itself may
        // not ask.
        let may_ask = |addr: IpAddr| {
            policy.egress == Egress::Allow
                || self.reachable.resolvers.contains(&addr)
                || self
                    .reachable
                    .ranges
                    .iter()
                    .any(|range| range.contains(&addr))
                || self.names.of_address(addr).next().is_some()
        };
        client
            .resolvers
            .retain(|at| policy.captures_dns(at.ip()) && may_ask(at.ip()));
        client
    }

    /// Answers the queries in a network namespace as its workload's.
    fn answer(
        &mut self,
        namespace: &Namespace,
        client: Client,
        to: &Resolvers,
        given: &mut HashMap<String, OwnedFd>,
    ) -> Result<(), Problem> {
        let cookie = namespace.cookie;
        let before = self.answered.get(&cookie);
        let families = [true, false].map(|v4| {
            let mut captured = to.iter().filter(|(_, is_captured)| **is_captured);
            captured.any(|(range, _)| range.addr().is_ipv4() == v4)
        });
        if before.is_some_and(|before| before.client == client && before.families == families) {
            return Ok(());
        }
        let take = |(udp, tcp)| {
            let taken = self.server.take(cookie, udp, tcp);
            taken.map_err(Problem::of_node)
        };
        let mut sockets = Vec::new();
        if let Some(before) = before {
            sockets.clone_from(&before.sockets);
        } else {
            for both in taken(cookie, self.port, given) {
                sockets.extend(take(both)?);
            }
        }
        let is_of = |socket: &Listener, v4| socket.is_ipv4() == v4;
        for (wanted, v4) in families.into_iter().zip([true, false]) {
            if wanted && !sockets.iter().any(|socket| is_of(socket, v4)) {
                if let Some(both) = open(namespace, self.port, v4)? {
                    sockets.extend(take(both)?);
                }
            } else if !wanted {
                sockets.retain(|socket| !is_of(socket, v4));
            }
        }
        let captured = self.server.capture(cookie, client.clone(), &sockets);
        if before.is_none() {
            info!(netns = cookie, "its DNS queries are answered");
        }
        let answered = Answered {
            client,
            families,
            sockets,
            _captured: captured,
        };
        self.answered.insert(cookie, answered);
        Ok(())
    }

    /// Reads the node's file again.
    fn read_resolv_conf(&mut self) {
        let path = self.resolv_conf.display();
        match fs::read_to_string(&self.resolv_conf) {
            Ok(text) => {
                self.basis.node = ResolvConf::parse(&text);
                self.unread = None;
            }
            Err(error) => {
                let text = format!(
                    "cannot read {path}, the node's resolvers: {error}; queries for which they would be asked are not captured or get no \
                     answer. Name the file in dns.resolvConf"
                );
                if self.unread.as_ref() != Some(&text) {
                    warn!("{text}");
                }
                self.unread = Some(text);
            }
        }
    }

    /// Records that queries of these workloads are not captured, because the node's resolvers are on loopback.
    fn tell_lost(&mut self, lost: &[&WorkloadName], before: Option<&String>) {
        let resolvers = &self.basis.node.resolvers;
        let is_loopback = |at: &SocketAddr| at.ip().to_canonical().is_loopback();
        let (Some(first), Some(resolver)) = (lost.first(), resolvers.first()) else {
            return;
        };
        if self.unread.is_some() || !resolvers.iter().all(is_loopback) {
            return;
        }
        let text = format!(
            "{}: the node's resolver {} is on loopback, which is each pod's own, so the DNS queries of pods with dnsPolicy: \
             Default are not captured ({} pods, such as {first}). Name a file with the resolvers behind it in dns.resolvConf \
             and in the kubelet's resolvConf, such as /run/systemd/resolve/resolv.conf",
            self.resolv_conf.display(),
            resolver.ip(),
            lost.len(),
        );
        if before != Some(&text) {
            warn!("{text}");
        }
        self.unread = Some(text);
    }

    /// Closes the sockets and answers the queries that have arrived, without waiting. Dropping the result waits.
    pub fn end(self) -> Server {
        let Self {
            answered,
            guests,
            mut server,
            ..
        } = self;
        drop((answered, guests));
        server.end();
        server
    }

    /// The sockets, for this agent's successor.
    pub fn sockets(&self) -> impl Iterator<Item = (String, BorrowedFd<'_>)> {
        let answered = self.answered.iter();
        let answered = answered.flat_map(|(cookie, answered)| {
            let sockets = answered.sockets.iter();
            sockets.map(|socket| {
                let is_tcp = matches!(socket, Listener::Tcp(_));
                (name(*cookie, is_tcp, socket.is_ipv4()), socket.as_fd())
            })
        });
        answered.chain(self.guests.sockets())
    }
}

/// The addresses at which a pod reaches itself, for any addresses of the pod.
fn loopback() -> [IpNet; 4] {
    let v4 = Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8);
    let single = [
        IpAddr::from(Ipv4Addr::UNSPECIFIED),
        IpAddr::from(Ipv6Addr::UNSPECIFIED),
        IpAddr::from(Ipv6Addr::LOCALHOST),
    ];
    let [a, b, c] = single.map(IpNet::from);
    [IpNet::V4(v4), a, b, c]
}

/// The name of a socket during a hand-over.
fn name(cookie: u64, is_tcp: bool, v4: bool) -> String {
    let protocol = if is_tcp { "tcp" } else { "udp" };
    let family = if v4 { "v4" } else { "v6" };
    format!("dns {protocol} {cookie} {family}")
}

/// Returns an earlier agent's sockets for a namespace, of each family both or none, if they have the right port.
fn taken(cookie: u64, port: u16, given: &mut HashMap<String, OwnedFd>) -> Vec<Both> {
    let of_family = |v4| {
        let mut take = |is_tcp| given.remove(&name(cookie, is_tcp, v4));
        let both: Both = (take(false)?.into(), take(true)?.into());
        let ports = [both.0.local_addr().ok()?, both.1.local_addr().ok()?];
        ports.iter().all(|at| at.port() == port).then_some(both)
    };
    [true, false].into_iter().filter_map(of_family).collect()
}

/// Opens the sockets of a family in a namespace.
fn open(namespace: &Namespace, port: u16, v4: bool) -> Result<Option<Both>, Problem> {
    let opened = namespaces::within(namespace.file.as_fd(), move || {
        Ok(kernel::capture::open_query_sockets(port, v4))
    });
    let opened = opened.map_err(|error| {
        Problem::of_node(format!("cannot enter its network namespace: {error}"))
    })?;
    match opened {
        Ok(None) => {
            debug!(netns = namespace.cookie, "IPv6 is off");
            Ok(None)
        }
        Ok(Some(QuerySockets { udp, tcp })) => Ok(Some((udp, tcp))),
        Err(error) => {
            let text = format!(
                "its DNS queries go to its resolvers: cannot listen at port {port} in its network namespace: {error}"
            );
            Err(match error.kind() {
                io::ErrorKind::AddrInUse => Problem::of_workload(text),
                _ => Problem::of_node(text),
            })
        }
    }
}
