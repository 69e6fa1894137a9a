//! Endpoints with hints for zones and nodes, as clients see them: `trafficDistribution`, after the control plane has
//! made hints of it; and endpoints that Istio's annotation ranks. The cases are in dataplane-user/source/tests/source:
//! topology.rs, by_locality.rs.

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
    clients_reach_the_nearest_machines,
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
    let cluster = Cluster::of_sockets(|_| Vec::new())?;
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

/// WorkloadEntries of a Service, and the endpoints of a ServiceEntry: in the zone, in the region, and in a network of
/// others. Connections are made at sockets, in a pod and on the node.
fn clients_reach_the_nearest_machines() -> Result<()> {
    let cluster = Cluster::of_sockets(|_| Vec::new())?;
    let node = json!({
        "apiVersion": "v1", "kind": "Node", "metadata": { "name": "node2", "labels": {
            "topology.kubernetes.io/region": "r", "topology.kubernetes.io/zone": "a",
            "topology.istio.io/network": "net1",
        } },
    });
    let service = |asks: &str| {
        json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": { "name": "web", "namespace": "default", "annotations": {
                "networking.istio.io/traffic-distribution": asks,
            } },
            "spec": {
                "clusterIP": "10.96.0.10", "selector": { "app": "web" },
                "ports": [{ "port": 80, "targetPort": TCP }],
            },
        })
    };
    let spec = |pod: &str, locality: &str, network: &str| {
        json!({
            "address": cluster.lab.pod(pod).ipv4(), "locality": locality, "network": network,
            "labels": { "app": "web" }, "ports": { "web": TCP },
        })
    };
    let all = [
        ("far", spec("far", "r/a", "")),
        ("near", spec("near", "r/b", "net1")),
        ("near2", spec("near2", "r/a", "net2")),
    ];
    for (asks, there, wanted) in [
        ("Any", &all[..], &["far", "near", "near2"][..]),
        ("PreferSameZone", &all, &["far"]),
        ("PreferSameZone", &all[1..], &["near"]),
        ("PreferSameNode", &all[2..], &["near2"]),
    ] {
        let machines = there.iter().map(|(name, spec)| {
            json!({
                "apiVersion": "networking.istio.io/v1", "kind": "WorkloadEntry",
                "metadata": { "name": name, "namespace": "default" }, "spec": spec,
            })
        });
        let own: Vec<&Value> = there.iter().map(|(_, spec)| spec).collect();
        let entry = json!({
            "apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry",
            "metadata": { "name": "web", "namespace": "default", "annotations": {
                "networking.istio.io/traffic-distribution": asks,
            } },
            "spec": {
                "hosts": ["web.example.com"], "addresses": ["203.0.113.10"], "resolution": "STATIC",
                "ports": [{ "number": 80, "name": "web", "protocol": "TCP" }], "endpoints": own,
            },
        });
        let mut objects: Vec<Value> = machines.collect();
        objects.extend([node.clone(), service(asks), entry]);
        cluster.manifests.write_with(&[], &objects)?;
        for to in [TO, "203.0.113.10:80"] {
            for client in [cluster.client(), cluster.lab.node("node2")] {
                eventually(|| reaches(client, to, "connect --count 30", wanted).map(drop))?;
            }
        }
    }
    Ok(())
}
