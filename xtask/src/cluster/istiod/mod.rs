//! Compares the plan with Istio's own control plane. istiod and the dataplane read the same objects of one API server,
//! and istiod's messages to a ztunnel are compared with `dataplane plan` and `dataplane dns query`. Its messages about
//! policies must be those with which the tests compare decisions. Its authority certifies keys of the agent's client. Then an
//! agent runs beside istiod, which gives new hosts addresses.

mod authority;
mod compare;
mod known;
mod live;
mod objects;
mod ours;
mod policies;
mod theirs;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use super::{
    Cluster, built,
    control::{self, Part},
    down, identity,
    kubectl::eventually,
    network, place,
    programs::{JUDGES, Programs},
    remove_when_interrupted, up_already,
};
use crate::{
    command::{on_path, output},
    judges,
    progress::note,
    workspace,
};

/// The node for which both sides decide, and its region and zone (`objects.txt`).
const NODE: &str = "n1";
const REGION: &str = "r1";
const ZONE: &str = "z1";
/// The objects that both sides read.
const KINDS: &str = "namespaces,nodes,pods,services,endpointslices,serviceentries,workloadentries";
/// Files of Istio's modules with the definitions of resources.
const DEFINITIONS: [(&str, &str); 3] = [
    (
        "istio.io/api",
        "kubernetes/customresourcedefinitions.gen.yaml",
    ),
    (
        "sigs.k8s.io/gateway-api",
        "config/crd/standard/gateway.networking.k8s.io_gatewayclasses.yaml",
    ),
    (
        "sigs.k8s.io/gateway-api",
        "config/crd/standard/gateway.networking.k8s.io_gateways.yaml",
    ),
];

pub fn main(no_install: bool) -> Result<ExitCode> {
    let istio = judges::directory("istio");
    let kubernetes = Programs::directory().unwrap_or_else(|| judges::directory(JUDGES));
    let there = |program: &&str| {
        on_path(program).is_some()
            || istio.join(program).is_file()
            || kubernetes.join(program).is_file()
    };
    let mut missing = vec![
        "etcd",
        "go",
        "kube-apiserver",
        "kube-controller-manager",
        "kubectl",
        "pilot-discovery",
        "workloads",
    ];
    missing.retain(|program| !there(program));
    if !missing.is_empty() {
        println!(
            "skipped istiod: missing {}. `cargo xtask judges istio {JUDGES}` builds the programs of Istio and Kubernetes \
             with Go; etcd comes from the distribution: apt-get install etcd-server",
            missing.join(", ")
        );
        return Ok(ExitCode::SUCCESS);
    }
    if up_already() {
        bail!("a cluster is there: `cargo xtask cluster down` removes it");
    }
    let (dataplane, probe) = built(no_install)?;
    let programs = Programs {
        kubernetes,
        cni: PathBuf::new(),
    };
    down()?;
    remove_when_interrupted()?;
    // The cluster is removed when this value is dropped, also after an error.
    let cluster = Cluster::new(&programs, 0, dataplane, probe);
    let kept = workspace::target().join("cluster/istiod");
    fs::create_dir_all(&kept).with_context(|| format!("cannot make {}", kept.display()))?;
    let result = run(&cluster, &kept);
    // Best effort: a part that has not started has no log.
    let _ = fs::copy(identity::file("istiod.log"), kept.join("istiod.log"));
    note(&format!(
        "the objects, both sides and the log are in {}",
        kept.display()
    ));
    result
}

fn run(cluster: &Cluster, kept: &Path) -> Result<ExitCode> {
    let started = Instant::now();
    let kubectl = &cluster.kubectl;
    fs::create_dir_all(place::control_directory())
        .context("cannot make the cluster's directory")?;
    identity::make(&[])?;
    network::make(&[])?;
    control::start_without_nodes(&cluster.programs, kubectl)?;
    note("the API server answers; applying objects");
    let apply = ["apply", "--server-side", "--force-conflicts", "-f"];
    for (module, file) in DEFINITIONS {
        let path = judges::module_directory("istio", module)?.join(file);
        kubectl.run(&[&apply[..], &[path.to_str().context("a path in UTF-8")?]].concat())?;
    }
    let made = objects::all()?;
    let apply_some = |which: &dyn Fn(&Value) -> bool, more: &[&str]| {
        let items: Vec<&Value> = made.iter().filter(|object| which(object)).collect();
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": items });
        kubectl.feed(&[&apply[..], &["-"], more].concat(), &list.to_string())
    };
    apply_some(&|object| object["kind"] == "Namespace", &[])?;
    let is_younger = |object: &Value| object["metadata"]["name"] == "twice-younger";
    // At first the definitions are not served yet, and the namespaces have no service accounts.
    eventually(Duration::from_mins(1), || {
        apply_some(&|object| !is_younger(object), &[])
    })?;
    apply_some(
        &|object| !object["status"].is_null(),
        &["--subresource=status"],
    )?;
    // The older of two entries has priority, and the age of objects has a precision of seconds.
    thread::sleep(Duration::from_secs(2));
    apply_some(&is_younger, &[])?;
    Part::Istiod.start(&cluster.programs)?;
    let objects = settled(cluster)?;
    let file = kept.join("objects.yaml");
    // JSON is valid YAML.
    fs::write(&file, objects.to_string())?;
    let mut counts = BTreeMap::<String, usize>::new();
    for object in &made {
        *counts.entry(text(&object["kind"])).or_default() += 1;
    }
    note(&format!(
        "{} objects, settled after {} s: {counts:?}",
        made.len(),
        started.elapsed().as_secs()
    ));

    let workloads = judges::directory("istio").join("workloads");
    let told = output(&mut place::in_netns(place::CONTROL, workloads))?;
    fs::write(kept.join("istiod.jsonl"), &told)?;
    let told = theirs::Messages::read(&told)?;
    let [services, workloads, policies] =
        ["service", "workload", "authorization"].map(|kind| told.all(kind).count());
    note(&format!(
        "istiod tells of {services} services, {workloads} workloads, {policies} authorizations"
    ));
    let (ours, problems) = ours::read(&cluster.dataplane, &objects, &file)?;
    fs::write(kept.join("problems.txt"), problems.join("\n"))?;
    let (report, well) = compare::judge(&told.meaning(&objects)?, &ours);
    anstream::print!("{report}");
    fs::write(kept.join("report.txt"), report)?;
    let well = policies::judge(cluster, kept)? && well;
    authority::judge(cluster)?;
    live::keep_addresses(cluster, kept)?;
    Ok(if well {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Waits until the controllers and istiod have changed no object for some seconds, and returns the objects.
fn settled(cluster: &Cluster) -> Result<Value> {
    let limit = Instant::now() + Duration::from_mins(3);
    let (mut last, mut since) = (Value::Null, Instant::now());
    while Instant::now() < limit {
        thread::sleep(Duration::from_secs(1));
        if !Part::Istiod.runs() {
            bail!("istiod has ended; see target/cluster/istiod/istiod.log");
        }
        let objects = cluster.kubectl.get(&[KINDS, "--all-namespaces"])?;
        let given = |object: &Value| {
            object["kind"] == "ServiceEntry" && !object["status"]["addresses"].is_null()
        };
        if objects != last || !list(&objects["items"]).any(given) {
            (last, since) = (objects, Instant::now());
        } else if since.elapsed() > Duration::from_secs(8) {
            return Ok(last);
        }
    }
    bail!("the objects still change after three minutes, or istiod gives hosts no addresses")
}

/// Returns the items of a list; none if the value is no list.
fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Returns a string; empty if the value is no string.
fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Returns the hosts of a Service or ServiceEntry, as `NAMESPACE/HOST`.
fn hosts(object: &Value) -> Vec<String> {
    let [namespace, name] = ["namespace", "name"].map(|field| text(&object["metadata"][field]));
    match object["kind"].as_str() {
        Some("Service") => vec![format!("{namespace}/{name}.{namespace}.svc.cluster.local")],
        Some("ServiceEntry") => list(&object["spec"]["hosts"])
            .map(|host| format!("{namespace}/{}", text(host)))
            .collect(),
        _ => Vec::new(),
    }
}
