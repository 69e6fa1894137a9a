//! What connections that went direct have come to: in the kernel by numbers, here by names.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use dataplane_common::{
    Addr,
    capture::{Traffic, TrafficKey},
};

use crate::{
    model::{ServiceName, Workload},
    proxy::{Connections, CountersKey, Direction, Flag, Labels, Party, Totals},
};

/// Totals since the agent started. A number may come to mean somebody else: what was counted before
/// stays with whom it was counted for.
#[derive(Debug, Default)]
pub struct Direct {
    /// By their numbers in the kernel's tables.
    workloads: HashMap<u32, Arc<Workload>>,
    seen: HashMap<TrafficKey, Traffic>,
    connections: Connections,
    /// How long those that were closed were open, in nanoseconds.
    durations: BTreeMap<Labels, u64>,
}

impl Direct {
    /// Says whose a number is.
    pub fn name(&mut self, number: u32, workload: &Arc<Workload>) {
        self.workloads.insert(number, Arc::clone(workload));
    }

    /// Whether there is nobody to count for.
    pub fn is_idle(&self) -> bool {
        self.workloads.is_empty()
    }

    /// Those that have a name.
    pub fn workloads(&self) -> impl Iterator<Item = &Arc<Workload>> {
        self.workloads.values()
    }

    /// What they came to, but for how long they took.
    pub fn connections(&self) -> &Connections {
        &self.connections
    }

    /// How long those that were closed were open, in nanoseconds.
    pub fn durations(&self) -> &BTreeMap<Labels, u64> {
        &self.durations
    }

    /// Adds what was counted since the last time. `service`: whose a pool is; `peer`: whose an
    /// address.
    pub fn update(
        &mut self,
        now: impl IntoIterator<Item = (TrafficKey, Traffic)>,
        service: impl Fn(u32) -> Option<ServiceName>,
        peer: impl Fn(Addr) -> Option<Arc<Workload>>,
    ) {
        for (key, now) in now {
            let before = self.seen.insert(key, now).unwrap_or_default();
            if now == before {
                continue;
            }
            let Some(workload) = self.workloads.get(&key.workload) else {
                continue;
            };
            let (direction, service) = match key.pool {
                TrafficKey::INBOUND => (Direction::Inbound, None),
                pool => (Direction::Outbound, service(pool)),
            };
            let labels = |flag| Labels {
                workload: Party(Arc::clone(workload)),
                key: CountersKey {
                    direction,
                    service: service.clone(),
                    peer: peer(key.addr).map(Party),
                    flag,
                },
            };
            let since = |read: fn(&Traffic) -> u64| read(&now).saturating_sub(read(&before));
            let failed = since(|traffic| traffic.failed);
            if failed > 0 {
                let totals = Totals {
                    failed,
                    ..Totals::default()
                };
                let labels = labels(Flag::ConnectFailure);
                *self.connections.entry(labels).or_default() += totals;
            }
            // From the client and to it, as a proxy between them has it.
            let (sent, received) = (since(|t| t.sent), since(|t| t.received));
            let (from_client, to_client) = match direction {
                Direction::Outbound => (sent, received),
                Direction::Inbound => (received, sent),
            };
            let totals = Totals {
                opened: since(|traffic| traffic.opened),
                closed: since(|traffic| traffic.closed),
                failed: 0,
                received: from_client,
                sent: to_client,
            };
            if totals != Totals::default() {
                let labels = labels(Flag::None);
                *self.durations.entry(labels.clone()).or_default() +=
                    since(|traffic| traffic.nanoseconds);
                *self.connections.entry(labels).or_default() += totals;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Identity, Place, WorkloadName};

    fn workload(name: &str) -> Arc<Workload> {
        Arc::new(Workload {
            name: WorkloadName::new("default", name),
            addresses: smallvec::smallvec![],
            place: Place::Address,
            identity: Identity::new(name, "", None),
            rules: Arc::default(),
            capture: None,
        })
    }

    #[test]
    fn counts_what_is_new_for_whom_it_is_then() {
        let mut direct = Direct::default();
        direct.name(1, &workload("app"));
        let key = |workload| TrafficKey {
            workload,
            pool: 3,
            addr: Addr::UNSPECIFIED,
        };
        let traffic = |opened, sent, failed| Traffic {
            opened,
            closed: opened,
            failed,
            sent,
            received: 0,
            nanoseconds: opened * 10,
        };
        let mut update = |entry, name: &str| {
            let service = |_| Some(ServiceName::new("default", name));
            direct.update([entry], service, |_| None);
            let all = direct.connections.iter();
            all.map(|(labels, totals)| {
                let service = labels.key.service.as_ref().map(|s| s.name().to_owned());
                (service.unwrap(), labels.key.flag, *totals)
            })
            .collect::<Vec<_>>()
        };
        // Nobody's.
        assert_eq!(update((key(7), traffic(1, 1, 0)), "web"), []);
        update((key(1), traffic(2, 100, 1)), "web");
        // The pool is another service's by now.
        let all = update((key(1), traffic(5, 150, 1)), "dns");
        let seen: Vec<_> = all
            .iter()
            .map(|(service, flag, t)| (service.as_str(), *flag, t.opened, t.received, t.failed))
            .collect();
        assert_eq!(
            seen,
            [
                ("dns", Flag::None, 3, 50, 0),
                ("web", Flag::None, 2, 100, 0),
                ("web", Flag::ConnectFailure, 0, 0, 1),
            ]
        );
        assert_eq!(direct.durations.values().sum::<u64>(), 50);
    }

    #[test]
    fn bytes_are_from_the_client_and_to_it_whichever_side_is_ours() {
        let mut direct = Direct::default();
        direct.name(1, &workload("app"));
        for pool in [3, TrafficKey::INBOUND] {
            let key = TrafficKey {
                workload: 1,
                pool,
                addr: Addr::UNSPECIFIED,
            };
            let traffic = Traffic {
                sent: 7,
                received: 100,
                ..Traffic::default()
            };
            let service = |pool| (pool == 3).then(|| ServiceName::new("default", "web"));
            direct.update([(key, traffic)], service, |_| None);
        }
        let all = direct.connections.iter();
        let seen: Vec<_> = all
            .map(|(labels, t)| (labels.key.direction, labels.key.service.is_some(), t))
            .map(|(direction, service, t)| (direction, service, t.received, t.sent))
            .collect();
        assert_eq!(
            seen,
            [
                (Direction::Outbound, true, 7, 100),
                (Direction::Inbound, false, 100, 7),
            ]
        );
    }
}
