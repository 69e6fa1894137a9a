//! Captured workloads: labels, annotations, cgroups, and namespaces that wait for the agent.

use std::fs;

use anyhow::{Result, ensure};
use dataplane_common::Reason;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use super::{World, foreign, mesh, pod};
use crate::{
    cluster::{eventually, peer_is, reaches},
    outcome::{cannot_run, run_args},
};

scenarios! {
    Dataplane:
    pods_ask_by_label_and_annotation,
    a_guarded_namespace_waits_for_the_agent,
    processes_of_a_cgroup_are_captured_in_the_nodes_own_namespace,
    pods_that_have_a_proxy_or_the_nodes_network_are_named,
    pods_of_excluded_namespaces_are_left_alone_and_named,
    pods_keep_inbound_connections_from_the_proxy,
}

fn pods_ask_by_label_and_annotation() -> Result<()> {
    let mut world = World::new()?;
    let pods = world.state.path().join("pods.yaml");
    let mut unlabelled = pod("ambient", json!({}));
    unlabelled["metadata"]["labels"] = json!({});
    let namespace = json!({
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": "default",
            "labels": { "istio.io/dataplane-mode": "ambient" },
            "annotations": { "traffic.sidecar.istio.io/includeOutboundPorts": "7",
                "traffic.sidecar.istio.io/includeOutboundIPRanges": "192.0.2.0/24" },
        },
    });
    let all = json!({ "apiVersion": "v1", "kind": "List", "items": [namespace, unlabelled] });
    fs::write(&pods, all.to_string())?;
    let config = json!({ "rules": { "mode": "proxy" } });
    world.agent_with(&config, &[pods])?;
    let app = world.app();
    let (_, counted) = world.counted(Reason::Captured, || {
        reaches(app, "10.244.1.5:7", "connect --count 3", &["one"])
    })?;
    ensure!(counted == 3, "captured {counted} of 3");
    let (_, counted) = world.counted(Reason::ExcludedRange, || {
        reaches(app, "10.244.1.5:80", "http --count 3", &["one"])
    })?;
    ensure!(counted == 3, "excluded {counted} of 3");
    Ok(())
}

fn a_guarded_namespace_waits_for_the_agent() -> Result<()> {
    let mut world = World::new()?;
    let mut config = mesh(foreign(), json!({}));
    config["guard"] = json!(true);
    world.agent_with(&config, &[])?;
    // Known, and no workload.
    let one = world.lab.pod("one");
    reaches(one, "10.244.2.5:7", "connect", &["far"])?;
    // Not looked at: its cookie is new.
    let script = "exec unshare --net \"$0\" connect --to 127.0.0.1:1";
    let probe = world.lab.programs().probe()?;
    let agent = Pid::from_raw(world.agent()?.id().cast_signed());
    let (said, counted) = world.counted(Reason::Guarded, || {
        // It waits for the agent's next look, which may come at any time: not before the namespace has connected.
        kill(agent, Signal::SIGSTOP)?;
        let output = one.command("sh").args(["-c", script]).arg(&probe).output();
        kill(agent, Signal::SIGCONT)?;
        Ok(String::from_utf8_lossy(&output?.stdout).into_owned())
    })?;
    ensure!(
        counted == 1 && said.contains("ECONNREFUSED"),
        "{counted}: {said}"
    );
    Ok(())
}

fn processes_of_a_cgroup_are_captured_in_the_nodes_own_namespace() -> Result<()> {
    let mut world = World::new()?;
    let node = world.lab.node("node1").clone();
    // Relative to the agent's cgroup, which is not the hierarchy's root and not its usual mount point.
    let cgroup = node.cgroup().strip_prefix(world.lab.node_cgroup("node1"))?;
    let cgroup = cgroup.to_owned();
    let config = |proxy: Value, rules: Value| {
        json!({ "proxy": proxy, "workloads": [
            { "name": "node/daemon", "cgroup": cgroup, "rules": rules },
        ]})
    };
    world.agent_with(&config(json!({}), json!({ "mode": "proxy" })), &[])?;
    for (to, name) in [("10.244.1.5:7", "one"), ("10.244.2.5:7", "far")] {
        let (report, counted) = world.counted(Reason::Captured, || {
            reaches(&node, to, "connect --count 5", &[name])
        })?;
        ensure!(counted == 5, "{counted} of 5 were captured");
        peer_is(&report, to)?;
    }
    // Another pod's namespace, in the same place.
    let (_, counted) = world.counted(Reason::Captured, || {
        reaches(world.app(), "10.244.1.5:7", "connect", &["one"])
    })?;
    ensure!(counted == 0, "a pod was captured");
    let told = run_args(
        world.agent()?,
        ["explain", "node/daemon", "10.244.1.5:7", "-o", "json"],
    )?;
    let told = told.exits(0)?.json()?;
    ensure!(told["verdict"] == "captured", "{told:#}");
    // An impossible rule is reported before anything is changed.
    let wrong = config(json!({}), json!({ "excludeInboundPorts": [80] }));
    let said = cannot_run(
        world.agent()?,
        [
            "--manifests",
            &world.manifests.path().to_string_lossy(),
            "--mesh",
            &wrong.to_string(),
        ],
    )?;
    said.exits(64)?.says(&[
        "mesh.workloads[0].rules.excludeInboundPorts",
        "only outbound connections are captured",
    ])?;
    Ok(())
}

/// One has a proxy of its own, by the annotation of the injector; the other has no network namespace of its own.
fn pods_that_have_a_proxy_or_the_nodes_network_are_named() -> Result<()> {
    let mut world = World::new()?;
    let pods = world.state.path().join("pods.yaml");
    let sidecar = pod("ambient", json!({ "sidecar.istio.io/status": "{}" }));
    let mut of_host = pod("ambient", json!({}));
    of_host["metadata"]["name"] = "daemon".into();
    of_host["spec"]["hostNetwork"] = true.into();
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": [sidecar, of_host] });
    fs::write(&pods, list.to_string())?;
    let config = json!({ "rules": { "mode": "proxy" } });
    world.agent_with(&config, &[pods])?;
    let app = world.app().clone();
    let (_, counted) = world.counted(Reason::Captured, || {
        reaches(&app, "10.244.1.5:7", "connect --count 3", &["one"])
    })?;
    ensure!(
        counted == 0,
        "{counted} of a pod with a proxy were captured"
    );
    run_args(world.agent()?, ["status"])?.exits(0)?.says(&[
        "default/app",
        "sidecar.istio.io/status",
        "default/daemon",
        "hostNetwork",
    ])?;
    Ok(())
}

/// A label and the configuration's rules ask for capture in turn. The guard leaves such a pod alone, too.
fn pods_of_excluded_namespaces_are_left_alone_and_named() -> Result<()> {
    let mut world = World::new()?;
    let pods = world.state.path().join("pods.yaml");
    let app = world.app().clone();
    for (by_label, excluded, wanted, says) in [
        (true, json!(["default"]), 0, "default/app: is not captured"),
        (false, json!(["default"]), 0, "to capture default/app"),
        (false, json!([]), 3, ""),
    ] {
        let mut object = pod("ambient", json!({}));
        if !by_label {
            object["metadata"]["labels"] = json!({});
        }
        fs::write(&pods, object.to_string())?;
        let config = json!({
            "rules": { "mode": "proxy", "captured": (!by_label).then_some(true) },
            "excludeNamespaces": excluded,
            "guard": true,
        });
        world.agent_with(&config, std::slice::from_ref(&pods))?;
        let (_, counted) = world.counted(Reason::Captured, || {
            reaches(&app, "10.244.1.5:7", "connect --count 3", &["one"])
        })?;
        ensure!(
            counted == wanted,
            "{excluded}: {counted} of 3 were captured"
        );
        let said = run_args(world.agent()?, ["status"])?;
        let said = said.exits(0)?.says(&[says])?;
        let is_named = said.stdout.contains("mesh.excludeNamespaces");
        ensure!(is_named == (wanted == 0), "{}", said.stdout);
    }
    Ok(())
}

/// By a label of a pod that accepts HBONE connections itself, and by the annotation for all inbound connections.
fn pods_keep_inbound_connections_from_the_proxy() -> Result<()> {
    const TUNNEL: &str = "10.244.1.8:15008";
    const OTHER: &str = "10.244.1.8:7";
    let mut world = World::new()?;
    let (app, one) = (world.app().clone(), world.lab.pod("one").clone());
    let _tunnel = app.serve_as("tunnel", &["--tcp", TUNNEL])?;
    let pods = world.state.path().join("pods.yaml");
    let config = json!({ "rules": { "mode": "proxy" } });
    fs::write(&pods, pod("ambient", json!({})).to_string())?;
    world.agent_with(&config, std::slice::from_ref(&pods))?;
    for (label, bypass, [tunnel, other]) in [
        ("none", "false", [3, 3]),
        ("http", "false", [0, 3]),
        ("none", "true", [0, 0]),
        ("none", "false", [3, 3]),
    ] {
        let mut object = pod(
            "ambient",
            json!({ "ambient.istio.io/bypass-inbound-capture": bypass }),
        );
        object["metadata"]["labels"]["networking.istio.io/tunnel"] = label.into();
        fs::write(&pods, object.to_string())?;
        for (to, name, wanted) in [(TUNNEL, "tunnel", tunnel), (OTHER, "app", other)] {
            eventually(|| {
                let (_, counted) = world.counted(Reason::CapturedInbound, || {
                    reaches(&one, to, "connect --count 3", &[name])
                })?;
                ensure!(
                    counted == wanted,
                    "tunnel {label}, bypass {bypass}, {to}: {counted} of 3 were captured"
                );
                Ok(())
            })?;
        }
    }
    Ok(())
}
