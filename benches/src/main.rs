//! `cargo xtask bench`: how fast the dataplane is, beside what it replaces.

use std::{fs::File, io::Write as _, path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use clap::{Args, Parser};
use dataplane_benches::{
    rows::{Row, print_paths, print_tables, print_targets},
    say,
    socket::{self, CASE_NAMES, Extent},
    tables,
    worker::Worker,
};

/// Measures the dataplane beside the same traffic without it, and beside kube-proxy's rules.
///
/// Everything happens in network namespaces made for it, which have no way out. Wants root, and
/// the packages iptables and nftables. Progress goes to stderr, results to stdout.
#[derive(Parser)]
#[command(version, bin_name = "cargo xtask bench")]
enum Command {
    /// Services reached from local sockets: connect, round trip, connections/s, throughput; and
    /// the tables behind them
    Socket(Options),
    /// Every benchmark
    All(Options),
    /// Part of a benchmark: not for you to start
    #[command(hide = true, subcommand)]
    Worker(Worker),
}

#[derive(Args)]
struct Options {
    /// Within half a minute: fewer rounds and sizes
    #[arg(long)]
    quick: bool,
    /// Also write the figures as JSON: an array of objects with bench, path, case, services,
    /// metric, unit, value, baseline and ratio
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> anyhow::Result<ExitCode> {
    match Command::parse() {
        Command::Worker(worker) => worker.run()?,
        Command::Socket(options) | Command::All(options) => measure(&options)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn measure(options: &Options) -> anyhow::Result<()> {
    // Opened first: a path that cannot be written should not cost ten minutes.
    let json = options
        .json
        .as_deref()
        .map(|path| File::create(path).with_context(|| format!("cannot write {}", path.display())));
    let json = json.transpose()?;

    let extent = if options.quick {
        Extent::QUICK
    } else {
        Extent::FULL
    };
    let of_tables = tables::run(options.quick)?;
    let of_paths = socket::run(&extent)?;
    print_paths(&of_paths, &CASE_NAMES);
    print_tables(&of_tables);
    let mut targets = socket::targets(&of_paths);
    targets.extend(tables::targets(&of_tables));
    let missed = print_targets(&targets);

    if let (Some(mut file), Some(path)) = (json, &options.json) {
        let rows: Vec<Row> = of_paths.into_iter().chain(of_tables).collect();
        serde_json::to_writer_pretty(&mut file, &rows)?;
        writeln!(file)?;
        say!("{} figures in {}", rows.len(), path.display());
    }
    say!("{missed} of {} targets missed", targets.len());
    Ok(())
}
