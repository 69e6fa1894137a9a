//! The agent as on a node: `dataplane run` with no arguments but its manifests, so that its programs see every process
//! of the machine. Runs in a guest, never on a developer's machine.

use std::{
    ffi::OsString,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Host, Lab, patience, report::Report};
use kernel::Paths;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use settings::DEFAULT_BPFFS;
use tempfile::TempDir;

use crate::{
    cluster::{TCP, UDP, fails, reaches, serve},
    manifest::{Manifests, Service},
};

scenarios! {
    Machine:
    every_process_is_served_and_nothing_is_left,
    a_hybrid_hierarchy_is_found,
}

/// The default directories and ports exist once on a machine.
static MACHINE: Mutex<()> = Mutex::new(());

/// The root of the one cgroup v2 hierarchy, as the scenarios see it.
const ROOT: &str = "/sys/fs/cgroup";

/// Addresses that no other scenario uses: all of them see this agent's programs too.
const TO: &str = "10.96.77.10:80";
const TO_UDP: &str = "10.96.77.10:53";

/// Gives the commands that follow the mounts of a hybrid machine, as with systemd before version 243 and in some
/// managed containers: cgroup v1 at the usual place of v2, and v2 below it.
const HYBRID: &str = "set -e
    mount --make-rprivate /
    umount /sys/fs/cgroup
    mount -t tmpfs cgroups /sys/fs/cgroup
    mkdir /sys/fs/cgroup/systemd /sys/fs/cgroup/unified
    mount -t cgroup -o none,name=systemd systemd /sys/fs/cgroup/systemd
    mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified
    exec \"$@\"";

fn every_process_is_served_and_nothing_is_left() -> Result<()> {
    check(&[], ROOT)
}

fn a_hybrid_hierarchy_is_found() -> Result<()> {
    let hybrid = ["unshare", "--mount", "sh", "-c", HYBRID, "sh"];
    check(&hybrid, "/sys/fs/cgroup/unified")
}

/// Runs the agent among the mounts that `enter` makes, in which it must find the root of cgroup v2
/// at `mounted`; then clients all over the machine use a service, also after the agent ended, and
/// until it is cleaned up.
fn check(enter: &[&str], mounted: &str) -> Result<()> {
    let _only = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    let lab = Lab::builder()
        .node("node1")
        .pod("node1", "far", "10.244.1.5")
        .pod("node1", "sleep", "10.244.1.8")
        .build()?;
    let _server = serve(lab.pod("far"))?;
    let service = Service::new("everywhere", &["10.96.77.10"])
        .port("tcp", 80, TCP)
        .port("udp", 53, UDP)
        .endpoints(&[lab.pod("far")]);
    let manifests = Manifests::new(&[service])?;

    let node = Node::new(&lab, enter)?;
    let mut agent = node.run(&manifests.path())?;
    let status = node.dataplane(&["status"])?;
    ensure!(status.status.success(), "{status:?}");
    let doctor = words(&node.dataplane(&["doctor"])?);
    ensure!(
        doctor.contains(&format!("{mounted} (mounted at {mounted})")),
        "not the root that is mounted at {mounted}: {doctor}"
    );
    // By the kernel's word, not the agent's: attached to the root itself.
    for attachment in kernel::attachments(&default_paths())? {
        ensure!(attachment.problem.is_none(), "{attachment:?}");
    }

    // A cgroup that is made when the programs are already there.
    let late = Cgroup::new("dataplane-late/below/it")?;
    let everywhere = || -> Result<()> {
        for host in [lab.pod("sleep"), lab.node("node1")] {
            reaches(host, TO, "connect --count 5", &["far"])?;
            reaches(host, TO_UDP, "udp --unconnected --count 5", &["far"])?;
        }
        for cgroup in [Path::new(ROOT), &late.0] {
            for (subcommand, to) in [("connect", TO), ("udp", TO_UDP)] {
                let report = from(cgroup, &lab, lab.pod("sleep"), &[subcommand, "--to", to])?;
                ensure!(
                    report.answered == 1 && report.endpoints.contains_key("far"),
                    "{subcommand} from {}: {report:?}",
                    cgroup.display()
                );
            }
        }
        Ok(())
    };
    everywhere()?;
    agent.stop()?;
    everywhere().context("after the agent ended")?;

    let cleanup = node.dataplane(&["cleanup"])?;
    ensure!(cleanup.status.success(), "{cleanup:?}");
    ensure!(
        !Path::new(DEFAULT_BPFFS).exists(),
        "{DEFAULT_BPFFS} is still there: {cleanup:?}"
    );
    for attachment in kernel::attachments(&default_paths())? {
        ensure!(attachment.link_id.is_none(), "still there: {attachment:?}");
    }
    fails(lab.pod("sleep"), TO, "connect --timeout-ms 300", "TIMEOUT")
}

fn default_paths() -> Paths {
    Paths {
        bpffs: DEFAULT_BPFFS.into(),
        cgroup: ROOT.into(),
    }
}

/// A client in some cgroup, and in the network of a lab's host.
fn from(cgroup: &Path, lab: &Lab, host: &Host, arguments: &[&str]) -> Result<Report> {
    let probe = lab.programs().probe()?;
    let command = dataplane_tests::Command::in_place(lab.programs(), host.netns(), cgroup, probe)?;
    Ok(command.args(arguments).json()?)
}

fn words(output: &Output) -> String {
    let words = [output.stdout.as_slice(), &output.stderr].concat();
    String::from_utf8_lossy(&words).into_owned()
}

/// This machine, as the `dataplane` program sees it.
struct Node {
    program: PathBuf,
    enter: Vec<OsString>,
    logs: TempDir,
}

impl Node {
    fn new(lab: &Lab, enter: &[&str]) -> Result<Self> {
        Ok(Self {
            program: lab.programs().dataplane()?,
            enter: enter.iter().map(OsString::from).collect(),
            logs: tempfile::tempdir()?,
        })
    }

    /// `dataplane` with these arguments and no others: it has to find its paths by itself.
    fn command(&self, arguments: &[&str]) -> Command {
        let mut words = self.enter.iter();
        let mut command = match words.next() {
            Some(first) => Command::new(first),
            None => Command::new(&self.program),
        };
        command.args(words);
        if !self.enter.is_empty() {
            command.arg(&self.program);
        }
        command.args(arguments);
        command
    }

    fn dataplane(&self, arguments: &[&str]) -> Result<Output> {
        Ok(self.command(arguments).output()?)
    }

    /// Starts the agent, and waits until it is healthy.
    fn run(&self, manifests: &Path) -> Result<Running> {
        let log = self.logs.path().join("agent.log");
        let manifests = manifests.to_str().context("a path in UTF-8")?;
        let mut running = Running(
            self.command(&["run", "--manifests", manifests])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(File::create(&log)?)
                .spawn()?,
        );
        let limit = Instant::now() + patience(Duration::from_secs(20));
        while !self.dataplane(&["status"])?.status.success() {
            let ended = running.0.try_wait()?;
            ensure!(
                ended.is_none() && Instant::now() < limit,
                "the agent is not ready ({ended:?}): {}",
                fs::read_to_string(&log)?
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(running)
    }
}

/// The agent's process: `unshare` and `sh` become it.
struct Running(Child);

impl Running {
    fn stop(&mut self) -> Result<()> {
        kill(Pid::from_raw(self.0.id().try_into()?), Signal::SIGTERM)?;
        let status = self.0.wait()?;
        ensure!(status.success(), "the agent ended with {status}");
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A cgroup, with those above it, for as long as this lives.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new(path: &str) -> Result<Self> {
        let cgroup = Path::new(ROOT).join(path);
        fs::create_dir_all(&cgroup)?;
        Ok(Self(cgroup))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        for cgroup in self
            .0
            .ancestors()
            .take_while(|path| *path != Path::new(ROOT))
        {
            let _ = fs::remove_dir(cgroup);
        }
    }
}
