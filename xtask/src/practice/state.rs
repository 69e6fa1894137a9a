//! The state of a running practice node, in a file for `cargo xtask lab`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use dataplane_tests::{Agent, CreatorState, Lab, LabId, Role};
use serde::{Deserialize, Serialize};

const FILE: &str = "practice.json";

/// A practice node.
#[derive(Debug, Serialize, Deserialize)]
pub struct State {
    /// The lab's id.
    pub lab: String,
    /// The process that made the lab and will remove it.
    pub creator: u32,
    /// The directory with the built `dataplane` and `probe`.
    pub programs: PathBuf,
    /// Nodes and pods.
    pub hosts: Vec<HostPlace>,
    /// The dataplane's agent.
    pub agent: AgentPlace,
}

/// A node or a pod.
#[derive(Debug, Serialize, Deserialize)]
pub struct HostPlace {
    /// Its name in the lab.
    pub name: String,
    /// The pod's node, or `None` for a node.
    pub node: Option<String>,
    /// Its IPv4 address.
    pub address: std::net::Ipv4Addr,
    /// Its network namespace.
    pub netns: String,
    /// The cgroup of its processes.
    pub cgroup: PathBuf,
    /// The host's own `resolv.conf`; `None` for the machine's.
    #[serde(default)]
    pub resolv_conf: Option<PathBuf>,
}

/// The place where the agent's commands run, and the variables with which they find the agent.
#[derive(Debug, Serialize, Deserialize)]
pub struct AgentPlace {
    /// Its node's network namespace.
    pub netns: String,
    /// The cgroup of the agent itself.
    pub cgroup: PathBuf,
    /// Environment variables.
    pub environment: Vec<(String, String)>,
}

impl State {
    /// Describes a lab, the agent in it, and a pod with its `resolv.conf`.
    pub fn of(lab: &Lab, agent: &Agent, (pod, resolv_conf): (&str, &Path)) -> Self {
        let hosts = lab
            .hosts()
            .iter()
            .filter(|host| matches!(host.role(), Role::Node | Role::Pod))
            .map(|host| HostPlace {
                name: host.name().to_owned(),
                node: host.node().map(str::to_owned),
                address: host.ipv4(),
                netns: host.netns().to_owned(),
                cgroup: host.cgroup().to_owned(),
                resolv_conf: (host.name() == pod).then(|| resolv_conf.to_owned()),
            })
            .collect();
        let environment = agent
            .environment()
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value.to_string_lossy().into_owned()))
            .collect();
        Self {
            lab: lab.id().to_string(),
            creator: lab.id().creator(),
            programs: lab.programs().directory().to_owned(),
            hosts,
            agent: AgentPlace {
                netns: agent.node().netns().to_owned(),
                cgroup: agent.cgroup().to_owned(),
                environment,
            },
        }
    }

    /// Writes the state to a file in the lab's directory. The file is removed with the lab.
    pub fn write(&self, lab: &Lab) -> Result<()> {
        let path = lab.id().state_dir().join(FILE);
        fs::write(&path, serde_json::to_vec_pretty(self)?)
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// Returns the running practice nodes, sorted by id.
    pub fn running() -> Result<Vec<Self>> {
        let mut found: Vec<(LabId, Self)> = Vec::new();
        for id in LabId::all() {
            if id.creator_state() == CreatorState::Dead {
                continue;
            }
            let path = id.state_dir().join(FILE);
            // This is another kind of lab, such as a test's, or a lab that is not ready yet.
            let Ok(text) = fs::read(&path) else { continue };
            let state = serde_json::from_slice(&text)
                .with_context(|| format!("{} was written by another version", path.display()))?;
            found.push((id, state));
        }
        found.sort_by(|(a, _), (b, _)| a.cmp(b));
        Ok(found.into_iter().map(|(_, state)| state).collect())
    }
}
