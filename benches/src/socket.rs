//! `bench socket`: services reached from local sockets.

use std::time::{Duration, Instant};

use anyhow::ensure;
use dataplane_peers::Mode;

use crate::{
    extent::{Extent, order},
    rows::{Rounds, Row, Target, find, thousands},
    say,
    stage::{NodePlan, Stage, Worker},
    stats::median,
    worker::{CHURN_THREADS, Job, Transport},
};

/// The most services of ours.
pub const MOST: u32 = 100_000;
/// A ratio of two equal things is not always 1.00 when measured.
pub(crate) const NOISE: f64 = 1.02;
/// A spread between rounds that is more than a quiet machine's.
pub(crate) const MUCH: f64 = 0.08;
/// What is done, and with what.
const CASES: [(&str, Transport, bool); 4] = [
    ("tcp4", Transport::Tcp, true),
    ("tcp6", Transport::Tcp, false),
    ("udp4", Transport::Udp, true),
    ("udp6", Transport::Udp, false),
];
/// The cases' names, in order.
pub const CASE_NAMES: [&str; 4] = [CASES[0].0, CASES[1].0, CASES[2].0, CASES[3].0];

/// All of it.
pub const FULL: Extent = Extent {
    ours: &[1, 1_000, 10_000, MOST],
    theirs: &[1, 1_000, 10_000],
    at_least: 7,
    at_most: 15,
    budget: Duration::from_mins(5),
    fraction: 1,
};
/// What fits into half a minute.
pub const QUICK: Extent = Extent {
    ours: &[1, MOST],
    theirs: &[1, 1_000],
    at_least: 3,
    at_most: 5,
    budget: Duration::from_secs(10),
    fraction: 4,
};

fn nodes(extent: &Extent) -> Vec<NodePlan> {
    let mut nodes = vec![NodePlan {
        worker: Worker::Plain,
        services: 0,
        direct: false,
    }];
    let last = extent.ours.last();
    nodes.extend(extent.ours.iter().map(|services| NodePlan {
        worker: Worker::Dataplane,
        services: *services,
        direct: Some(services) == last,
    }));
    for mode in Mode::ALL {
        nodes.extend(extent.theirs.iter().map(|services| NodePlan {
            worker: Worker::Peer(mode),
            services: *services,
            direct: false,
        }));
    }
    nodes
}

#[derive(Clone, Copy)]
struct Metric {
    name: &'static str,
    unit: &'static str,
}

const METRICS: [Metric; 4] = [
    Metric {
        name: "connect_p50",
        unit: "µs",
    },
    Metric {
        name: "rtt_p50",
        unit: "µs",
    },
    Metric {
        name: "conn_per_s",
        unit: "1/s",
    },
    Metric {
        name: "gbit_per_s",
        unit: "Gbit/s",
    },
];

fn job(metric: usize, transport: Transport, fraction: u32) -> Job {
    match metric {
        0 => Job::Connect {
            count: 600 / fraction,
        },
        1 => Job::RoundTrip {
            count: 1000 / fraction,
            connections: 1,
        },
        2 => Job::Churn {
            count: 1200 / fraction,
            threads: CHURN_THREADS,
        },
        _ => Job::Bulk {
            bytes: match transport {
                Transport::Tcp => 64 << 20,
                Transport::Udp => 6 << 20,
            } / u64::from(fraction),
        },
    }
}

/// Compares the paths.
///
/// # Errors
///
/// If the machine lacks something, or a path does not work.
pub fn run(extent: &Extent) -> anyhow::Result<Vec<Row>> {
    say!("building the lab: a node for each path, loading its rules or tables");
    let mut stage = Stage::build(&nodes(extent))?;
    let lanes = stage.lanes.len();
    // By lane, case, metric and round; nothing of one that failed.
    let mut samples: Vec<Rounds> = vec![vec![]; lanes * CASES.len() * METRICS.len()];
    let index = |lane, case, metric| (metric * CASES.len() + case) * lanes + lane;
    let start = Instant::now();
    let mut rounds = 0;
    while extent.has_another(rounds, start) {
        for (case, (name, transport, v4)) in CASES.into_iter().enumerate() {
            for (metric, Metric { name: what, .. }) in METRICS.iter().enumerate() {
                for lane in order(lanes) {
                    let job = job(metric, transport, extent.fraction);
                    let value = stage.measure(lane, v4, transport, job);
                    if let Err(error) = &value {
                        let lane = &stage.lanes[lane];
                        let of = thousands(lane.services);
                        say!("{}, {of} services: {name} {what}: {error:#}", lane.path);
                    }
                    samples[index(lane, case, metric)].push(value.into_iter().collect());
                }
            }
        }
        rounds += 1;
        say!("round {rounds} of at most {}", extent.at_most);
    }

    let mut rows = vec![];
    for (metric, Metric { name, unit }) in METRICS.into_iter().enumerate() {
        for (case, case_name) in CASE_NAMES.into_iter().enumerate() {
            let plain = median(&mut samples[index(0, case, metric)].concat());
            for (lane, about) in stage.lanes.iter().enumerate() {
                let by_round = &samples[index(lane, case, metric)];
                let mut values = by_round.concat();
                ensure!(
                    values.len() * 2 > rounds,
                    "{} with {} services: {case_name} {name} failed in most rounds; see above",
                    about.path,
                    about.services,
                );
                let value = median(&mut values);
                rows.push(Row {
                    bench: "socket",
                    path: about.path,
                    case: case_name,
                    services: about.services,
                    metric: name,
                    unit,
                    value,
                    baseline: Some("plain"),
                    ratio: Some(value / plain),
                    rounds: by_round.clone(),
                });
            }
        }
    }
    for Metric { name, .. } in METRICS {
        let of_metric = rows.iter().filter(|row| row.metric == name);
        let differ = median(&mut of_metric.map(Row::spread).collect::<Vec<_>>());
        if differ > MUCH {
            say!(
                "{name} differs by ±{:.0}% between rounds: something else kept the machine busy, and \
                 small differences between paths mean nothing",
                differ * 100.0
            );
        }
    }
    Ok(rows)
}

/// What we promise, beside what was measured: in each line, of the case that is worst.
pub fn targets(rows: &[Row]) -> Vec<Target> {
    let value = |path, services, case, metric| find(rows, path, services, case, metric);
    let plain = |case, metric| value("plain", 0, case, metric);
    let direct = |case, metric| value("direct", MOST, case, metric);
    // Ours at a size that was not measured is not better than at the largest.
    let ours = |services, case, metric| {
        value("dataplane", services, case, metric).or(value("dataplane", MOST, case, metric))
    };
    let peers = |services, case, metric| {
        let modes = Mode::ALL.iter();
        modes.filter_map(move |mode| value(mode.word(), services, case, metric))
    };
    let by_value = |a: &&Row, b: &&Row| a.value.total_cmp(&b.value);
    let over = |a: Option<&Row>, b: Option<&Row>| {
        let (a, b) = (a?, b?);
        Some(a.over(b))
    };
    let (connect, rtt, rate, bulk) = ("connect_p50", "rtt_p50", "conn_per_s", "gbit_per_s");

    let mut targets = vec![];
    let mut add = |what: String, at_most, ratio: &dyn Fn(&'static str) -> Option<(f64, f64)>| {
        let ratios = CASE_NAMES
            .iter()
            .filter_map(|case| Some((ratio(case)?, case)));
        let worst = ratios.max_by(|((a, _), _), ((b, _), _)| a.total_cmp(b));
        if let Some(((value, uncertainty), case)) = worst {
            targets.push(Target {
                what: format!("{what} ({case})"),
                value,
                at_most,
                uncertainty,
            });
        }
    };
    add("connect through a VIP / plain".into(), 1.05, &|case| {
        over(ours(1, case, connect), plain(case, connect))
    });
    add("connect, 100 000 services / one".into(), 1.03, &|case| {
        over(ours(MOST, case, connect), ours(1, case, connect))
    });
    add("round trip / direct".into(), NOISE, &|case| {
        over(ours(MOST, case, rtt), direct(case, rtt))
    });
    // Of what is better the more, the inverse.
    add("throughput: direct / ours".into(), NOISE, &|case| {
        over(direct(case, bulk), ours(MOST, case, bulk))
    });
    for services in FULL.theirs {
        let with = thousands(*services);
        add(
            format!("connect, {with}: ours / kube-proxy's best mode"),
            1.0,
            &|case| {
                over(
                    ours(*services, case, connect),
                    peers(*services, case, connect).min_by(by_value),
                )
            },
        );
        add(
            format!("connections/s, {with}: its best mode / ours"),
            1.0,
            &|case| {
                over(
                    peers(*services, case, rate).max_by(by_value),
                    ours(*services, case, rate),
                )
            },
        );
    }
    targets
}
