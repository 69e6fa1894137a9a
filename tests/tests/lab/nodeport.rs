//! Node ports, external IPs and load balancers' addresses, from sockets on the node.

use anyhow::{Result, ensure};
use dataplane_common::Reason;
use dataplane_tests::{Host, Lab};
use serde_json::json;

use crate::{
    cluster::{
        Cluster, TCP, UDP, eventually, fails, peer_is, reaches, refused, serve, sources_are,
    },
    manifest::Service,
};

scenarios! {
    Dataplane:
    node_ports_are_on_primary_addresses_and_the_nodes_loopback,
    the_nodes_object_among_the_manifests_decides,
    a_pods_loopback_is_its_own,
    load_balancers_that_must_be_passed_and_source_ranges,
    other_ports_of_shared_addresses_are_left_alone,
    addresses_without_endpoints_refuse,
}

const ALL: [&str; 3] = ["far", "near", "near2"];

fn web(lab: &Lab) -> Service {
    Service::new("web", &["10.96.0.10", "fd00:96::10"])
        .node_port("tcp", 80, TCP, 30080)
        .node_port("udp", 53, UDP, 30053)
        .endpoints(&ALL.map(|name| lab.pod(name)))
}

/// Wants TCP and UDP through the node ports of an address, and the address as the peer.
fn served(client: &Host, address: &str) -> Result<()> {
    let (tcp, udp) = (format!("{address}:30080"), format!("{address}:30053"));
    peer_is(&reaches(client, &tcp, "connect --count 60", &ALL)?, &tcp)?;
    let report = reaches(client, &udp, "udp --count 60", &ALL)?;
    peer_is(&report, &udp)?;
    ensure!(report.from == [udp.parse()?], "{report:?}");
    let report = reaches(client, &udp, "udp --count 60 --unconnected", &ALL)?;
    ensure!(report.from == [udp.parse()?], "{report:?}");
    Ok(())
}

/// A lab whose node2 has a default route, which says what its primary address is, and a second
/// address.
fn lab_with_addresses() -> Result<Lab> {
    let lab = Cluster::lab()?;
    let node = lab.node("node2");
    // The switch ends in the lab: no router forwards packets of this route.
    node.ip("route add default via 192.168.77.1")?;
    node.ip("route add default via fd77::1")?;
    node.ip("addr add 192.168.77.92/24 dev eth0")?;
    node.ip("addr add 198.51.100.7/32 dev lo")?;
    Ok(lab)
}

fn node_ports_are_on_primary_addresses_and_the_nodes_loopback() -> Result<()> {
    let services = |lab: &Lab| vec![web(lab)];
    let cluster = Cluster::start_in(lab_with_addresses()?, &ALL, services, &[])?;
    let node = cluster.lab.node("node2");
    for client in [cluster.client(), node] {
        served(client, "192.168.77.2")?;
        for address in ["192.168.77.92", "198.51.100.7", "10.244.2.1"] {
            let refused = || refused(client, &format!("{address}:30080"), "connect --count 2");
            cluster.for_reason(Reason::NotService, 2, refused)?;
            let to = format!("{address}:30053");
            let refused = || crate::cluster::refused(client, &to, "udp --count 2");
            cluster.for_reason(Reason::NotService, 2, refused)?;
        }
    }
    // For a client that connects to it, the unspecified address is loopback.
    for address in ["127.0.0.1", "127.7.7.7", "0.0.0.0", "[::1]", "[::]"] {
        served(node, address)?;
    }
    // Endpoints see a pod's own address, not the node's, and the node's addresses are not the pod's loopback.
    let report = reaches(
        cluster.client(),
        "192.168.77.2:30080",
        "connect --count 60",
        &ALL,
    )?;
    sources_are(&report, &cluster.client().addresses())?;
    // Another node's address is that node's business, and node1 runs no dataplane.
    refused(cluster.client(), "192.168.77.1:30080", "connect")
}

/// The node's internal addresses are those of its Node object, in both families, as with the API; without the object,
/// those of the default route.
fn the_nodes_object_among_the_manifests_decides() -> Result<()> {
    let lab = lab_with_addresses()?;
    lab.node("node2")
        .ip("addr add fd77::92/64 dev eth0 nodad")?;
    let services = |lab: &Lab| vec![web(lab)];
    let cluster = Cluster::start_in(lab, &ALL, services, &[])?;
    let (client, service) = (cluster.client(), [web(&cluster.lab)]);
    // The kernel lists the newest IPv6 address first.
    let own = ["192.168.77.2", "[fd77::92]"];
    let told = ["192.168.77.92", "[fd77::2]"];
    let addresses = ["192.168.77.92", "fd77::2"]
        .map(|address| json!({ "type": "InternalIP", "address": address }));
    let node = json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": { "name": "node2" },
        "status": { "addresses": addresses },
    });
    let only = |served: [&str; 2], not: [&str; 2]| {
        eventually(|| {
            for address in served {
                reaches(
                    client,
                    &format!("{address}:30080"),
                    "connect --count 60",
                    &ALL,
                )?;
            }
            for address in not {
                refused(client, &format!("{address}:30080"), "connect")?;
            }
            Ok(())
        })
    };
    only(own, told)?;
    cluster
        .manifests
        .write_with(&service, std::slice::from_ref(&node))?;
    only(told, own)?;
    cluster.manifests.write(&service)?;
    only(own, told)?;
    // Another agent starts with the object, and so does `plan`.
    cluster.manifests.write_with(&service, &[node])?;
    only(told, own)?;
    let plan = ["plan", "--node-name", "node2", "--manifests"];
    let plan = cluster
        .agent
        .dataplane(plan)
        .args([cluster.manifests.path()])
        .output()?;
    ensure!(plan.status.code() == Some(0), "{plan:?}");
    let mut cluster = cluster;
    cluster.agent.kill();
    cluster.agent.start()?;
    let status = cluster.status()?;
    let shown = &status["agent"]["node_port_addresses"];
    let all = shown.as_array().into_iter().flatten();
    let values: Vec<_> = all.map(|of| &of["value"]).collect();
    ensure!(values == ["192.168.77.92", "fd77::2"], "{shown}");
    Ok(())
}

/// A pod reaches its own loopback servers there, and nothing else.
fn a_pods_loopback_is_its_own() -> Result<()> {
    let cluster = Cluster::start(|lab| vec![web(lab)])?;
    let client = cluster.client();
    for address in ["127.0.0.1", "0.0.0.0", "[::1]", "[::]"] {
        refused(client, &format!("{address}:30080"), "connect --count 3")?;
        refused(client, &format!("{address}:30053"), "udp --count 3")?;
    }
    let own = ["--tcp", "127.0.0.1:30080", "--udp", "127.0.0.1:30053"];
    let _own = client.serve(&own)?;
    reaches(client, "127.0.0.1:30080", "connect --count 5", &["sleep"])?;
    reaches(client, "127.0.0.1:30053", "udp --count 5", &["sleep"])?;
    reaches(
        client,
        "127.0.0.1:30053",
        "udp --count 5 --unconnected",
        &["sleep"],
    )
    .map(drop)
}

/// `ipMode: Proxy` means that packets must pass the load balancer. Source ranges are the packet path's, because a
/// socket's source is not known yet.
fn load_balancers_that_must_be_passed_and_source_ranges() -> Result<()> {
    let cluster = Cluster::start(|lab| {
        let endpoints = ALL.map(|name| lab.pod(name));
        vec![
            Service::new("both", &["10.96.0.11"])
                .port("tcp", 80, TCP)
                .ingress("203.0.113.11", "Proxy")
                .ingress("203.0.113.12", "VIP")
                .endpoints(&endpoints),
            Service::new("ranged", &["10.96.0.13"])
                .port("tcp", 80, TCP)
                .load_balancer("203.0.113.13")
                .set("loadBalancerSourceRanges", vec!["10.244.0.0/16"])
                .endpoints(&endpoints),
            Service::new("closed", &["10.96.0.14"])
                .port("tcp", 80, TCP)
                .load_balancer("203.0.113.14")
                .set("loadBalancerSourceRanges", vec!["198.51.100.0/24"])
                .endpoints(&endpoints),
        ]
    })?;
    let client = cluster.client();
    for to in ["10.96.0.11:80", "203.0.113.12:80", "10.96.0.13:80"] {
        peer_is(&reaches(client, to, "connect --count 60", &ALL)?, to)?;
    }
    // Four times as long in an emulated guest, and still less than the second after which a SYN is
    // sent and counted again.
    cluster.for_reason(Reason::NotService, 1, || {
        fails(
            client,
            "203.0.113.11:80",
            "connect --timeout-ms 200",
            "TIMEOUT",
        )
    })?;
    reaches(client, "203.0.113.13:80", "connect --count 60", &ALL)?;
    cluster.for_reason(Reason::SourceDenied, 1, || {
        fails(
            client,
            "203.0.113.14:80",
            "connect --timeout-ms 200",
            "TIMEOUT",
        )
    })?;
    // Another program's server at such an address answers the client.
    cluster
        .lab
        .node("node2")
        .ip("addr add 203.0.113.11/32 dev lo")?;
    let _proxy = cluster
        .lab
        .node("node2")
        .serve(&["--tcp", "203.0.113.11:80"])?;
    reaches(client, "203.0.113.11:80", "connect --count 5", &["node2"]).map(drop)
}

/// Unlike a cluster IP, these addresses belong to others too: ports without a service are theirs.
fn other_ports_of_shared_addresses_are_left_alone() -> Result<()> {
    let services = |lab: &Lab| {
        vec![
            web(lab)
                .load_balancer("203.0.113.10")
                .set("externalIPs", vec!["203.0.113.50"]),
        ]
    };
    let cluster = Cluster::start_with(
        services,
        &["--nodeport-addresses", "192.168.77.0/24,fd77::/64"],
    )?;
    let node = cluster.lab.node("node2");
    for address in ["203.0.113.10", "203.0.113.50"] {
        node.ip(&format!("addr add {address}/32 dev lo"))?;
    }
    let mut own = Vec::new();
    for address in ["203.0.113.10", "203.0.113.50"] {
        own.push(node.serve(&[
            "--tcp",
            &format!("{address}:81"),
            "--udp",
            &format!("{address}:81"),
        ])?);
    }
    own.push(serve(node)?);
    for client in [cluster.client(), node] {
        for to in [
            "203.0.113.10:81",
            "203.0.113.50:81",
            "192.168.77.2:7",
            "[fd77::2]:7",
        ] {
            reaches(client, to, "connect --count 5", &["node2"])?;
        }
        for to in [
            "203.0.113.10:81",
            "203.0.113.50:81",
            "192.168.77.2:53",
            "[fd77::2]:53",
        ] {
            reaches(client, to, "udp --count 5", &["node2"])?;
            reaches(client, to, "udp --count 5 --unconnected", &["node2"])?;
        }
        // A node port belongs to one protocol.
        refused(client, "192.168.77.2:30053", "connect --count 3")?;
        refused(client, "192.168.77.2:30080", "udp --count 3")?;
        for to in [
            "203.0.113.10:80",
            "203.0.113.50:80",
            "192.168.77.2:30080",
            "[fd77::2]:30080",
        ] {
            peer_is(&reaches(client, to, "connect --count 60", &ALL)?, to)?;
        }
    }
    Ok(())
}

/// Without endpoints, every address of the service's port refuses at once.
fn addresses_without_endpoints_refuse() -> Result<()> {
    let services = |_: &Lab| {
        vec![
            Service::new("empty", &["10.96.0.20", "fd00:96::20"])
                .node_port("tcp", 80, TCP, 30080)
                .node_port("udp", 53, UDP, 30053)
                .load_balancer("203.0.113.10")
                .set("externalIPs", vec!["203.0.113.50"]),
        ]
    };
    let cluster = Cluster::start_with(
        services,
        &["--nodeport-addresses", "192.168.77.0/24,fd77::/64"],
    )?;
    let node = cluster.lab.node("node2");
    let vips = [
        "203.0.113.10",
        "203.0.113.50",
        "10.96.0.20",
        "[fd00:96::20]",
    ];
    let nodes = ["192.168.77.2", "[fd77::2]"];
    let all = (vips.into_iter().map(|a| (a, 80, 53))).chain(nodes.map(|a| (a, 30080, 30053)));
    for (address, tcp, udp) in all {
        for client in [cluster.client(), node] {
            refused_all(&cluster, client, address, tcp, udp)?;
        }
    }
    refused_all(&cluster, node, "127.0.0.1", 30080, 30053)?;
    refused_all(&cluster, node, "[::1]", 30080, 30053)
}

fn refused_all(cluster: &Cluster, client: &Host, address: &str, tcp: u16, udp: u16) -> Result<()> {
    for (port, how) in [
        (tcp, "connect --count 2"),
        (udp, "udp --count 2"),
        (udp, "udp --count 2 --unconnected"),
    ] {
        let to = format!("{address}:{port}");
        cluster.for_reason(Reason::NoEndpoints, 2, || refused(client, &to, how))?;
    }
    Ok(())
}
