//! Common parts of scenarios: a namespace with servers and clients, and requests from pods, nodes and outside.

use std::{collections::BTreeSet, process::Command, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use dataplane_tests::report::Report;
use serde_json::{Value, json};

use crate::{
    cluster::{
        Cluster, images,
        kubectl::eventually,
        place::{CONTROL, Node, in_netns},
    },
    command::{check, output},
};

/// Ports of a server's pod.
pub const HTTP: u16 = 8080;
pub const TCP: u16 = 8081;
pub const UDP: u16 = 8082;
/// Time limit for objects and pods to reach their wanted state, on a busy machine.
pub const LONG: Duration = Duration::from_mins(2);
/// Time limit for a change to get from the API server to the kernel's tables.
pub const SHORT: Duration = Duration::from_secs(20);

/// A Kubernetes namespace. It is removed when this value is dropped.
pub struct Space<'a> {
    pub cluster: &'a Cluster,
    pub name: String,
}

/// The source of a request.
#[derive(Debug, Clone)]
pub enum From {
    /// The network namespace of a pod on this node, entered through one of the pod's processes.
    Pod(Node, u32),
    /// The network namespace of a pod on this node, without the node's cgroup. The node does not see the sockets, as it
    /// does not see those of a virtual machine.
    Machine(Node, u32),
    /// A container, including its cgroup: a pod by its namespace and name.
    Container(String, String),
    /// The node itself.
    Node(Node),
    /// A client outside of the cluster.
    Outside,
}

impl<'a> Space<'a> {
    /// Makes a namespace with these labels.
    pub fn new(cluster: &'a Cluster, name: &str, labels: &Value) -> Result<Self> {
        let name = format!("scenario-{name}");
        // Remove the namespace of an earlier run in this cluster.
        cluster
            .kubectl
            .run(&["delete", "namespace", "--ignore-not-found", &name])?;
        cluster.kubectl.apply(&json!({
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": { "name": name, "labels": labels },
        }))?;
        let space = Self { cluster, name };
        eventually(LONG, || {
            space.kubectl(&["get", "serviceaccount", "default"])
        })?;
        Ok(space)
    }

    /// Runs kubectl in this namespace.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        let namespace = ["-n", &self.name];
        self.cluster.kubectl.run(&[&namespace, arguments].concat())
    }

    /// Applies an object in this namespace.
    pub fn apply(&self, mut object: Value) -> Result<()> {
        object["metadata"]["namespace"] = self.name.as_str().into();
        self.cluster.kubectl.apply(&object)
    }

    /// Starts servers that answer with their pod's name, and waits until they are ready.
    pub fn servers(&self, name: &str, replicas: u8, on: Option<Node>) -> Result<()> {
        self.apply(servers(name, replicas, on))?;
        self.rolled_out(name)
    }

    pub fn rolled_out(&self, name: &str) -> Result<()> {
        let deployment = format!("deployment/{name}");
        self.kubectl(&["rollout", "status", &deployment, "--timeout=180s"])
            .map(drop)
    }

    /// Starts an idle pod, as a source of requests.
    pub fn client(&self, name: &str, node: Node) -> Result<From> {
        self.apply(json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": { "name": name },
            "spec": {
                "nodeName": node.name(),
                "terminationGracePeriodSeconds": 0,
                "containers": [{ "name": "sleep", "image": images::LAB }],
            },
        }))?;
        self.kubectl(&[
            "wait",
            "--for=condition=Ready",
            "--timeout=120s",
            &format!("pod/{name}"),
        ])?;
        self.inside(name)
    }

    /// Returns an existing pod as a source of requests.
    pub fn inside(&self, pod: &str) -> Result<From> {
        let pod = self.cluster.kubectl.get(&["-n", &self.name, "pod", pod])?;
        let node = Node::named(pod["spec"]["nodeName"].as_str().context("a node")?)?;
        let id = pod["status"]["containerStatuses"][0]["containerID"].as_str();
        let id = id
            .and_then(|id| id.strip_prefix("containerd://"))
            .context("a container's id")?;
        let tasks = output(
            node.command("ctr")?
                .args(["--namespace=k8s.io", "tasks", "list"]),
        )?;
        let line = tasks.lines().find(|line| line.starts_with(id));
        let pid = line
            .and_then(|line| line.split_whitespace().nth(1))
            .context("a container's process")?;
        Ok(From::Pod(node, pid.parse()?))
    }

    /// Makes a service for servers: port 80 to TCP, port 53 to UDP. The fields in `more` are added to its spec.
    pub fn service(&self, name: &str, servers: &str, more: &Value) -> Result<()> {
        let mut spec = json!({
            "selector": { "app": servers },
            "ipFamilyPolicy": "RequireDualStack",
            "ports": [
                { "name": "tcp", "port": 80, "targetPort": TCP, "protocol": "TCP" },
                { "name": "udp", "port": 53, "targetPort": UDP, "protocol": "UDP" },
            ],
        });
        for (key, value) in more.as_object().context("fields of a spec")? {
            spec[key] = value.clone();
        }
        self.apply(json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "name": name },
            "spec": spec,
        }))
    }

    pub fn service_object(&self, name: &str) -> Result<Value> {
        self.cluster
            .kubectl
            .get(&["-n", &self.name, "service", name])
    }

    /// Returns the cluster IPs of a service.
    pub fn cluster_ips(&self, name: &str) -> Result<Vec<String>> {
        let service = self.service_object(name)?;
        let addresses = service["spec"]["clusterIPs"]
            .as_array()
            .context("cluster IPs")?;
        Ok(addresses
            .iter()
            .filter_map(Value::as_str)
            .map(str::to_owned)
            .collect())
    }

    /// Returns the addresses of pods with this label `app`.
    pub fn pods_addresses(&self, app: &str) -> Result<Vec<String>> {
        let label = format!("app={app}");
        let pods = ["-n", &self.name, "pods", "-l", &label];
        let pods = self.cluster.kubectl.list(&pods)?;
        let addresses = pods
            .iter()
            .filter_map(|pod| pod["status"]["podIPs"].as_array());
        let addresses = addresses.flatten().filter_map(|of| of["ip"].as_str());
        Ok(addresses.map(str::to_owned).collect())
    }

    /// Returns the names of ready pods with this label `app`.
    pub fn pods(&self, app: &str) -> Result<BTreeSet<String>> {
        let pods =
            self.cluster
                .kubectl
                .list(&["-n", &self.name, "pods", "-l", &format!("app={app}")])?;
        let names = pods
            .iter()
            .filter_map(|pod| pod["metadata"]["name"].as_str());
        Ok(names.map(str::to_owned).collect())
    }
}

impl Drop for Space<'_> {
    fn drop(&mut self) {
        let delete = ["delete", "namespace", "--wait=false", &self.name];
        if let Err(error) = self.cluster.kubectl.run(&delete) {
            anstream::eprintln!("{error:#}");
        }
    }
}

/// Returns a Deployment of servers.
pub fn servers(name: &str, replicas: u8, on: Option<Node>) -> Value {
    let labels = json!({ "app": name });
    let listen = |kind: &str, port: u16| [format!("--{kind}"), format!("[::]:{port}")];
    let mut args = vec!["serve".to_owned(), "--name".to_owned(), "$(POD)".to_owned()];
    args.extend(listen("http", HTTP));
    args.extend(listen("tcp", TCP));
    args.extend(listen("udp", UDP));
    let mut pod = json!({
        // The server ignores SIGTERM, because it is a first process without a handler. It continues to serve for this
        // time, like a server that shuts down in order, and is then killed.
        "terminationGracePeriodSeconds": 5,
        "containers": [{
            "name": "probe",
            "image": images::LAB,
            "command": ["/usr/bin/probe"],
            "args": args,
            "env": [{ "name": "POD", "valueFrom": { "fieldRef": { "fieldPath": "metadata.name" } } }],
            "readinessProbe": { "httpGet": { "path": "/", "port": HTTP }, "periodSeconds": 1, "timeoutSeconds": 5 },
        }],
    });
    if let Some(node) = on {
        pod["nodeName"] = node.name().into();
    } else {
        // Spread the pods over all nodes.
        pod["topologySpreadConstraints"] = json!([{
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": { "matchLabels": labels },
        }]);
    }
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": { "name": name },
        "spec": {
            "replicas": replicas,
            "selector": { "matchLabels": labels },
            "template": { "metadata": { "labels": labels }, "spec": pod },
        },
    })
}

/// Returns an address with a port in `probe`'s format.
pub fn at(address: &str, port: u16) -> String {
    if address.contains(':') {
        format!("[{address}]:{port}")
    } else {
        format!("{address}:{port}")
    }
}

impl From {
    /// Returns a `probe` command at this source; the caller adds the arguments.
    pub fn probe(&self, cluster: &Cluster) -> Result<Command> {
        Ok(match self {
            Self::Pod(node, pid) => {
                let mut command = node.command("nsenter")?;
                command
                    .args(["--target", &pid.to_string(), "--net"])
                    .arg(&cluster.probe);
                command
            }
            Self::Machine(node, pid) => {
                let mut command = Command::new("nsenter");
                command
                    .args(["--target", &node.init()?, "--mount", "--pid", "--"])
                    .args(["nsenter", "--target", &pid.to_string(), "--net"])
                    .arg(&cluster.probe);
                command
            }
            Self::Container(space, pod) => {
                let mut command = cluster.kubectl.command();
                command
                    .args(["-n", space, "exec", "--stdin", pod, "--"])
                    .arg("/usr/bin/probe");
                command
            }
            Self::Node(node) => node.command(&cluster.probe)?,
            Self::Outside => in_netns(CONTROL, &cluster.probe),
        })
    }

    /// Sets a sysctl of the pod's network namespace, such as `net.ipv4.tcp_tw_reuse=1`.
    pub fn sysctl(&self, setting: &str) -> Result<()> {
        let Self::Pod(node, pid) = self else {
            bail!("{self:?} is no pod's network namespace");
        };
        let mut command = node.command("nsenter")?;
        command
            .args(["--target", &pid.to_string(), "--net"])
            .args(["sysctl", "--quiet", "--write", setting]);
        check(&mut command)
    }

    /// Runs `probe` with these words, and reads its report.
    pub fn ask(&self, cluster: &Cluster, words: &str, to: &str) -> Result<Report> {
        let mut probe = self.probe(cluster)?;
        probe.args(words.split(' ')).args(["--to", to]);
        let text = output(&mut probe)?;
        serde_json::from_str(&text).context("probe printed no report")
    }

    /// Checks that every request is answered, and that exactly these servers answer.
    pub fn reaches(
        &self,
        cluster: &Cluster,
        words: &str,
        to: &str,
        whom: &BTreeSet<String>,
    ) -> Result<Report> {
        let report = self.ask(cluster, words, to)?;
        ensure!(
            report.answered == report.attempts,
            "{self:?} {words} {to}: {} of {} answered, {:?}",
            report.answered,
            report.attempts,
            report.errors
        );
        let answered: BTreeSet<String> = report.endpoints.keys().cloned().collect();
        ensure!(
            answered == *whom,
            "{self:?} {words} {to}: answered by {answered:?}, not by {whom:?}"
        );
        Ok(report)
    }

    /// Checks that no request is answered, and that each fails with one of these errors.
    pub fn fails(&self, cluster: &Cluster, words: &str, to: &str, errors: &[&str]) -> Result<()> {
        let report = self.ask(cluster, words, to)?;
        ensure!(
            report.answered == 0
                && report
                    .errors
                    .keys()
                    .all(|error| errors.contains(&error.as_str())),
            "{self:?} {words} {to}: {} answered, {:?}, where {errors:?} was expected",
            report.answered,
            report.errors
        );
        Ok(())
    }
}

/// Returns the only client address that the servers saw.
pub fn source(report: &Report) -> Result<String> {
    let sources: BTreeSet<String> = report
        .endpoints
        .values()
        .flat_map(|endpoint| endpoint.sources.keys().map(ToString::to_string))
        .collect();
    let mut sources = sources.into_iter();
    match (sources.next(), sources.next()) {
        (Some(one), None) => Ok(one),
        (one, other) => bail!("the servers saw {one:?} and {other:?}"),
    }
}
