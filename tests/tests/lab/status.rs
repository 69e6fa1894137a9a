//! `dataplane status`: healthy, and the kinds of unhealthy.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use aya::maps::{Array, Map, MapData};
use dataplane_common::{LAYOUT, VIP_ELEMENTS};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::{
    cluster::{Cluster, eventually, reaches},
    commands::services,
    explain::explain,
    outcome::run,
};

scenarios! {
    Dataplane:
    status_asks_the_kernel,
    status_knows_a_dead_agent_from_none,
    a_filter_that_misses_vips_is_seen,
    a_hung_agent_is_named_and_holds_nobody_up,
}

/// `status` asks the kernel each time: the test removes a link behind the agent's back.
fn status_asks_the_kernel() -> Result<()> {
    let mut cluster = Cluster::start(services)?;
    let status = run(&cluster.agent, "status -o json")?.exits(0)?.json()?;
    ensure!(status["healthy"] == true, "{status:#}");
    let attached = |status: &Value, name: &str| {
        let mut programs = status["programs"].as_array().into_iter().flatten();
        programs
            .find(|p| p["name"] == name)
            .map(|p| p["attached"].clone())
    };
    ensure!(
        attached(&status, "connect4") == Some(true.into()),
        "{status:#}"
    );
    run(&cluster.agent, "status")?.says(&["healthy", "connect4", "FRONTENDS", "node2"])?;

    let link = cluster
        .agent
        .bpffs()
        .join(format!("v{LAYOUT}/links/connect4"));
    fs::remove_file(link)?;
    run(&cluster.agent, "status")?
        .exits(1)?
        .says(&["NOT HEALTHY", "connect4", "not attached"])?;
    let status = run(&cluster.agent, "status -o json")?.exits(1)?.json()?;
    ensure!(
        status["healthy"] == false
            && attached(&status, "connect4") == Some(false.into())
            && attached(&status, "connect6") == Some(true.into()),
        "{status:#}"
    );
    // A restart mends it.
    cluster.agent.kill();
    cluster.agent.start()?;
    run(&cluster.agent, "status")?.exits(0)?;
    reaches(
        cluster.client(),
        "10.96.0.14:80",
        "connect --count 5",
        &["near"],
    )
    .map(drop)
}

/// The filter in front of the frontends is cleared: they are not served, and `status` and `explain` say so. A restart
/// mends it.
fn a_filter_that_misses_vips_is_seen() -> Result<()> {
    let mut cluster = Cluster::start(services)?;
    let pin = cluster.agent.bpffs().join(format!("v{LAYOUT}/maps/VIPS"));
    let mut vips = Array::<MapData, [u64; 4]>::try_from(Map::Array(MapData::from_pin(pin)?))?;
    for index in 0..VIP_ELEMENTS {
        vips.set(index, [0; 4], 0)?;
    }
    let to = "10.96.0.14:80";
    run(&cluster.agent, "status")?.exits(1)?.says(&[
        "NOT HEALTHY",
        "filter VIPS",
        "restart the agent",
    ])?;
    let told = explain(&cluster.agent, "10.244.2.8", to)?;
    ensure!(
        told["verdict"] == "left-alone" && told["steps"].to_string().contains("filter is wrong"),
        "{told:#}"
    );
    cluster.agent.kill();
    cluster.agent.start()?;
    run(&cluster.agent, "status")?.exits(0)?;
    reaches(cluster.client(), to, "connect --count 5", &["near"]).map(drop)
}

fn status_knows_a_dead_agent_from_none() -> Result<()> {
    let mut cluster = Cluster::start(services)?;
    cluster.agent.kill();
    run(&cluster.agent, "status")?.exits(1)?.says(&[
        "the agent is not running",
        "the programs serve from the agent's last tables",
    ])?;
    let status = run(&cluster.agent, "status -o json")?.exits(1)?.json()?;
    let programs = status["programs"].as_array().context("programs")?;
    ensure!(
        programs.len() == 9 && programs.iter().all(|p| p["attached"] == true),
        "{status:#}"
    );
    run(&cluster.agent, "cleanup")?.exits(0)?;
    run(&cluster.agent, "status")?.exits(1)?.says(&[
        "none of the programs is attached",
        "services are not served",
    ])?;
    let empty = run(&cluster.agent, "cleanup --dry-run -o json")?.exits(0)?;
    ensure!(empty.json()? == json!([]), "{empty:?}");
    Ok(())
}

/// The agent is stopped, and does not answer: clients do not notice, and commands time out.
fn a_hung_agent_is_named_and_holds_nobody_up() -> Result<()> {
    let cluster = Cluster::start(services)?;
    let agent = &cluster.agent;
    let pid = Pid::from_raw(agent.id().cast_signed());
    kill(pid, Signal::SIGSTOP)?;
    reaches(
        cluster.client(),
        "10.96.0.14:80",
        "connect --count 9",
        &["near"],
    )?;
    let status = run(agent, "status -o json")?.exits(1)?.json()?;
    ensure!(
        status["programs"][0]["attached"] == true,
        "the kernel was not asked: {status:#}"
    );
    let findings = status["findings"].to_string();
    ensure!(findings.contains("no answer within"), "{status:#}");
    let told = explain(agent, "node", "10.96.0.14:80")?;
    ensure!(told["verdict"] == "translated", "{told:#}");
    // It holds the tables, and might wake up any moment.
    run(agent, "cleanup")?.exits(3)?;
    kill(pid, Signal::SIGCONT)?;
    eventually(|| run(agent, "status")?.exits(0).map(drop))?;
    reaches(
        cluster.client(),
        "10.96.0.14:80",
        "connect --count 9",
        &["near"],
    )
    .map(drop)
}
