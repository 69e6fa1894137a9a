//! `cargo xtask lab`: inspects the practice node that `cargo xtask run` runs in another terminal,
//! and runs programs in it.

use std::{
    ffi::OsString,
    os::unix::process::ExitStatusExt as _,
    process::{ExitCode, ExitStatus},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use clap::Subcommand;
use dataplane_tests::{Command, CreatorState, LabId, Programs, sweep};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    practice::{self, State},
    style,
};

/// Look into the running practice node, and run programs in it
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Any other word is a command of `dataplane`, which runs in the practice node:
    cargo xtask lab status
    cargo xtask lab services
    cargo xtask lab explain 10.244.2.8 10.96.130.105:8000
    cargo xtask lab monitor")]
pub struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Run a program in a pod or on a node: `lab exec sleep -- curl http://10.96.130.105:8000/`
    Exec {
        /// Name of a pod or a node; see `cargo xtask lab list`
        host: String,
        /// The program and its arguments
        #[arg(last = true, required = true)]
        program: Vec<OsString>,
    },
    /// List the running practice nodes with their nodes and pods
    List,
    /// Stop the running practice nodes, and remove the remains of dead labs
    Stop,
    /// A command of `dataplane`
    #[command(external_subcommand)]
    Dataplane(Vec<OsString>),
}

pub fn main(arguments: &Arguments) -> Result<ExitCode> {
    if !nix::unistd::geteuid().is_root() {
        bail!("a practice node belongs to root: run `cargo xtask lab` as root");
    }
    match &arguments.action {
        Action::Exec { host, program } => exec(host, program),
        Action::List => list(),
        Action::Stop => stop(),
        Action::Dataplane(arguments) => dataplane(arguments),
    }
}

/// Returns the practice node to use: the one that was started last.
fn current() -> Result<State> {
    State::running()?.pop().context(
        "no practice node runs: start one with `cargo xtask run`, which stays until Ctrl-C, and \
         use another terminal",
    )
}

fn exec(host: &str, program: &[OsString]) -> Result<ExitCode> {
    let state = current()?;
    let Some(place) = state.hosts.iter().find(|place| place.name == host) else {
        let names: Vec<&str> = state
            .hosts
            .iter()
            .map(|place| place.name.as_str())
            .collect();
        bail!(
            "the practice node has no pod or node {host}; it has {}",
            names.join(", ")
        );
    };
    let (program, rest) = program.split_first().context("clap requires a program")?;
    let programs = Programs::in_directory(&state.programs);
    let mut command = Command::in_place(&programs, &place.netns, &place.cgroup, program)?;
    if let Some(file) = &place.resolv_conf {
        command = command.resolv_conf(file);
    }
    Ok(exit_code(
        with_environment(command, &state).args(rest).status()?,
    ))
}

fn dataplane(arguments: &[OsString]) -> Result<ExitCode> {
    let state = current()?;
    let programs = Programs::in_directory(&state.programs);
    let program = programs.dataplane()?;
    let agent = &state.agent;
    let command = Command::in_place(&programs, &agent.netns, &agent.cgroup, program)?;
    let mut command = with_environment(command, &state).args(arguments);
    if let [only] = arguments
        && only == "explain"
    {
        command = command.args(practice::usual_connection());
    }
    Ok(exit_code(command.status()?))
}

/// Sets the variables with which `dataplane` finds this agent and not the machine's.
fn with_environment(command: Command, state: &State) -> Command {
    state
        .agent
        .environment
        .iter()
        .fold(command, |command, (name, value)| command.env(name, value))
}

/// Returns the exit code as a shell does: 128 plus the signal for a killed program.
fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal))
        .unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

fn list() -> Result<ExitCode> {
    let running = State::running()?;
    if running.is_empty() {
        anstream::eprintln!("no practice node runs: start one with `cargo xtask run`");
    }
    for state in running {
        anstream::println!(
            "practice node {}, kept by process {}",
            state.lab,
            state.creator
        );
        anstream::println!(
            "{}  {:<10} {:<8} {:<15} NETWORK NAMESPACE{}",
            style::BOLD,
            "NAME",
            "NODE",
            "ADDRESS",
            style::RESET
        );
        for host in state.hosts {
            anstream::println!(
                "  {:<10} {:<8} {:<15} {}",
                host.name,
                host.node.as_deref().unwrap_or("-"),
                host.address.to_string(),
                host.netns
            );
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn stop() -> Result<ExitCode> {
    for state in State::running()? {
        let id: LabId = state
            .lab
            .parse()
            .ok()
            .with_context(|| format!("{} is no lab's id", state.lab))?;
        anstream::eprintln!("ending the practice node {id}");
        // Check again: between the first check and now, another process may have got the pid.
        if id.creator_state() == CreatorState::Dead {
            continue;
        }
        kill(Pid::from_raw(id.creator().cast_signed()), Signal::SIGTERM)
            .with_context(|| format!("cannot end process {}", id.creator()))?;
        let limit = Instant::now() + Duration::from_secs(30);
        while id.creator_state() == CreatorState::Alive && id.state_dir().exists() {
            if Instant::now() > limit {
                bail!("process {} has not ended within 30 s", id.creator());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    for id in sweep() {
        anstream::eprintln!("removed the remains of the dead lab {id}");
    }
    Ok(ExitCode::SUCCESS)
}
