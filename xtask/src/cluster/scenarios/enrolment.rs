//! The CNI plug-in and the kubelet's probes with a real container runtime and real kubelets: the first connection of a
//! pod is captured, the pod is ready all the same, and no pod starts past an agent that is away.

use std::{fs, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::report::Report;
use serde_json::{Value, json};

use super::{
    pods::{From, HTTP, LONG, SHORT, Space, TCP, at},
    services::two,
};
use crate::{
    cluster::{
        Cluster,
        agent::{self, Process, Wanted},
        images::{self, Image},
        kubectl::eventually,
        node,
        place::{self, Node},
    },
    command::output,
};

/// The name of the plug-in.
const PLUGIN: &str = "dataplane-cni";
/// The image of a server with gRPC's health service.
const AGNHOST: &str = "dataplane.test/agnhost:1";
const GRPC: u16 = 5000;
/// Connections of a pod's first init container, to a service of Pods.
const ALLOWED: u32 = 5;
/// Connections of a pod's second init container, to the API server, which `egress: deny` refuses.
const DENIED: u32 = 3;
/// Pods that start at the same time.
const TOGETHER: [&str; 3] = ["one", "two", "three"];
/// A pod of a namespace that is never captured.
const EXCLUDED: &str = "scenario-enrolment";
/// How long pods have to be ready at every look. The kubelet probes each container every second.
const READY: Duration = Duration::from_secs(20);
/// containerd reads the network configuration anew after a change.
const RELOAD: Duration = Duration::from_secs(2);

pub fn plugin_and_probes(cluster: &Cluster) -> Result<String> {
    agent::remove(cluster)?;
    let outcome = enrolled(cluster);
    let delete = ["delete", "--ignore-not-found", "pod", EXCLUDED];
    cluster
        .kubectl
        .run(&[&["-n", "kube-system"], &delete[..]].concat())?;
    for node in &cluster.nodes {
        uninstall(cluster, *node)?;
        agent::cleanup(cluster, *node)?;
    }
    agent::deploy(cluster, &Wanted::default())?;
    outcome
}

fn enrolled(cluster: &Cluster) -> Result<String> {
    let [first, second] = two(cluster)?;
    let before = [conflist(first)?, conflist(second)?];
    let agent = start(cluster, first, "keep")?;
    let other = start(cluster, second, "detach")?;

    // The servers are not captured, so only the clients' connections count.
    let servers = Space::new(cluster, "enrolment-servers", &json!({}))?;
    servers.servers("web", 2, None)?;
    servers.service("web", "web", &json!({}))?;
    let to = at(&servers.cluster_ips("web")?[0], 80);
    let web = servers.pods("web")?;
    let words = "connect --count 20 --timeout-ms 2000";
    eventually(SHORT, || {
        From::Node(first).reaches(cluster, words, &to, &web)
    })?;
    let labels = json!({ "istio.io/dataplane-mode": "ambient" });
    let world = World {
        space: Space::new(cluster, "enrolment", &labels)?,
        to,
        node: first,
        grpc: grpc_image(cluster)?,
    };

    let began = Counters::read(first)?;
    for name in TOGETHER {
        world.create(name)?;
    }
    world.are_captured(&TOGETHER, began)?;
    let probes = world.probes()?;

    let began = Counters::read(first)?;
    agent.kill()?;
    let reason = world.waits("held")?;
    let agent = start(cluster, first, "keep")?;
    world.are_captured(&["held"], began)?;

    // Without the plug-in, pods start without an agent.
    agent.stop()?;
    ensure!(
        has_plugin(&conflist(first)?),
        "an agent with `onExit: keep` took the plug-in out"
    );
    uninstall(cluster, first)?;
    other.stop()?;
    for (node, before) in [first, second].into_iter().zip(before) {
        let after = conflist(node)?;
        ensure!(
            after == before,
            "{}: not the network configuration of before: {after:#}",
            node.name()
        );
        world
            .space
            .client(&format!("after-{}", node.name()), node)?;
    }
    let with_grpc = if world.grpc {
        "HTTP, TCP and gRPC"
    } else {
        "HTTP and TCP (gRPC not tried: no agnhost)"
    };
    Ok(format!(
        "{} pods: {ALLOWED} first connections each by the proxy, {DENIED} refused; {probes} probes in {} s by {with_grpc}, \
         none captured; without an agent a pod waited: {reason}",
        TOGETHER.len() + 1,
        READY.as_secs()
    ))
}

/// Starts an agent that captures, and waits until the container runtime calls its plug-in.
fn start(cluster: &Cluster, node: Node, on_exit: &str) -> Result<Process> {
    let [conf_dir, bin_dir] = node::cni_directories();
    let config = json!({
        "mesh": { "rules": { "mode": "proxy", "egress": "deny" } },
        "cni": { "confDir": conf_dir, "binDir": bin_dir },
        "onExit": on_exit,
    });
    let agent = Process::start(cluster, node, &place::admin_config(), &config)?;
    // The agent first copies its program, which is large if it is a debug build.
    eventually(LONG, || {
        let list = conflist(node)?;
        ensure!(has_plugin(&list), "{}: no plug-in: {list}", node.name());
        Ok(())
    })?;
    thread::sleep(RELOAD);
    Ok(agent)
}

/// Takes the plug-in out, as an operator does.
fn uninstall(cluster: &Cluster, node: Node) -> Result<()> {
    let [conf_dir, _] = node::cni_directories();
    let mut command = node.command(&cluster.dataplane)?;
    command.args(["cni", "uninstall", "--conf-dir", &conf_dir]);
    output(&mut command).map(drop)
}

/// Returns a node's network configuration.
fn conflist(node: Node) -> Result<Value> {
    let path = node.directory().join("cni/10-cluster.conflist");
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is no JSON", path.display()))
}

fn has_plugin(list: &Value) -> bool {
    let all = list["plugins"].as_array();
    all.and_then(|all| all.last())
        .is_some_and(|one| one["type"] == PLUGIN)
}

/// Imports an image of Kubernetes' agnhost on all nodes. Returns whether there is an agnhost.
fn grpc_image(cluster: &Cluster) -> Result<bool> {
    let program = cluster.programs.kubernetes("agnhost");
    if !program.is_file() {
        return Ok(false);
    }
    let place = images::directory();
    let mut image = Image::new_in(&place, "agnhost")?;
    image.program(&program, "agnhost")?;
    image.directory("tmp")?;
    image.entrypoint = vec!["/agnhost".into()];
    image.names = vec![AGNHOST.into()];
    image.pack()?;
    for node in &cluster.nodes {
        node::import(*node, &place.join("agnhost.tar"))?;
    }
    Ok(true)
}

/// A node's counters of the programs' decisions, and of the proxy.
#[derive(Clone, Copy, Debug)]
struct Counters {
    captured: f64,
    captured_inbound: f64,
    denied: f64,
    probes: f64,
}

impl Counters {
    fn read(node: Node) -> Result<Self> {
        let metrics = agent::metrics(node)?;
        let of = |reason| {
            let label = Some(("reason", reason));
            agent::sum(&metrics, "dataplane_verdicts_total", label)
        };
        Ok(Self {
            captured: of("captured"),
            captured_inbound: of("captured-inbound"),
            denied: of("egress-denied"),
            probes: of("excluded-probe"),
        })
    }
}

struct World<'a> {
    space: Space<'a>,
    /// A service that `egress: deny` allows.
    to: String,
    node: Node,
    grpc: bool,
}

impl World<'_> {
    /// Creates a pod whose init containers connect at once, and whose containers are probed.
    fn create(&self, name: &str) -> Result<()> {
        let init = |name: &str, count: u32, to: &str| {
            let count = count.to_string();
            json!({
                "name": name,
                "image": images::LAB,
                "command": ["/usr/bin/probe"],
                "args": ["connect", "--count", count, "--timeout-ms", "5000", "--to", to],
            })
        };
        let probe =
            |how: &str, what: Value| json!({ how: what, "periodSeconds": 1, "timeoutSeconds": 5 });
        let mut containers = vec![json!({
            "name": "web",
            "image": images::LAB,
            "command": ["/usr/bin/probe"],
            "args": [
                "serve", "--name", name, "--log",
                "--http", format!("[::]:{HTTP}"),
                "--tcp", format!("[::]:{TCP}"),
            ],
            "readinessProbe": probe("httpGet", json!({ "path": "/", "port": HTTP })),
            "livenessProbe": probe("tcpSocket", json!({ "port": TCP })),
        })];
        if self.grpc {
            let health = probe("grpc", json!({ "port": GRPC }));
            containers.push(json!({
                "name": "grpc",
                "image": AGNHOST,
                "args": [
                    "grpc-health-checking",
                    format!("--port={GRPC}"),
                    format!("--http-port={}", GRPC + 1),
                ],
                "readinessProbe": health,
                "livenessProbe": health,
            }));
        }
        let api_server = at(&place::CONTROL_V4.to_string(), 6443);
        self.space.apply(json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": { "name": name },
            "spec": {
                "nodeName": self.node.name(),
                "terminationGracePeriodSeconds": 0,
                "initContainers": [
                    init("allowed", ALLOWED, &self.to),
                    init("denied", DENIED, &api_server),
                ],
                "containers": containers,
            },
        }))
    }

    /// Waits until these pods are ready, and checks that their init containers' connections, and no others, went to the
    /// proxy or were refused.
    fn are_captured(&self, names: &[&str], began: Counters) -> Result<()> {
        for name in names {
            let ready = [
                "wait",
                "--for=condition=Ready",
                "--timeout=180s",
                &format!("pod/{name}"),
            ];
            let ready = self.space.kubectl(&ready);
            ready.with_context(|| {
                let described = self.space.kubectl(&["describe", "pod", name]);
                described.unwrap_or_default()
            })?;
            let report = self.report(name, "allowed")?;
            ensure!(
                report.answered == u64::from(ALLOWED),
                "{name} to a service of Pods: {report:?}"
            );
            let report = self.report(name, "denied")?;
            ensure!(
                report.errors.get("ECONNREFUSED") == Some(&u64::from(DENIED)),
                "{name} to the API server: {report:?}"
            );
        }
        let now = Counters::read(self.node)?;
        let pods = f64::from(u32::try_from(names.len())?);
        let (captured, denied) = (now.captured - began.captured, now.denied - began.denied);
        let wanted = [ALLOWED, DENIED].map(|each| f64::from(each) * pods);
        let off = (captured - wanted[0]).abs() + (denied - wanted[1]).abs();
        ensure!(
            off < 0.5,
            "{captured} connections were captured and {denied} refused, where {wanted:?} were made"
        );
        Ok(())
    }

    fn report(&self, pod: &str, container: &str) -> Result<Report> {
        let text = self.space.kubectl(&["logs", pod, "-c", container])?;
        serde_json::from_str(&text)
            .with_context(|| format!("{pod}: {container} printed no report: {text}"))
    }

    /// Checks that the pods stay ready, and that their applications see the node's address for a probe. Returns the
    /// number of probes.
    fn probes(&self) -> Result<f64> {
        let began = Counters::read(self.node)?;
        self.stay_ready(READY)?;
        let now = Counters::read(self.node)?;
        let probes = now.probes - began.probes;
        // At least every other second, by both ways.
        let pods = u32::try_from(TOGETHER.len())?;
        let least = f64::from(pods) * READY.as_secs_f64();
        ensure!(
            probes >= least,
            "{probes} probes were known as the kubelet's, not {least} or more"
        );
        let captured = now.captured_inbound - began.captured_inbound;
        ensure!(captured == 0.0, "{captured} connections went to the proxy");
        let addresses = output(self.node.command("ip")?.args(["-oneline", "address"]))?;
        for name in TOGETHER {
            let log = self.space.kubectl(&["logs", name, "-c", "web"])?;
            for how in ["http ", "tcp "] {
                let mut clients = log.lines().filter_map(|line| line.strip_prefix(how));
                let is_node = |client: &str| addresses.contains(&format!(" {client}/"));
                let (any, all) = (clients.clone().next().is_some(), clients.all(is_node));
                ensure!(
                    any && all,
                    "{name} did not see the node's address for {how}probes: {log}"
                );
            }
        }
        Ok(probes)
    }

    /// Checks at every look that the pods are ready, and that no container was restarted.
    fn stay_ready(&self, time: Duration) -> Result<()> {
        for _ in 0..time.as_secs() {
            for name in TOGETHER {
                let pod = ["-n", &self.space.name, "pod", name];
                let pod = self.space.cluster.kubectl.get(&pod)?;
                let statuses = pod["status"]["containerStatuses"].as_array();
                let mut statuses = statuses.context("containers")?.iter();
                let is_well = |one: &Value| one["ready"] == true && one["restartCount"] == 0;
                ensure!(
                    statuses.all(is_well),
                    "{name} is not ready: {}",
                    pod["status"]
                );
            }
            thread::sleep(Duration::from_secs(1));
        }
        Ok(())
    }

    /// Checks, while no agent runs on the node, that a pod waits, that its event says why, that a pod of an excluded
    /// namespace starts, and that the others stay ready. Returns the reason.
    fn waits(&self, name: &str) -> Result<String> {
        let kubectl = &self.space.cluster.kubectl;
        self.create(name)?;
        kubectl.apply(&json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": { "name": EXCLUDED, "namespace": "kube-system" },
            "spec": {
                "nodeName": self.node.name(),
                "terminationGracePeriodSeconds": 0,
                "containers": [{ "name": "sleep", "image": images::LAB }],
            },
        }))?;
        let ready = ["wait", "--for=condition=Ready", "--timeout=60s", "pod"];
        kubectl
            .run(&[&["-n", "kube-system"], &ready[..], &[EXCLUDED]].concat())
            .context("a pod of kube-system, without an agent")?;
        // The pod's own wait of 30 s comes first.
        let of = format!("involvedObject.name={name},reason=FailedCreatePodSandBox");
        let reason = eventually(LONG, || {
            let events = ["-n", &self.space.name, "events", "--field-selector", &of];
            let events = kubectl.list(&events)?;
            let mut messages = events.iter().filter_map(|event| event["message"].as_str());
            let why = "is not captured, so it does not start";
            let message = messages.find(|message| message.contains(why));
            let (_, reason) = message
                .and_then(|message| message.split_once("; no agent listens on "))
                .with_context(|| format!("no event names the reason: {events:?}"))?;
            Ok(format!("no agent listens on {}", reason.trim()))
        })?;
        self.stay_ready(Duration::from_secs(5))?;
        let pod = kubectl.get(&["-n", &self.space.name, "pod", name])?;
        let status = &pod["status"];
        let started = ["initContainerStatuses", "containerStatuses"]
            .iter()
            .filter_map(|key| status[key].as_array())
            .flatten()
            .any(|one| one["state"]["waiting"].is_null());
        ensure!(
            status["phase"] == "Pending" && !started,
            "a container of {name} has started without an agent: {status}"
        );
        Ok(reason)
    }
}
