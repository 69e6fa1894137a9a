//! Services while the API server is away, loses history, or refuses the agent.

use std::{fs, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::{
    load::Load,
    pods::{From, SHORT, Space, at},
};
use crate::cluster::{
    Cluster, agent,
    control::{self, ETCD, Part},
    identity,
    kubectl::eventually,
    network,
    place::{CONTROL, Node},
};
use crate::command::output;

/// Number of kinds that the agent reads: Services, EndpointSlices, Pods and Nodes.
const KINDS: usize = 4;
const CONNECT: &str = "connect --count 40 --timeout-ms 2000";
/// Time limit for the agent to notice that the API server is back. The agent retries every 15 to 30 s at the latest.
const BACK: Duration = Duration::from_mins(1);

/// The agent reads its token every minute. After this time it has read it, and a token with a lifetime of one minute
/// has expired.
const READ: Duration = Duration::from_secs(65);

pub fn killed(cluster: &Cluster) -> Result<String> {
    agent::deploy(cluster, &agent::Wanted::default())?;
    let space = Space::new(cluster, "api-server", &json!({}))?;
    space.servers("web", 2, None)?;
    space.service("web", "web", &json!({}))?;
    let to = at(&space.cluster_ips("web")?[0], 80);
    let clients = [
        space.client("client", cluster.nodes[0])?,
        From::Node(cluster.nodes[1]),
    ];
    let web = space.pods("web")?;
    for from in &clients {
        eventually(SHORT, || from.reaches(cluster, CONNECT, &to, &web))?;
    }
    let loads = clients
        .iter()
        .map(|from| Load::start(cluster, from, &to))
        .collect::<Result<Vec<_>>>()?;
    let begun = Timestamp::now();
    Part::ApiServer.kill()?;
    thread::sleep(Duration::from_secs(20));
    for node in &cluster.nodes {
        agent::metrics(*node)?;
        let said = output(node.command(&cluster.dataplane)?.args(["status"]))?;
        ensure!(
            said.contains("cannot read the Kubernetes API"),
            "status says nothing of it: {said}"
        );
    }
    Part::ApiServer.start(&cluster.programs)?;
    control::wait_for_api_server(&cluster.kubectl)?;
    // Changes from now on must arrive.
    space.kubectl(&["scale", "deployment/web", "--replicas=4"])?;
    space.rolled_out("web")?;
    let web = space.pods("web")?;
    for from in &clients {
        eventually(BACK, || from.reaches(cluster, CONNECT, &to, &web))?;
    }
    let mut answered = 0;
    for load in loads {
        answered += load.none_failed()?;
    }
    let mut lines = 0;
    for node in &cluster.nodes {
        eventually(SHORT, || agent::healthy(cluster, *node))?;
        lines = eventually(SHORT, || told_once(&agent::log(cluster, *node, begun)?))?;
    }
    Ok(format!(
        "none of {answered} connections failed with the API server away for 20 s; changes arrived when it was back; \
         the last node's log has {lines} lines on it"
    ))
}

/// Checks that the log has, for each kind, one line that it cannot be read and one that it can be read again. Returns
/// the number of these lines.
fn told_once(log: &str) -> Result<usize> {
    let with = |words: &str| log.lines().filter(|line| line.contains(words)).count();
    let (began, ended) = (with(" cannot "), with(": they can be read again"));
    ensure!(
        began == KINDS && ended == KINDS,
        "{began} lines where the API server goes away, {ended} where it comes back, and {KINDS} kinds: {log}"
    );
    let worse = with(" WARN ") + with(" ERROR ");
    ensure!(worse == KINDS, "{worse} warnings and errors: {log}");
    Ok(began + ended)
}

pub fn compaction(cluster: &Cluster) -> Result<String> {
    agent::deploy(cluster, &agent::Wanted::default())?;
    let node = cluster.nodes[0];
    let space = Space::new(cluster, "compaction", &json!({}))?;
    // Servers and client are on one node, because this node is cut off meanwhile.
    space.servers("web", 1, Some(node))?;
    for name in ["stays", "goes"] {
        space.service(name, "web", &json!({}))?;
    }
    let web = space.pods("web")?;
    let (stays, goes) = (
        at(&space.cluster_ips("stays")?[0], 80),
        at(&space.cluster_ips("goes")?[0], 80),
    );
    let from = From::Node(node);
    for to in [&stays, &goes] {
        eventually(SHORT, || from.reaches(cluster, CONNECT, to, &web))?;
    }
    let lists = |node: Node| -> Result<f64> {
        let metrics = agent::metrics(node)?;
        Ok(agent::sum(
            &metrics,
            "dataplane_source_lists_total",
            Some(("resource", "services")),
        ))
    };
    let before = lists(node)?;
    let load = Load::start(cluster, &from, &stays)?;
    network::plug(&node.name(), false)?;
    let forgotten = forget(cluster, &space);
    network::plug(&node.name(), true)?;
    let comes = forgotten?;
    eventually(BACK, || {
        from.fails(
            cluster,
            "connect --count 2 --timeout-ms 500",
            &goes,
            &["TIMEOUT", "EHOSTUNREACH", "ENETUNREACH", "ECONNREFUSED"],
        )
    })?;
    eventually(BACK, || from.reaches(cluster, CONNECT, &comes, &web))?;
    let listed = lists(node)? - before;
    ensure!(
        listed >= 1.0,
        "the agent did not list services anew: the API server had not forgotten"
    );
    let answered = load.none_failed()?;
    eventually(SHORT, || agent::healthy(cluster, node))?;
    Ok(format!(
        "services listed anew {listed} times after the version had gone; none of {answered} connections failed meanwhile"
    ))
}

/// Changes services, compacts etcd, and restarts the API server, which then has no older version. Returns the address
/// of a new service.
fn forget(cluster: &Cluster, space: &Space<'_>) -> Result<String> {
    space.kubectl(&["delete", "service", "goes"])?;
    space.service("comes", "web", &json!({}))?;
    let newest: Value = serde_json::from_str(&cluster.kubectl.run(&[
        "get",
        "--raw",
        "/api/v1/services?limit=1",
    ])?)?;
    let revision = newest["metadata"]["resourceVersion"]
        .as_str()
        .context("a version")?;
    let body = json!({ "revision": revision, "physical": true }).to_string();
    let (status, answer) = network::post(CONTROL, ETCD, "/v3/kv/compaction", &body)?;
    ensure!(status == 200, "etcd does not compact: {status} {answer}");
    Part::ApiServer.kill()?;
    Part::ApiServer.start(&cluster.programs)?;
    control::wait_for_api_server(&cluster.kubectl)?;
    // The agent's old connections must time out before the node is back.
    thread::sleep(Duration::from_secs(20));
    Ok(at(&space.cluster_ips("comes")?[0], 80))
}

pub fn tokens(cluster: &Cluster) -> Result<String> {
    // The account and its permissions stay. An agent that is a process replaces the DaemonSet's agents.
    agent::deploy(cluster, &agent::Wanted::default())?;
    let account = cluster
        .kubectl
        .get(&["-n", "kube-system", "serviceaccount", "dataplane"])?;
    let uid = account["metadata"]["uid"].as_str().context("a uid")?;
    agent::remove_daemon_set(cluster)?;
    let outcome = with_tokens(cluster, uid);
    agent::deploy(cluster, &agent::Wanted::default())?;
    outcome
}

fn with_tokens(cluster: &Cluster, uid: &str) -> Result<String> {
    let node = cluster.nodes[0];
    let (token, config) = (identity::file("agent.token"), identity::file("agent.conf"));
    // The file ends with a newline, as editors write it.
    let renew = |life: u64| -> Result<()> {
        let text = identity::token("kube-system", "dataplane", uid, Duration::from_secs(life))?;
        fs::write(&token, format!("{text}\n")).context("cannot write a token")
    };
    identity::write_config(&config, &json!({ "tokenFile": token }))?;
    renew(60)?;
    let space = Space::new(cluster, "tokens", &json!({}))?;
    space.servers("web", 1, Some(node))?;
    space.service("web", "web", &json!({}))?;
    let web = space.pods("web")?;
    let from = From::Node(node);
    let _agent = agent::Process::start(cluster, node, &config, &json!({}))?;
    let reaches = |name: &str, limit: Duration| -> Result<()> {
        let to = at(&space.cluster_ips(name)?[0], 80);
        eventually(limit, || from.reaches(cluster, CONNECT, &to, &web)).map(drop)
    };
    reaches("web", SHORT)?;
    let restart = || -> Result<()> {
        Part::ApiServer.kill()?;
        Part::ApiServer.start(&cluster.programs)?;
        control::wait_for_api_server(&cluster.kubectl)
    };
    let refused = || -> Result<bool> {
        let log =
            fs::read_to_string(node.directory().join("agent.log")).context("the agent's log")?;
        Ok(log.contains("answered 401"))
    };
    // The token is renewed in time: the next connection uses the new token.
    renew(3600)?;
    thread::sleep(READ);
    restart()?;
    space.service("renewed", "web", &json!({}))?;
    reaches("renewed", BACK)?;
    ensure!(
        !refused()?,
        "the agent used a token that had expired though it was renewed"
    );
    // The token is not renewed: the agent continues to serve its services, and status says why no changes arrive.
    renew(1)?;
    thread::sleep(READ);
    restart()?;
    space.service("late", "web", &json!({}))?;
    eventually(BACK + BACK, || {
        let said = node.command(&cluster.dataplane)?.arg("status").output()?;
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        ensure!(
            said.contains("answered 401"),
            "status says nothing of the token: {said}"
        );
        Ok(())
    })?;
    ensure!(refused()?, "the agent's log says nothing of the token");
    reaches("renewed", SHORT)?;
    renew(3600)?;
    reaches("late", BACK + BACK)?;
    eventually(SHORT, || agent::healthy(cluster, node))?;
    Ok("renewed in time: no 401; expired: served on, named in status, and caught up with a new token".into())
}
