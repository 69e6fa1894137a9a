//! `bench relay`: the L4 proxy beside HAProxy, nginx and tokio's copy, and tunnels beside ztunnel.

mod limit;
mod plain;
mod relays;
mod stage;
mod targets;
mod tunnels;

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};

pub use plain::Plain;
pub use targets::targets;

use self::{
    relays::Relay,
    stage::{Cpus, Stage},
};
use crate::{
    extent::order,
    rows::{Rounds, Row, find},
    say,
    stats::median,
    worker::Job,
};

/// A case: its job, and how a round measures it.
struct Case {
    name: &'static str,
    /// Into how many parts a round divides the measurement; in each part every path has one turn. Cases with several
    /// parts have paths that differ by less than the machine varies from one second to the next.
    parts: u32,
    /// How many more parts measure only `direct` and `mode: kernel`. The difference between these two is the smallest,
    /// and from one part to the next they vary by several times as much.
    pairs: u32,
    /// On one CPU, the figure is the cost of the proxy alone, without the time to wake another CPU, which varies most.
    cpus: Cpus,
    job: fn(divisor: u32) -> Job,
    /// Metric and unit of the rate.
    rate: (&'static str, &'static str),
    /// Metric of the proxy's CPU time. `None` if the case does not measure it.
    cost: Option<Cost>,
}

impl Case {
    fn parts(&self, extent: &Extent) -> u32 {
        if extent.divisor == 1 { self.parts } else { 1 }
    }

    fn pairs(&self, extent: &Extent) -> u32 {
        if extent.divisor == 1 { self.pairs } else { 0 }
    }

    fn measures(&self, relay: Relay) -> bool {
        relay.is_tunnel() || self.rate != HANDSHAKES
    }
}

struct Cost {
    metric: &'static str,
    unit: &'static str,
    /// Factor from the CPU time in seconds per byte or connection to the metric's unit.
    scale: f64,
}

const BULK: fn(u32) -> Job = |divisor| Job::Bulk {
    bytes: (2 << 30) / u64::from(divisor),
};
const RTT: fn(u32) -> Job = |divisor| Job::RoundTrip {
    count: 400,
    connections: 20 / divisor.min(10),
};
const PER_GB: Cost = Cost {
    metric: "cpu_s_per_gb",
    unit: "s/GB",
    scale: 1e9,
};
const THROUGHPUT: (&str, &str) = ("gbit_per_s", "Gbit/s");
const ROUND_TRIP: (&str, &str) = ("rtt_p50", "µs");

/// Handshakes are those of one client program, at the side that accepts tunnels.
const HANDSHAKES: (&str, &str) = ("handshakes_per_s", "1/s");

const CASES: [Case; 6] = [
    Case {
        name: "bulk",
        parts: 4,
        pairs: 8,
        cpus: Cpus::All,
        job: BULK,
        rate: THROUGHPUT,
        cost: Some(PER_GB),
    },
    Case {
        name: "bulk-1cpu",
        parts: 1,
        pairs: 0,
        cpus: Cpus::One,
        job: BULK,
        rate: THROUGHPUT,
        cost: Some(PER_GB),
    },
    Case {
        name: "rtt",
        parts: 2,
        pairs: 0,
        cpus: Cpus::All,
        job: RTT,
        rate: ROUND_TRIP,
        cost: None,
    },
    Case {
        name: "rtt-1cpu",
        parts: 1,
        pairs: 0,
        cpus: Cpus::One,
        job: RTT,
        rate: ROUND_TRIP,
        cost: None,
    },
    Case {
        name: "conn",
        parts: 8,
        pairs: 64,
        cpus: Cpus::All,
        job: |divisor| Job::Churn {
            count: 8000 / divisor,
            threads: 8,
        },
        rate: ("conn_per_s", "1/s"),
        cost: Some(Cost {
            metric: "cpu_us_per_conn",
            unit: "µs",
            scale: 1e6,
        }),
    },
    Case {
        name: "handshake",
        parts: 4,
        pairs: 0,
        cpus: Cpus::Apart,
        job: |divisor| Job::Handshake {
            count: 8000 / divisor,
            threads: 8,
        },
        rate: HANDSHAKES,
        cost: Some(Cost {
            metric: "cpu_us_per_handshake",
            unit: "µs",
            scale: 1e6,
        }),
    },
];

/// Names of the cases, in order.
pub const CASE_NAMES: [&str; 9] = [
    CASES[0].name,
    CASES[1].name,
    CASES[2].name,
    CASES[3].name,
    CASES[4].name,
    CASES[5].name,
    "idle-2000",
    "idle-9000",
    "idle-20000",
];
/// The cases of idle connections, each with its number of connections.
const IDLE: [(&str, u32); 3] = [
    (CASE_NAMES[6], 2_000),
    (CASE_NAMES[7], 9_000),
    (CASE_NAMES[8], 20_000),
];
/// The maximum number of idle connections of tunnels.
const IDLE_OF_TUNNELS: u32 = 9_000;
/// The part of the possible connections that one client of tunnels may have: the agent keeps an eighth of the open files
/// for the tunnels themselves, and a fifth of the connections for other clients.
const PART_OF_CLIENT: (u64, u64) = (3, 5);
/// Time after which ztunnel's allocator has returned freed memory: its `malloc_conf` has twice 5 s, for dirty and for muzzy
/// pages.
const DECAYED: Duration = Duration::from_secs(12);

/// How much to measure.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Minimum number of rounds.
    at_least: usize,
    /// Maximum number of rounds.
    at_most: usize,
    /// Time after which no round starts, once the minimum number of rounds is done.
    budget: Duration,
    /// Divisor of the amount of work in a round.
    divisor: u32,
    /// Maximum number of idle connections.
    idle: u32,
}

impl Extent {
    /// The whole benchmark.
    pub const FULL: Self = Self {
        at_least: 5,
        at_most: 11,
        budget: Duration::from_mins(10),
        divisor: 1,
        idle: 20_000,
    };
    /// A short benchmark.
    pub const QUICK: Self = Self {
        at_least: 3,
        at_most: 3,
        budget: Duration::from_secs(15),
        divisor: 8,
        idle: 2_000,
    };
}

/// Returns the order in which the relays take turns. It is random, except that `mode: kernel` and `direct` follow each
/// other, because their difference is the smallest. The machine's speed at this moment, and the clean-up that other
/// proxies have left to it, are then equal for both.
fn turns(relays: &[Relay]) -> Vec<Relay> {
    let others = relays.iter().copied();
    let others: Vec<Relay> = others.filter(|relay| *relay != Relay::Kernel).collect();
    let mut turns: Vec<Relay> = order(others.len()).iter().map(|at| others[*at]).collect();
    if let Some(direct) = turns.iter().position(|relay| *relay == Relay::Direct) {
        let after_it = order(2)[0];
        turns.insert(direct + after_it, Relay::Kernel);
    }
    turns
}

/// Returns `direct` and `mode: kernel` in random order.
fn pair() -> impl Iterator<Item = Relay> {
    let pair = [Relay::Direct, Relay::Kernel];
    order(pair.len()).into_iter().map(move |at| pair[at])
}

#[expect(clippy::cast_precision_loss, reason = "below 2^52")]
fn amount(job: Job) -> f64 {
    match job {
        Job::Bulk { bytes } | Job::Steady { bytes } => bytes as f64,
        Job::Connect { count }
        | Job::Query { count }
        | Job::LookUp { count }
        | Job::Churn { count, .. }
        | Job::Handshake { count, .. }
        | Job::Hold { count } => f64::from(count),
        Job::RoundTrip { count, connections } => f64::from(count) * f64::from(connections),
        // These jobs have no fixed amount, and are not among the cases here.
        Job::Crowd { .. } | Job::Paced { .. } | Job::Flows { .. } | Job::Await => f64::NAN,
    }
}

/// The rates and costs of a relay in a case, for each part of each round.
type Samples = (Rounds, Rounds);

/// Compares the relays. `ztunnel`: the program of Istio's ztunnel, if it takes part.
///
/// # Errors
/// Fails if the machine lacks a program, or if a relay does not work.
pub fn run(extent: &Extent, ztunnel: Option<&Path>) -> anyhow::Result<Vec<Row>> {
    say!("starting the proxies, the server and the client");
    if ztunnel.is_none() {
        say!("no --ztunnel: without the path ztunnel, and the targets beside it");
    }
    let mut stage = Stage::build(ztunnel)?;
    let mut rows = idle(&mut stage, extent)?;

    let all = stage.all();
    // By case and relay.
    let mut samples: Vec<Samples> = vec![(vec![], vec![]); CASES.len() * Relay::ALL.len()];
    let mut of_crypto = vec![];
    let start = Instant::now();
    let mut rounds = 0;
    while rounds < extent.at_least || rounds < extent.at_most && start.elapsed() < extent.budget {
        // Two runs of one program differ by up to 2 %, so each round starts new processes.
        stage.restart()?;
        of_crypto.push(vec![limit::crypto(extent.divisor)?]);
        for (case, samples) in CASES.iter().zip(samples.chunks_mut(Relay::ALL.len())) {
            measure(&mut stage, case, extent, &all, samples)?;
        }
        rounds += 1;
        say!("round {rounds} of at most {}", extent.at_most);
    }

    for (case, of_case) in CASES.iter().zip(samples.chunks(Relay::ALL.len())) {
        let measured = all.iter().filter(|relay| case.measures(**relay));
        for relay in measured {
            rows.extend(rows_of(case, *relay, of_case)?);
        }
    }
    rows.extend(limit::rows(&rows, of_crypto));
    complain_of_client(&rows);
    Ok(rows)
}

/// Reports proxies that wait for the client in the case of handshakes: the rates then say nothing about them.
fn complain_of_client(rows: &[Row]) {
    for path in [Relay::Hbone, Relay::Ztunnel].map(Relay::word) {
        let value = |metric| find(rows, path, 0, "handshake", metric).map(|row| row.value);
        if let (Some(rate), Some(cost)) = (value(HANDSHAKES.0), value("cpu_us_per_handshake")) {
            let busy = rate * cost / 1e6;
            if busy < 0.8 {
                say!(
                    "{path} used {:.0}% of its CPU for handshakes: {} is the client's, compare only CPU time",
                    busy * 100.0,
                    HANDSHAKES.0
                );
            }
        }
    }
}

/// Measures a case once in a round, with all relays that it has.
fn measure(
    stage: &mut Stage,
    case: &Case,
    extent: &Extent,
    all: &[Relay],
    samples: &mut [Samples],
) -> anyhow::Result<()> {
    stage.pin(case.cpus)?;
    let measured: Vec<Relay> = all.iter().copied().filter(|r| case.measures(*r)).collect();
    let parts = case.parts(extent);
    let job = (case.job)(extent.divisor * parts);
    let pairs = (0..case.pairs(extent)).flat_map(|_| pair());
    for relay in (0..parts).flat_map(|_| turns(&measured)).chain(pairs) {
        let (rates, costs) = &mut samples[relay as usize];
        let before = stage.cpu(relay);
        let (mut rate, mut cost) = (vec![], vec![]);
        match stage.measure(relay, job) {
            Ok(value) => {
                rate.push(value);
                if let (Some(of), true) = (&case.cost, relay.is_process()) {
                    cost.push((stage.cpu(relay) - before) / amount(job) * of.scale);
                }
            }
            Err(error) => say!("{}: {}: {error:#}", relay.word(), case.name),
        }
        rates.push(rate);
        costs.push(cost);
    }
    Ok(())
}

/// Returns the rows of a relay in a case.
fn rows_of(case: &Case, relay: Relay, of_case: &[Samples]) -> anyhow::Result<Vec<Row>> {
    let direct = median(&mut of_case[Relay::Direct as usize].0.concat());
    let haproxy = median(&mut of_case[Relay::Haproxy as usize].1.concat());
    let (rates, costs) = &of_case[relay as usize];
    ensure!(
        rates.concat().len() * 2 > rates.len(),
        "{}: {} failed mostly; see above",
        relay.word(),
        case.name
    );
    let row = |(metric, unit), rounds: &[Vec<f64>], baseline, against: f64| {
        let value = median(&mut rounds.concat());
        // Other relays than tunnels have no handshakes.
        let is_there = against > 0.0;
        Row {
            bench: "relay",
            path: relay.word(),
            case: case.name,
            services: 0,
            metric,
            unit,
            value,
            baseline: is_there.then_some(baseline),
            ratio: is_there.then_some(value / against),
            failed: 0,
            rounds: rounds.to_vec(),
        }
    };
    let mut rows = vec![row(case.rate, rates, "direct", direct)];
    if let (Some(cost), false) = (&case.cost, costs.concat().is_empty()) {
        rows.push(row((cost.metric, cost.unit), costs, "haproxy", haproxy));
    }
    Ok(rows)
}

/// Measures the memory of proxies that have just started, and of the same proxies with idle connections that were used
/// once.
fn idle(stage: &mut Stage, extent: &Extent) -> anyhow::Result<Vec<Row>> {
    let mut rows: Vec<Row> = vec![];
    let start = Instant::now();
    let (most, possible) = (extent.idle, stage.connections);
    if u64::from(most) > possible {
        say!(
            "this user's limit of open files (ulimit -Hn) allows {possible} connections, not {most}"
        );
    }
    let processes = stage.all().into_iter().filter(|relay| relay.is_process());
    for relay in processes {
        let (most, possible) = if relay.is_tunnel() {
            let of_client = possible * PART_OF_CLIENT.0 / PART_OF_CLIENT.1;
            (most.min(IDLE_OF_TUNNELS), of_client)
        } else {
            (most, possible)
        };
        if relay.is_tunnel() {
            std::thread::sleep(DECAYED.saturating_sub(start.elapsed()));
        }
        let before = stage.memory(relay)?;
        let mut held = 0;
        for (case, count) in IDLE
            .into_iter()
            .filter(|(_, count)| *count <= most && u64::from(*count) <= possible)
        {
            let more = count - held;
            let result = stage.measure(relay, Job::Hold { count: more });
            let now = result
                .with_context(|| format!("{} with {count} idle connections", relay.word()))?;
            ensure!(now >= f64::from(count), "only {now} of {count} connections");
            held = count;
            // Wait until the proxy has freed the memory that it frees when it is idle.
            std::thread::sleep(if relay.is_tunnel() {
                DECAYED
            } else if extent.divisor == 1 {
                Duration::from_secs(6)
            } else {
                Duration::from_millis(300)
            });
            rows.push(Row {
                bench: "relay",
                path: relay.word(),
                case,
                services: 0,
                metric: "kib_per_conn",
                unit: "KiB",
                value: (stage.memory(relay)? - before) / f64::from(count),
                baseline: None,
                ratio: None,
                failed: 0,
                rounds: vec![],
            });
        }
        stage.measure(relay, Job::Hold { count: 0 })?;
        say!("{}: holding {held} idle connections", relay.word());
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_have_a_turn_and_those_that_differ_least_are_neighbours() {
        let (mut before, mut after) = (0, 0);
        for _ in 0..200 {
            let turns = turns(&Relay::ALL);
            let at = |relay: Relay| {
                let found = turns.iter().position(|other| *other == relay);
                found.unwrap_or_else(|| panic!("{} has no turn", relay.word()))
            };
            assert_eq!(turns.len(), Relay::ALL.len());
            assert!(Relay::ALL.into_iter().all(|relay| at(relay) < turns.len()));
            let (direct, kernel) = (at(Relay::Direct), at(Relay::Kernel));
            assert_eq!(direct.abs_diff(kernel), 1, "{turns:?}");
            if kernel < direct {
                before += 1;
            } else {
                after += 1;
            }
        }
        assert!(before > 50 && after > 50, "{before} and {after}");
    }

    #[test]
    fn relays_are_numbered_as_listed() {
        for (number, relay) in Relay::ALL.into_iter().enumerate() {
            assert_eq!(relay as usize, number);
        }
    }
}
