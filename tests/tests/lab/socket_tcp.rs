//! TCP clients: the draw of endpoints, a port and its protocol, refusals, and the source that endpoints see.

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use dataplane_tests::{Host, Lab, report::Report};

use crate::{
    cluster::{Cluster, TCP, UDP, peer_is, reaches, refused, sources_are},
    manifest::Service,
};

scenarios! {
    Dataplane:
    // The longest first: emulated, it takes a minute, in which the others are done.
    refusals_have_their_reason,
    endpoints_are_drawn_uniformly,
    a_port_is_a_port_of_one_protocol,
    endpoints_see_the_pods_own_address,
}

const SIX: [&str; 6] = ["far", "far2", "far3", "near", "near2", "near3"];

/// Three endpoints on each node.
fn wide_lab() -> Result<Lab> {
    Ok(Lab::builder()
        .node("node1")
        .node("node2")
        .pod("node1", "far", "10.244.1.5")
        .pod("node1", "far2", "10.244.1.6")
        .pod("node1", "far3", "10.244.1.7")
        .pod("node2", "near", "10.244.2.10")
        .pod("node2", "near2", "10.244.2.11")
        .pod("node2", "near3", "10.244.2.12")
        .pod("node2", "sleep", "10.244.2.8")
        .build()?)
}

/// Pearson's chi-squared of a draw from the six.
#[expect(
    clippy::cast_precision_loss,
    reason = "counts of a few thousand are exact"
)]
fn chi_squared(report: &Report) -> f64 {
    let expected = report.answered as f64 / SIX.len() as f64;
    let answers = |name: &&str| report.endpoints.get(*name).map_or(0, |e| e.answers);
    SIX.iter()
        .map(|name| (answers(name) as f64 - expected).powi(2) / expected)
        .sum()
}

/// Every endpoint is as likely as every other endpoint, on this node and on the other. With five degrees of
/// freedom, a uniform draw exceeds 42 once in 17 million times.
fn endpoints_are_drawn_uniformly() -> Result<()> {
    let services = |lab: &Lab| {
        vec![
            Service::new("wide", &["10.96.0.10", "fd00:96::10"])
                .port("tcp", 80, TCP)
                .port("udp", 53, UDP)
                .endpoints(&SIX.map(|name| lab.pod(name))),
        ]
    };
    let cluster = Cluster::start_in(wide_lab()?, &SIX, services, &[])?;
    for (to, how) in [
        ("10.96.0.10:80", "connect --count 3000"),
        ("[fd00:96::10]:80", "connect --count 3000"),
        ("10.96.0.10:53", "udp --count 3000"),
        ("[fd00:96::10]:53", "udp --count 3000 --unconnected"),
    ] {
        let report = reaches(cluster.client(), to, how, &SIX)?;
        let chi_squared = chi_squared(&report);
        println!("{to}, {how}: chi-squared {chi_squared:.1} with 5 degrees of freedom");
        ensure!(chi_squared < 42.0, "{chi_squared:.1}: {report:?}");
    }
    Ok(())
}

/// A port number is a different port for TCP, UDP and SCTP: also when two services share an address, as DNS behind a
/// load balancer does.
fn a_port_is_a_port_of_one_protocol() -> Result<()> {
    let cluster = Cluster::start(|lab| {
        let shared = vec!["203.0.113.60"];
        vec![
            Service::new("both", &["10.96.0.10"])
                .port("tcp", 53, TCP)
                .port("udp", 53, UDP)
                .port("sctp", 53, 9)
                .endpoints(&[lab.pod("far"), lab.pod("near")]),
            Service::new("over-tcp", &["10.96.0.11"])
                .port("tcp", 53, TCP)
                .set("externalIPs", shared.clone())
                .endpoints(&[lab.pod("near")]),
            Service::new("over-udp", &["10.96.0.12"])
                .port("udp", 53, UDP)
                .set("externalIPs", shared)
                .endpoints(&[lab.pod("near2")]),
            Service::new("over-sctp", &["10.96.0.13"])
                .port("sctp", 53, 9)
                .endpoints(&[lab.pod("near")]),
        ]
    })?;
    let client = cluster.client();
    let both = ["far", "near"];
    reaches(client, "10.96.0.10:53", "connect --count 40", &both)?;
    reaches(client, "10.96.0.10:53", "udp --count 40", &both)?;
    reaches(client, "203.0.113.60:53", "connect --count 3", &["near"])?;
    reaches(client, "203.0.113.60:53", "udp --count 3", &["near2"])?;
    refused(client, "10.96.0.12:53", "connect --count 3")?;
    refused(client, "10.96.0.11:53", "udp --count 3")?;
    // At a port without a service, the address is still the service's.
    refused(client, "10.96.0.13:53", "connect --count 3")?;
    let status = cluster.status()?;
    let conflicts = status["agent"]["conflicts"].as_array();
    ensure!(conflicts.is_some_and(Vec::is_empty), "{status:#}");
    let problems = status["agent"]["problems"].to_string();
    ensure!(
        problems.matches("SCTP port 53").count() == 2,
        "both SCTP ports are said not to be served: {problems}"
    );
    Ok(())
}

/// No masquerading: endpoints on both nodes see the pod's own address, for every kind of VIP that the pod dials.
fn endpoints_see_the_pods_own_address() -> Result<()> {
    let services = |lab: &Lab| {
        vec![
            Service::new("web", &["10.96.0.10", "fd00:96::10"])
                .node_port("tcp", 80, TCP, 30080)
                .set("externalIPs", vec!["203.0.113.50"])
                .load_balancer("203.0.113.10")
                .endpoints(&["far", "near", "near2"].map(|name| lab.pod(name))),
        ]
    };
    let cluster = Cluster::start_with(
        services,
        &["--nodeport-addresses", "192.168.77.0/24,fd77::/64"],
    )?;
    for client in [cluster.client(), cluster.lab.pod("near")] {
        for to in [
            "10.96.0.10:80",
            "203.0.113.50:80",
            "203.0.113.10:80",
            "192.168.77.2:30080",
            "[fd00:96::10]:80",
            "[fd77::2]:30080",
        ] {
            let all = ["far", "near", "near2"];
            let report = reaches(client, to, "connect --count 60", &all)?;
            peer_is(&report, to)?;
            sources_are(&report, &client.addresses())?;
        }
    }
    Ok(())
}

/// Refusals have the right reason, which `dataplane explain` gives too.
fn refusals_have_their_reason() -> Result<()> {
    let cluster = Cluster::start(|lab| {
        let local = Service::new("far-only", &["10.96.0.30", "fd00:96::30"])
            .port("tcp", 80, TCP)
            .port("udp", 53, UDP)
            .endpoints(&[lab.pod("far")])
            .set("internalTrafficPolicy", "Local");
        let empty = Service::new("empty", &["10.96.0.20", "fd00:96::20"])
            .port("tcp", 80, TCP)
            .port("udp", 53, UDP);
        vec![local, empty]
    })?;
    let clients: [&Host; 2] = [cluster.client(), cluster.lab.node("node2")];
    for (v4, v6, ports, reason) in [
        ("10.96.0.20", "[fd00:96::20]", [80, 53], Reason::NoEndpoints),
        (
            "10.96.0.30",
            "[fd00:96::30]",
            [80, 53],
            Reason::NoLocalEndpoint,
        ),
        (
            "10.96.0.30",
            "[fd00:96::30]",
            [81, 54],
            Reason::PortNotServed,
        ),
    ] {
        for client in clients {
            for vip in [v4, v6] {
                let [tcp, udp] = ports;
                let what = || format!("{vip} from {}", client.name());
                for (port, how) in [
                    (tcp, "connect --count 3"),
                    (udp, "udp --count 3"),
                    (udp, "udp --count 3 --unconnected"),
                ] {
                    cluster
                        .for_reason(reason, 3, || refused(client, &format!("{vip}:{port}"), how))
                        .with_context(what)?;
                }
            }
            let how = "connect --count 2 --v4-mapped";
            cluster.for_reason(reason, 2, || {
                refused(client, &format!("{v4}:{}", ports[0]), how)
            })?;
        }
        let to = format!("{v4}:{}", ports[0]);
        let explain = ["explain", "node", &to, "-o", "json"];
        let text = cluster.agent.dataplane(explain).run()?;
        ensure!(
            text.contains(&format!("\"{}\"", reason.word())),
            "{to} is refused for {}, not: {text}",
            reason.word()
        );
    }
    Ok(())
}
