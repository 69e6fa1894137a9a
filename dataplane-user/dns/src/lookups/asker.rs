//! Asks resolvers for one name, again and again.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use model::EndpointName;
use tokio::{sync::Semaphore, time::sleep};

use super::{
    super::{
        exchange::Question,
        name::LowerName,
        upstream::{Failure, Upstream},
        wire::{bits, types},
    },
    Found, Pace,
    answers::{Answer, answer, next},
};

/// Asks resolvers.
pub struct Asker {
    pub upstream: Upstream,
    pub resolvers: Box<dyn Fn() -> Result<Vec<SocketAddr>, String> + Send + Sync>,
    pub pace: Pace,
    pub all: Semaphore,
    pub found: Arc<Found>,
}

impl Pace {
    /// The time after this many failures in a row, of which there is one at least.
    fn after(self, failures: u32) -> Duration {
        let wait = self.retry * 2_u32.saturating_pow(failures.min(16) - 1);
        wait.min(self.retry_most)
    }
}

impl Asker {
    /// Looks up a name for as long as the task lives.
    pub async fn look_up(
        self: Arc<Self>,
        name: EndpointName,
        last: Arc<[IpAddr]>,
        own: Arc<Semaphore>,
    ) {
        let mut known = last;
        let mut failures = 0;
        loop {
            let answers = {
                let _of_namespace = own.acquire().await;
                let _of_all = self.all.acquire().await;
                self.ask(&name).await
            };
            let (resolved, ttl) = next(&known, answers);
            known = Arc::clone(&resolved.addresses);
            let wait = if let Some(ttl) = ttl {
                failures = 0;
                ttl.clamp(self.pace.least, self.pace.most)
            } else {
                failures += 1;
                self.pace.after(failures)
            };
            self.found.tell(name.clone(), resolved);
            sleep(wait).await;
        }
    }

    /// Asks resolvers for the addresses of both families.
    async fn ask(&self, name: &EndpointName) -> [Result<Answer, String>; 2] {
        let Ok(parsed) = LowerName::parse(&name.name) else {
            return [(); 2].map(|()| Err("is too long for a DNS name".to_owned()));
        };
        let resolvers = match (self.resolvers)() {
            Ok(resolvers) => resolvers,
            Err(error) => return [Err(error.clone()), Err(error)],
        };
        let ask = async |of_type| {
            let question = Question {
                name: parsed.clone(),
                of_type,
                bits: bits::RD,
                edns: true,
            };
            let asked = self.upstream.ask(&name.namespace, &resolvers, &question);
            let stored = asked.await.map_err(|error| match error {
                Failure::Nobody => {
                    "the node has no resolver to ask: its resolv.conf names none".to_owned()
                }
                Failure::Silence(..) => error.to_string(),
            })?;
            answer(&parsed, &stored)
        };
        let (v4, v6) = tokio::join!(ask(types::A), ask(types::AAAA));
        [v4, v6]
    }
}

#[cfg(test)]
mod tests {
    use super::{super::PACE, *};

    #[test]
    fn the_time_between_tries_doubles_up_to_a_minute() {
        for (failures, seconds) in [(1, 2), (2, 4), (3, 8), (5, 32), (6, 60), (99, 60)] {
            assert_eq!(
                PACE.after(failures),
                Duration::from_secs(seconds),
                "{failures}"
            );
        }
    }
}
