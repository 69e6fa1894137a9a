//! Joins a cgroup and a network namespace, gives up capabilities, then becomes another program.

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
    mount::{MsFlags, mount},
    sched::{CloneFlags, setns, unshare},
    sys::{prctl::set_pdeathsig, signal::Signal},
    unistd::{Pid, getppid},
};
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};

#[derive(Args)]
pub struct Arguments {
    /// Name of the network namespace (`ip netns list`)
    #[arg(long)]
    netns: String,
    /// Directory of the cgroup (v2)
    #[arg(long, value_name = "DIR")]
    cgroup: PathBuf,
    /// End when this process, our parent, ends
    #[arg(long, value_name = "PID")]
    parent: Option<i32>,
    /// Keep only these capabilities: `NET_ADMIN,BPF`
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    capabilities: Option<Vec<String>>,
    /// Run the program as this user and group
    #[arg(long, value_name = "ID")]
    user: Option<u32>,
    /// A file that the program sees in the place of /etc/resolv.conf
    #[arg(long, value_name = "FILE")]
    resolv_conf: Option<PathBuf>,
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
    if let Some(file) = &arguments.resolv_conf {
        place(file, Path::new("/etc/resolv.conf"))?;
    }
    if let Some(names) = &arguments.capabilities {
        keep_only(names)?;
    }
    let (program, rest) = arguments
        .program
        .split_first()
        .expect("clap requires a program");
    let mut command = Command::new(program);
    if let Some(id) = arguments.user {
        command.uid(id).gid(id);
    }
    let error = command.args(rest).exec();
    Err(error).with_context(|| format!("run {}", program.display()))
}

/// Puts a file in the place of another, for this process and its children.
fn place(file: &Path, at: &Path) -> Result<()> {
    const NONE: Option<&str> = None;
    unshare(CloneFlags::CLONE_NEWNS).context("make a mount namespace")?;
    // Otherwise the machine would see it, too.
    mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE)
        .context("make the mounts private")?;
    mount(Some(file), at, NONE, MsFlags::MS_BIND, NONE)
        .with_context(|| format!("mount {} at {}", file.display(), at.display()))
}

/// A program that root runs gets the capabilities in the bounding set.
fn keep_only(names: &[String]) -> Result<()> {
    let mut kept = CapabilitySet::empty();
    for name in names {
        kept |= CapabilitySet::from_name(name).with_context(|| format!("no capability: {name}"))?;
    }
    for capability in CapabilitySet::all().difference(kept).iter() {
        match remove_capability_from_bounding_set(capability) {
            // This kernel does not know the capability, so no process has it.
            Ok(()) | Err(rustix::io::Errno::INVAL) => {}
            Err(error) => return Err(error).with_context(|| format!("give up {capability:?}")),
        }
    }
    Ok(())
}
