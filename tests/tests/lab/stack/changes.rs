//! The path changes while flows go on: rules that must see packets come and go, and no connection breaks or loses a byte.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use dataplane_common::packet::PacketConfig;
use dataplane_tests::{
    Lab, Process, is_long,
    report::{LoadReport, Report},
};
use kernel::packet::PacketTables;

use super::{PLUGIN, takes};
use crate::{
    cluster::{Cluster, POD_CIDRS, TCP, UDP, eventually},
    flows::sender,
    iptables::load,
    manifest::Service,
    sockets::{address, tcp},
};

scenarios! {
    Dataplane:
    flows_go_on_while_the_path_changes,
    flows_go_on_while_the_path_changes_beside_a_plugin,
    programs_look_for_flows_in_the_stack_until_the_last_is_over,
}

/// A policy for others: it knows the flows that pass it.
const POLICY: &str = "table inet enforcer { chain forward { type filter hook forward priority filter; policy accept;\n\
    ct state invalid drop\nct state established,related accept\nip saddr 203.0.113.99 drop\n}\n}";

/// The words of the agent's log about a change of the path.
const STACK: &str = "packets of services go through the stack";
const FAST: &str = "packets of services take the fast path";

fn flows_go_on_while_the_path_changes() -> Result<()> {
    change(None)
}

fn flows_go_on_while_the_path_changes_beside_a_plugin() -> Result<()> {
    change(Some(PLUGIN))
}

fn services(lab: &Lab) -> Vec<Service> {
    let service = |name: &str, number: u16, pod: &str| {
        let vips = [format!("10.96.0.{number}"), format!("fd00:96::{number}")];
        Service::new(name, &[&vips[0], &vips[1]])
            .node_port("tcp", 80, TCP, 30_070 + number)
            .node_port("udp", 53, UDP, 30_040 + number)
            .endpoints(&[lab.pod(pod)])
    };
    vec![
        service("far", 10, "far"),
        service("near", 11, "near"),
        service("local", 12, "near").set("externalTrafficPolicy", "Local"),
    ]
}

/// Addresses of all services, by node port from outside and by cluster IP from a virtual machine; and pods themselves.
fn ways(cluster: &Cluster) -> Result<Vec<(&str, SocketAddr)>> {
    let node = cluster.lab.node("node2");
    let mut ways = Vec::new();
    for v4 in [true, false] {
        for number in [10, 11, 12] {
            ways.push(("ext", (address(node, v4), 30_070 + number).into()));
        }
        for number in [10, 11] {
            let vip = if v4 {
                format!("10.96.0.{number}:80")
            } else {
                format!("[fd00:96::{number}]:80")
            };
            ways.push(("sleep", vip.parse()?));
        }
        for pod in ["near", "far"] {
            ways.push(("sleep", (address(cluster.lab.pod(pod), v4), TCP).into()));
        }
    }
    Ok(ways)
}

/// The bytes of a stream, from a place on.
fn bytes(from: u32) -> impl Iterator<Item = u8> {
    (from..).map(|n| n.wrapping_mul(2_654_435_761).to_be_bytes()[0])
}

/// Sends bytes all the time, and reads them back at the same time, until told to stop. Returns how many there were.
fn exchange(stream: &TcpStream, stop: &AtomicBool) -> Result<u32> {
    let mut reader = BufReader::new(stream);
    reader.read_line(&mut String::new()).context("a greeting")?;
    thread::scope(|scope| {
        let writer = scope.spawn(|| -> Result<u32> {
            let mut writer = stream;
            let mut sent = 0;
            while !stop.load(Ordering::Relaxed) {
                let part: Vec<u8> = bytes(sent).take(1000).collect();
                writer.write_all(&part).context("write")?;
                sent += 1000;
                thread::sleep(Duration::from_millis(2));
            }
            stream.shutdown(Shutdown::Write)?;
            Ok(sent)
        });
        let mut back = 0;
        let mut part = [0; 1000];
        let read = loop {
            match reader.read_exact(&mut part) {
                Ok(()) if !part.iter().copied().eq(bytes(back).take(part.len())) => {
                    break Err(anyhow!("other bytes came back after {back}"));
                }
                Ok(()) => back += 1000,
                Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => break Ok(back),
                Err(error) => break Err(error).context(format!("read after {back} bytes")),
            }
        };
        let sent = writer
            .join()
            .map_err(|_| anyhow!("the writer panicked"))??;
        let read = read?;
        ensure!(sent == read, "{sent} bytes were sent, {read} came back");
        Ok(read)
    })
}

/// Adds and removes the policy many times. Waits for the change of the path each time.
fn add_and_remove(cluster: &Cluster, times: usize) -> Result<()> {
    let node = cluster.lab.node("node2");
    let count = |words: &str| cluster.agent.log().matches(words).count();
    takes(&cluster.agent, "fast")?;
    let before = [count(STACK), count(FAST)];
    for number in 1..=times {
        load(node, "nft -f -", POLICY)?;
        eventually(|| {
            let changes = count(STACK) - before[0];
            ensure!(
                changes == number,
                "to the stack: {changes} of {number} times"
            );
            Ok(())
        })?;
        thread::sleep(Duration::from_millis(100));
        node.command("nft")
            .arg("delete table inet enforcer")
            .run()?;
        eventually(|| {
            let changes = count(FAST) - before[1];
            ensure!(
                changes == number,
                "to the fast path: {changes} of {number} times"
            );
            Ok(())
        })?;
        thread::sleep(Duration::from_millis(300));
    }
    Ok(())
}

fn change(plugin: Option<&str>) -> Result<()> {
    let times = if is_long() { 100 } else { 20 };
    let lab = Cluster::lab_of_packets()?;
    if let Some(rules) = plugin {
        load(lab.node("node2"), "nft -f -", rules)?;
    }
    let cluster = Cluster::start_in(lab, &["far", "near"], services, &POD_CIDRS)?;
    let lab = &cluster.lab;
    let host = |name: &str| match name {
        "ext" => lab.external(name),
        _ => lab.pod(name),
    };
    let ways = ways(&cluster)?;
    let streams = ways.iter().map(|(from, to)| tcp(host(from), *to));
    let streams = streams.collect::<Result<Vec<_>>>()?;
    // New connections, a thousand each second in the long form; and one socket that asks all the time.
    let pause = if is_long() { "2000" } else { "10000" };
    let mut clients = Vec::new();
    for client in ["ext", "sleep"] {
        let own = ways.iter().filter(|(from, _)| *from == client);
        let to = own.flat_map(|(_, to)| ["--to".to_owned(), to.to_string()]);
        let to: Vec<String> = to.collect();
        let rate = ["--pause-us", pause];
        let arguments = to.iter().map(String::as_str).chain(rate);
        clients.push(host(client).load(&arguments.collect::<Vec<_>>())?);
    }
    let far = format!("{}:30050", lab.node("node2").ipv4());
    let asks = ["--one-socket", "--until-stdin-closes", "--to", &far];
    let datagrams = host("ext").probe("udp").args(asks);
    let mut datagrams = datagrams.stdin_piped().stdout_piped().spawn()?;
    datagrams.wait_for_line()?;

    let stop = AtomicBool::new(false);
    let exchanged = thread::scope(|scope| {
        let stop = &stop;
        let exchanges: Vec<_> = streams
            .iter()
            .map(|stream| scope.spawn(move || exchange(stream, stop)))
            .collect();
        let changed = add_and_remove(&cluster, times);
        stop.store(true, Ordering::Relaxed);
        let end = |exchange: thread::ScopedJoinHandle<'_, Result<u32>>| -> Result<u32> {
            exchange.join().map_err(|_| anyhow!("a thread panicked"))?
        };
        let ends: Vec<_> = exchanges.into_iter().map(end).collect();
        changed.map(|()| ends)
    })?;
    for ((from, to), exchanged) in ways.iter().zip(exchanged) {
        let bytes = exchanged.with_context(|| format!("the connection of {from} to {to}"))?;
        ensure!(bytes > 0, "the connection of {from} to {to} was idle");
    }
    for client in clients {
        let report: LoadReport = client.wait_json()?;
        ensure!(
            report.errors.is_empty() && report.answered > 0,
            "of {} new connections some failed: {:?}",
            report.answered,
            report.errors
        );
    }
    all_answered(datagrams)?;
    Ok(())
}

/// Waits for the end of a [`sender`], whose datagrams must all have been answered.
fn all_answered(datagrams: Process) -> Result<()> {
    let report: Report = datagrams.wait_json()?;
    ensure!(
        report.answered == report.attempts && report.endpoints.keys().eq(["far"]),
        "datagrams: {} of {} answered, {:?}",
        report.answered,
        report.attempts,
        report.errors
    );
    Ok(())
}

fn programs_look_for_flows_in_the_stack_until_the_last_is_over() -> Result<()> {
    let lab = Cluster::lab_of_packets()?;
    let cluster = Cluster::start_in(lab, &["far", "near"], services, &POD_CIDRS)?;
    let (lab, agent) = (&cluster.lab, &cluster.agent);
    let node = lab.node("node2");
    let is = |wanted: u32| -> Result<()> {
        let flags = PacketTables::open(agent.bpffs())?.config().flags & PacketConfig::STACK;
        ensure!(flags == wanted, "flags {flags:#x}, not {wanted:#x}");
        Ok(())
    };
    takes(agent, "fast")?;
    eventually(|| is(0))?;
    load(node, "nft -f -", POLICY)?;
    takes(agent, "stack")?;
    is(PacketConfig::STACK)?;
    let datagrams = sender(lab.external("ext"), (node.ipv4(), 30_050).into())?;
    node.command("nft")
        .arg("delete table inet enforcer")
        .run()?;
    takes(agent, "fast")?;
    // Longer than the agent rests between two walks through all flows.
    thread::sleep(Duration::from_secs(12));
    is(PacketConfig::STACK_OUT)?;
    all_answered(datagrams)?;
    // The flow ends when its endpoint goes.
    let moved = Service::new("far", &["10.96.0.10", "fd00:96::10"])
        .node_port("udp", 53, UDP, 30_050)
        .endpoints(&[lab.pod("near")]);
    cluster.manifests.write(&[moved])?;
    eventually(|| is(0))
}
