//! An agent whose programs are attached to a cgroup without the node's pods, as with a `kernel.cgroup` that is not the
//! node's: `status` reports that, and nothing fails when it is put right.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use dataplane_tests::{
    patience,
    report::{KeepReport, LoadReport},
};

use crate::{
    cluster::{Cluster, TCP, UDP, reaches},
    manifest::Service,
    metrics::Metrics,
    outcome::run,
};

scenarios! {
    Dataplane:
    a_wrong_cgroup_is_named,
    a_cgroup_is_put_right_by_a_restart_and_nothing_fails,
    a_cgroup_is_put_right_by_the_next_agent_and_nothing_fails,
}

/// Clusters' agents look at pods every minute, and first some ten seconds after they began.
const LOOK: Duration = Duration::from_secs(40);

const VIP: &str = "10.96.0.10:80";
const VIP_UDP: &str = "10.96.0.10:53";

/// A cluster whose client is served by its packets, because the agent has another node's cgroup; and the right cgroup.
fn cluster() -> Result<(Cluster, PathBuf)> {
    let lab = Cluster::lab()?;
    let wrong = lab.node_cgroup("node1");
    let wrong = wrong.to_str().context("a path in UTF-8")?.to_owned();
    let right = lab.node_cgroup("node2");
    let services = |lab: &dataplane_tests::Lab| {
        let endpoints = [lab.pod("near"), lab.pod("far")];
        let web = Service::new("web", &["10.96.0.10", "fd00:96::10"]);
        let web = web.port("tcp", 80, TCP).port("udp", 53, UDP);
        vec![web.endpoints(&endpoints)]
    };
    let endpoints = ["far", "near", "near2"];
    let cluster = Cluster::start_in_cgroup(lab, &endpoints, services, wrong.into())?;
    Ok((cluster, right))
}

fn a_wrong_cgroup_is_named() -> Result<()> {
    let (mut cluster, right) = cluster()?;
    let agent = &cluster.agent;
    let limit = Instant::now() + patience(LOOK);
    let finding = loop {
        let status = cluster.status()?;
        let findings = status["findings"].as_array().context("findings")?;
        let named = |text: &&str| text.contains("kernel.cgroup is ");
        let texts = findings.iter().filter_map(|f| f["text"].as_str());
        if let Some(text) = texts.into_iter().find(named) {
            ensure!(status["healthy"] == true, "{status:#}");
            ensure!(status["agent"]["pods"]["outside"] == 2, "{status:#}");
            break text.to_owned();
        }
        ensure!(Instant::now() < limit, "nothing is said: {status:#}");
        std::thread::sleep(Duration::from_millis(200));
    };
    let pod = cluster.lab.pod("near").cgroup().to_owned();
    let pod = pod.to_str().context("a path in UTF-8")?;
    ensure!(
        finding.contains("2 of 3 pods") && finding.contains(pod),
        "{finding} does not name {pod}"
    );
    run(agent, "status")?.says(&["2 in others", "1 whose sockets", "DATAPLANE_CGROUP"])?;
    run(agent, "doctor")?.says(&["pods in the cgroup", "0 pods are in", pod])?;
    let metrics = Metrics::scrape(cluster.lab.node("node2"))?;
    ensure!(metrics.sum("dataplane_pods_outside_cgroup", &[]) > 1.5);
    ensure!(
        agent.log().contains("served by packets only"),
        "{}",
        agent.log()
    );

    cluster.agent.serve_cgroup(right);
    cluster.agent.stop()?;
    cluster.agent.start()?;
    let limit = Instant::now() + patience(LOOK);
    loop {
        let status = cluster.status()?;
        if status["agent"]["pods"]["inside"] == 2 {
            ensure!(status["findings"] == serde_json::json!([]), "{status:#}");
            break;
        }
        ensure!(Instant::now() < limit, "not seen: {status:#}");
        std::thread::sleep(Duration::from_millis(200));
    }
    run(&cluster.agent, "doctor")?.says(&["2 pods are in"])?;
    let metrics = Metrics::scrape(cluster.lab.node("node2"))?;
    ensure!(metrics.sum("dataplane_pods_outside_cgroup", &[]) < 0.5);
    Ok(())
}

fn a_cgroup_is_put_right_by_a_restart_and_nothing_fails() -> Result<()> {
    put_right(|agent| {
        agent.stop()?;
        Ok(agent.start()?)
    })
}

fn a_cgroup_is_put_right_by_the_next_agent_and_nothing_fails() -> Result<()> {
    put_right(|agent| {
        let before = agent.replace()?;
        before.wait()?;
        Ok(())
    })
}

/// A client with few ports has connections that the packet path translates. From then on the socket programs translate,
/// and take the same ports to the same endpoints.
fn put_right(restart: impl FnOnce(&mut dataplane_tests::Agent) -> Result<()>) -> Result<()> {
    const HELD: u64 = 120;
    let (mut cluster, right) = cluster()?;
    let client = cluster.client().clone();
    client.sysctl("ipv4/ip_local_port_range", "40000 40399")?;
    let keep = client
        .probe("keep")
        .args(["--to", VIP, "--count", &HELD.to_string()]);
    let mut held = keep.stdin_piped().stdout_piped().spawn()?;
    let alive = |line: String| -> Result<()> {
        let report: KeepReport = serde_json::from_str(&line)?;
        ensure!(
            report.alive == HELD && report.errors.is_empty(),
            "{report:?}"
        );
        Ok(())
    };
    alive(held.wait_for_line()?)?;
    // Some that are closed, or reset, before.
    reaches(&client, VIP, "connect --count 40", &["far", "near"])?;
    let by_packets = cluster.verdicts(Reason::Translated)?;
    ensure!(by_packets >= HELD, "{by_packets} by packets");

    reaches(&client, VIP_UDP, "udp --count 150", &["far", "near"])?;

    // Clients connect all the time, also while the programs move.
    let load = client.load(&["--to", VIP, "--threads", "2", "--pause-us", "2000"])?;
    cluster.agent.serve_cgroup(right);
    restart(&mut cluster.agent)?;
    let report = reaches(&client, VIP, "connect --count 600 --each", &["far", "near"])?;
    // By sockets now.
    ensure!(
        report
            .each
            .iter()
            .all(|attempt| attempt.peer == VIP.parse().ok()),
        "{report:?}"
    );
    reaches(&client, VIP_UDP, "udp --count 300", &["far", "near"])?;
    reaches(
        &client,
        VIP_UDP,
        "udp --count 300 --unconnected",
        &["far", "near"],
    )?;
    let load: LoadReport = load.wait_json()?;
    ensure!(load.errors.is_empty() && load.answered > 100, "{load:?}");
    ensure!(cluster.verdicts(Reason::PortTaken)? == 0);

    // Connections from a taken port got another, or the test tried nothing; and none got a port of another connection.
    let flows: serde_json::Value = cluster
        .agent
        .dataplane(["conntrack", "list", "-o", "json"])
        .json()?;
    let flows = flows.as_array().context("an array")?;
    let direct = flows.iter().filter(|flow| flow["vip"] == flow["endpoint"]);
    let direct = direct.count();
    println!("{direct} connections were given another port");
    ensure!(direct > 20, "{flows:#?}");
    held.send_line("")?;
    alive(held.wait_for_line()?)?;

    // Others that live at the same time, from the same ports.
    let keep = client
        .probe("keep")
        .args(["--to", VIP, "--count", &HELD.to_string()]);
    let mut others = keep.stdin_piped().stdout_piped().spawn()?;
    alive(others.wait_for_line()?)?;
    for held in [&mut others, &mut held] {
        held.send_line("")?;
        alive(held.wait_for_line()?)?;
    }
    let established = ["conntrack", "list", "-o", "json", "--state", "established"];
    let flows: serde_json::Value = cluster.agent.dataplane(established).json()?;
    let flows = flows.as_array().context("an array")?.iter();
    let direct = flows.filter(|flow| flow["vip"] == flow["endpoint"]).count();
    ensure!(direct > 10, "only {direct} of them have another port");
    Ok(())
}
