//! Prometheus metrics. docs/metrics.md lists them for people.
//!
//! What the kernel counts is read when somebody scrapes, and not kept up to date in between.

use std::{fmt, fs, sync::Arc};

use dataplane_common::{Reason, packet::PacketConfig};
use nix::sys::resource::{Resource, getrlimit};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, MetricEncoder},
    metrics::MetricType,
    registry::Registry,
};

use super::{
    counters::{self, PortKey},
    flows::Walk,
    mesh,
    state::{self, State},
};
use crate::{
    kernel::{self, conntrack::Conntrack},
    source::{
        Health,
        kubernetes::{Kind, KindHealth},
    },
};

/// What `GET /metrics` shows.
pub fn registry(state: &Arc<State>) -> Registry {
    let mut registry = Registry::default();
    registry.register(
        "dataplane_sync_duration_seconds",
        "How long it took to bring the kernel's tables in line with a change",
        state.sync_duration.clone(),
    );
    registry.register(
        "dataplane_sync_errors",
        "Times that the kernel's tables could not be brought in line with a change",
        state.sync_errors.clone(),
    );
    registry.register(
        "dataplane_change_duration_seconds",
        "How long it took from the arrival of a change of the Kubernetes API to the kernel's tables",
        state.change_duration.clone(),
    );
    registry.register_collector(Box::new(Scrape(Arc::clone(state))));
    registry
}

/// Reads what is not counted here.
#[derive(Debug)]
struct Scrape(Arc<State>);

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let state = &*self.0;
        agent(state, &mut encoder)?;
        source(state, &mut encoder)?;
        services(state, &mut encoder)?;
        flows(state, &mut encoder)?;
        mesh::encode(state, &mut encoder)?;
        in_kernel(state, &mut encoder)
    }
}

fn agent(state: &State, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let snapshot = state.snapshot();
    let mut number = |name, help, value: i64| {
        encoder
            .encode_descriptor(name, help, None, MetricType::Gauge)?
            .encode_gauge(&value)
    };
    number(
        "dataplane_services",
        "Services that this node knows",
        signed(snapshot.services.len()),
    )?;
    number(
        "dataplane_endpoints",
        "Endpoints of all services' ports",
        signed(state::endpoints(&snapshot)),
    )?;
    number(
        "dataplane_conflicts",
        "Frontends that several services claim; the oldest service serves them",
        signed(state.conflicts()),
    )?;
    number(
        "dataplane_problems",
        "What was not served as written; `dataplane status` names it",
        signed(state.problems()),
    )?;
    number(
        "dataplane_ready",
        "1 once the kernel's tables were brought in line with the source, if no fault of the node's keeps the \
         mesh's proxy from taking connections",
        i64::from(state.not_ready_because().is_none()),
    )?;
    number(
        "dataplane_last_sync_timestamp_seconds",
        "When the kernel's tables were last brought in line with the source; 0: never",
        signed(state.last_sync().unwrap_or_default()),
    )?;
    number(
        "dataplane_start_time_seconds",
        "When the agent started",
        signed(state.started()),
    )?;
    // Before the agent has looked, nothing is said.
    if let Some(pods) = state.pods() {
        number(
            "dataplane_pods_outside_cgroup",
            "Pods of this node whose sockets are in other cgroups than the one that the programs are attached to: \
             they are served by their packets only",
            signed(pods.outside),
        )?;
        number(
            "dataplane_pods_without_cgroup",
            "Pods of this node whose sockets the agent does not see: they may be in any cgroup",
            signed(pods.unknown),
        )?;
    }
    // Without a file to ask by, nothing is said.
    if let Ok(entries) = fs::read_dir("/proc/self/fd") {
        number(
            "dataplane_open_files",
            "Open files of the agent",
            signed(entries.count()),
        )?;
    }
    if let Ok((soft, _)) = getrlimit(Resource::RLIMIT_NOFILE) {
        number(
            "dataplane_open_files_max",
            "Open files that the agent may have",
            signed(soft),
        )?;
    }
    encoder
        .encode_descriptor(
            "dataplane_build_info",
            "Always 1; what runs is in the labels",
            None,
            MetricType::Gauge,
        )?
        .encode_family(&[
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
            ("layout", dataplane_common::LAYOUT.to_string()),
        ])?
        .encode_gauge(&1i64)
}

/// A figure of a kind.
type OfKind = fn(&KindHealth) -> u64;

/// How reading the source goes.
fn source(state: &State, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    encoder
        .encode_descriptor(
            "dataplane_source_errors",
            "Times that the source could not be read; what was read before is still served",
            None,
            MetricType::Counter,
        )?
        .encode_counter::<[(&str, &str); 0], u64, f64>(&state.source.failures(), None)?;
    let kubernetes = |source: &Health| match source {
        Health::Kubernetes { kinds, .. } => Some(Arc::clone(kinds)),
        _ => None,
    };
    let Some(health) = state.source.each().into_iter().find_map(kubernetes) else {
        return Ok(());
    };
    encoder
        .encode_descriptor(
            "dataplane_source_heard_timestamp_seconds",
            "When the API server last sent word, if only that nothing changed, of the kind that it \
             has been silent on the longest; 0: not everything was read yet",
            None,
            MetricType::Gauge,
        )?
        .encode_gauge(&signed(health.heard()))?;
    encoder
        .encode_descriptor(
            "dataplane_source_watching",
            "1 if every kind is being watched, 0 if not",
            None,
            MetricType::Gauge,
        )?
        .encode_gauge(&i64::from(health.is_watching()))?;
    let columns: [(&str, &str, OfKind); 4] = [
        (
            "dataplane_source_lists",
            "Times that all objects of a kind were read",
            KindHealth::lists,
        ),
        (
            "dataplane_source_watches",
            "Watches that were begun",
            KindHealth::watches,
        ),
        (
            "dataplane_source_events",
            "Changes that watches told of",
            KindHealth::events,
        ),
        (
            "dataplane_source_failures",
            "Lists and watches that did not work",
            KindHealth::failures,
        ),
    ];
    for (name, help, value) in columns {
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for kind in Kind::ALL {
            count(
                &mut metric,
                &[("resource", kind.resource())],
                value(health.of(kind)),
            )?;
        }
    }
    Ok(())
}

fn services(state: &State, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let counters = state.counters();
    let mut metric = encoder.encode_descriptor(
        "dataplane_connections",
        "Connections, and datagrams of unconnected sockets, that were sent to an endpoint",
        None,
        MetricType::Counter,
    )?;
    for service in state.snapshot().services.values() {
        let vips = service.cluster_ips.len()
            + service.external_ips.len()
            + service.load_balancer_ips.len();
        for port in &service.ports {
            // A headless service has no connections to count, rather than none so far.
            if vips == 0 && port.node_port.is_none() {
                continue;
            }
            let key = PortKey {
                service: service.name.clone(),
                port: Some((port.port, port.protocol)),
            };
            count(&mut metric, &labels(&key), counters.get(&key).translated)?;
        }
    }
    let mut metric = encoder.encode_descriptor(
        "dataplane_refusals",
        "Connections and datagrams that were refused; port and protocol are empty if it was for a \
         port that the service does not have",
        None,
        MetricType::Counter,
    )?;
    for (key, stats) in counters.iter() {
        // A series for what never happened would multiply their number by four.
        for (reason, refused) in counters::refusals(stats)
            .into_iter()
            .filter(|(_, n)| *n > 0)
        {
            count(
                &mut metric,
                &(labels(key), [("reason", reason.word())]),
                refused,
            )?;
        }
    }
    Ok(())
}

/// What became of flows and sockets. How many flows there are is what the last walk through all of
/// them found, some seconds ago: to count a million at each scrape would be dear.
fn flows(state: &State, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    if let Some(Walk { census, took, at }) = state.flows.last() {
        let mut metric = encoder.encode_descriptor(
            "dataplane_flows",
            "Flows of the packet path, by protocol and state, when they were last looked at",
            None,
            MetricType::Gauge,
        )?;
        for ((protocol, flow_state), number) in &census.flows {
            metric
                .encode_family(&[
                    ("protocol", protocol.to_string()),
                    ("state", flow_state.to_string()),
                ])?
                .encode_gauge(&signed(*number))?;
        }
        encoder
            .encode_descriptor(
                "dataplane_flows_walk_seconds",
                "How long it took to look at all flows, rests not counted",
                None,
                MetricType::Gauge,
            )?
            .encode_gauge(&took.as_secs_f64())?;
        encoder
            .encode_descriptor(
                "dataplane_flows_walked_timestamp_seconds",
                "When all flows were last looked at",
                None,
                MetricType::Gauge,
            )?
            .encode_gauge(&signed(at))?;
        let most = census.ports.iter().map(|ports| ports.used).max();
        for (name, help, number) in [
            (
                "dataplane_masquerade_ports",
                "Ports of the node's that masqueraded flows to one endpoint have: the most that any endpoint has",
                most.unwrap_or_default(),
            ),
            (
                "dataplane_masquerade_ports_limit",
                "Ports of the node's that masqueraded flows to one endpoint may have",
                PacketConfig::PORTS,
            ),
        ] {
            encoder
                .encode_descriptor(name, help, None, MetricType::Gauge)?
                .encode_gauge(&signed(number))?;
        }
    }
    let mut metric = encoder.encode_descriptor(
        "dataplane_flows_removed",
        "Flows that the agent removed: idle for longer than they are kept, or leading to an \
         endpoint that went away",
        None,
        MetricType::Counter,
    )?;
    for (why, number) in state.flows.removed() {
        count(&mut metric, &[("why", why)], number)?;
    }
    let mut metric = encoder.encode_descriptor(
        "dataplane_sockets_destroyed",
        "Sockets that were destroyed since the endpoint that they were connected to went away",
        None,
        MetricType::Counter,
    )?;
    for (protocol, number) in state.flows.sockets() {
        count(&mut metric, &[("protocol", protocol)], number)?;
    }
    Ok(())
}

/// What cannot be read is not shown: an absent series can be alerted on, a wrong one misleads.
fn in_kernel(state: &State, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    if let Ok(tables) = kernel::Tables::open(&state.paths.bpffs) {
        tables_in_kernel(&tables, state, encoder)?;
    }
    if let Ok(attachments) = kernel::attachments(&state.paths) {
        let mut metric = encoder.encode_descriptor(
            "dataplane_program_attached",
            "1 if the kernel says that the program is attached, 0 if not",
            None,
            MetricType::Gauge,
        )?;
        for attachment in &attachments {
            let labels = [("program", attachment.program)];
            let attached = i64::from(attachment.problem.is_none());
            metric.encode_family(&labels)?.encode_gauge(&attached)?;
        }
    }
    Ok(())
}

/// A figure of a table.
type Column = fn(&kernel::Usage) -> u64;

fn tables_in_kernel(
    tables: &kernel::Tables,
    state: &State,
    encoder: &mut DescriptorEncoder<'_>,
) -> fmt::Result {
    if let Ok(reasons) = tables.reasons() {
        let mut metric = encoder.encode_descriptor(
            "dataplane_verdicts",
            "What the programs decided, by reason, since the tables were made",
            None,
            MetricType::Counter,
        )?;
        for &reason in Reason::ALL {
            count(
                &mut metric,
                &[("reason", reason.word())],
                reasons[reason as usize],
            )?;
        }
    }
    let Ok(usage) = tables.usage(state.limits) else {
        return Ok(());
    };
    let conntrack = Conntrack::open(&state.paths.bpffs).unwrap_or_default();
    encoder
        .encode_descriptor(
            "dataplane_packet_path",
            "Whether the packet path is on: 0 if not, and then there are no flows",
            None,
            MetricType::Gauge,
        )?
        .encode_gauge(&i64::from(conntrack.is_some()))?;
    let counted = state.flows.last().map(|walk| walk.census.total());
    let flows = conntrack.map(|conntrack| conntrack.usage(counted.unwrap_or_default()));
    let columns: [(&str, &str, Column); 4] = [
        (
            "dataplane_table_entries",
            "Entries in use in a kernel table",
            |t| t.used.into(),
        ),
        (
            "dataplane_table_capacity",
            "Entries that a kernel table has room for; it is made larger when that is not enough",
            |t| t.capacity.into(),
        ),
        (
            "dataplane_table_limit",
            "Entries that a kernel table may at most be given room for",
            |t| t.limit.into(),
        ),
        (
            "dataplane_table_bytes",
            "Memory that a kernel table takes, about",
            |t| t.bytes,
        ),
    ];
    for (name, help, value) in columns {
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        // Not known is not none.
        let is_known = counted.is_some() || name != "dataplane_table_entries";
        let flows = flows.iter().filter(|_| is_known);
        for table in usage.iter().chain(flows) {
            metric
                .encode_family(&[("table", table.table)])?
                .encode_gauge(&signed(value(table)))?;
        }
    }
    Ok(())
}

fn labels(key: &PortKey) -> [(&'static str, String); 4] {
    let (port, protocol) = match key.port {
        Some((port, protocol)) => (port.to_string(), protocol.word()),
        None => (String::new(), ""),
    };
    [
        ("namespace", key.service.namespace().to_owned()),
        ("service", key.service.name().to_owned()),
        ("port", port),
        ("protocol", protocol.to_owned()),
    ]
}

fn count(metric: &mut MetricEncoder<'_>, labels: &impl EncodeLabelSet, value: u64) -> fmt::Result {
    metric
        .encode_family(labels)?
        .encode_counter::<[(&str, &str); 0], u64, f64>(&value, None)
}

/// Gauges are signed.
fn signed(value: impl TryInto<i64>) -> i64 {
    value.try_into().unwrap_or(i64::MAX)
}
