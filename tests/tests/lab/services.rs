//! Services from a client's view: which endpoint answers, from which address, with which error.

use std::net::IpAddr;

use anyhow::{Result, ensure};
use dataplane_tests::{Host, Lab};

use crate::{
    cluster::{
        Cluster, TCP, UDP, ask, eventually, fails, peer_is, reaches, refused, serve, sources_are,
    },
    manifest::{Condition, Config, Service},
};

scenarios! {
    Dataplane:
    tcp_reaches_every_endpoint_and_the_peer_is_the_vip,
    udp_replies_come_from_the_vip,
    one_udp_socket_stays_with_its_endpoint,
    what_cannot_be_served_is_refused_at_once,
    what_is_no_service_is_left_alone,
    a_pod_reaches_itself,
    session_affinity_keeps_a_client_with_its_endpoint,
    a_local_policy_keeps_traffic_on_the_node,
    terminating_endpoints_serve_when_nobody_else_does,
    external_addresses_and_node_ports_are_served,
    only_admitted_external_ips_are_served,
    a_headless_service_disturbs_nobody,
}

const VIP4: &str = "10.96.0.10";
const VIP6: &str = "fd00:96::10";

/// A service with both families, TCP and UDP, and all three endpoints.
fn web(lab: &Lab) -> Service {
    Service::new("web", &[VIP4, VIP6])
        .port("tcp", 80, TCP)
        .port("udp", 53, UDP)
        .endpoints(&[lab.pod("far"), lab.pod("near"), lab.pod("near2")])
}

const ALL: [&str; 3] = ["far", "near", "near2"];

/// The addresses from which pods see a host of node2.
fn sources(host: &Host, lab: &Lab) -> Vec<IpAddr> {
    let mut sources = host.addresses().to_vec();
    if host.node().is_none() {
        let near = lab.pod("near");
        sources.extend([IpAddr::from(near.gateway4()), near.gateway6().into()]);
    }
    sources
}

fn tcp_reaches_every_endpoint_and_the_peer_is_the_vip() -> Result<()> {
    let cluster = Cluster::start(|lab| vec![web(lab)])?;
    let lab = &cluster.lab;
    for client in [cluster.client(), lab.node("node2")] {
        for (to, how) in [
            ("10.96.0.10:80", "connect --count 60"),
            ("10.96.0.10:80", "connect --count 60 --v4-mapped"),
            ("[fd00:96::10]:80", "connect --count 60"),
        ] {
            let report = reaches(client, to, how, &ALL)?;
            peer_is(&report, to)?;
            sources_are(&report, &sources(client, lab))?;
        }
    }
    Ok(())
}

fn udp_replies_come_from_the_vip() -> Result<()> {
    let cluster = Cluster::start(|lab| vec![web(lab)])?;
    let lab = &cluster.lab;
    for client in [cluster.client(), lab.node("node2")] {
        for to in ["10.96.0.10:53", "[fd00:96::10]:53"] {
            let report = reaches(client, to, "udp --count 60", &ALL)?;
            peer_is(&report, to)?;
            ensure!(report.from == [to.parse()?], "{report:?}");
            sources_are(&report, &sources(client, lab))?;
            let report = reaches(client, to, "udp --count 60 --unconnected", &ALL)?;
            ensure!(report.from == [to.parse()?], "{report:?}");
        }
        for how in [
            "udp --count 60 --v4-mapped",
            "udp --count 60 --v4-mapped --unconnected",
        ] {
            let report = reaches(client, "10.96.0.10:53", how, &ALL)?;
            ensure!(report.from == ["10.96.0.10:53".parse()?], "{report:?}");
        }
    }
    Ok(())
}

/// A resolver sends its retries from one socket: they stay with one endpoint.
fn one_udp_socket_stays_with_its_endpoint() -> Result<()> {
    let cluster = Cluster::start(|lab| vec![web(lab)])?;
    for how in [
        "udp --count 40 --one-socket",
        "udp --count 40 --one-socket --unconnected",
    ] {
        let report = ask(cluster.client(), "10.96.0.10:53", how)?;
        ensure!(
            report.answered == 40 && report.endpoints.len() == 1,
            "{how}: {report:?}"
        );
        ensure!(
            report.from == ["10.96.0.10:53".parse()?],
            "{how}: {report:?}"
        );
    }
    Ok(())
}

fn what_cannot_be_served_is_refused_at_once() -> Result<()> {
    let cluster = Cluster::start(|lab| {
        let empty = Service::new("empty", &["10.96.0.20", "fd00:96::20"])
            .port("tcp", 80, TCP)
            .port("udp", 53, UDP);
        let unready = empty.clone().endpoint(lab.pod("near"), Condition::NotReady);
        vec![web(lab), unready]
    })?;
    for client in [cluster.client(), cluster.lab.node("node2")] {
        // No endpoint that is ready.
        for vip in ["10.96.0.20", "[fd00:96::20]"] {
            refused(client, &format!("{vip}:80"), "connect --count 3")?;
            refused(client, &format!("{vip}:53"), "udp --count 3")?;
            refused(client, &format!("{vip}:53"), "udp --count 3 --unconnected")?;
        }
        // Not a port of the service, or not this protocol.
        for vip in ["10.96.0.10", "[fd00:96::10]"] {
            refused(client, &format!("{vip}:81"), "connect --count 3")?;
            refused(client, &format!("{vip}:53"), "connect --count 3")?;
            refused(client, &format!("{vip}:80"), "udp --count 3")?;
        }
    }
    Ok(())
}

fn what_is_no_service_is_left_alone() -> Result<()> {
    let cluster = Cluster::start(|lab| vec![web(lab)])?;
    let (client, node) = (cluster.client(), cluster.lab.node("node2"));
    for pod in ALL.map(|name| cluster.lab.pod(name)) {
        for address in pod.addresses() {
            let to = std::net::SocketAddr::new(address, TCP).to_string();
            peer_is(
                &reaches(client, &to, "connect --count 3", &[pod.name()])?,
                &to,
            )?;
        }
    }
    let _server = serve(node)?;
    reaches(client, "192.168.77.2:7", "connect --count 3", &["node2"])?;
    // No host has this address: its packets go to the node, which has no route for it.
    fails(
        client,
        "10.96.99.99:80",
        "connect --timeout-ms 300",
        "TIMEOUT",
    )
}

/// A pod that is an endpoint of a service reaches itself through it.
fn a_pod_reaches_itself() -> Result<()> {
    let cluster = Cluster::start(|lab| {
        let own = Service::new("own", &[VIP4, VIP6])
            .port("tcp", 80, TCP)
            .port("udp", 53, UDP);
        vec![own.endpoints(&[lab.pod("near")])]
    })?;
    let near = cluster.lab.pod("near");
    for vip in ["10.96.0.10", "[fd00:96::10]"] {
        reaches(near, &format!("{vip}:80"), "connect --count 5", &["near"])?;
        let to = format!("{vip}:53");
        for how in ["udp --count 5", "udp --count 5 --unconnected"] {
            let report = reaches(near, &to, how, &["near"])?;
            ensure!(report.from == [to.parse()?], "{how}: {report:?}");
        }
    }
    Ok(())
}

fn session_affinity_keeps_a_client_with_its_endpoint() -> Result<()> {
    let cluster = Cluster::start(|lab| vec![web(lab).affinity(2), web2(lab)])?;
    let to = format!("{VIP4}:80");
    let mut chosen = Vec::new();
    for client in [
        cluster.client(),
        cluster.lab.pod("near"),
        cluster.lab.node("node2"),
    ] {
        let report = ask(client, &to, "connect --count 40")?;
        ensure!(
            report.answered == 40 && report.endpoints.len() == 1,
            "{report:?}"
        );
        chosen.extend(report.endpoints.into_keys());
    }
    // Another service of the same endpoints has no affinity.
    reaches(
        cluster.client(),
        "10.96.0.11:80",
        "connect --count 60",
        &ALL,
    )?;
    // Affinity does not hold for an endpoint that is gone.
    let left: Vec<&Host> = ALL
        .iter()
        .filter(|n| **n != chosen[0])
        .map(|n| cluster.lab.pod(n))
        .collect();
    let services = Service::new("web", &[VIP4, VIP6])
        .port("tcp", 80, TCP)
        .affinity(2);
    cluster.manifests.write(&[services.endpoints(&left)])?;
    eventually(|| {
        let report = ask(cluster.client(), &to, "connect --count 20")?;
        ensure!(
            report.answered == 20 && report.endpoints.len() == 1,
            "{report:?}"
        );
        ensure!(!report.endpoints.contains_key(&chosen[0]), "{report:?}");
        Ok(())
    })
}

fn web2(lab: &Lab) -> Service {
    let endpoints = [lab.pod("far"), lab.pod("near"), lab.pod("near2")];
    Service::new("web2", &["10.96.0.11"])
        .port("tcp", 80, TCP)
        .endpoints(&endpoints)
}

fn a_local_policy_keeps_traffic_on_the_node() -> Result<()> {
    let cluster = Cluster::start(|lab| {
        let far_only = Service::new("far-only", &["10.96.0.30"]).port("tcp", 80, TCP);
        vec![
            web(lab).set("internalTrafficPolicy", "Local"),
            far_only
                .endpoints(&[lab.pod("far")])
                .set("internalTrafficPolicy", "Local"),
        ]
    })?;
    for client in [cluster.client(), cluster.lab.node("node2")] {
        reaches(
            client,
            "10.96.0.10:80",
            "connect --count 60",
            &["near", "near2"],
        )?;
        reaches(
            client,
            "[fd00:96::10]:53",
            "udp --count 60",
            &["near", "near2"],
        )?;
        refused(client, "10.96.0.30:80", "connect --count 3")?;
    }
    Ok(())
}

/// Ready endpoints are used; without any, those that terminate and still serve.
fn terminating_endpoints_serve_when_nobody_else_does() -> Result<()> {
    use Condition::{NotReady, Ready, ServingTerminating};
    let service = |conditions: [Condition; 3], lab: &Lab| {
        let web = Service::new("web", &[VIP4]).port("tcp", 80, TCP);
        let pods = ALL.into_iter().map(|name| lab.pod(name)).zip(conditions);
        pods.fold(web, |web, (pod, condition)| web.endpoint(pod, condition))
    };
    let cluster = Cluster::start(|lab| vec![service([Ready, ServingTerminating, NotReady], lab)])?;
    let to = format!("{VIP4}:80");
    let client = cluster.client();
    reaches(client, &to, "connect --count 30", &["far"])?;
    let conditions = [NotReady, ServingTerminating, ServingTerminating];
    cluster
        .manifests
        .write(&[service(conditions, &cluster.lab)])?;
    eventually(|| reaches(client, &to, "connect --count 40", &["near", "near2"]).map(drop))?;
    cluster
        .manifests
        .write(&[service([NotReady; 3], &cluster.lab)])?;
    eventually(|| refused(client, &to, "connect --count 3"))
}

/// The other addresses of a service, from processes of the node and of its pods.
fn external_addresses_and_node_ports_are_served() -> Result<()> {
    let services = |lab: &Lab| {
        let endpoints = [lab.pod("far"), lab.pod("near"), lab.pod("near2")];
        vec![
            Service::new("web", &[VIP4])
                .node_port("tcp", 80, TCP, 30080)
                .node_port("udp", 53, UDP, 30053)
                .load_balancer("203.0.113.10")
                .set("externalIPs", vec!["203.0.113.50"])
                .endpoints(&endpoints),
        ]
    };
    // The lab's nodes have no default route, from which the agent would learn which address is
    // the node's.
    let cluster = Cluster::start_with(services, &["--nodeport-addresses", "192.168.77.0/24"])?;
    let node = cluster.lab.node("node2");
    for client in [cluster.client(), node] {
        for to in ["203.0.113.10:80", "203.0.113.50:80", "192.168.77.2:30080"] {
            peer_is(&reaches(client, to, "connect --count 60", &ALL)?, to)?;
        }
        for to in ["203.0.113.10:53", "192.168.77.2:30053"] {
            for how in ["udp --count 60", "udp --count 60 --unconnected"] {
                let report = reaches(client, to, how, &ALL)?;
                ensure!(report.from == [to.parse()?], "{to} {how}: {report:?}");
            }
        }
        // Other ports of such an address are not the service's business.
        fails(
            client,
            "203.0.113.10:81",
            "connect --timeout-ms 300",
            unreachable_for(client),
        )?;
    }
    // The node's loopback has its node ports, a pod's has not.
    peer_is(
        &reaches(node, "127.0.0.1:30080", "connect --count 60", &ALL)?,
        "127.0.0.1:30080",
    )?;
    refused(cluster.client(), "127.0.0.1:30080", "connect")
}

/// The operator admits some addresses, or none. The rest of the service is served, and `status` names the addresses.
fn only_admitted_external_ips_are_served() -> Result<()> {
    let ips = ["203.0.113.50", "198.51.100.50"];
    for (admits, served) in [("203.0.113.0/24", &ips[..1]), ("none", &[])] {
        let services = |lab: &Lab| {
            let web = Service::new("web", &[VIP4]).port("tcp", 80, TCP);
            let web = web.set("externalIPs", ips.to_vec());
            vec![web.endpoints(&[lab.pod("far"), lab.pod("near"), lab.pod("near2")])]
        };
        let config = Config::new(&format!("node: {{externalIPs: [\"{admits}\"]}}"))?;
        let cluster = Cluster::start_with(services, &config.arguments())?;
        let client = cluster.client();
        let vip = format!("{VIP4}:80");
        reaches(client, &vip, "connect --count 60", &ALL)?;
        let status = cluster.status()?;
        ensure!(status["healthy"] == true, "{status:#}");
        let said = status["findings"].to_string();
        for ip in ips {
            let to = format!("{ip}:80");
            let is_served = served.contains(&ip);
            if is_served {
                reaches(client, &to, "connect --count 60", &ALL)?;
            } else {
                fails(
                    client,
                    &to,
                    "connect --timeout-ms 300",
                    unreachable_for(client),
                )?;
            }
            ensure!(said.contains(ip) != is_served, "{status:#}");
        }
    }
    Ok(())
}

/// The error of a connection to an address without a route: the node gets one at once, a pod times out.
fn unreachable_for(host: &Host) -> &'static str {
    if host.node().is_some() {
        "TIMEOUT"
    } else {
        "ENETUNREACH"
    }
}

/// Headless services have no VIP; their slices must not disturb the others.
fn a_headless_service_disturbs_nobody() -> Result<()> {
    let cluster = Cluster::start(|lab| {
        let headless = Service::new("headless", &[]).port("tcp", 80, TCP);
        vec![headless.endpoints(&[lab.pod("near")]), web(lab)]
    })?;
    reaches(
        cluster.client(),
        "10.96.0.10:80",
        "connect --count 60",
        &ALL,
    )
    .map(drop)
}
