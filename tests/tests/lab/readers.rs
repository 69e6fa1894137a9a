//! Clients that request the metrics and do not read the answer.

use std::{fs, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Agent, Host, Lab, emulated};

use crate::{
    cluster::{Cluster, TCP, reaches},
    manifest::Service,
    metrics::Metrics,
    outcome::http,
};

scenarios! {
    Dataplane:
    many_slow_readers_of_the_metrics_cost_a_bounded_amount_of_memory,
}

/// Resident memory that no file backs, in KiB.
pub fn memory(agent: &Agent) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", agent.id()))?;
    let mut lines = status.lines();
    let line = lines.find_map(|line| line.strip_prefix("RssAnon:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number.context("RssAnon")?.parse()?)
}

/// How many TCP connections that come to this port a process has accepted.
fn accepted(node: &Host, process: u32, port: u16) -> Result<u64> {
    let filter = format!("( sport = :{port} )");
    let said = node
        .command("ss")
        .args(["-Htnp", "state", "established", &filter])
        .run()?;
    let owner = format!("pid={process},");
    Ok(said.lines().filter(|line| line.contains(&owner)).count() as u64)
}

/// From outside, while the node serves many services. The kubelet and Prometheus get answers, and services are served
/// meanwhile. Sockets have buffers of a page, so that no answer is the kernel's alone to keep.
fn many_slow_readers_of_the_metrics_cost_a_bounded_amount_of_memory() -> Result<()> {
    /// Connections of a port at the same time (`admin::limits`).
    const CONNECTIONS: u64 = 64;
    /// Renderings in memory at the same time (`admin::rendering`).
    const HELD: u64 = 4;
    // The agent cuts off a few readers at a time, so 400 take two minutes: only on demand.
    let number = |name, default| -> Result<u32> {
        match std::env::var(name) {
            Ok(number) => Ok(number.parse()?),
            Err(_) => Ok(default),
        }
    };
    let readers_wanted = number("DATAPLANE_METRICS_READERS", 100)?;
    let count = number(
        "DATAPLANE_METRICS_SERVICES",
        if emulated() { 500 } else { 1_500 },
    )?;
    let services = |lab: &Lab| {
        let service = |n: u32| {
            let [_, a, b, c] = n.to_be_bytes();
            let vip = format!("10.{}.{b}.{c}", 96 + a);
            let service = Service::new(&format!("s{n}"), &[&vip]);
            service.port("tcp", 80, TCP).endpoints(&[lab.pod("near")])
        };
        (1..=count).map(service).collect()
    };
    let arguments = ["--metrics-addr", "0.0.0.0:15020"];
    let cluster = Cluster::start_with(services, &arguments)?;
    let node = cluster.lab.node("node2");
    let outside = cluster.lab.external("ext");
    for (host, key) in [(node, "ipv4/tcp_wmem"), (outside, "ipv4/tcp_rmem")] {
        host.sysctl(key, "4096 4096 4096")?;
    }
    // As Prometheus does: afterwards the agent has allocated the memory of one rendering.
    let (_, text) = http(node, "http://127.0.0.1:15020/metrics")?;
    let rendering = text.len() as u64 >> 10;
    let before = memory(&cluster.agent)?;
    let mut readers = outside
        .probe("keep")
        .args(["--count", &readers_wanted.to_string(), "--threads", "8"])
        .args(["--to", &format!("{}:15020", node.ipv4())])
        .args(["--say", "GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n"])
        .stdin_piped()
        .stdout_piped()
        .spawn()?;
    readers.wait_for_line()?;
    let (mut most, mut connections) = (before, 0);
    for _ in 0..25 {
        most = most.max(memory(&cluster.agent)?);
        connections = connections.max(accepted(node, cluster.agent.id(), 15020)?);
        thread::sleep(Duration::from_millis(200));
    }
    let more = most - before;
    println!(
        "{count} services, {readers_wanted} slow readers: a rendering of {rendering} KiB, {before} KiB before, at most \
         {more} KiB more, {connections} connections"
    );
    // One more is accepted, and waits for a place.
    ensure!(
        (CONNECTIONS..=CONNECTIONS + 1).contains(&connections),
        "{connections} connections"
    );
    // Renderings are shared, and each connection has some buffers of its own.
    let bound = HELD * rendering + CONNECTIONS * 64;
    ensure!(
        more < bound,
        "{more} KiB more, and {bound} KiB are the bound"
    );
    reaches(
        cluster.client(),
        "10.96.0.1:80",
        "connect --count 3",
        &["near"],
    )?;
    Metrics::scrape(node)?;
    drop(readers);
    Metrics::scrape(node)?;
    Ok(())
}
