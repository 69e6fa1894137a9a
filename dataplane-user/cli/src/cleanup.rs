//! `dataplane cleanup`.

use std::{io::Write as _, process::ExitCode};

use anyhow::bail;
use clap::Args;
use serde::Serialize;
use terminal::{
    GIVE_BACK, KeptArgs, PathArgs, SocketArgs, exit,
    output::{self, Cell, Format, Table},
    pods_that_need_it,
};

/// Remove all programs, tables and rules of the dataplane from the kernel.
///
/// Detaches the programs and removes the tables, of every layout: services are no longer served.
/// Removes the filters and qdiscs on interfaces, and a mesh's rules and routes in workloads'
/// network namespaces. Does not touch programs and rules of others. Refuses while an agent runs, and
/// while pods depend on it whose mesh rules `dataplane-migrate takeover` has removed.
#[derive(Debug, Args)]
pub struct CleanupArgs {
    /// List the programs, tables and rules that would be removed, and remove nothing
    #[arg(long)]
    dry_run: bool,

    /// Remove everything, even if connections of pods then bypass the proxy, because their mesh rules were taken over
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    kept: KeptArgs,

    /// List each removed item, not only their number
    #[arg(short, long)]
    verbose: bool,

    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,

    #[command(flatten)]
    pub(super) paths: PathArgs,

    #[command(flatten)]
    pub(super) socket: SocketArgs,
}

#[derive(Serialize)]
struct Row {
    path: String,
    what: String,
    /// Whether it was removed, or with --dry-run would be removed. Objects of others stay.
    removed: bool,
}

impl CleanupArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        if !self.dry_run
            && let Some(agent) = admin::who_answers(&self.socket.path())
        {
            eprintln!("dataplane: {agent} runs on this node: end it first");
            return Ok(ExitCode::from(exit::BUSY));
        }
        let pods = pods_that_need_it(&self.kept.takeover_dir);
        match pods {
            _ if self.force || self.dry_run => {}
            Ok(pods) if pods.is_empty() => {}
            Ok(pods) => bail!(
                "nothing was removed: `dataplane-migrate takeover` removed the mesh's rules in {}, and without the dataplane's programs connections \
                 there bypass the proxy. Restore the rules first ({GIVE_BACK}), or use --force",
                pods.join(", ")
            ),
            Err(error) => {
                return Err(error.context(
                    "nothing was removed: cannot read which pods' mesh rules were taken over, so their connections might bypass the proxy; to \
                     remove everything anyway, use --force",
                ));
            }
        }
        let bpffs = self.paths.bpffs();
        let items = match kernel::cleanup::cleanup(&bpffs, self.dry_run) {
            Ok(items) => items,
            Err(error @ kernel::Error::Busy { .. }) => {
                eprintln!("dataplane: {error}");
                return Ok(ExitCode::from(exit::BUSY));
            }
            Err(error) => return Err(error.into()),
        };
        let rows: Vec<Row> = items
            .into_iter()
            .map(|item| Row {
                path: item.path.display().to_string(),
                what: item.what,
                removed: item.ours,
            })
            .collect();
        let mut out = output::stdout();
        if self.output == Format::Json {
            output::json(&mut out, &rows)?;
            return Ok(ExitCode::SUCCESS);
        }
        let verb = if self.dry_run {
            "would be removed"
        } else {
            "removed"
        };
        let mut table = Table::new(&["PATH", "WHAT", "OUTCOME"]);
        for row in &rows {
            let outcome = if row.removed {
                verb
            } else {
                "not ours: left alone"
            };
            table.row([
                Cell::from(row.path.as_str()),
                row.what.as_str().into(),
                outcome.into(),
            ]);
        }
        if table.is_empty() {
            writeln!(out, "Nothing of the dataplane in {}.", bpffs.display())?;
        } else if self.verbose || self.dry_run {
            table.write(&mut out)?;
        } else {
            let removed = rows.iter().filter(|row| row.removed).count();
            writeln!(
                out,
                "Removed {removed} pins, filters, rules and routes of the dataplane (-v lists them)."
            )?;
            for row in rows.iter().filter(|row| !row.removed) {
                writeln!(out, "{}: {}, not ours: left alone", row.path, row.what)?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}
