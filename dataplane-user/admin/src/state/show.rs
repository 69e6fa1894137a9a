//! The agent's state, in the form of its endpoints.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Bound,
    sync::Arc,
    time::Instant,
};

use model::{ServiceName, Snapshot};
use plan::{Conflict, PoolOwner};
use proxy::Observer;

use super::{Known, State};
use crate::{api, lock::lock, tunnels, view};

/// How many workloads are named that share one problem of the node's.
const NAMED: usize = 8;

impl State {
    /// Returns why the agent is not ready; `None`: it is ready. This depends on its own state and the node's only, and
    /// not on the source.
    pub fn not_ready_because(&self) -> Option<String> {
        if !self.is_in_line() {
            return Some("the kernel's tables were not written yet, or the agent ends".to_owned());
        }
        let known = lock(&self.known);
        mesh_problems(&known)
            .find(|problem| problem.gravity == api::Gravity::Node)
            .map(|problem| format!("{}: {}", problem.place, problem.text))
    }

    /// For `GET /mesh`.
    pub fn mesh(&self) -> api::Page<api::MeshWorkload> {
        let workloads = Arc::clone(&lock(&self.known).captured);
        api::Page {
            items: workloads.to_vec(),
            next: None,
        }
    }

    /// How many problems there are with the plan, with the source, with ports for load balancers, with the packet
    /// path and with capture.
    pub fn problems(&self) -> usize {
        let served = self.served();
        let known = lock(&self.known);
        served.problems().count()
            + served.snapshot.problems.len()
            + usize::from(self.learnt.outdated.is_some())
            + usize::from(self.learnt.source_routes_pass)
            + known.unasked.len()
            + known.crowded.len()
            + known.network.len()
            + usize::from(known.led_elsewhere.is_some())
            + usize::from(known.cni.is_some())
            + mesh_problems(&known).count()
            + self.at_limit().count()
            + self.stalled().count()
            + self.bounded().count()
            + usize::from(self.held_in_tunnels().is_some())
    }

    /// Returns the workloads that have the most connections through the proxy that they may have.
    fn at_limit(&self) -> impl Iterator<Item = api::Problem> {
        let workloads = self.proxy.get().map(Observer::at_limit);
        let workloads = workloads.unwrap_or_default().into_iter();
        workloads.map(|(name, connections)| api::Problem {
            gravity: api::Gravity::Warning,
            place: "mesh".to_owned(),
            text: format!(
                "{name} has {connections} connections through the proxy, which is its share; further ones wait; \
                 see mesh.proxy.maxConnections"
            ),
        })
    }

    /// Returns the workloads some of whose connections the proxy ended because their receivers did not read.
    fn stalled(&self) -> impl Iterator<Item = api::Problem> {
        let workloads = self.proxy.get().map(Observer::stalled);
        let workloads = workloads.unwrap_or_default().into_iter();
        workloads.map(|(name, connections)| api::Problem {
            gravity: api::Gravity::Warning,
            place: "mesh".to_owned(),
            text: format!(
                "{name}: the proxy has reset or refused {connections} connections because a side of each had stopped reading and \
                 the proxy's buffers were full"
            ),
        })
    }

    /// Returns the workloads to which tunnels were refused or had to wait.
    fn bounded(&self) -> impl Iterator<Item = api::Problem> {
        let workloads = self.proxy.get().map(Observer::bounded);
        let workloads = workloads.unwrap_or_default().into_iter();
        workloads.map(|(name, bounded, why)| api::Problem {
            gravity: api::Gravity::Warning,
            place: "mesh".to_owned(),
            text: format!(
                "{name}: the agent has refused {} tunnels (port 15008) and let tunnels wait {} times, the last time because \
                 {} has its share of {}; with -v, the log names the clients that were refused",
                bounded.refused, bounded.deferred, why.holder, why.what
            ),
        })
    }

    /// Returns a problem if connections in tunnels hold so many bytes that their windows are small.
    fn held_in_tunnels(&self) -> Option<api::Problem> {
        let [held, max] = self.proxy.get().and_then(Observer::tunnels_hold_much)?;
        let mib = |bytes| bytes >> 20;
        Some(api::Problem {
            gravity: api::Gravity::Warning,
            place: "mesh".to_owned(),
            text: format!(
                "connections in tunnels hold {} MiB of at most {} MiB, because sides of them do not read: connections of the \
                 namespaces that hold most have small windows, and beyond the maximum the agent resets them",
                mib(held),
                mib(max)
            ),
        })
    }

    /// For `GET /status`.
    pub fn status(&self) -> api::AgentStatus {
        let served = self.served();
        let conflicts = served.conflicts();
        let conflicts = conflicts
            .map(|conflict| view::conflict(&conflict))
            .collect();
        let mut problems: Vec<_> = served
            .problems()
            .map(|(_, problem)| view::problem(problem, || false))
            .collect();
        let snapshot = served.snapshot;
        let known = lock(&self.known);
        let place_matters = || snapshot.depends_on_place().is_some();
        let of_source = snapshot.problems.iter();
        problems.extend(of_source.map(|problem| view::problem(problem, place_matters)));
        let unasked = known.unasked.iter();
        problems.extend(unasked.map(|problem| view::problem(problem, || false)));
        problems.extend(self.learnt.outdated.iter().map(|why| api::Problem {
            gravity: api::Gravity::Node,
            place: "configuration".to_owned(),
            text: format!(
                "cannot be read, and the agent, which has taken its place back, serves by what it said \
                 before: {why}; mend it and restart the agent"
            ),
        }));
        problems.extend(self.learnt.source_routes_pass.then(|| api::Problem {
            gravity: api::Gravity::Warning,
            place: "mesh".to_owned(),
            text: "egress: deny does not hold against IPv6 routing headers, which any process may set: the packet path is \
                   off, and only its programs see them. Turn it on (packets.path), or drop packets with a routing \
                   header at the forward hook of the node's firewall"
                .to_owned(),
        }));
        problems.extend(known.crowded.iter().cloned());
        let of_node = known.led_elsewhere.iter().chain(&known.cni);
        problems.extend(known.network.iter().chain(of_node).cloned());
        problems.extend(mesh_problems(&known));
        problems.extend(self.at_limit());
        problems.extend(self.stalled());
        problems.extend(self.bounded());
        problems.extend(self.held_in_tunnels());
        let node = &snapshot.node;
        api::AgentStatus {
            version: api::Version::own(),
            started: self.started,
            ready: self.is_in_line(),
            node: node.name.to_string(),
            node_port_addresses: node
                .addresses
                .iter()
                .zip(&node.addresses_from)
                .map(|(address, from)| api::Learnt {
                    value: address.to_string(),
                    from: from.text().to_owned(),
                })
                .collect(),
            pod_networks: self.learnt.pod_networks.clone(),
            cgroup: self.learnt.cgroup.clone(),
            pods: known.pods.clone(),
            stack_because: known.stack_because.clone(),
            leaving: node.leaving.map(|why| why.text().to_owned()),
            late_seconds: self.pulse.late(Instant::now()).map(|late| late.as_secs()),
            inherited: self.inherited,
            source: view::source(&self.source),
            services: snapshot.services.len() as u64,
            endpoints: endpoints(&snapshot),
            last_sync: known.last_sync.clone(),
            syncs: known.syncs,
            sync_errors: self.sync_errors.get(),
            sync_error: known.sync_error.clone(),
            conflicts,
            problems,
            mesh: known.captured.iter().map(without_rules).collect(),
            flows: self.flows.last().map(|walk| api::Flows {
                at: walk.at,
                total: walk.census.total(),
                ports: {
                    let most = walk.census.most_ports;
                    let ports = walk.census.ports.iter();
                    ports.map(|ports| api::Ports::new(ports, most)).collect()
                },
            }),
            dns: self.dns.get().map(|dns| {
                let [queries, local, cached, failed] = dns.counted();
                api::DnsStatus {
                    workloads: dns.captured(),
                    queries,
                    local,
                    cached,
                    failed,
                }
            }),
            tunnels: self.proxy.get().map(tunnels::list).unwrap_or_default(),
        }
    }

    /// The services after `after`, at most `limit`, of one namespace if given.
    pub fn services(
        &self,
        namespace: Option<&str>,
        after: Option<&ServiceName>,
        limit: usize,
    ) -> api::Page<api::Service> {
        if after.is_none() {
            self.count();
        }
        let served = self.served();
        let snapshot = &served.snapshot;
        let conflicts: Vec<_> = served.conflicts().collect();
        let mut disputes: HashMap<&ServiceName, Vec<&Conflict>> = HashMap::new();
        for conflict in &conflicts {
            for name in conflict.losers.iter().chain([&conflict.winner]) {
                disputes.entry(name).or_default().push(conflict);
            }
        }
        let counters = lock(&self.counters);
        let start = match (after, namespace) {
            (Some(after), _) => Bound::Excluded(after.clone()),
            (None, Some(namespace)) => Bound::Included(ServiceName::new(namespace, "")),
            (None, None) => Bound::Unbounded,
        };
        let mut services = snapshot
            .services
            .range((start, Bound::Unbounded))
            .take_while(|(name, _)| namespace.is_none_or(|n| n == name.namespace()))
            .map(|(_, service)| service);
        let page: Vec<_> = services.by_ref().take(limit).collect();
        let next = services
            .next()
            .and(page.last())
            .map(|last| last.name.to_string());
        api::Page {
            items: page
                .into_iter()
                .map(|service| {
                    let disputes = disputes.get(&service.name).map_or(&[][..], Vec::as_slice);
                    view::service(service, &counters, disputes)
                })
                .collect(),
            next,
        }
    }

    /// Returns the services of the pools after `after`, at most `limit`.
    pub fn pools(&self, after: u32, limit: usize) -> api::Page<api::Pool> {
        let served = self.served();
        let mut pools = served.pools_after(after);
        let page = pools.by_ref().take(limit);
        let items: Vec<_> = page
            .map(|(pool, owner)| pool_of(pool, owner, &served.snapshot))
            .collect();
        let next = pools.next().and(items.last());
        api::Page {
            next: next.map(|last| last.pool.to_string()),
            items,
        }
    }

    /// Returns the service of a pool.
    pub fn pool(&self, pool: u32) -> Option<api::Pool> {
        let served = self.served();
        let owner = served.pool_owner(pool)?;
        Some(pool_of(pool, owner, &served.snapshot))
    }
}

fn pool_of(pool: u32, owner: &PoolOwner, snapshot: &Snapshot) -> api::Pool {
    let service = snapshot.services.get(&owner.service);
    let ports = service.iter().flat_map(|service| &service.ports);
    let mut ports = ports.filter(|port| Some((port.port, port.protocol)) == owner.port);
    let split = ports.next().and_then(|port| port.split.as_ref());
    api::Pool {
        pool,
        route: split.map(|split| format!("{}, spec.rules[0]", split.by)),
        namespace: owner.service.namespace().to_owned(),
        name: owner.service.name().to_owned(),
        port: owner.port.map(|(port, _)| port),
        protocol: owner.port.map(|(_, protocol)| protocol.word().to_owned()),
    }
}

/// Problems of capture. A fault of the node's that several workloads have is reported once.
fn mesh_problems(known: &Known) -> impl Iterator<Item = api::Problem> {
    let problem = |gravity, text: String| api::Problem {
        gravity,
        place: "mesh".to_owned(),
        text,
    };
    let mut of_node: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let mut of_workloads = Vec::new();
    for workload in known.captured.iter() {
        let name = workload.full_name();
        match &workload.problem {
            None => {}
            Some(text) if workload.problem_of_node => of_node.entry(text).or_default().push(name),
            Some(text) => of_workloads.push(format!("{name}: {text}")),
        }
    }
    let of_node = of_node.into_iter().map(|(text, mut names)| {
        let more = names.len().saturating_sub(NAMED);
        names.truncate(NAMED);
        let more = match more {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        format!("{}{more}: {text}", names.join(", "))
    });
    let errors = known.mesh_failure.iter().cloned().chain(of_node);
    let warnings = known.mesh_shortage.iter().chain(&known.mesh_left_out);
    let warnings = warnings.cloned().chain(of_workloads);
    let errors: Vec<_> = errors
        .map(|text| problem(api::Gravity::Node, text))
        .collect();
    let warnings = warnings.map(move |text| problem(api::Gravity::Warning, text));
    errors.into_iter().chain(warnings)
}

fn without_rules(workload: &api::MeshWorkload) -> api::MeshWorkload {
    api::MeshWorkload {
        rules: Vec::new(),
        ..workload.clone()
    }
}

/// How many endpoints the ports of all services have together.
pub fn endpoints(snapshot: &Snapshot) -> u64 {
    let ports = snapshot
        .services
        .values()
        .flat_map(|service| &service.ports);
    ports.map(|port| port.endpoints.len() as u64).sum()
}
