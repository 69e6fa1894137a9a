//! Ports of the node that masqueraded flows use.

use std::{
    net::{Ipv4Addr, SocketAddr},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use dataplane_proof::wire::{Packet, Payload, flags};
use dataplane_tests::{
    Host, Lab,
    report::{LoadReport, Report},
};

use crate::{
    cluster::{Cluster, TCP, reaches},
    manifest::{Config, Service},
    many_clients::{FIRST, NETWORK, cluster, each_asks},
    sockets::{inject, link},
};

scenarios! {
    Dataplane:
    flows_get_ports_with_any_range,
    many_flows_to_one_endpoint_get_ports,
    sockets_and_flows_never_share_a_port,
    a_flood_of_syns_keeps_nobody_out,
}

fn far(lab: &Lab, service: Service) -> Service {
    service
        .node_port("tcp", 80, TCP, 30080)
        .endpoints(&[lab.pod("far")])
}

/// The node's own sockets may have any port from 1024 on, as is often configured.
fn flows_get_ports_with_any_range() -> Result<()> {
    let cluster = cluster(far, &[])?;
    let node = cluster.lab.node("node2");
    node.sysctl("ipv4/ip_local_port_range", "1024 65535")?;
    // The agent reads the range when it looks at interfaces.
    node.ip("addr add 198.51.100.7/32 dev lo")?;
    thread::sleep(Duration::from_millis(500));
    let ext = cluster.lab.external("ext");
    reaches(ext, "192.168.77.2:30080", "connect --count 50", &["far"])?;
    let report = each_asks(ext, 50)?;
    ensure!(report.answered == 50, "{:?}", report.errors);
    // From the port that another client uses.
    for local in [FIRST, "198.18.0.2", "198.18.0.3"] {
        let how = [
            "--local",
            local,
            "--local-port",
            "40000",
            "--to",
            "192.168.77.2:30053",
        ];
        let report: Report = ext.probe("udp").args(how).json()?;
        ensure!(report.answered == 1, "{local}: {:?}", report.errors);
    }
    Ok(())
}

/// In the short form the node has some thousand ports for the flows, and in the long form all that it has.
fn many_flows_to_one_endpoint_get_ports() -> Result<()> {
    let asked = std::env::var("DATAPLANE_PORTS").ok();
    let asked: Option<usize> = asked.and_then(|count| count.parse().ok());
    let config = Config::new("packets: {conntrackFlows: 131072}")?;
    let cluster = cluster(far, &config.arguments())?;
    let node = cluster.lab.node("node2");
    if asked.is_none() {
        node.sysctl("ipv4/ip_local_port_range", "3072 65535")?;
        node.ip("addr add 198.51.100.7/32 dev lo")?;
        thread::sleep(Duration::from_millis(500));
    }
    let count = asked.unwrap_or(3000);
    let report = each_asks(cluster.lab.external("ext"), count)?;
    println!("{} of {count} answered", report.answered);
    ensure!(report.errors.is_empty(), "{:?} of {count}", report.errors);
    Ok(())
}

/// The port from which the endpoint sees a client that sends from this one.
fn seen_port(ext: &Host, local: u16) -> Result<u16> {
    let how = [
        "--each",
        "--local-port",
        &local.to_string(),
        "--to",
        "192.168.77.2:30053",
    ];
    let report: Report = ext.probe("udp").args(how).json()?;
    let source = report.each.first().and_then(|attempt| attempt.source);
    Ok(source
        .with_context(|| format!("{local}: {:?}", report.errors))?
        .port())
}

/// A port at which a socket of the node receives is never a flow's. A socket that takes a flow's port later is refused,
/// and the flow goes on.
fn sockets_and_flows_never_share_a_port() -> Result<()> {
    let cluster = cluster(far, &[])?;
    let (ext, node) = (cluster.lab.external("ext"), cluster.lab.node("node2"));
    let _own = node.serve(&["--udp", "192.168.77.2:20000"])?;
    ensure!(seen_port(ext, 20_001)? == 20_001, "nobody has it");
    ensure!(seen_port(ext, 20_000)? != 20_000, "it is a socket's");

    let held = ext
        .probe("hold")
        .args(["--local-port", "20004", "--to", "192.168.77.2:30080"]);
    let mut held = held.stdin_piped().stdout_piped().spawn()?;
    held.wait_for_line()?;
    let endpoint = cluster.lab.pod("far").ipv4();
    let ask = |probe: &str, port: &str, to: u16| -> Result<Report> {
        let to = format!("{endpoint}:{to}");
        let how = ["--local", "192.168.77.2", "--local-port", port];
        let how = node.probe(probe).args(how).args(["--to", &to]);
        Ok(how.args(["--timeout-ms", "3000"]).json()?)
    };
    let before = cluster.verdicts(Reason::PortTaken)?;
    let report = ask("connect", "20004", 7)?;
    ensure!(
        report.answered == 0 && report.errors.contains_key("ECONNREFUSED"),
        "{report:?}"
    );
    ensure!(cluster.verdicts(Reason::PortTaken)? > before);
    // One query and its answer are no stream: the node's own socket takes precedence over the flow.
    let report = ask("udp", "20001", 53)?;
    ensure!(report.answered == 1, "{report:?}");
    let report: Report = held.wait_json()?;
    ensure!(
        report.errors.is_empty() && report.answered > 0,
        "{:?}",
        report.errors
    );
    ensure!(seen_port(ext, 20_001)? == 20_001, "the flow is gone");
    // The connection is over: the port is the socket's.
    let report = ask("connect", "20004", 7)?;
    ensure!(report.answered == 1, "{report:?}");
    Ok(())
}

/// SYNs of made-up sources, which acknowledge nothing: other clients of the node port connect meanwhile, and the node's own
/// sockets to the endpoint. In the long form (`DATAPLANE_FLOOD=66000`) the SYNs take every port, and in the short one the
/// room of all flows.
fn a_flood_of_syns_keeps_nobody_out() -> Result<()> {
    let asked = std::env::var("DATAPLANE_FLOOD").ok();
    let asked: Option<u32> = asked.and_then(|count| count.parse().ok());
    let room = if asked.is_some() { 131_072 } else { 2048 };
    let config = Config::new(&format!("packets: {{conntrackFlows: {room}}}"))?;
    let service = |lab: &Lab| vec![far(lab, Service::new("web", &["10.96.0.10"]))];
    let cluster = Cluster::start_with(service, &config.arguments())?;
    let (ext, node) = (cluster.lab.external("ext"), cluster.lab.node("node2"));
    // The client's host forwards nothing: it drops the answers.
    node.ip(&format!("route add {NETWORK} via {}", ext.ipv4()))?;
    let to = SocketAddr::from((node.ipv4(), 30080));
    let endpoint = SocketAddr::from((cluster.lab.pod("far").ipv4(), TCP));
    let links = [link(node, "eth0")?, link(ext, "eth0")?];
    let first = FIRST.parse::<Ipv4Addr>()?.to_bits();
    let syn = |number: u32| -> Result<Vec<u8>> {
        let payload = Payload::Tcp {
            ports: [1024 + u16::try_from(number % 64_000)?, to.port()],
            flags: flags::SYN,
            options: vec![2, 4, 5, 0xb4],
            data: Vec::new(),
        };
        let source = Ipv4Addr::from_bits(first + number);
        let packet = Packet {
            link: links,
            ..Packet::new(source.into(), to.ip(), payload)
        };
        Ok(packet.frame())
    };
    let frames: Vec<_> = (0..asked.unwrap_or(5000)).map(syn).collect::<Result<_>>()?;
    let mut loads = Vec::new();
    for (host, to) in [(ext, to), (node, endpoint)] {
        loads.push(host.load(&["--to", &to.to_string(), "--pause-us", "1000"])?);
    }
    let start = Instant::now();
    inject(ext, "eth0", &frames)?;
    println!("{} SYNs in {:?}", frames.len(), start.elapsed());
    // The flows that the SYNs began are still there.
    thread::sleep(Duration::from_secs(2));
    for (load, whose) in loads.into_iter().zip(["clients", "the node itself"]) {
        let report: LoadReport = load.wait_json()?;
        let (answered, errors) = (report.answered, report.errors);
        println!("{whose}: {answered} connected, {:?} ns", report.connect_ns);
        ensure!(
            errors.is_empty(),
            "{whose}: {errors:?}, {answered} connected"
        );
        // A SYN that is dropped is sent again after a second.
        let worst = Duration::from_nanos(report.connect_ns.p99);
        ensure!(worst < Duration::from_secs(1), "{whose}: p99 {worst:?}");
        ensure!(answered > 100, "{whose}: {answered} connected");
    }
    Ok(())
}
