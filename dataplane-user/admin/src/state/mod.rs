//! The agent's state, which its endpoints show: written by the sync, read by every endpoint.

mod count;
mod show;

use std::{
    collections::{BTreeMap, HashSet},
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use dataplane_common::capture::TrafficKey;
use model::{Leaving, Problem, WorkloadName, authorization::PolicyName};
use plan::{Served, enrol::Enrolment};
use prometheus_client::metrics::{counter::Counter, histogram::Histogram};
use proxy::Observer;
use source::Health;
use tokio::sync::watch;

pub use self::show::endpoints;
use super::{
    api, beats::Beats, certificates::Certificates, clock::now, counters::Counters, direct::Direct,
    flows::FlowFigures, lock::lock, pulse::Pulse, view,
};

/// The agent's state.
#[derive(Debug)]
pub struct State {
    /// The paths of the kernel's pins.
    pub paths: kernel::Paths,
    /// How far the tables may grow.
    pub limits: kernel::tables::Limits,
    /// The objects that the agent serves, and those that it leaves out.
    served: watch::Receiver<Served>,
    /// How long syncs take, in seconds.
    pub sync_duration: Histogram,
    /// Syncs that failed.
    pub sync_errors: Counter,
    /// Whether all changes are written.
    pub pulse: Pulse,
    /// Whether the threads that write make progress.
    pub beats: Beats,
    /// How long it takes from the arrival of a change to the tables, in seconds.
    pub change_duration: Histogram,
    /// Counters of flows and sockets.
    pub flows: FlowFigures,
    /// The health of the source.
    pub source: Health,
    learnt: Learnt,
    /// Whether the tables had entries at the start.
    inherited: bool,
    /// The agent's own proxy, if there is one.
    pub proxy: OnceLock<Observer>,
    /// The agent's DNS server, if there is one.
    pub dns: OnceLock<dns::Observer>,
    /// The certificates of workloads, if connections are encrypted.
    pub certificates: OnceLock<Certificates>,
    direct: Mutex<Direct>,
    ready: AtomicBool,
    started: u64,
    known: Mutex<Known>,
    counters: Mutex<Counters>,
    /// Held while tables grow, and while they are opened for counting.
    growing: Mutex<()>,
}

/// The settings and facts that the agent uses, with their sources.
#[derive(Debug, Default)]
pub struct Learnt {
    /// Why the settings differ from the configuration; `None`: they do not.
    pub outdated: Option<String>,
    /// The networks whose clients count as pods.
    pub pod_networks: Vec<api::Learnt>,
    /// The cgroup whose processes are served.
    pub cgroup: api::Learnt,
    /// Whether the configuration denies egress, and no program looks for source routes.
    pub source_routes_pass: bool,
}

#[derive(Debug)]
struct Known {
    last_sync: Option<api::Sync>,
    syncs: u64,
    sync_error: Option<api::Failure>,
    /// Ports for load balancers that could not be opened.
    unasked: Vec<Problem>,
    /// Which namespaces have more clients with session affinity than their share.
    crowded: Vec<api::Problem>,
    /// Problems of the packet path's programs and interfaces.
    network: Vec<api::Problem>,
    /// Why capture is not in line with the source.
    mesh_failure: Option<String>,
    /// Why the proxy takes fewer connections than configured.
    mesh_shortage: Option<String>,
    /// Entries that the tables of capture have no room for.
    mesh_left_out: Vec<String>,
    captured: Arc<[api::MeshWorkload]>,
    /// Where pods' sockets are.
    pods: Option<api::PodCgroups>,
    /// Why packets of services go through the stack.
    stack_because: Option<String>,
    led_elsewhere: Option<api::Problem>,
    /// Why the CNI plug-in is not in the container runtime's configuration.
    cni: Option<api::Problem>,
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

impl State {
    /// The state before the first sync. `inherited`: whether the tables have entries.
    pub fn new(
        paths: kernel::Paths,
        limits: kernel::tables::Limits,
        served: watch::Receiver<Served>,
        inherited: bool,
        source: Health,
        learnt: Learnt,
    ) -> Self {
        // From the cost of one endpoint among few services to a full load of very many.
        let buckets = [
            0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
        ];
        Self {
            paths,
            limits,
            served,
            sync_duration: Histogram::new(buckets),
            sync_errors: Counter::default(),
            pulse: Pulse::default(),
            beats: Beats::default(),
            change_duration: Histogram::new(buckets),
            flows: FlowFigures::default(),
            source,
            learnt,
            inherited,
            proxy: OnceLock::new(),
            dns: OnceLock::new(),
            certificates: OnceLock::new(),
            direct: Mutex::default(),
            ready: AtomicBool::new(false),
            started: now(),
            known: Mutex::new(Known {
                last_sync: None,
                syncs: 0,
                sync_error: None,
                unasked: Vec::new(),
                crowded: Vec::new(),
                network: Vec::new(),
                mesh_failure: None,
                mesh_shortage: None,
                mesh_left_out: Vec::new(),
                captured: Arc::default(),
                pods: None,
                stack_because: None,
                led_elsewhere: None,
                cni: None,
            }),
            counters: Mutex::default(),
            growing: Mutex::default(),
        }
    }

    /// Returns the thread that hangs at `now`, and for how long.
    pub fn stuck(&self, now: Instant) -> Option<(String, Duration)> {
        let beats = self.beats.stuck(now);
        let beats = beats.map(|(name, busy)| (name.to_owned(), busy));
        beats.or_else(|| self.dns.get()?.stuck(now))
    }

    /// Makes tables larger. No reader of counters begins meanwhile: a copy lags behind until the counts during the
    /// copying are added to it.
    pub fn grow<T>(&self, work: impl FnOnce() -> T) -> T {
        let _growing = lock(&self.growing);
        work()
    }

    /// Whether the tables were ever in line with the source, and the agent is not ending.
    fn is_in_line(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// The agent ends: load balancers over nodes may choose other nodes.
    pub fn not_ready(&self) {
        self.ready.store(false, Ordering::Release);
    }

    /// Records that the tables are in line with the source.
    pub fn synced(&self, writes: usize, plan: Duration, write: Duration) {
        self.sync_duration.observe((plan + write).as_secs_f64());
        let mut known = lock(&self.known);
        known.syncs += 1;
        known.sync_error = None;
        known.last_sync = Some(api::Sync {
            at: now(),
            plan_us: micros(plan),
            write_us: micros(write),
            writes: writes as u64,
        });
        self.ready.store(true, Ordering::Release);
    }

    /// Sets the problems of ports at which load balancers get no answer.
    pub fn load_balancers_cannot_ask(&self, problems: Vec<Problem>) {
        lock(&self.known).unasked = problems;
    }

    /// Records that clients of services with session affinity were removed, because their namespaces left too little
    /// room.
    pub fn affinity_shared(&self, removed: BTreeMap<Box<str>, u32>) {
        let crowded = removed.into_iter().map(|(namespace, clients)| api::Problem {
            gravity: api::Gravity::Warning,
            place: format!("namespace {namespace}"),
            text: format!(
                "session affinity: the services of this namespace have more clients than their share of the room; the \
                 {clients} clients that were silent for longest may reach another endpoint; start the agent with more \
                 limits.affinityClients"
            ),
        });
        lock(&self.known).crowded = crowded.collect();
    }

    /// Records a failed sync.
    pub fn sync_failed(&self, text: String) {
        self.sync_errors.inc();
        lock(&self.known).sync_error = Some(api::Failure { at: now(), text });
    }

    /// Records where the sockets of this node's pods are.
    pub fn pods_seen(&self, pods: api::PodCgroups) {
        lock(&self.known).pods = Some(pods);
    }

    /// Returns where the sockets of this node's pods are, at the last look.
    pub fn pods(&self) -> Option<api::PodCgroups> {
        lock(&self.known).pods.clone()
    }

    /// Sets why packets of services go through the stack; `None`: they do not.
    pub fn through_stack(&self, because: Option<String>) {
        lock(&self.known).stack_because = because;
    }

    /// Sets the problems of the packet path, each with its severity.
    pub fn network_problems(&self, problems: &[(api::Gravity, String)]) {
        let problem = |(gravity, text): &(api::Gravity, String)| api::Problem {
            gravity: *gravity,
            place: "packet path".to_owned(),
            text: text.clone(),
        };
        lock(&self.known).network = problems.iter().map(problem).collect();
    }

    /// Sets or clears the reason why the CNI plug-in is not in the container runtime's configuration.
    pub fn cni_problem(&self, text: Option<&str>) {
        lock(&self.known).cni = text.map(|text| api::Problem {
            gravity: api::Gravity::Node,
            place: "CNI plug-in".to_owned(),
            text: format!("{text}; pods that start now may connect before they are captured"),
        });
    }

    /// Whether the CNI plug-in has to be in the container runtime's configuration, and is not.
    pub fn has_cni_problem(&self) -> bool {
        lock(&self.known).cni.is_some()
    }

    /// Sets or clears the problem of the routes to the node's own pods. Returns whether the problem changed.
    pub fn pods_led_elsewhere(&self, text: Option<String>) -> bool {
        let led = text.map(|text| api::Problem {
            gravity: api::Gravity::Warning,
            place: "packet path".to_owned(),
            text,
        });
        let mut known = lock(&self.known);
        let is_news = known.led_elsewhere != led;
        known.led_elsewhere = led;
        is_news
    }

    /// Records the workloads whose connections are captured. `trouble`: why some of it may be wrong. `shortage`: why
    /// the proxy takes fewer connections than configured. `left_out`: entries that the tables have no room for. `refusers`:
    /// Istio's policies that refuse connections in the kernel, with their numbers. Returns the entries that the kernel no longer
    /// needs to count.
    pub fn captured(
        &self,
        workloads: &[Enrolment],
        trouble: Option<String>,
        shortage: Option<String>,
        left_out: Vec<String>,
        refusers: Vec<(u32, PolicyName)>,
    ) -> Vec<TrafficKey> {
        let mut direct = lock(&self.direct);
        direct.name_refusers(refusers);
        for enrolment in workloads {
            direct.name(enrolment.number, &enrolment.workload);
        }
        drop(direct);
        let names = workloads.iter().map(|e| e.workload.name.clone());
        let names: HashSet<WorkloadName> = names.collect();
        let mut known = lock(&self.known);
        known.mesh_failure = trouble;
        known.mesh_shortage = shortage;
        known.mesh_left_out = left_out;
        known.captured = workloads.iter().map(view::mesh_workload).collect();
        drop(known);
        let snapshot = self.served().snapshot;
        // Not only on request, because pools may belong to other services by then.
        let mut direct = self.direct();
        direct.forget(
            |name| names.contains(name) || snapshot.workloads.contains_key(name),
            Instant::now(),
        )
    }

    /// Records that capture could not be brought in line with the source.
    pub fn capture_failed(&self, text: String) {
        lock(&self.known).mesh_failure = Some(text);
    }

    /// Returns what the agent serves.
    pub fn served(&self) -> Served {
        self.served.borrow().clone()
    }

    /// Returns a receiver that notices when the agent serves something else.
    pub fn changes(&self) -> watch::Receiver<Served> {
        self.served.clone()
    }

    /// Why load balancers are asked to send this node no new connections.
    pub fn leaving(&self) -> Option<Leaving> {
        self.served.borrow().snapshot.node.leaving
    }

    /// When the last sync that succeeded ended.
    pub fn last_sync(&self) -> Option<u64> {
        lock(&self.known).last_sync.as_ref().map(|sync| sync.at)
    }

    /// When the agent started.
    pub fn started(&self) -> u64 {
        self.started
    }
}
