//! Tables that change all the time, and that grow, while clients connect all the time.
//!
//! The tables are written from here, by the agent's own planner and kernel room: through files it
//! would be a matter of dozens of changes per second, not of thousands.

use std::{
    collections::hash_map::RandomState,
    hash::BuildHasher as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::RangeInclusive,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Host, Lab, Process, report::LoadReport};
use kernel::{Kernel, Paths, tables::Limits};
use model::{Endpoint, Protocol, Service, ServiceName, ServicePort, ServiceType, Snapshot};
use nix::time::ClockId;
use plan::Planner;

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
    vips: impl IntoIterator<Item = IpAddr>,
    endpoints: impl IntoIterator<Item = SocketAddr>,
) -> (ServiceName, Arc<Service>) {
    let name = ServiceName::new("default", name);
    let endpoints = endpoints
        .into_iter()
        .map(|at| Endpoint::new(at.ip(), at.port()))
        .collect();
    let port = ServicePort {
        name: "tcp".into(),
        endpoints,
        ..ServicePort::new(80, Protocol::Tcp)
    };
    let service = Service {
        cluster_ips: vips.into_iter().collect(),
        ports: [port].into_iter().collect(),
        ..Service::new(name.clone(), ServiceType::ClusterIp)
    };
    (name, Arc::new(service))
}

/// The machine's monotonic clock in nanoseconds, as `probe` reads it.
fn now_ns() -> Result<u64> {
    Ok(Duration::from(ClockId::CLOCK_MONOTONIC.now()?)
        .as_nanos()
        .try_into()?)
}

/// A version of the service: its endpoints (a bit each), and when its writing began and ended.
struct Version {
    endpoints: u16,
    begun_ns: u64,
    written_ns: u64,
}

/// How long to change endpoints.
const CHURN: Duration = Duration::from_secs(30);
/// How many changes there are at the least: 1 000 per second.
const FLIPS: u64 = CHURN.as_secs() * 1000;
/// The pause between two changes, if the machine keeps up.
const PACE: Duration = Duration::from_micros(660);

/// A service whose endpoints are replaced, and all of its versions.
struct Churned {
    name: &'static str,
    vips: [IpAddr; 2],
    /// Name and addresses of each, a process of its own.
    endpoints: Vec<(String, [SocketAddr; 2])>,
    versions: Vec<Version>,
}

impl Churned {
    /// A service with one endpoint on each of the ports of each of the pods, which are served from here on.
    fn new(
        (name, number): (&'static str, u8),
        ports: RangeInclusive<u16>,
        pods: &[&Host],
        servers: &mut Vec<Process>,
    ) -> Result<Self> {
        let mut endpoints = Vec::new();
        for pod in pods {
            for port in ports.clone() {
                let at = pod
                    .addresses()
                    .map(|address| SocketAddr::new(address, port));
                let name = format!("{}:{port}", pod.name());
                let [v4, v6] = at.map(|at| at.to_string());
                servers.push(pod.serve_as(&name, &["--tcp", &v4, "--tcp", &v6])?);
                endpoints.push((name, at));
            }
        }
        let v4 = Ipv4Addr::new(10, 96, 0, number);
        let v6 = Ipv6Addr::new(0xfd00, 0x96, 0, 0, 0, 0, 0, number.into());
        Ok(Self {
            name,
            vips: [v4.into(), v6.into()],
            endpoints,
            versions: Vec::new(),
        })
    }

    fn all(&self) -> u16 {
        (1 << self.endpoints.len()) - 1
    }

    /// Draws any set of endpoints except the empty one; small sets as often as large ones.
    fn draw(&self, random: u64) -> u16 {
        let thinned = if random >> 63 == 0 {
            random & random >> 16
        } else {
            random
        };
        let bits = u16::try_from(thinned & u64::from(self.all())).unwrap_or_default();
        if bits == 0 { self.all() } else { bits }
    }

    fn service(&self, chosen: u16) -> (ServiceName, Arc<Service>) {
        let endpoints = self.endpoints.iter().enumerate();
        let chosen = endpoints.filter(|(bit, _)| chosen & (1 << bit) != 0);
        service(self.name, self.vips, chosen.flat_map(|(_, (_, at))| *at))
    }

    /// Clients that connect all the time, over both families in turn.
    fn clients(&self, client: &Host) -> Result<Process> {
        let [v4, v6] = self.vips.map(|vip| SocketAddr::new(vip, 80).to_string());
        let to = ["--to", &v4, "--to", &v6];
        let how = ["--threads", "2", "--pause-us", "50", "--each"];
        Ok(client.load(&[to.as_slice(), how.as_slice()].concat())?)
    }

    /// Wants no failure, and every connection to have reached an endpoint that the service had meanwhile.
    fn check(&self, report: &LoadReport) -> Result<()> {
        ensure!(
            report.errors.is_empty(),
            "connections to {} failed: {:?}",
            self.name,
            report.failures
        );
        ensure!(report.answered > 1000, "too few to mean anything");
        let mut strangers = Vec::new();
        for event in &report.each {
            let known = (self.endpoints.iter()).position(|(name, _)| *name == event.endpoint);
            let bit = 1
                << known.with_context(|| {
                    format!("{} was answered by another service: {event:?}", self.name)
                })?;
            // Version i could be seen from the begin of its writing to the end of that of i + 1.
            let versions = &self.versions;
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
        ensure!(
            report.endpoints.len() == self.endpoints.len(),
            "not all used: {:?}",
            report.endpoints
        );
        Ok(())
    }
}

/// The endpoints of two services are replaced thousands of times per second. No connection fails, and each reaches an
/// endpoint that its service had at some moment between the begin and the end of its connect(2): the program decides
/// within it, and decides by one version. The services take turns with the slots, so that a mixture of two versions
/// shows as an answer of the other service.
fn flipping_endpoints_fails_no_connection() -> Result<()> {
    let lab = Cluster::lab()?;
    let pods = ["far", "near", "near2"].map(|name| lab.pod(name));
    let mut servers = Vec::new();
    let mut services = [
        Churned::new(("one", 10), 7001..=7004, &pods, &mut servers)?,
        Churned::new(("two", 11), 7005..=7008, &pods, &mut servers)?,
    ];
    let mut writer = Writer::new(&lab)?;
    let mut snapshot = Snapshot::default();
    let mut write = |chosen: [u16; 2], services: &mut [Churned; 2]| -> Result<()> {
        for (churned, endpoints) in services.iter().zip(chosen) {
            let (name, service) = churned.service(endpoints);
            snapshot.services.insert(name, service);
        }
        let begun_ns = now_ns()?;
        writer.write(&snapshot)?;
        let written_ns = now_ns()?;
        for (churned, endpoints) in services.iter_mut().zip(chosen) {
            churned.versions.push(Version {
                endpoints,
                begun_ns,
                written_ns,
            });
        }
        Ok(())
    };
    write([u16::MAX; 2], &mut services)?;

    let client = lab.pod("sleep");
    let loads = [services[0].clients(client)?, services[1].clients(client)?];
    let begin = Instant::now();
    let random = RandomState::new();
    for round in 0u64.. {
        // At least as many as the time asks for: a slow machine takes longer, and flips no less.
        if begin.elapsed() >= CHURN && round >= FLIPS {
            break;
        }
        let chosen = [0, 1].map(|n| services[n].draw(random.hash_one((round, n))));
        write(chosen, &mut services)?;
        let due = PACE * u32::try_from(round)?;
        std::thread::sleep(due.saturating_sub(begin.elapsed()));
    }
    let took = begin.elapsed().as_secs_f64();
    let graces = writer.graces;
    for (churned, load) in services.iter().zip(loads) {
        let report: LoadReport = load.wait_json()?;
        let flips = churned.versions.len() - 1;
        println!(
            "{}: {flips} flips in {took:.1} s ({:.0} per second), {graces} grace periods; {} \
             connections, {} failed",
            churned.name,
            f64::from(u32::try_from(flips)?) / took,
            report.answered,
            report.errors.values().sum::<u64>(),
        );
        churned.check(&report)?;
        println!(
            "{}: none to an endpoint that it did not have at that moment",
            churned.name
        );
    }
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
    let (name, web) = service("web", [VIP.into()], endpoints);
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
            let (name, other) = service(&format!("other-{number}"), [vip.into()], endpoints);
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
