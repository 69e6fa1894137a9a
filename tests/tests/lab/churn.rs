//! Tables that change all the time, and that grow, while clients connect all the time.
//!
//! The tables are written from here, by the agent's own planner and kernel room: through files it
//! would be a matter of dozens of changes per second, not of thousands.

use std::{
    collections::hash_map::RandomState,
    hash::BuildHasher as _,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use dataplane::{
    kernel::{Kernel, Limits, Paths},
    model::{
        Endpoint, Protocol, Service, ServiceName, ServicePort, ServiceType, Snapshot, TrafficPolicy,
    },
    plan::Planner,
};
use dataplane_tests::{Lab, Process, report::LoadReport};
use nix::time::ClockId;

use crate::cluster::{Cluster, TCP, serve};

scenarios! {
    Dataplane:
    flipping_endpoints_fails_no_connection,
    growing_tables_fails_no_connection,
}

const VIP: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
const TO: &str = "10.96.0.10:80";

/// An agent's inner part, in this process.
struct Writer {
    planner: Planner,
    kernel: Kernel,
    graces: u32,
}

impl Writer {
    fn new(lab: &Lab) -> Result<Self> {
        let paths = Paths {
            bpffs: lab.bpffs()?.join("node2"),
            cgroup: lab.node_cgroup("node2"),
        };
        let kernel = Kernel::open(&paths, Limits::default())?;
        Ok(Self {
            planner: Planner::new(),
            kernel,
            graces: 0,
        })
    }

    /// As the agent does it.
    fn write(&mut self, snapshot: &Snapshot) -> Result<()> {
        let plan = self.planner.plan(snapshot);
        self.kernel.reserve(&plan.demand)?;
        self.kernel.apply(&plan.writes)?;
        if self.planner.wants_grace() {
            self.kernel.grace()?;
            self.planner.grace_passed();
            self.graces += 1;
        }
        Ok(())
    }
}

fn service(
    name: &str,
    vip: Ipv4Addr,
    endpoints: impl IntoIterator<Item = SocketAddr>,
) -> (ServiceName, Arc<Service>) {
    let name = ServiceName::new("default", name);
    let endpoints = endpoints
        .into_iter()
        .map(|at| Endpoint {
            addr: at.ip(),
            port: at.port(),
            local: false,
            ready: true,
            serving: true,
            terminating: false,
        })
        .collect();
    let port = ServicePort {
        name: "tcp".into(),
        port: 80,
        protocol: Protocol::Tcp,
        node_port: None,
        endpoints,
    };
    let service = Service {
        name: name.clone(),
        kind: ServiceType::ClusterIp,
        created: None,
        cluster_ips: [IpAddr::from(vip)].into_iter().collect(),
        external_ips: [].into_iter().collect(),
        load_balancer_ips: [].into_iter().collect(),
        source_ranges: [].into_iter().collect(),
        affinity: None,
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Cluster,
        health_check_node_port: None,
        ports: [port].into_iter().collect(),
    };
    (name, Arc::new(service))
}

/// The machine's monotonic clock in nanoseconds, as `probe` reads it.
fn now_ns() -> Result<u64> {
    Ok(Duration::from(ClockId::CLOCK_MONOTONIC.now()?)
        .as_nanos()
        .try_into()?)
}

/// A version of the service: which endpoints it had (a bit each), and when its writing began and
/// ended.
struct Version {
    endpoints: u16,
    begun_ns: u64,
    written_ns: u64,
}

/// How long to change endpoints.
const CHURN: Duration = Duration::from_secs(30);
/// How often, if the machine keeps up.
const PAUSE: Duration = Duration::from_micros(400);

/// The endpoints of a service are replaced thousands of times per second. No connection fails, and
/// each reaches an endpoint that the service had at some moment between the begin and the end of
/// its connect(2): the program decides within it, and decides by one version.
fn flipping_endpoints_fails_no_connection() -> Result<()> {
    let lab = Cluster::lab()?;
    // Four endpoints in each of three pods, each a process with a name of its own.
    let mut servers = Vec::new();
    let mut endpoints = Vec::new();
    for pod in ["far", "near", "near2"].map(|name| lab.pod(name)) {
        for port in 7001..=7004 {
            let at = SocketAddr::new(pod.ipv4().into(), port);
            let name = format!("{}:{port}", pod.name());
            servers.push(pod.serve_as(&name, &["--tcp", &at.to_string()])?);
            endpoints.push((name, at));
        }
    }
    let mut writer = Writer::new(&lab)?;
    let mut snapshot = Snapshot::default();
    let mut versions = Vec::new();
    let mut write = |chosen: u16, versions: &mut Vec<Version>| -> Result<()> {
        let bits = endpoints
            .iter()
            .enumerate()
            .filter(|(bit, _)| chosen & (1 << bit) != 0);
        let (name, service) = service("web", VIP, bits.map(|(_, (_, at))| *at));
        snapshot.services.insert(name, service);
        let begun_ns = now_ns()?;
        writer.write(&snapshot)?;
        versions.push(Version {
            endpoints: chosen,
            begun_ns,
            written_ns: now_ns()?,
        });
        Ok(())
    };
    let all = (1 << endpoints.len()) - 1;
    write(all, &mut versions)?;

    let load = ["--to", TO, "--threads", "2", "--pause-us", "50", "--each"];
    let load = lab.pod("sleep").load(&load)?;
    let begin = Instant::now();
    let random = RandomState::new();
    for round in 0u64.. {
        if begin.elapsed() >= CHURN {
            break;
        }
        // Any but the empty set; small sets as often as large ones.
        let bits = random.hash_one(round);
        let thinned = bits
            & if bits >> 63 == 0 {
                bits >> 16
            } else {
                u64::MAX
            };
        let chosen = u16::try_from(thinned & u64::from(all))?;
        write(if chosen == 0 { all } else { chosen }, &mut versions)?;
        std::thread::sleep(PAUSE);
    }
    let took = begin.elapsed();
    let report: LoadReport = load.wait_json()?;
    let flips = versions.len() - 1;
    println!(
        "{flips} flips in {:.1} s ({:.0} per second), {} grace periods; {} connections, {} failed",
        took.as_secs_f64(),
        f64::from(u32::try_from(flips)?) / took.as_secs_f64(),
        writer.graces,
        report.answered,
        report.errors.values().sum::<u64>(),
    );
    ensure!(
        report.errors.is_empty(),
        "connections failed: {:?}",
        report.failures
    );
    ensure!(
        flips > 1000 && report.answered > 1000,
        "too few to mean anything"
    );
    ensure!(
        report.endpoints.len() == endpoints.len(),
        "not all used: {:?}",
        report.endpoints
    );
    let mut strangers = Vec::new();
    for event in &report.each {
        let known = endpoints
            .iter()
            .position(|(name, _)| *name == event.endpoint);
        let bit = 1 << known.with_context(|| format!("a stranger answered: {event:?}"))?;
        // Version i could be seen from the begin of its writing to the end of that of i + 1.
        let first = versions.partition_point(|v| v.written_ns < event.started_at_ns);
        let possible = versions[first.saturating_sub(1)..]
            .iter()
            .take_while(|version| version.begun_ns <= event.connected_at_ns);
        let mut seen = possible.map(|version| version.endpoints);
        if !seen.any(|endpoints| endpoints & bit != 0) {
            strangers.push(event);
        }
    }
    ensure!(
        strangers.is_empty(),
        "{} of {} connections reached an endpoint that the service did not have then: {:?} ...",
        strangers.len(),
        report.answered,
        &strangers[..strangers.len().min(5)]
    );
    Ok(())
}

/// From 10 services to 100 000, in steps that each outgrow the tables.
fn growing_tables_fails_no_connection() -> Result<()> {
    let lab = Cluster::lab()?;
    let pods = ["far", "near"].map(|name| lab.pod(name));
    let _servers = pods
        .map(serve)
        .into_iter()
        .collect::<Result<Vec<Process>>>()?;
    let mut writer = Writer::new(&lab)?;
    let mut snapshot = Snapshot::default();
    let endpoints = pods.map(|pod| SocketAddr::new(pod.ipv4().into(), TCP));
    let (name, web) = service("web", VIP, endpoints);
    snapshot.services.insert(name, web);
    writer.write(&snapshot)?;
    let load = lab
        .pod("sleep")
        .load(&["--to", TO, "--threads", "2", "--pause-us", "200"])?;
    let mut grown = Vec::new();
    for size in [10u32, 100, 1_000, 10_000, 100_000] {
        for number in u32::try_from(snapshot.services.len())?..size {
            let [_, b, c, d] = number.to_be_bytes();
            let endpoints = [1, 2, 3].map(|host| {
                let address = Ipv4Addr::new(10, 128 + b, c, d);
                SocketAddr::new(address.into(), 8000 + host)
            });
            let vip = Ipv4Addr::new(11, b, c, d);
            let (name, other) = service(&format!("other-{number}"), vip, endpoints);
            snapshot.services.insert(name, other);
        }
        let begin = Instant::now();
        let plan = writer.planner.plan(&snapshot);
        for growth in writer.kernel.reserve(&plan.demand)? {
            grown.push(format!("{} {}", growth.table, growth.to));
        }
        writer.kernel.apply(&plan.writes)?;
        println!(
            "{size} services written in {:.0} ms",
            begin.elapsed().as_secs_f64() * 1000.0
        );
        // Let some connections be made with each size.
        std::thread::sleep(Duration::from_millis(100));
    }
    let report: LoadReport = load.wait_json()?;
    println!(
        "tables grown: {}; {} connections",
        grown.join(", "),
        report.answered
    );
    ensure!(grown.len() >= 3, "the tables did not grow: {grown:?}");
    ensure!(
        report.errors.is_empty(),
        "connections failed: {:?}",
        report.failures
    );
    ensure!(
        report.endpoints.len() == 2 && report.answered > 200,
        "{report:?}"
    );
    Ok(())
}
