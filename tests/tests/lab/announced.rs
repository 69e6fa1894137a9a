//! Pods that are captured and released by their objects in the Kubernetes API: how soon, and what the agent writes on them.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use dataplane_common::Reason;
use dataplane_tests::{
    api::{Cluster as Objects, Resource, objects},
    patience,
};
use serde_json::{Value, json};

use crate::{
    cluster::{counted, eventually, lived, reaches},
    kubernetes::{Site, web},
};

scenarios! {
    Dataplane:
    changes_of_labels_and_ends_of_pods_count_within_a_second,
    captured_pods_carry_the_annotation_and_others_do_not,
}

const MODE: &str = "istio.io/dataplane-mode";
const REDIRECTION: &str = "ambient.istio.io/redirection";

/// A site with the Pod `sleep`, which asks for nothing, and whose agent has not been started.
fn site(mesh: &Value) -> Result<Site> {
    let mesh = mesh.to_string();
    let site = Site::prepare_with(web, |agent| {
        let arguments = ["--on-exit", "detach", "--mesh", &mesh];
        agent.in_the_nodes_cgroup().args(arguments)
    })?;
    let sleep = site.lab.pod("sleep").addresses();
    let cluster = site.server.cluster();
    cluster.apply(objects::pod("sleep", "node2", &sleep));
    Ok(site)
}

/// Changes a field of the Pod `sleep`, and leaves the others as they are.
fn set(cluster: &Objects, field: &str, value: &Value) -> Result<()> {
    let mut pod = cluster
        .get(Resource::Pods, "default", "sleep")
        .context("the Pod")?;
    *pod.pointer_mut(field).context("the field")? = value.clone();
    cluster.apply(pod);
    Ok(())
}

fn label(cluster: &Objects, mode: Option<&str>) -> Result<()> {
    let mut labels = json!({ "app": "sleep" });
    if let Some(mode) = mode {
        labels[MODE] = mode.into();
    }
    set(cluster, "/metadata/labels", &labels)
}

/// Checks how many of three connections of `sleep` are captured.
fn captured(site: &Site, wanted: u64) -> Result<()> {
    let work = || {
        let client = site.lab.pod("sleep");
        reaches(client, "10.244.2.10:7", "connect --count 3", &["near"])
    };
    let (_, counted) = counted(&site.agent, Reason::Captured, work)?;
    ensure!(counted == wanted, "{counted} of 3 were captured");
    Ok(())
}

/// New connections are captured or direct within a second, and existing connections stay what they are.
fn changes_of_labels_and_ends_of_pods_count_within_a_second() -> Result<()> {
    type Change<'a> = &'a dyn Fn(&Objects) -> Result<()>;
    let mut site = site(&json!({ "rules": { "mode": "proxy" } }))?;
    site.agent.start()?;
    let cluster = site.server.cluster().clone();
    let ended =
        |phase: &'static str| move |cluster: &Objects| set(cluster, "/status/phase", &json!(phase));
    let namespace = |cluster: &Objects| {
        cluster.apply(objects::namespace("default", &json!({ MODE: "ambient" })));
        Ok(())
    };
    let no_namespace = |cluster: &Objects| {
        cluster.delete(Resource::Namespaces, "", "default");
        Ok(())
    };
    let deleted = |cluster: &Objects| {
        cluster.delete(Resource::Pods, "default", "sleep");
        Ok(())
    };
    let steps: [(&str, Change<'_>, u64); 9] = [
        ("the Pod's label", &|c| label(c, Some("ambient")), 3),
        ("the Pod's label is gone", &|c| label(c, None), 0),
        ("the Namespace's label", &namespace, 3),
        ("the Pod's label says none", &|c| label(c, Some("none")), 0),
        ("the Pod has no label again", &|c| label(c, None), 3),
        ("the Namespace is gone", &no_namespace, 0),
        ("the Pod's label again", &|c| label(c, Some("ambient")), 3),
        ("the Pod has ended", &ended("Succeeded"), 0),
        ("the Pod is gone", &deleted, 0),
    ];
    captured(&site, 0)?;
    let limit = patience(Duration::from_secs(1));
    let mut held = Vec::new();
    for (what, change, wanted) in steps {
        held.push(site.lab.pod("sleep").hold("10.244.2.10:7")?);
        change(&cluster)?;
        let start = Instant::now();
        loop {
            let asked = start.elapsed();
            match captured(&site, wanted) {
                Ok(()) => break,
                Err(error) if asked > limit => bail!("{what}, after {asked:?}: {error:#}"),
                Err(_) => {}
            }
        }
        println!("{what}: {:?}", start.elapsed());
    }
    for connection in held {
        lived(connection)?;
    }
    Ok(())
}

fn annotation(cluster: &Objects, name: &str) -> Option<String> {
    let pod = cluster.get(Resource::Pods, "default", name)?;
    Some(
        pod["metadata"]["annotations"][REDIRECTION]
            .as_str()?
            .to_owned(),
    )
}

/// Waits until `sleep` carries the annotation, or does not. `near` always carries that of another program.
fn announced(cluster: &Objects, wanted: bool) -> Result<()> {
    eventually(|| {
        let found = annotation(cluster, "sleep");
        ensure!(found.as_deref() == wanted.then_some("enabled"), "{found:?}");
        Ok(())
    })?;
    let of_others = annotation(cluster, "near");
    ensure!(of_others.as_deref() == Some("enabled"), "{of_others:?}");
    Ok(())
}

/// `near2` carries an annotation that an earlier agent left. The API server then refuses to let the agent write, and the agent
/// ends.
fn captured_pods_carry_the_annotation_and_others_do_not() -> Result<()> {
    let mut site = site(&json!({ "rules": { "mode": "proxy" }, "announce": true }))?;
    let cluster = site.server.cluster().clone();
    for (name, manager, operation) in [
        ("near", "istio-cni", "Update"),
        ("near2", "dataplane", "Apply"),
    ] {
        let mut pod = objects::pod(name, "node2", &site.lab.pod(name).addresses());
        let fields = json!({ format!("f:{REDIRECTION}"): {} });
        pod["metadata"]["annotations"] = json!({ REDIRECTION: "enabled" });
        pod["metadata"]["managedFields"] = json!([{
            "manager": manager, "operation": operation, "subresource": "status",
            "fieldsV1": { "f:metadata": { "f:annotations": fields } },
        }]);
        cluster.apply(pod);
    }
    site.agent.start()?;
    eventually(|| {
        let stale = annotation(&cluster, "near2");
        ensure!(stale.is_none(), "{stale:?}");
        Ok(())
    })?;
    announced(&cluster, false)?;
    label(&cluster, Some("ambient"))?;
    announced(&cluster, true)?;
    // Not before.
    captured(&site, 3)?;
    label(&cluster, None)?;
    announced(&cluster, false)?;
    // Released while there is no agent.
    label(&cluster, Some("ambient"))?;
    announced(&cluster, true)?;
    site.agent.kill();
    label(&cluster, None)?;
    site.agent.start()?;
    announced(&cluster, false)?;
    // Without the permission, capture goes on, and the server is not asked again and again.
    let faults = site.server.faults().clone();
    faults.refuse_writes(Some(403));
    let before = faults.asked().iter().filter(|asked| asked.writes).count();
    label(&cluster, Some("ambient"))?;
    eventually(|| captured(&site, 3))?;
    eventually(|| {
        let findings = site.findings()?;
        for word in [
            "does not let the agent write",
            "patch pods/status",
            "mesh.announce",
        ] {
            ensure!(findings.contains(word), "no {word:?}: {findings}");
        }
        Ok(())
    })?;
    thread::sleep(Duration::from_secs(2));
    let asked = faults.asked().iter().filter(|asked| asked.writes).count() - before;
    ensure!(asked < 20, "{asked} requests");
    announced(&cluster, false)?;
    faults.refuse_writes(None);
    announced(&cluster, true)?;
    eventually(|| {
        let findings = site.findings()?;
        ensure!(!findings.contains(REDIRECTION), "{findings}");
        Ok(())
    })?;
    // With `detach`, nothing is captured any more.
    site.agent.stop()?;
    announced(&cluster, false)
}
