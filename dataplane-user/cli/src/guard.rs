//! `dataplane guard`.

use std::process::ExitCode;

use anyhow::bail;
use clap::Args;
use kernel::boot;
use settings::Settings;
use terminal::{PathArgs, exit};

/// Refuse connections of pods until an agent has taken over. For the node's boot, before the kubelet starts.
///
/// Attaches the agent's programs with empty tables: TCP connections and UDP datagrams from all network namespaces except
/// the node's own are refused. The agent that starts next takes the programs over, and ends the guard when it has found
/// the pods of this node. The configuration file (--config) must have `mesh:`. The command needs no API server, and
/// changes nothing if the guard stands already. `dataplane cleanup` removes the guard.
#[derive(Debug, Args)]
pub struct GuardArgs {
    #[command(flatten)]
    paths: PathArgs,

    /// The settings of the configuration file.
    #[arg(skip)]
    settings: Box<Settings>,
}

impl GuardArgs {
    pub(super) fn fill_from(&mut self, file: &Settings) {
        self.paths.fill_from(file);
        *self.settings = file.clone();
    }

    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        if self.settings.mesh.is_none() {
            bail!(
                "nothing to guard: the configuration has no `mesh:`. Name the agent's configuration file with --config \
                 (DATAPLANE_CONFIG), and set `mesh:` in it"
            );
        }
        let bpffs = self.paths.bpffs();
        let paths = kernel::Paths::find(bpffs.clone(), self.paths.cgroup.clone())?;
        match boot::raise(&paths, agent::mesh_options(&self.settings)) {
            Ok(is_new) => println!(
                "The guard in {} {}: connections from all network namespaces except the node's are refused until an \
                 agent has taken over.",
                bpffs.display(),
                if is_new { "is up" } else { "was up already" }
            ),
            Err(error @ kernel::Error::Busy { .. }) => {
                eprintln!("dataplane: no guard is needed, nothing was changed: {error}");
                return Ok(ExitCode::from(exit::BUSY));
            }
            Err(error) => return Err(error.into()),
        }
        Ok(ExitCode::SUCCESS)
    }
}
