//! A mesh with the agent's proxy, as shipped: kubelet probes of captured pods, and upgrades.

use std::{thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::{
    agents::{self, Restart},
    deploy::{Busy, CONNECT},
    load::Load,
    pods::From,
};
use crate::cluster::{
    Cluster,
    agent::{self, Wanted},
    images,
    place::Node,
};

pub fn captured_pods(cluster: &Cluster) -> Result<String> {
    let mesh = json!({ "mesh": { "rules": { "mode": "proxy" } } });
    let wanted = |surge, tag| Wanted {
        tag: images::TAGS[tag],
        config: mesh.clone(),
        surge,
        ..Wanted::default()
    };
    agent::deploy(cluster, &wanted(false, 0))?;
    let outcome = captured(cluster, &wanted);
    // Return to the base without a mesh, and remove the role that reads namespaces.
    agent::deploy(cluster, &Wanted::default())?;
    cluster.kubectl.run(&[
        "delete",
        "--ignore-not-found",
        "clusterrole,clusterrolebinding",
        "dataplane-mesh",
    ])?;
    outcome
}

fn captured(cluster: &Cluster, wanted: &impl Fn(bool, usize) -> Wanted) -> Result<String> {
    let busy = Busy::new(
        cluster,
        "mesh",
        &json!({ "istio.io/dataplane-mode": "ambient" }),
    )?;
    let space = &busy.space;
    // Connections go through the agent's proxy, not only through the kernel.
    let relayed = || -> Result<f64> {
        let mut sum = 0.0;
        for node in &cluster.nodes {
            let metrics = agent::metrics(*node)?;
            sum += agent::sum(&metrics, "istio_tcp_connections_opened_total", None);
        }
        Ok(sum)
    };
    let (from, to) = &busy.clients[0];
    let before = relayed()?;
    from.reaches(cluster, CONNECT, to, &busy.web)?;
    let by_proxy = relayed()? - before;
    ensure!(
        by_proxy >= 30.0,
        "the proxy relayed {by_proxy} connections of 30 or more"
    );

    // Kubelet probes: pods are ready at every look.
    let ready = |limit: u64| -> Result<()> {
        for _ in 0..limit {
            let pods = cluster
                .kubectl
                .list(&["-n", &space.name, "pods", "-l", "app=web"])?;
            for pod in &pods {
                let container = &pod["status"]["containerStatuses"][0];
                ensure!(
                    container["ready"] == true,
                    "a captured pod is not ready: {}",
                    pod["status"]
                );
            }
            thread::sleep(Duration::from_secs(1));
        }
        Ok(())
    };
    ready(20)?;
    let mut seen = vec![format!(
        "{by_proxy} of 30 connections and their other ends by the proxy, pods ready for 20 s"
    )];

    let other = space.client("other", cluster.nodes[1])?;
    let clients = [(cluster.nodes[0], from), (cluster.nodes[1], &other)];
    other.reaches(cluster, CONNECT, to, &busy.web)?;
    for surge in [false, true] {
        if surge {
            seen.push(to_surge(cluster, &clients, to, &wanted(true, 0))?);
        } else {
            agent::deploy(cluster, &wanted(false, 0))?;
        }
        let start = |(_, from): &(Node, &From)| Load::start_each(cluster, from, to);
        let loads = clients.iter().map(start).collect::<Result<Vec<_>>>()?;
        thread::sleep(Duration::from_secs(2));
        let ((), lifetimes) = agents::watch(&cluster.nodes, || {
            agent::deploy(cluster, &wanted(surge, 1))?;
            thread::sleep(Duration::from_secs(3));
            Ok(())
        })?;
        let (mut total, mut failed, mut details) = (0, 0, Vec::new());
        for ((node, _), load) in clients.iter().zip(loads) {
            let report = load.report()?;
            let errors: u64 = report.errors.values().sum();
            total += report.answered + errors;
            failed += errors;
            if surge {
                details.extend(report.failures.first().map(|first| format!("{first:?}")));
                continue;
            }
            // Without surge, the proxy ends with its agent.
            let lifetimes = lifetimes.get(&node.name()).map(Vec::as_slice);
            let restart = Restart::of(lifetimes.unwrap_or_default(), &report)
                .with_context(|| format!("node {}, {lifetimes:?}", node.name()))?;
            ensure!(
                restart.until_first < Duration::from_secs(1) || dataplane_tests::emulated(),
                "node {}: {restart}",
                node.name()
            );
            details.push(format!("{}: {restart}", node.name()));
        }
        let details = details.join("; ");
        ensure!(
            !surge || failed == 0,
            "{failed} of {total} captured connections failed at an upgrade with surge: {details}"
        );
        let with = if surge { "with" } else { "without" };
        seen.push(format!(
            "upgrade {with} surge: {failed} of {total} captured connections failed {details}"
        ));
        ready(3)?;
    }
    Ok(seen.join("; "))
}

/// Changes from the default strategy to the component `surge`, while clients connect all the time. The old agent runs
/// without `--stay`: it ends when the new agent has taken over, and the kubelet restarts it. The new agent must
/// continue to serve.
fn to_surge(
    cluster: &Cluster,
    clients: &[(Node, &From)],
    to: &str,
    wanted: &Wanted,
) -> Result<String> {
    let loads = clients
        .iter()
        .map(|(_, from)| Load::start(cluster, from, to))
        .collect::<Result<Vec<_>>>()?;
    thread::sleep(Duration::from_secs(2));
    agent::deploy(cluster, wanted)?;
    thread::sleep(Duration::from_secs(3));
    let mut answered = 0;
    for load in loads {
        answered += load
            .none_failed()
            .context("while the strategy was changed to surge")?;
    }
    Ok(format!(
        "strategy changed to surge: none of {answered} captured connections failed"
    ))
}
