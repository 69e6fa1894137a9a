//! Prometheus metrics. docs/metrics.md lists them for people.
//!
//! The agent reads the kernel's counters at each scrape, and does not update them in between.

use std::{collections::BTreeMap, fmt, fs, sync::Arc};

use dataplane_common::Reason;
use kernel::conntrack::Conntrack;
use model::ServiceName;
use nix::sys::resource::{Resource, getrlimit};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeGaugeValue, EncodeLabelSet, MetricEncoder},
    metrics::MetricType,
    registry::Registry,
};
use source::{
    Health,
    kubernetes::{Kind, KindHealth},
};

use super::{
    counters::{self, PortKey},
    flows::Walk,
    mesh, report,
    state::{self, State},
};

/// Returns the metrics that `GET /metrics` shows.
pub fn registry(state: &Arc<State>) -> Registry {
    let mut registry = Registry::default();
    registry.register(
        "dataplane_sync_duration_seconds",
        "Time from planning a change to its last write to the kernel's tables",
        state.sync_duration.clone(),
    );
    registry.register(
        "dataplane_sync_errors",
        "Failed attempts to bring the kernel's tables in line with the source",
        state.sync_errors.clone(),
    );
    registry.register(
        "dataplane_change_duration_seconds",
        "Time from the arrival of a change from the Kubernetes API to the kernel's tables",
        state.change_duration.clone(),
    );
    registry.register_collector(Box::new(Scrape(Arc::clone(state))));
    registry
}

/// Reads the figures that other parts and the kernel count, at each scrape.
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
        if let Some(dns) = state.dns.get() {
            dns.encode(&mut encoder)?;
        }
        in_kernel(state, &mut encoder)
    }
}

fn agent(state: &State, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let served = state.served();
    let snapshot = &served.snapshot;
    let mut number = |name, help, value: i64| gauge(encoder, name, help, &value);
    number(
        "dataplane_services",
        "Services that this node knows",
        signed(snapshot.services.len()),
    )?;
    number(
        "dataplane_endpoints",
        "Endpoints of all services' ports",
        signed(state::endpoints(snapshot)),
    )?;
    number(
        "dataplane_conflicts",
        "Frontends that several services claim; the strongest claim is served",
        signed(served.conflict_count()),
    )?;
    number(
        "dataplane_problems",
        "Objects or parts of objects that are not served as written; `dataplane status` names them",
        signed(state.problems()),
    )?;
    number(
        "dataplane_services_left_out",
        "Services left out of the kernel's tables, wholly or without endpoints, because their namespace exceeds its \
         budget; `dataplane status` names them",
        signed(served.left_out),
    )?;
    number(
        "dataplane_ready",
        "1 after the agent has first brought the kernel's tables in line with the source, if no fault of the node \
         keeps it from capturing a workload",
        i64::from(state.not_ready_because().is_none()),
    )?;
    number(
        "dataplane_last_sync_timestamp_seconds",
        "Time when the kernel's tables were last brought in line with the source; 0: never",
        signed(state.last_sync().unwrap_or_default()),
    )?;
    number(
        "dataplane_start_time_seconds",
        "Start time of the agent",
        signed(state.started()),
    )?;
    // Absent until the agent has looked.
    if let Some(pods) = state.pods() {
        number(
            "dataplane_pods_outside_cgroup",
            "Pods of this node whose sockets are outside of the cgroup that the programs are attached to; only the \
             packet path serves them",
            signed(pods.outside),
        )?;
        number(
            "dataplane_pods_without_cgroup",
            "Pods of this node whose sockets the agent does not see, so that their cgroup is unknown",
            signed(pods.unknown),
        )?;
    }
    // Absent if the agent has no file descriptor left to read the directory with.
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
            "Limit of the agent's open files",
            signed(soft),
        )?;
    }
    encoder
        .encode_descriptor(
            "dataplane_build_info",
            "Always 1; the labels name the version and the layout",
            None,
            MetricType::Gauge,
        )?
        .encode_family(&[
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
            ("layout", dataplane_common::LAYOUT.to_string()),
        ])?
        .encode_gauge(&1i64)
}

/// Reads a figure of a kind.
type OfKind = fn(&KindHealth) -> u64;

/// Writes the metrics of reading the source.
fn source(state: &State, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    encoder
        .encode_descriptor(
            "dataplane_source_errors",
            "Failed attempts to read the source; the agent keeps serving the last version that it read",
            None,
            MetricType::Counter,
        )?
        .encode_counter::<[(&str, &str); 0], u64, f64>(&state.source.failures(), None)?;
    let Health::Kubernetes { kinds: health, .. } = &state.source else {
        return Ok(());
    };
    gauge(
        encoder,
        "dataplane_source_heard_timestamp_seconds",
        "Time of the API server's last message, also if nothing changed, for the kind with the oldest one; 0: not \
         every kind has been read yet",
        &signed(health.heard()),
    )?;
    gauge(
        encoder,
        "dataplane_source_watching",
        "1 if the agent watches every kind, 0 if not",
        &i64::from(health.is_watching()),
    )?;
    let columns: [(&str, &str, OfKind); 4] = [
        (
            "dataplane_source_lists",
            "Complete lists of a kind that the agent read",
            KindHealth::lists,
        ),
        (
            "dataplane_source_watches",
            "Watches that the agent began",
            KindHealth::watches,
        ),
        (
            "dataplane_source_events",
            "Changes that the API server reported",
            KindHealth::events,
        ),
        (
            "dataplane_source_failures",
            "Failed lists and watches",
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

/// The most ports of services that have series of their own: some 2 MiB of a scrape.
const SERVICE_PORTS: usize = 10_000;

fn services(state: &State, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let counters = state.counters();
    let mut metric = encoder.encode_descriptor(
        "dataplane_connections",
        "Connections, and datagrams of unconnected sockets, that were sent to an endpoint",
        None,
        MetricType::Counter,
    )?;
    let snapshot = state.served().snapshot;
    let mut ports = Vec::new();
    for service in snapshot.services.values() {
        let vips = service.cluster_ips.len()
            + service.external_ips.len()
            + service.load_balancer_ips.len();
        for port in &service.ports {
            // A headless service has no VIP to count connections of, so it has no series.
            if vips == 0 && port.node_port.is_none() {
                continue;
            }
            let key = PortKey {
                service: service.name.clone(),
                port: Some((port.port, port.protocol)),
            };
            let translated = counters.get(&key).translated;
            ports.push((key, translated));
        }
    }
    let shown = counters::most_used(&ports, SERVICE_PORTS);
    let is_shown = |key: &PortKey| shown.as_ref().is_none_or(|shown| shown.contains(key));
    // The other ports of a namespace are one series.
    let other = |key: &PortKey| PortKey {
        service: ServiceName::new(key.service.namespace(), ""),
        port: None,
    };
    let mut others: BTreeMap<PortKey, u64> = BTreeMap::new();
    for (key, translated) in &ports {
        if is_shown(key) {
            count(&mut metric, &labels(key), *translated)?;
        } else {
            *others.entry(other(key)).or_default() += translated;
        }
    }
    for (key, translated) in &others {
        count(&mut metric, &labels(key), *translated)?;
    }
    let mut metric = encoder.encode_descriptor(
        "dataplane_refusals",
        "Connections and datagrams that were refused; port and protocol are empty for ports that the service does not \
         have",
        None,
        MetricType::Counter,
    )?;
    let mut others: BTreeMap<(PortKey, &str), u64> = BTreeMap::new();
    for (key, stats) in counters.iter() {
        // Series for reasons that never occurred would multiply the number of series by four.
        for (reason, refused) in counters::refusals(stats)
            .into_iter()
            .filter(|(_, n)| *n > 0)
        {
            if key.port.is_some() && !is_shown(key) {
                *others.entry((other(key), reason.word())).or_default() += refused;
                continue;
            }
            count(
                &mut metric,
                &(labels(key), [("reason", reason.word())]),
                refused,
            )?;
        }
    }
    for ((key, reason), refused) in &others {
        count(&mut metric, &(labels(key), [("reason", *reason)]), *refused)?;
    }
    Ok(())
}

/// Writes the metrics of flows and sockets. The number of flows is that of the last walk through all flows, some seconds
/// ago, because counting a million flows at each scrape would cost too much.
fn flows(state: &State, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    if let Some(Walk { census, took, at }) = state.flows.last() {
        let mut metric = encoder.encode_descriptor(
            "dataplane_flows",
            "Flows of the packet path by protocol and state, at the agent's last walk through them",
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
        gauge(
            encoder,
            "dataplane_flows_walk_seconds",
            "Duration of the last walk through all flows, without its pauses",
            &took.as_secs_f64(),
        )?;
        gauge(
            encoder,
            "dataplane_flows_walked_timestamp_seconds",
            "Time of the last walk through all flows",
            &signed(at),
        )?;
        let most = census.ports.iter().map(|ports| ports.used).max();
        gauge(
            encoder,
            "dataplane_masquerade_ports",
            "Ports of the node in use by masqueraded flows to one endpoint, for the endpoint that uses most",
            &signed(most.unwrap_or_default()),
        )?;
        gauge(
            encoder,
            "dataplane_masquerade_ports_limit",
            "Ports of the node that masqueraded flows to one endpoint may use",
            &signed(census.most_ports),
        )?;
    }
    let mut metric = encoder.encode_descriptor(
        "dataplane_flows_removed",
        "Flows that the agent removed, because they were idle for longer than their timeout or their endpoint is gone",
        None,
        MetricType::Counter,
    )?;
    for (why, number) in state.flows.removed() {
        count(&mut metric, &[("why", why)], number)?;
    }
    let mut metric = encoder.encode_descriptor(
        "dataplane_sockets_destroyed",
        "Sockets that the agent destroyed, because the endpoint that they were connected to is gone",
        None,
        MetricType::Counter,
    )?;
    for (protocol, number) in state.flows.sockets() {
        count(&mut metric, &[("protocol", protocol)], number)?;
    }
    Ok(())
}

/// Writes the kernel's figures. A figure that cannot be read is absent: an alert can fire on an absent series, but a
/// wrong figure misleads.
fn in_kernel(state: &State, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    if let Ok(tables) = kernel::tables::Tables::open(&state.paths.bpffs) {
        tables_in_kernel(&tables, state, encoder)?;
    }
    if let Ok(attachments) = kernel::attachments(&state.paths) {
        let mut metric = encoder.encode_descriptor(
            "dataplane_program_attached",
            "1 if the program is attached according to the kernel, 0 if not",
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

/// Reads a figure of a table.
type Column = fn(&kernel::tables::Usage) -> u64;

fn tables_in_kernel(
    tables: &kernel::tables::Tables,
    state: &State,
    encoder: &mut DescriptorEncoder<'_>,
) -> fmt::Result {
    if let Ok(reasons) = tables.reasons() {
        let mut metric = encoder.encode_descriptor(
            "dataplane_verdicts",
            "Decisions of the programs by reason, since the tables were made",
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
    let on = i64::from(conntrack.is_some());
    let path = conntrack
        .as_ref()
        .map(|_| report::packet_path(&state.paths));
    let labels = [("path", path.unwrap_or("off"))];
    let help = "1 if the packet path is on, by the path that packets take; 0 if it is off, and then there are no flows";
    encoder
        .encode_descriptor("dataplane_packet_path", help, None, MetricType::Gauge)?
        .encode_family(&labels)?
        .encode_gauge(&on)?;
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
            "Present capacity of a kernel table in entries; the agent enlarges the table when it needs more",
            |t| t.capacity.into(),
        ),
        (
            "dataplane_table_limit",
            "Maximum capacity of a kernel table in entries",
            |t| t.limit.into(),
        ),
        (
            "dataplane_table_bytes",
            "Approximate memory of a kernel table",
            |t| t.bytes,
        ),
    ];
    for (name, help, value) in columns {
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        // Until the first walk the number of flows is unknown, so its series is absent.
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

/// Writes a gauge without labels.
fn gauge(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    value: &impl EncodeGaugeValue,
) -> fmt::Result {
    encoder
        .encode_descriptor(name, help, None, MetricType::Gauge)?
        .encode_gauge(value)
}

/// Gauges are signed.
fn signed(value: impl TryInto<i64>) -> i64 {
    value.try_into().unwrap_or(i64::MAX)
}
