//! `cargo xtask cluster`: a real control plane and real kubelets on this machine, for scenarios and for Kubernetes' own
//! tests.
//!
//! Every node has its own namespaces (mounts, processes, network, host name, cgroups) and its own tree of cgroups. The
//! nodes' network has no route outside. The cluster changes nothing else on the machine.

mod agent;
mod cgroups;
mod control;
mod definitions;
mod dns;
mod e2e;
mod identity;
mod images;
mod istiod;
mod kube_proxy;
mod kube_router;
mod kubectl;
mod network;
mod node;
mod place;
mod programs;
mod scenarios;
mod stand_ins;

use std::{
    env,
    ffi::OsString,
    fs,
    os::unix::process::CommandExt as _,
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail};
use dataplane_tests::Requirement;
use tokio::signal::unix::{SignalKind, signal};

pub use self::definitions::Definitions;
use self::{
    kubectl::{Kubectl, eventually},
    place::Node,
    programs::{HOW, Missing, Programs},
};
use crate::{
    build::{self, Profile},
    command::shown,
    progress::note,
    setup::{self, Purpose},
    style::{BOLD, RESET},
};

/// Run a real Kubernetes here: scenarios, and Kubernetes' own tests, with the dataplane in kube-proxy's place
///
/// A control plane and kubelets run on this machine, each node in namespaces and cgroups of its own, in a network
/// that has no route outside. `run` and `e2e` make the cluster, use it and remove it. `up` leaves it there, for
/// `run`, `e2e`, `kubectl` and `exec`, until `down`.
///
/// The programs are real: Kubernetes' come from the directory that KUBERNETES_BIN names, or else from `cargo xtask
/// judges`, the others from the distribution. Without Kubernetes' programs, `run` and `e2e` say that they are skipped,
/// and exit with 0.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
    cargo xtask cluster run --list                      the scenarios
    cargo xtask cluster run                             all of them, in a cluster made for them
    cargo xtask cluster run services upgrade            these two
    cargo xtask cluster up && cargo xtask cluster kubectl get nodes
    cargo xtask cluster exec n1 -- ip address           a program on a node
    cargo xtask cluster e2e 'session affinity'          Kubernetes' own tests whose names match
    cargo xtask cluster e2e --with nftables             the same with kube-proxy, to compare
    cargo xtask cluster istiod                          the plan beside Istio's own control plane
    cargo xtask cluster down

Kubernetes' programs:
    cargo xtask judges kubernetes-1.36  builds all of them with Go, or:
    export KUBERNETES_BIN=DIRECTORY     kube-apiserver, kube-controller-manager, kube-scheduler, kubelet, kubectl;
                                        for scenarios `kube-proxy` and `netpol` also kube-proxy; for `e2e` also
                                        e2e.test and agnhost, and kube-proxy to compare
    apt-get install etcd-server containerd runc containernetworking-plugins conntrack nftables")]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Make a cluster and leave it running
    Up(Size),
    /// Remove the cluster, or the remains of a cluster
    Down,
    /// Run scenarios: all, or only those with these names
    Run(Run),
    /// Run Kubernetes' own tests of its network ([sig-network])
    E2e(e2e::Arguments),
    /// Compare the plan and the policies with the messages of Istio's own control plane to a ztunnel about the same objects
    Istiod,
    /// Run kubectl as the cluster's administrator
    Kubectl {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Run a program on a node, or at the control plane (cp)
    Exec {
        /// n1, n2, … or cp
        member: String,
        #[arg(last = true, required = true)]
        program: Vec<OsString>,
    },
    /// The first process of a node
    #[command(hide = true)]
    Node(node::Arguments),
    /// The cluster's DNS
    #[command(hide = true)]
    Dns(dns::Arguments),
}

/// Size and kind of a cluster.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Size {
    /// Number of nodes
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=i64::from(Node::MOST)))]
    nodes: u8,
    /// Have CNI's plug-in `portmap` serve host ports, as most clusters do; otherwise the dataplane does
    #[arg(long)]
    portmap: bool,
}

#[derive(Debug, clap::Args)]
struct Run {
    /// The scenarios' names; without any, all
    scenarios: Vec<String>,
    /// Print the scenarios' names instead of running them
    #[arg(long)]
    list: bool,
    /// Leave the cluster running if a scenario fails
    #[arg(long)]
    keep: bool,
}

pub fn main(arguments: &Arguments, no_install: bool) -> Result<ExitCode> {
    match &arguments.command {
        Command::Node(arguments) => node::main(arguments),
        Command::Dns(arguments) => dns::main(arguments),
        Command::Down => down().map(|()| ExitCode::SUCCESS),
        Command::Run(run) if run.list => {
            scenarios::list();
            Ok(ExitCode::SUCCESS)
        }
        Command::Up(size) => {
            let programs = wanted(&[])?;
            if up_already() {
                bail!("a cluster is there: `cargo xtask cluster down` removes it");
            }
            let cluster = Cluster::make(&programs, *size, no_install)?;
            println!(
                "The cluster is up: {} nodes. `cargo xtask cluster kubectl get nodes`, and `cargo xtask cluster down` \
                 at the end.",
                cluster.nodes.len()
            );
            cluster.leave();
            Ok(ExitCode::SUCCESS)
        }
        Command::Run(run) => {
            let chosen = scenarios::choose(&run.scenarios)?;
            let besides = scenarios::programs(&chosen);
            let Some(programs) = or_skipped(&besides, "the scenarios")? else {
                return Ok(ExitCode::SUCCESS);
            };
            let size = Size {
                nodes: 2,
                portmap: false,
            };
            let cluster = Cluster::get(&programs, size, no_install)?;
            let failed = scenarios::run(&cluster, &chosen)?;
            if failed > 0 && run.keep {
                note("the cluster stays: `cargo xtask cluster down` removes it");
                cluster.leave();
            }
            Ok(if failed == 0 {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            })
        }
        Command::E2e(arguments) => {
            let besides = e2e::programs(arguments);
            let Some(programs) = or_skipped(&besides, "Kubernetes' own tests")? else {
                return Ok(ExitCode::SUCCESS);
            };
            e2e::main(arguments, &programs, no_install)
        }
        Command::Istiod => istiod::main(no_install),
        Command::Kubectl { arguments } => {
            let mut kubectl = Kubectl::new(&wanted(&[])?).command();
            kubectl.args(arguments);
            Err(anyhow!(
                "cannot start {}: {}",
                shown(&kubectl),
                kubectl.exec()
            ))
        }
        Command::Exec { member, program } => {
            let (first, rest) = program.split_first().context("a program")?;
            let mut command = if member == place::CONTROL {
                place::in_netns(member, first)
            } else {
                Node::named(member)?.command(first)?
            };
            command.args(rest);
            Err(anyhow!(
                "cannot start {}: {}",
                shown(&command),
                command.exec()
            ))
        }
    }
}

/// Returns the programs. Fails if one is missing.
fn wanted(besides: &[&str]) -> Result<Programs> {
    if let Some(lack) = dataplane_tests::missing(Requirement::Dataplane) {
        bail!("a cluster cannot run here: this machine {lack}");
    }
    Programs::find(besides).map_err(|missing| match missing {
        Missing::NoDirectory => anyhow!("there are no programs of Kubernetes.\n{HOW}"),
        Missing::Programs(lines) => anyhow!("missing:\n    {}\n{HOW}", lines.join("\n    ")),
    })
}

/// Returns the programs. If the user names no directory and there is none, prints that `what` is skipped and returns
/// `None`. If there is a directory, a missing program is an error.
fn or_skipped(besides: &[&str], what: &str) -> Result<Option<Programs>> {
    if matches!(Programs::find(besides), Err(Missing::NoDirectory)) {
        println!("skipped {what}: there are no programs of Kubernetes.\n{HOW}");
        return Ok(None);
    }
    wanted(besides).map(Some)
}

/// Returns whether a cluster, or a part of one, exists.
fn up_already() -> bool {
    !network::members().is_empty()
}

/// A running cluster.
pub struct Cluster {
    pub programs: Programs,
    pub kubectl: Kubectl,
    pub nodes: Vec<Node>,
    /// The program `probe`, which connects and serves.
    pub probe: PathBuf,
    /// The program `dataplane`.
    pub dataplane: PathBuf,
    /// Whether this value removes the cluster when it is dropped.
    ours: bool,
}

impl Cluster {
    /// Returns the existing cluster, or makes a new one.
    fn get(programs: &Programs, size: Size, no_install: bool) -> Result<Self> {
        if !up_already() {
            return Self::make(programs, size, no_install);
        }
        note("using the running cluster");
        let (dataplane, probe) = built(no_install)?;
        let mut cluster = Self::new(programs, 0, dataplane, probe);
        cluster.nodes = Node::all(Node::MOST)
            .into_iter()
            .filter(|node| node.init().is_ok())
            .collect();
        // Import the images again: the programs may have been rebuilt.
        cluster.images()?;
        for node in &cluster.nodes {
            for image in images::archives()? {
                node::import(*node, &image)?;
            }
        }
        cluster.ours = false;
        Ok(cluster)
    }

    fn new(programs: &Programs, nodes: u8, dataplane: PathBuf, probe: PathBuf) -> Self {
        Self {
            programs: programs.clone(),
            kubectl: Kubectl::new(programs),
            nodes: Node::all(nodes),
            probe,
            dataplane,
            ours: true,
        }
    }

    /// Makes a cluster. It is removed when the value is dropped, and on Ctrl-C.
    fn make(programs: &Programs, size: Size, no_install: bool) -> Result<Self> {
        Self::make_with(programs, size, no_install, &[])
    }

    /// Makes a cluster whose nodes have more images.
    fn make_with(
        programs: &Programs,
        size: Size,
        no_install: bool,
        archives: &[PathBuf],
    ) -> Result<Self> {
        let (dataplane, probe) = built(no_install)?;
        let started = Instant::now();
        down()?;
        remove_when_interrupted()?;
        let cluster = Self::new(programs, size.nodes, dataplane, probe);
        note(&format!(
            "making a cluster: a control plane and {} nodes, no route outside",
            size.nodes
        ));
        for directory in [place::control_directory(), images::directory()] {
            fs::create_dir_all(&directory)
                .with_context(|| format!("cannot create {}", directory.display()))?;
        }
        cluster.images()?;
        for archive in archives {
            let name = archive.file_name().context("an archive's name")?;
            fs::copy(archive, images::directory().join(name))
                .with_context(|| format!("cannot copy {}", archive.display()))?;
        }
        identity::make(&cluster.nodes)?;
        network::make(&cluster.nodes)?;
        control::start(programs, &cluster.kubectl)?;
        for node in &cluster.nodes {
            node::start(programs, *node, size.portmap)?;
        }
        eventually(Duration::from_mins(4), || cluster.all_ready())?;
        note(&format!(
            "the cluster is ready after {} s",
            started.elapsed().as_secs()
        ));
        Ok(cluster)
    }

    fn images(&self) -> Result<()> {
        images::make(&self.dataplane, &self.probe)
    }

    fn all_ready(&self) -> Result<()> {
        let nodes = self.kubectl.list(&["nodes"])?;
        let ready = nodes.iter().filter(|node| {
            let conditions = node["status"]["conditions"].as_array();
            conditions.is_some_and(|all| {
                all.iter()
                    .any(|one| one["type"] == "Ready" && one["status"] == "True")
            })
        });
        let ready = ready.count();
        if ready < self.nodes.len() {
            let logs: Vec<String> = self
                .nodes
                .iter()
                .map(|node| node.directory().join("kubelet.log").display().to_string())
                .collect();
            bail!(
                "{ready} of {} nodes are ready; see {}",
                self.nodes.len(),
                logs.join(", ")
            );
        }
        Ok(())
    }

    /// Leaves the cluster running.
    fn leave(mut self) {
        self.ours = false;
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if self.ours
            && let Err(error) = down()
        {
            anstream::eprintln!("the cluster: {error:#}");
        }
    }
}

/// Returns the programs `dataplane` and `probe`: those in DATAPLANE_BIN and DATAPLANE_PROBE_BIN, or newly built ones.
fn built(no_install: bool) -> Result<(PathBuf, PathBuf)> {
    let named = |variable| env::var_os(variable).map(PathBuf::from);
    if let (Some(dataplane), Some(probe)) = (named("DATAPLANE_BIN"), named("DATAPLANE_PROBE_BIN")) {
        return Ok((dataplane, probe));
    }
    build::programs(&setup::ensure(Purpose::Lab, no_install)?)?;
    build::binaries(Profile::Debug, &build::BINARIES)?;
    Ok((
        Profile::Debug.binary("dataplane"),
        Profile::Debug.binary("probe"),
    ))
}

/// Removes all parts of a cluster. Does nothing if there is no cluster.
fn down() -> Result<()> {
    let was = up_already();
    cgroups::remove()?;
    network::remove()?;
    let directory = place::directory();
    if directory.exists() {
        fs::remove_dir_all(directory)
            .with_context(|| format!("cannot remove {}", directory.display()))?;
    }
    if was {
        note("the cluster is removed");
    }
    Ok(())
}

/// Has Ctrl-C, SIGTERM and the end of the terminal remove the cluster before this process ends.
fn remove_when_interrupted() -> Result<()> {
    // The signals have handlers and are not blocked: child processes inherit blocked signals, and the cluster's
    // programs must end by SIGTERM.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let signals = {
        let _entered = runtime.enter();
        [
            SignalKind::interrupt(),
            SignalKind::terminate(),
            SignalKind::hangup(),
        ]
        .map(signal)
    };
    #[expect(
        clippy::disallowed_methods,
        reason = "the main thread waits for programs that are gone, or lost"
    )]
    std::thread::spawn(move || -> Result<()> {
        runtime.block_on(async {
            let [interrupt, terminate, hangup] = signals;
            let (mut interrupt, mut terminate, mut hangup) = (interrupt?, terminate?, hangup?);
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                _ = hangup.recv() => {}
            }
            anyhow::Ok(())
        })?;
        anstream::eprintln!("{BOLD}stopped:{RESET} removing the cluster");
        if let Err(error) = down() {
            anstream::eprintln!("{error:#}");
        }
        std::process::exit(130);
    });
    Ok(())
}
