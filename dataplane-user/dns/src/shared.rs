//! The state that all workers of a server share: the decision about queries, and the limit of each client's queries in
//! flight.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError, RwLock, Weak},
    time::{Duration, Instant},
};

use hickory_proto::{op::ResponseCode, rr::RecordType};
use model::Workload;
use rand::rngs::SmallRng;

use super::{
    answer::{Ask, Decision, answer},
    beats::{Beats, Renew},
    cache::Cache,
    client::{Client, ResolvConf},
    counts::{Counted, Counts},
    exchange::Question,
    explain::{self, ExplainError, Step},
    log::Log,
    metrics::Metrics,
    name::LowerName,
    resolve::Resolver,
    wire::{Parsed, Transport, bits, refusal},
    zone::Zone,
};

/// How many queries of one client wait for resolvers at most, so that no client takes all the room.
const IN_FLIGHT: usize = 256;
/// How many connections one client has at most.
const CONNECTIONS: usize = 32;

/// The room that namespaces share. Each of both takes a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Questions that resolvers are asked at the same time.
    pub flights: usize,
    /// Clients' connections.
    pub connections: usize,
}

impl Room {
    /// The limits for a process that may open this many files.
    pub fn of(open_files: usize) -> Self {
        Self {
            flights: 8192.min(open_files / 8).max(1),
            connections: 1024.min(open_files / 32).max(1),
        }
    }

    /// How many files it takes at most.
    pub fn files(self) -> usize {
        self.flights + self.connections
    }
}

/// The inputs of answers besides the names.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How many threads.
    pub workers: usize,
    /// The size of the cache of resolvers' answers, in bytes.
    pub cache_bytes: usize,
    /// How long after their TTL the cache retains answers, for clients while resolvers do not answer.
    pub stale: Duration,
    /// How long the records of a resolver's answer are valid at most, in seconds.
    pub longest: u32,
    /// The room that namespaces share.
    pub room: Room,
    /// The cluster's DNS, which pods have as resolver.
    pub cluster_dns: Vec<SocketAddr>,
    /// The node's own file.
    pub node: ResolvConf,
    /// The resolvers to ask for every client; `None`: those of the client's own `resolv.conf`.
    pub resolvers: Option<Vec<SocketAddr>>,
}

/// The state that all workers share.
pub struct Shared {
    settings: Settings,
    zone: RwLock<Arc<Zone>>,
    resolver: Arc<Resolver>,
    metrics: Arc<Metrics>,
    pub beats: Arc<Beats>,
    /// The results of queries, recorded while a reader is present.
    pub log: Log,
    /// The clients that are workloads.
    clients: Mutex<Clients>,
    /// The clients of captured workloads, by the numbers of their network namespaces.
    captured: Mutex<HashMap<u64, Weak<Client>>>,
    /// The client for all other addresses.
    nobody: Arc<Client>,
    in_flight: Counts<ClientKey>,
    connections: Counts<ClientKey>,
    /// Connections of each namespace.
    connections_of: Counts<Arc<str>>,
}

/// The clients whose queries arrive at a socket.
#[derive(Clone)]
pub enum Askers {
    /// Queries of any client, which is identified by its address.
    Anybody,
    /// Queries of one captured workload, from any of its addresses.
    One(u64, Arc<Client>),
    /// Workloads that are captured by their packets. The program has checked the source addresses. A query from another
    /// address counts as one of a client without resolvers.
    ByAddress(Arc<HashMap<IpAddr, Arc<Client>>>),
}

/// The sender of a query.
#[derive(Clone, Copy)]
pub struct Asker<'a> {
    pub of: &'a Askers,
    pub addr: IpAddr,
}

/// The key by which limits tell clients apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ClientKey {
    /// The address.
    Address(IpAddr),
    /// A captured workload, by the number of its network namespace.
    Captured(u64),
}

impl Asker<'_> {
    fn key(self) -> ClientKey {
        match self.of {
            Askers::Anybody | Askers::ByAddress(_) => ClientKey::Address(self.addr),
            Askers::One(number, _) => ClientKey::Captured(*number),
        }
    }
}

/// A connection that is counted: its client's, and its namespace's.
pub type Connection = (Counted<ClientKey>, Counted<Arc<str>>);

/// Clients by their addresses, each with the workload that it was made for.
type Clients = HashMap<IpAddr, (Arc<Workload>, Arc<Client>)>;

impl Shared {
    /// Knows no answers of resolvers yet.
    pub fn new(settings: Settings, zone: Zone, renew: Renew) -> Self {
        let metrics = Arc::<Metrics>::default();
        let resolvers = settings.resolvers.clone();
        let nobody = Client::unknown(resolvers.unwrap_or_else(|| settings.node.resolvers.clone()));
        Self {
            resolver: Arc::new(Resolver::new(
                Cache::new(settings.cache_bytes, settings.stale),
                settings.room.flights,
                settings.longest,
                Arc::clone(&metrics),
            )),
            zone: RwLock::new(Arc::new(zone)),
            metrics,
            beats: Arc::new(Beats::new(settings.workers, renew)),
            log: Log::default(),
            clients: Mutex::default(),
            captured: Mutex::default(),
            nobody: Arc::new(nobody),
            in_flight: Counts::default(),
            connections: Counts::default(),
            connections_of: Counts::default(),
            settings,
        }
    }

    /// Returns the counters.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Returns the cache of resolvers' answers.
    pub fn cache(&self) -> &Cache {
        &self.resolver.cache
    }

    pub fn set_zone(&self, zone: Zone) {
        *self.zone.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(zone);
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        clients.clear();
    }

    /// Records a captured workload, for as long as its client exists.
    pub fn note_captured(&self, number: u64, client: &Arc<Client>) {
        let mut captured = self.captured.lock().unwrap_or_else(PoisonError::into_inner);
        captured.retain(|_, client| client.strong_count() > 0);
        captured.insert(number, Arc::downgrade(client));
    }

    /// How many captured workloads there are.
    pub fn captured(&self) -> usize {
        let captured = self.captured.lock().unwrap_or_else(PoisonError::into_inner);
        let there = captured.values().filter(|client| client.strong_count() > 0);
        there.count()
    }

    /// See [`Observer::explain`](super::Observer::explain).
    pub fn explain(
        &self,
        number: u64,
        name: &str,
        of_type: RecordType,
    ) -> Option<Result<Vec<Step>, ExplainError>> {
        let captured = self.captured.lock().unwrap_or_else(PoisonError::into_inner);
        let client = captured.get(&number)?.upgrade()?;
        drop(captured);
        let known = |name: &LowerName, ask: &Ask| {
            // The queries of C libraries and tools, because answers differ by these bits.
            let asks = [
                bits::RD,
                bits::RD | bits::AD,
                bits::RD | bits::AD | bits::DO,
                bits::RD | bits::DO,
            ];
            asks.into_iter().find_map(|bits| {
                let question = Question {
                    name: name.clone(),
                    of_type: of_type.into(),
                    bits,
                    edns: false,
                };
                self.resolver.known(&client, &question, ask)
            })
        };
        Some(explain::steps(&self.zone(), &client, name, of_type, known))
    }

    pub fn zone(&self) -> Arc<Zone> {
        Arc::clone(&self.zone.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// One more connection, unless its client or its namespace has as many as it may have.
    pub fn connection(&self, from: Asker<'_>) -> Option<Connection> {
        let namespace = Arc::clone(&self.client(&self.zone(), from).namespace);
        let counted = self.connections.below(CONNECTIONS, &from.key()).zip(
            self.connections_of
                .share(self.settings.room.connections, &namespace),
        );
        if counted.is_none() {
            self.metrics.refused.inc();
        }
        counted
    }

    /// Records the result of a query that arrived then, for readers of the log.
    pub fn note(
        &self,
        arrived: Option<Instant>,
        from: Asker<'_>,
        transport: Transport,
        messages: (&[u8], &[u8]),
        by: &str,
    ) {
        if let Some(arrived) = arrived {
            let client = self.client(&self.zone(), from);
            self.log
                .put(arrived, (&client, from.addr), transport, messages, by);
        }
    }

    /// Returns the client that sent a query.
    fn client(&self, zone: &Zone, from: Asker<'_>) -> Arc<Client> {
        match from.of {
            Askers::Anybody => self.client_at(zone, from.addr),
            Askers::One(_, client) => Arc::clone(client),
            Askers::ByAddress(clients) => {
                let client = clients.get(&from.addr).unwrap_or(&self.nobody);
                Arc::clone(client)
            }
        }
    }

    /// Returns the client with an address.
    fn client_at(&self, zone: &Zone, addr: IpAddr) -> Arc<Client> {
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

    /// Answers a query at once, or returns the lookups that the answer needs.
    pub fn now(
        &self,
        zone: &Zone,
        query: &[u8],
        from: Asker<'_>,
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
            Decision::Answered(rule) => {
                self.metrics.requests.inc();
                self.metrics.local.inc();
                return Now::Answered(rule.word());
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
                    edns: parsed.has_edns(),
                };
                let cached = self.resolver.cached(&client, &question, &ask);
                if let Some(reply) = cached {
                    parsed.with_stored(transport, &reply.stored, reply.age, out);
                    return Now::Answered("cache");
                }
                Some((ask, question))
            }
            _ => None,
        };
        let Some(counted) = self.in_flight.below(IN_FLIGHT, &from.key()) else {
            self.metrics.refused.inc();
            refuse(query, ResponseCode::Refused, out);
            return Now::Answered("limit");
        };
        Now::Later(Box::new(Later {
            client,
            ask,
            _counted: counted,
        }))
    }

    /// Completes an answer that needs resolvers.
    pub async fn later(&self, later: Box<Later>, query: &[u8], transport: Transport) -> Vec<u8> {
        let mut out = Vec::new();
        let resolvers = &later.client.resolvers;
        let Some((ask, question)) = &later.ask else {
            if resolvers.is_empty() {
                refuse(query, ResponseCode::NotImp, &mut out);
                return out;
            }
            if let Some(answer) = self.resolver.relay(&later.client, query, transport).await {
                return answer;
            }
            self.metrics.failed.inc();
            refuse(query, ResponseCode::ServFail, &mut out);
            return out;
        };
        let is_known = ask.candidates.iter().any(|of| of.known.is_some());
        if resolvers.is_empty() && !is_known {
            refuse(query, ResponseCode::Refused, &mut out);
            return out;
        }
        let resolver = Arc::clone(&self.resolver);
        let reply = resolver.resolve(&later.client, question, ask).await;
        if let (Some(reply), Parsed::Query(parsed)) = (reply, Parsed::read(query)) {
            parsed.with_stored(transport, &reply.stored, reply.age, &mut out);
        } else {
            self.metrics.failed.inc();
            refuse(query, ResponseCode::ServFail, &mut out);
        }
        out
    }
}

/// The immediate result of a query.
pub enum Now {
    /// The answer is written; the string names the rule.
    Answered(&'static str),
    /// There is nothing to answer to.
    Nothing,
    /// Resolvers have to be asked.
    Later(Box<Later>),
}

/// A query that waits for resolvers.
pub struct Later {
    client: Arc<Client>,
    /// None: resolvers get the query as it is.
    ask: Option<(Box<Ask>, Question)>,
    _counted: Counted<ClientKey>,
}

/// Writes an answer with only a code.
fn refuse(query: &[u8], code: ResponseCode, out: &mut Vec<u8>) {
    match Parsed::read(query) {
        Parsed::Query(query) => query.with_code(code, out),
        _ => refusal(query, code, out),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_room_is_a_small_part_of_the_files_a_process_may_have() {
        for open_files in [0, 100, 1024, 20_000, 1 << 20] {
            let room = Room::of(open_files);
            let most = (open_files / 6).max(2);
            assert!(room.files() <= most, "{room:?} of {open_files}");
            assert!(room.flights > 0 && room.connections > 0, "{room:?}");
        }
        let most = Room {
            flights: 8192,
            connections: 1024,
        };
        assert_eq!(Room::of(1 << 20), most);
        assert_eq!(most.files(), 8192 + 1024);
    }

    #[test]
    fn workloads_that_are_gone_take_no_room() {
        let settings = Settings {
            workers: 1,
            cache_bytes: 0,
            stale: Duration::ZERO,
            longest: 0,
            room: Room::of(0),
            cluster_dns: Vec::new(),
            node: ResolvConf::default(),
            resolvers: None,
        };
        let ttls = crate::Ttls {
            services: 5,
            entries: 5,
        };
        let zone = Zone::new(model::Names::default(), ttls);
        let shared = Shared::new(settings, zone, Box::new(drop));
        for number in 0..9 {
            shared.note_captured(number, &Arc::new(Client::unknown(Vec::new())));
        }
        assert_eq!(shared.captured.lock().unwrap().len(), 1);
    }
}
