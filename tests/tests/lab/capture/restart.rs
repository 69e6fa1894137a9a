//! Agents that take each other's place, that end and that are killed, under load.

use std::{fs::File, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::{LAYOUT, Reason};
use dataplane_tests::{
    emulated,
    report::{LoadReport, Report},
};
use serde_json::json;

use super::World;
use crate::cluster::{eventually, reaches, refused};

scenarios! {
    Dataplane:
    agents_take_each_others_place_and_refuse_nobody,
    agents_of_another_layout_too,
    nobody_waits_for_an_agent_that_takes_long,
    an_agent_that_fails_gives_the_place_back,
    a_killed_agent_leaves_no_connection_hanging,
}

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
        app.load(&["--to", "10.244.2.5:7", "--threads", "2"])?,
        app.load(&["--to", "10.96.0.10:80", "--threads", "1"])?,
        one.load(&["--to", "10.244.1.8:7", "--threads", "1"])?,
    ];
    // An agent of another layout begins to count anew.
    let before = match before_layout {
        Some(_) => 0,
        None => world.verdicts(Reason::Captured)?,
    };
    let agent = world.agent.as_mut().context("an agent")?;
    let mut replaced = Vec::new();
    // On an emulated machine one takes most of the time that an agent gives to the connections that it
    // leaves.
    for round in 0..if emulated() { 1 } else { 3 } {
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
    ensure!(
        world.verdicts(Reason::Captured)? > before + 40,
        "captured no more"
    );
    for reason in [Reason::ProxyDown, Reason::ProxyBypassed, Reason::OriginLost] {
        let count = world.verdicts(reason)?;
        ensure!(count == 0, "{count} times {}", reason.word());
    }
    for mut process in kept {
        process.close_stdin();
        process.wait().context("a connection from before")?;
    }
    // With nothing left to relay, those before end.
    for process in replaced {
        process.wait().context("an agent that was replaced")?;
    }
    Ok(())
}

/// One that has taken the place and does not accept yet, here for want of an API that tells it what there is:
/// the one before does, as long as it is there.
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
        ensure!(log.contains("has taken this one's place"), "{log}");
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
    ensure!(log.contains("taking it back"), "{log}");
    reaches(&app, "10.244.1.5:7", "connect --count 20", &["one"])?;
    reaches(&one, "10.244.1.8:7", "connect --count 20", &["app"])?;
    Ok(())
}

/// One that has taken the place and then cannot go on, here because it wants one port twice: the one before
/// comes back, and no connection has noticed.
fn an_agent_that_fails_gives_the_place_back() -> Result<()> {
    let mut world = World::new()?;
    world.capture(json!({}), json!({ "mode": "proxy" }))?;
    let (app, one) = (world.app().clone(), world.lab.pod("one").clone());
    let kept = app.hold("10.244.1.5:7")?;
    let loads = [
        app.load(&["--to", "10.96.0.10:80", "--threads", "1"])?,
        one.load(&["--to", "10.244.1.8:7", "--threads", "1"])?,
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
            log.matches("taking it back").count() == round && agent.id() == process,
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
    // It is an agent like any other: another one can take its place.
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
