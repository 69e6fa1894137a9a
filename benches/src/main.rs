//! `cargo xtask bench`: measures the dataplane beside the programs that it replaces.

use std::{
    fs::File,
    io::Write as _,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::Context as _;
use clap::{Args, Parser};
use dataplane_benches::{
    dns, import, packet, plot, relay,
    rows::{Row, Target, print_paths, print_tables, print_targets},
    say, socket,
    sync::{self, soak::Soak},
    tables,
    worker::Worker,
};

/// Measure the dataplane beside the same traffic without it, and beside kube-proxy's rules.
///
/// Measures in network namespaces of its own, which have no route to the outside. Needs root, and the packages iptables
/// and nftables. `relay` also needs haproxy and nginx. `dns` also needs dnsperf, unbound, dnsmasq, bind9 and dig.
/// Progress goes to standard error, results to standard output.
#[derive(Parser)]
#[command(version, bin_name = "cargo xtask bench")]
enum Command {
    /// Services reached from local sockets: connect, round trip, connections/s, throughput, and the
    /// kernel's tables
    Socket(Options),
    /// The Kubernetes API: time from its first byte to the kernel's tables, and from a change to the
    /// written table; bursts; the agent's memory
    Sync(SyncOptions),
    /// Services reached by packets, from outside and from pods whose sockets the agent does not see:
    /// connect, round trip, throughput, and the cost of a new flow
    Packet(Options),
    /// The L4 proxy beside HAProxy, nginx and tokio's copy, and tunnels beside Istio's ztunnel: throughput, round trip,
    /// connections/s, handshakes/s, CPU, and memory for idle connections
    Relay(RelayOptions),
    /// The DNS server beside unbound, dnsmasq and BIND: queries/s and CPU; a pod's lookups on its node and at the
    /// cluster's DNS, the agent's memory, and the time until a new service is answered
    Dns(Options),
    /// The import of kube-proxy's rules from iptables-save and nft: time, and memory beside the text's size
    Import(Options),
    /// Every benchmark
    All(Options),
    /// Draw plots of runs from the files that --json wrote: SVG, for light and dark pages
    Plot {
        /// Files that --json wrote
        #[arg(required = true, value_name = "FILE")]
        json: Vec<PathBuf>,
        /// Directory for the plots
        #[arg(long, value_name = "DIR", default_value = "docs/images")]
        to: PathBuf,
    },
    /// Internal part of a benchmark
    #[command(hide = true, subcommand)]
    Worker(Worker),
}

#[derive(Args)]
struct Options {
    /// Measure fewer rounds and sizes, within half a minute (relay: longer)
    #[arg(long)]
    quick: bool,
    /// Also write the figures to this file as JSON: an array of objects with bench, path, case,
    /// services, metric, unit, value, baseline, ratio and failed turns
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Args)]
struct RelayOptions {
    #[command(flatten)]
    options: Options,
    /// Program of Istio's ztunnel, which then takes part on both nodes of a tunnel. Without it, tunnels are compared with
    /// their limit alone
    #[arg(long, value_name = "PROGRAM")]
    ztunnel: Option<PathBuf>,
}

#[derive(Args)]
struct SyncOptions {
    #[command(flatten)]
    options: Options,
    /// Instead make 100 changes a second among 10 000 services for five minutes, with the watches
    /// dropped every few seconds; then compare the tables with those of a fresh start
    #[arg(long, conflicts_with_all = ["quick", "json"])]
    soak: bool,
}

const SOAK: Soak = Soak {
    services: 10_000,
    rate: 100,
    time: Duration::from_mins(5),
    drop_every: Duration::from_secs(4),
};

fn main() -> anyhow::Result<ExitCode> {
    match Command::parse() {
        Command::Worker(worker) => worker.run()?,
        Command::Plot { json, to } => {
            for file in plot::draw(&plot::read(&json)?, &to)? {
                say!("{}", file.display());
            }
        }
        Command::Socket(options) => measure(&options, &[&socket])?,
        Command::Sync(SyncOptions { soak: true, .. }) => sync::soak::run(SOAK)?,
        Command::Sync(SyncOptions { options, .. }) => measure(&options, &[&sync])?,
        Command::Packet(options) => measure(&options, &[&packet])?,
        Command::Relay(RelayOptions { options, ztunnel }) => {
            measure(&options, &[&|quick| relay(quick, ztunnel.as_deref())])?;
        }
        Command::Dns(options) => measure(&options, &[&of_dns])?,
        Command::Import(options) => measure(&options, &[&of_import])?,
        Command::All(options) => {
            let relay = |quick| relay(quick, None);
            measure(
                &options,
                &[&socket, &sync, &packet, &relay, &of_dns, &of_import],
            )?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A benchmark: measures, prints, and returns its figures and targets. Its argument: whether it is `--quick`.
type Bench<'a> = &'a dyn Fn(bool) -> anyhow::Result<(Vec<Row>, Vec<Target>)>;

fn socket(quick: bool) -> anyhow::Result<(Vec<Row>, Vec<Target>)> {
    let extent = if quick { socket::QUICK } else { socket::FULL };
    let of_tables = tables::run(quick)?;
    let mut rows = socket::run(&extent)?;
    print_paths(&rows, &socket::CASE_NAMES);
    print_tables("tables", &of_tables);
    let mut targets = socket::targets(&rows);
    targets.extend(tables::targets(&of_tables));
    rows.extend(of_tables);
    Ok((rows, targets))
}

fn sync(quick: bool) -> anyhow::Result<(Vec<Row>, Vec<Target>)> {
    let rows = sync::run(quick)?;
    print_tables("sync", &rows);
    let targets = sync::targets(&rows);
    Ok((rows, targets))
}

fn packet(quick: bool) -> anyhow::Result<(Vec<Row>, Vec<Target>)> {
    let extent = if quick { packet::QUICK } else { packet::FULL };
    let rows = packet::run(&extent)?;
    print_paths(&rows, &packet::CASE_NAMES);
    let targets = packet::targets(&rows);
    Ok((rows, targets))
}

fn relay(quick: bool, ztunnel: Option<&Path>) -> anyhow::Result<(Vec<Row>, Vec<Target>)> {
    let extent = if quick {
        relay::Extent::QUICK
    } else {
        relay::Extent::FULL
    };
    let rows = relay::run(&extent, ztunnel)?;
    print_paths(&rows, &relay::CASE_NAMES);
    let targets = relay::targets(&rows);
    Ok((rows, targets))
}

fn of_dns(quick: bool) -> anyhow::Result<(Vec<Row>, Vec<Target>)> {
    let extent = if quick {
        dns::Extent::QUICK
    } else {
        dns::Extent::FULL
    };
    let rows = dns::run(&extent)?;
    print_paths(&rows, &dns::CASE_NAMES);
    let targets = dns::targets(&rows)?;
    Ok((rows, targets))
}

fn of_import(quick: bool) -> anyhow::Result<(Vec<Row>, Vec<Target>)> {
    let rows = import::run(quick)?;
    print_paths(&rows, &import::CASE_NAMES);
    let targets = import::targets(&rows);
    Ok((rows, targets))
}

fn measure(options: &Options, benches: &[Bench<'_>]) -> anyhow::Result<()> {
    // Open the file first. An error then costs no ten minutes of measurement.
    let json = options
        .json
        .as_deref()
        .map(|path| File::create(path).with_context(|| format!("cannot write {}", path.display())));
    let json = json.transpose()?;

    let (mut rows, mut targets) = (vec![], vec![]);
    for bench in benches {
        let (figures, wanted) = bench(options.quick)?;
        rows.extend(figures);
        targets.extend(wanted);
    }
    let missed = print_targets(&targets);

    if let (Some(mut file), Some(path)) = (json, &options.json) {
        serde_json::to_writer_pretty(&mut file, &rows)?;
        writeln!(file)?;
        say!("{} figures in {}", rows.len(), path.display());
    }
    say!("{missed} of {} targets missed", targets.len());
    Ok(())
}
