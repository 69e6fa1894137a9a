//! Counters of direct connections: the kernel counts by numbers, the agent by names.

use std::{
    collections::HashMap,
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

use dataplane_common::{
    Addr,
    capture::{TRAFFIC, Traffic, TrafficKey},
};
use model::{Node, ServiceName, Workload, WorkloadName, authorization::PolicyName};
use relay::{CountersKey, Direction, Flag, Labels, Ledger, Party, Totals};

/// How long the number of a workload that has gone is remembered: its last connections may end later than the workload.
const LEAVING: Duration = Duration::from_mins(1);
/// How many entries of TRAFFIC may be in use before namespaces with many give some up.
const ROOM: usize = TRAFFIC as usize / 2;
/// How many policies that no longer refuse connections are remembered: their last refusals are counted later.
const REFUSERS: usize = 4096;

/// Totals since the agent started. A number may be reused for another workload: earlier counts stay with the earlier
/// workload.
#[derive(Debug, Default)]
pub struct Direct {
    /// By their numbers in the kernel's tables.
    workloads: HashMap<u32, Numbered>,
    seen: HashMap<TrafficKey, Traffic>,
    ledger: Ledger,
    /// Istio's policies that refuse connections in the kernel, by their numbers.
    refusers: HashMap<u32, PolicyName>,
}

/// Connections to a workload that Istio's policies refused in the kernel.
#[derive(Debug, PartialEq, Eq)]
pub struct Refused {
    /// The workload.
    pub workload: WorkloadName,
    /// The policy. `None`: no policy with ALLOW matches.
    pub by: Option<PolicyName>,
    /// The number of connections.
    pub count: u64,
}

/// Returns the workload of each address: `None` for addresses of several workloads, or of the node.
pub fn by_address<'a>(
    workloads: impl IntoIterator<Item = &'a Arc<Workload>>,
    node: &Node,
) -> HashMap<Addr, Option<Arc<Workload>>> {
    let mut found: HashMap<Addr, Option<Arc<Workload>>> = HashMap::new();
    for workload in workloads {
        for addr in &workload.addresses {
            let known = found.entry((*addr).into());
            let owner = known.or_insert_with(|| Some(Arc::clone(workload)));
            let is_other = owner
                .as_ref()
                .is_some_and(|owner| owner.name != workload.name);
            if is_other || node.addresses.contains(addr) {
                *owner = None;
            }
        }
    }
    found
}

/// The workload of a number.
#[derive(Debug)]
struct Numbered {
    /// `None` if the agent does not know it.
    workload: Option<Arc<Workload>>,
    /// Since when there is no such workload.
    gone: Option<Instant>,
}

impl Direct {
    /// Assigns a number to a workload.
    pub fn name(&mut self, number: u32, workload: &Arc<Workload>) {
        let named = Numbered {
            workload: Some(Arc::clone(workload)),
            gone: None,
        };
        self.workloads.insert(number, named);
    }

    /// Names the policies that refuse connections in the kernel, and forgets those before them if they are many.
    pub fn name_refusers(&mut self, refusers: Vec<(u32, PolicyName)>) {
        if self.refusers.len() > REFUSERS {
            self.refusers.clear();
        }
        self.refusers.extend(refusers);
    }

    /// Whether there are no workloads to count for.
    pub fn is_idle(&self) -> bool {
        self.workloads.is_empty() && self.ledger.iter().next().is_none()
    }

    /// Returns the workloads that have a name, and are still there.
    pub fn workloads(&self) -> impl Iterator<Item = &Arc<Workload>> {
        let there = self.workloads.values().filter(|named| named.gone.is_none());
        there.filter_map(|named| named.workload.as_ref())
    }

    /// Returns the totals of all series.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Adds the counts since the last update. `service`: returns the service of a pool; `peer`: the workload of an
    /// address. Returns the connections that policies refused.
    pub fn update(
        &mut self,
        counted: impl IntoIterator<Item = (TrafficKey, Traffic)>,
        service: impl Fn(u32) -> Option<ServiceName>,
        peer: impl Fn(Addr) -> Option<Arc<Workload>>,
        now: Instant,
    ) -> Vec<Refused> {
        let mut refused = Vec::new();
        let is_due = self.ledger.is_due(now);
        for (key, counted) in counted {
            let named = self.workloads.entry(key.workload);
            let named = named.or_insert(Numbered {
                workload: None,
                gone: Some(now),
            });
            let before = self.seen.entry(key).or_default();
            let refused_by = key.refused_by();
            // The agent names a policy after it has written the tables.
            let is_unnamed = refused_by.is_some_and(|by| {
                ![0, TrafficKey::NOT_ALLOWED].contains(&by) && !self.refusers.contains_key(&by)
            });
            // The series of open connections are in use.
            let uses = is_due && counted.opened > counted.closed;
            if is_unnamed || counted == *before && !uses {
                continue;
            }
            let before = mem::replace(before, counted);
            let Some(workload) = &named.workload else {
                continue;
            };
            let (direction, service) = match key.pool {
                TrafficKey::INBOUND => (Direction::Inbound, None),
                _ if refused_by.is_some() => (Direction::Inbound, None),
                pool => (Direction::Outbound, service(pool)),
            };
            let labels = |flag| Labels {
                workload: Party::of(workload),
                key: CountersKey {
                    direction,
                    principals: None,
                    service: service.clone(),
                    peer: peer(key.addr).map_or_else(Party::nobody, |peer| Party::of(&peer)),
                    flag,
                },
            };
            let since = |read: fn(&Traffic) -> u64| read(&counted).saturating_sub(read(&before));
            let failed = Totals {
                failed: since(|traffic| traffic.failed),
                ..Totals::default()
            };
            let failure = labels(match refused_by {
                Some(_) => Flag::Denied,
                None => Flag::ConnectFailure,
            });
            let by = refused_by.and_then(|by| match by {
                TrafficKey::NOT_ALLOWED => Some(None),
                by => self.refusers.get(&by).cloned().map(Some),
            });
            refused.extend(by.map(|by| Refused {
                workload: workload.name.clone(),
                by,
                count: failed.failed,
            }));
            self.ledger.add(&failure, failed, 0, now);
            // From the client and to the client, as a proxy between them counts.
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
            let nanoseconds = since(|traffic| traffic.nanoseconds);
            self.ledger
                .add(&labels(Flag::None), totals, nanoseconds, now);
        }
        if is_due {
            self.ledger.prune(now);
        }
        refused
    }

    /// Forgets workloads that have gone. `is_there`: whether there is such a workload. Returns the entries that the kernel no
    /// longer needs to count.
    pub fn forget(
        &mut self,
        is_there: impl Fn(&WorkloadName) -> bool,
        now: Instant,
    ) -> Vec<TrafficKey> {
        self.workloads.retain(|_, named| {
            let workload = named.workload.as_ref();
            if workload.is_some_and(|workload| is_there(&workload.name)) {
                named.gone = None;
                return true;
            }
            now - *named.gone.get_or_insert(now) < LEAVING
        });
        let workloads = &self.workloads;
        let has_gone = |key: &TrafficKey| !workloads.contains_key(&key.workload);
        let mut over: Vec<TrafficKey> = self.seen.keys().copied().filter(has_gone).collect();
        over.extend(self.beyond_shares(ROOM));
        for key in &over {
            self.seen.remove(key);
        }
        over
    }

    /// Returns the entries to remove from the kernel's table if more than `room` entries are in use: of the workloads of namespaces
    /// that have more than their share, first those without open connections. The ledger keeps what they counted. A connection
    /// whose entry is gone makes a new entry when it ends.
    fn beyond_shares(&self, room: usize) -> Vec<TrafficKey> {
        if self.seen.len() <= room {
            return Vec::new();
        }
        // The entries of each namespace: with open connections, and without. Workloads without a name are one namespace.
        let mut by_namespace: HashMap<&str, [Vec<TrafficKey>; 2]> = HashMap::new();
        for (key, traffic) in &self.seen {
            let numbered = self.workloads.get(&key.workload);
            let workload = numbered.and_then(|numbered| numbered.workload.as_ref());
            let namespace = workload.map_or("", |workload| workload.name.namespace());
            // If there was no entry when a connection began, only its end was counted.
            let is_idle = traffic.closed >= traffic.opened;
            by_namespace.entry(namespace).or_default()[usize::from(is_idle)].push(*key);
        }
        let share = room / by_namespace.len().max(1);
        let mut over = Vec::new();
        for [open, idle] in by_namespace.into_values() {
            let excess = (open.len() + idle.len()).saturating_sub(share);
            over.extend(idle.into_iter().chain(open).take(excess));
        }
        over
    }
}

#[cfg(test)]
mod tests {
    use model::{Place, WorkloadName};

    use super::*;

    fn workload(name: &str) -> Arc<Workload> {
        Arc::new(Workload::new(
            WorkloadName::new("default", name),
            Place::Address,
        ))
    }

    #[test]
    fn a_namespace_with_most_entries_gives_some_up() {
        let mut direct = Direct::default();
        let now = Instant::now();
        for (number, namespace) in [(1, "hog"), (2, "other"), (3, "hog")] {
            let name = WorkloadName::new(namespace, "app");
            direct.name(number, &Arc::new(Workload::new(name, Place::Address)));
        }
        let entry = |workload, pool, closed| {
            let addr = Addr::UNSPECIFIED;
            let key = TrafficKey {
                workload,
                pool,
                addr,
            };
            let traffic = Traffic {
                opened: 1,
                closed,
                ..Traffic::default()
            };
            (key, traffic)
        };
        let hog = (1..=90).map(|pool| entry(1 + pool % 2 * 2, pool, u64::from(pool > 10)));
        let other = (1..=10).map(|pool| entry(2, pool, 1));
        direct.update(hog.chain(other), |_| None, |_| None, now);
        assert_eq!(direct.beyond_shares(100).len(), 0);
        let over = direct.beyond_shares(80);
        assert_eq!(over.len(), 50);
        assert!(over.iter().all(|key| key.workload != 2 && key.pool > 10));
        // Then those with open connections, too.
        assert_eq!(direct.beyond_shares(10).len(), 85 + 5);
        let opened = |direct: &Direct| {
            let all = direct.ledger().iter();
            all.map(|(_, series)| series.totals.opened).sum::<u64>()
        };
        assert_eq!(opened(&direct), 100);
        // An entry that is made again counts from 0.
        for key in &over {
            direct.seen.remove(key);
        }
        let again = entry(over[0].workload, over[0].pool, 1);
        direct.update([again], |_| None, |_| None, now);
        assert_eq!(opened(&direct), 101);
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
            direct.update([entry], service, |_| None, Instant::now());
            let all = direct.ledger.iter();
            all.map(|(labels, series)| {
                let service = labels.key.service.as_ref().map(|s| s.name().to_owned());
                (service.unwrap(), labels.key.flag, series.totals)
            })
            .collect::<Vec<_>>()
        };
        // The number belongs to no workload.
        assert_eq!(update((key(7), traffic(1, 1, 0)), "web"), []);
        update((key(1), traffic(2, 100, 1)), "web");
        // The pool belongs to another service by now.
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
        let lasted = direct.ledger.iter().map(|(_, series)| series.nanoseconds);
        assert_eq!(lasted.sum::<u64>(), 50);
    }

    #[test]
    fn refusals_count_for_the_policy_and_the_workload() {
        let mut direct = Direct::default();
        direct.name(1, &workload("app"));
        let policy = PolicyName {
            namespace: "default".into(),
            object: "AuthorizationPolicy p".into(),
        };
        direct.name_refusers(vec![(7, policy.clone())]);
        let entry = |by, failed| {
            let key = TrafficKey {
                workload: 1,
                pool: TrafficKey::REFUSED | by,
                addr: Addr::UNSPECIFIED,
            };
            let traffic = Traffic {
                failed,
                ..Traffic::default()
            };
            (key, traffic)
        };
        let update = |direct: &mut Direct, counted: &[(TrafficKey, Traffic)]| {
            let refused = direct.update(counted.to_vec(), |_| None, |_| None, Instant::now());
            let refused = refused.into_iter().map(|of| (of.by, of.count));
            refused.collect::<Vec<_>>()
        };
        // The last number belongs to no policy: 0 is for policies that cannot be read.
        let first = [entry(7, 2), entry(TrafficKey::NOT_ALLOWED, 1), entry(0, 4)];
        let named = [(Some(policy.clone()), 2), (None, 1)];
        assert_eq!(update(&mut direct, &first), named);
        let more = [(Some(policy.clone()), 3)];
        assert_eq!(update(&mut direct, &[entry(7, 5)]), more);
        assert_eq!(update(&mut direct, &[entry(8, 2)]), []); // Named later.
        direct.name_refusers(vec![(8, policy.clone())]);
        assert_eq!(update(&mut direct, &[entry(8, 2)]), [(Some(policy), 2)]);
        let all = direct.ledger.iter();
        let all = all.map(|(labels, of)| (labels.key.direction, labels.key.flag, of.totals.failed));
        let all: Vec<_> = all.collect();
        assert_eq!(all, [(Direction::Inbound, Flag::Denied, 12)]);
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
            direct.update([(key, traffic)], service, |_| None, Instant::now());
        }
        let all = direct.ledger.iter();
        let seen: Vec<_> = all
            .map(|(labels, series)| (labels, &series.totals))
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

    #[test]
    fn an_address_that_several_have_or_the_node_is_nobodys() {
        let with = |name: &str, addresses: &[&str]| {
            Arc::new(Workload {
                addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
                ..(*workload(name)).clone()
            })
        };
        let all = [
            with("a", &["10.0.0.1", "fd00::1"]),
            with("b", &["10.0.0.1", "fd00::2"]),
            with("c", &["192.0.2.1"]),
            with("b", &["fd00::2"]),
        ];
        let node = Node {
            addresses: ["192.0.2.1".parse().unwrap()].into_iter().collect(),
            ..Node::default()
        };
        let found = by_address(&all, &node);
        let owner = |addr: &str| {
            let addr: std::net::IpAddr = addr.parse().unwrap();
            let owner = found[&addr.into()].as_ref();
            owner.map(|owner| owner.name.name().to_owned())
        };
        assert_eq!(owner("10.0.0.1"), None);
        assert_eq!(owner("192.0.2.1"), None);
        assert_eq!(owner("fd00::1").as_deref(), Some("a"));
        assert_eq!(owner("fd00::2").as_deref(), Some("b"));
    }

    #[test]
    fn a_day_of_churn_leaves_nothing_but_what_was_counted() {
        let mut direct = Direct::default();
        let start = Instant::now();
        let mut kernel: HashMap<TrafficKey, Traffic> = HashMap::new();
        let traffic = Traffic {
            opened: 1,
            ..Traffic::default()
        };
        for number in 1..=2000 {
            let now = start + Duration::from_secs(number.into());
            let pod = Arc::new(Workload {
                name: WorkloadName::new("default", &format!("web-{number}")),
                ..(*workload("web")).clone()
            });
            direct.name(number, &pod);
            for number in [number, 1_000_000 + number] {
                let key = TrafficKey {
                    workload: number,
                    pool: 0,
                    addr: Addr::UNSPECIFIED,
                };
                kernel.insert(key, traffic);
            }
            let counted: Vec<_> = kernel.iter().map(|(key, t)| (*key, *t)).collect();
            direct.update(counted, |_| None, |_| None, now);
            // One workload is there at a time. The connections of the others end a little later.
            let is_there = |name: &WorkloadName| *name == pod.name;
            for key in direct.forget(is_there, now) {
                kernel.remove(&key);
            }
        }
        let most = 2 * (usize::try_from(LEAVING.as_secs()).unwrap() + 2);
        assert!(kernel.len() <= most, "{}", kernel.len());
        assert!(direct.seen.len() <= most && direct.workloads.len() <= most);
        let all: Vec<_> = direct.ledger.iter().map(|(_, s)| s.totals.opened).collect();
        assert_eq!(all, [2000], "one Deployment, one series");
    }
}
