//! Answers from resolvers: out of the cache, or by one query for all clients with the same question.

#[cfg(test)]
mod stale;
#[cfg(test)]
mod tests;

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
    answer::Ask,
    cache::{Cache, Hit, Key, State},
    client::Client,
    compose,
    counts::{Counted, Counts},
    exchange::Question,
    join::joined,
    metrics::Metrics,
    rule::Rule,
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
    /// A number for each set of resolvers. The answers of one set are not for clients of another set.
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
                // The client's own resolver continues with its list. Only resolvers know whether a host has such a
                // record.
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

    /// Returns the query to resolvers for this key: one that is in flight or has failed a moment ago, or else a new
    /// one. Returns `None` if the client's namespace has too many queries in flight.
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

/// Turns the resolvers' reply about a candidate into the answer. Returns `None` if the next candidate must be asked
/// for.
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
        records => joined(question, records, &reply.stored, reply.age),
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
