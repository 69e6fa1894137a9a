//! Joins a cgroup and a network namespace, then becomes another program.

use std::{
    ffi::OsString,
    fs::{self, File},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use nix::{
    sched::{CloneFlags, setns},
    sys::{prctl::set_pdeathsig, signal::Signal},
    unistd::{Pid, getppid},
};

#[derive(Args)]
pub struct Arguments {
    /// Name of the network namespace (`ip netns list`)
    #[arg(long)]
    netns: String,
    /// Directory of the cgroup (v2)
    #[arg(long, value_name = "DIR")]
    cgroup: PathBuf,
    /// End when this process, the one that starts us, ends
    #[arg(long, value_name = "PID")]
    parent: Option<i32>,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

pub fn run(arguments: &Arguments) -> Result<()> {
    if let Some(parent) = arguments.parent {
        // Survives the exec below.
        set_pdeathsig(Signal::SIGKILL).context("ask to be killed when the parent dies")?;
        if getppid() != Pid::from_raw(parent) {
            bail!("the parent {parent} has ended");
        }
    }
    let procs = arguments.cgroup.join("cgroup.procs");
    // 0 is the writer.
    fs::write(&procs, "0")
        .with_context(|| format!("join the cgroup: write {}", procs.display()))?;
    let path = Path::new("/run/netns").join(&arguments.netns);
    let netns = File::open(&path).with_context(|| format!("open {}", path.display()))?;
    setns(netns, CloneFlags::CLONE_NEWNET).with_context(|| format!("enter {}", path.display()))?;
    let (program, rest) = arguments
        .program
        .split_first()
        .expect("clap requires a program");
    let error = Command::new(program).args(rest).exec();
    Err(error).with_context(|| format!("run {}", program.display()))
}
