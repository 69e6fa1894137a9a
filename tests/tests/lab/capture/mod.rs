//! Mesh capture: outbound and inbound connections of a pod go to a proxy in its network namespace, which gets the
//! original destination.

mod authorization;
mod boot;
mod by_kernel;
mod cleanup;
mod clients;
mod cni;
mod connections;
mod deny;
mod escapes;
mod evasions;
mod explain;
mod held;
mod identity;
mod interfaces;
mod istio;
mod machines;
mod many;
mod members;
mod metrics;
mod once;
mod origins;
mod packets;
mod probes;
mod proxies;
mod relay;
mod restart;
mod sidecar;
mod starts;
mod takeover;
mod trouble;
mod tunnels;
mod ztunnel;

pub use authorization::SCENARIOS as AUTHORIZATION;
pub use boot::SCENARIOS as BOOT;
pub use by_kernel::SCENARIOS as BY_KERNEL;
pub use cleanup::SCENARIOS as CLEANUP;
pub use clients::SCENARIOS as CLIENTS;
pub use cni::SCENARIOS as CNI;
pub use connections::SCENARIOS;
pub use deny::SCENARIOS as DENY;
pub use escapes::SCENARIOS as ESCAPES;
pub use evasions::SCENARIOS as EVASIONS;
pub use explain::SCENARIOS as EXPLAIN;
pub use held::SCENARIOS as HELD;
pub use identity::SCENARIOS as IDENTITY;
pub use interfaces::SCENARIOS as INTERFACES;
pub use istio::SCENARIOS as ISTIO;
pub use machines::SCENARIOS as MACHINES;
pub use many::SCENARIOS as MANY;
pub use members::SCENARIOS as MEMBERS;
pub use metrics::SCENARIOS as METRICS;
pub use once::SCENARIOS as ONCE;
pub use origins::SCENARIOS as ORIGINS;
pub use packets::SCENARIOS as PACKETS;
pub use probes::SCENARIOS as PROBES;
pub use proxies::SCENARIOS as PROXIES;
pub use restart::SCENARIOS as RESTART;
pub use starts::SCENARIOS as STARTS;
pub use takeover::SCENARIOS as TAKEOVER;
pub use trouble::SCENARIOS as TROUBLE;
pub use tunnels::SCENARIOS as TUNNELS;
pub use ztunnel::SCENARIOS as ZTUNNEL;

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result};
use dataplane_common::Reason;
use dataplane_tests::{Agent, Host, Lab, LabBuilder, Process};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    cluster::{self, serve},
    manifest::{Manifests, Service},
};

/// Open Service Mesh's user.
const UID: u32 = 1500;

/// A node with a client, `app`, and two servers, and a second node with one server.
struct World {
    agent: Option<Agent>,
    /// Whether the agent also serves by packets.
    by_packets: bool,
    manifests: Manifests,
    _servers: Vec<Process>,
    state: TempDir,
    lab: Lab,
}

impl World {
    fn new() -> Result<Self> {
        Self::with(|lab| lab.pod("node1", "app", "10.244.1.8"))
    }

    /// As [`World::new`], with another kind of `app`.
    fn with(app: impl FnOnce(LabBuilder) -> LabBuilder) -> Result<Self> {
        let lab = app(Lab::builder().node("node1").node("node2"))
            .pod("node1", "one", "10.244.1.5")
            .pod("node1", "two", "10.244.1.6")
            .pod("node2", "far", "10.244.2.5")
            .build()?;
        let servers = ["app", "one", "two", "far"]
            .map(|name| serve(lab.pod(name)))
            .into_iter()
            .collect::<Result<_>>()?;
        let far = lab.pod("far").clone();
        let web = Service::new("web", &["10.96.0.10", "fd00:96::10"])
            .port("tcp", 80, 7)
            .endpoints(&[&far]);
        Ok(Self {
            agent: None,
            by_packets: false,
            manifests: Manifests::new(&[web])?,
            _servers: servers,
            state: tempfile::tempdir()?,
            lab,
        })
    }

    /// The same, with an agent that also serves by packets.
    fn by_packets(self) -> Self {
        Self {
            by_packets: true,
            ..self
        }
    }

    fn app(&self) -> &Host {
        self.lab.pod("app")
    }

    /// Runs the agent with a mesh, in which `app` is captured by `rules`.
    fn capture(&mut self, proxy: Value, rules: Value) -> Result<()> {
        let mesh = mesh(proxy, rules);
        self.agent_with(&mesh, &[])
    }

    fn agent_with(&mut self, mesh: &Value, more: &[PathBuf]) -> Result<()> {
        self.agent_with_args(mesh, more, &[])
    }

    fn agent_with_args(&mut self, mesh: &Value, more: &[PathBuf], args: &[&str]) -> Result<()> {
        self.agent = None;
        let mut agent = self
            .lab
            .agent("node1")
            .in_the_nodes_cgroup()
            .manifests(self.manifests.path())
            .args(["--mesh", &mesh.to_string()])
            .args(args);
        if !self.by_packets {
            agent = agent.sockets_only();
        }
        for path in more {
            agent = agent.manifests(path);
        }
        if mesh.to_string().contains("deny") {
            agent = agent.manifests(self.pods()?);
        }
        self.agent = Some(agent.start()?);
        Ok(())
    }

    /// A file with the Pods of all hosts except `app`: by it the agent knows which addresses are Pods'.
    fn pods(&self) -> Result<PathBuf> {
        let pods = [("one", "node1"), ("two", "node1"), ("far", "node2")].map(|(name, node)| {
            let addresses = self.lab.pod(name).addresses();
            json!({
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": { "name": name, "namespace": "default" },
                "spec": { "nodeName": node, "containers": [] },
                "status": {
                    "phase": "Running",
                    "podIPs": addresses.map(|ip| json!({ "ip": ip })),
                },
            })
        });
        let path = self.state.path().join("others.yaml");
        fs::write(&path, list(&pods).to_string())?;
        Ok(path)
    }

    fn agent(&self) -> Result<&Agent> {
        self.agent.as_ref().context("an agent")
    }

    fn verdicts(&self, reason: Reason) -> Result<u64> {
        cluster::verdicts(self.agent()?, reason)
    }

    fn counted<T>(&self, reason: Reason, work: impl FnOnce() -> Result<T>) -> Result<(T, u64)> {
        cluster::counted(self.agent()?, reason, work)
    }
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "made for it where it is called"
)]
fn mesh(proxy: Value, rules: Value) -> Value {
    json!({
        "proxy": proxy,
        "workloads": [{
            "name": "default/app",
            "addresses": ["10.244.1.8", "fd00:10:244:1::8"],
            "rules": rules,
        }],
    })
}

fn foreign() -> Value {
    json!({ "uid": UID, "inbound": 15003 })
}

/// The pod `app`, as Kubernetes has it.
#[expect(
    clippy::needless_pass_by_value,
    reason = "made for it where it is called"
)]
fn pod(mode: &str, annotations: Value) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "app",
            "namespace": "default",
            "labels": { "app": "app", "istio.io/dataplane-mode": mode },
            "annotations": annotations,
        },
        "spec": { "nodeName": "node1", "containers": [] },
        "status": {
            "phase": "Running",
            "podIPs": [{ "ip": "10.244.1.8" }, { "ip": "fd00:10:244:1::8" }],
        },
    })
}

/// A Pod of this host's name and addresses, as Kubernetes has it.
fn pod_of(host: &Host, mode: &str, annotations: Value) -> Value {
    let mut object = pod(mode, annotations);
    object["metadata"]["name"] = host.name().into();
    let ips = host.addresses().map(|ip| json!({ "ip": ip }));
    object["status"]["podIPs"] = json!(ips);
    object
}

fn list(objects: &[Value]) -> Value {
    json!({ "apiVersion": "v1", "kind": "List", "items": objects })
}
