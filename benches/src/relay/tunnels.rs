//! The tunnels of `bench relay`: a client and a server in pods on two nodes, and on each node an agent, or in each pod a
//! ztunnel. Both systems have the same lab, the same authority and no access log.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use dataplane_tests::{Agent, Host, Lab, Process, ztunnel};
use kernel::rig::Traced;
use serde_json::json;
use tokio::runtime::Runtime;

use super::relays::{Relay, SEATS};

/// The port of HBONE.
pub const PORT: u16 = 15008;
/// The directory of the authority.
const AUTHORITY: &str = "ca";
/// The file with the certificate and the key of the client that makes handshakes.
const GUEST: &str = "guest.pem";
/// The agents' file with the pods.
const PODS: &str = "pods.yaml";
/// The ztunnels' file with the pods.
const XDS: &str = "xds.yaml";

/// What tunnels of both systems need: files, and the authorities that ztunnels ask.
pub struct Tunnelled {
    ztunnel: Option<PathBuf>,
    _authorities: Vec<Runtime>,
    files: tempfile::TempDir,
}

/// The pods of a relay: the client's, and the server's.
fn pods(lab: &Lab, relay: Relay) -> [&Host; 2] {
    [0, 1].map(|end| lab.pod(SEATS[relay.seat() + end].0))
}

impl Tunnelled {
    /// Makes an authority, the files of both systems, and the rules that lead to ztunnel.
    ///
    /// # Errors
    /// Fails if the machine lacks a program, or `ztunnel` names none.
    pub fn prepare(lab: &Lab, ztunnel: Option<&Path>) -> anyhow::Result<Self> {
        let ztunnel = ztunnel.map(|program| {
            let found = fs::canonicalize(program);
            found.with_context(|| format!("--ztunnel: cannot find {}", program.display()))
        });
        let ztunnel = ztunnel.transpose()?;
        let files = tempfile::tempdir()?;
        let file = |name| files.path().join(name);
        let authority = file(AUTHORITY);
        ztunnel::init(lab, &authority)?;
        let identity = "spiffe://cluster.local/ns/default/sa/guest";
        fs::write(file(GUEST), ztunnel::issue(&authority, identity)?)?;
        let objects = pods(lab, Relay::Hbone).map(ztunnel::pod);
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": objects });
        fs::write(file(PODS), list.to_string())?;
        let mut authorities = vec![];
        if ztunnel.is_some() {
            let pods = pods(lab, Relay::Ztunnel);
            let xds = json!({ "workloads": pods.map(ztunnel::workload) });
            fs::write(file(XDS), xds.to_string())?;
            for pod in pods {
                ztunnel::redirect(pod)?;
                authorities.push(ztunnel::serve(pod, &authority)?);
            }
        }
        Ok(Self {
            ztunnel,
            _authorities: authorities,
            files,
        })
    }

    fn file(&self, name: &str) -> PathBuf {
        self.files.path().join(name)
    }

    /// Returns the file with the certificate and the key of a client that makes handshakes.
    pub fn certificate(&self) -> PathBuf {
        self.file(GUEST)
    }

    /// Starts the processes of a relay that tunnels.
    ///
    /// # Errors
    /// Fails if a process does not start.
    pub fn start(&self, lab: &Lab, relay: Relay) -> anyhow::Result<Tunnels> {
        let pods = pods(lab, relay);
        let mut tunnels = Tunnels::default();
        if relay == Relay::Ztunnel {
            let program = self.ztunnel.as_deref().context("a ztunnel")?;
            for pod in pods {
                let log = self.file(&format!("{}.log", pod.name()));
                let file = File::create(&log)?;
                let xds = self.file(XDS);
                let command = ztunnel::command(program, pod, &xds, &self.file(AUTHORITY));
                let command = command.env("RUST_LOG", "error");
                let command = command.stdout(file.try_clone()?).stderr(file);
                tunnels.ztunnels.push((command.spawn()?, log));
            }
            return Ok(tunnels);
        }
        let mesh = json!({
            "identity": { "source": { "ca": { "directory": self.file(AUTHORITY) } } },
            "rules": { "mode": "proxy" },
            "proxy": { "accessLog": "off" },
        });
        for pod in pods {
            let node = pod.node().context("a pod's node")?;
            let agent = lab.agent(node).in_the_nodes_cgroup();
            let agent = agent.manifests(self.file(PODS));
            let agent = agent.args(["--mesh", &mesh.to_string()]).start()?;
            let traced = Traced::of(agent.bpffs())?;
            traced.detach()?;
            tunnels.agents.push((agent, traced));
        }
        Ok(tunnels)
    }
}

/// The processes of both ends. Dropping it ends them.
#[derive(Default)]
pub struct Tunnels {
    agents: Vec<(Agent, Traced)>,
    /// Each with the file of its log.
    ztunnels: Vec<(Process, PathBuf)>,
}

impl Tunnels {
    /// Returns the processes' numbers.
    pub fn processes(&self) -> Vec<u32> {
        let agents = self.agents.iter().map(|(agent, _)| agent.id());
        let ztunnels = self.ztunnels.iter().map(|(process, _)| process.id());
        agents.chain(ztunnels).collect()
    }

    /// Returns the programs of the agents that see every socket of the machine.
    pub fn traced(&self) -> impl Iterator<Item = &Traced> {
        self.agents.iter().map(|(_, traced)| traced)
    }

    /// Returns the ends of the processes' logs.
    pub fn log(&self) -> String {
        let agents = self.agents.iter().map(|(agent, _)| agent.log());
        let ztunnels = self.ztunnels.iter();
        let ztunnels = ztunnels.map(|(_, log)| fs::read_to_string(log).unwrap_or_default());
        let ends = agents.chain(ztunnels).map(|text| {
            let lines: Vec<&str> = text.lines().collect();
            lines[lines.len().saturating_sub(15)..].join("\n")
        });
        ends.collect::<Vec<_>>().join("\n---\n")
    }
}

/// Checks that the client's pod has a tunnel: otherwise its connections were plaintext.
///
/// # Errors
/// Fails if there is none.
pub fn check(client: &Host) -> anyhow::Result<()> {
    let to = format!(":{PORT}");
    let filter = ["-Htn", "state", "established", "dport", "=", &to];
    let found = client.command("ss").args(filter).run()?;
    ensure!(
        !found.trim().is_empty(),
        "connections of {} do not take a tunnel",
        client.name()
    );
    Ok(())
}
