//! Resolvers: which of them is asked.

use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use hickory_proto::op::ResponseCode;
use tokio::time::timeout_at;

use super::{
    exchange::{Question, exchange, pass_on},
    metrics::Metrics,
    wire::{Stored, Transport},
};

/// How long a resolver has to answer before the next is asked.
const ATTEMPT: Duration = Duration::from_millis(1500);
/// How long all attempts take together at most: shorter than the five seconds of clients' own resolvers.
const ALL: Duration = Duration::from_millis(4500);
/// Number of passes through the list.
const ROUNDS: usize = 2;
/// How long a resolver that did not answer is asked only after the others; doubled each time.
const REST: Duration = Duration::from_secs(2);
const REST_MAX: Duration = Duration::from_secs(30);

/// Why resolvers gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The client has no resolver.
    #[error("there is no resolver to ask")]
    Nobody,
    /// No resolver answered in time.
    #[error("no resolver answered in time; the last error was: {0}")]
    Silence(String),
}

/// A resolver's recent results.
#[derive(Clone, Copy, Debug, Default)]
struct Health {
    /// How often in a row it has not answered.
    failures: u32,
    /// Until when it is asked only after the others.
    rests: Option<Instant>,
}

/// All resolvers, and how they do for each namespace: a resolver does not answer for names of slow servers, and clients
/// choose the names.
#[derive(Debug)]
pub struct Upstream {
    health: Mutex<HashMap<(Arc<str>, SocketAddr), Health>>,
    metrics: Arc<Metrics>,
}

impl Upstream {
    /// Resolvers that all do well.
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self {
            health: Mutex::default(),
            metrics,
        }
    }

    /// Asks a client's resolvers, in their order but those first that do well for its namespace, until one answers.
    ///
    /// # Errors
    ///
    /// None of them did.
    pub async fn ask(
        &self,
        namespace: &Arc<str>,
        resolvers: &[SocketAddr],
        question: &Question,
    ) -> Result<Stored, Failure> {
        let start = Instant::now();
        let end = start + ALL;
        let mut last = "there was no time".to_owned();
        // The answer of a resolver that cannot help: better than nothing.
        let mut refused = None;
        for _ in 0..ROUNDS {
            for resolver in self.in_order(namespace, resolvers) {
                let now = Instant::now();
                if now >= end {
                    break;
                }
                self.metrics.upstream_requests.inc();
                let end = (now + ATTEMPT).min(end);
                let answer = exchange(resolver, question, end, &self.metrics).await;
                self.note(namespace, resolver, answer.is_ok());
                match answer {
                    Ok(answer) => {
                        let seconds = now.elapsed().as_secs_f64();
                        self.metrics.upstream_duration.observe(seconds);
                        match answer.code() {
                            ResponseCode::ServFail
                            | ResponseCode::Refused
                            | ResponseCode::NotImp => refused = Some(answer),
                            _ => return Ok(answer),
                        }
                    }
                    Err(error) => {
                        self.metrics.upstream_failures.inc();
                        last = format!("{resolver}: {error}");
                    }
                }
            }
            if refused.is_some() {
                break;
            }
        }
        match refused {
            Some(answer) => Ok(answer),
            None if resolvers.is_empty() => Err(Failure::Nobody),
            None => Err(Failure::Silence(last)),
        }
    }

    /// Resolvers in the order in which to ask them.
    fn in_order(&self, namespace: &Arc<str>, resolvers: &[SocketAddr]) -> Vec<SocketAddr> {
        let health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let rests = |resolver: &&SocketAddr| {
            let health = health.get(&(Arc::clone(namespace), **resolver));
            let rests = health.and_then(|health| health.rests);
            rests.is_some_and(|until| until > now)
        };
        let (later, first): (Vec<_>, Vec<_>) = resolvers.iter().partition(rests);
        first.into_iter().chain(later).copied().collect()
    }

    /// Notes how a resolver did.
    fn note(&self, namespace: &Arc<str>, resolver: SocketAddr, answered: bool) {
        let mut health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (Arc::clone(namespace), resolver);
        if answered {
            health.remove(&key);
            return;
        }
        let health = health.entry(key).or_default();
        let rest = REST * 2_u32.saturating_pow(health.failures.min(8));
        health.failures += 1;
        health.rests = Some(Instant::now() + rest.min(REST_MAX));
    }

    /// Forwards a query that this server does not understand. The client judges the answer.
    ///
    /// # Errors
    ///
    /// No resolver answered.
    pub async fn relay(
        &self,
        namespace: &Arc<str>,
        resolvers: &[SocketAddr],
        query: &[u8],
        transport: Transport,
    ) -> Result<Vec<u8>, Failure> {
        let all = Instant::now() + ALL;
        let mut last = Failure::Nobody;
        let resolvers = self.in_order(namespace, resolvers);
        for resolver in resolvers.iter().cycle().take(resolvers.len() * ROUNDS) {
            let now = Instant::now();
            if now >= all {
                break;
            }
            self.metrics.upstream_requests.inc();
            let end = (now + ATTEMPT).min(all);
            let answer = timeout_at(end.into(), pass_on(*resolver, query, transport)).await;
            match answer.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
                Ok(answer) => {
                    self.note(namespace, *resolver, true);
                    return Ok(answer);
                }
                Err(error) => {
                    // A resolver need not understand a query that this server does not understand: other queries decide
                    // whether it counts as silent.
                    self.metrics.upstream_failures.inc();
                    last = Failure::Silence(format!("{resolver}: {error}"));
                }
            }
        }
        Err(last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resolver_rests_for_longer_each_time() {
        let upstream = Upstream::new(Arc::default());
        let (shop, other): (Arc<str>, Arc<str>) = ("shop".into(), "other".into());
        let all = ["192.0.2.1:53", "192.0.2.2:53"].map(|at| at.parse().unwrap());
        let [first, second] = all;
        for seconds in [2, 4, 8, 16, 30, 30] {
            upstream.note(&shop, first, false);
            let health = upstream.health.lock().unwrap();
            let until = health[&(Arc::clone(&shop), first)].rests.unwrap();
            let rests = until - Instant::now();
            assert!(rests <= Duration::from_secs(seconds));
            assert!(rests + REST / 2 > Duration::from_secs(seconds));
        }
        assert_eq!(upstream.in_order(&shop, &all), [second, first]);
        assert_eq!(upstream.in_order(&other, &all), all);
        upstream.note(&shop, first, true);
        assert_eq!(upstream.in_order(&shop, &all), all);
    }

    #[tokio::test]
    async fn a_client_without_resolvers_is_told_apart_from_silence() {
        let upstream = Upstream::new(Arc::default());
        let question = Question {
            name: crate::LowerName::root(),
            of_type: 1,
            bits: 1,
            edns: false,
        };
        let asked = upstream.ask(&"shop".into(), &[], &question).await;
        assert!(matches!(asked, Err(Failure::Nobody)), "{asked:?}");
        // Nobody listens there.
        let closed = SocketAddr::from(([127, 0, 0, 1], 1));
        let asked = upstream.ask(&"shop".into(), &[closed], &question).await;
        assert!(matches!(asked, Err(Failure::Silence(_))), "{asked:?}");
    }
}
