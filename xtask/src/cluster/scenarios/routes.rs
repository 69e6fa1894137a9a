//! Routes of Gateway API and Istio's ServiceEntries. The API server checks the objects of the pages and of `examples/`,
//! and a route splits a Service.

use std::{collections::BTreeSet, fs, path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::{
    accepted::accepted,
    pods::{From, LONG, SHORT, Space, TCP, at},
};
use crate::{
    cluster::{
        Cluster, Definitions,
        agent::{self, Wanted},
        kubectl::eventually,
        place::{self, Node},
    },
    workspace,
};

/// The kinds that the scenario needs.
const KINDS: [&str; 6] = [
    "tcproutes.gateway.networking.k8s.io",
    "tlsroutes.gateway.networking.k8s.io",
    "httproutes.gateway.networking.k8s.io",
    "grpcroutes.gateway.networking.k8s.io",
    "referencegrants.gateway.networking.k8s.io",
    "serviceentries.networking.istio.io",
];
const GROUPS: [&str; 2] = ["gateway.networking.k8s.io/", "networking.istio.io/"];
/// Time limit for the agent to notice a kind. The agent looks every 30 s for kinds that the cluster does not have.
const NOTICED: Duration = Duration::from_mins(1);
const CONNECTS: u32 = 2000;
/// The backends of the TCPRoute, by the names of their servers, and their weights.
const WEIGHTS: [(&str, u8); 3] = [("one", 6), ("two", 3), ("outside", 1)];

pub fn split(cluster: &Cluster) -> Result<String> {
    let kubernetes =
        json!({ "apiServer": place::api_server(), "routes": true, "serviceEntries": true });
    // The kinds are not there yet. The agent must work without them.
    let wanted = Wanted {
        config: json!({ "source": { "kubernetes": kubernetes } }),
        components: vec!["routes", "service-entries"],
        ..Wanted::default()
    };
    agent::deploy(cluster, &wanted)?;
    let outcome = with_agents(cluster);
    agent::deploy(cluster, &Wanted::default())?;
    for name in ["dataplane-routes", "dataplane-service-entries"] {
        let both = "clusterrole,clusterrolebinding";
        let delete = ["delete", "--ignore-not-found", both, name];
        cluster.kubectl.run(&delete)?;
    }
    outcome
}

fn with_agents(cluster: &Cluster) -> Result<String> {
    let Some(definitions) = Definitions::install(cluster, &KINDS)? else {
        return Ok(
            "not tried: $KUBERNETES_BIN/crds does not define Gateway API's routes and Istio's ServiceEntries"
                .to_owned(),
        );
    };
    let outcome = with_definitions(cluster);
    definitions.remove(cluster)?;
    outcome
}

fn with_definitions(cluster: &Cluster) -> Result<String> {
    reads_only(cluster)?;
    let tried = examples(cluster)?;
    let served = served(cluster)?;
    Ok(format!(
        "{tried} objects of the pages and of examples/ are taken as they are; {served}"
    ))
}

fn reads_only(cluster: &Cluster) -> Result<()> {
    let account = "--as=system:serviceaccount:kube-system:dataplane";
    for resource in KINDS {
        for (wanted, verb, of) in [
            ("yes", "list", ""),
            ("yes", "watch", ""),
            ("no", "update", ""),
            ("no", "patch", "status"),
        ] {
            let mut ask = cluster.kubectl.command();
            ask.args(["auth", "can-i", account, "--all-namespaces", verb, resource])
                .arg(format!("--subresource={of}"));
            // `kubectl auth can-i` exits with 1 for a no.
            let said = ask.output()?.stdout;
            let said = String::from_utf8_lossy(&said).trim().to_owned();
            ensure!(
                said == wanted,
                "may the agent {verb} {resource} {of}? {said}, where {wanted} was expected"
            );
        }
    }
    Ok(())
}

/// Has the API server check every object of `examples/`, and the objects of the two groups in the pages. Returns their
/// number.
fn examples(cluster: &Cluster) -> Result<usize> {
    let mut texts = Vec::new();
    for path in files(&workspace::root().join("examples"), "yaml")? {
        texts.push((path.clone(), read(&path)?));
    }
    for path in files(&workspace::root().join("docs"), "md")? {
        let page = read(&path)?;
        let blocks = page.split("```yaml\n").skip(1);
        let blocks = blocks.filter_map(|rest| rest.split_once("```").map(|(block, _)| block));
        let ours = blocks.filter(|block| {
            let mut lines = block.lines();
            lines.any(|line| {
                let version = line.strip_prefix("apiVersion: ");
                version.is_some_and(|version| GROUPS.iter().any(|group| version.starts_with(group)))
            })
        });
        texts.extend(ours.map(|block| (path.clone(), block.to_owned())));
    }
    let mut tried = 0;
    let mut kinds = BTreeSet::new();
    for (path, text) in texts {
        let objects = objects(cluster, &text).with_context(|| path.clone())?;
        for object in &objects {
            kinds.insert(object["kind"].as_str().unwrap_or_default().to_owned());
        }
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": objects });
        tried += accepted(cluster, &list.to_string())
            .with_context(|| path)?
            .len();
    }
    for kind in ["TCPRoute", "ReferenceGrant", "ServiceEntry"] {
        ensure!(kinds.contains(kind), "no example has a {kind}: {kinds:?}");
    }
    Ok(tried)
}

/// Returns the objects of a text, without fields that only a server writes. Makes their namespaces.
fn objects(cluster: &Cluster, text: &str) -> Result<Vec<Value>> {
    let print = [
        "create",
        "--dry-run=client",
        "--validate=false",
        "--output=json",
        "-f",
        "-",
    ];
    let printed = cluster.kubectl.feed(&print, text)?;
    let mut objects = Vec::new();
    for value in serde_json::Deserializer::from_str(&printed).into_iter() {
        let value: Value = value.context("kubectl printed no JSON")?;
        match value["items"].as_array() {
            Some(items) => objects.extend(items.iter().cloned()),
            None => objects.push(value),
        }
    }
    for object in &mut objects {
        let metadata = object["metadata"].as_object_mut().context("metadata")?;
        for field in ["uid", "resourceVersion", "creationTimestamp", "generation"] {
            metadata.remove(field);
        }
        // The owner does not exist here.
        metadata.remove("ownerReferences");
        if let Some(namespace) = metadata.get("namespace") {
            cluster.kubectl.apply(&json!({
                "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": namespace },
            }))?;
        }
    }
    Ok(objects)
}

/// Serves services, hosts and routes in the form in which agents get them from the API server.
fn served(cluster: &Cluster) -> Result<String> {
    let space = Space::new(cluster, "routes", &json!({}))?;
    for (name, node) in [("web", 0), ("one", 0), ("two", 1), ("outside", 1)] {
        space.servers(name, 1, Some(cluster.nodes[node]))?;
        space.service(name, name, &json!({}))?;
    }
    space.service("http", "web", &json!({}))?;
    let outside = space.pods_addresses("outside")?;
    space.apply(json!({
        "apiVersion": "networking.istio.io/v1",
        "kind": "ServiceEntry",
        "metadata": { "name": "ext" },
        "spec": {
            "hosts": ["ext.example.com"],
            "resolution": "STATIC",
            "ports": [{ "number": 443, "name": "tcp", "protocol": "TCP", "targetPort": TCP }],
            "endpoints": outside.iter().map(|ip| json!({ "address": ip })).collect::<Vec<_>>(),
        },
    }))?;
    let route = |kind: &str, version: &str, parent: &str, backends: Value| {
        json!({
            "apiVersion": format!("gateway.networking.k8s.io/{version}"),
            "kind": kind,
            "metadata": { "name": "split" },
            "spec": {
                "parentRefs": [{ "group": "", "kind": "Service", "name": parent, "port": 80 }],
                "rules": [{ "backendRefs": backends }],
            },
        })
    };
    space.apply(route(
        "TCPRoute",
        "v1",
        "web",
        json!([
            { "name": "one", "port": 80, "weight": 6 },
            { "name": "two", "port": 80, "weight": 3 },
            {
                "group": "networking.istio.io", "kind": "Hostname", "name": "ext.example.com", "port": 443,
                "weight": 1,
            },
        ]),
    ))?;
    // The API server adds defaults to an HTTPRoute without matches. These need no proxy.
    let none = json!([{ "name": "two", "port": 80, "weight": 1 }, { "name": "none", "port": 80, "weight": 0 }]);
    space.apply(route("HTTPRoute", "v1", "http", none))?;
    let names = WEIGHTS.map(|(name, _)| space.pods(name));
    let mut all = BTreeSet::new();
    for names in names {
        all.extend(names?);
    }
    let two = space.pods("two")?;
    let clients = [
        space.client("client", cluster.nodes[0])?,
        From::Node(cluster.nodes[1]),
    ];
    let [web, http] = ["web", "http"].map(|name| space.cluster_ips(name));
    let (web, http) = (web?, at(&http?[0], 80));
    let mut seen = Vec::new();
    for from in &clients {
        for to in &web {
            let to = at(to, 80);
            seen.extend(parts(cluster, from, &to, &all)?);
        }
        eventually(NOTICED, || {
            from.reaches(cluster, "connect --count 20", &http, &two)
        })?;
    }
    for node in &cluster.nodes {
        said(cluster, &space, *node, &web[0])?;
    }
    // Delete the route. Later the kinds are removed, with all objects.
    let own = space.pods("web")?;
    space.kubectl(&["delete", "tcproute", "split"])?;
    for from in &clients {
        let to = at(&web[0], 80);
        eventually(SHORT, || {
            from.reaches(cluster, "connect --count 20", &to, &own)
        })?;
    }
    Ok(format!(
        "a TCPRoute splits {CONNECTS} connections 6:3:1 to within {:.1} %, an HTTPRoute leads elsewhere, from a pod and a \
         node; both were noticed after their kinds had been installed",
        WEIGHTS
            .iter()
            .cycle()
            .zip(&seen)
            .map(|((_, weight), part)| (part - f64::from(*weight) / 10.0).abs() * 100.0)
            .fold(0.0, f64::max)
    ))
}

/// Connects many times, checks that each backend gets its part of the connections, and returns the parts.
fn parts(
    cluster: &Cluster,
    from: &From,
    to: &str,
    all: &BTreeSet<String>,
) -> Result<[f64; WEIGHTS.len()]> {
    eventually(NOTICED, || {
        from.reaches(cluster, "connect --count 200", to, all)
    })?;
    let connect = format!("connect --count {CONNECTS}");
    let report = from.reaches(cluster, &connect, to, all)?;
    let mut seen = [0.0; WEIGHTS.len()];
    for ((name, weight), seen) in WEIGHTS.into_iter().zip(&mut seen) {
        let of = report.endpoints.iter();
        let of = of.filter(|(pod, _)| pod.starts_with(&format!("{name}-")));
        let answers: u64 = of.map(|(_, of)| of.answers).sum();
        let part = f64::from(u32::try_from(answers)?) / f64::from(CONNECTS);
        let wanted = f64::from(weight) / 10.0;
        // Five times the standard deviation of a random choice.
        ensure!(
            (part - wanted).abs() < 0.06,
            "{from:?}: {name} has {part} of the connections to {to}, not {wanted}"
        );
        *seen = part;
    }
    Ok(seen)
}

/// Checks that `status` and `explain` name the routes.
fn said(cluster: &Cluster, space: &Space<'_>, node: Node, web: &str) -> Result<()> {
    let route = format!("HTTPRoute {}/split", space.name);
    let reason = "ResolvedRefs=False (BackendNotFound)";
    eventually(LONG, || {
        agent::says(cluster, node, &[&route, reason]).map(drop)
    })?;
    let to = at(web, 80);
    let told = agent::exec(cluster, node, &format!("explain node {to}"))?;
    let route = format!("TCPRoute {}/split, spec.rules[0]", space.name);
    for words in [&*route, "60.00%", "30.00%", "10.00%"] {
        ensure!(
            told.contains(words),
            "explain does not say {words:?}: {told}"
        );
    }
    Ok(())
}

fn files(directory: &Path, extension: &str) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).with_context(|| directory.display().to_string())? {
        let path = entry?.path();
        if path.extension().is_some_and(|of| of == extension) {
            found.push(path.display().to_string());
        }
    }
    found.sort();
    Ok(found)
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(path).with_context(|| path.to_owned())
}
