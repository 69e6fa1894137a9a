//! A client reaches one endpoint through two VIPs from one port at the same time. The endpoint tells
//! the two flows apart by the client's port, and sees the client's address in both.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Host, Lab, Process, report::Report};

use crate::{
    cluster::{Cluster, TCP, UDP, reaches, serve},
    manifest::{Manifests, Service},
};

scenarios! {
    Dataplane:
    two_vips_of_one_endpoint_see_the_clients_address,
    an_external_ip_takes_no_connection_of_the_service_whose_endpoint_has_it,
}

/// The client's port.
const PORT: &str = "40000";

/// A service whose load balancer's addresses are reached from outside, and whose endpoint sees the
/// client.
fn local(name: &str, number: u8, endpoint: &Host) -> Service {
    Service::new(
        name,
        &[&format!("10.96.0.{number}"), &format!("fd00:96::{number}")],
    )
    .port("tcp", 80, TCP)
    .port("udp", 53, UDP)
    .set("externalTrafficPolicy", "Local")
    .set(
        "externalIPs",
        [4, 6].map(|family| address(family, number)).to_vec(),
    )
    .endpoints(&[endpoint])
}

fn address(family: u8, number: u8) -> String {
    if family == 4 {
        format!("203.0.113.{number}")
    } else {
        format!("fd99::{number}")
    }
}

/// A client that asks again and again, from [`PORT`], until it is ended.
fn client(from: &Host, udp: bool, to: &str) -> Result<Process> {
    let probe = if udp {
        let how = ["--one-socket", "--each", "--until-stdin-closes"];
        from.probe("udp").args(how)
    } else {
        from.probe("hold")
    };
    let probe = probe.args(["--local-port", PORT, "--to", to]);
    let mut process = probe.stdin_piped().stdout_piped().spawn()?;
    process.wait_for_line()?;
    Ok(process)
}

/// Behind `externalTrafficPolicy: Local`, with an endpoint in a pod and one on the host.
fn two_vips_of_one_endpoint_see_the_clients_address() -> Result<()> {
    let lab = Lab::builder()
        .node("node1")
        .pod("node1", "e1", "10.244.1.101")
        .external("ext")
        .build()?;
    let (node, pod, ext) = (lab.node("node1"), lab.pod("e1"), lab.external("ext"));
    ext.ip(&format!("route add 203.0.113.0/24 via {}", node.ipv4()))?;
    ext.ip(&format!("route add fd99::/64 via {}", node.ipv6()))?;
    let _servers = [serve(pod)?, serve(node)?];
    let manifests = Manifests::new(&[
        local("a", 1, pod),
        local("b", 2, pod),
        local("c", 3, node),
        local("d", 4, node),
    ])?;
    let agent = lab.agent("node1").manifests(manifests.path()).start()?;
    for family in [4, 6] {
        for udp in [false, true] {
            for (what, numbers) in [("a pod", [1, 2]), ("the host", [3, 4])] {
                let what = format!("IPv{family}, UDP: {udp}, endpoint in {what}");
                let port = if udp { 53 } else { 80 };
                let to = numbers.map(|number| match family {
                    4 => format!("{}:{port}", address(family, number)),
                    _ => format!("[{}]:{port}", address(family, number)),
                });
                let clients = to
                    .iter()
                    .map(|to| client(ext, udp, to))
                    .collect::<Result<Vec<_>>>()?;
                std::thread::sleep(std::time::Duration::from_millis(200));
                let flows: serde_json::Value = agent
                    .dataplane(["conntrack", "list", "-o", "json"])
                    .json()?;
                let mut ports = BTreeSet::new();
                for process in clients {
                    let report: Report = process.wait_json()?;
                    let seen: BTreeSet<_> = report
                        .each
                        .iter()
                        .filter_map(|attempt| attempt.source)
                        .collect();
                    ensure!(
                        report.errors.is_empty() && report.answered > 0 && seen.len() == 1,
                        "{what}: {:?}, seen as {seen:?}; {flows:#}",
                        report.errors
                    );
                    let seen = seen.first().context("one address")?;
                    ensure!(
                        ext.addresses().contains(&seen.ip()) && ports.insert(seen.port()),
                        "{what}: seen as {seen}, beside {ports:?}; {flows:#}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// A service in another namespace has the address and port of an endpoint as its external IP. A client of the
/// endpoint's service reaches this endpoint: the socket hook has translated the destination, and the packet path does
/// not translate it again. A client that dials the address itself reaches the other service, as with kube-proxy.
fn an_external_ip_takes_no_connection_of_the_service_whose_endpoint_has_it() -> Result<()> {
    let services = |lab: &Lab| {
        let far = lab.pod("far");
        let addresses: Vec<String> = far.addresses().iter().map(ToString::to_string).collect();
        vec![
            Service::new("x", &["10.96.0.10", "fd00:96::10"])
                .in_namespace("x")
                .port("tcp", 80, TCP)
                .port("udp", 5353, UDP)
                .endpoints(&[far]),
            Service::new("y", &["10.96.0.66", "fd00:96::66"])
                .in_namespace("y")
                .set("externalIPs", addresses)
                .port("tcp", TCP, TCP)
                .port("udp", UDP, UDP)
                .endpoints(&[lab.pod("near")]),
        ]
    };
    let cluster = Cluster::start_in(Cluster::lab()?, &["far", "near"], services, &[])?;
    let lab = &cluster.lab;
    for from in [cluster.client(), lab.pod("near2"), lab.node("node2")] {
        for vip in ["10.96.0.10", "[fd00:96::10]"] {
            reaches(from, &format!("{vip}:80"), "connect --count 20", &["far"])?;
            let mut ways = vec!["udp --count 20", "udp --count 20 --unconnected"];
            if !vip.contains(':') {
                // As Java and Go connect: the kernel calls the hook of sendmsg() for each datagram.
                ways.push("udp --count 20 --v4-mapped");
            }
            for how in ways {
                reaches(from, &format!("{vip}:5353"), how, &["far"])?;
            }
        }
    }
    for address in lab.pod("far").addresses() {
        for (port, how) in [(TCP, "connect --count 5"), (UDP, "udp --count 5")] {
            let to = std::net::SocketAddr::from((address, port)).to_string();
            reaches(cluster.client(), &to, how, &["near"])?;
        }
    }
    Ok(())
}
