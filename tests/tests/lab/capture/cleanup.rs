//! `dataplane cleanup` of a mesh.

use std::fs;

use anyhow::{Context as _, Result, bail, ensure};
use dataplane_tests::Host;
use serde_json::json;

use super::{World, foreign, mesh};
use crate::cluster::{reaches, refused};

scenarios! {
    Dataplane:
    cleanup_leaves_nothing_of_a_mesh,
    cleanup_leaves_other_nodes_namespaces_alone,
}

fn cleanup_leaves_nothing_of_a_mesh() -> Result<()> {
    let mut world = World::new()?;
    let app = world.app().clone();
    let one = world.lab.pod("one").clone();
    world.capture(foreign(), json!({}))?;
    refused(&app, "10.244.1.5:7", "connect")?;
    let agent = world.agent.as_mut().context("an agent")?;
    agent.kill();
    // Its programs stay, and are as strict.
    refused(&app, "10.244.1.5:7", "connect")?;
    refused(&one, "10.244.1.8:7", "connect")?;
    let said = agent.dataplane(["cleanup", "-v"]).run()?;
    ensure!(said.contains("inbound_lookup"), "{said}");
    reaches(&app, "10.244.1.5:7", "connect", &["one"])?;
    reaches(&one, "10.244.1.8:7", "connect", &["app"])?;
    if fs::read_dir(agent.bpffs()).is_ok_and(|mut left| left.next().is_some()) {
        bail!("something is left in {}", agent.bpffs().display());
    }
    Ok(())
}

/// The guard knows every network namespace of the machine, including those of another node's pods.
fn cleanup_leaves_other_nodes_namespaces_alone() -> Result<()> {
    let elsewhere = World::new()?;
    let others = elsewhere.app();
    let rule = "rule add fwmark 0x80003a9e lookup 15006";
    others.ip(rule)?;
    others.ip("route add local default dev lo table 15006")?;
    let mut world = World::new()?;
    let mut config = mesh(json!({}), json!({ "mode": "proxy" }));
    config["guard"] = json!(true);
    world.agent_with(&config, &[])?;
    let rules = |of: &Host| of.command("ip").args(["rule"]).run();
    let ours = rules(world.app())?;
    ensure!(ours.contains("lookup 15006"), "{ours}");
    let agent = world.agent.as_mut().context("an agent")?;
    agent.kill();
    let said = agent.dataplane(["cleanup", "-v"]).run()?;
    ensure!(said.contains("lookup 15006"), "{said}");
    let (ours, theirs) = (rules(world.app())?, rules(others)?);
    ensure!(!ours.contains("lookup 15006"), "{ours}");
    ensure!(theirs.contains("lookup 15006"), "{theirs}\n{said}");
    Ok(())
}
