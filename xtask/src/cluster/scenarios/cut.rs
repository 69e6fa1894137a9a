//! Connections to the API server that are silently cut: measures the time until changes arrive again.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::json;

use super::{
    load::Load,
    pods::{From, SHORT, Space, at},
};
use crate::cluster::{Cluster, agent, kubectl::eventually, network};

const CONNECT: &str = "connect --count 20 --timeout-ms 2000";
/// Time limit. With keepalive the kernel notices after some 15 s; without it the agent would wait for 150 s of silence.
const NOTICED: Duration = Duration::from_secs(30);
const API_PORT: u16 = 6443;

pub fn silently(cluster: &Cluster) -> Result<String> {
    agent::deploy(cluster, &agent::Wanted::default())?;
    let node = cluster.nodes[0];
    let space = Space::new(cluster, "cut", &json!({}))?;
    // On the other node, whose kubelet's connection is not cut.
    space.servers("web", 2, Some(cluster.nodes[1]))?;
    space.service("web", "web", &json!({}))?;
    let web = space.pods("web")?;
    let to = at(&space.cluster_ips("web")?[0], 80);
    let from = From::Node(node);
    eventually(SHORT, || from.reaches(cluster, CONNECT, &to, &web))?;
    let load = Load::start(cluster, &from, &to)?;

    let cut = network::forget_connections(node, API_PORT)?;
    let outcome = until_served(cluster, &space, &from);
    network::remember_connections()?;
    let took = outcome?;
    ensure!(
        took < NOTICED,
        "a change took {} ms to be served after the connections were cut",
        took.as_millis()
    );
    let answered = load.none_failed()?;
    eventually(SHORT, || agent::healthy(cluster, node))?;
    ensure!(cut > 0, "the node had no connection to the API server");
    Ok(format!(
        "{cut} connections of the node's cut without a word: a service made then was served {} ms later; none of \
         {answered} connections failed",
        took.as_millis()
    ))
}

/// Returns how long a new service takes to be served.
fn until_served(cluster: &Cluster, space: &Space<'_>, from: &From) -> Result<Duration> {
    let start = Instant::now();
    space.service("late", "web", &json!({}))?;
    let to = at(&space.cluster_ips("late")?[0], 80);
    let web = space.pods("web")?;
    let once = "connect --count 4 --timeout-ms 300";
    eventually(Duration::from_mins(4), || {
        let report = from.ask(cluster, once, &to)?;
        let whom: Vec<&String> = report.endpoints.keys().collect();
        ensure!(
            report.answered == report.attempts && whom.iter().all(|name| web.contains(*name)),
            "{to}: {} answered, {:?}",
            report.answered,
            report.errors
        );
        Ok(())
    })?;
    Ok(start.elapsed())
}
