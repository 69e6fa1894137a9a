//! `cargo xtask run`: runs the practice node, or the agent on this node.

use std::{
    ffi::{OsStr, OsString},
    os::unix::{ffi::OsStrExt, process::CommandExt},
    process::{Command, ExitCode},
};

use anyhow::Result;
use dataplane_tests::Programs;

use crate::{
    build::{self, Profile},
    command::shown,
    practice,
    setup::{self, Purpose},
};

/// Run the dataplane: in a practice node, or on this node with arguments after `--`
///
/// Without arguments, makes a practice node: two nodes, nine pods and a server outside of the cluster, as network
/// namespaces without a route to this machine's network, a service with six endpoints, and the dataplane loaded in one
/// of the nodes. Sends a few hundred real requests and prints their results. Then a pod finds a service and a host of a
/// ServiceEntry by their names, and the L4 proxy relays connections of another pod. The practice node stays until
/// Ctrl-C, which removes all of it; meanwhile, `cargo xtask lab` inspects it.
///
/// With arguments, builds `dataplane` and runs it on this node itself: `cargo xtask run --
/// --manifests FILE` runs `dataplane run --manifests FILE`. Other subcommands work too, for example
/// `cargo xtask run -- status`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Practice node: end after the requests; exit with 0 only if all of them were answered
    #[arg(long, conflicts_with = "agent")]
    once: bool,
    /// Practice node: output format of the result
    #[arg(long, value_enum, default_value_t = Output::Text, conflicts_with = "agent")]
    output: Output,
    /// Arguments of `dataplane`; see `cargo xtask run -- --help`
    #[arg(last = true)]
    agent: Vec<OsString>,
}

/// Format of the practice node's result on standard output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    /// Tables for people
    Text,
    /// One JSON document
    Json,
}

pub fn main(arguments: &Arguments, no_install: bool) -> Result<ExitCode> {
    let practice = arguments.agent.is_empty();
    let purpose = if practice {
        Purpose::Lab
    } else {
        Purpose::Build
    };
    // Check this before spending minutes on tools and builds.
    if practice && !nix::unistd::geteuid().is_root() {
        practice::check()?;
    }
    let tools = setup::ensure(purpose, no_install)?;
    if practice {
        practice::check()?;
    }
    // The practice node uses the debug profile, because the tests share this build, and because the kernel programs,
    // which decide, are optimised in both profiles. A node runs the shipped profile.
    let profile = if practice {
        Profile::Debug
    } else {
        Profile::Release
    };
    build::announce(profile);
    build::programs(&tools)?;
    build::binaries(profile, &build::BINARIES)?;
    if practice {
        let dataplane = profile.binary("dataplane");
        let directory = dataplane.parent().expect("a binary lies in a directory");
        return practice::run(&practice::Options {
            once: arguments.once,
            json: arguments.output == Output::Json,
            programs: Programs::in_directory(directory),
        });
    }

    let mut agent = Command::new(profile.binary("dataplane"));
    agent.args(agent_arguments(&arguments.agent));
    if !nix::unistd::geteuid().is_root() {
        anstream::eprintln!(
            "note: loading programs into the kernel takes root; if the agent says so too:\n    \
             sudo {}",
            shown(&agent)
        );
    }
    // Replace this process, so that signals and the exit code are the agent's own.
    Err(agent.exec()).map_err(|error| anyhow::anyhow!("cannot start {}: {error}", shown(&agent)))
}

/// Turns `--manifests x` into `run --manifests x`.
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
