//! An agent before its start.

use std::ffi::{OsStr, OsString};

use super::Agent;
use crate::{
    error::Result,
    identity::create_dir,
    lab::{Host, Lab},
};

/// Makes `/proc/sys` read-only.
const READ_ONLY_SETTINGS: &str =
    "mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys";

/// The variable that chooses the agents' packet path (`dataplane run --help`).
const PACKET_PATH: &str = "DATAPLANE_PACKET_PATH";

/// The arguments of [`AgentBuilder::sockets_only`].
pub fn without_packets() -> &'static [&'static str] {
    if std::env::var_os(PACKET_PATH).is_some() {
        &[]
    } else {
        &["--packet-path", "off"]
    }
}

/// An agent that has not been started.
#[derive(Debug)]
#[must_use = "an agent runs after `start`"]
pub struct AgentBuilder<'a> {
    lab: &'a Lab,
    node: Host,
    arguments: Vec<OsString>,
    capabilities: Option<Vec<String>>,
    files: Option<[usize; 2]>,
    mounts: Option<String>,
    inside: bool,
}

impl Lab {
    /// An agent to be started on a node.
    ///
    /// # Panics
    /// When the lab has no such node.
    pub fn agent(&self, node: &str) -> AgentBuilder<'_> {
        AgentBuilder::new(self, self.node(node).clone())
    }
}

impl<'a> AgentBuilder<'a> {
    pub(crate) fn new(lab: &'a Lab, node: Host) -> Self {
        Self {
            lab,
            node,
            arguments: Vec::new(),
            capabilities: None,
            files: None,
            mounts: None,
            inside: false,
        }
    }

    /// Manifests: a file or a directory.
    pub fn manifests(self, path: impl AsRef<OsStr>) -> Self {
        self.args([OsStr::new("--manifests"), path.as_ref()])
    }

    /// Further arguments of `dataplane run`.
    pub fn args(mut self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.arguments
            .extend(arguments.into_iter().map(|a| a.as_ref().to_owned()));
        self
    }

    /// Without the packet path, whose programs are half of what the kernel verifies (`cargo xtask verifier`): for scenarios of
    /// sockets.
    /// With `DATAPLANE_PACKET_PATH` in the tests' own environment, these run with it, too.
    pub fn sockets_only(self) -> Self {
        self.args(without_packets())
    }

    /// With these capabilities and no others, as in a pod: `["NET_ADMIN"]`. So are the commands
    /// about it.
    pub fn capabilities(mut self, names: &[String]) -> Self {
        self.capabilities = Some(names.to_owned());
        self
    }

    /// With at most so many open files: the soft limit and the hard one.
    pub fn open_files(mut self, soft: usize, hard: usize) -> Self {
        self.files = Some([soft, hard]);
        self
    }

    /// With `/proc/sys` read-only, as in a container that is not privileged.
    pub fn read_only_settings(self) -> Self {
        self.mounts(READ_ONLY_SETTINGS)
    }

    /// In a mount namespace of its own, in which this shell command has been run.
    pub fn mounts(mut self, script: &str) -> Self {
        self.mounts = Some(script.to_owned());
        self
    }

    /// In a cgroup below the node's, as on a node whose whole hierarchy is served: its programs see
    /// the agent's own sockets.
    pub fn in_the_nodes_cgroup(mut self) -> Self {
        self.inside = true;
        self
    }

    /// Starts the agent and waits until `dataplane status` calls it healthy.
    ///
    /// # Errors
    /// When it is not built, ends, or is not ready within 20 s: the error holds its log.
    pub fn start(self) -> Result<Agent> {
        let mut agent = self.prepare()?;
        agent.start()?;
        Ok(agent)
    }

    /// Prepares the agent without starting it: for events before the start, and for agents that do not become ready.
    ///
    /// # Errors
    /// When it is not built, or its directories cannot be made.
    pub fn prepare(self) -> Result<Agent> {
        let programs = self.lab.programs();
        let program = programs.dataplane()?;

        let id = self.lab.id();
        let directory = id.state_dir().join(self.node.name());
        create_dir(&directory)?;
        // Beside the node's cgroup, not in it: the agent's own traffic is not a pod's.
        let cgroup = if self.inside {
            self.lab.node_cgroup(self.node.name()).join("agent")
        } else {
            id.cgroup()?.join(format!("{}-agent", self.node.name()))
        };
        create_dir(&cgroup)?;
        Ok(Agent {
            program,
            programs: programs.clone(),
            probe: programs.probe()?,
            cgroup,
            node_cgroup: self.lab.node_cgroup(self.node.name()),
            bpffs: self.lab.bpffs()?.join(self.node.name()),
            directory,
            node: self.node,
            arguments: self.arguments,
            capabilities: self.capabilities,
            files: self.files,
            mounts: self.mounts,
            process: None,
        })
    }
}
