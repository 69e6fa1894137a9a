//! Endpoints with hints for zones and nodes, as clients see them: `trafficDistribution`, after the control plane has
//! made hints of it. The cases are in dataplane-user/source/tests/source/topology.rs.

use anyhow::Result;
use serde_json::{Value, json};

use crate::{
    cluster::{Cluster, TCP, eventually, reaches},
    manifest::Service,
    outcome::run,
};

scenarios! {
    Dataplane:
    clients_stay_in_their_zone_and_on_their_node,
}

const TO: &str = "10.96.0.10:80";

fn node2(zone: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": { "name": "node2", "labels": { "topology.kubernetes.io/zone": zone } },
    })
}

fn clients_stay_in_their_zone_and_on_their_node() -> Result<()> {
    let cluster = Cluster::start(|_| Vec::new())?;
    let (far, near) = (cluster.lab.pod("far"), cluster.lab.pod("near"));
    let web = || Service::new("web", &["10.96.0.10"]).port("tcp", 80, TCP);
    let by_zone = web().hinted(far, &["a"], &[]).hinted(near, &["b"], &[]);
    let by_node = web()
        .hinted(far, &["a"], &["node1"])
        .hinted(near, &["b"], &["node2"]);
    let half = web().hinted(far, &["a"], &[]).endpoints(&[near]);
    for (service, zone, endpoints) in [
        (&by_zone, "a", &["far"][..]),
        (&by_zone, "b", &["near"]),
        (&by_zone, "c", &["far", "near"]),
        (&by_node, "a", &["near"]),
        (&half, "a", &["far", "near"]),
    ] {
        cluster
            .manifests
            .write_with(std::slice::from_ref(service), &[node2(zone)])?;
        eventually(|| reaches(cluster.client(), TO, "connect --count 20", endpoints).map(drop))?;
    }
    // The commands for services show why an endpoint gets nothing.
    cluster.manifests.write_with(&[by_zone], &[node2("a")])?;
    eventually(|| {
        run(&cluster.agent, "services -o wide")?
            .exits(0)?
            .says(&["(local, hinted to others)"])
            .map(drop)
    })
}
