//! Readers of the metrics that ask and do not read.

use std::{fs, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Agent, Lab, emulated};

use crate::{
    cluster::{Cluster, TCP, reaches},
    manifest::Service,
    metrics::Metrics,
};

scenarios! {
    Dataplane:
    many_slow_readers_of_the_metrics_cost_a_bounded_amount_of_memory,
}

/// Resident memory that no file backs, in KiB.
fn memory(agent: &Agent) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", agent.id()))?;
    let mut lines = status.lines();
    let line = lines.find_map(|line| line.strip_prefix("RssAnon:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number.context("RssAnon")?.parse()?)
}

/// From outside, while the node serves many services. The kubelet and Prometheus still get
/// answers once the agent has cut the readers off, and services are served meanwhile.
fn many_slow_readers_of_the_metrics_cost_a_bounded_amount_of_memory() -> Result<()> {
    /// The text of 10 000 services four times, and what sockets and the allocator keep, in KiB.
    const MOST: u64 = 64 << 10;
    // The agent cuts off a few readers at a time, so 400 take two minutes: that many on demand.
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
    let most_more = MOST * u64::from(count.max(5_000)) / 10_000;
    let services = |lab: &Lab| {
        let service = |n: u32| {
            let [_, a, b, c] = n.to_be_bytes();
            let vip = format!("10.{}.{b}.{c}", 96 + a);
            let service = Service::new(&format!("s{n}"), &[&vip]);
            service.port("tcp", 80, TCP).endpoints(&[lab.pod("near")])
        };
        (1..=count).map(service).collect()
    };
    let arguments = ["--metrics-addr", "0.0.0.0:15020", "--metrics-auth", "none"];
    let cluster = Cluster::start_with(services, &arguments)?;
    let node = cluster.lab.node("node2");
    // As Prometheus does: what one rendering needs, the agent has had.
    Metrics::scrape(node)?;
    let before = memory(&cluster.agent)?;
    let outside = cluster.lab.external("ext");
    let mut readers = outside
        .probe("keep")
        .args(["--count", &readers_wanted.to_string(), "--threads", "8"])
        .args(["--to", &format!("{}:15020", node.ipv4())])
        .args(["--say", "GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n"])
        .stdin_piped()
        .stdout_piped()
        .spawn()?;
    readers.wait_for_line()?;
    let mut most = before;
    for _ in 0..50 {
        most = most.max(memory(&cluster.agent)?);
        thread::sleep(Duration::from_millis(100));
    }
    println!(
        "{count} services, {readers_wanted} slow readers: {before} KiB before, at most {most} KiB"
    );
    ensure!(
        most < before + most_more,
        "{before} KiB before, {most} KiB with the readers"
    );
    reaches(
        cluster.client(),
        "10.96.0.1:80",
        "connect --count 3",
        &["near"],
    )?;
    drop(readers);
    Metrics::scrape(node)?;
    Ok(())
}
