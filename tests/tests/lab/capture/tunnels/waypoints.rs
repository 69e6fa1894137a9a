//! Connections that go to a waypoint: the Pod `plain`, with a stand-in for Istio's proxy.

use std::path::Path;

use anyhow::{Result, ensure};
use dataplane_common::Reason;
use serde_json::{Value, json};

use super::{HBONE, World, auto::TO_FAR, gate::Gate, object, tcp};
use crate::{
    cluster::{ask, eventually, reaches},
    sockets::arrived,
};

/// The VIP of the service `web`.
const VIP: &str = TO_FAR[1];

/// The Namespace, whose label names the waypoint, and the Gateway with these addresses.
fn objects(waypoint: &str, addresses: &[&str]) -> [Value; 2] {
    let namespace = json!({
        "apiVersion": "v1", "kind": "Namespace",
        "metadata": { "name": "default", "labels": { "istio.io/use-waypoint": waypoint } },
    });
    let addresses = addresses.iter();
    let addresses: Vec<Value> = addresses
        .map(|value| json!({ "type": "IPAddress", "value": value }))
        .collect();
    let gateway = json!({
        "apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway",
        "metadata": { "name": "gate", "namespace": "default" },
        "spec": {
            "gatewayClassName": "istio-waypoint",
            "listeners": [{ "name": "mesh", "port": HBONE, "protocol": "HBONE" }],
        },
        "status": { "addresses": addresses },
    });
    [namespace, gateway]
}

/// Starts a stand-in on `plain`, which proves the identity of `plain` and connects to `far`.
fn start_gate(world: &World) -> Result<Gate> {
    let [ca, out] = ["ca", "issued"].map(|name| world.state.path().join(name));
    let issue = ["ca", "issue", "default", "plain"].map(Path::new);
    let to = [Path::new("--ca"), &ca, Path::new("--out"), &out];
    world.agents[0].dataplane([issue, to].concat()).run()?;
    let plain = world.lab.pod("plain");
    Gate::start(plain, &out.join("default/plain"), TO_FAR[0].parse()?)
}

/// The waypoint sees the VIP and the client's identity. Without an address, nothing goes past it.
pub fn connections_to_a_service_go_to_its_waypoint() -> Result<()> {
    for mode in ["proxy", "auto"] {
        let world = World::with(["ca", "ca"], &json!({ "mode": mode }))?;
        let (app, plain) = (world.app(), world.lab.pod("plain"));
        let gate = start_gate(&world)?;
        let address = plain.addresses()[0].to_string();
        world.write(true, &objects("gate", &[&address]))?;
        world.says(VIP, Reason::Captured, "the destination has a waypoint")?;
        let named = format!("Gateway default/gate, which the proxy reaches at {address}:{HBONE}");
        world.says(VIP, Reason::Captured, &named)?;
        let wanted = (
            VIP.to_owned(),
            "spiffe://cluster.local/ns/default/sa/app".to_owned(),
        );
        // The proxy has the change a little later than the tables.
        eventually(|| {
            let taps = world.taps()?;
            reaches(app, VIP, "http", &["far"])?;
            let seen = gate.seen.try_iter().last();
            ensure!(seen.as_ref() == Some(&wanted), "{mode}: {seen:?}");
            let ends = [app, world.lab.pod("far")].map(|host| host.addresses()[0]);
            let frames = taps.iter().flat_map(arrived);
            let past = frames.filter_map(|frame| {
                let (from, to, _) = tcp(&frame)?;
                (ends.contains(&from) && ends.contains(&to)).then_some(())
            });
            ensure!(past.count() == 0, "{mode}: past the waypoint");
            Ok(())
        })?;
        // It is no waypoint for workloads.
        reaches(app, TO_FAR[0], "http", &["far"])?;
        ensure!(
            gate.seen.try_iter().next().is_none(),
            "{mode}: by the address"
        );
        let mut lost = objects("gate", &[]).to_vec();
        lost.push(json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": "lost", "namespace": "default", "labels": { "istio.io/use-waypoint": "lost" } },
            "spec": { "nodeName": "node2" },
            "status": { "podIPs": [{ "ip": "10.244.2.77" }] },
        }));
        world.write(true, &lost)?;
        let refused = "waypoint default/gate cannot be used: the Gateway has no usable address";
        world.says(VIP, Reason::Captured, refused)?;
        eventually(|| {
            let report = ask(app, VIP, "http")?;
            ensure!(report.answered == 0, "{mode}: {report:?}");
            Ok(())
        })?;
        eventually(|| {
            let status = world.agents[0].status()?;
            let status = String::from_utf8_lossy(&status.stdout).into_owned();
            let words: Vec<&str> = status.split_whitespace().collect();
            let words = words.join(" ");
            for said in [
                "cannot be used: default/gate, which namespace default names",
                "default/lost, which a Pod of namespace default names",
            ] {
                ensure!(words.contains(said), "{status}");
            }
            Ok(())
        })?;
        // Those of before the proxy had the change.
        gate.seen.try_iter().for_each(drop);
        world.write(true, &objects("none", &[]))?;
        eventually(|| reaches(app, VIP, "http", &["far"]).map(drop))?;
        ensure!(
            gate.seen.try_iter().next().is_none(),
            "{mode}: without a waypoint"
        );
    }
    Ok(())
}

/// Past the waypoint, connections go through tunnels to endpoints that speak HBONE.
pub fn a_waypoint_that_cannot_be_used_is_passed_only_by_the_operators_word() -> Result<()> {
    for (word, said) in [
        (
            "refuse",
            "the proxy refuses connections to what has a waypoint",
        ),
        (
            "pass",
            "mesh.withoutWaypoint is pass, so connections go past waypoints",
        ),
    ] {
        let mesh = json!({ "rules": { "mode": "auto" }, "withoutWaypoint": word });
        let world = World::with_mesh(["ca", "ca"], mesh)?;
        world.write(true, &objects("gate", &[]))?;
        eventually(|| {
            let status = world.agents[0].status()?;
            let status = String::from_utf8_lossy(&status.stdout).into_owned();
            let words: Vec<&str> = status.split_whitespace().collect();
            ensure!(words.join(" ").contains(said), "{status}");
            Ok(())
        })?;
        for (to, name, is_tunnelled) in [(VIP, "far", true), ("10.96.0.11:80", "plain", false)] {
            let taps = world.taps()?;
            let report = ask(world.app(), to, "http")?;
            ensure!(
                (report.answered > 0) == (word == "pass"),
                "{word} {to}: {report:?}"
            );
            let is_there = report.endpoints.contains_key(name);
            ensure!(is_there == (word == "pass"), "{word} {to}: {report:?}");
            if is_tunnelled {
                world.only_tunnels(&taps)?;
            }
        }
    }
    Ok(())
}

/// The Pod `plain` proves another identity than that of its service account.
pub fn an_entry_accepts_further_identities_of_its_endpoints() -> Result<()> {
    const ENTRY: &str = "203.0.113.30:80";
    let world = World::new(["ca", "ca"])?;
    let _gate = start_gate(&world)?;
    let (app, plain) = (world.app(), world.lab.pod("plain"));
    let mut pod = object(plain, "node2", false);
    pod["metadata"]["annotations"] = json!({ "ambient.istio.io/redirection": "enabled" });
    pod["spec"]["serviceAccountName"] = "other".into();
    let pods = [
        pod,
        object(app, "node1", true),
        object(world.lab.pod("far"), "node2", true),
    ];
    let own = "spiffe://cluster.local/ns/default/sa/plain";
    for names in [&[][..], &[own][..]] {
        let entry = json!({
            "apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry",
            "metadata": { "name": "db", "namespace": "default" },
            "spec": {
                "hosts": ["db.example.com"], "addresses": ["203.0.113.30"], "resolution": "STATIC",
                "ports": [{ "number": 80, "name": "tcp", "protocol": "TCP" }],
                "endpoints": [{ "address": plain.addresses()[0] }],
                "subjectAltNames": names,
            },
        });
        world
            .manifests
            .write_with(&[], &[&pods[..], &[entry][..]].concat())?;
        eventually(|| {
            let report = ask(app, ENTRY, "http")?;
            let has_answered = report.endpoints.contains_key("far");
            ensure!(has_answered != names.is_empty(), "{names:?}: {report:?}");
            let log = world.agents[0].log();
            let wrong = format!(
                "peer presented {own}, expected spiffe://cluster.local/ns/default/sa/other"
            );
            ensure!(log.contains(&wrong), "{log}");
            Ok(())
        })?;
    }
    let report = ask(app, "10.244.2.6:80", "http")?;
    ensure!(report.answered == 0, "{report:?}");
    Ok(())
}
