//! An API server, and a node with an agent that reads it.

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
/// These options exclude the nodes' own addresses from the tables, so that tables of different nodes can be compared.
const NO_ADDRESSES: [&str; 2] = ["--nodeport-addresses", "203.0.113.0/24"];
/// Time limit for an agent's start.
const LIMIT: Duration = Duration::from_mins(2);

/// An API server, and an agent that reads it.
pub struct Site {
    agent: Agent,
    /// The server.
    pub server: ApiServer,
    /// Changes the server's objects.
    pub churn: Churn,
    /// The directory in which the agent's tables are pinned.
    pub bpffs: PathBuf,
    kubeconfig: PathBuf,
    _directory: TempDir,
    lab: Lab,
}

impl Site {
    /// Makes a site with this many services. Does not start the agent.
    pub fn new(services: u32) -> anyhow::Result<Self> {
        Self::with(services, Lab::builder().node("agent"), |_| Ok(()), &[])
    }

    /// Makes a site that also has workloads on the agent's node whose connections the agent's proxy captures.
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

    /// Makes a site that also has many pods. The agent captures none of them, but needs to know all.
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

    /// Makes a site with Istio's kinds, which the agent reads with this configuration.
    pub fn with_entries(services: u32, config: &Path) -> anyhow::Result<Self> {
        let config = config.to_str().context("a path")?;
        let install = |cluster: &Cluster| {
            cluster.install_istio(Some("v1"));
            Ok(())
        };
        let lab = Lab::builder().node("agent");
        Self::with(services, lab, install, &["--config", config])
    }

    /// Makes a site with these pods on these nodes, these objects, and these arguments for the agent on the node
    /// `agent`. It has no workloads.
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

    /// Returns the agent.
    pub fn agent(&self) -> &Agent {
        &self.agent
    }

    /// Returns the lab with the nodes.
    pub fn lab(&self) -> &Lab {
        &self.lab
    }

    /// Returns the server's objects.
    pub fn cluster(&self) -> &Cluster {
        self.churn.cluster()
    }

    /// Starts the agent with empty tables. Returns the time from the agent's first request until everything is in the
    /// kernel.
    pub fn start_from_nothing(&mut self) -> anyhow::Result<Duration> {
        self.agent.stop()?;
        kernel::cleanup::cleanup(&self.bpffs, false)?;
        self.server.faults().note_requests(true);
        self.agent.launch()?;
        let done = wait_until_synced(&self.agent)?;
        let asked = self.server.faults().asked();
        let first = asked.iter().map(|asked| asked.at).min();
        let first = first.context("the agent asked nothing")?;
        self.server.faults().note_requests(false);
        Ok(done - first)
    }

    /// Kills the agent. Its programs and tables continue to serve.
    pub fn kill(&mut self) {
        self.agent.kill();
    }

    /// Starts the agent with the present tables, and waits until it has reconciled them.
    pub fn start(&mut self) -> anyhow::Result<()> {
        self.agent.launch()?;
        wait_until_synced(&self.agent).map(drop)
    }

    /// Starts another agent on another node, with empty tables, and waits until it has written them. None of the
    /// endpoints is on either node.
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

    /// Returns the agent's resident memory.
    pub fn rss_mib(&self) -> anyhow::Result<f64> {
        rss_mib(&Path::new("/proc").join(self.agent.id().to_string()))
    }

    /// Returns how often the agent has reconciled the tables.
    pub fn syncs(&self) -> anyhow::Result<u64> {
        let status = status(&self.agent)?;
        status["agent"]["syncs"].as_u64().context("syncs")
    }

    /// Returns the agent's status.
    pub fn status(&self) -> anyhow::Result<Value> {
        status(&self.agent)
    }
}

/// Polls often, and in this process, because starting a command takes as long as some of the measured times.
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

/// Returns the resident memory of a process, from its directory in `/proc`.
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
