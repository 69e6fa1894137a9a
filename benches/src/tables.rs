//! Case `tables` of `bench socket`: the time to load and to change the tables, and the agent's
//! memory.

use std::{
    fs,
    net::IpAddr,
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use dataplane_tests::Lab;
use kernel::{Kernel, Paths, tables::Limits};
use model::{ServiceName, Snapshot};
use plan::Planner;

use crate::{
    fleet::Fleet,
    manifests,
    rows::{Row, Target, find, thousands},
    say,
    socket::MOST,
    stats::median,
};

/// The number of services on a small node.
const FEW: u32 = 10;
/// Number of loads into empty tables.
const LOADS: usize = 5;
/// Number of agents that are started.
const AGENTS: usize = 3;
/// Number of changes of one endpoint.
const CHANGES: usize = 200;

/// Measures the tables.
///
/// # Errors
///
/// Fails if the kernel refuses, or if the agent does not run.
pub fn run(quick: bool) -> anyhow::Result<Vec<Row>> {
    let lab = Lab::builder().node("tables").node("agent").build()?;
    let fleet = |services| Fleet {
        services,
        target: ["10.244.1.20", "10.244.1.21", "10.244.1.22"]
            .map(|a| IpAddr::from(a.parse::<std::net::Ipv4Addr>().expect("an address")))
            .into(),
        remote: vec![],
        node: vec![],
    };
    let mut rows = vec![];
    let mut row = |services, metric, unit, mut values: Vec<f64>| {
        rows.push(Row {
            bench: "socket",
            path: "dataplane",
            case: "tables",
            services,
            metric,
            unit,
            value: median(&mut values),
            baseline: None,
            ratio: None,
            failed: 0,
            rounds: vec![values],
        });
    };

    let services = fleet(MOST);
    say!("tables: loading {} services × 3 endpoints", thousands(MOST));
    let snapshot = services.snapshot();
    let (mut plans, mut loads) = (vec![], vec![]);
    for _ in 0..if quick { 2 } else { LOADS } {
        let (_, _, plan, load) = load(&lab, &snapshot)?;
        plans.push(ms(plan));
        loads.push(load.as_secs_f64());
    }
    row(MOST, "load_s", "s", loads);
    row(MOST, "full_plan_ms", "ms", plans);

    say!("tables: changing one endpoint among them");
    let (mut plans, mut flips, mut changes) = (vec![], vec![], vec![]);
    let (mut kernel, mut planner, ..) = load(&lab, &snapshot)?;
    let mut last = snapshot;
    for turn in 0..CHANGES {
        let next = one_changed(&last, turn);
        let start = Instant::now();
        let plan = planner.plan(&next);
        ensure!(!plan.is_empty(), "a changed endpoint changes nothing");
        let plan_time = start.elapsed();
        kernel.reserve(&plan.demand)?;
        kernel.apply(&plan.writes)?;
        let done = start.elapsed();
        plans.push(ms(plan_time));
        flips.push(ms(done.saturating_sub(plan_time)));
        changes.push(ms(done));
        // As the agent does between changes. This time is not measured.
        if planner.wants_grace() {
            kernel.grace()?;
            planner.grace_passed();
        }
        last = next;
    }
    drop(kernel);
    row(MOST, "plan_ms", "ms", plans);
    row(MOST, "flip_ms", "ms", flips);
    row(MOST, "change_ms", "ms", changes);

    let sizes: &[u32] = if quick { &[FEW] } else { &[FEW, MOST] };
    for services in sizes.iter().copied() {
        say!(
            "tables: starting an agent with manifests of {} services",
            thousands(services)
        );
        let turns = if quick { 1 } else { AGENTS };
        let rss = (0..turns).map(|_| agent_rss(&lab, &fleet(services)));
        row(services, "rss_mib", "MiB", rss.collect::<Result<_, _>>()?);
    }
    Ok(rows)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Loads `snapshot` into empty tables. Returns two times: of the plan, and of the kernel's writes
/// including the growth of the tables before them.
fn load(lab: &Lab, snapshot: &Snapshot) -> anyhow::Result<(Kernel, Planner, Duration, Duration)> {
    let paths = Paths {
        bpffs: lab.bpffs()?.join("tables"),
        cgroup: lab.node_cgroup("tables"),
    };
    kernel::cleanup::cleanup(&paths.bpffs, false)?;
    let mut kernel = Kernel::open(&paths, Limits::default())?;
    let mut planner = Planner::new();
    let start = Instant::now();
    let plan = planner.plan(snapshot);
    let plan_time = start.elapsed();
    kernel.reserve(&plan.demand)?;
    kernel.apply(&plan.writes)?;
    Ok((
        kernel,
        planner,
        plan_time,
        start.elapsed().saturating_sub(plan_time),
    ))
}

/// Returns `snapshot` with another address for one endpoint of one service.
fn one_changed(snapshot: &Snapshot, turn: usize) -> Snapshot {
    let mut next = snapshot.clone();
    // 7 919 is prime to the number of services, so the changes are spread over all of them.
    let index = u32::try_from(turn).unwrap_or(0) * 7_919 % MOST;
    let name = ServiceName::new("bench", &format!("service-{index:06}"));
    if let Some(service) = next.services.get_mut(&name) {
        let service = Arc::make_mut(service);
        for port in &mut service.ports {
            if let (Some(endpoint), Ok(low)) = (port.endpoints.first_mut(), u8::try_from(turn)) {
                endpoint.addr = IpAddr::from([10, 244, 15, low]);
            }
            port.endpoints.sort();
        }
    }
    next
}

/// Returns the memory of an agent that has read manifests of these services and serves them.
fn agent_rss(lab: &Lab, fleet: &Fleet) -> anyhow::Result<f64> {
    let directory = tempfile::tempdir()?;
    manifests::write(&fleet.snapshot(), "agent", directory.path())?;
    let agent = lab.agent("agent").manifests(directory.path()).start()?;
    // By then the agent has freed the memory that it needed only to read and plan.
    thread::sleep(Duration::from_secs(2));
    rss_mib(&Path::new("/proc").join(agent.id().to_string()))
}

fn rss_mib(process: &Path) -> anyhow::Result<f64> {
    let status = fs::read_to_string(process.join("status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    let kib: f64 = kib
        .context("no VmRSS in /proc/PID/status")?
        .trim()
        .parse()?;
    Ok(kib / 1024.0)
}

/// Returns the targets, each with the measured value.
pub fn targets(rows: &[Row]) -> Vec<Target> {
    [
        (
            MOST,
            "load_s",
            "load 100 000 services × 3 endpoints, s",
            1.0,
        ),
        (
            MOST,
            "change_ms",
            "one endpoint changed, plan and write, ms",
            1.0,
        ),
        (
            MOST,
            "rss_mib",
            "agent's memory with 100 000 services, MiB",
            200.0,
        ),
        (FEW, "rss_mib", "agent's memory with 10 services, MiB", 20.0),
    ]
    .into_iter()
    .filter_map(|(services, metric, what, at_most)| {
        let row = find(rows, "dataplane", services, "tables", metric)?;
        Some(Target {
            what: what.into(),
            value: row.value,
            at_most,
            uncertainty: row.uncertainty(),
        })
    })
    .collect()
}
