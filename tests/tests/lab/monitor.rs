//! `dataplane monitor`: decisions as they are made.

use anyhow::{Context as _, Result, ensure};
use aya::maps::{Map, MapData, RingBuf};
use dataplane_common::LAYOUT;
use dataplane_tests::{Agent, Lab, Process};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::{
    cluster::{Cluster, TCP, ask, eventually},
    manifest::Service,
    outcome::run,
};

scenarios! {
    Dataplane:
    decisions_are_shown_as_they_are_made,
    filters_let_through_what_was_asked_for,
    one_listens_at_a_time,
    nobody_listens_and_nothing_is_written,
}

fn services(lab: &Lab) -> Vec<Service> {
    let service = |name: &str, vip: &str| Service::new(name, &[vip]).port("tcp", 80, TCP);
    vec![
        service("web", "10.96.0.10").endpoints(&[lab.pod("near")]),
        service("other", "10.96.0.11").endpoints(&[lab.pod("near2")]),
        service("empty", "10.96.0.12"),
    ]
}

/// Clients that connect to each service in turn, and to a port that none has, all the time.
fn load(cluster: &Cluster) -> Result<Process> {
    let to = [
        "10.96.0.10:80",
        "10.96.0.11:80",
        "10.96.0.12:80",
        "10.96.0.10:81",
    ];
    let mut arguments: Vec<&str> = to.iter().flat_map(|to| ["--to", to]).collect();
    arguments.extend(["--pause-us", "1000"]);
    Ok(cluster.client().load(&arguments)?)
}

fn listen(agent: &Agent, arguments: &str) -> Result<Process> {
    let arguments = ["monitor"].into_iter().chain(arguments.split_whitespace());
    Ok(agent.dataplane(arguments).stdout_piped().spawn()?)
}

fn decisions_are_shown_as_they_are_made() -> Result<()> {
    let cluster = Cluster::start(services)?;
    let load = load(&cluster)?;
    let text = listen(&cluster.agent, "-o json --count 40")?.wait()?;
    let lines: Vec<Value> = text
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()?;
    ensure!(lines.len() == 40, "{text}");
    for line in &lines {
        let (reason, service, endpoint) = match line["destination"].as_str().unwrap_or_default() {
            "10.96.0.10:80" => ("translated", "default/web", Some("10.244.2.10:7")),
            "10.96.0.11:80" => ("translated", "default/other", Some("10.244.2.11:7")),
            "10.96.0.12:80" => ("no-endpoints", "default/empty", None),
            _ => ("port-not-served", "default/web", None),
        };
        ensure!(
            line["reason"] == reason
                && line["service"] == service
                && line["endpoint"].as_str() == endpoint
                && line["hook"] == "connect"
                && line["protocol"] == "tcp"
                && line["command"] == "probe"
                && line["pid"] == load.id(),
            "not {reason} of {service} to {endpoint:?} by {}: {line:#}",
            load.id()
        );
    }
    let times: Vec<f64> = lines.iter().filter_map(|l| l["time"].as_f64()).collect();
    ensure!(times.is_sorted() && times.len() == 40, "{times:?}");
    for destination in [
        "10.96.0.10:80",
        "10.96.0.11:80",
        "10.96.0.12:80",
        "10.96.0.10:81",
    ] {
        ensure!(
            lines.iter().any(|l| l["destination"] == destination),
            "nothing of {destination}: {text}"
        );
    }
    // As text, and without an agent, which would know the names.
    let line = listen(&cluster.agent, "--reason translated --count 1")?.wait()?;
    ensure!(
        line.contains(" -> 10.244.2.1") && line.contains(" translated default/"),
        "{line}"
    );
    let mut cluster = cluster;
    cluster.agent.kill();
    let line = listen(&cluster.agent, "--reason translated --count 1")?.wait()?;
    ensure!(
        line.contains(" translated ") && !line.contains("default/"),
        "{line}"
    );
    Ok(())
}

fn filters_let_through_what_was_asked_for() -> Result<()> {
    let mut cluster = Cluster::start(services)?;
    let _load = load(&cluster)?;
    for (filter, field, wanted) in [
        ("--service default/other", "service", &["default/other"][..]),
        ("--reason no-endpoints", "reason", &["no-endpoints"]),
        (
            "--reason no-endpoints --reason port-not-served",
            "reason",
            &["no-endpoints", "port-not-served"],
        ),
        (
            "--service default/web --reason port-not-served",
            "destination",
            &["10.96.0.10:81"],
        ),
    ] {
        let text = listen(&cluster.agent, &format!("-o json --count 12 {filter}"))?.wait()?;
        ensure!(text.lines().count() == 12, "{filter}: {text}");
        for line in text.lines() {
            let line: Value = serde_json::from_str(line)?;
            let value = line[field].as_str().context("a word")?;
            ensure!(wanted.contains(&value), "{filter}: {line:#}");
        }
        for value in wanted {
            ensure!(text.contains(value), "{filter}: nothing of {value}: {text}");
        }
    }
    // Only an agent knows names: without an agent, the command would wait for ever.
    cluster.agent.kill();
    run(&cluster.agent, "monitor --service default/web --count 1")?
        .exits(1)?
        .says(&["no agent listens"])
        .map(drop)
}

fn one_listens_at_a_time() -> Result<()> {
    let cluster = Cluster::start(services)?;
    let _load = load(&cluster)?;
    let mut first = listen(&cluster.agent, "-o json")?;
    first.wait_for_line()?;
    run(&cluster.agent, "monitor --count 1")?
        .exits(1)?
        .says(&["another `dataplane monitor` listens already"])?;
    for _ in 0..10 {
        first.wait_for_line()?;
    }
    first.kill();
    run(&cluster.agent, "monitor --count 1")?.exits(0).map(drop)
}

/// The programs write no event before a command listens, and none after the last one has ended, by any signal.
fn nobody_listens_and_nothing_is_written() -> Result<()> {
    let cluster = Cluster::start(services)?;
    let pin = cluster.agent.bpffs().join(format!("v{LAYOUT}/maps/EVENTS"));
    let mut ring = RingBuf::try_from(Map::RingBuf(MapData::from_pin(pin)?))?;
    let connect = || ask(cluster.client(), "10.96.0.10:80", "connect --count 5").map(drop);
    connect()?;
    ensure!(ring.next().is_none(), "an event before anybody listened");
    for signal in [Signal::SIGINT, Signal::SIGKILL] {
        let load = load(&cluster)?;
        let mut monitor = listen(&cluster.agent, "-o json")?;
        monitor.wait_for_line()?;
        monitor.signal(signal)?;
        drop(load);
        // The programs notice that a listener was killed because it no longer renews its lease.
        eventually(|| {
            while ring.next().is_some() {}
            connect()?;
            ensure!(ring.next().is_none(), "events still, after {signal}");
            Ok(())
        })?;
    }
    Ok(())
}
