//! An agent takes over from one of another layout: its connections go on, and no client is without programs in between.

use std::{fs, net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::LAYOUT;
use dataplane_tests::{
    Host, Lab, Process,
    report::{LoadReport, Report},
};

use crate::{
    cluster::{Cluster, TCP, UDP, reaches},
    iptables::load as load_rules,
    manifest::Service,
};

scenarios! {
    Dataplane:
    connections_outlive_a_layout,
    connections_outlive_a_layout_by_filters,
    connections_outlive_a_layout_through_the_stack,
    connections_outlive_a_layout_that_took_the_fast_path,
}

const TCP_PORT: u16 = 30_080;
const UDP_PORT: u16 = 30_053;
const VIP: &str = "10.96.0.60:80";
const VIP_UDP: &str = "10.96.0.60:53";

fn service(lab: &Lab) -> Service {
    let pods = ["far", "near", "near2"].map(|name| lab.pod(name));
    Service::new("web", &["10.96.0.60"])
        .node_port("tcp", 80, TCP, TCP_PORT)
        .node_port("udp", 53, UDP, UDP_PORT)
        .endpoints(&pods)
}

fn connections_outlive_a_layout() -> Result<()> {
    outlive(&[], None)
}

fn connections_outlive_a_layout_by_filters() -> Result<()> {
    outlive(&["--tc-hook", "clsact"], None)
}

fn connections_outlive_a_layout_through_the_stack() -> Result<()> {
    outlive(&["--packet-path", "stack"], None)
}

/// A rule comes while no agent runs, so the next agent chooses the stack, and its predecessor's programs do not know it.
fn connections_outlive_a_layout_that_took_the_fast_path() -> Result<()> {
    outlive(&["--packet-path", "auto"], Some(POLICY))
}

const POLICY: &str = "table inet enforcer { chain forward { type filter hook forward priority filter; policy accept;\n\
    ip saddr 203.0.113.99 drop\n}\n}";

const HOLD: &str = "hold";
const SEND: &str = "udp --one-socket --each --until-stdin-closes";

/// A client that sends a hundred times a second: 32 that send all the time leave the agent no time to start.
fn busy(from: &Host, how: &str, to: &str) -> Result<Process> {
    let mut how = how.split(' ');
    let probe = from.probe(how.next().context("a subcommand")?).args(how);
    let probe = probe.args(["--pause-ms", "10", "--to", to]);
    let mut process = probe.stdin_piped().stdout_piped().spawn()?;
    process.wait_for_line()?;
    Ok(process)
}

/// Clients have connections, and make new ones all the time, by sockets and by packets.
fn outlive(arguments: &[&str], rules: Option<&str>) -> Result<()> {
    let before = LAYOUT - 1;
    let mut cluster = Cluster::start_with(|lab| vec![service(lab)], arguments)?;
    let lab = &cluster.lab;
    let (ext, client, node) = (
        lab.external("ext"),
        lab.pod("sleep"),
        lab.node("node2").ipv4(),
    );
    let node_port = SocketAddr::from((node, TCP_PORT));
    // Enough that each endpoint has some: packets to remote and to local endpoints take different ways.
    let mut held = Vec::new();
    for _ in 0..8 {
        let from_outside = busy(ext, HOLD, &node_port.to_string())?;
        held.push(("held from outside", from_outside));
        held.push(("held by a pod", busy(client, HOLD, VIP)?));
        let udp = SocketAddr::from((node, UDP_PORT));
        held.push(("datagrams", busy(ext, SEND, &udp.to_string())?));
        held.push(("datagrams of a pod", busy(client, SEND, VIP_UDP)?));
    }
    let load =
        |from: &Host, to: &str| from.load(&["--to", to, "--threads", "2", "--pause-us", "1000"]);
    let loads = [load(ext, &node_port.to_string())?, load(client, VIP)?];
    std::thread::sleep(Duration::from_millis(300));
    let command = ["conntrack", "list", "--state", "established", "-o", "json"];
    let flows: serde_json::Value = cluster.agent.dataplane(command).json()?;
    let flows = flows.as_array().context("an array")?.len();
    ensure!(flows >= 8, "of 8 connections, {flows} are known");

    cluster.agent.kill();
    if let Some(rules) = rules {
        load_rules(lab.node("node2"), "nft -f -", rules)?;
    }
    cluster.agent.change_layout(LAYOUT, before)?;
    cluster.agent.start()?;
    std::thread::sleep(Duration::from_millis(300));
    let log = cluster.agent.log();
    let layouts: Vec<_> = fs::read_dir(cluster.agent.bpffs())?.collect::<Result<_, _>>()?;
    ensure!(
        log.contains("its programs are replaced")
            && layouts
                .iter()
                .any(|entry| entry.path().ends_with(format!("v{LAYOUT}")))
            && !layouts
                .iter()
                .any(|entry| entry.path().ends_with(format!("v{before}"))),
        "the other layout's programs were not replaced: {layouts:?}\n{log}"
    );
    ensure!(
        rules.is_none() || log.contains("packets of services go through the stack"),
        "the rules did not change the path:\n{log}"
    );
    for load in loads {
        let report: LoadReport = load.wait_json()?;
        ensure!(
            report.errors.is_empty() && report.answered > 300,
            "{} answered, {:?} {:?}\n{log}",
            report.answered,
            report.errors,
            report.failures
        );
    }
    for (what, process) in held {
        let report: Report = process.wait_json()?;
        ensure!(
            report.errors.is_empty() && report.endpoints.len() == 1 && report.answered > 10,
            "{what}: {:?} {:?} {}\n{log}",
            report.endpoints,
            report.errors,
            report.answered
        );
    }
    let all = ["far", "near", "near2"];
    reaches(ext, &node_port.to_string(), "connect --count 60", &all)?;
    reaches(client, VIP, "connect --count 60", &all)?;
    Ok(())
}
