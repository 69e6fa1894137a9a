//! An agent that reads the Kubernetes API.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use dataplane_tests::{
    Agent, AgentBuilder, Host, Lab, Process,
    api::{ApiServer, Churn, Cluster as Objects, Options, Resource, objects},
    report::{LoadReport, Report},
    without_packets,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    cluster::{Cluster, TCP, counted, eventually, fails, reaches, refused, serve},
    deaths,
    metrics::Metrics,
    outcome::{http, run},
};

scenarios! {
    Dataplane:
    what_the_api_has_is_served,
    metrics_are_for_those_whom_the_api_server_lets,
    a_server_that_is_away_costs_no_connection,
    a_connection_that_is_cut_without_a_word_is_noticed,
    no_service_takes_the_agents_way_to_the_api_server,
    an_agent_that_starts_while_the_server_is_away_serves_on,
    nothing_is_written_before_everything_was_listed,
    readiness_waits_for_the_first_sync,
    node_ports_are_answered_on_the_addresses_of_the_node_object,
    without_a_server_or_rights_the_agent_says_so,
    host_ports_of_pods_are_served,
    without_the_right_to_read_pods_the_rest_is_served,
    labels_of_pods_and_namespaces_capture_and_release,
    a_startup_taint_goes_when_the_pods_are_captured,
    who_may_reach_what_is_known_reaches_pods_elsewhere,
    a_reader_that_dies_ends_the_agent_with_an_error,
    a_restless_cluster,
}

const TO: &str = "10.96.0.10:80";
const PORT: u16 = 6443;

/// An API server outside, an agent on node2 that reads it, and endpoints.
pub struct Site {
    pub agent: Agent,
    pub server: ApiServer,
    directory: TempDir,
    _servers: Vec<Process>,
    pub lab: Lab,
}

impl Site {
    /// With objects, and an agent of sockets that has not been started.
    fn prepare(objects: impl FnOnce(&Lab) -> Vec<Value>) -> Result<Self> {
        Self::prepare_with(objects, |agent| agent.args(without_packets()))
    }

    /// Likewise, with changes to the agent.
    pub fn prepare_with(
        objects: impl FnOnce(&Lab) -> Vec<Value>,
        otherwise: impl FnOnce(AgentBuilder) -> AgentBuilder,
    ) -> Result<Self> {
        let lab = Cluster::lab()?;
        let outside = lab.external("ext").clone();
        Self::prepare_at(lab, outside, objects, otherwise)
    }

    /// Likewise, with an API server on this host.
    fn prepare_at(
        lab: Lab,
        host: Host,
        objects: impl FnOnce(&Lab) -> Vec<Value>,
        otherwise: impl FnOnce(AgentBuilder) -> AgentBuilder,
    ) -> Result<Self> {
        let cluster = Objects::default();
        let node = lab.node("node2");
        cluster.apply(objects::node("node2", "zone-a", &[node.ipv4().into()]));
        cluster.apply_all(objects(&lab));
        let address = SocketAddr::from((host.ipv4(), PORT));
        let options = Options {
            certified: Some(vec![host.ipv4().to_string()]),
            ..Options::default()
        };
        let server = ApiServer::bind(cluster, options, Box::new(move || host.listen(address)))?;
        let directory = tempfile::tempdir()?;
        let kubeconfig = server.kubeconfig(directory.path())?;
        let agent = lab
            .agent("node2")
            .args(["--kubeconfig".as_ref(), kubeconfig.as_os_str()]);
        let agent = otherwise(agent).prepare()?;
        let servers = ["far", "near", "near2"].map(|name| serve(lab.pod(name)));
        Ok(Self {
            agent,
            server,
            directory,
            _servers: servers.into_iter().collect::<Result<_>>()?,
            lab,
        })
    }

    fn start(objects: impl FnOnce(&Lab) -> Vec<Value>) -> Result<Self> {
        let mut site = Self::prepare(objects)?;
        site.agent.start()?;
        Ok(site)
    }

    fn status(&self) -> Result<Value> {
        let output = self.agent.dataplane(["status", "-o", "json"]).output()?;
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// The findings of `dataplane status`, one a line.
    pub fn findings(&self) -> Result<String> {
        let status = self.status()?;
        let findings = status["findings"].as_array().into_iter().flatten();
        let lines = findings.map(|f| format!("{}: {}", f["severity"], f["text"]));
        Ok(lines.collect::<Vec<_>>().join("\n"))
    }

    /// Writes `web` with these pods as its endpoints.
    fn endpoints(&self, pods: &[&str]) {
        self.server.cluster().apply(slice(&self.lab, "web", pods));
    }

    fn reaches(&self, endpoints: &[&str]) -> Result<()> {
        let client = self.lab.pod("sleep");
        reaches(client, TO, "connect --count 30", endpoints).map(drop)
    }
}

pub fn web(lab: &Lab) -> Vec<Value> {
    vec![
        objects::service("web", "10.96.0.10".parse().expect("an address")),
        slice(lab, "web", &["far", "near"]),
    ]
}

fn slice(lab: &Lab, service: &str, pods: &[&str]) -> Value {
    let endpoints: Vec<Value> = pods
        .iter()
        .map(|name| {
            let pod = lab.pod(name);
            objects::endpoint(pod.ipv4().into(), pod.node().unwrap_or_default())
        })
        .collect();
    objects::slice(service, &format!("{service}-a"), TCP, &endpoints)
}

/// Services and endpoints come, change and go, and the VIP follows.
fn what_the_api_has_is_served() -> Result<()> {
    let mut site = Site::start(web)?;
    site.reaches(&["far", "near"])?;
    site.endpoints(&["near2"]);
    eventually(|| site.reaches(&["near2"]))?;
    let other = "10.96.0.11".parse()?;
    let cluster = site.server.cluster();
    cluster.apply(objects::service("other", other));
    cluster.apply(slice(&site.lab, "other", &["near"]));
    let client = site.lab.pod("sleep");
    eventually(|| reaches(client, "10.96.0.11:80", "connect", &["near"]).map(drop))?;
    cluster.delete(Resource::Services, "default", "other");
    eventually(|| {
        fails(
            client,
            "10.96.0.11:80",
            "connect --timeout-ms 200",
            "TIMEOUT",
        )
    })?;
    let status = site.status()?;
    let source = &status["agent"]["source"];
    ensure!(source["kind"] == "kubernetes", "{source}");
    ensure!(source["error"].is_null(), "{source}");
    let plan = ["plan", "--node-name", "node2", "--kubeconfig"].map(str::to_owned);
    let kubeconfig = site
        .directory
        .path()
        .join("kubeconfig")
        .display()
        .to_string();
    let plan = |agent: &Agent| agent.dataplane(plan.iter().chain([&kubeconfig])).output();
    let output = plan(&site.agent)?;
    ensure!(output.status.code() == Some(0), "{output:?}");
    site.agent.kill();
    site.endpoints(&["far"]);
    let output = plan(&site.agent)?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.code() == Some(2) && said.contains("10.96.0.10:80"),
        "{output:?}"
    );
    site.agent.start()?;
    let metrics = site.lab.node("node2").command("curl");
    let metrics = metrics
        .args(["-s", "http://127.0.0.1:15020/metrics"])
        .run()?;
    Metrics::read(&metrics)?;
    for line in [
        "dataplane_source_watching 1",
        "dataplane_source_lists_total{resource=\"services\"} 1",
        "dataplane_source_watches_total{resource=\"nodes\"} 1",
        "dataplane_change_duration_seconds_count",
    ] {
        ensure!(metrics.contains(line), "no {line} in\n{metrics}");
    }
    Ok(())
}

/// At an address that others reach, the agent serves the metrics to clients whom the API server authorizes, by HTTPS;
/// and to no client once the server does not.
fn metrics_are_for_those_whom_the_api_server_lets() -> Result<()> {
    let mut site =
        Site::prepare_with(web, |agent| agent.args(["--metrics-addr", "0.0.0.0:15020"]))?;
    site.server.knows("scraper", "prometheus", &["/metrics"]);
    site.server.knows("tenant", "tenant", &[]);
    site.agent.start()?;
    let node = site.lab.node("node2").ipv4();
    let from = site.lab.external("ext").clone();
    let ask = |scheme: &str, token: Option<&str>| -> Result<String> {
        let curl = from.command("curl");
        let mut curl = curl.args(["-ksS", "--max-time", "20", "-w", "\n%{http_code}"]);
        if let Some(token) = token {
            curl = curl.args(["-H", &format!("Authorization: Bearer {token}")]);
        }
        Ok(curl.arg(format!("{scheme}://{node}:15020/metrics")).run()?)
    };
    let refused = |token: Option<&str>, status: &str| -> Result<()> {
        let answer = ask("https", token)?;
        let shows = answer.contains("dataplane_ready");
        ensure!(answer.ends_with(status) && !shows, "{token:?}: {answer}");
        Ok(())
    };
    ensure!(ask("http", Some("scraper")).is_err(), "a token in clear");
    refused(None, "401")?;
    refused(Some("stranger"), "401")?;
    refused(Some("tenant"), "403")?;
    let (text, status) = ask("https", Some("scraper"))?
        .rsplit_once('\n')
        .map(|(text, status)| (text.to_owned(), status.to_owned()))
        .unwrap_or_default();
    ensure!(status == "200", "{status}: {text}");
    Metrics::read(&text)?;
    // The next scrapes cause no review.
    let reviews = || {
        let asked = site.server.faults().asked();
        asked
            .iter()
            .filter(|it| it.path.ends_with("reviews"))
            .count()
    };
    let before = reviews();
    for _ in 0..5 {
        ensure!(ask("https", Some("scraper"))?.ends_with("200"));
    }
    ensure!(reviews() == before, "{} more reviews", reviews() - before);
    // A client with many invalid tokens does not make the agent ask the server for each.
    let script = format!(
        "seq 60 | xargs -P 20 -I N curl -ks -o /dev/null -H 'Authorization: Bearer xN' https://{node}:15020/metrics"
    );
    let flood = from.command("sh").args(["-c", &script]);
    let begun = Instant::now();
    flood.output()?;
    let most = 10 * (2 + usize::try_from(begun.elapsed().as_secs())?);
    ensure!(reviews() - before <= most, "{} reviews", reviews() - before);
    ensure!(ask("https", Some("scraper"))?.ends_with("200"));
    // The server that would review this token is away.
    site.server.go_away();
    thread::sleep(Duration::from_secs(1));
    refused(Some("new"), "503")?;
    // And on the node itself root reads them at the socket.
    let local = site.lab.node("node2").command("curl");
    let local = local
        .args(["-sS", "--unix-socket"])
        .arg(site.agent.socket());
    ensure!(
        local
            .arg("http://agent/metrics")
            .run()?
            .contains("dataplane_ready")
    );
    Ok(())
}

/// The server goes away under load: only `status` shows it. It comes back, and the agent writes the difference and no
/// more.
fn a_server_that_is_away_costs_no_connection() -> Result<()> {
    let mut site = Site::start(web)?;
    let client = site.lab.pod("sleep");
    let load = client.load(&["--to", TO, "--threads", "2", "--pause-us", "200"])?;
    site.server.go_away();
    eventually(|| {
        let findings = site.findings()?;
        ensure!(
            findings.contains("cannot read the Kubernetes API"),
            "{findings}"
        );
        ensure!(findings.contains(&site.server.url()), "{findings}");
        Ok(())
    })?;
    site.reaches(&["far", "near"])?;
    let before = site.status()?["agent"]["syncs"].clone();
    site.endpoints(&["near", "near2"]);
    site.server.come_back()?;
    eventually(|| site.reaches(&["near", "near2"]))?;
    let report: LoadReport = load.wait_json()?;
    ensure!(report.errors.is_empty(), "{report:?}");
    eventually(|| {
        let status = site.status()?;
        ensure!(status["healthy"] == true, "{status}");
        Ok(())
    })?;
    let status = site.status()?;
    let writes = status["agent"]["last_sync"]["writes"].as_u64();
    ensure!(
        writes.is_some_and(|writes| writes <= 6) && status["agent"]["syncs"] != before,
        "{status}"
    );
    Ok(())
}

/// The connection to the server breaks without a packet that says so, as by a firewall, or by a machine that lost
/// power.
fn a_connection_that_is_cut_without_a_word_is_noticed() -> Result<()> {
    let site = Site::start(web)?;
    let (node, server) = (site.lab.node("node2"), site.lab.external("ext"));
    let cut = |what: &str| -> Result<()> {
        node.ip(&format!(
            "rule {what} to {} blackhole pref 1",
            server.ipv4()
        ))?;
        Ok(server.ip(&format!("rule {what} to {} blackhole pref 1", node.ipv4()))?)
    };
    let start = Instant::now();
    cut("add")?;
    // By TCP alone it is noticed after a quarter of an hour, by the watch's own end after five minutes.
    let limit = Duration::from_secs(90);
    loop {
        let findings = site.findings()?;
        if findings.contains("cannot read the Kubernetes API") {
            break;
        }
        ensure!(
            start.elapsed() < limit,
            "not noticed within {limit:?}: {findings}"
        );
        thread::sleep(Duration::from_millis(500));
    }
    site.reaches(&["far", "near"])?;
    cut("del")?;
    site.endpoints(&["near2"]);
    let start = Instant::now();
    while site.reaches(&["near2"]).is_err() {
        ensure!(start.elapsed() < limit, "not read again within {limit:?}");
    }
    Ok(())
}

/// Ways in which an object claims the API server's address and port.
#[derive(Clone, Copy, Debug)]
enum Claim {
    ExternalIp,
    LoadBalancer,
    /// The API server is on the agent's node, as on a control plane's.
    NodePort,
    HostPort,
}

impl Claim {
    /// The object that claims it.
    fn object(self, lab: &Lab, api: Ipv4Addr) -> Result<Value> {
        let mut thief = objects::service("thief", "10.96.0.66".parse()?);
        let spec = &mut thief["spec"];
        spec["ports"][0]["port"] = PORT.into();
        match self {
            Self::ExternalIp => spec["externalIPs"] = json!([api]),
            Self::LoadBalancer => {
                spec["type"] = "LoadBalancer".into();
                thief["status"] = json!({ "loadBalancer": { "ingress": [{ "ip": api }] } });
            }
            Self::NodePort => {
                spec["type"] = "NodePort".into();
                spec["ports"][0]["nodePort"] = PORT.into();
            }
            Self::HostPort => {
                let near = lab.pod("near");
                thief = objects::pod("thief", "node2", &[near.ipv4().into()]);
                thief["spec"]["containers"][0]["ports"] =
                    json!([{ "containerPort": TCP, "hostPort": PORT, "protocol": "TCP" }]);
            }
        }
        Ok(thief)
    }
}

/// An object that claims the API server's address and port takes the connections of others on the node. The agent must
/// learn when it is gone.
fn no_service_takes_the_agents_way_to_the_api_server() -> Result<()> {
    for claim in [
        Claim::ExternalIp,
        Claim::LoadBalancer,
        Claim::NodePort,
        Claim::HostPort,
    ] {
        takes_no_way_to_the_api_server(claim).with_context(|| format!("{claim:?}"))?;
    }
    Ok(())
}

#[expect(
    clippy::redundant_closure_for_method_calls,
    reason = "the method itself is of one lifetime only"
)]
fn takes_no_way_to_the_api_server(claim: Claim) -> Result<()> {
    let lab = Cluster::lab()?;
    let host = match claim {
        Claim::NodePort | Claim::HostPort => lab.node("node2"),
        _ => lab.external("ext"),
    };
    let (host, api) = (host.clone(), host.ipv4());
    // Where the node serves itself, as everywhere except in a lab.
    let mut site = Site::prepare_at(lab, host, web, |agent| agent.in_the_nodes_cgroup())?;
    site.agent.start()?;
    let cluster = site.server.cluster();
    cluster.apply(claim.object(&site.lab, api)?);
    cluster.apply(slice(&site.lab, "thief", &["near"]));
    let node = site.lab.node("node2").clone();
    let at = format!("{api}:{PORT}");
    eventually(|| reaches(&node, &at, "connect", &["near"]).map(drop))?;
    // The agent connects anew, and so does the next agent.
    for restart in [false, true] {
        site.server.go_away();
        if restart {
            site.agent.kill();
            site.agent.launch()?;
        }
        eventually(|| {
            let findings = site.findings()?;
            let seen = ["cannot read the Kubernetes API", "an earlier agent"];
            ensure!(
                seen.iter().any(|text| findings.contains(text)),
                "{findings}"
            );
            Ok(())
        })?;
        let pod = if restart { "far" } else { "near2" };
        site.endpoints(&[pod]);
        site.server.come_back()?;
        eventually(|| site.reaches(&[pod]))?;
        reaches(&node, &at, "connect", &["near"])?;
    }
    let cluster = site.server.cluster();
    let resource = match claim {
        Claim::HostPort => Resource::Pods,
        _ => Resource::Services,
    };
    cluster.delete(resource, "default", "thief");
    eventually(|| {
        ensure!(reaches(&node, &at, "connect", &["near"]).is_err());
        Ok(())
    })
}

/// The agent serves the tables of the one before it, until the server is back.
fn an_agent_that_starts_while_the_server_is_away_serves_on() -> Result<()> {
    let mut site = Site::start(web)?;
    site.server.go_away();
    site.agent.kill();
    site.reaches(&["far", "near"])?;
    site.agent.launch()?;
    eventually(|| {
        let findings = site.findings()?;
        ensure!(findings.contains("an earlier agent"), "{findings}");
        Ok(())
    })?;
    site.reaches(&["far", "near"])?;
    let status = site.status()?;
    ensure!(
        status["healthy"] == false && status["agent"]["ready"] == false,
        "{status}"
    );
    ensure!(
        status["agent"]["syncs"] == 0,
        "something was written: {status}"
    );
    site.endpoints(&["near2"]);
    site.server.come_back()?;
    eventually(|| site.reaches(&["near2"]))?;
    site.agent.wait_until_ready()?;
    Ok(())
}

/// Services are known and endpoints are not yet: the tables of an earlier agent stay as they are.
fn nothing_is_written_before_everything_was_listed() -> Result<()> {
    let mut site = Site::start(web)?;
    site.agent.kill();
    let faults = site.server.faults().clone();
    faults.withhold(Some((Resource::EndpointSlices, 403)));
    faults.note_requests(true);
    site.agent.launch()?;
    eventually(|| {
        let asked = faults.asked();
        let refused = asked.iter().filter(|a| a.answered == 403).count();
        ensure!(refused > 2, "{asked:?}");
        Ok(())
    })?;
    site.reaches(&["far", "near"])?;
    // While an agent loads its programs, it answers no command.
    eventually(|| {
        let findings = site.findings()?;
        ensure!(findings.contains("RBAC"), "{findings}");
        Ok(())
    })?;
    faults.withhold(None);
    site.agent.wait_until_ready()?;
    site.reaches(&["far", "near"])
}

/// On a fresh node: only the kubelet's liveness probe succeeds.
fn readiness_waits_for_the_first_sync() -> Result<()> {
    let mut site = Site::prepare(web)?;
    let faults = site.server.faults().clone();
    faults.withhold(Some((Resource::EndpointSlices, 500)));
    site.agent.launch()?;
    let (client, node) = (site.lab.pod("sleep"), site.lab.node("node2"));
    let health = |path: &str| {
        let url = format!("http://{}:15021/healthz/{path}", node.ipv4());
        http(client, &url)
    };
    let is = |path: &str, wanted: u16| {
        let (status, body) = health(path)?;
        ensure!(status == wanted, "{path}: {status} {body}");
        Ok(())
    };
    eventually(|| is("ready", 503))?;
    is("live", 200)?;
    Metrics::scrape(node)?.is("dataplane_ready", &[], 0.0)?;
    is("ready", 503)?;

    faults.withhold(None);
    site.agent.wait_until_ready()?;
    is("ready", 200)?;
    Metrics::scrape(node)?.is("dataplane_ready", &[], 1.0)?;
    site.reaches(&["far", "near"])
}

/// A node has several addresses, and its Node object says which one is its own.
fn node_ports_are_answered_on_the_addresses_of_the_node_object() -> Result<()> {
    let site = Site::prepare(|lab| {
        let mut objects = web(lab);
        objects[0]["spec"]["type"] = json!("NodePort");
        objects[0]["spec"]["ports"][0]["nodePort"] = json!(30080);
        objects
    })?;
    let mut site = site;
    let node = site.lab.node("node2");
    node.ip("addr add 192.0.2.77/32 dev eth0")?;
    site.agent.start()?;
    let own = node.ipv4().to_string();
    let addresses = || -> Result<Vec<String>> {
        let status = site.status()?;
        let shown = status["agent"]["node_port_addresses"].as_array();
        let values = shown.into_iter().flatten().map(|of| of["value"].as_str());
        Ok(values.flatten().map(str::to_owned).collect())
    };
    let first = addresses()?;
    ensure!(
        first.contains(&own) && !first.contains(&"192.0.2.77".to_owned()),
        "{first:?}"
    );
    let told = "192.0.2.77".parse()?;
    site.server
        .cluster()
        .apply(objects::node("node2", "zone-a", &[told]));
    eventually(|| {
        let now = addresses()?;
        ensure!(
            now.contains(&"192.0.2.77".to_owned()) && !now.contains(&own),
            "{now:?}"
        );
        Ok(())
    })?;
    let client = site.lab.pod("sleep");
    let how = "connect --count 30";
    reaches(client, "192.0.2.77:30080", how, &["far", "near"]).map(drop)
}

/// Settings without a server are an error at once; a server that refuses is one in `status`.
fn without_a_server_or_rights_the_agent_says_so() -> Result<()> {
    let mut site = Site::prepare(web)?;
    let missing = site.directory.path().join("missing");
    let missing = missing.to_string_lossy();
    let path = site.directory.path().join("kubeconfig");
    let good = fs::read(&path)?;
    fs::remove_file(&path)?;
    for arguments in [
        vec!["run", "--kubeconfig", &missing],
        vec!["run", "--kubernetes"],
        vec!["run", "--api-server", "ftp://somewhere"],
    ] {
        let output = site.agent.dataplane(&arguments).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(1), "{arguments:?}: {said}");
        ensure!(!site.agent.bpffs().exists(), "something was pinned");
    }
    fs::write(&path, good)?;
    site.server.accept_tokens(&["another"]);
    site.agent.launch()?;
    eventually(|| {
        let findings = site.findings()?;
        // A number alone may also be in a path, in a message from before the server is asked.
        let is_refused = findings.contains("401") && findings.contains("token");
        ensure!(is_refused, "{findings}");
        Ok(())
    })?;
    run(&site.agent, "status")?.exits(1)?.says(&["token"])?;
    site.server.accept_tokens(&["secret"]);
    site.agent.wait_until_ready()?;
    site.reaches(&["far", "near"])
}

/// Where the host port of the pod `near` is.
const EXPOSED: u16 = 8480;

/// The pod of this name, with a host port.
fn exposed(lab: &Lab, name: &str) -> Value {
    let pod = lab.pod(name);
    let mut object = objects::pod(name, pod.node().unwrap_or_default(), &pod.addresses());
    object["spec"]["containers"][0]["ports"] =
        json!([{ "containerPort": TCP, "hostPort": EXPOSED }]);
    object
}

/// A pod is scheduled, gets an address, is replaced by another, and ends: its host port follows it.
fn host_ports_of_pods_are_served() -> Result<()> {
    let mut site = Site::prepare_with(web, |agent| agent)?;
    site.agent.start()?;
    let (lab, cluster) = (&site.lab, site.server.cluster());
    let outside = lab.external("ext");
    let to = SocketAddr::from((lab.node("node2").ipv4(), EXPOSED)).to_string();
    let served_by = |name: &str| {
        eventually(|| {
            let report = reaches(outside, &to, "connect --count 3", &[name])?;
            let sources: Vec<_> = report.endpoints[name].sources.keys().collect();
            ensure!(
                sources == [&IpAddr::from(outside.ipv4())],
                "{name} saw {sources:?}"
            );
            Ok(())
        })
    };
    // A pod of another node, and one that is pending.
    cluster.apply(exposed(lab, "far"));
    let mut pod = exposed(lab, "near");
    pod["status"] = json!({ "phase": "Pending" });
    cluster.apply(pod);
    refused(outside, &to, "connect")?;
    cluster.apply(exposed(lab, "near"));
    served_by("near")?;
    run(&site.agent, "services")?
        .exits(0)?
        .says(&["default/hostport:near"])?;
    // The host port stays while the agent and the server are away.
    site.agent.kill();
    served_by("near")?;
    site.server.go_away();
    site.agent.launch()?;
    eventually(|| {
        let findings = site.findings()?;
        ensure!(findings.contains("an earlier agent"), "{findings}");
        Ok(())
    })?;
    let (lab, cluster) = (&site.lab, site.server.cluster());
    let outside = lab.external("ext");
    reaches(outside, &to, "connect", &["near"])?;
    let mut over = exposed(lab, "near");
    over["status"]["phase"] = json!("Failed");
    cluster.apply_all([over, exposed(lab, "near2")]);
    site.server.come_back()?;
    eventually(|| reaches(outside, &to, "connect --count 3", &["near2"]).map(drop))?;
    site.agent.wait_until_ready()?;
    let (lab, cluster) = (&site.lab, site.server.cluster());
    let outside = lab.external("ext");
    cluster.delete(Resource::Pods, "default", "near2");
    eventually(|| refused(outside, &to, "connect"))?;
    site.reaches(&["far", "near"])
}

/// Without the permission for pods, `status` names the missing host ports, and services are served.
fn without_the_right_to_read_pods_the_rest_is_served() -> Result<()> {
    let mut site = Site::prepare_with(web, |agent| agent)?;
    site.server.cluster().apply(exposed(&site.lab, "near"));
    site.server.faults().withhold(Some((Resource::Pods, 403)));
    site.agent.start()?;
    site.reaches(&["far", "near"])?;
    run(&site.agent, "status")?.exits(0)?.says(&[
        "pods cannot be read",
        "hostPort",
        "403",
        "RBAC",
    ])?;
    site.endpoints(&["near2"]);
    eventually(|| site.reaches(&["near2"]))?;
    site.server.faults().withhold(None);
    // A new agent lists the pods at once, before this one would do so by itself.
    site.agent.kill();
    site.agent.start()?;
    let outside = site.lab.external("ext");
    let to = SocketAddr::from((site.lab.node("node2").ipv4(), EXPOSED)).to_string();
    reaches(outside, &to, "connect", &["near"])?;
    let findings = site.findings()?;
    ensure!(findings.is_empty(), "{findings}");
    Ok(())
}

/// A pod is captured because of its label, then because of its namespace's, then no more; a
/// connection lives through it all.
fn labels_of_pods_and_namespaces_capture_and_release() -> Result<()> {
    let mesh = json!({ "rules": { "mode": "proxy" } }).to_string();
    let mut site = Site::prepare_with(web, |agent| {
        agent.in_the_nodes_cgroup().args(["--mesh", &mesh])
    })?;
    let (client, cluster) = (site.lab.pod("sleep").clone(), site.server.cluster().clone());
    let pod = |label: Value| {
        let mut object = objects::pod("sleep", "node2", &client.addresses());
        object["metadata"]["labels"] = label;
        cluster.apply(object)
    };
    let ambient = json!({ "istio.io/dataplane-mode": "ambient" });
    pod(json!({}));
    site.agent.start()?;
    let site = site;
    let captured = |wanted: bool| {
        eventually(|| {
            let work = || reaches(&client, "10.244.2.10:7", "connect --count 3", &["near"]);
            let (_, counted) = counted(&site.agent, Reason::Captured, work)?;
            ensure!(
                counted == if wanted { 3 } else { 0 },
                "captured {counted} of 3, wanted: {wanted}"
            );
            Ok(())
        })
    };
    let connection = || -> Result<Process> { Ok(client.hold("10.244.2.10:7")?) };
    captured(false)?;
    let mut connections = vec![connection()?];
    pod(ambient.clone());
    captured(true)?;
    connections.push(connection()?);
    pod(json!({}));
    captured(false)?;
    cluster.apply(objects::namespace("default", &ambient));
    captured(true)?;
    // The pod's own label takes precedence.
    pod(json!({ "istio.io/dataplane-mode": "none" }));
    captured(false)?;
    pod(json!({}));
    captured(true)?;
    cluster.delete(Resource::Namespaces, "", "default");
    captured(false)?;
    for mut connection in connections {
        connection.close_stdin();
        let report: Report = connection.wait_json()?;
        ensure!(
            report.errors.is_empty() && report.answered > 100,
            "a connection that was there before: {report:?}"
        );
    }
    Ok(())
}

/// A pod that may only reach known addresses may reach the ports that a pod of another node declares, with no service
/// before it: the agent reads those as soon as an egress policy asks for it, and does not forget them while an agent
/// starts.
fn who_may_reach_what_is_known_reaches_pods_elsewhere() -> Result<()> {
    let mesh = json!({ "rules": { "mode": "kernel" } }).to_string();
    let objects = |lab: &Lab| {
        let service = objects::service("web", "10.96.0.10".parse().expect("an address"));
        vec![service, slice(lab, "web", &["near"])]
    };
    let mut site = Site::prepare_with(objects, |agent| {
        agent.in_the_nodes_cgroup().args(["--mesh", &mesh])
    })?;
    let (client, cluster) = (site.lab.pod("sleep").clone(), site.server.cluster().clone());
    let known = |name: &str| {
        let pod = site.lab.pod(name);
        let node = pod.node().unwrap_or_default();
        let mut object = objects::pod(name, node, &pod.addresses());
        let ports = &mut object["spec"]["containers"][0]["ports"];
        *ports = json!([{ "containerPort": 7 }]);
        cluster.apply(object);
        format!("{}:7", pod.ipv4())
    };
    let far = known("far");
    let unknown = format!("{}:7", site.lab.pod("near2").ipv4());
    let asks = |egress: &str| {
        let mut object = objects::pod("sleep", "node2", &client.addresses());
        object["metadata"]["labels"] = json!({ "istio.io/dataplane-mode": "ambient" });
        object["metadata"]["annotations"] = json!({ "dataplane.io/egress": egress });
        cluster.apply(object);
    };
    asks("allow");
    site.agent.start()?;
    reaches(&client, &unknown, "connect", &["near2"])?;
    asks("deny");
    eventually(|| refused(&client, &unknown, "connect"))?;
    eventually(|| reaches(&client, &far, "connect --count 3", &["far"]).map(drop))?;
    // Not its other ports.
    let other = format!("{}:80", site.lab.pod("far").ipv4());
    refused(&client, &other, "http")?;
    let load = client.load(&["--to", &far, "--pause-us", "1000"])?;
    let before = site.agent.replace()?;
    thread::sleep(Duration::from_millis(300));
    let report: LoadReport = load.wait_json()?;
    ensure!(
        report.errors.is_empty() && report.answered > 20,
        "{report:?}"
    );
    before.wait()?;
    refused(&client, &unknown, "connect")?;
    known("near2");
    eventually(|| reaches(&client, &unknown, "connect", &["near2"]).map(drop))?;
    // No policy asks any more.
    asks("allow");
    cluster.delete(Resource::Pods, "default", "near2");
    eventually(|| reaches(&client, &unknown, "connect", &["near2"]).map(drop))
}

/// Many services and many changes, watches that break every other second: at the end the tables equal those of a fresh
/// start. (`cargo xtask bench sync --soak` does it for minutes.)
fn a_reader_that_dies_ends_the_agent_with_an_error() -> Result<()> {
    let mut site = Site::start(web)?;
    let Site {
        agent, server, lab, ..
    } = &mut site;
    deaths::ends(agent, "kubernetes", |_| {
        server.cluster().apply(slice(lab, "web", &["near"]));
        Ok(())
    })?;
    site.reaches(&["far", "near"])
}

fn a_restless_cluster() -> Result<()> {
    let mut site = Site::start(web)?;
    let mut churn = Churn::new(site.server.cluster().clone(), 2_000, 7);
    let start = Instant::now();
    let mut broken = 0;
    while start.elapsed() < Duration::from_secs(12) {
        for _ in 0..10 {
            churn.step();
        }
        thread::sleep(Duration::from_millis(100));
        if start.elapsed().as_secs() / 2 > broken {
            broken += 1;
            match broken % 3 {
                0 => site.server.faults().end_watches(),
                1 => site.server.faults().break_watches(),
                _ => {
                    // The server restarts without its history.
                    site.server.go_away();
                    churn.step();
                    site.server.cluster().compact();
                    site.server.come_back()?;
                }
            }
        }
    }
    site.reaches(&["far", "near"])?;
    let manifest = site.directory.path().join("everything.json");
    fs::write(&manifest, churn.cluster().manifest())?;
    let path = manifest.to_string_lossy().into_owned();
    let addresses = format!("{}/32,::/0", site.lab.node("node2").ipv4());
    eventually(|| {
        let plan = ["plan", "--node-name", "node2", "-f", &path];
        // Addresses that the agent knows from its Node object.
        let plan = [&plan[..], &["--nodeport-addresses", &addresses]].concat();
        let output = site.agent.dataplane(plan).output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        let last: Vec<&str> = said.lines().rev().take(3).collect();
        ensure!(output.status.code() == Some(0), "{last:?}");
        Ok(())
    })?;
    let status = site.status()?;
    ensure!(status["healthy"] == true, "{status}");
    ensure!(status["agent"]["sync_errors"] == 0, "{status}");
    Ok(())
}

/// The agent removes its taint and no other, after it has found the Pod that it has to capture.
fn a_startup_taint_goes_when_the_pods_are_captured() -> Result<()> {
    const KEY: &str = "dataplane.io/not-ready";
    let mesh = json!({ "startupTaint": KEY, "rules": { "mode": "proxy" } }).to_string();
    let mut site = Site::prepare_with(web, |agent| {
        agent.in_the_nodes_cgroup().args(["--mesh", &mesh])
    })?;
    let cluster = site.server.cluster().clone();
    let other = json!({ "key": "other", "value": "v", "effect": "NoSchedule" });
    let mut node = objects::node("node2", "zone-a", &[site.lab.node("node2").ipv4().into()]);
    node["spec"]["taints"] = json!([{ "key": KEY, "effect": "NoExecute" }, other]);
    cluster.apply(node);
    // Not on this node, whatever the API says.
    let mut pod = objects::pod("absent", "node2", &[IpAddr::from([10, 244, 2, 99])]);
    pod["metadata"]["labels"] = json!({ "istio.io/dataplane-mode": "ambient" });
    cluster.apply(pod);
    site.agent.start()?;
    let taints = || -> Result<Value> {
        let node = cluster.get(Resource::Nodes, "", "node2");
        Ok(node.context("the node")?["spec"]["taints"].clone())
    };
    eventually(|| {
        let findings = site.findings()?;
        ensure!(
            findings.contains("has not found the Pod default/absent"),
            "{findings}"
        );
        Ok(())
    })?;
    ensure!(taints()?.to_string().contains(KEY), "removed too early");
    cluster.delete(Resource::Pods, "default", "absent");
    eventually(|| {
        let now = taints()?;
        ensure!(now == json!([other]), "{now}");
        Ok(())
    })
}
