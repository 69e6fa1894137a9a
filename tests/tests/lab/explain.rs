//! `dataplane explain`: its output for a connection, and the client's result.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Agent, Host, Lab};
use serde_json::Value;

use crate::{
    cluster::{Cluster, ask, reaches},
    commands::services,
    outcome::{run, run_args},
};

scenarios! {
    Dataplane:
    explain_says_what_clients_then_see,
}

/// Returns the output of `explain` for a connection.
pub fn explain(agent: &Agent, source: &str, to: &str) -> Result<Value> {
    let arguments = ["explain", source, to, "-o", "json"];
    run_args(agent, arguments)?.exits(0)?.json()
}

/// Returns the reason that `explain` prints for a packet that arrives at an interface of the node. `length`: in bytes; 0:
/// the headers' length.
pub fn packet_reason(
    agent: &Agent,
    iface: &str,
    from: SocketAddr,
    to: &str,
    length: usize,
) -> Result<String> {
    let (from, length) = (from.to_string(), length.to_string());
    let arguments = [
        "explain", "--iface", iface, "--length", &length, &from, to, "-o", "json",
    ];
    let told = run_args(agent, arguments)?.exits(0)?.json()?;
    Ok(told["reason"].as_str().context("a reason")?.to_owned())
}

/// The endpoints that `explain` counts as possible, by the names of their pods.
fn candidates(lab: &Lab, told: &Value) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for choice in told["endpoints"].as_array().context("endpoints")? {
        let endpoint: SocketAddr = choice["endpoint"].as_str().context("one")?.parse()?;
        let host = lab
            .hosts()
            .iter()
            .find(|h| h.addresses().contains(&endpoint.ip()));
        names.push(host.context("a pod of the lab")?.name().to_owned());
    }
    names.sort();
    Ok(names)
}

/// From, to, how, the verdict, its reason, and the endpoints.
type Case<'a> = (&'a Host, &'a str, &'a str, &'a str, &'a str, &'a [&'a str]);

/// Each way in which a connection can end, in the output of `explain`, and the client's result.
fn explain_says_what_clients_then_see() -> Result<()> {
    let cluster = Cluster::start(services)?;
    let (agent, lab) = (&cluster.agent, &cluster.lab);
    let (sleep, node) = (cluster.client(), lab.node("node2"));
    let both: &[&str] = &["far", "near"];
    let tcp = "connect --count 30";
    let udp = "udp --count 30";
    let cases: [Case; 11] = [
        (
            sleep,
            "10.96.0.10:80",
            tcp,
            "translated",
            "translated",
            both,
        ),
        (node, "10.96.0.10:80", tcp, "translated", "translated", both),
        (
            sleep,
            "[fd00:96::10]:80",
            tcp,
            "translated",
            "translated",
            both,
        ),
        (
            sleep,
            "10.96.0.10:53/udp",
            udp,
            "translated",
            "translated",
            both,
        ),
        (sleep, "10.96.0.12:80", tcp, "refused", "no-endpoints", &[]),
        (
            sleep,
            "10.96.0.13:80",
            tcp,
            "refused",
            "no-local-endpoint",
            &[],
        ),
        (
            sleep,
            "10.96.0.10:81",
            tcp,
            "refused",
            "port-not-served",
            &[],
        ),
        (
            sleep,
            "192.168.77.2:30080",
            tcp,
            "translated",
            "translated",
            &["near"],
        ),
        (
            node,
            "127.0.0.1:30080",
            tcp,
            "translated",
            "translated",
            &["near"],
        ),
        (
            sleep,
            "127.0.0.1:30080",
            tcp,
            "left-alone",
            "not-service",
            &[],
        ),
        (sleep, "10.244.1.5:7", tcp, "left-alone", "not-service", &[]),
    ];
    for (from, to, how, verdict, reason, endpoints) in cases {
        let source = format!("netns:{}", from.netns());
        let told = explain(agent, &source, to)?;
        let what = || format!("{} to {to}: {told:#}", from.name());
        ensure!(
            told["verdict"] == verdict && told["reason"] == reason,
            "not {verdict}, {reason}: {}",
            what()
        );
        ensure!(candidates(lab, &told)? == endpoints, "{}", what());
        ensure!(
            told["steps"]
                .as_array()
                .is_some_and(|steps| steps.len() >= 2),
            "{}",
            what()
        );
        let to = to.trim_end_matches("/udp");
        match (verdict, to) {
            ("translated", _) => {
                ensure!(told["service"].is_string(), "whose? {}", what());
                reaches(from, to, how, endpoints)?;
            }
            // "Left alone" means that the host with the address answers.
            ("left-alone", "10.244.1.5:7") => {
                reaches(from, to, how, &["far"])?;
            }
            _ => {
                let seen = ask(from, to, how)?;
                ensure!(
                    seen.errors.get("ECONNREFUSED") == Some(&30),
                    "{seen:?}, but {}",
                    what()
                );
            }
        }
    }
    affinity_is_explained(agent, lab)?;

    // For people: numbered steps, and the node's own point of view by its name.
    let text = run(agent, "explain node 10.96.0.13:80")?.exits(0)?;
    text.says(&["1. ", "2. ", "refused (no-local-endpoint)", "default/local"])?;
    // Without an agent only the names are missing.
    let mut cluster = cluster;
    cluster.agent.kill();
    let told = explain(&cluster.agent, "node", "10.96.0.10:80")?;
    ensure!(
        told["verdict"] == "translated" && told["service"].is_null(),
        "{told:#}"
    );
    Ok(())
}

/// Before the first connection all are possible, and then only the one that was drawn.
fn affinity_is_explained(agent: &Agent, lab: &Lab) -> Result<()> {
    let (sleep, vip) = (lab.pod("sleep"), "10.96.0.11:80");
    let source = format!("netns:{}", sleep.netns());
    let told = explain(agent, &source, vip)?;
    ensure!(
        told["reason"] == "translated" && candidates(lab, &told)?.len() == 3,
        "{told:#}"
    );
    let first = ask(sleep, vip, "connect")?;
    let told = explain(agent, &source, vip)?;
    ensure!(
        told["reason"] == "kept" && candidates(lab, &told)?.iter().eq(first.endpoints.keys()),
        "{first:?}, but {told:#}"
    );
    let again = ask(sleep, vip, "connect --count 10")?;
    ensure!(
        again.endpoints.keys().eq(first.endpoints.keys()),
        "{first:?} {again:?}"
    );
    // Another client has not been there.
    let node = lab.node("node2");
    let told = explain(agent, &format!("netns:{}", node.netns()), vip)?;
    ensure!(told["reason"] == "translated", "{told:#}");
    Ok(())
}
