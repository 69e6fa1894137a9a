//! `dataplane status`.

use std::{fmt::Write as _, io::Write, process::ExitCode};

use admin::{
    WorkloadTunnels,
    api::{AgentStatus, Learnt, PodCgroups, SourceKind, Sync},
    client,
    report::{self, ByPackets, Interface, OnInterface, Program, Report, Severity},
};
use clap::Args;
use terminal::{
    PathArgs, SocketArgs,
    output::{self, BAD, BOLD, Cell, Format, GOOD, Table, WARN},
};

/// Show if the dataplane on this node is healthy, and what is wrong if not.
///
/// Asks the kernel which programs are attached and how full the tables are, and asks the agent for
/// the rest. Also works without the agent; the missing agent is then the error.
///
/// Exits with 0 if the dataplane is healthy, with 1 if not. With only warnings it is healthy.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,

    #[command(flatten)]
    pub(super) paths: PathArgs,

    #[command(flatten)]
    pub(super) socket: SocketArgs,
}

impl StatusArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let report = match self.socket.client().get::<Report>("/status") {
            // The agent has just inspected the kernel, and knows its own paths.
            Ok(mut report) => {
                env!("CARGO_PKG_VERSION").clone_into(&mut report.versions.command);
                report
            }
            Err(error @ client::Error::Denied { .. }) => return Err(error.into()),
            Err(error) => {
                let limits = kernel::tables::Limits::default();
                // Without permission to look, this command must not report an unhealthy agent.
                if let Err(denied) = kernel::tables::Tables::open(&self.paths.bpffs())
                    && denied.is_permission()
                {
                    return Err(denied.into());
                }
                report::examine(&self.paths.or_guess(), limits, Err(error))
            }
        };
        self.output
            .print(&report, |out, report| text(out, report, admin::now()))?;
        Ok(if report.healthy {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }
}

fn text(out: &mut dyn Write, report: &Report, now: u64) -> std::io::Result<()> {
    let (style, word) = if report.healthy {
        (GOOD, "healthy")
    } else {
        (BAD, "NOT HEALTHY")
    };
    writeln!(out, "{}", output::styled(style, word))?;
    for finding in &report.findings {
        let style = if finding.severity == Severity::Error {
            BAD
        } else {
            WARN
        };
        let sign = output::styled(style, finding.severity);
        // A finding of several lines, such as the errors of manifests, stays one item.
        writeln!(out, "  {sign}: {}", finding.text.replace('\n', "\n    "))?;
    }
    if let Some(status) = &report.agent {
        writeln!(out)?;
        agent(out, status, now)?;
    }

    writeln!(out)?;
    for table in [
        programs(&report.programs),
        interfaces(&report.interfaces),
        by_packets(&report.by_packets),
    ] {
        print(out, &table)?;
    }
    mesh(out, report)?;
    let agent = report.agent.iter();
    let with_tunnels: Vec<_> = agent.flat_map(|agent| &agent.tunnels).collect();
    print(out, &tunnels(&with_tunnels))?;
    print(out, &tables(&report.tables))?;

    let counts: Vec<String> = report
        .verdicts
        .iter()
        .filter(|(_, count)| **count > 0)
        .map(|(reason, count)| format!("{reason} {count}"))
        .collect();
    if !counts.is_empty() {
        writeln!(out, "{BOLD}Verdicts{BOLD:#}  {}", counts.join(", "))?;
    }
    if let Some(path) = &report.packet_path {
        let agent = report.agent.as_ref();
        let because = agent.and_then(|agent| agent.stack_because.as_deref());
        writeln!(
            out,
            "{BOLD}Path{BOLD:#}  {}",
            packet_path(path, because, report.bypass)
        )?;
    }
    if let Some(is_there) = report.keep_nat {
        writeln!(out, "{BOLD}Keep-NAT{BOLD:#}  {}", keep_nat(is_there))?;
    }
    let versions = &report.versions;
    writeln!(
        out,
        "{BOLD}Versions{BOLD:#}  agent {}, command {}, layout {}, kernel {}",
        versions.agent.as_deref().unwrap_or("-"),
        versions.command,
        versions.layout,
        versions.kernel,
    )
}

/// Prints a table that has rows.
fn print(out: &mut dyn Write, table: &Table) -> std::io::Result<()> {
    if table.is_empty() {
        return Ok(());
    }
    table.write(out)?;
    writeln!(out)
}

fn programs(all: &[Program]) -> Table {
    let mut table = Table::new(&["PROGRAM", "ATTACHED", "LINK", "PROGRAM ID"]);
    let number = |id: Option<u32>| id.map_or_else(|| "-".to_owned(), |id| id.to_string());
    for program in all {
        let attached = if program.attached {
            Cell::new("yes", GOOD)
        } else {
            Cell::new("NO", BAD)
        };
        table.row([
            program.name.as_str().into(),
            attached,
            number(program.link_id).into(),
            number(program.program_id).into(),
        ]);
    }
    table
}

fn interfaces(all: &[Interface]) -> Table {
    let mut table = Table::new(&[
        "INTERFACE",
        "IS",
        "INGRESS",
        "EGRESS",
        "DELIVERY",
        "MASQUERADES TO",
    ]);
    for interface in all {
        let cell = |on: &OnInterface| match (&on.hook, on.attached) {
            (Some(hook), true) => Cell::new(hook.clone(), GOOD),
            _ => Cell::new("NO", BAD),
        };
        table.row([
            interface.name.as_str().into(),
            interface.role.as_str().into(),
            cell(&interface.ingress),
            cell(&interface.egress),
            delivery(interface).into(),
            interface.masquerade.join(", ").into(),
        ]);
    }
    table
}

fn by_packets(all: &[ByPackets]) -> Table {
    let mut table = Table::new(&["BY PACKETS ONLY", "NETWORK NAMESPACE", "BECAUSE"]);
    for pod in all {
        table.row([
            pod.interface.as_str().into(),
            pod.netns_cookie.to_string().into(),
            pod.reason.as_str().into(),
        ]);
    }
    table
}

fn tables(all: &[report::Table]) -> Table {
    let mut table = Table::new(&["TABLE", "USED", "ROOM", "LIMIT", "OF LIMIT", "MEMORY"]);
    for t in all {
        let percent = (t.used * 100).checked_div(t.limit).unwrap_or_default();
        table.row([
            t.name.as_str().into(),
            t.used.to_string().into(),
            t.capacity.to_string().into(),
            t.limit.to_string().into(),
            format!("{percent}%").into(),
            output::bytes(t.bytes).into(),
        ]);
    }
    table
}

/// Returns the way in which packets are delivered to an interface, with the reason if it is not the fast one.
fn delivery(interface: &Interface) -> String {
    if interface.egress_of_others.is_empty() {
        return interface.delivery.clone();
    }
    let others = interface.egress_of_others.join(", ");
    format!("{} ({others})", interface.delivery)
}

/// Returns the text about the path of packets of services.
fn packet_path(path: &str, because: Option<&str>, bypass: bool) -> String {
    match (path, because) {
        ("stack", Some(why)) => format!("packets go through the stack because of {why}"),
        ("stack", None) => "packets go through the stack".to_owned(),
        _ if bypass => {
            "packets take the fast path, past the stack; so do those that belong to no service"
                .to_owned()
        }
        _ => "packets take the fast path, past the stack".to_owned(),
    }
}

/// Returns the text about the table of `dataplane keep-nat`.
fn keep_nat(is_there: bool) -> String {
    let table = kernel::netfilter::keep_nat::TABLE;
    if is_there {
        format!(
            "nftables table inet {table} is there: the kernel goes on tracking and translating connections; \
             `dataplane keep-nat --release` removes it when none is translated any more"
        )
    } else {
        format!("no nftables table inet {table}")
    }
}

/// Prints the workloads whose connections are captured.
fn mesh(out: &mut dyn Write, report: &Report) -> std::io::Result<()> {
    if report.mesh.is_empty() {
        return Ok(());
    }
    let mut table = Table::new(&[
        "WORKLOAD",
        "IN",
        "MODE",
        "EGRESS",
        "PROXY",
        "WITHOUT IT",
        "PROBLEM",
    ]);
    for workload in &report.mesh {
        let proxy = match &*workload.proxy {
            "-" => "-".into(),
            "ready" => Cell::new("ready", GOOD),
            other => Cell::new(other.to_owned(), WARN),
        };
        table.row([
            workload.name.as_deref().unwrap_or("?").into(),
            workload.place.as_str().into(),
            workload.mode.as_str().into(),
            workload.egress.as_str().into(),
            proxy,
            workload.without_proxy.as_str().into(),
            workload.problem.as_deref().unwrap_or("-").into(),
        ]);
    }
    table.write(out)?;
    if report.mesh.iter().any(|workload| workload.proxy != "-") {
        writeln!(
            out,
            "A proxy accepts captured inbound connections before the application does, so health checks that only connect always \
             succeed, except the kubelet's probes"
        )?;
    }
    writeln!(out)
}

/// Returns the table of the workloads that have encrypted connections.
fn tunnels(all: &[&WorkloadTunnels]) -> Table {
    let mut table = Table::new(&[
        "WORKLOAD",
        "TUNNELS IN",
        "TUNNELS OUT",
        "CONNECTIONS",
        "PEERS",
    ]);
    for of in all {
        let mut peers = of.peers.join(", ");
        if of.further_peers > 0 {
            let _ = write!(peers, ", and {} others", of.further_peers);
        }
        table.row([
            of.workload.as_str().into(),
            of.inbound.to_string().into(),
            of.outbound.to_string().into(),
            of.connections.to_string().into(),
            peers.into(),
        ]);
    }
    table
}

fn agent(out: &mut dyn Write, status: &AgentStatus, now: u64) -> std::io::Result<()> {
    let ago = |at: u64| output::duration(now.saturating_sub(at));
    let mut line = |what: &str, text: String| writeln!(out, "{BOLD}{what:<10}{BOLD:#}{text}");
    line(
        "Agent",
        format!("process {}, up {}", status.version.pid, ago(status.started)),
    )?;
    let addresses = match &status.node_port_addresses[..] {
        [] => "loopback only".to_owned(),
        some => learnt(some),
    };
    line(
        "Node",
        format!("{}; node ports on {addresses}", status.node),
    )?;
    line(
        "Pods",
        match &status.pod_networks[..] {
            [] => {
                "no pod detection (no packets.podCidrs): no client is masqueraded on the way to a cluster IP"
                    .to_owned()
            }
            some => learnt(some),
        },
    )?;
    line(
        "Cgroup",
        format!(
            "{}{}",
            learnt(std::slice::from_ref(&status.cgroup)),
            status.pods.as_ref().map_or_else(String::new, pods)
        ),
    )?;
    line(
        "Services",
        format!("{}, with {} endpoints", status.services, status.endpoints),
    )?;
    line(
        "Source",
        format!(
            "{} {}, {}",
            status.source.kind.word(),
            status.source.paths.join(", "),
            match (status.source.kind, status.source.read) {
                (_, 0) => "not read yet".to_owned(),
                (SourceKind::Manifests, at) => format!("read {} ago", ago(at)),
                (_, at) => format!("heard {} ago", ago(at)),
            }
        ),
    )?;
    if let Some(flows) = &status.flows {
        let counted = format!("{}, counted {} ago", flows.total, ago(flows.at));
        line("Flows", counted)?;
    }
    if let Some(dns) = &status.dns {
        let text = format!(
            "answers {} workloads; {} queries, {} from known names, {} from the cache, {} failed",
            dns.workloads, dns.queries, dns.local, dns.cached, dns.failed
        );
        line("DNS", text)?;
    }
    line(
        "Last sync",
        status
            .last_sync
            .as_ref()
            .map_or_else(|| "never".to_owned(), |sync| last_sync(sync, &ago(sync.at))),
    )
}

/// Returns the number of pods whose sockets are in the cgroup, as a text.
fn pods(pods: &PodCgroups) -> String {
    let mut text = format!("; {} pods in it", pods.inside);
    if pods.outside > 0 {
        let _ = write!(text, ", {} in others", pods.outside);
    }
    if pods.unknown > 0 {
        let _ = write!(
            text,
            ", {} whose sockets the agent does not see",
            pods.unknown
        );
    }
    text
}

/// Lists values with their origins. Consecutive values of one origin share its mention.
fn learnt(all: &[Learnt]) -> String {
    let groups = all.chunk_by(|a, b| a.from == b.from);
    let groups = groups.map(|group| {
        let values: Vec<&str> = group.iter().map(|learnt| &*learnt.value).collect();
        let from = group.first().map_or("", |learnt| &*learnt.from);
        format!("{} ({from})", values.join(", "))
    });
    groups.collect::<Vec<_>>().join(", ")
}

fn last_sync(sync: &Sync, ago: &str) -> String {
    #[expect(clippy::cast_precision_loss, reason = "two decimal places are printed")]
    let ms = |us: u64| us as f64 / 1000.0;
    format!(
        "{ago} ago: {} writes; {:.2} ms to plan, {:.2} ms to write",
        sync.writes,
        ms(sync.plan_us),
        ms(sync.write_us),
    )
}
