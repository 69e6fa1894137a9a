//! kube-proxy: as a process of a node, to compare with, and as a DaemonSet like kubeadm's, to
//! migrate from.

use std::{fs, process::Child};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::{
    Cluster, identity,
    images::{self, Image},
    node,
    place::{self, Node, POD_RANGES},
};
use crate::command::on_path;

/// The program's name.
pub const PROGRAM: &str = "kube-proxy";
/// The image of the DaemonSet.
const IMAGE: &str = "dataplane.test/kube-proxy:1";

/// Returns kube-proxy's configuration.
fn config(mode: &str) -> Value {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": mode,
        "clientConnection": { "kubeconfig": identity::file("proxy.conf") },
        "clusterCIDR": POD_RANGES.join(","),
        "detectLocalMode": "ClusterCIDR",
        "bindAddress": "0.0.0.0",
        // These values leave limits of the whole machine unchanged.
        "conntrack": { "maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "1h" },
    })
}

/// kube-proxy on a node. It ends with the node.
pub struct Process(Child);

impl Process {
    pub fn start(cluster: &Cluster, node: Node, mode: &str) -> Result<Self> {
        let file = node.directory().join("kube-proxy.yaml");
        fs::write(&file, config(mode).to_string())
            .context("cannot write kube-proxy's configuration")?;
        let mut command = node.command(cluster.programs.kubernetes(PROGRAM))?;
        command
            .arg(format!("--config={}", file.display()))
            .arg(format!("--hostname-override={}", node.name()));
        Ok(Self(node::spawn(node, &mut command, "kube-proxy.log")?))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // This kills only the program that entered the node. kube-proxy itself ends with the node.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Deploys kube-proxy on every node, in nftables mode, and waits until it is ready.
pub fn deploy(cluster: &Cluster) -> Result<()> {
    let place = images::directory();
    let mut image = Image::new_in(&place, PROGRAM)?;
    image.program(
        &cluster.programs.kubernetes(PROGRAM),
        "usr/local/bin/kube-proxy",
    )?;
    for name in ["nft", "conntrack"] {
        let program = on_path(name).with_context(|| format!("there is no {name}"))?;
        image.program(&program, &format!("usr/sbin/{name}"))?;
    }
    image.directory("tmp")?;
    image.entrypoint = vec!["/usr/local/bin/kube-proxy".into()];
    image.names = vec![IMAGE.into()];
    image.pack()?;
    for node in &cluster.nodes {
        node::import(*node, &place.join(format!("{PROGRAM}.tar")))?;
    }
    let file = identity::file("kube-proxy.yaml");
    fs::write(&file, config("nftables").to_string())
        .with_context(|| format!("cannot write {}", file.display()))?;
    let labels = json!({ "k8s-app": PROGRAM });
    let directory = place::control_directory();
    cluster.kubectl.apply(&json!({
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": { "name": PROGRAM, "namespace": "kube-system" },
        "spec": {
            "selector": { "matchLabels": labels },
            "template": { "metadata": { "labels": labels }, "spec": {
                "hostNetwork": true,
                "priorityClassName": "system-node-critical",
                "tolerations": [{ "operator": "Exists" }],
                "containers": [{
                    "name": PROGRAM,
                    "image": IMAGE,
                    "command": ["/usr/local/bin/kube-proxy"],
                    "args": [
                        format!("--config={}", file.display()),
                        "--hostname-override=$(NODE_NAME)",
                    ],
                    "env": [{ "name": "NODE_NAME", "valueFrom": { "fieldRef": { "fieldPath": "spec.nodeName" } } }],
                    "securityContext": { "privileged": true },
                    "readinessProbe": { "httpGet": { "host": "127.0.0.1", "path": "/healthz", "port": 10256 }, "periodSeconds": 1 },
                    "volumeMounts": [{ "name": "identity", "mountPath": directory, "readOnly": true }],
                }],
                "volumes": [{ "name": "identity", "hostPath": { "path": directory } }],
            } },
        },
    }))?;
    rolled_out(cluster)
}

/// Waits until kube-proxy is ready on every node that runs it.
pub fn rolled_out(cluster: &Cluster) -> Result<()> {
    let wait = ["rollout", "status", "daemonset/kube-proxy"];
    let wait = [&["-n", "kube-system"], &wait[..], &["--timeout=120s"]].concat();
    cluster.kubectl.run(&wait).map(drop)
}

/// Removes the DaemonSet, and kube-proxy's rules from every node.
pub fn remove(cluster: &Cluster) -> Result<()> {
    let delete = ["delete", "--ignore-not-found", "daemonset/kube-proxy"];
    cluster
        .kubectl
        .run(&[&["-n", "kube-system"], &delete[..]].concat())?;
    for node in &cluster.nodes {
        for family in ["ip", "ip6"] {
            let mut nft = node.command("nft")?;
            // `nft` fails if the table does not exist.
            nft.args(["delete", "table", family, PROGRAM])
                .output()
                .context("cannot start nft")?;
        }
    }
    Ok(())
}
