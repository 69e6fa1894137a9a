//! Agents that take each other's place, that end and that are killed, under load.

use std::{
    fs::{self, File},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::{LAYOUT, Reason};
use dataplane_tests::{
    emulated, is_long,
    report::{LoadReport, Report},
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::World;
use crate::{
    cluster::{eventually, reaches, refused},
    manifest::Service,
    outcome::http,
};

scenarios! {
    Dataplane:
    agents_take_each_others_place_and_refuse_nobody,
    agents_of_another_layout_too,
    nobody_waits_for_an_agent_that_takes_long,
    an_agent_that_fails_gives_the_place_back,
    an_idle_agent_takes_its_place_back,
    one_of_several_idle_agents_takes_the_place_back,
    an_ending_agent_accepts_until_its_end,
    a_killed_agent_leaves_no_connection_hanging,
}

/// Between two connections of a client, in microseconds. Without it clients take the time of the agents that they wait
/// for: a round took four times as long.
pub(super) const PAUSE: &str = "3000";

fn agents_take_each_others_place_and_refuse_nobody() -> Result<()> {
    take_places(None)
}

fn agents_of_another_layout_too() -> Result<()> {
    take_places(Some(LAYOUT - 1))
}

fn take_places(before_layout: Option<u32>) -> Result<()> {
    let mut world = World::new()?;
    world.capture(json!({}), json!({ "mode": "proxy" }))?;
    let (app, one) = (world.app().clone(), world.lab.pod("one").clone());
    // Connections that live through all of it, in both directions, each by its own agent's proxy.
    let mut kept = Vec::new();
    for (from, to) in [(&app, "10.244.1.5:7"), (&one, "10.244.1.8:7")] {
        kept.push(from.hold(to)?);
    }
    let loads = [
        app.load(&[
            "--to",
            "10.244.2.5:7",
            "--threads",
            "2",
            "--pause-us",
            PAUSE,
        ])?,
        app.load(&["--to", "10.96.0.10:80", "--pause-us", PAUSE])?,
        one.load(&["--to", "10.244.1.8:7", "--pause-us", PAUSE])?,
    ];
    // An agent of another layout begins to count anew.
    let before = match before_layout {
        Some(_) => 0,
        None => world.verdicts(Reason::Captured)?,
    };
    let agent = world.agent.as_mut().context("an agent")?;
    let mut replaced = Vec::new();
    // On an emulated machine one round takes most of the time that a leaving agent grants its connections.
    let rounds = if emulated() {
        1
    } else if is_long() {
        3
    } else {
        2
    };
    for round in 0..rounds {
        thread::sleep(Duration::from_millis(200));
        let old = agent.id();
        // Another pod's.
        agent.move_to_cgroup(&format!("agent-{round}"))?;
        if let Some(layout) = before_layout {
            agent.change_layout(LAYOUT, layout)?;
        }
        replaced.push(agent.replace()?);
        ensure!(agent.id() != old, "it is the same");
        thread::sleep(Duration::from_millis(200));
    }
    // The last agent's programs count anew, and may begin late on a busy machine.
    eventually(|| {
        let captured = world.verdicts(Reason::Captured)?;
        ensure!(
            captured > before + 40,
            "captured {captured}, {before} before"
        );
        Ok(())
    })?;
    for load in loads {
        let report: LoadReport = load.wait_json()?;
        println!(
            "{} connections through {} restarts",
            report.answered,
            replaced.len()
        );
        ensure!(
            report.errors.is_empty() && report.answered > 20,
            "{} answered from {} to {} ns, and then {:?}\n{}",
            report.answered,
            report.started_at_ns,
            report.ended_at_ns,
            report.failures,
            world.agent.as_ref().context("an agent")?.log()
        );
    }
    for reason in [Reason::ProxyDown, Reason::ProxyBypassed, Reason::OriginLost] {
        let count = world.verdicts(reason)?;
        ensure!(count == 0, "{count} times {}", reason.word());
    }
    for mut process in kept {
        process.close_stdin();
        process.wait().context("a connection from before")?;
    }
    // With nothing left to relay, the earlier agents end.
    for process in replaced {
        process.wait().context("an agent that was replaced")?;
    }
    Ok(())
}

/// An agent that has taken the place and does not accept yet, because its API server does not answer: its predecessor
/// accepts, as long as it is there.
fn nobody_waits_for_an_agent_that_takes_long() -> Result<()> {
    let mut world = World::new()?;
    let rules = json!({ "mode": "proxy" });
    world.capture(json!({}), rules.clone())?;
    let (app, one) = (world.app().clone(), world.lab.pod("one").clone());
    let agent = world.agent()?;
    let config = super::mesh(json!({}), rules).to_string();
    let next = agent.dataplane(["run", "--node-name", "node1", "--replace"]);
    let next = next.args(["--mesh", &config, "--api-server", "http://127.0.0.1:9"]);
    let log = File::create(world.state.path().join("next.log"))?;
    let next = next.stdout(log.try_clone()?).stderr(log).spawn()?;
    eventually(|| {
        let log = agent.log();
        ensure!(log.contains("has taken over"), "{log}");
        Ok(())
    })?;
    let before = world.verdicts(Reason::Captured)?;
    reaches(&app, "10.244.1.5:7", "connect --count 20", &["one"])?;
    reaches(&one, "10.244.1.8:7", "connect --count 20", &["app"])?;
    ensure!(
        world.verdicts(Reason::Captured)? >= before + 20,
        "not captured"
    );
    // Killed, it has not served.
    drop(next);
    world
        .agent
        .as_mut()
        .context("an agent")?
        .wait_until_ready()?;
    let log = world.agent()?.log();
    ensure!(log.contains("taking over again"), "{log}");
    reaches(&app, "10.244.1.5:7", "connect --count 20", &["one"])?;
    reaches(&one, "10.244.1.8:7", "connect --count 20", &["app"])?;
    Ok(())
}

/// An agent that has taken the place and then fails, because its configuration has one port twice: its predecessor
/// takes the place back, and no connection has noticed.
fn an_agent_that_fails_gives_the_place_back() -> Result<()> {
    let mut world = World::new()?;
    world.capture(json!({}), json!({ "mode": "proxy" }))?;
    let (app, one) = (world.app().clone(), world.lab.pod("one").clone());
    let kept = app.hold("10.244.1.5:7")?;
    let loads = [
        app.load(&["--to", "10.96.0.10:80", "--pause-us", PAUSE])?,
        one.load(&["--to", "10.244.1.8:7", "--pause-us", PAUSE])?,
    ];
    let agent = world.agent.as_mut().context("an agent")?;
    let process = agent.id();
    for round in 1..=2 {
        let next = agent.replace_in_vain()?;
        let said = String::from_utf8_lossy(&next.stderr);
        ensure!(!next.status.success() && said.contains("15021"), "{said}");
        agent.wait_until_ready()?;
        let log = agent.log();
        ensure!(
            log.matches("taking over again").count() == round && agent.id() == process,
            "{log}"
        );
    }
    for load in loads {
        let report: LoadReport = load.wait_json()?;
        ensure!(
            report.errors.is_empty() && report.answered > 20,
            "{} answered, then {:?}\n{}",
            report.answered,
            report.failures,
            agent.log()
        );
    }
    // It is an agent like any other: a new agent can take its place.
    let before = agent.replace()?;
    reaches(&app, "10.244.1.5:7", "connect --count 5", &["one"])?;
    let report: Report = kept.wait_json()?;
    ensure!(
        report.errors.is_empty() && report.answered > 20,
        "{:?} of {}",
        report.errors,
        report.attempts
    );
    // With nothing left to relay, it ends.
    before.wait().context("an agent that was replaced")?;
    Ok(())
}

/// The idle agent serves after its successor, with the configuration and the manifests of then. Asked by a successor
/// that ends, it takes over the sockets, so that no client is refused.
fn an_idle_agent_takes_its_place_back() -> Result<()> {
    let mut world = World::new()?;
    let config = world.state.path().join("config.yaml");
    let configure = |metrics: u16| -> Result<()> {
        let mesh = super::mesh(json!({}), json!({ "mode": "proxy" }));
        let listen = json!({ "metrics": format!("0.0.0.0:{metrics}") });
        let text = json!({ "stay": true, "mesh": mesh, "listen": listen });
        Ok(fs::write(&config, text.to_string())?)
    };
    configure(15_020)?;
    let agent = world.lab.agent("node1").in_the_nodes_cgroup();
    let agent = agent.manifests(world.manifests.path());
    world.agent = Some(
        agent
            .args(["--config".as_ref(), config.as_os_str()])
            .start()?,
    );
    let (app, one, far) = (
        world.app().clone(),
        world.lab.pod("one").clone(),
        world.lab.pod("far").clone(),
    );
    let node = world.lab.node("node1").clone();
    for (round, end) in [Signal::SIGTERM, Signal::SIGKILL].into_iter().enumerate() {
        let metrics = 25_020 + u16::try_from(round)?;
        let address = format!("10.96.0.{}", 20 + round);
        let agent = world.agent.as_mut().context("an agent")?;
        // Another pod's.
        agent.move_to_cgroup(&format!("agent-{round}"))?;
        let before = agent.replace()?;
        let loads = [
            app.load(&["--to", "10.96.0.10:80", "--pause-us", PAUSE])?,
            one.load(&["--to", "10.244.1.8:7", "--pause-us", PAUSE])?,
        ];
        configure(metrics)?;
        let successor = agent.return_to(before)?;
        successor.signal(end)?;
        agent.wait_until_ready()?;
        for load in loads {
            let report: LoadReport = load.wait_json()?;
            ensure!(
                (report.errors.is_empty() || end == Signal::SIGKILL) && report.answered > 20,
                "{end}: {} answered, then {:?}\n{}",
                report.answered,
                report.failures,
                agent.log()
            );
        }
        let log = agent.log();
        ensure!(
            log.matches("taking over again").count() == round + 1,
            "{log}"
        );
        drop(successor);
        let (status, body) = http(&one, &format!("http://{}:{metrics}/metrics", node.ipv4()))?;
        ensure!(status == 200, "{status} {body}");
        let web = Service::new("web", &["10.96.0.10"]).port("tcp", 80, 7);
        let new = Service::new("new", &[&address]).port("tcp", 80, 7);
        world
            .manifests
            .write(&[web.endpoints(&[&far]), new.endpoints(&[&one])])?;
        let captured = world.verdicts(Reason::Captured)?;
        eventually(|| reaches(&app, &format!("{address}:80"), "connect", &["one"]).map(drop))?;
        reaches(&app, "10.244.1.5:7", "connect --count 20", &["one"])?;
        reaches(&one, "10.244.1.8:7", "connect --count 20", &["app"])?;
        ensure!(
            world.verdicts(Reason::Captured)? > captured + 20,
            "not captured"
        );
    }
    Ok(())
}

/// Two idle agents: one of them serves when the third is killed, and the other when that one is killed.
fn one_of_several_idle_agents_takes_the_place_back() -> Result<()> {
    let mut world = World::new()?;
    let config = super::mesh(json!({}), json!({ "mode": "proxy" }));
    world.agent_with_args(&config, &[], &["--stay"])?;
    let (app, one) = (world.app().clone(), world.lab.pod("one").clone());
    let agent = world.agent.as_mut().context("an agent")?;
    let mut idle = Vec::new();
    for round in 0..2 {
        agent.move_to_cgroup(&format!("agent-{round}"))?;
        idle.push(agent.replace()?);
    }
    for round in 1..=2 {
        agent.kill();
        eventually(|| {
            let log = agent.log();
            ensure!(log.matches("taking over again").count() == round, "{log}");
            Ok(())
        })?;
        let mut serving = None;
        eventually(|| {
            let status = agent.dataplane(["status", "-o", "json"]).output()?;
            let status: Value = serde_json::from_slice(&status.stdout)?;
            let pid = status["agent"]["version"]["pid"].as_u64();
            serving = idle
                .iter()
                .position(|process| Some(u64::from(process.id())) == pid);
            ensure!(serving.is_some(), "{status:#}");
            Ok(())
        })?;
        let serving = idle.remove(serving.context("one of them")?);
        let killed = agent.return_to(serving);
        ensure!(killed.is_err(), "another one runs");
        agent.wait_until_ready()?;
        for process in &mut idle {
            ensure!(process.try_wait()?.is_none(), "it ended");
        }
        let log = agent.log();
        ensure!(log.matches("taking over again").count() == round, "{log}");
        reaches(&app, "10.244.1.5:7", "connect --count 5", &["one"])?;
        reaches(&one, "10.244.1.8:7", "connect --count 5", &["app"])?;
    }
    Ok(())
}

/// An agent is asked to end while it relays a connection that does not end: no other accepts in its place, so it does.
fn an_ending_agent_accepts_until_its_end() -> Result<()> {
    let mut world = World::new()?;
    world.capture(json!({}), json!({ "mode": "proxy" }))?;
    let (app, one) = (world.app().clone(), world.lab.pod("one").clone());
    let mut held = app.hold("10.244.1.5:7")?;
    let agent = world.agent()?;
    let node = agent.node().clone();
    let pid = agent.id().to_string();
    node.command("kill").args(["-TERM", &pid]).run()?;
    eventually(|| {
        let log = agent.log();
        ensure!(log.contains("ended; the programs go on serving"), "{log}");
        Ok(())
    })?;
    reaches(&app, "10.244.1.5:7", "connect --count 20", &["one"])?;
    reaches(&one, "10.244.1.8:7", "connect --count 20", &["app"])?;
    // With nothing to relay it ends, before its time is up.
    held.close_stdin();
    held.wait().context("a connection from before")?;
    world.agent.as_mut().context("an agent")?.stop()?;
    refused(&app, "10.244.1.5:7", "connect --count 3")?;
    Ok(())
}

/// Killed, and started anew: refused or passed in between, as configured, and at once.
fn a_killed_agent_leaves_no_connection_hanging() -> Result<()> {
    for (rule, passes) in [("refuse", false), ("pass", true)] {
        let mut world = World::new()?;
        let rules = json!({ "mode": "proxy", "withoutProxy": rule });
        world.capture(json!({}), rules)?;
        let (app, one) = (world.app().clone(), world.lab.pod("one").clone());
        let agent = world.agent.as_mut().context("an agent")?;
        agent.kill();
        let both = [(&app, "10.244.1.5:7", "one"), (&one, "10.244.1.8:7", "app")];
        for (from, to, name) in both {
            if passes {
                reaches(from, to, "connect --count 3", &[name])?;
            } else {
                refused(from, to, "connect --count 3")?;
            }
        }
        agent.start()?;
        // The earlier agent's programs serve: connections do not wait for this one's.
        let log = agent.log();
        let listens = log.rfind("captured: the proxy listens");
        ensure!(
            listens.is_some() && listens < log.rfind("adopted the tables"),
            "{log}"
        );
        let before = world.verdicts(Reason::Captured)?;
        for (from, to, name) in both {
            eventually(|| reaches(from, to, "connect --count 3", &[name]).map(drop))?;
        }
        ensure!(
            world.verdicts(Reason::Captured)? >= before + 3,
            "not captured"
        );
    }
    Ok(())
}
