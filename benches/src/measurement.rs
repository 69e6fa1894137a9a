//! A measurement of paths: a job, and the figures computed from its outputs and its CPU time.

use std::time::Duration;

use anyhow::ensure;

use crate::{
    rows::{Rounds, Row},
    say,
    stats::median,
    worker::{Job, Transport},
};

/// A job and its metrics. `At` names the client and the addresses that the client dials.
#[derive(Clone, Copy, Debug)]
pub struct Measurement<At> {
    /// `case` of the rows, and its client and addresses.
    pub case: (&'static str, At),
    /// The transport protocol.
    pub transport: Transport,
    /// The client's job.
    pub job: Job,
    /// Name and unit of each figure of [`figures`].
    pub metrics: &'static [(&'static str, &'static str)],
}

/// Metrics of [`Job::Connect`].
pub const CONNECT: &[(&str, &str)] = &[("connect_p50", "µs"), ("connect_p99", "µs")];
/// Metrics of [`Job::RoundTrip`].
pub const ROUND_TRIP: &[(&str, &str)] = &[("rtt_p50", "µs"), ("rtt_p99", "µs")];
/// Metrics of [`Job::Query`].
pub const QUERY: &[(&str, &str)] = &[("query_p50", "µs"), ("query_p99", "µs")];
/// Metrics of [`Job::Churn`].
pub const CHURN: &[(&str, &str)] = &[("conn_per_s", "1/s"), ("cpu_us_per_conn", "µs")];
/// Metrics of [`Job::Crowd`].
pub const CROWD: &[(&str, &str)] = &[
    ("crowd_per_s", "1/s"),
    ("crowd_p99", "µs"),
    ("crowd_cpu_us_per_conn", "µs"),
];
/// Metrics of [`Job::Bulk`] and [`Job::Steady`].
pub const BULK: &[(&str, &str)] = &[("gbit_per_s", "Gbit/s"), ("cpu_s_per_gb", "s/GB")];
/// Metrics of [`Job::Paced`].
pub const PACED: &[(&str, &str)] = &[("cpu_us_per_packet", "µs")];

/// Returns a job's figures, computed from its outputs and from the CPU time in seconds of client, servers and agent.
#[expect(clippy::cast_precision_loss, reason = "below 2^52 bytes")]
pub fn figures(job: Job, outputs: &[f64], cpu: f64) -> Vec<f64> {
    match (job, outputs) {
        (Job::Churn { count, .. }, [rate]) => vec![*rate, cpu * 1e6 / f64::from(count)],
        (Job::Crowd { .. }, [rate, p99, made]) => vec![*rate, *p99, cpu * 1e6 / made],
        (Job::Paced { .. }, [sent]) => vec![cpu * 1e6 / sent],
        (Job::Bulk { bytes } | Job::Steady { bytes }, [rate]) => {
            vec![*rate, cpu * 1e9 / bytes as f64]
        }
        _ => outputs.to_vec(),
    }
}

/// The figures of one measurement, by metric, lane and round. A failed turn has no figure.
pub type Samples = Vec<Vec<Rounds>>;

/// A path and its number of services.
pub type Name = (&'static str, u32);

impl<At> Measurement<At> {
    /// Returns empty samples for this many lanes.
    pub fn samples(&self, lanes: usize) -> Samples {
        vec![vec![vec![]; lanes]; self.metrics.len()]
    }

    /// Returns the rows. `turns` is the number of turns of each lane; `has` returns whether a lane was measured. Lanes
    /// with equal names are copies of one path, and make one row. The first lane is the baseline.
    ///
    /// # Errors
    ///
    /// Fails if a path failed in more than a quarter of its turns, because the median would hide this.
    pub fn rows(
        &self,
        bench: &'static str,
        lanes: &[Name],
        samples: &Samples,
        turns: usize,
        has: impl Fn(usize) -> bool,
    ) -> anyhow::Result<Vec<Row>> {
        let mut rows = vec![];
        for ((metric, unit), samples) in self.metrics.iter().zip(samples) {
            let baseline = median(&mut samples[0].concat());
            for (number, name) in lanes.iter().enumerate() {
                if lanes[..number].contains(name) {
                    continue;
                }
                let alike = |other: &usize| lanes[*other] == *name && has(*other);
                let alike: Vec<usize> = (number..lanes.len()).filter(alike).collect();
                if alike.is_empty() {
                    continue;
                }
                let rounds = alike.iter().map(|lane| samples[*lane].len()).max();
                let of_round = |round: usize| -> Vec<f64> {
                    let of_lane = |lane: &usize| samples[*lane].get(round).cloned();
                    alike.iter().filter_map(of_lane).flatten().collect()
                };
                let rounds: Rounds = (0..rounds.unwrap_or(0)).map(of_round).collect();
                let mut values = rounds.concat();
                let of = turns * alike.len();
                let failed = of.saturating_sub(values.len());
                let (path, services) = *name;
                ensure!(
                    failed * 4 <= of,
                    "{path} with {services} services: {} {metric} failed in {failed} of {of} turns; see above",
                    self.case.0
                );
                let value = median(&mut values);
                rows.push(Row {
                    bench,
                    path,
                    case: self.case.0,
                    services,
                    metric,
                    unit,
                    value,
                    baseline: Some("plain"),
                    ratio: Some(value / baseline),
                    failed,
                    rounds,
                });
            }
        }
        Ok(rows)
    }
}

/// Returns the job that sends 40 000 datagrams of 64 bytes a second. At this rate a CPU is idle most of the time on
/// every path.
pub fn paced(time: Duration) -> Job {
    Job::Paced {
        per_milli: 40,
        millis: u32::try_from(time.as_millis()).unwrap_or(u32::MAX),
    }
}

/// Reports metrics that differ more between rounds than on a quiet machine.
pub fn complain_of_noise(rows: &[Row], metrics: &[&str], much: f64) {
    for metric in metrics {
        let of_metric = rows.iter().filter(|row| row.metric == *metric);
        let differ = median(&mut of_metric.map(Row::spread).collect::<Vec<_>>());
        if differ > much {
            say!(
                "{metric} differs by ±{:.0}% between rounds, because other programs kept the machine \
                 busy: small differences between paths mean nothing",
                differ * 100.0
            );
        }
    }
}
