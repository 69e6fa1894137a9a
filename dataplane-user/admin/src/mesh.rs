//! Metrics of a mesh.

use std::{fmt, time::Duration};

use prometheus_client::{encoding::DescriptorEncoder, metrics::MetricType};
use proxy::Observer;
use relay::{Flag, Shown, encode_connections};

use super::state::State;

/// Workloads that are not captured as configured; and captured connections, relayed by the proxy or direct, under the
/// same names.
pub fn encode(state: &State, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    problems(state, encoder)?;
    let direct = state.direct();
    let proxy = state.proxy.get();
    if direct.is_idle() && proxy.is_none() {
        return Ok(());
    }
    let mut all = proxy.map(Observer::connections).unwrap_or_default();
    for (labels, series) in direct.ledger().iter() {
        *all.entry(labels.clone()).or_default() += series.totals;
    }
    let snapshot = state.served().snapshot;
    encode_connections(&all, &snapshot, encoder)?;
    let mut metric = encoder.encode_descriptor(
        "dataplane_direct_connection_seconds",
        "Total open time of direct connections: captured, but without the proxy (mode kernel)",
        None,
        MetricType::Counter,
    )?;
    let all = direct.ledger().iter();
    for (labels, series) in all.filter(|(labels, _)| labels.key.flag == Flag::None) {
        let seconds = Duration::from_nanos(series.nanoseconds).as_secs_f64();
        let snapshot = &snapshot;
        metric
            .encode_family(&Shown { labels, snapshot })?
            .encode_counter::<[(&str, &str); 0], f64, f64>(&seconds, None)?;
    }
    drop(direct);
    match proxy {
        Some(proxy) => proxy.encode(encoder),
        None => Ok(()),
    }
}

/// One series for each workload with a problem.
fn problems(state: &State, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let workloads = state.mesh().items;
    let mut metric = encoder.encode_descriptor(
        "dataplane_mesh_workload_problem",
        "1 for each workload that is not captured as its rules ask; `dataplane status` says why",
        None,
        MetricType::Gauge,
    )?;
    for workload in workloads.iter().filter(|w| w.problem.is_some()) {
        metric
            .encode_family(&[
                ("namespace", workload.namespace.as_str()),
                ("workload", workload.name.as_str()),
                (
                    "cause",
                    if workload.problem_of_node {
                        "node"
                    } else {
                        "workload"
                    },
                ),
            ])?
            .encode_gauge(&1i64)?;
    }
    Ok(())
}
