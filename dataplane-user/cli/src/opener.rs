//! `dataplane opener`, which the agent starts.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::Args;
use kernel::opener;

/// Open sockets in other network namespaces for the agent that started this process.
#[derive(Debug, Args)]
pub struct OpenerArgs {}

impl OpenerArgs {
    #[expect(clippy::unused_self, reason = "as every command")]
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        opener::serve(rustix::stdio::stdin())
            .context("`dataplane opener` is for the agent, which starts it")?;
        Ok(ExitCode::SUCCESS)
    }
}
