//! A DaemonSet with a `kernel.cgroup` that contains no pods: status warns, and the correction breaks no connection.

use std::{thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::{
    load::{Load, OpenConnections},
    pods::{From, LONG, SHORT, Space, at},
};
use crate::cluster::{
    Cluster,
    agent::{self, Wanted},
    kubectl::eventually,
    node,
    place::SYSTEM,
};

const CONNECT: &str = "connect --count 40 --timeout-ms 2000";
/// Time limit for a look at the pods. The agent looks every minute.
const LOOK: Duration = Duration::from_secs(80);
/// Few local ports, so that packets have carried connections from all of them before the agent captures at the sockets.
/// Then an endpoint may see two connections from one port.
const PORTS: &str = "net.ipv4.ip_local_port_range=40000 40999";
const KEPT: u64 = 200;
/// How long clients continue after the correction. Before this was fixed, connections failed for 45 s.
const AFTER: Duration = Duration::from_mins(1);

pub fn corrected(cluster: &Cluster) -> Result<String> {
    let outcome = named_and_corrected(cluster);
    agent::deploy(cluster, &Wanted::default())?;
    outcome
}

fn named_and_corrected(cluster: &Cluster) -> Result<String> {
    let node = cluster.nodes[0];
    // This cgroup contains the node's own processes, but no pods.
    let wrong = format!("/host{}/{SYSTEM}", node::unified_mount()?);
    let wanted = Wanted {
        config: json!({ "kernel": { "cgroup": wrong } }),
        ..Wanted::default()
    };
    agent::deploy(cluster, &wanted)?;
    let space = Space::new(cluster, "cgroup", &json!({}))?;
    space.servers("web", 2, None)?;
    space.service("web", "web", &json!({}))?;
    let to = at(&space.cluster_ips("web")?[0], 80);
    let web = space.pods("web")?;
    space.client("client", node)?.sysctl(PORTS)?;
    let client = From::Container(space.name.clone(), "client".into());
    eventually(SHORT, || client.reaches(cluster, CONNECT, &to, &web))?;

    // Status has a warning, and the alert's metric counts the pods.
    let outside = || -> Result<f64> {
        let metrics = agent::metrics(node)?;
        Ok(agent::sum(&metrics, "dataplane_pods_outside_cgroup", None))
    };
    let warning = format!("warning: kernel.cgroup is {wrong}, and ");
    let example = format!("for example /host{}/kubepods/", node::unified_mount()?);
    eventually(LOOK, || {
        let healthy = agent::says(cluster, node, &[&warning, &example, "DATAPLANE_CGROUP"])?;
        ensure!(healthy, "a wrong cgroup is a warning");
        Ok(())
    })?;
    let count = outside()?;
    ensure!(count >= 1.0, "dataplane_pods_outside_cgroup is {count}");

    // Correct it while clients connect all the time.
    let mut kept = OpenConnections::start(cluster, &client, &to, KEPT)?;
    let load = Load::start(cluster, &client, &to)?;
    thread::sleep(Duration::from_secs(5));
    agent::deploy(cluster, &Wanted::default())?;
    thread::sleep(AFTER);
    let answered = load.none_failed()?;
    kept.all_alive()?;
    client.reaches(cluster, CONNECT, &to, &web)?;
    eventually(LOOK, || {
        let (healthy, text) = agent::status(cluster, node)?;
        ensure!(
            healthy && !text.contains("kernel.cgroup is "),
            "after the correction: {text}"
        );
        let count = outside()?;
        ensure!(count == 0.0, "dataplane_pods_outside_cgroup is {count}");
        Ok(())
    })?;
    drop(kept);

    let error = with_a_mesh(cluster, &wrong)?;
    Ok(format!(
        "a warning that names {count} of n1's pods; corrected: none of {answered} connections failed, {KEPT} kept ones live on; \
         with a mesh an error: {error}"
    ))
}

/// With a mesh, the agent's own sockets must also be in the cgroup: otherwise its proxy does not learn the original
/// destinations of connections. Returns the error in status.
fn with_a_mesh(cluster: &Cluster, wrong: &str) -> Result<String> {
    let node = cluster.nodes[0];
    let labels = json!({ "istio.io/dataplane-mode": "ambient" });
    let space = Space::new(cluster, "cgroup-mesh", &labels)?;
    space.client("client", node)?;
    agent::apply(
        cluster,
        &Wanted {
            config: json!({ "kernel": { "cgroup": wrong }, "mesh": { "rules": { "mode": "proxy" } } }),
            ..Wanted::default()
        },
    )?;
    let said = eventually(LONG, || {
        let error = "error: mesh: the agent's sockets are in the cgroup /host";
        let outside = format!("which is outside of kernel.cgroup, {wrong}: ");
        let healthy = agent::says(cluster, node, &[error, &outside, "DATAPLANE_CGROUP"])?;
        ensure!(!healthy, "an agent outside of its cgroup is an error");
        let (_, text) = agent::status(cluster, node)?;
        let line = text.lines().find(|line| line.contains(error));
        let line = line.context("the error")?.trim();
        Ok(line.trim_start_matches("error: ").to_owned())
    })?;
    let (start, _) = said.split_once(": the proxy").unwrap_or((&said, ""));
    Ok(start.to_owned())
}
