//! From the node's boot until the agent has taken over: `dataplane guard`. Nothing here needs a machine that boots: programs, pins,
//! tables, namespaces and `/run` are in memory, so after a boot, also after a hard reset, nothing of them is there, as when these
//! scenarios begin. Only files of a disk are left: the configuration, CNI's results, which name namespaces that are gone, and the
//! agent's registrations if its directory is not in `/run`. In the VM guest these scenarios run on a machine that has just booted.

use std::{
    fs::{self, File},
    io,
    os::fd::AsFd as _,
    path::Path,
};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::{LAYOUT, Reason};
use dataplane_tests::{Agent, Host, Lab, Process, emulated, report::LoadReport};
use kernel::namespaces;
use serde_json::{Value, json};

use super::{World, list, many::number, mesh, pod};
use crate::{
    cluster::{eventually, reaches, refused, serve, verdicts},
    manifest::Manifests,
    outcome::{Outcome, run, run_args},
};

scenarios! {
    Dataplane:
    pods_that_start_before_the_agent_connect_only_through_the_proxy,
    the_guard_joins_the_tables_of_a_killed_agent,
    an_agent_of_another_layout_takes_the_guard_over,
    the_guard_says_when_it_cannot_stand,
}

const SERVER: &str = "10.244.1.254:7";

/// Runs `dataplane guard` with a configuration file.
fn guard(agent: &Agent, config: &Path) -> Result<Outcome> {
    let words = ["guard".as_ref(), "--config".as_ref(), config.as_os_str()];
    run_args(agent, words)
}

/// Whether the directory is there that says that the guard stands.
fn stands(agent: &Agent) -> bool {
    agent.bpffs().join("guard").exists()
}

/// A Pod at an address, as Kubernetes has it.
fn object(name: &str, mode: &str, address: &str) -> Value {
    let mut object = pod(mode, json!({}));
    object["metadata"]["name"] = name.into();
    object["status"]["podIPs"] = json!([{ "ip": address }]);
    object
}

/// Leaves registrations of the CNI plug-in from before the boot, as on a disk: each pod has the network namespace of the next,
/// because the kernel counts namespaces anew.
fn register_before_the_boot(agent: &Agent, pods: &[&Host]) -> Result<()> {
    let next = pods.iter().cycle().skip(1);
    let registered = pods.iter().zip(next).map(|(pod, next)| {
        let netns = File::open(Path::new("/run/netns").join(next.netns()))?;
        let cookie = || namespaces::netns_cookie().map_err(io::Error::other);
        Ok(json!({
            "key": { "container": pod.name(), "interface": "eth0" },
            "namespace": "default",
            "name": pod.name(),
            "uid": null,
            "cookie": namespaces::within(netns.as_fd(), cookie)?,
            "addresses": next.addresses(),
        }))
    });
    let registered: Vec<Value> = registered.collect::<Result<_>>()?;
    let file = agent.socket().with_file_name("pods.json");
    Ok(fs::write(file, json!(registered).to_string())?)
}

/// The order after a boot: the unit's command, then pods whose processes connect all the time, then the agent. No
/// connection of a captured pod reaches the server without the proxy: as many are answered as the programs have captured.
/// `DATAPLANE_BOOT_PODS=100` for another number of pods.
fn pods_that_start_before_the_agent_connect_only_through_the_proxy() -> Result<()> {
    let count = number("DATAPLANE_BOOT_PODS", if emulated() { 20 } else { 100 })?;
    let name = |n: usize| format!("pod{n}");
    let address = |n: usize| format!("10.244.1.{}", n + 1);
    let mut builder = Lab::builder().node("node1");
    for n in 1..=count {
        builder = builder.pod("node1", &name(n), &address(n));
    }
    let lab = builder
        .pod("node1", "free", "10.244.1.253")
        .pod("node1", "server", "10.244.1.254")
        .build()?;
    let _server = serve(lab.pod("server"))?;
    let manifests = Manifests::new(&[])?;
    let state = tempfile::tempdir()?;
    let (pods, config) = (
        state.path().join("pods.yaml"),
        state.path().join("config.yaml"),
    );
    let captured = (1..=count).map(|n| object(&name(n), "ambient", &address(n)));
    let all: Vec<Value> = captured
        .chain([object("free", "none", "10.244.1.253")])
        .collect();
    fs::write(&pods, list(&all).to_string())?;
    let mesh = json!({ "rules": { "mode": "proxy" }, "proxy": { "accessLog": "off" } });
    fs::write(&config, json!({ "mesh": mesh }).to_string())?;
    let mut agent = lab
        .agent("node1")
        .in_the_nodes_cgroup()
        .manifests(manifests.path())
        .manifests(&pods)
        .args(["--config".as_ref(), config.as_os_str()])
        .prepare()?;
    let hosts: Vec<&Host> = (1..=count).map(|n| lab.pod(&name(n))).collect();
    register_before_the_boot(&agent, &hosts)?;

    guard(&agent, &config)?.exits(0)?.says(&["is up"])?;
    guard(&agent, &config)?
        .exits(0)?
        .says(&["was up already"])?;
    run(&agent, "status")?
        .exits(1)?
        .says(&["the guard of `dataplane guard` stands, and no agent"])?;
    run(&agent, "doctor")?.says(&["pods may connect", "no agent runs"])?;
    let start = |name: &str| {
        lab.pod(name)
            .load(&["--to", SERVER, "--pause-us", "100000"])
    };
    let loads: Vec<Process> = (1..=count)
        .map(|n| start(&name(n)))
        .collect::<Result<_, _>>()?;
    let free = start("free")?;
    for who in ["pod1", "free"] {
        refused(lab.pod(who), SERVER, "connect --count 3")?;
        refused(lab.pod(who), "10.244.1.254:53", "udp")?;
    }
    reaches(lab.node("node1"), SERVER, "connect --count 3", &["server"])?;
    ensure!(
        verdicts(&agent, Reason::Guarded)? > 0,
        "nothing was refused"
    );
    ensure!(
        verdicts(&agent, Reason::Captured)? == 0,
        "there is no proxy yet"
    );

    agent.launch()?;
    // As many pods as are ready in time as a rule, and then some.
    for _ in 0..count / 30 {
        if agent.wait_until_ready().is_ok() {
            break;
        }
    }
    agent.wait_until_ready()?;
    let pods = u64::try_from(count)?;
    eventually(|| {
        let captured = verdicts(&agent, Reason::Captured)?;
        ensure!(
            captured > 5 * pods,
            "{captured} connections of {count} pods"
        );
        ensure!(!stands(&agent), "the guard stands: {}", agent.log());
        Ok(())
    })?;
    let log = agent.log();
    ensure!(log.contains("the guard of `dataplane guard` ends"), "{log}");
    let mut answered = 0;
    for (load, n) in loads.into_iter().zip(1..) {
        let report: LoadReport = load.wait_json()?;
        is_held_and_then_served(&report).with_context(|| name(n))?;
        answered += report.answered;
    }
    let captured = verdicts(&agent, Reason::Captured)?;
    ensure!(
        answered == captured,
        "{answered} connections were answered, and {captured} captured"
    );
    let report: LoadReport = free.wait_json()?;
    is_held_and_then_served(&report).context("a pod that is not captured")
}

/// A client was refused first, never otherwise than at `connect()`, and then was served.
fn is_held_and_then_served(report: &LoadReport) -> Result<()> {
    let errors: Vec<&str> = report.errors.keys().map(String::as_str).collect();
    ensure!(
        errors == ["ECONNREFUSED"] && report.answered > 0,
        "{} answered, {:?}",
        report.answered,
        report.errors
    );
    Ok(())
}

/// Writes the configuration of `app`'s capture.
fn configure(world: &World) -> Result<std::path::PathBuf> {
    let config = world.state.path().join("config.yaml");
    let mesh = mesh(json!({}), json!({ "mode": "proxy" }));
    fs::write(&config, json!({ "mesh": mesh }).to_string())?;
    Ok(config)
}

/// Prepares an agent that captures `app`.
fn prepare(world: &World, config: &Path) -> Result<Agent> {
    let agent = world.lab.agent("node1").in_the_nodes_cgroup();
    let agent = agent.manifests(world.manifests.path());
    Ok(agent
        .args(["--config".as_ref(), config.as_os_str()])
        .prepare()?)
}

/// Its workloads keep their rules, and others are refused.
fn the_guard_joins_the_tables_of_a_killed_agent() -> Result<()> {
    let world = World::new()?;
    let config = configure(&world)?;
    let mut agent = prepare(&world, &config)?;
    agent.start()?;
    let (app, one) = (world.app().clone(), world.lab.pod("one").clone());
    guard(&agent, &config)?
        .exits(3)?
        .says(&["no guard is needed"])?;
    ensure!(!stands(&agent), "a guard beside an agent");
    reaches(&app, "10.244.1.6:7", "connect", &["two"])?;
    agent.kill();
    reaches(&one, "10.244.1.6:7", "connect", &["two"])?;
    guard(&agent, &config)?.exits(0)?.says(&["is up"])?;
    let before = verdicts(&agent, Reason::ProxyDown)?;
    refused(&app, "10.244.1.6:7", "connect")?;
    ensure!(verdicts(&agent, Reason::ProxyDown)? == before + 1);
    refused(&one, "10.244.1.6:7", "connect")?;
    // Killed again as soon as it has begun: the guard still stands, or all is served.
    agent.launch()?;
    agent.kill();
    takes_over(&mut agent, [&app, &one])
}

/// Starts the agent, which ends the guard, and serves these pods.
fn takes_over(agent: &mut Agent, pods: [&Host; 2]) -> Result<()> {
    agent.start()?;
    eventually(|| {
        for pod in pods {
            reaches(pod, "10.244.1.6:7", "connect", &["two"])?;
        }
        ensure!(!stands(agent), "{}", agent.log());
        Ok(())
    })
}

fn an_agent_of_another_layout_takes_the_guard_over() -> Result<()> {
    let world = World::new()?;
    let config = configure(&world)?;
    let mut agent = prepare(&world, &config)?;
    guard(&agent, &config)?.exits(0)?;
    agent.change_layout(LAYOUT, LAYOUT - 1)?;
    // This version's guard leaves the other's alone.
    guard(&agent, &config)?
        .exits(1)?
        .says(&["another version"])?;
    let (app, one) = (world.app().clone(), world.lab.pod("one").clone());
    let loads = [&app, &one].map(|pod| pod.load(&["--to", "10.244.1.6:7", "--pause-us", "20000"]));
    takes_over(&mut agent, [&app, &one])?;
    for load in loads {
        is_held_and_then_served(&load?.wait_json()?)?;
    }
    Ok(())
}

fn the_guard_says_when_it_cannot_stand() -> Result<()> {
    let world = World::new()?;
    let config = configure(&world)?;
    let agent = prepare(&world, &config)?;
    let one = world.lab.pod("one").clone();
    run(&agent, "guard")?.exits(1)?.says(&["no `mesh:`"])?;
    ensure!(!stands(&agent), "a guard without a mesh");
    reaches(&one, "10.244.1.6:7", "connect", &["two"])?;
    guard(&agent, &config)?.exits(0)?;
    refused(&one, "10.244.1.6:7", "connect")?;
    run(&agent, "cleanup")?.exits(0)?;
    ensure!(!stands(&agent), "cleanup left the guard");
    reaches(&one, "10.244.1.6:7", "connect", &["two"])?;
    Ok(())
}
