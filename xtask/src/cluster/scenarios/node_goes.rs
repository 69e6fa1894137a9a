//! A node's own Node object is tainted by the cluster autoscaler, then deleted, then back.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use super::{
    load::Load,
    pods::{From, LONG, SHORT, Space, at},
};
use crate::cluster::{
    Cluster, agent,
    kubectl::eventually,
    network,
    place::{CONTROL, Node},
};

const CONNECT: &str = "connect --count 20 --timeout-ms 2000";
const TAINT: &str = "ToBeDeletedByClusterAutoscaler";

pub fn tainted_and_deleted(cluster: &Cluster) -> Result<String> {
    agent::deploy(cluster, &agent::Wanted::default())?;
    let (stays, goes) = (cluster.nodes[0], cluster.nodes[1]);
    let space = Space::new(cluster, "node", &json!({}))?;
    // The servers are on the other node: without its Node object, pods of the first are no endpoints.
    space.servers("web", 2, Some(stays))?;
    space.service("web", "web", &json!({}))?;
    let to = at(&space.cluster_ips("web")?[0], 80);
    let web = space.pods("web")?;
    let from = From::Node(goes);
    eventually(SHORT, || from.reaches(cluster, CONNECT, &to, &web))?;
    let load = Load::start(cluster, &from, &to)?;
    fit(cluster, goes)?;

    let name = goes.name();
    let taint = |what: &str| cluster.kubectl.run(&["taint", "nodes", &name, what]);
    taint(&format!("{TAINT}=1:NoSchedule"))?;
    unfit(
        cluster,
        goes,
        "it has the taint ToBeDeletedByClusterAutoscaler",
    )?;
    taint(&format!("{TAINT}-"))?;
    fit(cluster, goes)?;

    cluster
        .kubectl
        .run(&["delete", "node", &name, "--wait=false"])?;
    unfit(cluster, goes, "the cluster has no Node of this name")?;
    // A kubelet makes its Node object when it starts.
    restart_kubelet(goes)?;
    eventually(LONG, || cluster.kubectl.get(&["node", &name]))?;
    fit(cluster, goes)?;

    let answered = load.none_failed()?;
    // While the Node object is missing, the controllers delete its pods.
    eventually(LONG, || agent::pod(cluster, goes))?;
    eventually(LONG, || agent::healthy(cluster, goes))?;
    Ok(format!(
        "tainted, then deleted: /healthz 503 and the same reason in status each time, /livez 200, and back; none of \
         {answered} connections failed"
    ))
}

/// Returns the answers of `/healthz` and `/livez` on a node.
fn health(node: Node) -> Result<(u16, Value, u16)> {
    let to = at(&node.ipv4().to_string(), 10256);
    let (healthz, body) = network::get(CONTROL, &to, "/healthz")?;
    let (livez, _) = network::get(CONTROL, &to, "/livez")?;
    let body = serde_json::from_str(&body).context("/healthz answers JSON")?;
    Ok((healthz, body, livez))
}

/// Checks that `/healthz` takes the node out of load balancers, and that `status` says so with this reason. Neither may
/// report that the agent is unhealthy.
fn unfit(cluster: &Cluster, node: Node, reason: &str) -> Result<()> {
    eventually(SHORT, || {
        let (healthz, body, livez) = health(node)?;
        ensure!(
            healthz == 503 && body["nodeEligible"] == false && body["healthy"] == true,
            "/healthz: {healthz} {body}"
        );
        ensure!(livez == 200, "/livez: {livez}");
        let start = format!("warning: Node {}: {reason}", node.name());
        let well = agent::says(cluster, node, &[&start, "so /healthz answers 503"])?;
        ensure!(well, "a Node that goes makes its agent ill");
        Ok(())
    })
}

/// Checks that `/healthz` and `status` report no problem.
fn fit(cluster: &Cluster, node: Node) -> Result<()> {
    eventually(SHORT, || {
        let (healthz, body, livez) = health(node)?;
        ensure!(
            healthz == 200 && body["nodeEligible"] == true && livez == 200,
            "/healthz: {healthz} {body}, /livez: {livez}"
        );
        let (well, text) = agent::status(cluster, node)?;
        ensure!(
            well && !text.contains("/healthz answers 503"),
            "status: {text}"
        );
        Ok(())
    })
}

/// Kills the node's kubelet. The node's first process starts a new one.
fn restart_kubelet(node: Node) -> Result<()> {
    let init = node.init()?;
    let children = fs::read_to_string(format!("/proc/{init}/task/{init}/children"))
        .context("the children of the node's first process")?;
    let is_kubelet = |pid: &&str| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "kubelet")
    };
    let kubelet = children.split_whitespace().find(is_kubelet);
    let pid: i32 = kubelet.context("the node has no kubelet")?.parse()?;
    kill(Pid::from_raw(pid), Signal::SIGKILL).context("cannot kill the kubelet")
}
