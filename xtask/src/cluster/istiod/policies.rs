//! Asks istiod for its answers about policies. A test of the room `source` compares the decisions with these answers, which
//! are in a file; here, istiod must give the answers again.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::{NODE, list, text, theirs::Messages};
use crate::{
    cluster::{Cluster, kubectl::eventually, place},
    command::output,
    judges,
    progress::note,
    workspace,
};

/// The policies and istiod's answers; the test explains the form.
const FILE: &str = "dataplane-user/source/tests/source/authorization/istiod.jsonl";
const ROOT: &str = "istio-system";
const KINDS: &str = "authorizationpolicies,peerauthentications";
/// Time for which istiod may read policies.
const SETTLES: Duration = Duration::from_secs(2);
/// Time after which an answer that differs from the file's is istiod's last word.
const LIMIT: Duration = Duration::from_secs(15);

/// Asks for all answers. Returns whether they are the file's. Deletes the policies that were there.
pub fn judge(cluster: &Cluster, kept: &Path) -> Result<bool> {
    let path = workspace::root().join(FILE);
    let lines = fs::read_to_string(&path);
    let lines = lines.with_context(|| format!("cannot read {}", path.display()))?;
    let cases = lines.lines().map(serde_json::from_str);
    let cases: Vec<Value> = cases.collect::<serde_json::Result<_>>()?;
    delete(cluster)?;
    make_workloads(cluster, &cases)?;
    let (mut report, mut file) = (String::new(), String::new());
    let (mut rounds, mut policies, mut wrong) = (0, 0, 0);
    for round in cases.chunk_by(|_, next| next["namespace"] != ROOT) {
        let answered = answers(cluster, round)?;
        for (case, answered) in round.iter().zip(answered) {
            policies += list(&case["objects"]).count();
            if *case != answered {
                wrong += 1;
                let _ = writeln!(report, "the file: {case}\nistiod:   {answered}");
            }
            let _ = writeln!(file, "{answered}");
        }
        rounds += 1;
        delete(cluster)?;
    }
    let _ = writeln!(
        report,
        "{policies} policies in {rounds} rounds: istiod's answers differ from the file's for {wrong} namespaces of {}",
        cases.len()
    );
    anstream::print!("{report}");
    fs::write(kept.join("istiod.jsonl"), file)?;
    if wrong > 0 {
        note(&format!(
            "if istiod is right, replace {FILE} by {}, and run the tests of dataplane-source",
            kept.join("istiod.jsonl").display()
        ));
    }
    Ok(wrong == 0)
}

fn delete(cluster: &Cluster) -> Result<()> {
    let all = ["delete", KINDS, "--all", "--all-namespaces"];
    cluster.kubectl.run(&all).map(drop)
}

/// Makes the namespaces, and a Pod for each workload.
fn make_workloads(cluster: &Cluster, cases: &[Value]) -> Result<()> {
    let made = |items: Vec<Value>| json!({ "apiVersion": "v1", "kind": "List", "items": items });
    let namespaces: BTreeSet<String> = cases.iter().map(|case| text(&case["namespace"])).collect();
    let namespaces = namespaces.iter().map(
        |name| json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } }),
    );
    cluster.kubectl.apply(&made(namespaces.collect()))?;
    let workloads: BTreeSet<(String, &String)> = cases.iter().flat_map(workloads).collect();
    let mut pods = Vec::new();
    for (at, (namespace, labels)) in workloads.iter().enumerate() {
        let address = format!("10.243.{}.{}", at / 200, at % 200 + 10);
        pods.push(json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": pod(labels), "namespace": namespace, "labels": labels_of(labels),
            },
            "spec": { "nodeName": NODE, "containers": [{ "name": "main", "image": "none" }] },
            "status": {
                "phase": "Running", "podIP": address, "podIPs": [{ "ip": address }],
                "conditions": [{ "type": "Ready", "status": "True" }],
            },
        }));
    }
    let pods = made(pods);
    // The namespaces get their service accounts some time after they are made.
    eventually(Duration::from_mins(2), || cluster.kubectl.apply(&pods))?;
    let status = [
        "apply",
        "--server-side",
        "--force-conflicts",
        "-f",
        "-",
        "--subresource=status",
    ];
    cluster.kubectl.feed(&status, &pods.to_string()).map(drop)
}

/// Returns the workloads of a case: the namespace, and the labels as the file has them.
fn workloads(case: &Value) -> impl Iterator<Item = (String, &String)> {
    let all = case["workloads"].as_object().into_iter().flatten();
    all.map(|(labels, _)| (text(&case["namespace"]), labels))
}

fn labels_of(labels: &str) -> BTreeMap<&str, &str> {
    labels
        .split(',')
        .filter_map(|label| label.split_once('='))
        .collect()
}

/// Returns the name of the Pod with these labels.
fn pod(labels: &str) -> String {
    let name = labels.replace(['=', ','], "-");
    format!("pod-{name}").trim_end_matches('-').to_owned()
}

/// Makes the policies of a round, and returns its lines with the answers that istiod gives.
fn answers(cluster: &Cluster, round: &[Value]) -> Result<Vec<Value>> {
    let mut by_age = BTreeMap::<String, Vec<Value>>::new();
    for case in round {
        for object in list(&case["objects"]) {
            let mut object = object.clone();
            object["apiVersion"] = "security.istio.io/v1".into();
            let metadata = object["metadata"].as_object_mut().context("metadata")?;
            metadata.insert("namespace".into(), case["namespace"].clone());
            let age = metadata.remove("creationTimestamp").unwrap_or_default();
            by_age.entry(text(&age)).or_default().push(object);
        }
    }
    for (at, items) in by_age.values().enumerate() {
        // The age of objects has a precision of seconds.
        thread::sleep(Duration::from_millis(if at > 0 { 1100 } else { 0 }));
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": items });
        cluster.kubectl.apply(&list)?;
    }
    thread::sleep(SETTLES);
    let limit = Instant::now() + LIMIT;
    loop {
        let workloads = judges::directory("istio").join("workloads");
        let told = output(place::in_netns(place::CONTROL, workloads).args(["-quiet", "1s"]))?;
        let told = Messages::read(&told)?;
        let answered: Vec<Value> = round.iter().map(|case| answer(case, &told)).collect();
        if answered == round || Instant::now() > limit {
            return Ok(answered);
        }
    }
}

/// Returns a line with the answers of istiod's messages.
fn answer(case: &Value, told: &Messages) -> Value {
    let namespace = &case["namespace"];
    let mut answered = case.clone();
    for (_, labels) in workloads(case) {
        let is_it = |of: &&Value| of["namespace"] == *namespace && of["name"] == pod(labels);
        let names = told.all("workload").find(is_it);
        let names = names.map(|of| list(&of["authorizationPolicies"]).collect::<Vec<_>>());
        answered["workloads"][labels] = json!(names);
    }
    let mut authorizations: Vec<&Value> = told.all("authorization").collect();
    authorizations.retain(|of| of["namespace"] == *namespace);
    authorizations.sort_by_key(|of| text(&of["name"]));
    answered["authorizations"] = json!(authorizations);
    answered
}
