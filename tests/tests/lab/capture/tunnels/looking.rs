//! Tunnels as an operator sees them: refused connections, and the dump that `istioctl` reads.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Result, ensure};
use dataplane_tests::Process;
use serde_json::{Value, json};

use super::World;
use crate::cluster::{ask, eventually, reaches};

fn limit() -> Value {
    json!({
        "apiVersion": "security.istio.io/v1",
        "kind": "AuthorizationPolicy",
        "metadata": { "name": "limit", "namespace": "default" },
        "spec": {
            "action": "DENY",
            "rules": [{ "from": [{ "source": { "principals": ["cluster.local/ns/default/sa/app"] } }] }],
        },
    })
}

/// Both sides show the connection: the side that refuses it, with the policy, and the client's side.
pub fn monitor_shows_what_the_proxy_refuses() -> Result<()> {
    let world = World::new(["ca", "ca"])?;
    reaches(world.app(), "10.244.2.5:80", "http", &["far"])?;
    let monitors = world.agents.iter().map(|agent| {
        let arguments = ["monitor", "--hook", "proxy", "-o", "json", "--count", "1"];
        agent.dataplane(arguments).stdout_piped().spawn()
    });
    let mut monitors: Vec<_> = monitors.collect::<Result<_, _>>()?;
    world.write(true, &[limit()])?;
    // Until the policy holds, and both monitors read.
    eventually(|| {
        let report = ask(world.app(), "10.244.2.5:80", "http")?;
        ensure!(report.answered == 0, "in spite of the policy: {report:?}");
        for monitor in &mut monitors {
            ensure!(monitor.try_wait()?.is_some(), "no monitor shows it");
        }
        Ok(())
    })?;
    let lines = monitors.into_iter().map(Process::wait);
    let lines: Vec<String> = lines.collect::<Result<_, _>>()?;
    let [client, server] = [0, 1].map(|of| serde_json::from_str::<Value>(&lines[of]));
    let (client, server) = (client?, server?);
    for (line, workload, direction, peer) in [
        (&client, "default/app", "outbound", None),
        (&server, "default/far", "inbound", Some("app")),
    ] {
        let is_right = line["response_flags"] == "DENY"
            && line["workload"] == workload
            && line["direction"] == direction
            && line["dst"] == "10.244.2.5:80";
        ensure!(is_right, "{line}");
        let peer = peer.map(|peer| json!(format!("spiffe://cluster.local/ns/default/sa/{peer}")));
        ensure!(peer.is_none_or(|peer| line["peer"] == peer), "{line}");
    }
    let policy = "AuthorizationPolicy default/limit";
    ensure!(server["policy"] == policy, "{server}");
    Ok(())
}

fn istioctl() -> Option<PathBuf> {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/judges/istio/istioctl");
    let given = std::env::var_os("ISTIOCTL_BIN").map_or(built, PathBuf::from);
    given.is_file().then_some(given)
}

pub fn istioctl_reads_the_dump() -> Result<()> {
    let world = World::new(["ca", "ca"])?;
    world.write(true, &[limit()])?;
    let agent = &world.agents[0];
    let node = world.lab.node("node1");
    let file = world.state.path().join("dump.json");
    // The certificates come a little later than the Pods.
    eventually(|| {
        let curl = node.command("curl").args(["-sSf", "--unix-socket"]);
        let curl = curl.arg(agent.socket());
        let dump = curl.arg("http://agent/config_dump?format=ztunnel").run()?;
        fs::write(&file, &dump)?;
        let dump: Value = serde_json::from_str(&dump)?;
        let is_whole = dump["workloads"]
            .as_array()
            .is_some_and(|all| all.len() == 3)
            && dump["policies"][0]["name"] == "limit"
            && dump["certificates"][0]["state"] == "Available";
        ensure!(is_whole, "{dump}");
        Ok(())
    })?;
    let Some(program) = istioctl() else {
        println!(
            "skipped the judge of capture::tunnels::istioctl_reads_the_dump: without istioctl (cargo xtask judges istio/istioctl)"
        );
        return Ok(());
    };
    let show = |what: &str| -> Result<Vec<Vec<String>>> {
        let command = node
            .command(&program)
            .args(["ztunnel-config", what, "--file"]);
        let text = command.arg(&file).run()?;
        let lines = text
            .lines()
            .map(|line| line.split_whitespace().map(str::to_owned).collect());
        Ok(lines.collect())
    };
    for (what, wanted) in [
        ("workloads", "default app 10.244.1.8 node1 None HBONE"),
        ("workloads", "default far 10.244.2.5 node2 None HBONE"),
        ("workloads", "default plain 10.244.2.6 node2 None TCP"),
        ("services", "default web 10.96.0.10 None 1/1"),
        ("policies", "default limit Deny Namespace"),
        (
            "certificates",
            "spiffe://cluster.local/ns/default/sa/app Leaf Available true",
        ),
    ] {
        let seen = show(what)?;
        let wanted: Vec<&str> = wanted.split(' ').collect();
        let found = seen.iter().any(|line| {
            // A Pod's addresses are one column.
            let is = |one: &String, other: &str| one.split(',').next() == Some(other);
            let starts = line.iter().zip(&wanted).all(|(one, other)| is(one, other));
            line.len() >= wanted.len() && starts
        });
        ensure!(found, "{what} lacks {wanted:?}: {seen:?}");
    }
    ensure!(!show("all")?.is_empty(), "no line of all");
    Ok(())
}
