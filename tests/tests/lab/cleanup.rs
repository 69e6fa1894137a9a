//! `dataplane cleanup`: it lists everything that it removes, and leaves everything else alone.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Agent, AgentBuilder, Host, Lab};
use serde_json::{Value, json};

use crate::{
    cluster::{Cluster, eventually, reaches, refused, serve},
    commands::services,
    manifest::Manifests,
    outcome::run,
};

scenarios! {
    Dataplane:
    a_dry_run_lists_what_is_removed,
    links_on_interfaces_are_listed_once,
}

/// A mesh with one workload.
fn captured(workload: &Host) -> String {
    json!({
        "workloads": [{
            "name": format!("default/{}", workload.name()),
            "addresses": workload.addresses(),
            "rules": { "mode": "proxy" },
        }],
    })
    .to_string()
}

/// Returns the output of a cleanup, line by line.
fn lines(agent: &Agent, arguments: &str) -> Result<BTreeSet<String>> {
    let rows = run(agent, arguments)?.exits(0)?.json()?;
    let rows = rows.as_array().context("an array")?;
    let all: BTreeSet<String> = rows.iter().map(Value::to_string).collect();
    ensure!(all.len() == rows.len(), "some are there twice: {rows:#?}");
    Ok(all)
}

/// The rules and routes of a mesh in a pod.
fn routed(pod: &Host) -> Result<String> {
    let mut found = String::new();
    for family in ["-4", "-6"] {
        for what in ["rule", "route"] {
            let table = ["show", "table", "15006"];
            let list = pod.command("ip").args([family, what]).args(table);
            // If the table does not exist, `ip` fails.
            let output = list.output()?;
            found.push_str(&String::from_utf8_lossy(&output.stdout));
        }
    }
    Ok(found)
}

/// With the hook that this kernel has: TCX or clsact.
fn links_on_interfaces_are_listed_once() -> Result<()> {
    let cluster = Cluster::start(services)?;
    let planned = lines(&cluster.agent, "cleanup --dry-run -o json")?;
    let of_packets = |line: &&String| line.contains("packet_ingress");
    ensure!(planned.iter().any(|line| of_packets(&line)), "{planned:#?}");
    let mut cluster = cluster;
    cluster.agent.kill();
    let removed = lines(&cluster.agent, "cleanup -o json")?;
    ensure!(
        removed == planned,
        "{removed:#?}; not planned: {planned:#?}"
    );
    Ok(())
}

/// On two nodes with a mesh and clsact filters, one of which is cleaned up.
fn a_dry_run_lists_what_is_removed() -> Result<()> {
    let lab = Lab::builder()
        .node("node1")
        .node("node2")
        .pod("node1", "far", "10.244.1.5")
        .pod("node1", "other", "10.244.1.8")
        .pod("node2", "near", "10.244.2.10")
        .pod("node2", "near2", "10.244.2.11")
        .pod("node2", "sleep", "10.244.2.8")
        .build()?;
    let _servers = [serve(lab.pod("far"))?, serve(lab.pod("near"))?];
    let manifests = Manifests::new(&services(&lab))?;
    let start = |node: &str, workload: &str| -> Result<Agent> {
        let mesh = captured(lab.pod(workload));
        let agent: AgentBuilder = lab.agent(node).in_the_nodes_cgroup();
        let agent = agent.manifests(manifests.path());
        Ok(agent
            .args(["--tc-hook", "clsact", "--mesh", &mesh])
            .start()?)
    };
    let _elsewhere = start("node1", "other")?;
    let mut agent = start("node2", "sleep")?;
    let (client, other) = (lab.pod("sleep"), lab.pod("other"));
    for pod in [client, other] {
        eventually(|| {
            let routed = routed(pod)?;
            ensure!(routed.matches("15006").count() >= 2, "{routed}");
            Ok(())
        })?;
    }
    // While it runs, only looking is allowed.
    let planned = lines(&agent, "cleanup --dry-run -o json")?;
    run(&agent, "cleanup")?.exits(3)?;
    agent.kill();
    refused(client, "10.244.1.5:7", "connect")?;
    let before = routed(client)?;
    let all = planned.iter().cloned().collect::<String>();
    for word in [
        "program connect4",
        "program capture6",
        "program inbound_lookup",
        "clsact ingress filter",
        "clsact egress filter",
        "\"clsact qdisc\"",
        "IPv4 rule: fwmark 0x8",
        "IPv6 rule: fwmark 0x8",
        "IPv4 route: local default dev lo table 15006",
        "IPv6 route: local default dev lo table 15006",
        "map CONNTRACK",
        "directory",
    ] {
        ensure!(all.contains(word), "{word:?} is not listed: {planned:#?}");
    }
    ensure!(lines(&agent, "cleanup --dry-run -o json")? == planned);
    ensure!(routed(client)? == before, "a dry run changed something");
    let removed = lines(&agent, "cleanup -o json")?;
    ensure!(
        removed == planned,
        "not removed: {:#?}; not planned: {:#?}",
        planned.difference(&removed),
        removed.difference(&planned)
    );
    ensure!(routed(client)?.is_empty(), "{}", routed(client)?);
    let tc = lab
        .node("node2")
        .command("tc")
        .args(["qdisc", "show"])
        .run()?;
    ensure!(!tc.contains("clsact"), "{tc}");
    ensure!(!agent.bpffs().exists());
    reaches(client, "10.244.1.5:7", "connect", &["far"])?;
    ensure!(lines(&agent, "cleanup -o json")?.is_empty());
    run(&agent, "cleanup --dry-run")?
        .exits(0)?
        .says(&["Nothing"])?;
    // The other node's mesh is its own.
    ensure!(routed(other)?.matches("15006").count() >= 2);
    reaches(other, "10.244.2.10:7", "connect", &["near"]).map(drop)
}
