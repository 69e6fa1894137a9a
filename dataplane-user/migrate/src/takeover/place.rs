//! The directories, tables and agent that a command works with, and the lock between commands.

use std::{fs::File, io, path::PathBuf};

use admin::{
    client::Client,
    report::{Report, Severity},
};
use anyhow::{Context as _, ensure};
use kernel::tables::Tables;
use nix::fcntl::Flock;
use takeover::{journal, owners::Owner};

/// The directories, tables and agent that a command works with.
pub struct Place {
    /// The directory with the journal and the files with rules.
    pub directory: PathBuf,
    /// The directory in which the agent pins its tables.
    pub bpffs: PathBuf,
    /// The cgroup whose processes the agent serves.
    pub cgroup: PathBuf,
    /// The client for requests to the agent.
    pub agent: Client,
    /// The owners whose rules are taken over.
    pub owners: &'static [&'static Owner],
}

impl Place {
    /// Locks the directory: no other command can change rules until the lock is dropped. A dry run takes no lock.
    pub fn lock(&self, dry_run: bool) -> anyhow::Result<Option<Flock<File>>> {
        if dry_run {
            return Ok(None);
        }
        let lock = journal::lock(&self.directory).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => anyhow::anyhow!(
                "another `dataplane-migrate takeover` runs: it has {}; nothing was changed",
                self.directory.join("lock").display()
            ),
            _ => anyhow::Error::new(error).context("nothing was changed"),
        })?;
        Ok(Some(lock))
    }

    /// Returns the owner's name.
    pub fn owner(&self) -> &'static str {
        self.owners.first().map_or("", |owner| owner.name)
    }

    /// Asks the agent for the node's health.
    ///
    /// # Errors
    /// If no agent serves, the node is not healthy, or the agent is in another network namespace.
    pub fn healthy(&self) -> anyhow::Result<Report> {
        let report = self.serving()?;
        let of_agent = Tables::open(&self.bpffs)?.host_netns();
        ensure!(
            of_agent == kernel::namespaces::netns_cookie()?,
            "this command is in another network namespace than the agent: run it on the node"
        );
        Ok(report)
    }

    /// Asks the agent for the node's health, from any network namespace.
    ///
    /// # Errors
    /// If no agent serves, or the node is not healthy.
    pub fn serving(&self) -> anyhow::Result<Report> {
        let report: Report = self.agent.get("/status").context(
            "an agent has to serve before rules can go: start `dataplane run` (if it has no access to the cluster, with the manifests \
             that `dataplane-migrate import` prints)",
        )?;
        let errors: Vec<&str> = (report.findings.iter())
            .filter(|finding| finding.severity == Severity::Error && finding.object.is_none())
            .map(|finding| finding.text.as_str())
            .collect();
        ensure!(
            errors.is_empty(),
            "the agent is not healthy (`dataplane status` says what to do): {}",
            errors.join("\n")
        );
        Ok(report)
    }
}
