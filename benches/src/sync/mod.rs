//! `bench sync`: from the Kubernetes API to the kernel's tables.
//!
//! A real agent on a node of a lab reads a real API server in this process, over TLS. All times are
//! measured outside of the agent: the server notes when it sends the first byte of an answer and
//! when it sends an event, and the kernel's tables show when a change has arrived.

mod attach;
mod neighbour;
mod pods;
mod restart;
mod restless;
mod seen;
pub(crate) mod site;
pub mod soak;
mod together;

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use dataplane_tests::api::Churn;

use crate::{
    rows::{Row, Target, find, thousands},
    say,
    stats::{median, percentile},
};
use neighbour::{Busy, Neighbour};
use seen::Seen;
use site::Site;

/// The size of most targets.
const MANY: u32 = 10_000;
/// The largest size.
const MOST: u32 = 100_000;
/// Changes that come at the same time.
const BURST: u32 = 1_000;

/// How much to measure.
#[derive(Clone, Copy, Debug)]
struct Extent {
    sizes: &'static [u32],
    starts: usize,
    changes: u32,
    bursts: u32,
    restarts: usize,
}

impl Extent {
    const FULL: Self = Self {
        sizes: &[1_000, MANY, MOST],
        starts: 5,
        changes: 2_000,
        bursts: 10,
        restarts: 9,
    };
    const QUICK: Self = Self {
        sizes: &[1_000, MANY],
        starts: 2,
        changes: 300,
        bursts: 3,
        restarts: 3,
    };
}

/// Runs all measurements.
///
/// # Errors
///
/// Fails if the agent does not run, or does not work as expected.
pub fn run(quick: bool) -> anyhow::Result<Vec<Row>> {
    let extent = if quick { Extent::QUICK } else { Extent::FULL };
    let mut rows = Vec::new();
    for &services in extent.sizes {
        measure(&extent, services, &mut rows)?;
    }
    rows.extend(restless(&extent)?);
    for neighbour in Neighbour::ALL {
        rows.extend(beside(neighbour, &extent)?);
    }
    rows.extend(restarts(&extent)?);
    rows.extend(together(&extent)?);
    rows.push(starting(&extent)?);
    Ok(rows)
}

/// Measures pods that start together.
fn starting(extent: &Extent) -> anyhow::Result<Row> {
    let services = 1_000;
    say!("measuring {} pods that start together", attach::PODS);
    let times = attach::run(services, extent.bursts)?;
    Ok(Row {
        bench: "sync",
        path: "dataplane",
        case: "starting",
        services,
        metric: "attached_ms",
        unit: "ms",
        value: median(&mut times.clone()),
        baseline: None,
        ratio: None,
        failed: 0,
        rounds: times.into_iter().map(|time| vec![time]).collect(),
    })
}

/// Measures a restart: an agent is killed, another agent starts, and captured connections are
/// served again.
fn restarts(extent: &Extent) -> anyhow::Result<Vec<Row>> {
    let services = 1_000;
    let times = restart::run(services, extent.restarts)?;
    let row = |metric, values: Vec<f64>| Row {
        bench: "sync",
        path: "dataplane",
        case: "restart",
        services,
        metric,
        unit: "ms",
        value: median(&mut values.clone()),
        baseline: None,
        ratio: None,
        failed: 0,
        rounds: values.into_iter().map(|value| vec![value]).collect(),
    };
    Ok(vec![
        row("captured_first_ms", times.iter().map(|t| t.first).collect()),
        row("captured_last_ms", times.iter().map(|t| t.last).collect()),
    ])
}

/// Measures single changes as a captured pod sees them, while an unrelated Service changes.
fn together(extent: &Extent) -> anyhow::Result<Vec<Row>> {
    let services = 1_000;
    say!("measuring what a captured pod sees of changes");
    let times = together::run(services, extent.changes / 2)?;
    let seen = [
        ("tables_p50_ms", "tables_p99_ms", times.tables),
        ("proxy_p50_ms", "proxy_p99_ms", times.proxy),
        ("names_p50_ms", "names_p99_ms", times.names),
    ];
    let rows = seen.into_iter().flat_map(|(p50, p99, times)| {
        let row = |metric, value| Row {
            bench: "sync",
            path: "dataplane",
            case: "together",
            services,
            metric,
            unit: "ms",
            value,
            baseline: None,
            ratio: None,
            failed: 0,
            rounds: vec![times.clone()],
        };
        [
            row(p50, median(&mut times.clone())),
            row(p99, percentile(&mut times.clone(), 0.99)),
        ]
    });
    Ok(rows.collect())
}

/// Measures single changes while pods and interfaces change, 100 times a second each. In the
/// agent's mesh, pods may only reach known destinations, so the agent knows the pods of all nodes.
fn restless(extent: &Extent) -> anyhow::Result<Vec<Row>> {
    let services = 1_000;
    say!(
        "measuring on a node with {} pods whose interfaces change all the time",
        thousands(pods::PODS)
    );
    let mut site = Site::with_pods(services)?;
    site.start_from_nothing()?;
    let mut seen = Seen::new(&site.bpffs)?;
    let restless = restless::Restless::start(&site)?;
    thread::sleep(Duration::from_secs(2));
    let mut changes = changes(extent, &site, services, &mut seen)?;
    restless.stop()?;
    let p99 = percentile(&mut changes, 0.99);
    let row = |metric, value| Row {
        bench: "sync",
        path: "dataplane",
        case: "restless",
        services,
        metric,
        unit: "ms",
        value,
        baseline: None,
        ratio: None,
        failed: 0,
        rounds: vec![changes.clone()],
    };
    Ok(vec![
        row("change_p50_ms", median(&mut changes.clone())),
        row("change_p99_ms", p99),
    ])
}

/// Measures single changes while another tenant makes the largest changes that it may.
fn beside(neighbour: Neighbour, extent: &Extent) -> anyhow::Result<Vec<Row>> {
    let services = 1_000;
    say!("measuring {}", neighbour.case());
    let directory = tempfile::tempdir()?;
    let config = directory.path().join("dataplane.yaml");
    Neighbour::configure(&config)?;
    let mut site = Site::with_entries(services, &config)?;
    site.start_from_nothing()?;
    // Let the tables grow before the measurement.
    for turn in 0..2 {
        neighbour.change(site.cluster(), turn);
        thread::sleep(Duration::from_secs(5));
    }
    let mut seen = Seen::new(&site.bpffs)?;
    let busy = Busy::start(neighbour, site.cluster(), 2);
    // Measure for some seconds, so that the tenant has some turns.
    let extent = Extent {
        changes: extent.changes.max(1_500),
        ..*extent
    };
    let changes = changes(&extent, &site, services, &mut seen)?;
    busy.stop()?;
    let rss = site.rss_mib()?;
    let row = |metric, unit, value| Row {
        bench: "sync",
        path: "dataplane",
        case: neighbour.case(),
        services,
        metric,
        unit,
        value,
        baseline: None,
        ratio: None,
        failed: 0,
        rounds: vec![changes.clone()],
    };
    let longest = changes.iter().copied().fold(0.0, f64::max);
    let p50 = median(&mut changes.clone());
    let p99 = percentile(&mut changes.clone(), 0.99);
    Ok(vec![
        row("change_p50_ms", "ms", p50),
        row("change_p99_ms", "ms", p99),
        row("change_max_ms", "ms", longest),
        row("rss_mib", "MiB", rss),
    ])
}

fn measure(extent: &Extent, services: u32, rows: &mut Vec<Row>) -> anyhow::Result<()> {
    let mut row = |metric, unit, value: Option<f64>, mut values: Vec<f64>| {
        rows.push(Row {
            bench: "sync",
            path: "dataplane",
            case: "tables",
            services,
            metric,
            unit,
            value: value.unwrap_or_else(|| median(&mut values)),
            baseline: None,
            ratio: None,
            failed: 0,
            rounds: vec![values],
        });
    };
    say!("making {} services", thousands(services));
    let mut site = Site::new(services)?;

    // The agent of the last start runs on.
    let starts = if services > MANY { 1 } else { extent.starts };
    let mut full = Vec::new();
    for start in 1..=starts {
        say!(
            "{} services: start {start} of {starts}",
            thousands(services)
        );
        full.push(site.start_from_nothing()?.as_secs_f64());
    }
    row("full_sync_s", "s", None, full);

    // By then the agent has freed the memory that it needed only to read.
    thread::sleep(Duration::from_secs(2));
    let rss = site.rss_mib()?;
    row("rss_mib", "MiB", None, vec![rss]);

    let mut seen = Seen::new(&site.bpffs)?;
    say!("{} services: measuring single changes", thousands(services));
    let mut changes = changes(extent, &site, services, &mut seen)?;
    row("change_p50_ms", "ms", None, changes.clone());
    let p99 = percentile(&mut changes, 0.99);
    row("change_p99_ms", "ms", Some(p99), changes);

    say!(
        "{} services: measuring bursts of {} changes",
        thousands(services),
        thousands(BURST)
    );
    let (times, writes) = bursts(extent, &site, services, &mut seen)?;
    row("burst_ms", "ms", None, times);
    row("burst_syncs", "", None, writes);
    thread::sleep(Duration::from_secs(1));
    row("rss_later_mib", "MiB", None, vec![site.rss_mib()?]);
    Ok(())
}

/// Changes an endpoint of one EndpointSlice after the other. Returns the time from the event's
/// departure from the server to the kernel's flip, for each change.
fn changes(
    extent: &Extent,
    site: &Site,
    services: u32,
    seen: &mut Seen,
) -> anyhow::Result<Vec<f64>> {
    let mut times = Vec::new();
    for turn in 0..extent.changes {
        // 7 919 is prime to the numbers of services, so the changes are spread over all of them.
        let service = turn * 7_919 % services;
        let pod = 50_000 + turn % 5_000;
        let object = Churn::slice_with(service, pod);
        let before = seen.block(service)?;
        let start = Instant::now();
        site.cluster().apply(object);
        seen.wait_for_flip(service, before)?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
        // Changes come now and then, not one right after the other.
        thread::sleep(Duration::from_micros(500 + u64::from(turn % 7) * 300));
    }
    // Check the last change.
    let last = extent.changes - 1;
    ensure!(
        seen.has(last * 7_919 % services, 50_000 + last % 5_000)?,
        "the last change is not in the tables"
    );
    Ok(times)
}

/// Changes a thousand slices at the same time. Returns the times from the first event's departure
/// to the last flip, and the numbers of syncs.
fn bursts(
    extent: &Extent,
    site: &Site,
    services: u32,
    seen: &mut Seen,
) -> anyhow::Result<(Vec<f64>, Vec<f64>)> {
    let (mut times, mut writes) = (Vec::new(), Vec::new());
    let count = BURST.min(services);
    for turn in 0..extent.bursts {
        let pod = 40_000 + turn;
        let chosen: Vec<u32> = (0..count).map(|n| (n * 7 + turn) % services).collect();
        let objects: Vec<_> = chosen.iter().map(|&s| Churn::slice_with(s, pod)).collect();
        let before: Vec<_> = chosen
            .iter()
            .map(|&service| seen.block(service))
            .collect::<Result<_, _>>()?;
        let syncs = site.syncs()?;
        let start = Instant::now();
        site.cluster().apply_all(objects);
        for (&service, before) in chosen.iter().zip(before) {
            seen.wait_for_flip(service, before)?;
        }
        times.push(start.elapsed().as_secs_f64() * 1e3);
        // Later work is not part of the burst.
        thread::sleep(Duration::from_millis(300));
        #[expect(clippy::cast_precision_loss, reason = "syncs are few")]
        writes.push((site.syncs()? - syncs) as f64);
        let last = chosen.last().context("a service")?;
        ensure!(seen.has(*last, pod)?, "a change of the burst is missing");
    }
    Ok((times, writes))
}

/// Returns a target of the agent with 1 000 services, with the measured value.
fn target(rows: &[Row], case: &str, metric: &str, what: String, at_most: f64) -> Option<Target> {
    find(rows, "dataplane", 1_000, case, metric).map(|row| Target {
        what,
        value: row.value,
        at_most,
        uncertainty: row.uncertainty(),
    })
}

/// Returns the targets, each with the measured value.
pub fn targets(rows: &[Row]) -> Vec<Target> {
    let restless = find(rows, "dataplane", 1_000, "restless", "change_p99_ms");
    let restless = restless.map(|row| Target {
        what: "one change while 100 pods and 100 interfaces change a second, p99, ms".into(),
        value: row.value,
        at_most: 10.0,
        uncertainty: 0.0,
    });
    let restart = target(
        rows,
        "restart",
        "captured_last_ms",
        format!(
            "exec to captured connections of {} workloads served, ms",
            pods::WORKLOADS
        ),
        1_000.0,
    );
    let together = [
        ("tables_p99_ms", "the tables have"),
        ("proxy_p99_ms", "a captured pod's proxy follows"),
        ("names_p99_ms", "the agent's DNS knows"),
    ];
    let together = together.into_iter().filter_map(|(metric, who)| {
        let row = find(rows, "dataplane", 1_000, "together", metric)?;
        Some(Target {
            what: format!("a change that {who}, while another Service changes, p99, ms"),
            value: row.value,
            at_most: 10.0,
            uncertainty: 0.0,
        })
    });
    let starting = target(
        rows,
        "starting",
        "attached_ms",
        format!(
            "{} pods that start together: all interfaces have programs, ms",
            attach::PODS
        ),
        100.0,
    );
    let beside = Neighbour::ALL.into_iter().filter_map(|neighbour| {
        let row = find(rows, "dataplane", 1_000, neighbour.case(), "change_max_ms")?;
        Some(Target {
            what: format!("longest change {}, ms", neighbour.case()),
            value: row.value,
            at_most: 50.0,
            uncertainty: 0.0,
        })
    });
    let tables = [
        (
            MANY,
            "full_sync_s",
            "first byte to 10 000 services × 3 in the kernel, s",
            1.5,
        ),
        (
            MANY,
            "change_p99_ms",
            "one change among 10 000, p99, ms",
            10.0,
        ),
        (MANY, "burst_ms", "1 000 changes at once, ms", 250.0),
        (
            MANY,
            "rss_mib",
            "agent's memory with 10 000 services, MiB",
            80.0,
        ),
        (
            MOST,
            "rss_mib",
            "agent's memory with 100 000 services, MiB",
            500.0,
        ),
    ]
    .into_iter()
    .filter_map(|(services, metric, what, at_most)| {
        let row = find(rows, "dataplane", services, "tables", metric)?;
        Some(Target {
            what: what.into(),
            value: row.value,
            at_most,
            // The uncertainty of a median over rounds does not apply to a percentile.
            uncertainty: if metric == "change_p99_ms" {
                0.0
            } else {
                row.uncertainty()
            },
        })
    });
    tables
        .chain(restless)
        .chain(beside)
        .chain(restart)
        .chain(together)
        .chain(starting)
        .collect()
}
