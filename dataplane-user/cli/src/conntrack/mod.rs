//! `dataplane conntrack`.

mod filter;

use std::{
    collections::BTreeMap,
    io::{self, IsTerminal, Write},
    net::SocketAddr,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use clap::{Args, Subcommand};
use dataplane_common::{
    decide,
    packet::{FlowKey, Tick},
};
use kernel::{
    conntrack::{Conntrack, Flow, now},
    tables::Tables,
};
use serde::Serialize;
use terminal::{
    PathArgs, SocketArgs,
    output::{self, Cell, DIM, Format, Table},
};

use self::filter::Filter;
use super::names::Names;

/// List, count or remove the flows of the packet path.
///
/// The packet path serves clients without a socket on this node: other machines, and VMs in pods. A
/// flow is one client's TCP connection to a service, or the UDP traffic between one pair of ports.
/// The command reads the kernel's tables and works without the agent; a running agent adds the
/// services' names.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dataplane conntrack list --service shop/web --state established
  dataplane conntrack count --protocol udp
  dataplane conntrack flush --endpoint 10.244.1.5")]
pub struct ConntrackArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List flows, one for each line
    List(List),
    /// Count flows, by protocol and state
    Count(Count),
    /// Remove flows
    ///
    /// The client's next UDP datagram begins a new flow, perhaps to another endpoint. TCP
    /// connections break, because the packet path leaves their next packet alone. The command does
    /// not ask for confirmation. It needs a filter or --all.
    Flush(Flush),
}

#[derive(Debug, Args)]
struct List {
    #[command(flatten)]
    filter: Filter,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Args)]
struct Count {
    #[command(flatten)]
    filter: Filter,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Args)]
struct Flush {
    #[command(flatten)]
    filter: Filter,
    /// Remove all flows
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    common: Common,
}

impl ConntrackArgs {
    pub(super) fn common(&mut self) -> &mut Common {
        match &mut self.command {
            Command::List(args) => &mut args.common,
            Command::Count(args) => &mut args.common,
            Command::Flush(args) => &mut args.common,
        }
    }
}

#[derive(Debug, Args)]
pub(super) struct Common {
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,

    #[command(flatten)]
    pub(super) paths: PathArgs,

    #[command(flatten)]
    pub(super) socket: SocketArgs,
}

/// A flow as it is printed.
#[derive(Debug, Serialize)]
struct Line {
    protocol: String,
    state: &'static str,
    client: String,
    vip: String,
    endpoint: String,
    /// The client's address and port as the endpoint sees them, if the flow is masqueraded.
    #[serde(skip_serializing_if = "Option::is_none")]
    masqueraded_as: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    service: Option<String>,
    idle_seconds: u32,
    /// Seconds until the flow expires if no packet arrives.
    expires_seconds: u32,
}

impl ConntrackArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::List(args) => list(&args.filter, &args.common),
            Command::Count(args) => count(&args.filter, &args.common),
            Command::Flush(args) => {
                ensure!(
                    args.all || !args.filter.is_empty(),
                    "no flows are selected; give a filter, or --all to remove all flows"
                );
                ensure!(
                    !args.all || args.filter.is_empty(),
                    "--all cannot be combined with a filter; give one of them"
                );
                flush(&args.filter, &args.common)
            }
        }?;
        Ok(ExitCode::SUCCESS)
    }
}

/// The tables and names that the commands use.
struct Open {
    conntrack: Conntrack,
    tables: Tables,
    names: Names,
}

impl Open {
    fn new(filter: &Filter, common: &Common) -> anyhow::Result<Self> {
        if let Some(service) = &filter.service {
            ensure!(
                service.split('/').filter(|part| !part.is_empty()).count() == 2,
                "`{service}` is not a service's name; expected NAMESPACE/NAME"
            );
            // The agent knows the names of services. Without an agent no flow would match, and the output would
            // not say why.
            common.socket.client().get_text("/version")?;
        }
        let bpffs = common.paths.bpffs();
        let tables = Tables::open(&bpffs)?;
        let conntrack = Conntrack::open(&bpffs)?.with_context(|| {
            format!(
                "the packet path is off (--packet-path off, `packets.path: off`), so that there \
                 are no flows: no tables for them in {}",
                bpffs.display()
            )
        })?;
        Ok(Self {
            conntrack,
            tables,
            names: Names::new(common.socket.client()),
        })
    }

    /// Returns the service of a flow's VIP.
    fn service(&self, key: &FlowKey) -> Option<String> {
        let frontend =
            decide::find_frontend(&self.tables, key.dst, key.dst_port, key.protocol, true);
        self.names.of_pool(frontend.pool())
    }

    /// Calls `work` for every flow that passes the filter.
    fn each(
        &self,
        filter: &Filter,
        mut work: impl FnMut(&Flow) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut flows = self.conntrack.flows();
        let mut batch = Vec::new();
        let mut progress = Progress::new();
        while flows.read(&mut batch) {
            for flow in &batch {
                if filter.passes(flow, || self.service(&flow.key)) {
                    work(flow)?;
                }
            }
            progress.add(batch.len());
        }
        Ok(())
    }

    fn line(&self, flow: &Flow, now: Tick) -> Line {
        let idle = flow.idle(now);
        let port = flow.to.seen_port(&flow.key);
        let masqueraded_as = if flow.is_foreign() {
            None
        } else if flow.is_masqueraded() {
            Some(match self.conntrack.node_addr(flow.to.node_addr) {
                Some(addr) => SocketAddr::new(addr.ip(), port.host()).to_string(),
                None => format!("an address that the node no longer has, port {port}"),
            })
        } else {
            flow.has_another_port()
                .then(|| SocketAddr::new(flow.key.src.ip(), port.host()).to_string())
        };
        Line {
            protocol: flow.protocol().to_string(),
            state: flow.state().word(),
            client: flow.client().to_string(),
            vip: flow.vip().to_string(),
            endpoint: flow.endpoint().to_string(),
            masqueraded_as,
            service: self.service(&flow.key),
            idle_seconds: idle,
            expires_seconds: flow.keep(&self.conntrack.timeouts()).saturating_sub(idle),
        }
    }
}

fn list(filter: &Filter, common: &Common) -> anyhow::Result<()> {
    let open = Open::new(filter, common)?;
    let mut out = output::stdout();
    let mut first = true;
    open.each(filter, |flow| {
        let line = open.line(flow, now());
        match common.output {
            // Prints each flow at once, because a million flows would need much memory.
            Format::Json => {
                write!(out, "{}", if first { "[\n  " } else { ",\n  " })?;
                serde_json::to_writer(&mut out, &line)?;
            }
            Format::Text => text(&mut out, &line)?,
        }
        first = false;
        Ok(())
    })?;
    if common.output == Format::Json {
        writeln!(out, "{}", if first { "[]" } else { "\n]" })?;
    }
    Ok(())
}

fn text(out: &mut dyn Write, line: &Line) -> io::Result<()> {
    write!(
        out,
        "{} {:<11} {} -> {} -> {}",
        line.protocol, line.state, line.client, line.vip, line.endpoint
    )?;
    if let Some(node) = &line.masqueraded_as {
        write!(out, " from {node}")?;
    }
    if let Some(service) = &line.service {
        write!(out, " {service}")?;
    }
    let duration = |seconds: u32| output::duration(seconds.into());
    writeln!(
        out,
        " {DIM}idle {}, kept {}{DIM:#}",
        duration(line.idle_seconds),
        duration(line.expires_seconds)
    )
}

/// Number of flows of a protocol and state.
#[derive(Debug, Serialize)]
struct Kind {
    protocol: String,
    state: &'static str,
    flows: u64,
}

#[derive(Debug, Serialize)]
struct Counted {
    flows: u64,
    /// Number of flows that fit into the tables.
    capacity: u32,
    kinds: Vec<Kind>,
}

fn count(filter: &Filter, common: &Common) -> anyhow::Result<()> {
    let open = Open::new(filter, common)?;
    let mut kinds = BTreeMap::new();
    open.each(filter, |flow| {
        *kinds.entry((flow.protocol(), flow.state())).or_default() += 1;
        Ok(())
    })?;
    let counted = Counted {
        flows: kinds.values().sum(),
        capacity: open.conntrack.capacity(),
        kinds: kinds
            .into_iter()
            .map(|((protocol, state), flows)| Kind {
                protocol: protocol.to_string(),
                state: state.word(),
                flows,
            })
            .collect(),
    };
    let mut out = output::stdout();
    if common.output == Format::Json {
        return Ok(output::json(&mut out, &counted)?);
    }
    let mut table = Table::new(&["PROTOCOL", "STATE", "FLOWS"]);
    for kind in &counted.kinds {
        table.row([
            kind.protocol.as_str().into(),
            kind.state.into(),
            Cell::from(kind.flows.to_string()),
        ]);
    }
    if !table.is_empty() {
        table.write(&mut out)?;
    }
    writeln!(
        out,
        "{} flows; there is room for {}",
        counted.flows, counted.capacity
    )?;
    Ok(())
}

#[derive(Debug, Serialize)]
struct Removed {
    removed: u64,
}

fn flush(filter: &Filter, common: &Common) -> anyhow::Result<()> {
    let open = Open::new(filter, common)?;
    let mut removed = 0;
    open.each(filter, |flow| {
        if open.conntrack.remove_if(flow, |_| true) {
            removed += 1;
        }
        Ok(())
    })?;
    let mut out = output::stdout();
    match common.output {
        Format::Json => output::json(&mut out, &Removed { removed })?,
        Format::Text => writeln!(out, "forgot {removed} flows")?,
    }
    Ok(())
}

/// Shows the progress on a terminal if the work takes longer than a second.
struct Progress {
    start: Instant,
    told: Instant,
    flows: usize,
    terminal: bool,
}

impl Progress {
    fn new() -> Self {
        let start = Instant::now();
        Self {
            start,
            told: start,
            flows: 0,
            terminal: io::stderr().is_terminal(),
        }
    }

    fn add(&mut self, flows: usize) {
        self.flows += flows;
        if self.terminal && self.told.elapsed() > Duration::from_secs(1) {
            self.told = Instant::now();
            eprint!("\r{} flows looked at", self.flows);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.told != self.start {
            eprintln!();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_for_people() {
        let line = Line {
            protocol: "udp".to_owned(),
            state: "answered",
            client: "192.0.2.7:4000".to_owned(),
            vip: "10.96.0.10:53".to_owned(),
            endpoint: "10.244.1.5:5353".to_owned(),
            masqueraded_as: Some("192.168.77.2:4000".to_owned()),
            service: Some("kube-system/dns".to_owned()),
            idle_seconds: 13,
            expires_seconds: 107,
        };
        let mut out = anstream::StripStream::new(Vec::new());
        text(&mut out, &line).unwrap();
        assert_eq!(
            String::from_utf8(out.into_inner()).unwrap(),
            "udp answered    192.0.2.7:4000 -> 10.96.0.10:53 -> 10.244.1.5:5353 from \
             192.168.77.2:4000 kube-system/dns idle 13s, kept 1m47s\n"
        );
    }
}
