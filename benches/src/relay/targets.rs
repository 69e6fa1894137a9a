//! The targets of `bench relay`.

use super::{CASES, HANDSHAKES, IDLE, PER_GB, ROUND_TRIP, THROUGHPUT};
use crate::rows::{Row, Target, find};

/// What tunnels have to reach beside ztunnel.
struct Bar {
    what: &'static str,
    cases: &'static [&'static str],
    metric: &'static str,
    /// Whether more is better.
    more: bool,
    /// Ours by ztunnel's: what has to be, and what is aimed at.
    ratios: [f64; 2],
}

const BARS: [Bar; 6] = [
    Bar {
        what: "throughput",
        cases: &["bulk", "bulk-1cpu"],
        metric: THROUGHPUT.0,
        more: true,
        ratios: [1.15, 1.6],
    },
    Bar {
        what: "CPU per GB",
        cases: &["bulk", "bulk-1cpu"],
        metric: PER_GB.metric,
        more: false,
        ratios: [0.85, 0.6],
    },
    Bar {
        what: "round trip",
        cases: &["rtt", "rtt-1cpu"],
        metric: ROUND_TRIP.0,
        more: false,
        ratios: [1.0, 0.8],
    },
    Bar {
        what: "connections/s",
        cases: &["conn"],
        metric: "conn_per_s",
        more: true,
        ratios: [1.15, 1.6],
    },
    Bar {
        what: "handshakes/s",
        cases: &["handshake"],
        metric: HANDSHAKES.0,
        more: true,
        ratios: [1.0, 1.3],
    },
    Bar {
        what: "KiB per idle connection",
        cases: &["idle-2000", "idle-9000"],
        metric: "kib_per_conn",
        more: false,
        ratios: [0.6, 0.3],
    },
];

/// Returns the targets, each with the measured value.
pub fn targets(rows: &[Row]) -> Vec<Target> {
    let value = |path, case, metric| find(rows, path, 0, case, metric);
    let mut targets = vec![];
    let mut add = |what: &str, over: Option<&Row>, under: Option<&Row>, at_most: f64| {
        if let (Some(over), Some(under)) = (over, under) {
            let (value, uncertainty) = over.over(under);
            targets.push(Target {
                what: what.to_owned(),
                value,
                at_most,
                uncertainty,
            });
        }
    };
    // For metrics that are better the higher they are, use the inverse ratio.
    add(
        "throughput, one CPU: HAProxy's / ours",
        value("haproxy", "bulk-1cpu", "gbit_per_s"),
        value("dataplane", "bulk-1cpu", "gbit_per_s"),
        1.0 / 1.3,
    );
    for case in ["bulk", "bulk-1cpu"] {
        add(
            &format!("CPU per GB, {case}: ours / HAProxy's"),
            value("dataplane", case, "cpu_s_per_gb"),
            value("haproxy", case, "cpu_s_per_gb"),
            0.6,
        );
    }
    for case in ["rtt", "rtt-1cpu"] {
        add(
            &format!("round trip, {case}: ours / HAProxy's"),
            value("dataplane", case, "rtt_p50"),
            value("haproxy", case, "rtt_p50"),
            0.95,
        );
    }
    add(
        "connections/s: nginx's / ours",
        value("nginx", "conn", "conn_per_s"),
        value("dataplane", "conn", "conn_per_s"),
        1.0 / 1.1,
    );
    for case in &CASES {
        let (metric, _) = case.rate;
        let [direct, kernel] =
            ["direct", "dataplane-kernel"].map(|path| value(path, case.name, metric));
        let (over, under, what) = if metric == ROUND_TRIP.0 {
            (kernel, direct, "mode: kernel / direct")
        } else {
            (direct, kernel, "direct / mode: kernel")
        };
        add(
            &format!("{metric}, {}: {what}", case.name),
            over,
            under,
            1.0 / 0.97,
        );
    }
    for bar in BARS {
        for case in bar.cases {
            let [ours, theirs] = ["hbone", "ztunnel"].map(|path| value(path, case, bar.metric));
            for (ratio, word) in bar.ratios.into_iter().zip(["must", "aim"]) {
                let what = format!("{word}: tunnels, {}, {case}", bar.what);
                if bar.more {
                    add(
                        &format!("{what}: ztunnel's / ours"),
                        theirs,
                        ours,
                        1.0 / ratio,
                    );
                } else {
                    add(&format!("{what}: ours / ztunnel's"), ours, theirs, ratio);
                }
            }
        }
    }
    for (case, count) in IDLE {
        if let Some(row) = value("dataplane", case, "kib_per_conn") {
            targets.push(Target {
                what: format!("KiB per idle connection, of {count}"),
                value: row.value,
                at_most: 3.5,
                uncertainty: 0.0,
            });
        }
    }
    targets
}
