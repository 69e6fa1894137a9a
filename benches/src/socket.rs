//! `bench socket`: services reached from local sockets.

use std::time::{Duration, Instant};

use dataplane_peers::Mode;

use crate::{
    extent::{Extent, order},
    measurement::{self, Measurement, Samples, complain_of_noise, figures},
    node_worker::Worker,
    rows::{Row, Target, find, most_services, thousands},
    say,
    stage::{NodePlan, Stage},
    worker::{CHURN_THREADS, Job, Transport},
};

/// Largest number of services in our measurements.
pub const MOST: u32 = 100_000;
/// Largest measured ratio of two equal paths.
pub(crate) const NOISE: f64 = 1.02;
/// Largest spread between rounds on a quiet machine.
pub(crate) const MUCH: f64 = 0.08;
/// The cases: name, transport protocol, and whether the client uses IPv4.
const CASES: [(&str, Transport, bool); 4] = [
    ("tcp4", Transport::Tcp, true),
    ("tcp6", Transport::Tcp, false),
    ("udp4", Transport::Udp, true),
    ("udp6", Transport::Udp, false),
];
/// The cases' names, in order.
pub const CASE_NAMES: [&str; 4] = [CASES[0].0, CASES[1].0, CASES[2].0, CASES[3].0];

/// The whole benchmark.
pub const FULL: Extent = Extent {
    ours: &[1, 1_000, 10_000, MOST],
    theirs: &[1, 1_000, 10_000],
    at_least: 7,
    at_most: 15,
    budget: Duration::from_mins(5),
    fraction: 1,
};
/// A short benchmark, within half a minute.
pub const QUICK: Extent = Extent {
    ours: &[1, 10_000],
    theirs: &[1, 1_000],
    at_least: 2,
    at_most: 5,
    budget: Duration::from_secs(9),
    fraction: 6,
};

fn nodes(extent: &Extent) -> Vec<NodePlan> {
    let node = |worker, services| NodePlan {
        worker,
        services,
        direct: false,
    };
    let mut nodes = vec![node(Worker::Plain, 0), node(Worker::Conntrack, 0)];
    let last = extent.ours.last();
    nodes.extend(extent.ours.iter().map(|services| NodePlan {
        direct: Some(services) == last,
        ..node(Worker::Dataplane, *services)
    }));
    nodes.push(node(Worker::Sockets, 1));
    nodes.extend([Worker::Tracked, Worker::Monitored].map(|worker| node(worker, 1)));
    for mode in Mode::ALL {
        let worker = Worker::Peer(mode);
        nodes.extend(extent.theirs.iter().map(|services| node(worker, *services)));
    }
    nodes
}

/// Returns the measurements. `At` is whether the client uses IPv4.
fn measurements(fraction: u32) -> Vec<Measurement<bool>> {
    let mut all = vec![];
    let mut add = |cases: &[usize], metrics, job: &dyn Fn(Transport) -> Job| {
        all.extend(cases.iter().map(|case| {
            let (name, transport, v4) = CASES[*case];
            Measurement {
                case: (name, v4),
                transport,
                job: job(transport),
                metrics,
            }
        }));
    };
    let every = [0, 1, 2, 3];
    add(&every, measurement::CONNECT, &|_| Job::Connect {
        count: 600 / fraction,
    });
    add(&every, measurement::ROUND_TRIP, &|_| Job::RoundTrip {
        count: 1000 / fraction,
        connections: 1,
    });
    add(&every, measurement::CHURN, &|_| Job::Churn {
        count: 1200 / fraction,
        threads: CHURN_THREADS,
    });
    add(&every, measurement::BULK, &|transport| Job::Bulk {
        bytes: match transport {
            Transport::Tcp => 64 << 20,
            Transport::Udp => 6 << 20,
        } / u64::from(fraction),
    });
    add(&[0, 1], measurement::CROWD, &|_| Job::Crowd {
        clients: 64,
        millis: 320 / fraction,
    });
    add(&[2, 3], measurement::QUERY, &|_| Job::Query {
        count: 600 / fraction,
    });
    add(&[2, 3], measurement::PACED, &|_| {
        measurement::paced(Duration::from_millis(320 / u64::from(fraction)))
    });
    all
}

/// Compares the paths.
///
/// # Errors
///
/// Fails if the machine lacks a program, or if a path does not work.
pub fn run(extent: &Extent) -> anyhow::Result<Vec<Row>> {
    say!("building the lab: a node for each path, loading its rules or tables");
    let mut stage = Stage::build(&nodes(extent))?;
    let lanes = stage.lanes.len();
    let measurements = measurements(extent.fraction);
    let mut samples: Vec<Samples> = measurements
        .iter()
        .map(|what| what.samples(lanes))
        .collect();
    let start = Instant::now();
    let mut rounds = 0;
    while extent.has_another(rounds, start) {
        for (what, samples) in measurements.iter().zip(&mut samples) {
            for lane in order(lanes) {
                let (case, v4) = what.case;
                let before = stage.cpu(lane)?;
                let outputs = stage.measure(lane, v4, what.transport, what.job);
                let cpu = stage.cpu(lane)? - before;
                if let Err(error) = &outputs {
                    let lane = &stage.lanes[lane];
                    let (of, metric) = (thousands(lane.services), what.metrics[0].0);
                    say!("{}, {of} services: {case} {metric}: {error:#}", lane.path);
                }
                let figures = outputs.map(|outputs| figures(what.job, &outputs, cpu));
                let figures = figures.unwrap_or_default();
                for (number, samples) in samples.iter_mut().enumerate() {
                    samples[lane].push(figures.get(number).copied().into_iter().collect());
                }
            }
        }
        rounds += 1;
        say!("round {rounds} of at most {}", extent.at_most);
    }

    let names: Vec<_> = stage
        .lanes
        .iter()
        .map(|lane| (lane.path, lane.services))
        .collect();
    let mut rows = vec![];
    for (what, samples) in measurements.iter().zip(&samples) {
        rows.extend(what.rows("socket", &names, samples, rounds, |_| true)?);
    }
    complain_of_noise(
        &rows,
        &["connect_p50", "rtt_p50", "conn_per_s", "gbit_per_s"],
        MUCH,
    );
    Ok(rows)
}

/// Returns the targets, each with the measured value of the worst case.
pub fn targets(rows: &[Row]) -> Vec<Target> {
    let value = |path, services, case, metric| find(rows, path, services, case, metric);
    let plain = |case, metric| value("plain", 0, case, metric);
    let most = most_services(rows);
    let direct = |case, metric| value("direct", most, case, metric);
    // If our path was not measured with this number of services, use the figure with the largest
    // number, which is not better.
    let ours = |services, case, metric| {
        value("dataplane", services, case, metric).or(value("dataplane", most, case, metric))
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
    add(
        format!("connect, {} services / one", thousands(most)),
        1.03,
        &|case| over(ours(most, case, connect), ours(1, case, connect)),
    );
    add("round trip / direct".into(), NOISE, &|case| {
        over(ours(most, case, rtt), direct(case, rtt))
    });
    // Without and with the kernel's conntrack, against a node without either.
    for (path, limits) in [
        ("dataplane", [1.02, 1.03, 1.08]),
        ("dataplane-conntrack", [1.03, 1.06, 1.12]),
    ] {
        let metrics = [rtt, "cpu_us_per_conn", "query_p50"];
        let what = ["round trip", "CPU a connection", "query from a new socket"];
        for ((metric, what), at_most) in metrics.into_iter().zip(what).zip(limits) {
            add(format!("{what}: {path} / plain"), at_most, &|case| {
                over(value(path, 1, case, metric), plain(case, metric))
            });
        }
    }
    // For metrics that are better the higher they are, use the inverse ratio.
    add("throughput: direct / ours".into(), NOISE, &|case| {
        over(direct(case, bulk), ours(most, case, bulk))
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
