//! `bench dns`: the DNS server beside unbound, dnsmasq and BIND, and queries of a pod with and without capture.

mod capture;
mod servers;

use anyhow::Context as _;

use self::{
    capture::Site,
    servers::{Names, Server, Servers},
};
use crate::{
    extent::order,
    rows::{Rounds, Row, Target, find},
    say,
    stats::percentile,
};

/// Names of the cases, in order.
pub const CASE_NAMES: [&str; 5] = ["local", "cached", "lookup", "memory", "change"];

/// How much to measure.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    services: u32,
    rounds: usize,
    /// How long a round measures each server.
    seconds: u32,
    /// A pod's lookups in a round.
    lookups: u32,
    /// Names in the cache when memory is measured.
    cached: u32,
    /// Changes of services.
    changes: u32,
}

impl Extent {
    /// The whole benchmark.
    pub const FULL: Self = Self {
        services: 10_000,
        rounds: 7,
        seconds: 3,
        lookups: 3_000,
        cached: 100_000,
        changes: 300,
    };
    /// A short benchmark, within half a minute.
    pub const QUICK: Self = Self {
        services: 1_000,
        rounds: 3,
        seconds: 1,
        lookups: 500,
        cached: 10_000,
        changes: 30,
    };
}

/// Measures servers, lookups, memory and changes.
///
/// # Errors
/// Fails if the machine lacks a program, or if a server or an agent does not answer.
pub fn run(extent: &Extent) -> anyhow::Result<Vec<Row>> {
    let mut rows = throughput(extent)?;
    let site = Site::start(extent.services)?;
    rows.extend(lookups(&site, extent)?);
    rows.extend(memory(&site, extent)?);
    rows.push(changes(site, extent)?);
    Ok(rows)
}

fn row(
    path: &'static str,
    case: &'static str,
    metric: &'static str,
    unit: &'static str,
    rounds: Rounds,
) -> Row {
    Row::new("dns", path, case, (metric, unit), rounds)
}

/// Sets the baseline of each row, and the ratio to the baseline's value.
fn beside(rows: &mut [Row], baseline: &'static str) {
    let values: Vec<_> = rows
        .iter()
        .map(|row| find(rows, baseline, 0, row.case, row.metric).map(|other| other.value))
        .collect();
    for (row, other) in rows.iter_mut().zip(values) {
        row.baseline = other.map(|_| baseline);
        row.ratio = other.map(|other| row.value / other);
    }
}

fn throughput(extent: &Extent) -> anyhow::Result<Vec<Row>> {
    say!("starting the servers");
    let servers = Servers::start(extent.services)?;
    let all = servers.running();
    let count = all.len();
    let mut samples: Vec<[Rounds; 2]> = vec![[vec![], vec![]]; count * Names::ALL.len()];
    // Each server caches every name before it is measured.
    for server in &all {
        for names in Names::ALL {
            servers.measure(*server, names, extent.seconds)?;
        }
    }
    for round in 1..=extent.rounds {
        for (case, names) in Names::ALL.into_iter().enumerate() {
            for at in order(count) {
                let [rate, cpu] = servers.measure(all[at], names, extent.seconds)?;
                let [rates, cpus] = &mut samples[case * count + at];
                rates.push(vec![rate]);
                cpus.push(vec![cpu]);
            }
        }
        say!("servers: round {round} of {}", extent.rounds);
    }
    let mut rows = vec![];
    let cases = Names::ALL
        .into_iter()
        .flat_map(|names| all.iter().map(move |server| (names, *server)));
    for ((names, server), [rates, cpus]) in cases.zip(samples) {
        let (path, case) = (server.word(), names.word());
        rows.push(row(path, case, "queries_per_s", "1/s", rates));
        rows.push(row(path, case, "cpu_us_per_query", "µs", cpus));
    }
    beside(&mut rows, Server::Unbound.word());
    Ok(rows)
}

/// Measures a pod's lookups: answered on its node, and answered by the cluster's DNS on another node.
fn lookups(site: &Site, extent: &Extent) -> anyhow::Result<Vec<Row>> {
    let mut clients = site.clients()?;
    let mut samples: Vec<[Rounds; 2]> = vec![[vec![], vec![]]; clients.len()];
    for round in 1..=extent.rounds {
        for at in order(clients.len()) {
            let values = clients[at].look_up(extent.lookups)?;
            let [p50, p99] = &mut samples[at];
            p50.push(values.first().copied().into_iter().collect());
            p99.push(values.get(1).copied().into_iter().collect());
        }
        say!("lookups: round {round} of {}", extent.rounds);
    }
    let mut rows = vec![];
    for (client, [p50, p99]) in clients.iter().zip(samples) {
        rows.push(row(client.path, "lookup", "p50", "µs", p50));
        rows.push(row(client.path, "lookup", "p99", "µs", p99));
    }
    beside(&mut rows, "cluster-dns");
    Ok(rows)
}

/// Measures the resident memory of an agent whose cache is full of names, and of an agent that answers no queries.
fn memory(site: &Site, extent: &Extent) -> anyhow::Result<Vec<Row>> {
    say!("memory: {} names", extent.cached);
    let without = site.memory_without()?;
    site.fill_cache(extent.cached)?;
    let with = site.memory()?;
    Ok([("dataplane", with), ("dataplane-without", without)]
        .into_iter()
        .map(|(path, value)| row(path, "memory", "rss", "MiB", vec![vec![value]]))
        .collect())
}

/// Measures the time from the event of a new service at the API server to the first answer for its name.
fn changes(mut site: Site, extent: &Extent) -> anyhow::Result<Row> {
    say!("changes: {}", extent.changes);
    let mut samples = (0..extent.changes)
        .map(|number| site.change(number))
        .collect::<anyhow::Result<Vec<f64>>>()?;
    let mut row = row(
        "dataplane",
        "change",
        "answered_after_p99",
        "ms",
        vec![samples.clone()],
    );
    row.value = percentile(&mut samples, 0.99);
    Ok(row)
}

/// Returns the targets, each with the measured value.
///
/// # Errors
/// Fails if a metric was not measured.
pub fn targets(rows: &[Row]) -> anyhow::Result<Vec<Target>> {
    let value = |path, case, metric| {
        let found = find(rows, path, 0, case, metric);
        found.with_context(|| format!("{path} has no {metric} of {case}"))
    };
    let mut targets = vec![];
    for names in Names::ALL {
        let [ours, theirs] =
            ["dataplane", "unbound"].map(|path| value(path, names.word(), "queries_per_s"));
        let (ratio, uncertainty) = theirs?.over(ours?);
        targets.push(Target {
            what: format!("queries/s, {} names: unbound's / ours", names.word()),
            value: ratio,
            at_most: 1.0 / 1.1,
            uncertainty,
        });
    }
    let captured = value("dataplane", "lookup", "p50")?;
    targets.push(Target {
        what: "p50 of a local name through capture, µs".to_owned(),
        value: captured.value,
        at_most: 25.0,
        uncertainty: captured.uncertainty(),
    });
    let (ratio, uncertainty) = captured.over(value("cluster-dns", "lookup", "p50")?);
    targets.push(Target {
        what: "p50 of a local name: captured / cluster's DNS".to_owned(),
        value: ratio,
        at_most: 0.8,
        uncertainty,
    });
    let [with, without] =
        ["dataplane", "dataplane-without"].map(|path| value(path, "memory", "rss"));
    targets.push(Target {
        what: "RSS above that without DNS, MiB".to_owned(),
        value: with?.value - without?.value,
        at_most: 80.0,
        uncertainty: 0.0,
    });
    targets.push(Target {
        what: "p99 from an event to the new answer, ms".to_owned(),
        value: value("dataplane", "change", "answered_after_p99")?.value,
        at_most: 20.0,
        uncertainty: 0.0,
    });
    Ok(targets)
}
