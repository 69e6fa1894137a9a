//! What the agent knows, for its endpoints to show: written by the sync, read by everyone.

use std::{
    collections::{BTreeMap, HashSet},
    ops::Bound,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use dataplane_common::{capture::TrafficKey, tables::PoolStats};
use prometheus_client::metrics::{counter::Counter, histogram::Histogram};
use tokio::sync::Notify;

use super::{
    api,
    beats::Beats,
    clock::now,
    counters::{Counters, PortKey},
    direct::{Direct, by_address},
    flows::FlowFigures,
    lock::lock,
    pulse::Pulse,
    view,
};
use crate::{
    kernel,
    model::{Leaving, Problem, ServiceName, Snapshot, WorkloadName},
    plan::{Plan, Planner, Write, enrol::Enrolment},
    proxy::Observer,
    relay::Party,
    source::Health,
};

/// How many workloads are named that have one problem of the node's.
const NAMED: usize = 8;
/// Pools looked at while the planner is locked: it must not wait for long.
const POOLS_AT_ONCE: u32 = 4096;

/// What the agent knows.
#[derive(Debug)]
pub struct State {
    /// Where the kernel's side is.
    pub paths: kernel::Paths,
    /// How far the tables may grow.
    pub limits: kernel::Limits,
    /// What the kernel holds, and whose it is. The sync holds this lock while it plans.
    pub planner: Mutex<Planner>,
    /// How long syncs take, in seconds.
    pub sync_duration: Histogram,
    /// Syncs that did not work.
    pub sync_errors: Counter,
    /// Whether what is to be written is written.
    pub pulse: Pulse,
    /// Whether the threads that write it go on.
    pub beats: Beats,
    /// Whoever shows what is served may look again.
    pub synced_again: Notify,
    /// How long it takes from the arrival of a change to the tables, in seconds.
    pub change_duration: Histogram,
    /// What became of flows and sockets.
    pub flows: FlowFigures,
    /// How reading the source goes.
    pub source: Health,
    learnt: Learnt,
    /// Whether there was something in the tables at the start.
    inherited: bool,
    /// The agent's own proxy, if there is one.
    pub proxy: OnceLock<Observer>,
    direct: Mutex<Direct>,
    ready: AtomicBool,
    started: u64,
    known: Mutex<Known>,
    counters: Mutex<Counters>,
    /// Pools that are being given to another service: until that is written they hold what they
    /// counted for the one before. Sorted; changed only while the planner is locked.
    given: Mutex<Vec<u32>>,
    /// Held while tables grow, and while they are opened for counting.
    growing: Mutex<()>,
}

/// What the agent goes by, and where it was learnt from.
#[derive(Debug, Default)]
pub struct Learnt {
    /// Why it is not what the configuration says now; none: it is.
    pub outdated: Option<String>,
    /// Who counts as a pod.
    pub pod_networks: Vec<api::Learnt>,
    /// The cgroup whose processes are served.
    pub cgroup: api::Learnt,
}

#[derive(Debug)]
struct Known {
    snapshot: Snapshot,
    /// One more than the highest pool that the plan uses.
    pools: u32,
    last_sync: Option<api::Sync>,
    syncs: u64,
    sync_error: Option<api::Failure>,
    /// Ports for load balancers that could not be opened.
    unasked: Vec<Problem>,
    /// What is wrong with the packet path's programs and interfaces.
    network: Vec<api::Problem>,
    /// Why sysctls of the kernel's own conntrack are not as the operator wants them.
    sysctls: Vec<api::Problem>,
    /// Why capture is not in line with the source.
    mesh_failure: Option<String>,
    /// Why the proxy takes fewer connections than it was asked to.
    mesh_shortage: Option<String>,
    captured: Arc<[api::MeshWorkload]>,
    /// Where pods' sockets are.
    pods: Option<api::PodCgroups>,
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

impl State {
    /// Before the first sync.
    pub fn new(
        paths: kernel::Paths,
        limits: kernel::Limits,
        planner: Planner,
        snapshot: Snapshot,
        source: Health,
        learnt: Learnt,
    ) -> Self {
        // From what one endpoint costs among few services to a full load of very many.
        let buckets = [
            0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
        ];
        let inherited = !planner.frontends().is_empty();
        Self {
            paths,
            limits,
            planner: Mutex::new(planner),
            sync_duration: Histogram::new(buckets),
            sync_errors: Counter::default(),
            pulse: Pulse::default(),
            beats: Beats::default(),
            synced_again: Notify::new(),
            change_duration: Histogram::new(buckets),
            flows: FlowFigures::default(),
            source,
            learnt,
            inherited,
            proxy: OnceLock::new(),
            direct: Mutex::default(),
            ready: AtomicBool::new(false),
            started: now(),
            known: Mutex::new(Known {
                snapshot,
                pools: 0,
                last_sync: None,
                syncs: 0,
                sync_error: None,
                unasked: Vec::new(),
                network: Vec::new(),
                sysctls: Vec::new(),
                mesh_failure: None,
                mesh_shortage: None,
                captured: Arc::default(),
                pods: None,
            }),
            counters: Mutex::default(),
            given: Mutex::default(),
            growing: Mutex::default(),
        }
    }

    /// Plans for `snapshot`: what is then to be written. [`State::written`] follows.
    pub fn plan(&self, snapshot: &Snapshot) -> Plan {
        let mut planner = lock(&self.planner);
        let plan = planner.plan(snapshot);
        let fresh = plan.writes.iter().filter_map(|write| match write {
            Write::Pool {
                index, fresh: true, ..
            } => Some(*index),
            _ => None,
        });
        let mut given: Vec<u32> = fresh.collect();
        given.sort_unstable();
        *lock(&self.given) = given;
        plan
    }

    /// The plan was written, or could not be.
    pub fn written(&self) {
        *lock(&self.given) = Vec::new();
    }

    /// Makes tables larger. Nobody begins to read counters meanwhile: a copy lags behind until what
    /// was counted during the copying is added to it.
    pub fn grow<T>(&self, work: impl FnOnce() -> T) -> T {
        let _growing = lock(&self.growing);
        work()
    }

    /// Why whoever waits for this agent is to wait on; none: it is ready. By its own state and the node's
    /// only, whatever the source says.
    pub fn not_ready_because(&self) -> Option<String> {
        if !self.is_in_line() {
            return Some("the kernel's tables were not written yet, or the agent ends".to_owned());
        }
        let known = lock(&self.known);
        mesh_problems(&known)
            .find(|problem| problem.gravity == api::Gravity::Node)
            .map(|problem| format!("{}: {}", problem.place, problem.text))
    }

    /// Whether the tables were ever brought in line with the source, and the agent is not ending.
    fn is_in_line(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// The agent ends: whoever balances load over nodes may look elsewhere.
    pub fn not_ready(&self) {
        self.ready.store(false, Ordering::Release);
    }

    /// The tables hold what `snapshot` says.
    pub fn synced(
        &self,
        snapshot: &Snapshot,
        pools: u32,
        writes: usize,
        plan: Duration,
        write: Duration,
    ) {
        self.sync_duration.observe((plan + write).as_secs_f64());
        let mut known = lock(&self.known);
        known.snapshot = snapshot.clone();
        known.pools = pools;
        known.syncs += 1;
        known.sync_error = None;
        known.last_sync = Some(api::Sync {
            at: now(),
            plan_us: micros(plan),
            write_us: micros(write),
            writes: writes as u64,
        });
        self.ready.store(true, Ordering::Release);
        self.synced_again.notify_one();
    }

    /// Ports at which load balancers ask and get no answer.
    pub fn load_balancers_cannot_ask(&self, problems: Vec<Problem>) {
        lock(&self.known).unasked = problems;
    }

    /// A sync did not work.
    pub fn sync_failed(&self, text: String) {
        self.sync_errors.inc();
        lock(&self.known).sync_error = Some(api::Failure { at: now(), text });
    }

    /// Where the sockets of this node's pods are.
    pub fn pods_seen(&self, pods: api::PodCgroups) {
        lock(&self.known).pods = Some(pods);
    }

    /// The same, as it was last.
    pub fn pods(&self) -> Option<api::PodCgroups> {
        lock(&self.known).pods.clone()
    }

    /// Problems of the packet path now, each with its severity.
    pub fn network_problems(&self, problems: &[(api::Gravity, String)]) {
        let problem = |(gravity, text): &(api::Gravity, String)| api::Problem {
            gravity: *gravity,
            place: "packet path".to_owned(),
            text: text.clone(),
        };
        lock(&self.known).network = problems.iter().map(problem).collect();
    }

    /// Why sysctls of the kernel's own conntrack cannot be set now.
    pub fn sysctls_unset(&self, why: &[String]) {
        let problem = |text: &String| api::Problem {
            gravity: api::Gravity::Node,
            place: "kernel.conntrack".to_owned(),
            text: text.clone(),
        };
        lock(&self.known).sysctls = why.iter().map(problem).collect();
    }

    /// Whose connections are captured now. `trouble`: why it may not be so of all of them. `shortage`: why
    /// the proxy takes fewer connections than it was asked to. Answers what the kernel need not count any
    /// more.
    pub fn captured(
        &self,
        workloads: &[Enrolment],
        trouble: Option<String>,
        shortage: Option<String>,
    ) -> Vec<TrafficKey> {
        let mut direct = lock(&self.direct);
        for enrolment in workloads {
            direct.name(enrolment.number, &enrolment.workload);
        }
        drop(direct);
        let names = workloads.iter().map(|e| e.workload.name.clone());
        let names: HashSet<WorkloadName> = names.collect();
        let mut known = lock(&self.known);
        known.mesh_failure = trouble;
        known.mesh_shortage = shortage;
        known.captured = workloads.iter().map(view::mesh_workload).collect();
        let snapshot = known.snapshot.clone();
        drop(known);
        // Not only when somebody asks: pools may be other services' by then.
        let mut direct = self.direct();
        let captured: Vec<_> = direct.workloads().map(Party::of).collect();
        direct.forget(
            |name| names.contains(name) || snapshot.workloads.contains_key(name),
            || {
                let all = snapshot.workloads.values().map(Party::of);
                all.chain(captured).collect()
            },
            Instant::now(),
        )
    }

    /// What connections have come to that went direct.
    pub fn direct(&self) -> MutexGuard<'_, Direct> {
        let mut direct = lock(&self.direct);
        if direct.is_idle() {
            return direct;
        }
        let tables = kernel::CaptureTables::open(&self.paths.bpffs);
        // Without it nothing is counted, and what was counted stays.
        let Ok(traffic) = tables.and_then(|tables| tables.traffic()) else {
            return direct;
        };
        let snapshot = self.snapshot();
        let all = direct.workloads().chain(snapshot.workloads.values());
        let by_address = by_address(all, &snapshot.node);
        let planner = lock(&self.planner);
        direct.update(
            traffic,
            |pool| owner(&planner, pool).map(|key| key.service),
            |addr| by_address.get(&addr).cloned().flatten(),
            Instant::now(),
        );
        drop(planner);
        direct
    }

    /// Capture could not be brought in line with the source.
    pub fn capture_failed(&self, text: String) {
        lock(&self.known).mesh_failure = Some(text);
    }

    /// For `GET /mesh`.
    pub fn mesh(&self) -> api::Page<api::MeshWorkload> {
        let workloads = Arc::clone(&lock(&self.known).captured);
        api::Page {
            items: workloads.to_vec(),
            next: None,
        }
    }

    /// What is served.
    pub fn snapshot(&self) -> Snapshot {
        lock(&self.known).snapshot.clone()
    }

    /// Why load balancers are told to send this node nothing new.
    pub fn leaving(&self) -> Option<Leaving> {
        lock(&self.known).snapshot.node.leaving
    }

    /// When the last sync that worked ended.
    pub fn last_sync(&self) -> Option<u64> {
        lock(&self.known).last_sync.as_ref().map(|sync| sync.at)
    }

    /// When the agent started.
    pub fn started(&self) -> u64 {
        self.started
    }

    /// How many problems there are with the source, with ports for load balancers, with the packet
    /// path, with sysctls and with capture.
    pub fn problems(&self) -> usize {
        let known = lock(&self.known);
        known.snapshot.problems.len()
            + usize::from(self.learnt.outdated.is_some())
            + known.unasked.len()
            + known.network.len()
            + known.sysctls.len()
            + mesh_problems(&known).count()
    }

    /// How many services claim a frontend that another service serves.
    pub fn conflicts(&self) -> usize {
        lock(&self.planner).conflicts().len()
    }

    /// For `GET /status`.
    pub fn status(&self) -> api::AgentStatus {
        let planner = lock(&self.planner);
        let conflicts = planner.conflicts().iter().map(view::conflict).collect();
        let mut problems: Vec<_> = planner
            .problems()
            .map(|(_, problem)| view::problem(problem, || false))
            .collect();
        drop(planner);
        let known = lock(&self.known);
        let place_matters = || known.snapshot.depends_on_place().is_some();
        let of_source = known.snapshot.problems.iter();
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
        problems.extend(known.network.iter().cloned());
        problems.extend(known.sysctls.iter().cloned());
        problems.extend(mesh_problems(&known));
        let node = &known.snapshot.node;
        api::AgentStatus {
            version: api::Version::own(),
            started: self.started,
            ready: self.is_in_line(),
            node: node.name.to_string(),
            node_addresses: node.addresses.iter().map(ToString::to_string).collect(),
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
            leaving: node.leaving.map(|why| why.text().to_owned()),
            late_seconds: self.pulse.late(Instant::now()).map(|late| late.as_secs()),
            inherited: self.inherited,
            source: view::source(&self.source),
            services: known.snapshot.services.len() as u64,
            endpoints: endpoints(&known.snapshot),
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
                ports: walk.census.ports.iter().map(api::Ports::from).collect(),
            }),
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
        let snapshot = self.snapshot();
        let conflicts = lock(&self.planner).conflicts();
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
                .map(|service| view::service(service, &counters, &conflicts))
                .collect(),
            next,
        }
    }

    /// Whose the pools after `after` are, at most `limit`.
    pub fn pools(&self, after: u32, limit: u32) -> api::Page<api::Pool> {
        let end = lock(&self.known).pools;
        let stop = after.saturating_add(limit).saturating_add(1).min(end);
        let items = (after + 1..stop)
            .filter_map(|pool| self.pool(pool))
            .collect();
        api::Page {
            items,
            next: (stop < end).then(|| (stop - 1).to_string()),
        }
    }

    /// Whose a pool is.
    pub fn pool(&self, pool: u32) -> Option<api::Pool> {
        let key = owner(&lock(&self.planner), pool)?;
        Some(api::Pool {
            pool,
            namespace: key.service.namespace().to_owned(),
            name: key.service.name().to_owned(),
            port: key.port.map(|(port, _)| port),
            protocol: key.port.map(|(_, protocol)| protocol.word().to_owned()),
        })
    }

    /// The counters of every service's port, as they are now.
    pub fn counters(&self) -> MutexGuard<'_, Counters> {
        self.count();
        lock(&self.counters)
    }

    /// Reads the kernel's counters.
    fn count(&self) {
        // One after the other, or a late one would bring older figures.
        let mut counters = lock(&self.counters);
        // Opened each time: a table that has grown is another one. Without it nothing is counted,
        // and what was counted stays.
        let growing = lock(&self.growing);
        let tables = kernel::Tables::open(&self.paths.bpffs);
        drop(growing);
        let Ok(tables) = tables else {
            return;
        };
        let end = lock(&self.known).pools;
        let runs = (1..end).step_by(POOLS_AT_ONCE as usize);
        counters.update(runs.flat_map(|from| {
            let planner = lock(&self.planner);
            let given = lock(&self.given);
            let stats = |pool| match given.binary_search(&pool) {
                Ok(_) => PoolStats::default(),
                Err(_) => tables.pool_stats(pool),
            };
            let run = from..from.saturating_add(POOLS_AT_ONCE).min(end);
            run.filter_map(|pool| Some((pool, owner(&planner, pool)?, stats(pool))))
                .collect::<Vec<_>>()
        }));
    }
}

/// Problems of capture. A fault of the node's that several workloads have is said once.
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
    let warnings = known.mesh_shortage.iter().cloned().chain(of_workloads);
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

/// Whose a pool is.
fn owner(planner: &Planner, pool: u32) -> Option<PortKey> {
    let owner = planner.pool_owner(pool)?;
    Some(PortKey {
        service: owner.service.clone(),
        port: owner.port,
    })
}

/// How many endpoints the ports of all services have together.
pub fn endpoints(snapshot: &Snapshot) -> u64 {
    let ports = snapshot
        .services
        .values()
        .flat_map(|service| &service.ports);
    ports.map(|port| port.endpoints.len() as u64).sum()
}
