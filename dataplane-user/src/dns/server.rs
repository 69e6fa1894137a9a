//! The server: sockets, workers, and what each client may have in flight.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::Duration,
};

use hickory_proto::op::ResponseCode;
use prometheus_client::registry::Registry;
use rand::{SeedableRng as _, rngs::SmallRng};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::{
    io::Interest,
    net::{TcpListener, TcpStream, UdpSocket},
    runtime::Builder,
    task::{JoinSet, LocalSet},
    time::timeout,
};

use super::{
    answer::{Ask, Decision, answer},
    batch::{BATCH, Batch},
    client::{Client, ResolvConf},
    metrics::Metrics,
    resolve::Resolver,
    upstream::{Question, receive, send},
    wire::{Parsed, Transport, refusal},
    zone::Zone,
};
use crate::{
    model::Workload,
    threads::{self, Deaths},
};

/// How many queries of one client wait for resolvers at most, so that no client takes all the room.
const IN_FLIGHT: usize = 256;
/// How many connections one client has at most, and all together.
const CONNECTIONS: usize = 32;
const ALL_CONNECTIONS: usize = 1024;
/// How long a connection may be idle, or take to send a query.
const IDLE: Duration = Duration::from_secs(10);
/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// What decides answers, besides the names.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How many threads.
    pub workers: usize,
    /// How many bytes of answers of resolvers are kept.
    pub cache_bytes: usize,
    /// The cluster's DNS, which pods have as resolver.
    pub cluster_dns: Vec<SocketAddr>,
    /// The node's own file.
    pub node: ResolvConf,
    /// The resolvers that are asked, whoever asks; none: those of the client's own `resolv.conf`.
    pub resolvers: Option<Vec<SocketAddr>>,
}

/// What all workers share.
pub struct Server {
    settings: Settings,
    zone: RwLock<Arc<Zone>>,
    resolver: Arc<Resolver>,
    metrics: Arc<Metrics>,
    /// Those of clients that are workloads.
    clients: Mutex<Clients>,
    /// Everybody else.
    nobody: Arc<Client>,
    in_flight: Counts,
    connections: Counts,
}

/// Clients by their addresses, each with the workload that it was made for.
type Clients = HashMap<IpAddr, (Arc<Workload>, Arc<Client>)>;

/// How many of something each client has.
#[derive(Clone, Default)]
struct Counts(Arc<Mutex<HashMap<IpAddr, usize>>>);

/// One of them, until it is dropped.
struct Counted(Counts, IpAddr);

impl Counts {
    /// One more; none if the client, or all together, have as many as they may have.
    fn one(&self, client: IpAddr, most: usize, all: usize) -> Option<Counted> {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Each client in the map has at least one.
        if counts.len() >= all && !counts.contains_key(&client) {
            return None;
        }
        let count = counts.entry(client).or_default();
        if *count >= most {
            return None;
        }
        *count += 1;
        drop(counts);
        Some(Counted(self.clone(), client))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut counts = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.1);
            }
        }
    }
}

impl Server {
    /// Begins to answer at these addresses, and goes on until the process ends.
    ///
    /// # Errors
    ///
    /// An address cannot be listened on, or no thread can be started.
    pub fn start(
        settings: Settings,
        zone: Zone,
        addresses: &[SocketAddr],
        deaths: &Deaths,
    ) -> io::Result<Arc<Self>> {
        let metrics = Arc::<Metrics>::default();
        let resolvers = settings.resolvers.clone();
        let nobody = Client::unknown(resolvers.unwrap_or_else(|| settings.node.resolvers.clone()));
        let server = Arc::new(Self {
            resolver: Arc::new(Resolver::new(settings.cache_bytes, Arc::clone(&metrics))),
            zone: RwLock::new(Arc::new(zone)),
            metrics,
            clients: Mutex::default(),
            nobody: Arc::new(nobody),
            in_flight: Counts::default(),
            connections: Counts::default(),
            settings,
        });
        for number in 0..server.settings.workers.max(1) {
            let sockets = addresses.iter().map(|at| open(*at));
            let sockets = sockets.collect::<io::Result<Vec<_>>>()?;
            let (own, name) = (Arc::clone(&server), format!("dns-{number}"));
            threads::start(name, Arc::clone(deaths), move || {
                let runtime = Builder::new_current_thread().enable_all().build();
                let work = own.work(sockets);
                let local = LocalSet::new();
                let ended = runtime.and_then(|runtime| local.block_on(&runtime, work));
                ended.expect("sockets can be waited for");
            })?;
        }
        Ok(server)
    }

    /// Answers from other names.
    pub fn set_zone(&self, zone: Zone) {
        *self.zone.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(zone);
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        clients.clear();
    }

    /// Shows what is counted in a registry.
    pub fn register(&self, registry: &mut Registry) {
        self.metrics.register(&self.resolver.cache, registry);
    }

    fn zone(&self) -> Arc<Zone> {
        Arc::clone(&self.zone.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Who has an address.
    fn client(&self, zone: &Zone, addr: IpAddr) -> Arc<Client> {
        let Some(workload) = zone.names.client(addr) else {
            return Arc::clone(&self.nobody);
        };
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, client)) = clients.get(&addr)
            && Arc::ptr_eq(of, workload)
        {
            return Arc::clone(client);
        }
        let Settings {
            cluster_dns, node, ..
        } = &self.settings;
        let mut client = Client::of_workload(workload, &zone.domain, cluster_dns, node);
        if let Some(resolvers) = &self.settings.resolvers {
            client.resolvers.clone_from(resolvers);
        }
        let client = Arc::new(client);
        clients.insert(addr, (Arc::clone(workload), Arc::clone(&client)));
        client
    }

    async fn work(self: Arc<Self>, sockets: Vec<(Socket, Socket)>) -> io::Result<()> {
        let mut tasks = JoinSet::new();
        for (udp, tcp) in sockets {
            let udp = Arc::new(UdpSocket::from_std(udp.into())?);
            let tcp = TcpListener::from_std(tcp.into())?;
            tasks.spawn_local(Arc::clone(&self).answer_datagrams(udp));
            tasks.spawn_local(Arc::clone(&self).accept(tcp));
        }
        // They do not end but by a fault.
        match tasks.join_next().await {
            Some(ended) => ended?,
            None => Ok(()),
        }
    }

    async fn answer_datagrams(self: Arc<Self>, socket: Arc<UdpSocket>) -> io::Result<()> {
        let mut random = SmallRng::from_rng(&mut rand::rng());
        let mut batch = Batch::new();
        let mut answers: Vec<(Vec<u8>, SocketAddr)> = Vec::with_capacity(BATCH);
        let mut spare: Vec<Vec<u8>> = Vec::with_capacity(BATCH);
        loop {
            socket.readable().await?;
            let zone = self.zone();
            let received = socket.try_io(Interest::READABLE, || {
                batch.receive(&*socket, |query, from| {
                    let mut out = spare.pop().unwrap_or_default();
                    out.clear();
                    let now = self.now(
                        &zone,
                        query,
                        from.ip(),
                        Transport::Udp,
                        &mut random,
                        &mut out,
                    );
                    match now {
                        Now::Answered => answers.push((out, from)),
                        Now::Nothing => spare.push(out),
                        Now::Later(later) => {
                            spare.push(out);
                            let (own, socket) = (Arc::clone(&self), Arc::clone(&socket));
                            let query = query.to_vec();
                            tokio::spawn(async move {
                                let answer = own.later(later, &query, Transport::Udp).await;
                                // The client asks again if this fails.
                                let _ = socket.send_to(&answer, from).await;
                            });
                        }
                    }
                })
            });
            match received {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                // Somebody to whom an answer went does not listen any more.
                Err(error) => tracing::debug!("cannot receive queries: {error}"),
            }
            if !answers.is_empty() {
                batch.send(&*socket, &answers);
                spare.extend(answers.drain(..).map(|(bytes, _)| bytes));
            }
            // Others on this thread have their turn, too.
            tokio::task::yield_now().await;
        }
    }

    /// Answers a query at once, or says what has to be asked.
    fn now(
        &self,
        zone: &Zone,
        query: &[u8],
        from: IpAddr,
        transport: Transport,
        random: &mut SmallRng,
        out: &mut Vec<u8>,
    ) -> Now {
        let decision = answer(
            zone,
            query,
            transport,
            || self.client(zone, from),
            random,
            out,
        );
        let ask = match decision {
            Decision::Nothing => return Now::Nothing,
            Decision::Answered(_) => {
                self.metrics.requests.inc();
                self.metrics.local.inc();
                return Now::Answered;
            }
            Decision::Ask(ask) => Some(ask),
            Decision::Relay => None,
        };
        self.metrics.requests.inc();
        let client = self.client(zone, from);
        let ask = match (ask, Parsed::read(query)) {
            (Some(ask), Parsed::Query(parsed)) => {
                let question = Question {
                    name: parsed.name.clone(),
                    of_type: parsed.of_type,
                    bits: parsed.bits(),
                };
                let cached = self.resolver.cached(&client.resolvers, &question, &ask);
                if let Some(reply) = cached {
                    parsed.with_stored(transport, &reply.stored, reply.age, out);
                    return Now::Answered;
                }
                Some((ask, question))
            }
            _ => None,
        };
        let Some(counted) = self.in_flight.one(from, IN_FLIGHT, usize::MAX) else {
            self.metrics.refused.inc();
            refuse(query, ResponseCode::Refused, out);
            return Now::Answered;
        };
        Now::Later(Box::new(Later {
            client,
            ask,
            _counted: counted,
        }))
    }

    /// Answers what resolvers have to be asked for.
    async fn later(&self, later: Box<Later>, query: &[u8], transport: Transport) -> Vec<u8> {
        let mut out = Vec::new();
        let resolvers = &later.client.resolvers;
        let Some((ask, question)) = &later.ask else {
            if resolvers.is_empty() {
                refuse(query, ResponseCode::NotImp, &mut out);
                return out;
            }
            if let Some(answer) = self.resolver.relay(resolvers, query).await {
                return answer;
            }
            self.metrics.failed.inc();
            refuse(query, ResponseCode::ServFail, &mut out);
            return out;
        };
        if resolvers.is_empty() {
            refuse(query, ResponseCode::Refused, &mut out);
            return out;
        }
        let resolver = Arc::clone(&self.resolver);
        let reply = resolver.resolve(resolvers, question, ask).await;
        if let (Some(reply), Parsed::Query(parsed)) = (reply, Parsed::read(query)) {
            parsed.with_stored(transport, &reply.stored, reply.age, &mut out);
        } else {
            self.metrics.failed.inc();
            refuse(query, ResponseCode::ServFail, &mut out);
        }
        out
    }

    async fn accept(self: Arc<Self>, listener: TcpListener) -> io::Result<()> {
        loop {
            let (stream, from) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of files, or the client is gone: not in a busy loop, whatever it is.
                    tracing::debug!("cannot accept a connection: {error}");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    continue;
                }
            };
            let counted = self
                .connections
                .one(from.ip(), CONNECTIONS, ALL_CONNECTIONS);
            let Some(counted) = counted else {
                self.metrics.refused.inc();
                continue;
            };
            let own = Arc::clone(&self);
            tokio::spawn(async move {
                let _counted = counted;
                // The client's connection: it knows why it broke.
                let _ = own.serve(stream, from.ip()).await;
            });
        }
    }

    /// Answers the queries of a connection, one after the other.
    async fn serve(&self, mut stream: TcpStream, from: IpAddr) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let mut random = SmallRng::from_rng(&mut rand::rng());
        while let Ok(query) = timeout(IDLE, receive(&mut stream)).await {
            let query = query?;
            let mut out = Vec::new();
            let now = {
                let zone = self.zone();
                self.now(&zone, &query, from, Transport::Tcp, &mut random, &mut out)
            };
            match now {
                Now::Answered => {}
                Now::Nothing => return Ok(()),
                Now::Later(later) => out = self.later(later, &query, Transport::Tcp).await,
            }
            timeout(IDLE, send(&mut stream, &out)).await??;
        }
        Ok(())
    }
}

/// What becomes of a query at once.
enum Now {
    /// The answer is written.
    Answered,
    /// There is nothing to answer to.
    Nothing,
    /// Resolvers have to be asked.
    Later(Box<Later>),
}

/// A query that waits for resolvers.
struct Later {
    client: Arc<Client>,
    /// None: resolvers get the query as it is.
    ask: Option<(Box<Ask>, Question)>,
    _counted: Counted,
}

/// Answers a query with a code.
fn refuse(query: &[u8], code: ResponseCode, out: &mut Vec<u8>) {
    match Parsed::read(query) {
        Parsed::Query(query) => query.with_code(code, out),
        _ => refusal(query, code, out),
    }
}

/// The sockets of a worker at an address, which other workers have, too.
fn open(at: SocketAddr) -> io::Result<(Socket, Socket)> {
    let socket = |kind: Type, protocol| {
        let socket = Socket::new(Domain::for_address(at), kind.nonblocking(), Some(protocol))?;
        socket.set_reuse_port(true)?;
        if at.is_ipv6() {
            socket.set_only_v6(true)?;
        }
        if protocol == Protocol::TCP {
            // What an earlier server has left must not be in the way of the next.
            socket.set_reuse_address(true)?;
        }
        socket.bind(&at.into())?;
        io::Result::Ok(socket)
    };
    let udp = socket(Type::DGRAM, Protocol::UDP)?;
    let tcp = socket(Type::STREAM, Protocol::TCP)?;
    tcp.listen(BACKLOG)?;
    Ok((udp, tcp))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_client_does_not_take_the_room_of_others() {
        let counts = Counts::default();
        let [greedy, other]: [IpAddr; 2] = [[10, 0, 0, 1].into(), [10, 0, 0, 2].into()];
        let held: Vec<_> = (0..5).map_while(|_| counts.one(greedy, 3, 2)).collect();
        assert_eq!(held.len(), 3);
        let of_other = counts.one(other, 3, 2);
        assert!(of_other.is_some());
        // A third client has no room, until one of the two has nothing any more.
        assert!(counts.one([10, 0, 0, 3].into(), 3, 2).is_none());
        drop(held);
        assert!(counts.one([10, 0, 0, 3].into(), 3, 2).is_some());
        assert!(counts.one(greedy, 3, 2).is_some());
    }
}
