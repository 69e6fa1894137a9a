//! The pods of a measured cluster: few captured workloads on the agent's node, or many pods on other nodes.

use std::net::IpAddr;

use dataplane_tests::api::{Churn, Cluster, objects};
use serde_json::json;

/// Number of captured workloads on the agent's node.
pub const WORKLOADS: u8 = 30;
/// The server that the workloads connect to, on the same node: its name and address.
pub const SERVER: (&str, &str) = ("server", "10.244.1.254");
/// Number of pods at the API server. The agent knows all of them.
pub const PODS: u32 = 20_000;

/// Returns the names and addresses of the workloads.
pub fn workloads() -> impl Iterator<Item = (String, String)> {
    (1..=WORKLOADS).map(|n| (format!("pod{n}"), format!("10.244.1.{}", n + 1)))
}

/// Makes the captured workloads' objects.
///
/// # Errors
///
/// Does not fail: all addresses are valid.
pub fn make_captured(cluster: &Cluster, node: &str) -> anyhow::Result<()> {
    for (name, address) in workloads() {
        let address: IpAddr = address.parse()?;
        let mut pod = objects::pod(&name, node, &[address]);
        pod["metadata"]["labels"]["istio.io/dataplane-mode"] = json!("ambient");
        cluster.apply(pod);
    }
    Ok(())
}

/// Makes many pods. None of them is on the agent's node.
pub fn make_many(cluster: &Cluster) {
    cluster.apply_all((0..PODS).map(|number| pod(number, 0)));
}

/// Returns one of many pods, after this many changes.
pub fn pod(number: u32, turn: u32) -> serde_json::Value {
    let name = format!("pod-{number:05}");
    let mut pod = objects::pod(&name, "elsewhere", &[Churn::pod(number)]);
    // Change the fields that change most often: a condition, or a label that a controller writes.
    pod["metadata"]["annotations"] = json!({ "turn": turn.to_string() });
    pod["metadata"]["labels"]["version"] = json!(format!("v{}", turn % 3));
    pod
}
