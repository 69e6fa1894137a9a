//! The DaemonSet as shipped: its permissions, upgrades, installation by the chart, and removal.

use std::{collections::BTreeSet, thread, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use super::{
    load::Load,
    pods::{From, SHORT, Space, at},
};
use crate::{
    cluster::{
        Cluster,
        agent::{self, Wanted},
        images,
        kubectl::eventually,
        node,
        place::{self, Node},
    },
    command::{check, output},
    workspace,
};

pub(super) const CONNECT: &str = "connect --count 30 --timeout-ms 2000";

pub fn rbac(cluster: &Cluster) -> Result<String> {
    agent::deploy(cluster, &Wanted::default())?;
    let account = "--as=system:serviceaccount:kube-system:dataplane";
    for (wanted, question) in [
        ("yes", "list services --all-namespaces"),
        (
            "yes",
            "watch endpointslices.discovery.k8s.io --all-namespaces",
        ),
        ("yes", "create tokenreviews.authentication.k8s.io"),
        ("no", "get secrets --all-namespaces"),
        ("no", "list namespaces"),
        ("no", "update services/status --all-namespaces"),
        ("no", "create events --all-namespaces"),
    ] {
        let mut ask = cluster.kubectl.command();
        ask.args(["auth", "can-i", account])
            .args(question.split(' '));
        // `kubectl auth can-i` exits with 1 for a no.
        let said = String::from_utf8_lossy(&ask.output()?.stdout)
            .trim()
            .to_owned();
        ensure!(
            said == wanted,
            "may the agent {question}? {said}, where {wanted} was expected"
        );
    }
    metrics_are_guarded(cluster)?;
    // The agent's requests since the API server started.
    let allowed = allowed(cluster)?;
    let requests = agent::audited()?;
    let mut used = BTreeSet::new();
    for request in &requests {
        let code = request["responseStatus"]["code"].as_u64();
        let object = &request["objectRef"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let what = (
            text(&object["apiGroup"]),
            text(&object["resource"]),
            text(&request["verb"]),
        );
        ensure!(
            code.is_some_and(|code| code < 400),
            "a request of the agent's was answered with {code:?}: {request}"
        );
        ensure!(
            allowed.contains(&what),
            "the agent asks for what our ClusterRole does not name: {request}"
        );
        used.insert((what.0, what.1));
    }
    let granted: BTreeSet<_> = allowed
        .into_iter()
        .map(|(group, resource, _)| (group, resource))
        .collect();
    ensure!(
        used == granted,
        "the agent used {used:?}, and may read {granted:?}"
    );
    let of = |request: &Value| -> String {
        let agent = request["userAgent"].as_str().unwrap_or_default();
        agent.to_owned()
    };
    let agents: BTreeSet<String> = requests.iter().map(of).collect();
    ensure!(
        agents.iter().all(|agent| agent.starts_with("dataplane/")),
        "the agents name themselves {agents:?}"
    );
    Ok(format!(
        "{} requests, none forbidden, of every kind that the ClusterRole names and no other; User-Agent {agents:?}",
        requests.len(),
    ))
}

/// Checks that a client needs the permission to get the agents' metrics.
fn metrics_are_guarded(cluster: &Cluster) -> Result<()> {
    let kubectl = |arguments: &str| {
        let arguments: Vec<&str> = arguments.split(' ').collect();
        cluster.kubectl.run(&arguments)
    };
    kubectl("-n kube-system create serviceaccount scraper")?;
    kubectl("create clusterrole scraper --verb=get --non-resource-url=/metrics")?;
    let token = |account: &str| kubectl(&format!("-n kube-system create token {account}"));
    let node = cluster.nodes[0];
    let status = |token: &str| -> Result<String> {
        let mut ask = node.command("curl")?;
        ask.args([
            "-ksS",
            "--max-time",
            "20",
            "-o",
            "/dev/null",
            "-w",
            "%{http_code}",
            "-H",
        ]);
        ask.arg(format!("Authorization: Bearer {}", token.trim()));
        output(ask.arg(format!("https://{}:15020/metrics", node.ipv4())))
    };
    let unknown = status("made-up")?;
    ensure!(unknown == "401", "a token of nobody's: {unknown}");
    let forbidden = status(&token("scraper")?)?;
    ensure!(
        forbidden == "403",
        "a service account without the right: {forbidden}"
    );
    kubectl(
        "create clusterrolebinding scraper --clusterrole=scraper --serviceaccount=kube-system:scraper",
    )?;
    let allowed = eventually(Duration::from_secs(20), || {
        let allowed = status(&token("scraper")?)?;
        ensure!(
            allowed == "200",
            "a service account with the right: {allowed}"
        );
        Ok(())
    });
    kubectl("delete clusterrole,clusterrolebinding scraper")?;
    kubectl("-n kube-system delete serviceaccount scraper")?;
    allowed
}

/// Returns group, resource and verb of all permissions in our ClusterRole.
fn allowed(cluster: &Cluster) -> Result<BTreeSet<(String, String, String)>> {
    let role = cluster.kubectl.get(&["clusterrole", "dataplane"])?;
    let words = |value: &Value| -> Vec<String> {
        let words = value.as_array().into_iter().flatten();
        words.filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let mut all = BTreeSet::new();
    for rule in role["rules"].as_array().context("rules")? {
        for group in words(&rule["apiGroups"]) {
            for resource in words(&rule["resources"]) {
                for verb in words(&rule["verbs"]) {
                    all.insert((group.clone(), resource.clone(), verb));
                }
            }
        }
    }
    Ok(all)
}

/// Clients of a service with two servers: a pod, a node, and a client outside.
pub(super) struct Busy<'a> {
    pub space: Space<'a>,
    pub clients: Vec<(From, String)>,
    pub web: BTreeSet<String>,
}

impl<'a> Busy<'a> {
    pub fn new(cluster: &'a Cluster, name: &str, labels: &Value) -> Result<Self> {
        let space = Space::new(cluster, name, labels)?;
        space.servers("web", 2, None)?;
        space.service("web", "web", &json!({ "type": "NodePort" }))?;
        let node_port = space.service_object("web")?["spec"]["ports"][0]["nodePort"].as_u64();
        let node_port = node_port.context("a node port")?.try_into()?;
        let address = space.cluster_ips("web")?.remove(0);
        let (first, second) = (cluster.nodes[0], cluster.nodes[1]);
        let clients = vec![
            (space.client("client", first)?, at(&address, 80)),
            (From::Node(second), at(&address, 80)),
            (From::Outside, at(&first.ipv4().to_string(), node_port)),
        ];
        let web = space.pods("web")?;
        let busy = Self {
            space,
            clients,
            web,
        };
        busy.all_reach()?;
        Ok(busy)
    }

    fn all_reach(&self) -> Result<()> {
        for (from, to) in &self.clients {
            eventually(SHORT, || {
                from.reaches(self.space.cluster, CONNECT, to, &self.web)
            })?;
        }
        Ok(())
    }

    fn loads(&self) -> Result<Vec<Load>> {
        let start = |(from, to): &(From, String)| Load::start(self.space.cluster, from, to);
        self.clients.iter().map(start).collect()
    }
}

pub fn upgrade(cluster: &Cluster) -> Result<String> {
    agent::deploy(cluster, &Wanted::default())?;
    let busy = Busy::new(cluster, "upgrade", &json!({}))?;
    let mut seen = Vec::new();
    for surge in [false, true] {
        // Upgrade from one image to the other, with the strategy that is already set.
        agent::deploy(
            cluster,
            &Wanted {
                surge,
                ..Wanted::default()
            },
        )?;
        let loads = busy.loads()?;
        thread::sleep(Duration::from_secs(2));
        agent::deploy(
            cluster,
            &Wanted {
                surge,
                tag: images::TAGS[1],
                ..Wanted::default()
            },
        )?;
        thread::sleep(Duration::from_secs(3));
        let mut answered = 0;
        for load in loads {
            answered += load
                .none_failed()
                .with_context(|| format!("with surge: {surge}"))?;
        }
        busy.all_reach()?;
        let with = if surge { "with" } else { "without" };
        seen.push(format!("{answered} {with} surge"));
    }
    agent::deploy(cluster, &Wanted::default())?;
    Ok(format!("no connection failed: {}", seen.join(", ")))
}

pub fn chart(cluster: &Cluster) -> Result<String> {
    agent::remove(cluster)?;
    let wanted = Wanted::default();
    cluster
        .kubectl
        .apply_text(&agent::chart(&wanted, &json!({}))?)?;
    agent::wait(cluster)?;
    let busy = Busy::new(cluster, "chart", &json!({}))?;
    // A changed value changes the checksum, and so rolls out the DaemonSet.
    let generation = || -> Result<Value> {
        let daemon_set = cluster
            .kubectl
            .get(&["-n", "kube-system", "daemonset", "dataplane"])?;
        Ok(daemon_set["metadata"]["generation"].clone())
    };
    let before = generation()?;
    let changed = Wanted {
        config: json!({ "log": { "level": "debug" } }),
        ..wanted
    };
    let loads = busy.loads()?;
    cluster
        .kubectl
        .apply_text(&agent::chart(&changed, &json!({}))?)?;
    agent::wait(cluster)?;
    ensure!(
        generation()? != before,
        "a changed configuration did not roll out"
    );
    busy.all_reach()?;
    let mut answered = 0;
    for load in loads {
        answered += load.none_failed()?;
    }
    drop(busy);
    agent::remove(cluster)?;
    agent::deploy(cluster, &Wanted::default())?;
    Ok(format!(
        "installed, and rolled out by a changed value: none of {answered} connections failed"
    ))
}

pub fn cleanup(cluster: &Cluster) -> Result<String> {
    agent::deploy(cluster, &Wanted::default())?;
    let busy = Busy::new(cluster, "cleanup", &json!({}))?;
    agent::remove_daemon_set(cluster)?;
    // The agents' programs and tables continue to serve.
    busy.all_reach()?;
    for node in &cluster.nodes {
        clean(cluster, *node)?;
        // The kernel itself puts maps.debug and progs.debug into every BPF file system. The directory is a mount of the
        // Job's pod, so the Job cannot remove it.
        let pins = output(node.command("find")?.args([
            "/sys/fs/bpf",
            "-mindepth",
            "1",
            "-not",
            "-name",
            "*.debug",
            "-not",
            "-path",
            "/sys/fs/bpf/dataplane",
        ]))?;
        ensure!(
            pins.trim().is_empty(),
            "pins are left on {}:\n{pins}",
            node.name()
        );
    }
    for (from, to) in &busy.clients {
        from.fails(
            cluster,
            "connect --count 2 --timeout-ms 700",
            to,
            &["TIMEOUT", "EHOSTUNREACH", "ENETUNREACH", "ECONNREFUSED"],
        )?;
    }
    remove_job(cluster)?;
    agent::deploy(cluster, &Wanted::default())?;
    busy.all_reach()?;
    Ok("served on without the agent; after the Job no pin is left and nothing is served; the agent serves again".into())
}

/// Cleans a node with the Job of `deploy/kustomize`.
pub(super) fn clean(cluster: &Cluster, node: Node) -> Result<()> {
    let text = job(cluster, &node.name())?;
    // As docs/kubernetes.md says: this replaces the Job of the previous node.
    cluster
        .kubectl
        .feed(&["replace", "--force", "-f", "-"], &text)?;
    let wait = [
        "-n",
        "kube-system",
        "wait",
        "--for=condition=complete",
        "--timeout=120s",
        "job/dataplane-cleanup",
    ];
    cluster.kubectl.run(&wait).map(drop)
}

/// Removes the Job.
pub(super) fn remove_job(cluster: &Cluster) -> Result<()> {
    let job = ["delete", "--ignore-not-found", "job/dataplane-cleanup"];
    cluster
        .kubectl
        .run(&[&["-n", "kube-system"], &job[..]].concat())
        .map(drop)
}

/// Returns the clean-up Job of `deploy/kustomize` for a node.
fn job(cluster: &Cluster, name: &str) -> Result<String> {
    let overlay = place::directory().join("cleanup");
    if !overlay.exists() {
        std::fs::create_dir_all(&overlay).context("cannot create the overlay")?;
        check(
            std::process::Command::new("cp")
                .arg("--recursive")
                .arg(workspace::root().join("deploy/kustomize/cleanup"))
                .arg(overlay.join("cleanup")),
        )?;
    }
    let mut kustomization = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["cleanup"],
        "images": [{ "name": "dataplane", "newName": images::DATAPLANE, "newTag": images::TAGS[0] }],
    });
    if node::hybrid()? {
        let cgroup = format!("--cgroup=/host{}", node::unified_mount()?);
        let args = ["cleanup", "--bpffs=/host/sys/fs/bpf/dataplane", &cgroup];
        let patch = json!([{ "op": "replace", "path": "/spec/template/spec/containers/0/args", "value": args }]);
        kustomization["patches"] =
            json!([{ "target": { "kind": "Job" }, "patch": patch.to_string() }]);
    }
    std::fs::write(
        overlay.join("kustomization.yaml"),
        kustomization.to_string(),
    )
    .context("cannot write the overlay")?;
    let text = output(cluster.kubectl.command().arg("kustomize").arg(&overlay))?;
    if !text.contains("nodeName: NODE") {
        bail!("the Job does not name its node as NODE:\n{text}");
    }
    Ok(text.replace("NODE", name))
}
