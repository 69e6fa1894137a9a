//! An API server, and an agent on a node that reads it.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use admin::client::Client;
use anyhow::{Context as _, bail};
use dataplane_tests::{
    Agent, Lab, LabBuilder,
    api::{ApiServer, Churn, Cluster, Options, objects},
};
use serde_json::Value;
use tempfile::TempDir;

use super::pods;

/// The port that the server listens on.
const PORT: u16 = 6443;
/// The nodes' own addresses are not to be in their tables, which are compared.
const NO_ADDRESSES: [&str; 2] = ["--nodeport-addresses", "203.0.113.0/24"];
/// An agent that takes longer to start will not do so.
const LIMIT: Duration = Duration::from_mins(2);

/// An API server, and an agent that reads it.
pub struct Site {
    agent: Agent,
    /// The server.
    pub server: ApiServer,
    /// What changes what it has.
    pub churn: Churn,
    /// Where the agent's tables are pinned.
    pub bpffs: PathBuf,
    kubeconfig: PathBuf,
    _directory: TempDir,
    lab: Lab,
}

impl Site {
    /// With so many services. The agent has not been started.
    pub fn new(services: u32) -> anyhow::Result<Self> {
        Self::with(services, Lab::builder().node("agent"), |_| Ok(()), &[])
    }

    /// Likewise, and with workloads on the agent's node whose connections its proxy takes.
    pub fn with_captured(services: u32) -> anyhow::Result<Self> {
        let (name, address) = pods::SERVER;
        let mut lab = Lab::builder().node("agent").pod("agent", name, address);
        for (name, address) in pods::workloads() {
            lab = lab.pod("agent", &name, &address);
        }
        let mesh = r#"{"rules": {"mode": "proxy"}, "proxy": {"accessLog": "off"}}"#;
        let captured = |cluster: &Cluster| pods::make_captured(cluster, "agent");
        Self::with(services, lab, captured, &["--mesh", mesh])
    }

    /// Likewise, and with many pods; the agent captures none of them, and wants to know all.
    pub fn with_pods(services: u32) -> anyhow::Result<Self> {
        let mesh = r#"{"rules": {"mode": "proxy", "egress": "deny"}}"#;
        let many = |cluster: &Cluster| {
            pods::make_many(cluster);
            Ok(())
        };
        Self::with(
            services,
            Lab::builder().node("agent"),
            many,
            &["--mesh", mesh],
        )
    }

    /// Likewise with Istio's kinds instead, which the agent reads by this configuration.
    pub fn with_entries(services: u32, config: &Path) -> anyhow::Result<Self> {
        let config = config.to_str().context("a path")?;
        let install = |cluster: &Cluster| {
            cluster.install_istio(Some("v1"));
            Ok(())
        };
        let lab = Lab::builder().node("agent");
        Self::with(services, lab, install, &["--config", config])
    }

    /// Likewise without the workloads, with these pods on these nodes, these objects, and these arguments of the agent on the
    /// node `agent`.
    pub fn with_dns(
        services: u32,
        pods: [(&str, (&str, &str)); 3],
        more: impl FnOnce(&Cluster) -> anyhow::Result<()>,
        arguments: &[&str],
    ) -> anyhow::Result<Self> {
        let lab = Lab::builder().node("agent").node("fresh").node("far");
        let lab = pods.iter().fold(lab, |lab, (node, (name, address))| {
            lab.pod(node, name, address)
        });
        Self::in_lab(services, lab, more, arguments)
    }

    fn with(
        services: u32,
        lab: LabBuilder,
        more: impl FnOnce(&Cluster) -> anyhow::Result<()>,
        arguments: &[&str],
    ) -> anyhow::Result<Self> {
        Self::in_lab(services, lab.node("fresh"), more, arguments)
    }

    fn in_lab(
        services: u32,
        lab: LabBuilder,
        more: impl FnOnce(&Cluster) -> anyhow::Result<()>,
        arguments: &[&str],
    ) -> anyhow::Result<Self> {
        let lab = lab.external("api").build()?;
        let cluster = Cluster::default();
        cluster.apply(objects::node("agent", "zone-a", &[]));
        cluster.apply(objects::node("fresh", "zone-a", &[]));
        let churn = Churn::new(cluster.clone(), services, 7);
        more(&cluster)?;
        let outside = lab.external("api").clone();
        let address = SocketAddr::from((outside.ipv4(), PORT));
        let options = Options {
            certified: Some(vec![outside.ipv4().to_string()]),
            ..Options::default()
        };
        let server = ApiServer::bind(cluster, options, Box::new(move || outside.listen(address)))?;
        let directory = tempfile::tempdir()?;
        let kubeconfig = server.kubeconfig(directory.path())?;
        let agent = lab
            .agent("agent")
            // As on a node whose whole hierarchy is served: the programs see the proxy's sockets.
            .in_the_nodes_cgroup()
            .args(["--kubeconfig".as_ref(), kubeconfig.as_os_str()])
            .args(NO_ADDRESSES)
            .args(arguments)
            .prepare()?;
        Ok(Self {
            bpffs: agent.bpffs().to_owned(),
            agent,
            server,
            churn,
            kubeconfig,
            _directory: directory,
            lab,
        })
    }

    /// The agent.
    pub fn agent(&self) -> &Agent {
        &self.agent
    }

    /// The nodes.
    pub fn lab(&self) -> &Lab {
        &self.lab
    }

    /// What the server has.
    pub fn cluster(&self) -> &Cluster {
        self.churn.cluster()
    }

    /// Starts the agent with empty tables: how long it takes from the first byte of an answer until
    /// everything is in the kernel.
    pub fn start_from_nothing(&mut self) -> anyhow::Result<Duration> {
        self.agent.stop()?;
        kernel::cleanup(&self.bpffs, false)?;
        self.server.faults().note_requests(true);
        self.agent.launch()?;
        let done = wait_until_synced(&self.agent)?;
        let asked = self.server.faults().asked();
        let first = asked.iter().map(|asked| asked.at).min();
        let first = first.context("the agent asked nothing")?;
        self.server.faults().note_requests(false);
        Ok(done - first)
    }

    /// Kills the agent; what it left serves.
    pub fn kill(&mut self) {
        self.agent.kill();
    }

    /// Starts the agent, with the tables that there are, and waits until they are in line.
    pub fn start(&mut self) -> anyhow::Result<()> {
        self.agent.launch()?;
        wait_until_synced(&self.agent).map(drop)
    }

    /// Another agent on another node, with empty tables, when it is in line. None of the endpoints
    /// is on either node.
    pub fn fresh(&self) -> anyhow::Result<Agent> {
        let mut agent = self
            .lab
            .agent("fresh")
            .args(["--kubeconfig".as_ref(), self.kubeconfig.as_os_str()])
            .args(NO_ADDRESSES)
            .prepare()?;
        agent.launch()?;
        wait_until_synced(&agent)?;
        Ok(agent)
    }

    /// The agent's resident memory.
    pub fn rss_mib(&self) -> anyhow::Result<f64> {
        rss_mib(&Path::new("/proc").join(self.agent.id().to_string()))
    }

    /// How often the tables were brought in line.
    pub fn syncs(&self) -> anyhow::Result<u64> {
        let status = status(&self.agent)?;
        status["agent"]["syncs"].as_u64().context("syncs")
    }

    /// What the agent says of itself.
    pub fn status(&self) -> anyhow::Result<Value> {
        status(&self.agent)
    }
}

/// Asks often, and in process: starting a command takes as long as some of what is measured.
fn wait_until_synced(agent: &Agent) -> anyhow::Result<Instant> {
    let start = Instant::now();
    loop {
        let answer = status(agent);
        if let Ok(status) = &answer
            && status["agent"]["syncs"].as_u64().unwrap_or_default() > 0
        {
            return Ok(Instant::now());
        }
        if start.elapsed() > LIMIT {
            bail!("no sync within {LIMIT:?}: {answer:?}\n{}", agent.log());
        }
        thread::sleep(Duration::from_millis(2));
    }
}

fn status(agent: &Agent) -> anyhow::Result<Value> {
    Ok(Client::new(&agent.socket()).get("/status")?)
}

/// Resident memory of a process, by its directory in `/proc`.
pub fn rss_mib(process: &Path) -> anyhow::Result<f64> {
    let status = fs::read_to_string(process.join("status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    let kib: f64 = kib
        .context("no VmRSS in /proc/PID/status")?
        .trim()
        .parse()?;
    Ok(kib / 1024.0)
}
