//! Answers that resolvers know: from the cache, or by one query for all clients that ask the same question.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use hickory_proto::op::ResponseCode;
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

use super::{
    answer::{Ask, Rule},
    cache::{Cache, Hit, Key, State},
    client::Client,
    compose,
    counts::{Counted, Counts},
    exchange::Question,
    metrics::Metrics,
    upstream::Upstream,
    wire::{Stored, Transport},
};

/// How long a client waits for a new answer if there is a stale one (RFC 8767).
const PATIENCE: Duration = Duration::from_millis(1800);
/// How long clients do not wait for resolvers that failed to answer recently, if there is a stale answer (RFC 8767).
const RECHECK: Duration = Duration::from_secs(30);
/// How long resolvers are not asked again after they have failed (RFC 9520).
const FAILED: Duration = Duration::from_secs(1);
/// How long clients keep a stale answer, in seconds (RFC 8767).
const STALE_TTL: u32 = 30;

/// An answer for a client.
#[derive(Clone, Debug)]
pub struct Reply {
    /// The answer.
    pub stored: Arc<Stored>,
    /// Seconds by which its times to live are shorter.
    pub age: u32,
}

/// The result of a query to resolvers: their answer, or none.
type Outcome = Option<Arc<Stored>>;

/// Asks resolvers, and caches their answers.
pub struct Resolver {
    /// Their answers.
    pub cache: Arc<Cache>,
    upstream: Upstream,
    /// Questions that resolvers are being asked.
    flights: Mutex<HashMap<Key, watch::Receiver<Option<Outcome>>>>,
    /// How many there are at most: namespaces share them.
    room: usize,
    /// How many of them each namespace has.
    shares: Counts<Arc<str>>,
    /// A number for each set of resolvers: what one set says is not for clients of another.
    sets: Mutex<HashMap<Box<[SocketAddr]>, u32>>,
    /// When resolvers of a set last failed to answer a namespace.
    failures: Mutex<HashMap<(Arc<str>, u32), Instant>>,
    /// How long the records of an answer are valid at most, in seconds.
    longest: u32,
    metrics: Arc<Metrics>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Resolver {
    /// Knows nothing yet, and asks at most `room` questions at the same time. `longest`: how long the records of an answer are
    /// valid at most, in seconds.
    pub fn new(cache: Cache, room: usize, longest: u32, metrics: Arc<Metrics>) -> Self {
        Self {
            cache: Arc::new(cache),
            upstream: Upstream::new(Arc::clone(&metrics)),
            flights: Mutex::default(),
            room,
            shares: Counts::default(),
            sets: Mutex::default(),
            failures: Mutex::default(),
            longest,
            metrics,
        }
    }

    /// Returns the cached answer like [`Resolver::cached`], without counting a hit and without asking resolvers.
    pub fn known(&self, client: &Client, asked: &Question, ask: &Ask) -> Option<Vec<u8>> {
        let set = self.set(&client.resolvers);
        for at in 0..ask.candidates.len() {
            let key = asked.with(ask, at).key(set);
            let hit = self.cache.look(&key, Instant::now())?;
            if hit.state == State::Stale {
                return None;
            }
            let Hit { stored, age, .. } = hit;
            if let Some(reply) = finish(asked, ask, at, Reply { stored, age }) {
                return Some(reply.stored.aged(reply.age));
            }
        }
        let stored = ask.otherwise.as_ref()?;
        Some(stored.bytes().to_vec())
    }

    fn set(&self, resolvers: &[SocketAddr]) -> u32 {
        let mut sets = locked(&self.sets);
        if let Some(number) = sets.get(resolvers) {
            return *number;
        }
        let number = u32::try_from(sets.len()).unwrap_or(u32::MAX);
        sets.insert(resolvers.into(), number);
        number
    }

    /// The answer, if the cache has all of it.
    pub fn cached(self: &Arc<Self>, client: &Client, asked: &Question, ask: &Ask) -> Option<Reply> {
        let now = Instant::now();
        let set = self.set(&client.resolvers);
        for at in 0..ask.candidates.len() {
            let question = asked.with(ask, at);
            let key = question.key(set);
            let hit = self.cache.get(&key, now)?;
            match hit.state {
                State::Fresh => {}
                State::Fading => drop(self.flight(set, client, &question, &key)),
                State::Stale => return None,
            }
            let Hit { stored, age, .. } = hit;
            if let Some(reply) = finish(asked, ask, at, Reply { stored, age }) {
                self.metrics.hits.inc();
                return Some(reply);
            }
        }
        otherwise(ask)
    }

    /// The answer, from the cache or from resolvers; none if no resolver answers.
    pub async fn resolve(
        self: Arc<Self>,
        client: &Client,
        asked: &Question,
        ask: &Ask,
    ) -> Option<Reply> {
        let set = self.set(&client.resolvers);
        for at in 0..ask.candidates.len() {
            let question = asked.with(ask, at);
            let known = ask.candidates.get(at).and_then(|of| of.known.as_ref());
            let Some(reply) = self.fetch(set, client, &question, known.is_some()).await else {
                // The client's own resolver goes on with its list. Only resolvers know whether a host has such a record.
                let otherwise = || otherwise(ask).filter(|_| ask.rule != Rule::Host);
                return known.map(own).or_else(otherwise);
            };
            if let Some(reply) = finish(asked, ask, at, reply) {
                return Some(reply);
            }
        }
        otherwise(ask)
    }

    /// The answer to one question. `is_known`: there is an answer of our own if resolvers have none.
    async fn fetch(
        self: &Arc<Self>,
        set: u32,
        client: &Client,
        question: &Question,
        is_known: bool,
    ) -> Option<Reply> {
        let key = question.key(set);
        let stale = match self.cache.get(&key, Instant::now()) {
            Some(hit) if hit.state != State::Stale => {
                let Hit { stored, age, .. } = hit;
                return Some(Reply { stored, age });
            }
            stale => stale.map(|hit| hit.stored).filter(|_| !is_known),
        };
        let Some(mut flight) = self.flight(set, client, question, &key) else {
            // The namespace is at its limit: it gets the stale answer.
            return stale.map(|stale| self.stale(&stale));
        };
        let away = || {
            let failures = locked(&self.failures);
            failures
                .get(&(Arc::clone(&client.namespace), set))
                .is_some_and(|when| when.elapsed() < RECHECK)
        };
        let patience = if stale.is_none() && !is_known {
            Duration::MAX
        } else if away() {
            Duration::ZERO
        } else {
            PATIENCE
        };
        let landed = timeout(patience, flight.wait_for(Option::is_some)).await;
        let answer = match landed {
            Ok(Ok(outcome)) => outcome.clone().flatten(),
            // The task that asks has ended, or the time is up.
            Ok(Err(_)) | Err(_) => None,
        };
        let usable = |stored: &Arc<Stored>| stale.is_none() || !is_failure(stored);
        match (answer.filter(usable), stale) {
            (Some(stored), _) => Some(Reply { stored, age: 0 }),
            (None, Some(stale)) => Some(self.stale(&stale)),
            (None, None) => None,
        }
    }

    /// An answer whose time is over, for a client.
    fn stale(&self, stored: &Stored) -> Reply {
        self.metrics.stale.inc();
        let stored = Arc::new(stored.with_ttl(STALE_TTL));
        Reply { stored, age: 0 }
    }

    /// Asks resolvers, unless they are being asked already, or have failed to answer a moment ago. None: too many questions
    /// are being asked for the client's namespace.
    fn flight(
        self: &Arc<Self>,
        set: u32,
        client: &Client,
        question: &Question,
        key: &Key,
    ) -> Option<watch::Receiver<Option<Outcome>>> {
        let mut flights = locked(&self.flights);
        if let Some(flight) = flights.get(key) {
            return Some(flight.clone());
        }
        let counted = self.share(client)?;
        let (land, flight) = watch::channel(None);
        flights.insert(key.clone(), flight.clone());
        drop(flights);
        let (own, resolvers) = (Arc::clone(self), client.resolvers.clone());
        let failed = (Arc::clone(&client.namespace), set);
        let (question, key) = (question.clone(), key.clone());
        tokio::spawn(async move {
            let _counted = counted;
            let answer = own.upstream.ask(&failed.0, &resolvers, &question).await;
            let outcome = match answer {
                Ok(stored) => {
                    let stored = Arc::new(stored.at_most(own.longest));
                    own.cache.put(&key, &failed.0, &stored, Instant::now());
                    locked(&own.failures).remove(&failed);
                    Some(stored)
                }
                Err(error) => {
                    tracing::debug!("{}: {error}", question.name);
                    locked(&own.failures).insert(failed, Instant::now());
                    None
                }
            };
            let failed = outcome.as_ref().is_none_or(|stored| is_failure(stored));
            // Fails only if no client waits any more.
            let _ = land.send(Some(outcome));
            if failed {
                sleep(FAILED).await;
            }
            locked(&own.flights).remove(&key);
        });
        Some(flight)
    }

    /// Passes on a query that this server does not understand, and returns a resolver's answer.
    pub async fn relay(
        &self,
        client: &Client,
        query: &[u8],
        transport: Transport,
    ) -> Option<Vec<u8>> {
        let _counted = self.share(client)?;
        self.upstream
            .relay(&client.namespace, &client.resolvers, query, transport)
            .await
            .ok()
    }

    /// One more question to resolvers, unless the client's namespace has as many as it may have.
    fn share(&self, client: &Client) -> Option<Counted<Arc<str>>> {
        let counted = self.shares.share(self.room, &client.namespace);
        if counted.is_none() {
            self.metrics.refused.inc();
        }
        counted
    }
}

/// The answer if no candidate exists.
fn otherwise(ask: &Ask) -> Option<Reply> {
    ask.otherwise.as_ref().map(own)
}

/// An answer of our own.
fn own(stored: &Stored) -> Reply {
    let stored = Arc::new(stored.clone());
    Reply { stored, age: 0 }
}

/// Whether resolvers have failed to find out.
fn is_failure(stored: &Stored) -> bool {
    matches!(
        stored.code(),
        ResponseCode::ServFail
            | ResponseCode::Refused
            | ResponseCode::NotImp
            | ResponseCode::FormErr
    )
}

/// Turns what resolvers say of a candidate into the answer; none if the next is to be asked for.
fn finish(asked: &Question, ask: &Ask, at: usize, reply: Reply) -> Option<Reply> {
    let candidate = ask.candidates.get(at)?;
    let is_missing = reply.stored.code() == ResponseCode::NXDomain;
    if let Some(known) = &candidate.known
        && (is_missing || is_failure(&reply.stored))
    {
        return Some(own(known));
    }
    if is_missing && (at + 1 < ask.candidates.len() || ask.otherwise.is_some()) {
        return None;
    }
    let records = &*candidate.records;
    let question = (&asked.name, asked.of_type);
    let joined = match records {
        [] => return Some(reply),
        // A name of a search list without records of the type. glibc asks for the next name of its list, but not after an
        // answer that has an alias.
        [_] if ask.rule == Rule::Search && is_empty(&reply.stored) => {
            compose::bare(question, ResponseCode::NoError)
        }
        records => compose::joined(question, records, &reply.stored, reply.age),
    };
    Some(Reply {
        stored: Arc::new(joined),
        age: 0,
    })
}

/// Whether a name exists, and has no records of the type.
fn is_empty(stored: &Stored) -> bool {
    let [answers, ..] = stored.counts();
    stored.code() == ResponseCode::NoError && answers == 0
}

impl Question {
    fn key(&self, set: u32) -> Key {
        Key::new(set, &self.name, self.of_type, self.bits)
    }

    /// The same question about a candidate.
    fn with(&self, ask: &Ask, at: usize) -> Self {
        let name = ask.candidates.get(at).map_or(&self.name, |of| &of.name);
        Self {
            name: name.clone(),
            ..*self
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use hickory_proto::{
        op::{Message, MessageType},
        rr::{RData, Record, rdata::A},
    };
    use tokio::{net::UdpSocket, task::JoinSet};

    use super::*;
    use crate::{LowerName, answer::Candidate};

    /// A resolver on loopback that sends what `answers` makes of each query, and how many queries it got.
    async fn resolver(
        answers: impl Fn(Message) -> Vec<Vec<u8>> + Send + 'static,
    ) -> (SocketAddr, Arc<AtomicUsize>) {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let (at, count) = (socket.local_addr().unwrap(), Arc::<AtomicUsize>::default());
        let counted = Arc::clone(&count);
        tokio::spawn(async move {
            let mut buffer = [0; 2048];
            loop {
                let (length, from) = socket.recv_from(&mut buffer).await.unwrap();
                counted.fetch_add(1, Ordering::Relaxed);
                sleep(Duration::from_millis(50)).await;
                for answer in answers(Message::from_vec(&buffer[..length]).unwrap()) {
                    socket.send_to(&answer, from).await.unwrap();
                }
            }
        });
        (at, count)
    }

    /// The answer to a query: this address.
    fn answer(mut query: Message, last: u8) -> Vec<u8> {
        query.metadata.message_type = MessageType::Response;
        let name = query.queries[0].name().clone();
        query.add_answer(Record::from_rdata(
            name,
            60,
            RData::A(A::new(192, 0, 2, last)),
        ));
        query.to_vec().unwrap()
    }

    fn asked(name: &str) -> (Question, Ask) {
        let name = LowerName::parse(name).unwrap();
        let candidate = Candidate {
            records: Vec::new(),
            name: name.clone(),
            known: None,
        };
        let ask = Ask {
            rule: Rule::Forward,
            candidates: [candidate].into_iter().collect(),
            otherwise: None,
        };
        let question = Question {
            name,
            of_type: 1,
            bits: 1,
            edns: true,
        };
        (question, ask)
    }

    fn addresses(reply: &Reply) -> Vec<String> {
        let message = Message::from_vec(reply.stored.bytes()).unwrap();
        message
            .answers
            .iter()
            .map(|of| of.data.to_string())
            .collect()
    }

    fn client(namespace: &str, resolvers: &[SocketAddr]) -> Client {
        Client {
            namespace: namespace.into(),
            ..Client::unknown(resolvers.to_vec())
        }
    }

    const FLIGHTS: usize = 1000;

    fn new() -> Arc<Resolver> {
        Arc::new(Resolver::new(
            Cache::new(1 << 20, Duration::from_hours(24)),
            FLIGHTS,
            3600,
            Arc::default(),
        ))
    }

    /// A resolver's answer with a code and no record.
    fn code(mut query: Message, code: ResponseCode) -> Vec<u8> {
        query.metadata.message_type = MessageType::Response;
        query.metadata.response_code = code;
        query.to_vec().unwrap()
    }

    #[tokio::test]
    async fn what_is_known_counts_if_resolvers_do_not_help() {
        for what in [
            None,
            Some(ResponseCode::NXDomain),
            Some(ResponseCode::ServFail),
        ] {
            let says = move |query| what.map(|what| code(query, what)).into_iter().collect();
            let (at, _) = resolver(says).await;
            let own = new();
            let (question, mut ask) = asked("db.shop.svc.cluster.local");
            let mut known = Message::response(0, hickory_proto::op::OpCode::Query);
            known.add_query(hickory_proto::op::Query::query(
                question.name.to_name(),
                hickory_proto::rr::RecordType::A,
            ));
            let known = answer(known, 7);
            let known = Stored::read(&known, &question.name, 1, true).unwrap();
            ask.candidates[0].known = Some(known);
            // Then from the cache, or at once because resolvers were silent.
            for round in 0..2 {
                let client = client("shop", &[at]);
                let reply = Arc::clone(&own).resolve(&client, &question, &ask).await;
                assert_eq!(
                    addresses(&reply.unwrap()),
                    ["192.0.2.7"],
                    "{what:?}, {round}"
                );
            }
            // There is no resolver to ask.
            let client = client("shop", &[]);
            let reply = Arc::clone(&own).resolve(&client, &question, &ask).await;
            assert_eq!(addresses(&reply.unwrap()), ["192.0.2.7"], "{what:?}");
        }
    }

    #[tokio::test]
    async fn a_failure_is_not_asked_for_again_at_once() {
        let (at, count) = resolver(|query| vec![code(query, ResponseCode::ServFail)]).await;
        let own = new();
        let (question, ask) = asked("www.example.com");
        for _ in 0..10 {
            let client = client("shop", &[at]);
            let reply = Arc::clone(&own).resolve(&client, &question, &ask).await;
            assert_eq!(reply.unwrap().stored.code(), ResponseCode::ServFail);
        }
        // With EDNS0 and without.
        assert_eq!(count.load(Ordering::Relaxed), 2);
        sleep(FAILED * 2).await;
        let client = client("shop", &[at]);
        Arc::clone(&own).resolve(&client, &question, &ask).await;
        assert_eq!(count.load(Ordering::Relaxed), 4);
    }

    #[tokio::test]
    async fn no_answer_is_valid_for_longer_than_allowed() {
        let say = |ttl: u32| {
            move |query: Message| {
                let mut bytes = answer(query, 1);
                // The record is the last: TTL, length, address.
                let at = bytes.len() - 10;
                bytes[at..at + 4].copy_from_slice(&ttl.to_be_bytes());
                vec![bytes]
            }
        };
        for (ttl, wanted) in [(60, 60), (1_000_000, 3600), (0x8000_0001, 0)] {
            let (at, _) = resolver(say(ttl)).await;
            let (mut question, ask) = asked("www.example.com");
            question.edns = false;
            let client = client("shop", &[at]);
            let reply = new().resolve(&client, &question, &ask).await.unwrap();
            let message = Message::from_vec(reply.stored.bytes()).unwrap();
            assert_eq!(message.answers[0].ttl, wanted);
            assert_eq!(reply.stored.shape().ttl, wanted);
        }
    }

    #[tokio::test]
    async fn many_who_ask_the_same_are_one_query() {
        let (at, count) = resolver(|query| vec![answer(query, 1)]).await;
        let own = new();
        let mut askers = JoinSet::new();
        for _ in 0..100 {
            let own = Arc::clone(&own);
            askers.spawn(async move {
                let (question, ask) = asked("www.example.com");
                own.resolve(&client("", &[at]), &question, &ask)
                    .await
                    .unwrap()
            });
        }
        for reply in askers.join_all().await {
            assert_eq!(addresses(&reply), ["192.0.2.1"]);
        }
        assert_eq!(count.load(Ordering::Relaxed), 1);
        // And from then on none.
        let (question, ask) = asked("WWW.example.com");
        assert!(own.cached(&client("", &[at]), &question, &ask).is_some());
        // Clients of other resolvers do not get it.
        let other = "127.0.0.2:53".parse().unwrap();
        assert!(own.cached(&client("", &[other]), &question, &ask).is_none());
    }

    #[tokio::test]
    async fn an_empty_answer_ends_no_search_list() {
        let (at, _) = resolver(|query| {
            let name = query.queries[0].name().to_lowercase().to_string();
            let mut empty = query.clone();
            empty.metadata.message_type = MessageType::Response;
            if name.starts_with("fails") {
                empty.metadata.response_code = ResponseCode::ServFail;
            }
            let answer = if name.starts_with("www") {
                answer(query, 1)
            } else {
                empty.to_vec().unwrap()
            };
            vec![answer]
        })
        .await;
        let (own, asker) = (new(), client("", &[at]));
        let searched = |label: &str, rule| {
            let (question, mut ask) = asked(&format!("{label}.shop.svc.cluster.local"));
            ask.rule = rule;
            let candidate = &mut ask.candidates[0];
            candidate.name = LowerName::parse(&format!("{label}.corp.example")).unwrap();
            candidate.records = vec![compose::alias(&question.name, &candidate.name, 5)];
            (question, ask)
        };
        for (label, rule, code, records) in [
            ("www", Rule::Search, ResponseCode::NoError, 2),
            ("empty", Rule::Search, ResponseCode::NoError, 0),
            ("fails", Rule::Search, ResponseCode::ServFail, 1),
            // The service has the alias, whatever it leads to.
            ("empty", Rule::Alias, ResponseCode::NoError, 1),
        ] {
            let (question, ask) = searched(label, rule);
            let reply = own.clone().resolve(&asker, &question, &ask).await;
            let stored = reply.unwrap().stored;
            let found = (stored.code(), stored.counts()[0]);
            assert_eq!(found, (code, records), "{label} {rule:?}");
        }
    }

    #[tokio::test]
    async fn forged_answers_are_not_taken() {
        let (at, _) = resolver(|query| {
            let mut other_id = query.clone();
            other_id.metadata.id = query.metadata.id.wrapping_add(1);
            let mut other_name = query.clone();
            let name = LowerName::parse("www.example.net").unwrap();
            other_name.queries[0].set_name(name.to_name());
            let mut other_type = query.clone();
            other_type.queries[0].set_query_type(hickory_proto::rr::RecordType::AAAA);
            let no_answer = query.to_vec().unwrap();
            let cut = answer(query.clone(), 66)[..20].to_vec();
            vec![
                answer(other_id, 66),
                answer(other_name, 66),
                answer(other_type, 66),
                no_answer,
                cut,
                answer(query, 1),
            ]
        })
        .await;
        let (question, ask) = asked("www.example.com");
        let reply = new()
            .resolve(&client("", &[at]), &question, &ask)
            .await
            .unwrap();
        assert_eq!(addresses(&reply), ["192.0.2.1"]);
    }

    #[tokio::test]
    async fn a_resolver_that_is_away_is_asked_after_the_others() {
        let away = {
            let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
            socket.local_addr().unwrap()
        };
        let (at, count) = resolver(|query| vec![answer(query, 1)]).await;
        let own = new();
        let start = Instant::now();
        for number in 0..10 {
            let (question, ask) = asked(&format!("www-{number}.example.com"));
            assert!(
                own.clone()
                    .resolve(&client("", &[away, at]), &question, &ask)
                    .await
                    .is_some()
            );
        }
        assert!(
            start.elapsed() < Duration::from_secs(5),
            "{:?}",
            start.elapsed()
        );
        assert_eq!(count.load(Ordering::Relaxed), 10);
        assert_eq!(own.metrics.upstream_failures.get(), 1);
        let (question, ask) = asked("www.example.com");
        assert!(
            own.resolve(&client("", &[away]), &question, &ask)
                .await
                .is_none()
        );
    }

    #[tokio::test]
    async fn a_namespace_that_asks_much_leaves_room_to_ask_for_others() {
        let own = new();
        let (greedy, small) = (client("greedy", &[]), client("small", &[]));
        let set = own.set(&[]);
        // They are asked when this waits for something, which it does not.
        let ask = |client, number| {
            let (question, _) = asked(&format!("{number}.example.com"));
            let key = question.key(set);
            own.flight(set, client, &question, &key).is_some()
        };
        let asked = (0..FLIGHTS).filter(|number| ask(&greedy, *number)).count();
        assert_eq!(asked, FLIGHTS / 2);
        assert_eq!(own.metrics.refused.get(), (FLIGHTS / 2) as u64);
        assert!(ask(&small, FLIGHTS));
        // A question that another client has in flight already costs nothing.
        assert!(ask(&greedy, FLIGHTS));
        assert!(own.relay(&greedy, &[0; 12], Transport::Udp).await.is_none());
        assert_eq!(own.metrics.upstream_requests.get(), 0);
    }

    #[tokio::test]
    async fn a_namespace_that_asks_too_much_gets_the_stale_answers_that_are_there() {
        let own = new();
        let greedy = client("greedy", &[]);
        let set = own.set(&[]);
        for number in 0..FLIGHTS {
            let (question, _) = asked(&format!("{number}.example.com"));
            drop(own.flight(set, &greedy, &question, &question.key(set)));
        }
        let (question, ask) = asked("old.example.com");
        own.cache.put(
            &question.key(set),
            &"greedy".into(),
            &old(&question),
            past(),
        );
        let reply = own.clone().resolve(&greedy, &question, &ask).await.unwrap();
        assert_eq!(addresses(&reply), ["192.0.2.9"]);
        assert_eq!(own.metrics.stale.get(), 1);
        let (question, ask) = asked("new.example.com");
        assert!(own.resolve(&greedy, &question, &ask).await.is_none());
    }

    /// An answer for a minute.
    fn old(question: &Question) -> Arc<Stored> {
        let mut message = Message::response(0, hickory_proto::op::OpCode::Query);
        message.add_query(hickory_proto::op::Query::query(
            question.name.to_name(),
            hickory_proto::rr::RecordType::A,
        ));
        let bytes = answer(message, 9);
        Arc::new(Stored::read(&bytes, &question.name, 1, false).unwrap())
    }

    fn past() -> Instant {
        Instant::now()
            .checked_sub(Duration::from_secs(100))
            .unwrap()
    }

    /// Another resolver then answers the other namespaces, and they get no stale answers.
    #[tokio::test]
    async fn slow_names_of_one_namespace_cost_no_other_namespace() {
        let asks = |query: &Message, word| {
            query.queries[0]
                .name()
                .to_lowercase()
                .to_string()
                .starts_with(word)
        };
        let (first, _) = resolver(move |query| {
            if asks(&query, "slow") {
                return Vec::new();
            }
            vec![answer(query, 1)]
        })
        .await;
        let (second, _) = resolver(move |query| {
            if asks(&query, "slower") {
                return Vec::new();
            }
            vec![answer(query, 2)]
        })
        .await;
        let own = new();
        let (greedy, small) = (
            client("greedy", &[first, second]),
            client("small", &[first, second]),
        );
        // The first resolver's earlier answer has expired.
        let (old_question, _) = asked("old.example.com");
        own.cache.put(
            &old_question.key(own.set(&[first, second])),
            &"shop".into(),
            &old(&old_question),
            past(),
        );
        for (slow, answered, name) in [
            ("slow.example.com", true, "www.example.com"),
            ("slower.example.com", false, "old.example.com"),
        ] {
            let (question, ask) = asked(slow);
            let reply = own.clone().resolve(&greedy, &question, &ask).await;
            assert_eq!(reply.is_some(), answered, "{slow}");
            let (question, ask) = asked(name);
            let reply = own.clone().resolve(&small, &question, &ask).await.unwrap();
            assert_eq!(addresses(&reply), ["192.0.2.1"], "{name}");
        }
    }
}
