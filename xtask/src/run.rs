//! `cargo xtask run`: the practice node, or the agent on this node.

use std::{
    ffi::{OsStr, OsString},
    os::unix::{ffi::OsStrExt, process::CommandExt},
    process::{Command, ExitCode},
};

use anyhow::{Result, bail};

use crate::{
    build::{self, Profile},
    command::shown,
    setup::{self, Purpose},
};

/// Run the dataplane: on this node with arguments after `--`
///
/// `cargo xtask run -- --manifests FILE` builds the agent and runs `dataplane run --manifests FILE`
/// on this node; any other subcommand works too: `cargo xtask run -- status`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The agent's own arguments; see `cargo xtask run -- --help`
    #[arg(last = true)]
    agent: Vec<OsString>,
}

pub fn main(arguments: &Arguments, no_install: bool) -> Result<ExitCode> {
    if arguments.agent.is_empty() {
        bail!(
            "tell the agent what to serve, after two dashes:\n    \
             cargo xtask run -- --manifests FILE"
        );
    }
    build::programs(&setup::ensure(Purpose::Build, no_install)?)?;
    build::binaries(Profile::Release, &build::BINARIES)?;

    let mut agent = Command::new(Profile::Release.binary("dataplane"));
    agent.args(agent_arguments(&arguments.agent));
    if !nix::unistd::geteuid().is_root() {
        anstream::eprintln!(
            "note: loading programs into the kernel takes root; if the agent says so too:\n    \
             sudo {}",
            shown(&agent)
        );
    }
    // In our place, so that signals and the exit code are the agent's own.
    Err(agent.exec()).map_err(|error| anyhow::anyhow!("cannot start {}: {error}", shown(&agent)))
}

/// `--manifests x` means `run --manifests x`.
fn agent_arguments(given: &[OsString]) -> Vec<&OsStr> {
    let option = given
        .first()
        .is_some_and(|first| first.as_bytes().starts_with(b"-"));
    let help = given
        .first()
        .is_some_and(|first| first == "-h" || first == "--version");
    let implied = (option && !help).then_some(OsStr::new("run"));
    implied
        .into_iter()
        .chain(given.iter().map(OsString::as_os_str))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(arguments: &[&str]) -> Vec<String> {
        let arguments: Vec<OsString> = arguments.iter().map(OsString::from).collect();
        agent_arguments(&arguments)
            .iter()
            .map(|word| word.to_string_lossy().into_owned())
            .collect()
    }

    #[test]
    fn an_option_alone_implies_run() {
        assert_eq!(
            given(&["--manifests", "a.yaml"]),
            ["run", "--manifests", "a.yaml"]
        );
        assert_eq!(
            given(&["run", "--manifests", "a.yaml"]),
            ["run", "--manifests", "a.yaml"]
        );
        assert_eq!(given(&["status"]), ["status"]);
    }
}
