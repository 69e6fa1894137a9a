//! The base without `apiServer`, on nodes without a service proxy: the API server's cluster IP leads nowhere.

use std::{thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use jiff::Timestamp;

use super::pods::{LONG, SHORT};
use crate::cluster::{
    Cluster,
    agent::{self, Wanted},
    kubectl::eventually,
    network,
    place::FIRST_SERVICE,
};

/// Time limit for the agent to report the problem. Making a connection may take 5 s.
const AT_ONCE: Duration = Duration::from_secs(8);
/// How long the scenario watches the log afterwards.
const WATCHED: Duration = Duration::from_mins(1);
/// Number of kinds: Services, EndpointSlices, Pods, Nodes. The agent may log once for each kind that it cannot read it.
const KINDS: usize = 4;

pub fn missing(cluster: &Cluster) -> Result<String> {
    // Remove everything that an earlier agent left.
    agent::remove(cluster)?;
    network::swallow(FIRST_SERVICE, true)?;
    let outcome = without(cluster);
    network::swallow(FIRST_SERVICE, false)?;
    agent::deploy(cluster, &Wanted::default())?;
    outcome
}

fn without(cluster: &Cluster) -> Result<String> {
    let node = cluster.nodes[0];
    let nowhere = Wanted {
        api_server: false,
        ..Wanted::default()
    };
    let begun = Timestamp::now();
    agent::apply(cluster, &nowhere)?;
    let log = eventually(LONG, || {
        let log = agent::log(cluster, node, begun)?;
        ensure!(log.contains("apiServer"), "no hint at apiServer: {log}");
        Ok(log)
    })?;
    let time_of = |words: &str| -> Result<Timestamp> {
        let line = log.lines().find(|line| line.contains(words));
        let line = line.with_context(|| format!("no {words:?} in {log}"))?;
        let time = line.split(' ').next().unwrap_or_default();
        time.parse()
            .with_context(|| format!("{time} of the line {line}"))
    };
    let hint = "the address of a service (KUBERNETES_SERVICE_HOST)";
    let took = time_of(hint)?.duration_since(time_of("reading https://")?);
    let took = Duration::try_from(took).context("a log in order")?;
    ensure!(
        took < AT_ONCE,
        "the agent took {took:?} to say what is wrong"
    );
    // The first warning already contains the hint.
    let first = log.lines().find(|line| line.contains(" WARN "));
    let first = first.with_context(|| format!("no warning: {log}"))?;
    ensure!(
        first.contains(FIRST_SERVICE) && first.contains("apiServer"),
        "the first warning has no hint: {first}"
    );
    eventually(SHORT, || {
        let words = [FIRST_SERVICE, hint, "apiServer", "so it serves nothing"];
        let healthy = agent::says(cluster, node, &words)?;
        ensure!(!healthy, "status says that the node is healthy");
        Ok(())
    })?;
    let (_, status) = agent::status(cluster, node)?;
    thread::sleep(WATCHED);
    let log = agent::log(cluster, node, begun)?;
    for text in [&status, &log] {
        ensure!(
            !text.contains("earlier agent"),
            "nothing is there of an earlier agent: {text}"
        );
    }
    let worse = |line: &&str| line.contains(" WARN ") || line.contains(" ERROR ");
    let warnings: Vec<&str> = log.lines().filter(worse).collect();
    ensure!(
        warnings.len() <= KINDS,
        "{} warnings in {WATCHED:?}: {}",
        warnings.len(),
        warnings.join("\n")
    );
    Ok(format!(
        "the first warning came after {} ms and names apiServer; {} warnings in {} s of retries; status says that \
         nothing is served",
        took.as_millis(),
        warnings.len(),
        WATCHED.as_secs()
    ))
}
