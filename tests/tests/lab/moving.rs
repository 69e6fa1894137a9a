//! A node that moves from kube-proxy to the agent, and back, while clients connect all the time: the
//! steps of docs/kubernetes.md.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result, ensure};
use dataplane_peers::{Cluster as Peers, Load, LocalDetector, Mode};
use dataplane_tests::{Host, Lab, report::LoadReport};
use model::Node;
use source::manifests;

use crate::{
    cluster::{Cluster, TCP, reaches, serve},
    manifest::{Manifests, Service},
    outcome::run,
};

scenarios! {
    Dataplane:
    a_node_moves_and_returns_without_a_failed_connection,
}

const TO: &str = "10.96.0.10:80";

/// kube-proxy's rules on a node, without kube-proxy: it only writes them.
pub struct Rules(Vec<Load>);

impl Rules {
    pub fn of(lab: &Lab, manifests: &Manifests) -> Result<Self> {
        let node = Node {
            name: "node2".into(),
            addresses: vec![lab.node("node2").ipv4().into()],
            ..Node::default()
        };
        let snapshot = manifests::load(&[manifests.path()], &node)?.snapshot;
        let cluster = Peers {
            local: LocalDetector::Networks(vec!["10.244.0.0/16".parse()?]),
            ..Peers::default()
        };
        Ok(Self(dataplane_peers::rules(
            Mode::Nftables,
            &snapshot,
            &cluster,
        )))
    }

    pub fn write(&self, node: &Host) -> Result<()> {
        let file = tempfile::NamedTempFile::new()?;
        for load in &self.0 {
            fs::write(file.path(), &load.input)?;
            let path = file.path().to_str().context("a path in UTF-8")?;
            node.command("nft").args(["-f", path]).run()?;
        }
        Ok(())
    }

    /// As `kube-proxy --cleanup` does.
    pub fn remove(node: &Host) -> Result<()> {
        for family in ["ip", "ip6"] {
            let table = ["delete", "table", family, "kube-proxy"];
            node.command("nft").args(table).run()?;
        }
        Ok(())
    }
}

fn a_node_moves_and_returns_without_a_failed_connection() -> Result<()> {
    let lab = Cluster::lab()?;
    let _servers = [serve(lab.pod("far"))?, serve(lab.pod("near"))?];
    let web = Service::new("web", &["10.96.0.10"])
        .port("tcp", 80, TCP)
        .endpoints(&[lab.pod("far"), lab.pod("near")]);
    let manifests = Manifests::new(&[web])?;
    let (client, node) = (lab.pod("sleep"), lab.node("node2"));
    let rules = Rules::of(&lab, &manifests)?;
    let served = |by: &str| {
        std::thread::sleep(Duration::from_millis(200));
        reaches(client, TO, "connect --count 20", &["far", "near"])
            .with_context(|| format!("served by {by}"))
            .map(drop)
    };

    rules.write(node)?;
    served("kube-proxy")?;
    let load = client.load(&["--to", TO, "--threads", "2", "--pause-us", "200"])?;
    let mut agent = lab.agent("node2").manifests(manifests.path()).start()?;
    served("the agent beside kube-proxy")?;
    // `leaving` shows the failure without it.
    run(&agent, "keep-nat")?.exits(0)?;
    Rules::remove(node)?;
    served("the agent")?;
    // And back: kube-proxy starts first, then the agent ends, then `cleanup` removes the rest.
    rules.write(node)?;
    served("the agent beside kube-proxy, again")?;
    agent.stop()?;
    served("what the agent left")?;
    run(&agent, "cleanup")?.exits(0)?;
    served("kube-proxy, again")?;

    let report: LoadReport = load.wait_json()?;
    ensure!(
        report.errors.is_empty(),
        "connections failed: {:?}",
        report.failures
    );
    ensure!(
        report.answered > 1000,
        "too few connections to mean anything: {report:?}"
    );
    Ok(())
}
