//! `egress: deny`: the connections that it refuses, and that only the operator opens it.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use dataplane_tests::Host;
use serde_json::{Value, json};

use super::{World, mesh, packets, pod};
use crate::{
    cluster::{UDP, at_once, eventually, reaches, refused, serve},
    manifest::{Manifests, Service},
    outcome::run_args,
};

scenarios! {
    Dataplane:
    datagrams_to_unknown_destinations_are_refused,
    a_slice_that_names_an_address_opens_nothing,
    a_service_entry_opens_nothing,
    labels_and_annotations_do_not_loosen_what_the_configuration_says,
    an_annotation_does_not_make_a_pod_speak_as_the_node,
    one_captured_by_packets_does_not_reach_the_node_itself,
}

/// By `connect()` and by `sendto()`, of both families.
fn datagrams_to_unknown_destinations_are_refused() -> Result<()> {
    let mut world = World::new()?;
    let (app, one) = (world.app().clone(), world.lab.pod("one").clone());
    let port = UDP;
    // A resolver's.
    ensure!(port == 53, "{port}");
    let web = Service::new("web", &["10.96.0.10", "fd00:96::10"])
        .port("tcp", 80, 7)
        .port("udp", 53, UDP)
        .endpoints(&[world.lab.pod("far")]);
    world.manifests = Manifests::new(&[web])?;
    let mut config = mesh(json!({}), json!({ "egress": "deny", "mode": "proxy" }));
    config["resolvers"] = json!([one.ipv4()]);
    config["reachable"] = json!(["10.244.1.6/32"]);
    world.agent_with(&config, &[])?;
    for how in ["udp", "udp --unconnected"] {
        for to in [
            "10.244.1.5:54".to_owned(),
            "192.0.2.1:443".to_owned(),
            "8.8.8.8:53".to_owned(),
            format!("[fd00:10:244:1::6]:{port}"),
            "10.244.2.5:7".to_owned(),
        ] {
            let ((), counted) = world.counted(Reason::EgressDenied, || refused(&app, &to, how))?;
            ensure!(counted == 1, "{how} {to}: {counted}");
        }
        // A service and its endpoint, by both families; addresses that the operator has stated; the pod itself.
        for (to, by) in [
            ("10.96.0.10:53".to_owned(), "far"),
            ("[fd00:96::10]:53".to_owned(), "far"),
            (format!("10.244.2.5:{port}"), "far"),
            (format!("10.244.1.6:{port}"), "two"),
            (format!("10.244.1.5:{port}"), "one"),
            (format!("10.244.1.8:{port}"), "app"),
        ] {
            reaches(&app, &to, how, &[by]).with_context(|| format!("{how} {to}"))?;
        }
        // Its own server answers every client.
        for to in [
            format!("10.244.1.8:{port}"),
            format!("[fd00:10:244:1::8]:{port}"),
        ] {
            reaches(&one, &to, &format!("{how} --count 3"), &["app"])?;
        }
        // The egress policy is for the captured pod. Other pods may send anywhere.
        reaches(&one, &format!("10.244.1.6:{port}"), how, &["two"])?;
    }
    let told = super::explain::explain(&world, "default/app", "8.8.8.8:53/udp", &[])?;
    ensure!(told["reason"] == "egress-denied", "{told:#}");
    Ok(())
}

/// Not by its own address and not by the service's, in any mode and either family, by sockets or by packets; until the
/// address is a Pod's. Then the Pod's other ports stay closed.
fn a_slice_that_names_an_address_opens_nothing() -> Result<()> {
    for by_packets in [false, true] {
        for mode in ["kernel", "proxy"] {
            a_slice_opens_nothing(by_packets, mode)
                .with_context(|| format!("{mode}, by packets: {by_packets}"))?;
        }
    }
    Ok(())
}

fn a_slice_opens_nothing(by_packets: bool, mode: &str) -> Result<()> {
    let mut world = World::with(|lab| {
        let lab = lab.pod("node1", "outside", "10.244.1.9");
        if by_packets {
            lab.vm("node1", "app", "10.244.1.8")
        } else {
            lab.pod("node1", "app", "10.244.1.8")
        }
    })?;
    world.by_packets = by_packets;
    let app = world.app().clone();
    let outside = world.lab.pod("outside").clone();
    let _server = serve(&outside)?;
    let service = |name, vips: &[&str], endpoints: &[&Host]| {
        Service::new(name, vips)
            .port("tcp", 80, 7)
            .port("udp", 53, UDP)
            .endpoints(endpoints)
    };
    let far = world.lab.pod("far");
    let web = service("web", &["10.96.0.10", "fd00:96::10"], &[far]);
    let evil = service("evil", &["10.96.0.66", "fd00:96::66"], &[&outside]);
    let mixed = service("mixed", &["10.96.0.67", "fd00:96::67"], &[far, &outside]);
    world.manifests = Manifests::new(&[web, evil, mixed])?;
    let pods = world.state.path().join("outside.yaml");
    let nobody = json!({
        "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "empty" },
    });
    fs::write(&pods, nobody.to_string())?;
    let mut rules = json!({ "egress": "deny", "mode": mode });
    if by_packets {
        rules["capturedBy"] = json!("packets");
    }
    let config = mesh(json!({}), rules);
    world.agent_with(&config, std::slice::from_ref(&pods))?;
    // By packets, a refusal may be counted twice, and takes a second.
    let attempts = if by_packets { 1 } else { 3 };
    let connect = format!("connect --count {attempts}");
    let closed = |destinations: &[&str], how: &str| {
        let app = &app;
        let all = destinations.iter().map(|to| move || refused(app, to, how));
        let (_, counted) = world.counted(Reason::EgressDenied, || at_once(all))?;
        let each = if how == connect { attempts } else { 1 };
        let count = each * destinations.len() as u64;
        ensure!(
            counted == count || by_packets && counted > count,
            "{how} {destinations:?}: {counted} of {count} were denied"
        );
        Ok(())
    };
    let evil = ["10.96.0.66:80", "[fd00:96::66]:80"];
    let mixed = ["10.96.0.67:80", "[fd00:96::67]:80"];
    let own = ["10.244.1.9:7", "[fd00:10:244:1::9]:7"];
    // The server of `outside` listens at ports that no slice names, too.
    let other_ports = ["10.244.1.9:80", "[fd00:10:244:1::9]:80"];
    let all = [evil, mixed, own, other_ports];
    closed(all.as_flattened(), &connect)?;
    // The node does not judge the datagrams of machines.
    let datagrams: &[&str] = if by_packets {
        &[]
    } else {
        &["udp", "udp --unconnected"]
    };
    let to_datagrams = ["10.96.0.66:53", "[fd00:96::66]:53", "10.244.1.9:53"];
    for how in datagrams {
        closed(&to_datagrams, how)?;
    }
    for to in ["10.96.0.10:80", "[fd00:96::10]:80"] {
        reaches(&app, to, "connect --count 3", &["far"])?;
    }

    let mut object = pod("none", json!({}));
    object["metadata"]["name"] = "outside".into();
    object["metadata"]["labels"] = json!({});
    let ips = outside.addresses().map(|ip| json!({ "ip": ip }));
    object["status"]["podIPs"] = json!(ips);
    fs::write(&pods, object.to_string())?;
    eventually(|| {
        for to in [evil, own].as_flattened() {
            reaches(&app, to, "connect --count 3", &["outside"])?;
        }
        Ok(())
    })?;
    for to in mixed {
        reaches(&app, to, "connect --count 30", &["far", "outside"])?;
    }
    for how in datagrams {
        for to in to_datagrams {
            reaches(&app, to, how, &["outside"])?;
        }
        closed(&["10.244.1.9:7", "[fd00:10:244:1::9]:54"], how)?;
    }
    closed(&other_ports, &connect)?;
    fs::write(&pods, nobody.to_string())?;
    eventually(|| closed(all.as_flattened(), &connect))
}

/// An address that is no Pod's stays closed, and so does a port that a Pod does not declare, except by the entry's own
/// address.
fn a_service_entry_opens_nothing() -> Result<()> {
    for mode in ["kernel", "proxy"] {
        let mut world = World::with(|lab| {
            lab.pod("node1", "app", "10.244.1.8")
                .pod("node1", "outside", "10.244.1.9")
        })?;
        let app = world.app().clone();
        let outside = world.lab.pod("outside").clone();
        let _server = serve(&outside)?;
        let entry = json!({
            "apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry",
            "metadata": { "name": "db", "namespace": "default" },
            "spec": {
                "hosts": ["db.example.com"], "addresses": ["203.0.113.7"], "resolution": "STATIC",
                "ports": [{ "number": 80, "name": "tcp", "protocol": "TCP", "targetPort": 7 }],
                "endpoints": [{ "address": outside.ipv4() }],
            },
        });
        world.manifests = Manifests::new(&[])?;
        world.manifests.write_with(&[], &[entry])?;
        let pods = world.state.path().join("outside.yaml");
        let nobody = json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "empty" },
        });
        fs::write(&pods, nobody.to_string())?;
        let config = mesh(json!({}), json!({ "egress": "deny", "mode": mode }));
        world.agent_with(&config, std::slice::from_ref(&pods))?;
        for to in ["203.0.113.7:80", "10.244.1.9:7"] {
            let ((), counted) = world.counted(Reason::EgressDenied, || {
                refused(&app, to, "connect --count 5")
            })?;
            ensure!(counted == 5, "{mode}, {to}: {counted}");
        }
        let mut own = pod("none", json!({}));
        own["metadata"]["name"] = "outside".into();
        own["metadata"]["labels"] = json!({});
        own["status"]["podIPs"] = json!([{ "ip": outside.ipv4() }]);
        fs::write(&pods, own.to_string())?;
        eventually(|| {
            reaches(&app, "203.0.113.7:80", "connect --count 3", &["outside"]).map(drop)
        })?;
        refused(&app, "10.244.1.9:7", "connect --count 3")?;
    }
    Ok(())
}

fn labels_and_annotations_do_not_loosen_what_the_configuration_says() -> Result<()> {
    let mut world = World::new()?;
    let pods = world.state.path().join("pods.yaml");
    let write = |mode: &str, annotations: Value| -> Result<()> {
        Ok(fs::write(&pods, pod(mode, annotations).to_string())?)
    };
    write("ambient", json!({}))?;
    let config = json!({ "rules": { "captured": true, "egress": "deny", "mode": "proxy" } });
    world.agent_with(&config, std::slice::from_ref(&pods))?;
    let app = world.app().clone();
    let all = "0.0.0.0/0";
    for (mode, annotations, said) in [
        ("none", json!({}), "dataplane-mode: none"),
        (
            "ambient",
            json!({ "dataplane.io/egress": "allow" }),
            "egress: allow has no effect",
        ),
        (
            "ambient",
            json!({ "traffic.sidecar.istio.io/excludeOutboundIPRanges": all }),
            "",
        ),
        (
            "ambient",
            json!({ "openservicemesh.io/outbound-port-exclusion-list": "7,80" }),
            "",
        ),
        ("ambient", json!({ "sidecar.istio.io/status": "{}" }), ""),
    ] {
        write(mode, annotations.clone())?;
        let what = || format!("{mode}, {annotations}");
        eventually(|| {
            let told = run_args(world.agent()?, ["status"])?.exits(0)?;
            told.says(&[said])?;
            Ok(())
        })
        .with_context(what)?;
        for to in ["10.244.1.5:7", "192.0.2.1:80"] {
            refused(&app, to, "connect").with_context(what)?;
        }
        refused(&app, "192.0.2.1:443", "udp").with_context(what)?;
        reaches(&app, "10.96.0.10:80", "connect --count 3", &["far"]).with_context(what)?;
    }
    // The proxy also captures the enforced range.
    let config = json!({
        "rules": { "mode": "proxy" },
        "enforced": { "captured": true },
    });
    let exclude = json!({ "traffic.sidecar.istio.io/excludeOutboundIPRanges": all });
    write("none", exclude)?;
    world.agent_with(&config, std::slice::from_ref(&pods))?;
    let (_, counted) = world.counted(Reason::Captured, || {
        reaches(&app, "10.244.1.5:7", "connect --count 3", &["one"])
    })?;
    ensure!(counted == 3, "{counted} of 3 were captured");
    run_args(world.agent()?, ["status"])?
        .exits(0)?
        .says(&["dataplane-mode: none has no effect", "have no effect"])?;
    Ok(())
}

fn an_annotation_does_not_make_a_pod_speak_as_the_node() -> Result<()> {
    let mut world = World::new()?;
    let pods = world.state.path().join("pods.yaml");
    let annotations = json!({ "dataplane.io/captured-by": "packets" });
    fs::write(&pods, pod("ambient", annotations).to_string())?;
    let config = json!({ "rules": { "mode": "proxy" } });
    world.agent_with(&config, &[pods])?;
    let app = world.app().clone();
    let (report, counted) = world.counted(Reason::Captured, || {
        reaches(&app, "10.244.1.5:7", "connect --count 3", &["one"])
    })?;
    ensure!(counted == 3, "{counted} of 3 were captured");
    crate::cluster::sources_are(&report, &app.addresses())?;
    run_args(world.agent()?, ["status"])?
        .exits(0)?
        .says(&["captured-by: packets has no effect"])?;
    Ok(())
}

/// A machine does not reach destinations that only the node may reach either, because the proxy would connect as the
/// node.
fn one_captured_by_packets_does_not_reach_the_node_itself() -> Result<()> {
    let mut world = packets::world()?;
    let node = world.lab.node("node1").clone();
    let _server = serve(&node)?;
    packets::capture(&mut world, json!({ "mode": "proxy" }), &[])?;
    let app = world.app().clone();
    let own = format!("{}:7", node.ipv4());
    for to in [&own, "169.254.169.254:80"] {
        let ((), counted) = world.counted(Reason::ToNode, || refused(&app, to, "connect"))?;
        ensure!(counted >= 1, "{to}: {counted}");
        let told = super::explain::explain(&world, "default/app", to, &[])?;
        ensure!(told["reason"] == "to-node", "{told:#}");
    }
    reaches(&app, "10.244.1.5:7", "connect --count 3", &["one"])?;
    // Without a proxy, the machine speaks for itself.
    packets::capture(&mut world, json!({ "mode": "kernel" }), &[])?;
    let report = reaches(&app, &own, "connect", &["node1"])?;
    crate::cluster::sources_are(&report, &app.addresses())
}
