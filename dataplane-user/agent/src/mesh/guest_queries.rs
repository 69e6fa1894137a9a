//! The DNS server's sockets for workloads that are captured by their packets.
//!
//! They are in the node's network namespace, each bound to the address of a resolver. So a program finds the socket by
//! a query's destination, and the answer has the resolver's address.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use dns::{Captured, Client, Listener, Server};
use kernel::capture::QuerySockets;
use plan::{
    Resolvers,
    enrol::{Member, Problem},
};
use socket2::SockRef;
use tracing::info;

use super::problems::Problems;

/// All of these sockets belong to one worker.
const WORKER: u64 = 0;

/// The sockets, and the workloads whose queries they take.
#[derive(Default)]
pub(super) struct GuestQueries {
    /// By the resolver's address.
    sockets: BTreeMap<IpAddr, [Listener; 2]>,
    /// By the workload's addresses.
    clients: HashMap<IpAddr, Client>,
    captured: Option<Captured>,
}

impl GuestQueries {
    /// Answers the queries of these workloads, and of no others. Returns the resolvers of each for which there are
    /// sockets. If the sockets for a resolver cannot be opened, the workloads that have it have a problem. `own`:
    /// addresses of the node, at which its own servers are asked.
    pub fn answer(
        &mut self,
        server: &Server,
        guests: &[(&Member, Client)],
        mark: u32,
        own: &BTreeSet<IpAddr>,
        given: &mut HashMap<String, OwnedFd>,
        problems: &mut Problems,
    ) -> Vec<Resolvers> {
        let clients = guests.iter().flat_map(|(member, client)| {
            let addresses = member.workload.addresses.iter();
            addresses.map(|addr| (*addr, client.clone()))
        });
        let clients: HashMap<IpAddr, Client> = clients.collect();
        let resolvers = guests.iter().flat_map(|(_, client)| &client.resolvers);
        let wanted: BTreeSet<IpAddr> = resolvers
            .map(SocketAddr::ip)
            .filter(|resolver| !own.contains(resolver))
            .collect();
        let before: Vec<IpAddr> = self.sockets.keys().copied().collect();
        self.sockets.retain(|resolver, _| wanted.contains(resolver));
        let mut failed = BTreeMap::new();
        for resolver in wanted {
            if self.sockets.contains_key(&resolver) {
                continue;
            }
            match open(server, resolver, mark, given) {
                Ok(sockets) => _ = self.sockets.insert(resolver, sockets),
                Err(error) => {
                    let todo = match error.kind() {
                        io::ErrorKind::PermissionDenied => {
                            "; grant CAP_NET_BIND_SERVICE to the agent"
                        }
                        io::ErrorKind::AddrInUse => {
                            "; a server of the node listens there: have it listen at its own addresses only"
                        }
                        _ => "",
                    };
                    failed.insert(resolver, format!("{error}{todo}"));
                }
            }
        }
        if self.clients != clients || !self.sockets.keys().eq(&before) {
            let sockets: Vec<Listener> = self.sockets.values().flatten().cloned().collect();
            let captured = server.capture_by_address(WORKER, clients.clone(), &sockets);
            self.captured = (!clients.is_empty()).then_some(captured);
            self.clients = clients;
            info!(
                workloads = guests.len(),
                resolvers = self.sockets.len(),
                "the DNS queries of workloads that are captured by their packets are answered"
            );
        }
        let resolvers = guests.iter().map(|(member, client)| {
            let mut to = Resolvers::new();
            for resolver in client.resolvers.iter().map(SocketAddr::ip) {
                if self.sockets.contains_key(&resolver) {
                    to.insert(resolver.into(), true);
                } else if let Some(error) = failed.get(&resolver) {
                    let text = format!(
                        "the agent does not capture its DNS queries to {resolver}: cannot listen at {resolver}, port 53, on \
                         the node: {error}"
                    );
                    problems.add(&member.workload.name, Problem::of_node(text));
                }
            }
            to
        });
        resolvers.collect()
    }

    /// The sockets, for this agent's successor.
    pub fn sockets(&self) -> impl Iterator<Item = (String, BorrowedFd<'_>)> {
        self.sockets.iter().flat_map(|(resolver, sockets)| {
            let sockets = sockets.iter();
            sockets.map(|socket| {
                let is_tcp = matches!(socket, Listener::Tcp(_));
                (name(*resolver, is_tcp), socket.as_fd())
            })
        })
    }
}

/// Opens the sockets for a resolver, or adopts an earlier agent's.
fn open(
    server: &Server,
    resolver: IpAddr,
    mark: u32,
    given: &mut HashMap<String, OwnedFd>,
) -> io::Result<[Listener; 2]> {
    let mut take = |is_tcp| given.remove(&name(resolver, is_tcp));
    let sockets = match (take(false), take(true)) {
        (Some(udp), Some(tcp)) => QuerySockets {
            udp: udp.into(),
            tcp: tcp.into(),
        },
        _ => kernel::capture::open_resolver_sockets(resolver, mark)?,
    };
    // The earlier agent's configuration may have had another mark.
    SockRef::from(&sockets.udp).set_mark(mark)?;
    SockRef::from(&sockets.tcp).set_mark(mark)?;
    server.take(WORKER, sockets.udp, sockets.tcp)
}

/// The name of a socket during a hand-over.
fn name(resolver: IpAddr, is_tcp: bool) -> String {
    let protocol = if is_tcp { "tcp" } else { "udp" };
    format!("dns packets {protocol} {resolver}")
}
