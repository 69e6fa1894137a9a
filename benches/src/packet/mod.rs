//! `bench packet`: services reached by packets: from outside, and by pods whose sockets nobody sees.

mod programs;
mod stage;

use std::time::{Duration, Instant};

use anyhow::ensure;
use dataplane_peers::Mode;

use crate::{
    extent::{Extent, order},
    rows::{Rounds, Row, Target, find, thousands, uncertainty},
    say,
    socket::{MOST, MUCH, NOISE},
    stats::median,
    worker::{Job, Transport, WARM_UP},
};
use programs::Taken;
use stage::{Case, Lane, Stage, Worker};

/// The cases, in order.
const CASES: [(&str, Case); 3] = [
    ("nodeport-local", Case::NodePortLocal),
    ("nodeport-remote", Case::NodePortRemote),
    ("clusterip-packet", Case::ClusterIpPacket),
];
/// Their names, and that of the one which is about single flows.
pub const CASE_NAMES: [&str; 4] = [CASES[0].0, CASES[1].0, CASES[2].0, FLOW];
/// A datagram's way to a node port with local endpoints, as the first of its flow and as a later one.
const FLOW: &str = "flow";

/// All of it. Several agents have one service, and count as one: where the kernel puts a program's code makes up to
/// 5 % of what a connection costs, more than what is compared (`docs/measurements/code-placement.md`). They start in
/// any order, for what is loaded first lies elsewhere.
pub const FULL: Extent = Extent {
    ours: &[1, 1, 1, 1, 1, 1_000, 10_000, MOST],
    theirs: &[1, 1_000, 10_000],
    at_least: 7,
    at_most: 25,
    budget: Duration::from_mins(3),
    fraction: 1,
};
/// What fits into half a minute.
pub const QUICK: Extent = Extent {
    ours: &[1, 1, 1, MOST],
    theirs: &[1, 1_000],
    at_least: 3,
    at_most: 7,
    budget: Duration::from_secs(10),
    fraction: 4,
};

fn lanes(extent: &Extent) -> Vec<Lane> {
    let lane = |worker, services| Lane { worker, services };
    let mut lanes = vec![lane(Worker::Plain, 0), lane(Worker::Conntrack, 0)];
    lanes.extend(extent.ours.iter().map(|of| lane(Worker::Dataplane, *of)));
    for mode in Mode::ALL {
        let worker = Worker::Peer(mode);
        lanes.extend(extent.theirs.iter().map(|of| lane(worker, *of)));
    }
    lanes
}

/// Something to measure: its name and unit, of which case, by what.
#[derive(Clone, Copy)]
struct Measurement {
    metric: &'static str,
    unit: &'static str,
    case: (&'static str, Case),
    transport: Transport,
    job: Job,
}

impl Measurement {
    /// Whether another is measured right after it, lane by lane. What making a flow takes is the difference of the
    /// two, and less than what the machine does differently from one second to the next.
    fn goes_with(&self, other: &Self) -> bool {
        self.case.0 == FLOW && other.case.0 == FLOW
    }

    /// In how many parts it is measured in a round, each lane in turn.
    fn parts(&self) -> usize {
        if self.case.0 == FLOW { 3 } else { 1 }
    }
}

fn measurements(fraction: u32) -> Vec<Measurement> {
    let bytes = (128 << 20) / u64::from(fraction);
    let (connect, trips) = (600 / fraction, 1000 / fraction);
    let mut all = vec![];
    for (metric, unit, job) in [
        ("connect_p50", "µs", Job::Connect { count: connect }),
        (
            "rtt_p50",
            "µs",
            Job::RoundTrip {
                count: trips,
                connections: 1,
            },
        ),
        ("gbit_per_s", "Gbit/s", Job::Steady { bytes }),
    ] {
        all.extend(CASES.map(|case| Measurement {
            metric,
            unit,
            case,
            transport: Transport::Tcp,
            job,
        }));
    }
    for (metric, job) in [
        ("first_p50", Job::Connect { count: connect }),
        (
            "later_p50",
            Job::RoundTrip {
                count: trips,
                connections: 1,
            },
        ),
    ] {
        all.push(Measurement {
            metric,
            unit: "µs",
            case: (FLOW, Case::NodePortLocal),
            transport: Transport::Udp,
            job,
        });
    }
    all
}

/// Compares the paths.
///
/// # Errors
///
/// If the machine lacks something, or a path does not work.
pub fn run(extent: &Extent) -> anyhow::Result<Vec<Row>> {
    say!("building the lab: a node for each path, loading its rules or tables");
    let mut stage = Stage::build(&lanes(extent))?;
    let lanes = stage.lanes.len();
    let measurements = measurements(extent.fraction);
    // By measurement, lane and round; nothing of one that failed.
    let mut samples: Vec<Vec<Rounds>> = vec![vec![vec![]; lanes]; measurements.len()];
    let start = Instant::now();
    let mut rounds = 0;
    while extent.has_another(rounds, start) {
        for samples in samples.iter_mut().flatten() {
            samples.push(vec![]);
        }
        let mut of_group = &mut samples[..];
        for group in measurements.chunk_by(Measurement::goes_with) {
            let samples;
            (samples, of_group) = of_group.split_at_mut(group.len());
            for lane in (0..group[0].parts()).flat_map(|_| order(lanes)) {
                for (what, samples) in group.iter().zip(&mut *samples) {
                    let (name, case) = what.case;
                    if !stage.measures(lane, case) {
                        continue;
                    }
                    match stage.measure(lane, case, what.transport, what.job) {
                        Ok(value) => samples[lane][rounds].push(value),
                        Err(error) => {
                            let lane = stage.lanes[lane];
                            let (path, of) = (lane.path(), thousands(lane.services));
                            say!("{path}, {of} services: {name} {}: {error:#}", what.metric);
                        }
                    }
                }
            }
        }
        rounds += 1;
        say!("round {rounds} of at most {}", extent.at_most);
    }

    let mut rows = vec![];
    for (what, samples) in measurements.iter().zip(&samples) {
        let plain = median(&mut samples[0].concat());
        for (number, lane) in stage.lanes.iter().enumerate() {
            let alike = |other: &usize| stage.lanes[*other] == *lane;
            if (0..number).any(|other| alike(&other)) {
                continue;
            }
            let alike: Vec<usize> = (number..lanes).filter(alike).collect();
            if !alike.iter().any(|i| stage.measures(*i, what.case.1)) {
                continue;
            }
            let of_round =
                |round: usize| alike.iter().flat_map(move |i| samples[*i][round].clone());
            let by_round: Rounds = (0..rounds).map(|r| of_round(r).collect()).collect();
            let mut values = by_round.concat();
            let (path, services) = (lane.path(), lane.services);
            let (case, metric) = (what.case.0, what.metric);
            ensure!(
                values.len() * 2 > rounds * alike.len() * what.parts(),
                "{path} with {services} services: {case} {metric} failed in most rounds; see above"
            );
            let value = median(&mut values);
            rows.push(Row {
                bench: "packet",
                path,
                case,
                services,
                metric,
                unit: what.unit,
                value,
                baseline: Some("plain"),
                ratio: Some(value / plain),
                rounds: by_round,
            });
        }
    }
    say!("what the programs take of it");
    rows.extend(programs(&mut stage)?);
    for metric in ["connect_p50", "rtt_p50", "gbit_per_s", "first_p50"] {
        let of_metric = rows.iter().filter(|row| row.metric == metric);
        let differ = median(&mut of_metric.map(Row::spread).collect::<Vec<_>>());
        if differ > MUCH {
            say!(
                "{metric} differs by ±{:.0}% between rounds: something else kept the machine busy, and \
                 small differences between paths mean nothing",
                differ * 100.0
            );
        }
    }
    Ok(rows)
}

/// What our programs take of a connection from its SYN to its RST, of a round trip, and of a datagram and
/// its answer, with one service.
fn programs(stage: &mut Stage) -> anyhow::Result<Vec<Row>> {
    const COUNT: u32 = 2_000;
    const ROUNDS: usize = 2;
    let with_one = Lane {
        worker: Worker::Dataplane,
        services: 1,
    };
    let lanes = (0..stage.lanes.len()).filter(|lane| stage.lanes[*lane] == with_one);
    let lanes: Vec<usize> = lanes.collect();
    let (connect, trip) = (
        Job::Connect { count: COUNT },
        Job::RoundTrip {
            count: COUNT,
            connections: 1,
        },
    );
    let tcp = [("programs_connection", connect), ("programs_rtt", trip)];
    let tcp = tcp.map(|(metric, job)| (metric, Transport::Tcp, job));
    let udp = [("programs_first", connect), ("programs_later", trip)];
    let udp = udp.map(|(metric, job)| (metric, Transport::Udp, job));
    let of_tcp = CASES.iter().flat_map(|case| tcp.map(|what| (*case, what)));
    let of_udp = udp.map(|what| ((FLOW, Case::NodePortLocal), what));
    let numbers = lanes.iter().map(|lane| stage.programs(*lane));
    let numbers = numbers.collect::<anyhow::Result<Vec<_>>>()?;
    let _counting = programs::counting()?;
    let mut rows = vec![];
    for ((case, of), (metric, transport, job)) in of_tcp.chain(of_udp) {
        let (mut times, mut calls) = (vec![], vec![]);
        for _ in 0..ROUNDS {
            for (lane, numbers) in lanes.iter().zip(&numbers) {
                let before = Taken::now(numbers)?;
                stage.measure(*lane, of, transport, job)?;
                let (time, called) = Taken::now(numbers)?.since(before, COUNT + WARM_UP);
                times.push(time);
                calls.push(called);
            }
        }
        let value = median(&mut times);
        say!(
            "{case} {metric}: {value:.0} ns in {:.1} calls",
            median(&mut calls)
        );
        rows.push(Row {
            bench: "packet",
            path: "dataplane",
            case,
            services: 1,
            metric,
            unit: "ns",
            value,
            baseline: None,
            ratio: None,
            rounds: vec![times],
        });
    }
    Ok(rows)
}

/// What we promise, beside what was measured.
pub fn targets(rows: &[Row]) -> Vec<Target> {
    let value = |path, services, case, metric| find(rows, path, services, case, metric);
    let plain = |case, metric| value("plain", 0, case, metric);
    let ours = |services, case, metric| value("dataplane", services, case, metric);
    let best = |services, case, metric: &'static str| {
        let modes = Mode::ALL.iter();
        let of_modes = modes.filter_map(|mode| value(mode.word(), services, case, metric));
        if metric == "gbit_per_s" {
            of_modes.max_by(|a, b| a.value.total_cmp(&b.value))
        } else {
            of_modes.min_by(|a, b| a.value.total_cmp(&b.value))
        }
    };
    // Of what is better the more, the inverse.
    let over = |a: Option<&Row>, b: Option<&Row>| {
        let (a, b) = (a?, b?);
        Some(match a.metric {
            "gbit_per_s" => b.over(a),
            _ => a.over(b),
        })
    };
    let mut targets = vec![];
    let mut add = |what: String, at_most, ratio: Option<(f64, f64)>| {
        targets.extend(ratio.map(|(value, uncertainty)| Target {
            what,
            value,
            at_most,
            uncertainty,
        }));
    };
    let metrics = [
        ("rtt_p50", "round trip: ours / "),
        ("connect_p50", "connect: ours / "),
        ("gbit_per_s", "throughput, inverse: ours / "),
    ];
    for (case, _) in CASES {
        let at_most = if case == "nodeport-remote" {
            1.05
        } else {
            1.00
        };
        for (metric, what) in metrics {
            add(
                format!("{case} {what}plain"),
                at_most,
                over(ours(1, case, metric), plain(case, metric)),
            );
        }
        for (metric, what) in metrics {
            add(
                format!("{case} {what}one service's, of {}", thousands(MOST)),
                1.05,
                over(ours(MOST, case, metric), ours(1, case, metric)),
            );
            for services in FULL.theirs {
                let mine = ours(*services, case, metric).or(ours(MOST, case, metric));
                let with = thousands(*services);
                add(
                    format!("{case} {what}kube-proxy's best mode, {with}"),
                    1.0,
                    over(mine, best(*services, case, metric)),
                );
            }
        }
    }
    // What making a flow adds to a datagram's way, beside what it adds in the kernel's conntrack.
    let added = |path, services| {
        let first = value(path, services, FLOW, "first_p50")?;
        let later = value(path, services, FLOW, "later_p50")?;
        let rounds = first.by_round().zip(later.by_round());
        Some(rounds.map(|(first, later)| Some(first? - later?)))
    };
    if let (Some(ours), Some(plain), Some(theirs)) = (
        added("dataplane", 1),
        added("plain", 0),
        added("conntrack", 0),
    ) {
        // What a fresh socket costs without either is in both.
        let rounds = ours.zip(theirs).zip(plain);
        let rounds = rounds.filter_map(|((a, b), plain)| Some((a? - plain?, b? - plain?)));
        let (mut ours, mut theirs): (Vec<f64>, Vec<f64>) = rounds.unzip();
        let uncertainty = uncertainty(&mut ours).hypot(uncertainty(&mut theirs));
        let (mine, kernels) = (median(&mut ours), median(&mut theirs));
        add(
            format!("making a flow: ours {mine:.2} µs / the kernel's conntrack {kernels:.2} µs"),
            NOISE,
            Some((mine / kernels, uncertainty)),
        );
    }
    targets
}
