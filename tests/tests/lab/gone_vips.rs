//! The address of a flow no longer belongs to a service: the flow goes on until it ends, and no other begins.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Result, ensure};
use dataplane_tests::{Host, Lab, Process, report::Report};

use crate::{
    cluster::{Cluster, TCP, UDP, ask, eventually, reaches},
    flows::sender,
    manifest::Service,
};

scenarios! {
    Dataplane:
    flows_outlive_the_address_that_they_go_to,
}

/// The service's addresses outside of the cluster, and its cluster IPs, which are alone in their /24 and /120.
const OUTSIDE: [&str; 3] = ["203.0.113.50", "[fd99::50]", "203.0.113.51"];
const INSIDE: [&str; 2] = ["10.96.7.50", "[fd00:10:96::750]"];

fn service(lab: &Lab) -> Service {
    Service::new("gone", &["10.96.7.50", "fd00:10:96::750"])
        .port("tcp", 80, TCP)
        .port("udp", 53, UDP)
        .set("externalIPs", vec!["203.0.113.50", "fd99::50"])
        .load_balancer("203.0.113.51")
        .endpoints(&[lab.pod("near")])
}

fn other(lab: &Lab) -> Service {
    Service::new("other", &["10.96.8.1"])
        .port("tcp", 80, TCP)
        .endpoints(&[lab.pod("near")])
}

/// A connection and a socket's datagrams to each address.
fn begin(from: &Host, addresses: &[&str], held: &mut Vec<(String, Process)>) -> Result<()> {
    for address in addresses {
        held.push((
            format!("{address}, TCP"),
            from.hold(&format!("{address}:80"))?,
        ));
        let to: SocketAddr = format!("{address}:53").parse()?;
        held.push((format!("{address}, UDP"), sender(from, to)?));
    }
    Ok(())
}

/// External IPs and load balancers' addresses that are removed, and cluster IPs of a service that is deleted. An
/// agent that is started anew knows of the flows, too.
fn flows_outlive_the_address_that_they_go_to() -> Result<()> {
    let mut cluster = Cluster::start_in(
        Cluster::lab_of_packets()?,
        &["far", "near"],
        |lab| vec![service(lab), other(lab)],
        &[],
    )?;
    let lab = &cluster.lab;
    let (ext, client, node) = (lab.external("ext"), lab.pod("sleep"), lab.node("node2"));
    ext.ip(&format!("route add 203.0.113.0/24 via {}", node.ipv4()))?;
    ext.ip(&format!("route add fd99::/64 via {}", node.ipv6()))?;
    let mut held = Vec::new();
    begin(ext, &OUTSIDE, &mut held)?;
    begin(client, &INSIDE, &mut held)?;
    std::thread::sleep(Duration::from_millis(300));
    cluster.manifests.write(&[other(lab)])?;
    // No new flow begins: there is no such service.
    for (from, addresses) in [(ext, &OUTSIDE[..]), (client, &INSIDE[..])] {
        for address in addresses {
            for (how, port) in [("connect", 80), ("udp", 53)] {
                let how = format!("{how} --timeout-ms 200");
                eventually(|| {
                    let report = ask(from, &format!("{address}:{port}"), &how)?;
                    ensure!(report.answered == 0, "{address}: {report:?}");
                    Ok(())
                })?;
            }
        }
    }
    cluster.agent.kill();
    cluster.agent.start()?;
    // Longer than a walk through all flows takes to come by, twice.
    std::thread::sleep(Duration::from_secs(25));
    let healthy = cluster.agent.dataplane(["status"]).output()?;
    ensure!(healthy.status.success(), "{healthy:?}");
    for (what, process) in held {
        let report: Report = process.wait_json()?;
        ensure!(
            report.errors.is_empty() && report.endpoints.keys().eq(["near"]),
            "{what}: {:?} {:?} after {} answers",
            report.endpoints,
            report.errors,
            report.answered
        );
    }
    // When the service is back, new flows begin.
    let lab = &cluster.lab;
    cluster.manifests.write(&[service(lab), other(lab)])?;
    eventually(|| reaches(lab.external("ext"), "203.0.113.50:80", "connect", &["near"]).map(drop))?;
    eventually(|| reaches(lab.pod("sleep"), "10.96.7.50:80", "connect", &["near"]).map(drop))
}
