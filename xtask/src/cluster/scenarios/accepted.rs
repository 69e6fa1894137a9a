//! Checks everything in `deploy/` with the API server: it must know every field and accept every value.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::cluster::{
    Cluster, Definitions,
    agent::{self, Wanted},
};

/// The Prometheus Operator's kinds.
const MONITORING: [&str; 2] = [
    "podmonitors.monitoring.coreos.com",
    "prometheusrules.monitoring.coreos.com",
];

/// With these options the API server checks everything and stores nothing.
const TRY: [&str; 8] = [
    "apply",
    "--server-side",
    "--force-conflicts",
    "--dry-run=server",
    "--validate=strict",
    "--output=json",
    "-f",
    "-",
];

pub fn objects(cluster: &Cluster) -> Result<String> {
    let Some(definitions) = Definitions::install(cluster, &MONITORING)? else {
        let counts = tried(cluster, false)?;
        return Ok(format!(
            "{counts}; without PodMonitor and PrometheusRule: $KUBERNETES_BIN/crds does not define them"
        ));
    };
    let outcome = tried(cluster, true);
    definitions.remove(cluster)?;
    Ok(format!(
        "{}, PodMonitor and PrometheusRule among them",
        outcome?
    ))
}

fn tried(cluster: &Cluster, monitoring: bool) -> Result<String> {
    // The chart and an overlay render more for these two sections.
    let config = json!({
        "mesh": { "rules": { "mode": "proxy" } },
        "kernel": { "conntrack": { "tcpCloseWaitTimeout": "1h" } },
    });
    let mut components = vec!["selinux", "foreign-proxy"];
    components.extend(monitoring.then_some("monitoring"));
    let wanted = Wanted {
        config,
        surge: true,
        components,
        ..Wanted::default()
    };
    let kustomized = accepted(cluster, &agent::kustomize(cluster, &wanted)?)?;
    let daemon_set = find(&kustomized, "DaemonSet")?;
    is_for_selinux_and_a_foreign_proxy(daemon_set)?;

    let term = json!({ "matchExpressions": [{ "key": "dataplane", "operator": "In", "values": ["only"] }] });
    let required = json!({ "nodeSelectorTerms": [term] });
    let affinity =
        json!({ "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": required } });
    // The name of a node may have 253 characters, the name of a Job 63.
    let long = format!("{}.example", "n".repeat(60));
    let values = json!({
        "affinity": affinity,
        "seLinuxOptions": { "type": "spc_t" },
        "foreignProxy": true,
        "terminationGracePeriodSeconds": 20,
        "cleanup": { "nodes": ["n1", long] },
        "monitoring": { "enabled": monitoring, "labels": { "release": "prometheus" }, "runbooks": "https://example.org/alerts" },
    });
    let charted = accepted(cluster, &agent::chart(&wanted, &values)?)?;
    let daemon_set = find(&charted, "DaemonSet")?;
    is_for_selinux_and_a_foreign_proxy(daemon_set)?;
    let template = &daemon_set["spec"]["template"];
    ensure!(
        template["spec"]["affinity"] == affinity,
        "the chart's affinity: {template}"
    );
    ensure!(
        template["spec"]["terminationGracePeriodSeconds"] == 20,
        "the chart's grace period: {template}"
    );
    let annotations = template["metadata"]["annotations"].to_string();
    ensure!(
        annotations.contains("checksum"),
        "the chart's pods have no checksum of the configuration: {annotations}"
    );
    let jobs = charted.iter().filter(|object| object["kind"] == "Job");
    let nodes: Vec<&Value> = jobs
        .map(|job| &job["spec"]["template"]["spec"]["nodeName"])
        .collect();
    ensure!(
        nodes.len() == 2 && nodes.contains(&&json!(long)),
        "clean-up on {nodes:?}"
    );
    Ok(format!(
        "{} objects of kustomize and {} of the chart taken as they are",
        kustomized.len(),
        charted.len()
    ))
}

/// Has the API server check these objects. Returns the objects as the server would store them.
pub(super) fn accepted(cluster: &Cluster, text: &str) -> Result<Vec<Value>> {
    let answer = cluster.kubectl.feed(&TRY, text)?;
    let answer: Value = serde_json::from_str(&answer).context("kubectl printed no JSON")?;
    // For a single object, kubectl prints no list.
    Ok(match answer["items"].as_array() {
        Some(items) => items.clone(),
        None => vec![answer],
    })
}

fn find<'a>(objects: &'a [Value], kind: &str) -> Result<&'a Value> {
    let mut all = objects.iter();
    all.find(|object| object["kind"] == kind)
        .with_context(|| format!("no {kind}"))
}

fn is_for_selinux_and_a_foreign_proxy(daemon_set: &Value) -> Result<()> {
    let pod = &daemon_set["spec"]["template"]["spec"];
    let security = &pod["containers"][0]["securityContext"];
    ensure!(
        security["seLinuxOptions"]["type"] == "spc_t",
        "seLinuxOptions: {security}"
    );
    let added = security["capabilities"]["add"].to_string();
    ensure!(
        pod["hostPID"] == true && added.contains("SYS_PTRACE"),
        "a foreign proxy: {pod}"
    );
    Ok(())
}
