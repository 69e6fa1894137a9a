//! The dataplane in the cluster: as the DaemonSet of the kustomize base or of the chart, as shipped, or as a process of
//! a node.

use std::{
    fs,
    process::{Child, Command},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use dataplane_tests::{
    chart,
    openmetrics::{self, Sample},
};
use jiff::Timestamp;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::{
    Cluster, identity, images,
    kubectl::eventually,
    node,
    place::{self, Node, POD_RANGES},
};
use crate::{
    command::{check, on_path, output},
    workspace,
};

/// Name of the DaemonSet.
const DAEMON_SET: &str = "daemonset/dataplane";
/// Time limit for a rollout over all nodes.
const ROLLOUT: &str = "--timeout=240s";

/// The variant to deploy.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// The image's tag.
    pub tag: &'static str,
    /// Configuration besides the settings that every cluster here needs.
    pub config: Value,
    /// Whether agents take over from each other (component `surge`).
    pub surge: bool,
    /// Whether the configuration contains the API server's own address, which the clusters here need.
    pub api_server: bool,
    /// More components of the overlay.
    pub components: Vec<&'static str>,
    /// More patches of the overlay.
    pub patches: Vec<Value>,
}

impl Default for Wanted {
    fn default() -> Self {
        Self {
            tag: images::TAGS[0],
            config: json!({}),
            surge: false,
            api_server: true,
            components: Vec::new(),
            patches: Vec::new(),
        }
    }
}

impl Wanted {
    fn mesh(&self) -> bool {
        self.config.get("mesh").is_some()
    }

    /// Returns the configuration file.
    fn configuration(&self) -> Result<Value> {
        let source = if self.api_server {
            json!({ "apiServer": place::api_server() })
        } else {
            json!({})
        };
        let mut config = json!({
            "source": { "kubernetes": source },
            "packets": { "podCidrs": POD_RANGES },
            "kernel": {
                "bpffs": "/host/sys/fs/bpf/dataplane",
                "cgroup": format!("/host{}", node::unified_mount()?),
            },
            "listen": { "health": "127.0.0.1:15021" },
        });
        for (key, value) in self.config.as_object().context("a configuration")? {
            match (config[key].as_object_mut(), value.as_object()) {
                (Some(known), Some(more)) => known.extend(more.clone()),
                _ => config[key] = value.clone(),
            }
        }
        Ok(config)
    }
}

/// Returns the base and the components in `deploy/kustomize`, combined as in an operator's overlay.
pub fn kustomize(cluster: &Cluster, wanted: &Wanted) -> Result<String> {
    let overlay = place::directory().join("overlay");
    if overlay.exists() {
        fs::remove_dir_all(&overlay).context("cannot remove the overlay")?;
    }
    fs::create_dir_all(&overlay).context("cannot create the overlay")?;
    check(
        Command::new("cp")
            .arg("--recursive")
            .arg(workspace::root().join("deploy/kustomize"))
            .arg(&overlay),
    )?;
    let mut components = wanted.components.clone();
    if wanted.mesh() {
        components.push("mesh");
    }
    if wanted.surge {
        components.push("surge");
    }
    let components: Vec<String> = components
        .iter()
        .map(|name| format!("kustomize/{name}"))
        .collect();
    let config = json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": { "name": "dataplane", "namespace": "kube-system" },
        "data": { "config.yaml": wanted.configuration()?.to_string() },
    });
    let mut patches = vec![json!({ "patch": config.to_string() })];
    patches.extend(wanted.patches.iter().cloned());
    let kustomization = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["kustomize/base"],
        "components": components,
        "images": [{ "name": "dataplane", "newName": images::DATAPLANE, "newTag": wanted.tag }],
        "patches": patches,
    });
    fs::write(
        overlay.join("kustomization.yaml"),
        kustomization.to_string(),
    )
    .context("cannot write the overlay")?;
    output(cluster.kubectl.command().arg("kustomize").arg(&overlay))
}

/// Returns the chart, rendered by Helm, or by the tests' engine if there is no Helm. `more` contains other values.
pub fn chart(wanted: &Wanted, more: &Value) -> Result<String> {
    let mut values = json!({
        "image": { "repository": images::DATAPLANE, "tag": wanted.tag },
        "config": wanted.configuration()?,
        "surge": wanted.surge,
    });
    for (key, value) in more.as_object().context("values")? {
        values[key] = value.clone();
    }
    if let Some(helm) = on_path("helm") {
        let file = place::directory().join("values.json");
        fs::write(&file, values.to_string()).context("cannot write the chart's values")?;
        return output(
            Command::new(helm)
                .args([
                    "template",
                    "dataplane",
                    "--namespace=kube-system",
                    "--values",
                ])
                .arg(file)
                .arg(workspace::root().join("deploy/helm/dataplane")),
        );
    }
    let documents =
        chart::render("kube-system", &values).map_err(|error| anyhow!("the chart: {error}"))?;
    Ok(documents.join("\n---\n"))
}

/// Deploys the base and waits until all pods are ready.
pub fn deploy(cluster: &Cluster, wanted: &Wanted) -> Result<()> {
    apply(cluster, wanted)?;
    wait(cluster)
}

/// Deploys the base, without waiting.
pub fn apply(cluster: &Cluster, wanted: &Wanted) -> Result<()> {
    let text = kustomize(cluster, wanted)?;
    let before = cluster
        .kubectl
        .get(&["-n", "kube-system", "configmap", "dataplane"]);
    cluster.kubectl.apply_text(&text)?;
    let after = cluster
        .kubectl
        .get(&["-n", "kube-system", "configmap", "dataplane"])?;
    // Restart the agents, as an operator does: agents read their configuration when they start.
    if before.is_ok_and(|before| before["data"] != after["data"]) {
        cluster
            .kubectl
            .run(&["-n", "kube-system", "rollout", "restart", DAEMON_SET])?;
    }
    Ok(())
}

/// Waits until the DaemonSet is rolled out, and every node's agent is healthy.
pub fn wait(cluster: &Cluster) -> Result<()> {
    cluster.kubectl.run(&[
        "-n",
        "kube-system",
        "rollout",
        "status",
        DAEMON_SET,
        ROLLOUT,
    ])?;
    for node in &cluster.nodes {
        eventually(Duration::from_secs(20), || healthy(cluster, *node))?;
    }
    Ok(())
}

/// Fails if `dataplane status` on the node does not report a healthy node.
pub fn healthy(cluster: &Cluster, node: Node) -> Result<()> {
    output(node.command(&cluster.dataplane)?.arg("status"))
        .with_context(|| format!("node {}", node.name()))?;
    Ok(())
}

/// Returns the output of `dataplane status` on the node, and whether it reports a healthy node.
pub fn status(cluster: &Cluster, node: Node) -> Result<(bool, String)> {
    let said = node.command(&cluster.dataplane)?.arg("status").output()?;
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    Ok((said.status.success(), text))
}

/// Fails if the output of `dataplane status` on the node lacks one of these words. Returns whether it reports a healthy
/// node.
pub fn says(cluster: &Cluster, node: Node, words: &[&str]) -> Result<bool> {
    let (healthy, text) = status(cluster, node)?;
    for word in words {
        ensure!(
            text.contains(word),
            "node {}: status does not say {word:?}: {text}",
            node.name()
        );
    }
    Ok(healthy)
}

/// Removes all objects of the base, and everything that the agents left on the nodes.
pub fn remove(cluster: &Cluster) -> Result<()> {
    remove_daemon_set(cluster)?;
    for what in ["configmap/dataplane", "serviceaccount/dataplane"] {
        cluster
            .kubectl
            .run(&["-n", "kube-system", "delete", "--ignore-not-found", what])?;
    }
    for name in ["dataplane", "dataplane-mesh"] {
        let both = "clusterrole,clusterrolebinding";
        cluster
            .kubectl
            .run(&["delete", "--ignore-not-found", both, name])?;
    }
    for node in &cluster.nodes {
        cleanup(cluster, *node)?;
    }
    Ok(())
}

/// Removes the DaemonSet. The programs and tables of its agents stay on the nodes and continue to serve.
pub fn remove_daemon_set(cluster: &Cluster) -> Result<()> {
    cluster.kubectl.run(&[
        "-n",
        "kube-system",
        "delete",
        "--ignore-not-found",
        DAEMON_SET,
    ])?;
    eventually(Duration::from_mins(1), || {
        let pods = pods(cluster)?;
        ensure!(
            pods.is_empty(),
            "{} of the agent's pods are still there",
            pods.len()
        );
        Ok(())
    })
}

/// Runs `dataplane cleanup` on the node.
pub fn cleanup(cluster: &Cluster, node: Node) -> Result<()> {
    let mut cleanup = node.command(&cluster.dataplane)?;
    cleanup
        .arg("cleanup")
        .arg("--cgroup")
        .arg(node::unified_mount()?);
    output(&mut cleanup).map(drop)
}

/// Returns the DaemonSet's pods.
pub fn pods(cluster: &Cluster) -> Result<Vec<Value>> {
    let label = "app.kubernetes.io/name=dataplane";
    cluster
        .kubectl
        .list(&["-n", "kube-system", "pods", "-l", label])
}

/// Returns the name of the DaemonSet's newest pod on a node.
pub fn pod(cluster: &Cluster, node: Node) -> Result<String> {
    let mut pods = pods(cluster)?;
    pods.retain(|pod| {
        pod["spec"]["nodeName"] == node.name() && pod["metadata"]["deletionTimestamp"].is_null()
    });
    pods.sort_by_key(|pod| pod["metadata"]["creationTimestamp"].to_string());
    let newest = pods.pop();
    let newest = newest.with_context(|| format!("node {} has no agent's pod", node.name()))?;
    let name = newest["metadata"]["name"].as_str();
    Ok(name.context("a name")?.to_owned())
}

/// Returns the log of the agent on a node since this time. Each line has the container runtime's time.
pub fn log(cluster: &Cluster, node: Node, since: Timestamp) -> Result<String> {
    let (pod, since) = (pod(cluster, node)?, format!("--since-time={since}"));
    cluster
        .kubectl
        .run(&["-n", "kube-system", "logs", "--timestamps", &since, &pod])
}

/// Runs `dataplane` in the agent's pod on a node, as an operator does.
pub fn exec(cluster: &Cluster, node: Node, words: &str) -> Result<String> {
    let pod = pod(cluster, node)?;
    let mut kubectl = cluster.kubectl.command();
    kubectl
        .args(["-n", "kube-system", "exec", &pod, "--", "dataplane"])
        .args(words.split(' '));
    output(&mut kubectl)
}

/// An agent that is a process of the node. It is stopped when this value is dropped.
pub struct Process {
    child: Child,
    node: Node,
}

impl Process {
    /// Starts an agent with this kubeconfig and this configuration, and waits until it is healthy.
    pub fn start(
        cluster: &Cluster,
        node: Node,
        kubeconfig: &std::path::Path,
        config: &Value,
    ) -> Result<Self> {
        let file = node.directory().join("agent.yaml");
        fs::write(&file, config.to_string()).context("cannot write the agent's configuration")?;
        let mut command = node.command(&cluster.dataplane)?;
        command
            .arg("run")
            .arg("--config")
            .arg(&file)
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .args(["--node-name", &node.name()])
            .args(["--pod-cidr", &POD_RANGES.join(",")])
            .args(["--cgroup", node::unified_mount()?]);
        let child = node::spawn(node, &mut command, "agent.log")?;
        let agent = Self { child, node };
        eventually(Duration::from_secs(30), || healthy(cluster, node))?;
        Ok(agent)
    }

    /// Kills the agent, as a crash does.
    pub fn kill(mut self) -> Result<()> {
        node::end(&mut self.child, Signal::SIGKILL)
    }

    /// Stops the agent in order.
    pub fn stop(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        node::end(&mut self.child, Signal::SIGTERM)
            .with_context(|| format!("the agent on {}", self.node.name()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            anstream::eprintln!("{error:#}");
        }
    }
}

/// Returns the agent's metrics on a node, read there as root.
pub fn metrics(node: Node) -> Result<Vec<Sample>> {
    let mut ask = node.command("curl")?;
    ask.args([
        "-fsS",
        "--max-time",
        "20",
        "--unix-socket",
        "/run/dataplane/agent.sock",
    ]);
    let text = output(ask.arg("http://agent/metrics"))?;
    openmetrics::parse(&text).map_err(|error| anyhow!("metrics of {}: {error}", node.name()))
}

/// Returns the sum of a metric's series that have this label value.
pub fn sum(samples: &[Sample], name: &str, label: Option<(&str, &str)>) -> f64 {
    let of = samples.iter().filter(|sample| {
        sample.name == name
            && label.is_none_or(|(key, value)| sample.labels.get(key).is_some_and(|is| is == value))
    });
    of.map(|sample| sample.value).sum()
}

/// Returns the lines about the agent in the API server's audit log.
pub fn audited() -> Result<Vec<Value>> {
    let path = identity::file(super::control::AUDIT_LOG);
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    text.lines()
        .map(|line| serde_json::from_str(line).context("a line of the audit log"))
        .collect()
}
