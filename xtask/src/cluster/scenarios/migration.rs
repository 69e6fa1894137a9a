//! A node that moves from kube-proxy (nftables) to the agent, and back, while clients connect all the time. The
//! scenario runs the commands of docs/kubernetes.md, "Migration from kube-proxy".

use std::{collections::BTreeMap, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::report::LoadReport;
use serde_json::json;

use super::{
    agents::now_ns,
    deploy,
    load::{Load, OpenConnections, slower},
    pods::{LONG, SHORT, Space, at},
};
use crate::{
    cluster::{
        Cluster,
        agent::{self, Wanted},
        kube_proxy,
        kubectl::eventually,
        place::Node,
    },
    command::output,
};

const CONNECT: &str = "connect --count 40 --timeout-ms 2000";
/// Number of connections that stay open. It is high so that new connections soon reuse one of their ports, which
/// kube-proxy translated to the same endpoint. (With fewer ports, connections fail with kube-proxy alone: clients reuse
/// a port while the kernel's conntrack still knows a connection from it that was reset less than 10 s ago.)
const KEPT: u64 = 1000;
/// The step before the agent serves.
const ALONE_STILL: &str = "step 1";
/// How long kube-proxy alone serves clients.
const ALONE: Duration = Duration::from_secs(5);
/// How long clients continue after kube-proxy's rules are gone.
const AFTER: Duration = Duration::from_secs(100);
/// A connection that takes this long hangs. It is less than TCP's first retransmission takes.
const HANG: Duration = Duration::from_millis(950);

pub fn there_and_back(cluster: &Cluster) -> Result<String> {
    agent::remove(cluster)?;
    let outcome = kube_proxy::deploy(cluster).and_then(|()| moved(cluster));
    let label = ["label", "nodes", "--all", "dataplane-"];
    cluster.kubectl.run(&label)?;
    deploy::remove_job(cluster)?;
    agent::remove(cluster)?;
    kube_proxy::remove(cluster)?;
    // Delete the pods of `kubectl debug`.
    cluster
        .kubectl
        .run(&["delete", "pods", "--all", "--wait=false"])?;
    agent::deploy(cluster, &Wanted::default())?;
    outcome
}

fn moved(cluster: &Cluster) -> Result<String> {
    let node = cluster.nodes[0];
    let space = Space::new(cluster, "kube-proxy", &json!({}))?;
    space.servers("web", 2, None)?;
    space.service("web", "web", &json!({}))?;
    let to = at(&space.cluster_ips("web")?[0], 80);
    let web = space.pods("web")?;
    let client = space.client("client", node)?;
    eventually(SHORT, || client.reaches(cluster, CONNECT, &to, &web))?;
    only_kube_proxy_translates(node)?;
    let mut kept = OpenConnections::start(cluster, &client, &to, KEPT)?;
    let load = Load::start_each(cluster, &client, &to)?;
    let mut steps = Steps::default();
    thread::sleep(ALONE);

    steps.begin(ALONE_STILL)?;
    let patch = "spec: {template: {spec: {affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: \
                 {nodeSelectorTerms: [{matchExpressions: [{key: dataplane, operator: NotIn, values: [only]}]}]}}}}}}";
    let daemon_set = ["-n", "kube-system", "patch", "daemonset", "kube-proxy"];
    cluster
        .kubectl
        .run(&[&daemon_set[..], &["--patch", patch]].concat())?;
    kube_proxy::rolled_out(cluster)?;
    agent::apply(cluster, &on_labelled_nodes())?;
    label(cluster, node, &["dataplane=beside"])?;
    let ready = || -> Result<()> {
        agent::healthy(cluster, node)?;
        agent::exec(cluster, node, "status")?;
        Ok(())
    };
    eventually(LONG, ready)?;
    steps.begin("step 2")?;
    let services = agent::exec(cluster, node, "services")?;
    ensure!(
        services.contains(&to),
        "`dataplane services` has no {to}: {services}"
    );
    steps.begin("step 3")?;
    label(cluster, node, &["dataplane=only", "--overwrite"])?;
    eventually(LONG, || no_kube_proxy(cluster, node))?;
    let said = agent::exec(cluster, node, "keep-nat")?;
    ensure!(said.contains("added"), "keep-nat: {said}");
    steps.begin("kube-proxy --cleanup")?;
    remove_rules(cluster, node)?;
    thread::sleep(AFTER);
    kept.all_alive().context("after step 3")?;
    steps.begin("step 4")?;
    eventually(SHORT, || {
        let (healthy, text) = agent::status(cluster, node)?;
        ensure!(healthy && !text.contains("warning: "), "status: {text}");
        Ok(())
    })?;
    let early = agent::exec(cluster, node, "keep-nat --release");
    let early = early
        .err()
        .context("`keep-nat --release` ends connections")?;
    let early = format!("{early:#}");
    ensure!(early.contains("--now"), "keep-nat --release: {early}");
    kept.all_alive().context("after step 4")?;

    // And back, with connections that the agent has served.
    steps.begin("rollback, step 1")?;
    let mut own = OpenConnections::start(cluster, &client, &to, KEPT)?;
    label(cluster, node, &["dataplane=beside", "--overwrite"])?;
    kube_proxy::rolled_out(cluster)?;
    eventually(LONG, || {
        let rules = nft(node, "list table ip kube-proxy")?;
        let (address, _) = to.split_once(':').context("an address with a port")?;
        ensure!(rules.contains(address), "kube-proxy has not written {to}");
        Ok(())
    })?;
    steps.begin("rollback, step 2")?;
    label(cluster, node, &["dataplane-"])?;
    eventually(LONG, || {
        ensure!(agent::pod(cluster, node).is_err(), "the agent's pod stays");
        Ok(())
    })?;
    steps.begin("the clean-up Job")?;
    deploy::clean(cluster, node)?;
    thread::sleep(Duration::from_secs(10));
    own.all_alive().context("after the way back")?;

    let report = load.report()?;
    // `kubectl patch` restarts kube-proxy. Some connections then fail until the agent serves them.
    let (of_kube_proxy, trouble): (Vec<_>, Vec<_>) = steps
        .trouble(&report)
        .into_iter()
        .partition(|(what, _)| what.starts_with(ALONE_STILL));
    ensure!(
        trouble.is_empty(),
        "beside {} connections: {trouble:?}; with kube-proxy alone: {of_kube_proxy:?}",
        report.answered
    );
    let of_kube_proxy: u64 = of_kube_proxy.iter().map(|(_, count)| count).sum();
    ensure!(report.answered > 1000, "{} connections", report.answered);
    Ok(format!(
        "there and back: of {} connections none failed or took {} ms once the agent served, {} s of them after kube-proxy's rules \
         had gone; {KEPT} kept connections of kube-proxy's and {KEPT} of the agent's live on; {of_kube_proxy} failed or \
         hung after step 1 had restarted kube-proxy and before the agent served",
        report.answered,
        HANG.as_millis(),
        AFTER.as_secs()
    ))
}

/// Start time of each step, in nanoseconds of the machine's monotonic clock.
#[derive(Default)]
struct Steps(Vec<(u64, &'static str)>);

impl Steps {
    fn begin(&mut self, name: &'static str) -> Result<()> {
        self.0.push((now_ns()?, name));
        Ok(())
    }

    /// Counts failed and hanging connections by step and kind.
    fn trouble(&self, report: &LoadReport) -> BTreeMap<String, u64> {
        let failures = report.failures.iter();
        let failures = failures.map(|failure| (failure.at_ns, failure.error.as_str()));
        let slow = slower(report, HANG).map(|event| (event.started_at_ns, "hung"));
        let mut counts = BTreeMap::new();
        for (at, what) in failures.chain(slow) {
            let of = self.0.iter().rev().find(|(begin, _)| *begin <= at);
            let text = match of {
                Some((begin, step)) => {
                    let since = Duration::from_nanos(at - begin);
                    format!("{step} after {} s: {what}", since.as_secs())
                }
                None => format!("before: {what}"),
            };
            *counts.entry(text).or_default() += 1;
        }
        counts
    }
}

/// Returns the base with the affinity of step 1.
fn on_labelled_nodes() -> Wanted {
    let affinity = json!([{
        "op": "add",
        "path": "/spec/template/spec/affinity",
        "value": { "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": [
            { "matchExpressions": [{ "key": "dataplane", "operator": "In", "values": ["beside", "only"] }] },
        ] } } },
    }]);
    Wanted {
        patches: vec![json!({
            "target": { "kind": "DaemonSet", "name": "dataplane" },
            "patch": affinity.to_string(),
        })],
        ..Wanted::default()
    }
}

fn label(cluster: &Cluster, node: Node, words: &[&str]) -> Result<()> {
    let name = node.name();
    let label = ["label", "node", &name];
    cluster.kubectl.run(&[&label[..], words].concat()).map(drop)
}

fn nft(node: Node, words: &str) -> Result<String> {
    output(node.command("nft")?.arg(words))
}

/// Checks the scenario's precondition: kube-proxy's tables are the only tables on the node that have NAT hooks.
fn only_kube_proxy_translates(node: Node) -> Result<()> {
    let rules = nft(node, "list ruleset")?;
    let mut table = "";
    for line in rules.lines() {
        if line.starts_with("table ") {
            table = line;
        }
        ensure!(
            !line.contains("type nat hook") || table.contains(" kube-proxy "),
            "something else on {} translates, too: {table} {line}",
            node.name()
        );
    }
    Ok(())
}

fn no_kube_proxy(cluster: &Cluster, node: Node) -> Result<()> {
    let pods = cluster
        .kubectl
        .list(&["-n", "kube-system", "pods", "-l", "k8s-app=kube-proxy"])?;
    let there = pods
        .iter()
        .filter(|pod| pod["spec"]["nodeName"] == node.name());
    ensure!(there.count() == 0, "kube-proxy's pod is still there");
    Ok(())
}

/// Runs `kube-proxy --cleanup` by `kubectl debug`, as in step 3.
fn remove_rules(cluster: &Cluster, node: Node) -> Result<()> {
    let image = cluster.kubectl.run(&[
        "-n",
        "kube-system",
        "get",
        "daemonset",
        "kube-proxy",
        "-o",
        "jsonpath={..containers[0].image}",
    ])?;
    let name = format!("node/{}", node.name());
    let image = format!("--image={image}");
    let debug = ["debug", &name, "--profile=sysadmin", &image];
    let cleanup = ["--", "kube-proxy", "--cleanup"];
    cluster.kubectl.run(&[&debug[..], &cleanup].concat())?;
    // `kubectl debug` does not wait for the end of the command.
    eventually(LONG, || {
        let tables = nft(node, "list tables")?;
        ensure!(
            !tables.contains("kube-proxy"),
            "kube-proxy --cleanup leaves {tables}"
        );
        Ok(())
    })
}
