//! `bench packet`: services reached by packets: from outside, and from pods whose sockets the agent does not see.

mod programs;
mod stage;

use std::time::{Duration, Instant};

use dataplane_peers::Mode;

use crate::{
    extent::{Extent, order},
    measurement::{self, Measurement, Name, Samples, complain_of_noise, figures, paced},
    node_worker::Worker,
    rows::{Row, Target, find, most_services, thousands, uncertainty},
    say,
    socket::{MOST, MUCH, NOISE},
    stats::median,
    worker::{Job, Transport, WARM_UP},
};
use programs::Taken;
use stage::{Case, Lane, Stage};

/// The cases, in order.
const CASES: [(&str, Case); 4] = [
    ("nodeport-local", Case::NodePortLocal),
    ("nodeport-local6", Case::NodePortLocal6),
    ("nodeport-remote", Case::NodePortRemote),
    ("clusterip-packet", Case::ClusterIpPacket),
];
/// The names of the cases. `FLOW` is about single flows, `MANY` about many.
pub const CASE_NAMES: [&str; 6] = [CASES[0].0, CASES[1].0, CASES[2].0, CASES[3].0, FLOW, MANY];
/// A connection to a node port with local endpoints, among 100 000 other flows (`--quick`: 12 500).
const MANY: &str = "many-flows";
/// Metrics of the first datagram of a flow.
const FIRST: &[(&str, &str)] = &[("first_p50", "µs")];
/// Metrics of a later datagram of a flow.
const LATER: &[(&str, &str)] = &[("later_p50", "µs")];
/// The case of a datagram to a node port with local endpoints, as the first of its flow and as a later one.
const FLOW: &str = "flow";

/// The whole benchmark. Several agents have one service, and make one row. The place of a program's code in memory
/// changes the cost of a connection by up to 5 %, more than the differences to measure
/// (`docs/measurements/code-placement.md`). The agents start in random order, because the order of loading decides the
/// place.
pub const FULL: Extent = Extent {
    ours: &[1, 1, 1, 1, 1, 1_000, 10_000, MOST],
    theirs: &[1, 1_000, 10_000],
    at_least: 7,
    at_most: 25,
    budget: Duration::from_mins(3),
    fraction: 1,
};
/// A short benchmark, within half a minute.
pub const QUICK: Extent = Extent {
    ours: &[1, 1, 1, 10_000],
    theirs: &[1, 1_000],
    at_least: 3,
    at_most: 7,
    budget: Duration::from_secs(9),
    fraction: 8,
};

fn lanes(extent: &Extent) -> Vec<Lane> {
    let lane = |worker, services| Lane { worker, services };
    let mut lanes = vec![lane(Worker::Plain, 0), lane(Worker::Conntrack, 0)];
    lanes.extend(extent.ours.iter().map(|of| lane(Worker::Dataplane, *of)));
    lanes.push(lane(Worker::Tracked, 1));
    let few_and_many = [extent.theirs.first(), extent.theirs.last()];
    lanes.extend(
        few_and_many
            .into_iter()
            .flatten()
            .map(|of| lane(Worker::Stack, *of)),
    );
    for mode in Mode::ALL {
        let worker = Worker::Peer(mode);
        lanes.extend(extent.theirs.iter().map(|of| lane(worker, *of)));
    }
    lanes
}

/// Returns whether `other` is measured right after `what`, lane by lane. The cost of a new flow is the difference of
/// the two, and the machine's speed varies by more than this difference from one second to the next.
fn goes_with(what: &Measurement<Case>, other: &Measurement<Case>) -> bool {
    what.case.0 == FLOW && other.case.0 == FLOW
}

/// Returns into how many parts a round divides the measurement of a case. In each part every lane has one turn.
fn parts(case: &str) -> usize {
    if case == FLOW { 3 } else { 1 }
}

fn measurements(fraction: u32) -> Vec<Measurement<Case>> {
    let connect = Job::Connect {
        count: 600 / fraction,
    };
    let trips = Job::RoundTrip {
        count: 1000 / fraction,
        connections: 1,
    };
    let steady = Job::Steady {
        bytes: (128 << 20) / u64::from(fraction),
    };
    let paced = paced(Duration::from_millis(320 / u64::from(fraction)));
    let mut all = vec![];
    for (metrics, transport, job) in [
        (measurement::CONNECT, Transport::Tcp, connect),
        (measurement::ROUND_TRIP, Transport::Tcp, trips),
        (measurement::BULK, Transport::Tcp, steady),
        (measurement::PACED, Transport::Udp, paced),
    ] {
        all.extend(CASES.map(|case| Measurement {
            case,
            transport,
            job,
            metrics,
        }));
    }
    let flow = (FLOW, Case::NodePortLocal);
    for (metrics, job) in [(FIRST, connect), (LATER, trips)] {
        all.push(Measurement {
            case: flow,
            transport: Transport::Udp,
            job,
            metrics,
        });
    }
    all
}

/// Returns the measurements of a connection while the tables hold more flows than fit into the CPU's caches.
fn among_many(fraction: u32) -> [Measurement<Case>; 2] {
    let case = (MANY, Case::NodePortLocal);
    let connect = Job::Connect {
        count: 2400 / fraction,
    };
    let trips = Job::RoundTrip {
        count: 1000 / fraction,
        connections: 4,
    };
    [
        (measurement::CONNECT, connect),
        (measurement::ROUND_TRIP, trips),
    ]
    .map(|(metrics, job)| Measurement {
        case,
        transport: Transport::Tcp,
        job,
        metrics,
    })
}

/// Makes one measurement on one lane. After a failure, reports it on stderr and returns no figures.
fn measure(stage: &mut Stage, lane: usize, what: &Measurement<Case>) -> anyhow::Result<Vec<f64>> {
    let (name, case) = what.case;
    let before = stage.cpu(lane)?;
    let outputs = stage.measure(lane, case, what.transport, what.job);
    let cpu = stage.cpu(lane)? - before;
    Ok(match outputs {
        Ok(outputs) => figures(what.job, &outputs, cpu),
        Err(error) => {
            let lane = stage.lanes[lane];
            let (path, of) = (lane.worker.path(), thousands(lane.services));
            say!(
                "{path}, {of} services: {name} {}: {error:#}",
                what.metrics[0].0
            );
            vec![]
        }
    })
}

/// Compares the paths.
///
/// # Errors
///
/// Fails if the machine lacks a program, or if a path does not work.
pub fn run(extent: &Extent) -> anyhow::Result<Vec<Row>> {
    say!("building the lab: a node for each path, loading its rules or tables");
    let mut stage = Stage::build(&lanes(extent))?;
    let lanes = stage.lanes.len();
    let names = stage.lanes.iter();
    let names: Vec<_> = names
        .map(|lane| (lane.worker.path(), lane.services))
        .collect();
    let measurements = measurements(extent.fraction);
    let mut samples: Vec<Samples> = measurements
        .iter()
        .map(|what| what.samples(lanes))
        .collect();
    let start = Instant::now();
    let mut rounds = 0;
    while extent.has_another(rounds, start) {
        for samples in samples.iter_mut().flatten().flatten() {
            samples.push(vec![]);
        }
        let mut of_group = &mut samples[..];
        for group in measurements.chunk_by(goes_with) {
            let samples;
            (samples, of_group) = of_group.split_at_mut(group.len());
            for lane in (0..parts(group[0].case.0)).flat_map(|_| order(lanes)) {
                for (what, samples) in group.iter().zip(&mut *samples) {
                    if !stage.measures(lane, what.case.1) {
                        continue;
                    }
                    let figures = measure(&mut stage, lane, what)?;
                    for (figure, samples) in figures.into_iter().zip(samples) {
                        samples[lane][rounds].push(figure);
                    }
                }
            }
        }
        rounds += 1;
        say!("round {rounds} of at most {}", extent.at_most);
    }

    let mut rows = vec![];
    for (what, samples) in measurements.iter().zip(&samples) {
        let (case, at) = what.case;
        let turns = rounds * parts(case);
        let has = |lane| stage.measures(lane, at);
        rows.extend(what.rows("packet", &names, samples, turns, has)?);
    }
    say!("measuring the time in the kernel programs");
    rows.extend(programs(&mut stage, extent.fraction)?);
    rows.extend(many(&mut stage, &names, extent.fraction)?);
    complain_of_noise(
        &rows,
        &["connect_p50", "rtt_p50", "gbit_per_s", "first_p50"],
        MUCH,
    );
    Ok(rows)
}

/// Measures a connection among many flows, on one lane of each path that has at most one service.
fn many(stage: &mut Stage, names: &[Name], fraction: u32) -> anyhow::Result<Vec<Row>> {
    const TURNS: usize = 3;
    // With two destinations this makes 100 000 flows. The kernel's conntrack and the agent's keep a flow without
    // answers for 30 s; the measurement takes less.
    let flows = Job::Flows {
        ports: 50_000 / u16::try_from(fraction)?,
    };
    let first = |lane: &usize| names[*lane].1 <= 1 && !names[..*lane].contains(&names[*lane]);
    let of_interest: Vec<usize> = (0..names.len()).filter(first).collect();
    let has = |lane: usize| of_interest.contains(&lane);
    let measurements = among_many(fraction);
    let mut samples: Vec<Samples> = measurements
        .iter()
        .map(|what| what.samples(names.len()))
        .collect();
    for lane in &of_interest {
        let begun = stage.measure(*lane, Case::NodePorts, Transport::Udp, flows)?;
        say!(
            "{}: measuring a connection among {:.0} flows",
            names[*lane].0,
            begun.first().unwrap_or(&0.0)
        );
        for _ in 0..TURNS {
            for (what, samples) in measurements.iter().zip(&mut samples) {
                let figures = measure(stage, *lane, what)?;
                for (number, samples) in samples.iter_mut().enumerate() {
                    samples[*lane].push(figures.get(number).copied().into_iter().collect());
                }
            }
        }
    }
    let rows = measurements.iter().zip(&samples);
    let rows = rows.map(|(what, samples)| what.rows("packet", names, samples, TURNS, has));
    Ok(rows.collect::<anyhow::Result<Vec<_>>>()?.concat())
}

/// Measures the time that the agent's programs take, with one service: for a connection from its SYN to its RST, for a
/// round trip, and for a datagram with its answer.
fn programs(stage: &mut Stage, fraction: u32) -> anyhow::Result<Vec<Row>> {
    const ROUNDS: usize = 2;
    let count = 2_000 / fraction;
    let with_one = Lane {
        worker: Worker::Dataplane,
        services: 1,
    };
    let lanes = (0..stage.lanes.len()).filter(|lane| stage.lanes[*lane] == with_one);
    let lanes: Vec<usize> = lanes.collect();
    let (connect, trip) = (
        Job::Connect { count },
        Job::RoundTrip {
            count,
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
                let (time, called) = Taken::now(numbers)?.since(before, count + WARM_UP);
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
            failed: 0,
            rounds: vec![times],
        });
    }
    Ok(rows)
}

/// Returns the targets, each with the measured value.
pub fn targets(rows: &[Row]) -> Vec<Target> {
    let most = most_services(rows);
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
    // For metrics that are better the higher they are, use the inverse ratio.
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
        add(
            format!("{case} {}plain, with conntrack", metrics[0].1),
            1.03,
            over(
                value("dataplane-conntrack", 1, case, metrics[0].0),
                plain(case, metrics[0].0),
            ),
        );
        for services in FULL.theirs {
            for (metric, what) in [metrics[0], metrics[1]] {
                let mine = value("dataplane-stack", *services, case, metric);
                let with = thousands(*services);
                add(
                    format!("{case} {what}kube-proxy's best mode, {with}, through the stack"),
                    1.0,
                    over(mine, best(*services, case, metric)),
                );
            }
        }
        for (metric, what) in metrics {
            add(
                format!("{case} {what}one service's, of {}", thousands(most)),
                1.05,
                over(ours(most, case, metric), ours(1, case, metric)),
            );
            for services in FULL.theirs {
                let mine = ours(*services, case, metric).or(ours(most, case, metric));
                let with = thousands(*services);
                add(
                    format!("{case} {what}kube-proxy's best mode, {with}"),
                    1.0,
                    over(mine, best(*services, case, metric)),
                );
            }
        }
    }
    targets.extend(making_a_flow(rows));
    targets
}

/// Returns the target for the cost of making a flow: the first datagram's time minus a later datagram's. It compares it with the
/// cost in the kernel's conntrack.
fn making_a_flow(rows: &[Row]) -> Option<Target> {
    let value = |path, services, metric| find(rows, path, services, FLOW, metric);
    let added = |path, services| {
        let first = value(path, services, "first_p50")?;
        let later = value(path, services, "later_p50")?;
        let rounds = first.by_round().zip(later.by_round());
        Some(rounds.map(|(first, later)| Some(first? - later?)))
    };
    let (ours, plain) = (added("dataplane", 1)?, added("plain", 0)?);
    // Both costs include the cost of a new socket. Subtract it: the plain path has only this cost.
    let rounds = ours.zip(added("conntrack", 0)?).zip(plain);
    let rounds = rounds.filter_map(|((a, b), plain)| Some((a? - plain?, b? - plain?)));
    let (mut ours, mut theirs): (Vec<f64>, Vec<f64>) = rounds.unzip();
    let uncertainty = uncertainty(&mut ours).hypot(uncertainty(&mut theirs));
    let (mine, kernels) = (median(&mut ours), median(&mut theirs));
    Some(Target {
        what: format!("making a flow: ours {mine:.2} µs / the kernel's conntrack {kernels:.2} µs"),
        value: mine / kernels,
        at_most: NOISE,
        uncertainty,
    })
}
