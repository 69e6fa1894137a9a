//! Two nodes: the agent, and a ztunnel.

use std::{
    fs::{self, File},
    net::IpAddr,
    os::fd::OwnedFd,
    path::PathBuf,
};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Agent, Host, Lab, Process, ztunnel};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::{
    capture::tunnels,
    cluster::{eventually, serve},
    manifest::{Manifests, Service},
    sockets::tap,
};

/// The identities of both Pods.
pub const APP: &str = "spiffe://cluster.local/ns/default/sa/app";
pub const FAR: &str = "spiffe://cluster.local/ns/default/sa/far";

/// `app` is captured by the agent of node1. `far`, on node2, has a ztunnel of its own in its network namespace.
pub struct World {
    pub agent: Agent,
    ztunnel: Option<Process>,
    program: PathBuf,
    /// Whether ztunnel knows `app` by its control plane.
    pub knows_app: bool,
    manifests: Manifests,
    _servers: Vec<Process>,
    _authority: Runtime,
    state: TempDir,
    pub lab: Lab,
}

impl World {
    /// `access_log`: the format of the agent's access log.
    pub fn new(program: PathBuf, access_log: &str) -> Result<Self> {
        let lab = Lab::builder()
            .node("node1")
            .node("node2")
            .pod("node1", "app", "10.244.1.8")
            .pod("node2", "far", "10.244.2.5")
            .build()?;
        let servers = ["app", "far"].map(|name| serve(lab.pod(name)));
        let state = tempfile::tempdir()?;
        let directory = state.path().join("ca");
        let identity = json!({ "source": { "ca": { "directory": directory } } });
        let mesh = json!({
            "identity": identity,
            "rules": { "mode": "proxy" },
            "proxy": { "accessLog": access_log },
        });
        let manifests = Manifests::new(&[])?;
        let agent = lab.agent("node1").in_the_nodes_cgroup().sockets_only();
        let agent = agent.manifests(manifests.path());
        let agent = agent.args(["--mesh", &mesh.to_string()]).prepare()?;
        ztunnel::init(&lab, &directory)?;
        let mut world = Self {
            agent,
            ztunnel: None,
            program,
            knows_app: true,
            manifests,
            _servers: servers.into_iter().collect::<Result<_>>()?,
            _authority: ztunnel::serve(lab.pod("far"), &directory)?,
            state,
            lab,
        };
        world.write(&[])?;
        world.redirect()?;
        world.agent.start()?;
        world.restart(&[])?;
        Ok(world)
    }

    pub fn app(&self) -> &Host {
        self.lab.pod("app")
    }

    pub fn far(&self) -> &Host {
        self.lab.pod("far")
    }

    pub fn ztunnel(&self) -> Result<&Process> {
        self.ztunnel.as_ref().context("a ztunnel")
    }

    /// Writes the objects of the agent, and these policies.
    pub fn write(&self, policies: &[Value]) -> Result<()> {
        let pod = |of: &Host| {
            let mut object = ztunnel::pod(of);
            object["metadata"]["labels"]["app"] = of.name().into();
            object
        };
        let mut moved = pod(self.far());
        moved["metadata"]["name"] = "moved".into();
        moved["status"]["podIPs"] = json!([{ "ip": "10.244.2.99" }]);
        let web = Service::new("web", &["10.96.0.10"]).port("http", 80, 80);
        let web = web.endpoints(&[self.far()]);
        let back = Service::new("back", &["10.96.0.11"]).port("http", 80, 80);
        let back = back.endpoints(&[self.app()]);
        let node = json!({
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": "node1",
                "labels": {
                    "topology.kubernetes.io/region": "east",
                    "topology.kubernetes.io/zone": "east-1",
                },
            },
        });
        let objects = [
            &[node, pod(self.app()), pod(self.far()), moved][..],
            policies,
        ]
        .concat();
        Ok(self.manifests.write_with(&[web, back], &objects)?)
    }

    /// Has connections of `far` go to ztunnel, as Istio's CNI plug-in does, and makes 10.244.2.99 an address of `far` at
    /// which ztunnel does not serve.
    fn redirect(&self) -> Result<()> {
        ztunnel::redirect(self.far())?;
        let tables = self.far().command("iptables");
        let moved = "-w -t nat -A PREROUTING -d 10.244.2.99 -j DNAT --to-destination 10.244.2.5";
        tables.args(moved.split(' ')).run()?;
        self.lab
            .node("node2")
            .ip("route add 10.244.2.99/32 via 10.244.2.5 dev veth-far onlink")?;
        Ok(())
    }

    /// Starts ztunnel, instead of the one that runs. Its policies deny these service accounts.
    pub fn restart(&mut self, denied: &[&str]) -> Result<()> {
        self.ztunnel = None;
        let config = self.state.path().join("ztunnel.yaml");
        // JSON, except for what only YAML has: keys that are numbers, and tags.
        let text = self.config(denied).to_string();
        let text = text
            .replace("\"80\":", "80: ")
            .replace("\"!Exact ", "!Exact \"");
        fs::write(&config, text)?;
        let mut append = File::options();
        let log = append.create(true).append(true).open(self.log())?;
        let authority = self.state.path().join("ca");
        let command = ztunnel::command(&self.program, self.far(), &config, &authority)
            .env("RUST_LOG", "info")
            .stdout(log.try_clone()?)
            .stderr(log);
        self.ztunnel = Some(command.spawn()?);
        eventually(|| {
            let listening = self.far().command("ss").args(["-Hltn"]).run()?;
            ensure!(
                [":15001", ":15008"]
                    .iter()
                    .all(|port| listening.contains(port)),
                "it does not listen: {listening}{}",
                self.log_text()
            );
            Ok(())
        })
    }

    /// What ztunnel knows, in the form of its `LOCAL_XDS_PATH`.
    fn config(&self, denied: &[&str]) -> Value {
        let workload = |of: &Host, service: &str| {
            let mut workload = ztunnel::workload(of);
            workload["services"] = json!({ service: { "80": 80 } });
            workload["clusterId"] = "Kubernetes".into();
            for key in ["workloadName", "canonicalName"] {
                workload[key] = of.name().into();
            }
            let place = json!({ "region": "west", "zone": "west-1", "subzone": "" });
            workload["locality"] = place;
            workload
        };
        let service = |name: &str, vip: &str| {
            json!({
                "name": name,
                "namespace": "default",
                "hostname": format!("{name}.default.svc.cluster.local"),
                "vips": [format!("/{vip}")],
                "ports": { "80": 80 },
            })
        };
        let mut by_waypoint = service("by-waypoint", "10.96.0.12");
        by_waypoint["waypoint"] = json!({ "destination": "/10.244.1.8", "hboneMtlsPort": 15008 });
        let policies = denied.iter().map(|account| {
            let principal = format!("!Exact cluster.local/ns/default/sa/{account}");
            json!({
                "name": format!("deny-{account}"),
                "namespace": "default",
                "scope": "Namespace",
                "action": "Deny",
                "rules": [[[{ "principals": [principal] }]]],
                "dryRun": false,
            })
        });
        let mut workloads = vec![workload(
            self.far(),
            "default/web.default.svc.cluster.local",
        )];
        if self.knows_app {
            workloads.push(workload(
                self.app(),
                "default/back.default.svc.cluster.local",
            ));
        }
        json!({
            "workloads": workloads,
            "services": [service("back", "10.96.0.11"), service("web", "10.96.0.10"), by_waypoint],
            "policies": policies.collect::<Vec<_>>(),
        })
    }

    fn log(&self) -> PathBuf {
        self.state.path().join("ztunnel.log")
    }

    pub fn log_text(&self) -> String {
        fs::read_to_string(self.log()).unwrap_or_default()
    }

    /// Wants a line of ztunnel's log to have all of these.
    pub fn ztunnel_says(&self, words: &[&str]) -> Result<()> {
        says(&self.log_text(), words)
    }

    /// Wants a line of the agent's log to have all of these.
    pub fn we_say(&self, words: &[&str]) -> Result<()> {
        says(&self.agent.log(), words)
    }

    pub fn taps(&self) -> Result<Vec<OwnedFd>> {
        let nodes = ["node1", "node2"].map(|node| tap(self.lab.node(node)));
        nodes.into_iter().collect()
    }

    /// Wants nothing between the Pods but tunnels, and returns the number of packets.
    pub fn only_tunnels(&self, taps: &[OwnedFd]) -> Result<usize> {
        let ends: Vec<IpAddr> = [self.app(), self.far()].map(Host::addresses).concat();
        tunnels::only_tunnels(taps, &ends)
    }
}

fn says(log: &str, words: &[&str]) -> Result<()> {
    let all = |line: &str| words.iter().all(|word| line.contains(word));
    ensure!(log.lines().any(all), "no line has {words:?}: {log}");
    Ok(())
}
