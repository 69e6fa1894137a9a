//! Mesh capture: outbound and inbound connections of a pod go to a proxy in its network namespace,
//! which learns where they were to go; by an unmodified HAProxy, with Open Service Mesh's iptables
//! rules and with ours, and by our own proxy.

mod explain;

pub use explain::SCENARIOS as EXPLAIN;

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use dataplane_common::Reason;
use dataplane_tests::{Agent, Host, Lab, Process, report::Report};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    cluster::{ask, eventually, fails, peer_is, reaches, refused, serve},
    manifest::{Manifests, Service},
};

scenarios! {
    Dataplane:
    haproxy_sees_what_it_sees_behind_open_service_meshs_rules,
    haproxy_takes_inbound_connections,
    the_original_destination_is_right_in_thousands_of_connections,
    our_proxy_takes_both_directions_and_keeps_the_clients_address,
    rules_change_while_connections_live,
    pods_ask_by_label_and_annotation,
    without_a_proxy_it_is_refused_or_passes,
    unknown_destinations_are_refused_at_once,
    a_guarded_namespace_waits_for_the_agent,
    what_goes_direct_is_decided_in_the_kernel,
    cleanup_leaves_nothing_of_a_mesh,
}

/// Open Service Mesh's user.
const UID: u32 = 1500;

/// A node with a client, `app`, two servers beside it, and one on another node.
struct World {
    agent: Option<Agent>,
    manifests: Manifests,
    _servers: Vec<Process>,
    state: TempDir,
    lab: Lab,
}

impl World {
    fn new() -> Result<Self> {
        let lab = Lab::builder()
            .node("node1")
            .node("node2")
            .pod("node1", "app", "10.244.1.8")
            .pod("node1", "one", "10.244.1.5")
            .pod("node1", "two", "10.244.1.6")
            .pod("node2", "far", "10.244.2.5")
            .build()?;
        let servers = ["app", "one", "two", "far"]
            .map(|name| serve(lab.pod(name)))
            .into_iter()
            .collect::<Result<_>>()?;
        let far = lab.pod("far").clone();
        let web = Service::new("web", &["10.96.0.10", "fd00:96::10"])
            .port("tcp", 80, 7)
            .endpoints(&[&far]);
        Ok(Self {
            agent: None,
            manifests: Manifests::new(&[web])?,
            _servers: servers,
            state: tempfile::tempdir()?,
            lab,
        })
    }

    fn app(&self) -> &Host {
        self.lab.pod("app")
    }

    /// Runs the agent with a mesh, in which `app` is captured by `rules`.
    fn capture(&mut self, proxy: Value, rules: Value) -> Result<()> {
        let mesh = mesh(proxy, rules);
        self.agent_with(&mesh, &[])
    }

    fn agent_with(&mut self, mesh: &Value, more: &[PathBuf]) -> Result<()> {
        self.agent = None;
        let mut agent = self
            .lab
            .agent("node1")
            .in_the_nodes_cgroup()
            .manifests(self.manifests.path())
            .args(["--mesh", &mesh.to_string()]);
        for path in more {
            agent = agent.manifests(path);
        }
        self.agent = Some(agent.start()?);
        Ok(())
    }

    fn agent(&self) -> Result<&Agent> {
        self.agent.as_ref().context("an agent")
    }

    /// Starts an unmodified HAProxy in the pod of `app`, as its user.
    fn haproxy(&self) -> Result<Haproxy> {
        let log = self.state.path().join("haproxy.log");
        let config = self.state.path().join("haproxy.cfg");
        fs::write(&config, HAPROXY)?;
        let file = fs::File::create(&log)?;
        let process = self
            .app()
            .command("haproxy")
            .args(["-db", "-f"])
            .arg(&config)
            .stdout(file)
            .spawn()?;
        let proxy = Haproxy {
            log,
            _process: process,
        };
        eventually(|| {
            let listening = self.app().command("ss").args(["-Hltn"]).run()?;
            for port in ["127.0.0.1:15001", "[::1]:15001", ":15003"] {
                ensure!(
                    listening.contains(port),
                    "HAProxy does not listen: {listening}"
                );
            }
            Ok(())
        })?;
        Ok(proxy)
    }

    fn verdicts(&self, reason: Reason) -> Result<u64> {
        // Not healthy while manifests are wrong, and says all of this nevertheless.
        let output = self.agent()?.dataplane(["status", "-o", "json"]).output()?;
        let status: Value = serde_json::from_slice(&output.stdout)?;
        Ok(status["verdicts"][reason.word()]
            .as_u64()
            .unwrap_or_default())
    }

    /// Likewise, until it is at least so many: for those who ask while it happens.
    fn counted<T>(&self, reason: Reason, work: impl FnOnce() -> Result<T>) -> Result<(T, u64)> {
        let before = self.verdicts(reason)?;
        let result = work();
        let result = result?;
        Ok((result, self.verdicts(reason)? - before))
    }
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "made for it where it is called"
)]
fn mesh(proxy: Value, rules: Value) -> Value {
    json!({
        "proxy": proxy,
        "workloads": [{
            "name": "default/app",
            "addresses": ["10.244.1.8", "fd00:10:244:1::8"],
            "rules": rules,
        }],
    })
}

fn foreign() -> Value {
    json!({ "uid": UID, "inbound": 15003 })
}

struct Haproxy {
    log: PathBuf,
    _process: Process,
}

impl Haproxy {
    /// What it logged: frontend, original destination, client.
    fn lines(&self) -> Result<Vec<[String; 3]>> {
        let text = fs::read_to_string(&self.log)?;
        let mut lines = Vec::new();
        for line in text.lines() {
            // Where the file was emptied, zeros take the place of what it had.
            let words: Vec<&str> = line.trim_start_matches('\0').split(' ').collect();
            if let ["seen", frontend, destination, client] = words[..] {
                lines.push([frontend, destination, client].map(str::to_owned));
            }
        }
        Ok(lines)
    }

    /// The original destinations of so many connections to a frontend, once they are over.
    fn saw(&self, frontend: &str, count: usize) -> Result<Vec<String>> {
        let mut seen = Vec::new();
        eventually(|| {
            seen = self.lines()?;
            seen.retain(|[name, ..]| name == frontend);
            ensure!(seen.len() >= count, "HAProxy has logged {seen:?} so far");
            Ok(())
        })?;
        ensure!(
            seen.len() == count,
            "HAProxy saw {count} and more: {seen:?}"
        );
        Ok(seen
            .into_iter()
            .map(|[_, destination, _]| destination)
            .collect())
    }

    fn forget(&self) -> Result<()> {
        Ok(fs::File::options()
            .write(true)
            .open(&self.log)?
            .set_len(0)?)
    }
}

/// A transparent relay: what comes goes on to where it was to go.
const HAPROXY: &str = "\
global
    uid 1500
    gid 1500
    log stdout format raw daemon
defaults
    mode tcp
    log global
    timeout connect 5s
    timeout client 30s
    timeout server 30s
    log-format \"seen %f %[dst]:%[dst_port] %ci\"
frontend outbound
    bind 127.0.0.1:15001
    bind ::1:15001
    default_backend on
frontend inbound
    bind 0.0.0.0:15003
    bind :::15003 v6only
    default_backend on
backend on
    server destination 0.0.0.0
";

/// The chains that Open Service Mesh's init container makes, for what is told apart here.
const OSM: &str = "\
*nat
:PROXY_INBOUND - [0:0]
:PROXY_IN_REDIRECT - [0:0]
:PROXY_OUTPUT - [0:0]
:PROXY_REDIRECT - [0:0]
-A PROXY_IN_REDIRECT -p tcp -j REDIRECT --to-port 15003
-A PREROUTING -p tcp -j PROXY_INBOUND
-A PROXY_INBOUND -p tcp --dport 15010 -j RETURN
-A PROXY_INBOUND -p tcp --dport 15901 -j RETURN
-A PROXY_INBOUND -p tcp -m multiport --dports 80 -j RETURN
-A PROXY_INBOUND -p tcp -j PROXY_IN_REDIRECT
-A PROXY_REDIRECT -p tcp -j REDIRECT --to-port 15001
-A OUTPUT -p tcp -j PROXY_OUTPUT
-A PROXY_OUTPUT -d 10.244.1.6/32 -j RETURN
-A PROXY_OUTPUT -p tcp -m multiport --dports 80 -j RETURN
-A PROXY_OUTPUT -o lo ! -d 127.0.0.1/32 -m owner --uid-owner 1500 -j PROXY_IN_REDIRECT
-A PROXY_OUTPUT -o lo -m owner ! --uid-owner 1500 -j RETURN
-A PROXY_OUTPUT -m owner --uid-owner 1500 -j RETURN
-A PROXY_OUTPUT -d 127.0.0.1/32 -j RETURN
-A PROXY_OUTPUT -j PROXY_REDIRECT
COMMIT
";

/// The same, in our words.
fn osm() -> Value {
    json!({
        "excludeOutboundIPRanges": ["10.244.1.6/32", "fd00:10:244:1::6/128"],
        "excludeOutboundPorts": [80],
        "excludeInboundPorts": [80],
    })
}

/// What client, proxy and servers see.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    client: Vec<(u64, Vec<String>, Vec<String>)>,
    proxy: Vec<String>,
}

fn seen(report: &Report) -> (u64, Vec<String>, Vec<String>) {
    let servers = report.endpoints.iter().map(|(name, endpoint)| {
        let sources: Vec<_> = endpoint.sources.keys().collect();
        format!("{name} saw {sources:?}")
    });
    let peers = report.peers.iter().map(ToString::to_string);
    (report.answered, servers.collect(), peers.collect())
}

/// Connections of `app` that are captured, that are excluded by range, port and loopback.
fn outbound(world: &World, proxy: &Haproxy) -> Result<Seen> {
    proxy.forget()?;
    let app = world.app();
    let mut client = Vec::new();
    for (to, how) in [
        ("10.244.1.5:7", "connect --count 3"),
        ("10.244.2.5:7", "connect --count 2"),
        ("10.244.1.5:7", "connect --v4-mapped --count 2"),
        ("10.244.1.6:7", "connect --count 2"),
        ("10.244.2.5:80", "http --count 2"),
    ] {
        client.push(seen(&ask(app, to, how)?));
    }
    let mut saw = proxy.saw("outbound", 7)?;
    saw.sort();
    Ok(Seen { client, proxy: saw })
}

fn haproxy_sees_what_it_sees_behind_open_service_meshs_rules() -> Result<()> {
    let mut world = World::new()?;
    let proxy = world.haproxy()?;
    let rules = world.state.path().join("rules");
    fs::write(&rules, OSM)?;
    let load = format!("iptables-legacy-restore < {}", rules.display());
    world.app().command("sh").args(["-c", &load]).run()?;
    let theirs = outbound(&world, &proxy)?;
    world
        .app()
        .command("iptables-legacy")
        .args(["-t", "nat", "-F"])
        .run()?;
    world.capture(foreign(), osm())?;
    let ours = outbound(&world, &proxy)?;
    ensure!(
        ours == theirs,
        "not the same:\nwith iptables {theirs:#?}\nwith ours {ours:#?}"
    );
    // And what iptables' rules for IPv4 do not show.
    let six = "[fd00:10:244:1::5]:7";
    peer_is(
        &reaches(world.app(), six, "connect --count 3", &["one"])?,
        six,
    )?;
    ensure!(
        world.verdicts(Reason::Captured)? == 10,
        "not 10 were captured"
    );
    fails(world.app(), "127.0.0.1:15001", "connect", "ECONNREFUSED")?;
    ensure!(
        world.verdicts(Reason::Recursive)? == 1,
        "not refused as recursive"
    );
    // Excluded by its port, and a service all the same.
    reaches(world.app(), "10.96.0.10:80", "connect", &["far"])?;
    Ok(())
}

fn haproxy_takes_inbound_connections() -> Result<()> {
    let mut world = World::new()?;
    let one = world.lab.pod("one").clone();
    let far = world.lab.pod("far").clone();
    // It listens before it is known to be a workload's: its socket is taken over.
    let proxy = world.haproxy()?;
    world.capture(foreign(), osm())?;
    for (client, to) in [
        (&one, "10.244.1.8:7"),
        (&far, "10.244.1.8:7"),
        (&one, "[fd00:10:244:1::8]:7"),
    ] {
        reaches(client, to, "connect", &["app"])?;
    }
    reaches(&one, "10.244.1.8:80", "http", &["app"])?;
    let saw = proxy.saw("inbound", 3)?;
    ensure!(
        saw == ["10.244.1.8:7", "10.244.1.8:7", "fd00:10:244:1::8:7"],
        "{saw:?}"
    );
    // Nobody serves the port: HAProxy accepts, and finds nobody.
    let report = ask(&one, "10.244.1.8:9", "connect")?;
    ensure!(report.answered == 0, "{report:?}");
    // It is killed: refused, and not the application's.
    drop(proxy);
    refused(&one, "10.244.1.8:7", "connect")?;
    reaches(&one, "10.244.1.8:80", "http", &["app"])?;
    // It is started: the kernel notices that it listens.
    let proxy = world.haproxy()?;
    eventually(|| reaches(&one, "10.244.1.8:7", "connect", &["app"]).map(|_| ()))?;
    drop(proxy);
    Ok(())
}

/// Few ports, so that each is used again and again, by captured and by other connections.
fn the_original_destination_is_right_in_thousands_of_connections() -> Result<()> {
    let mut world = World::new()?;
    let app = world.app().clone();
    let ports = "/proc/sys/net/ipv4/ip_local_port_range";
    let narrow = format!("echo '20000 20999' > {ports}");
    let reuse = "echo 1 > /proc/sys/net/ipv4/tcp_tw_reuse";
    app.command("sh").args(["-c", &narrow]).run()?;
    app.command("sh").args(["-c", reuse]).run()?;
    let _proxy = world.haproxy()?;
    let rules = json!({ "excludeOutboundIPRanges": ["10.244.2.0/24"] });
    world.capture(foreign(), rules)?;
    let run = |to: &str, count: usize| {
        app.probe("connect")
            .args(["--to", to, "--count", &count.to_string()])
            .stdout_piped()
            .spawn()
    };
    let count = if dataplane_tests::emulated() {
        300
    } else {
        5000
    };
    let runs = [
        ("10.244.1.5:7", "one"),
        ("10.244.1.6:7", "two"),
        ("10.244.2.5:7", "far"),
        ("[fd00:10:244:1::5]:7", "one"),
    ];
    let started: Vec<_> = runs
        .iter()
        .map(|(to, _)| run(to, count))
        .collect::<Result<_, _>>()?;
    for (process, (to, name)) in started.into_iter().zip(runs) {
        let report: Report = process.wait_json()?;
        ensure!(
            report.answered == report.attempts && report.endpoints.keys().eq([name]),
            "connections to {to} did not all reach {name}: {report:?}"
        );
        peer_is(&report, to)?;
    }
    ensure!(
        world.verdicts(Reason::OriginLost)? == 0,
        "destinations were lost"
    );
    let captured = world.verdicts(Reason::Captured)?;
    ensure!(captured == 3 * count as u64, "{captured} were captured");
    Ok(())
}

fn our_proxy_takes_both_directions_and_keeps_the_clients_address() -> Result<()> {
    let mut world = World::new()?;
    let one = world.lab.pod("one").clone();
    world.capture(json!({}), json!({ "mode": "proxy" }))?;
    let app = world.app().clone();
    for (to, name) in [
        ("10.244.1.5:7", "one"),
        ("10.244.2.5:7", "far"),
        ("[fd00:10:244:1::6]:7", "two"),
    ] {
        let (report, counted) = world.counted(Reason::Captured, || {
            reaches(&app, to, "connect --count 20", &[name])
        })?;
        ensure!(counted == 20, "{counted} of 20 were captured");
        peer_is(&report, to)?;
        let sources: Vec<_> = report.endpoints[name].sources.keys().collect();
        ensure!(
            sources
                .iter()
                .all(|source| app.addresses().contains(source)),
            "{name} saw {sources:?}"
        );
    }
    // By a service, whose endpoint the proxy chooses.
    peer_is(
        &reaches(&app, "10.96.0.10:80", "connect --count 5", &["far"])?,
        "10.96.0.10:80",
    )?;
    for to in ["10.244.1.8:7", "[fd00:10:244:1::8]:7"] {
        let (report, counted) = world.counted(Reason::CapturedInbound, || {
            reaches(&one, to, "connect --count 20", &["app"])
        })?;
        ensure!(counted == 20, "{counted} of 20 were captured");
        let sources: Vec<_> = report.endpoints["app"].sources.keys().collect();
        ensure!(
            sources
                .iter()
                .all(|source| one.addresses().contains(source)),
            "the application saw {sources:?}"
        );
    }
    Ok(())
}

fn rules_change_while_connections_live() -> Result<()> {
    let mut world = World::new()?;
    let pods = world.state.path().join("pods.yaml");
    let write = |annotations: Value, mode: &str| -> Result<()> {
        Ok(fs::write(&pods, pod(mode, annotations).to_string())?)
    };
    write(json!({}), "ambient")?;
    let config = json!({ "rules": { "mode": "proxy" } });
    world.agent_with(&config, std::slice::from_ref(&pods))?;
    let app = world.app().clone();
    let captured = |world: &World, to: &str, name: &str, wanted: bool| {
        eventually(|| {
            let (_, counted) =
                world.counted(Reason::Captured, || reaches(&app, to, "connect", &[name]))?;
            ensure!((counted == 1) == wanted, "captured {counted} times");
            Ok(())
        })
    };
    captured(&world, "10.244.1.5:7", "one", true)?;
    // Connections that live through all of it.
    let mut busy = Vec::new();
    for to in ["10.244.1.5:7", "10.244.1.6:7"] {
        let mut process = app
            .probe("hold")
            .args(["--to", to])
            .stdin_piped()
            .stdout_piped()
            .spawn()?;
        process.wait_for_line()?;
        busy.push(process);
    }
    let excluded = json!({
        "traffic.sidecar.istio.io/excludeOutboundIPRanges": "10.244.1.5/32",
        "openservicemesh.io/outbound-port-exclusion-list": "80",
    });
    write(excluded, "ambient")?;
    captured(&world, "10.244.1.5:7", "one", false)?;
    captured(&world, "10.244.1.6:7", "two", true)?;
    // Nonsense changes nothing, and says what it is.
    let wrong = json!({ "traffic.sidecar.istio.io/excludeOutboundPorts": "80,http" });
    write(wrong, "ambient")?;
    eventually(|| {
        let log = world.agent()?.log();
        ensure!(
            log.contains("Pod default/app") && log.contains("\"http\" is no port"),
            "{log}"
        );
        Ok(())
    })?;
    captured(&world, "10.244.1.5:7", "one", false)?;
    captured(&world, "10.244.1.6:7", "two", true)?;
    // Released: nothing is captured any more, and nothing breaks.
    write(json!({}), "none")?;
    captured(&world, "10.244.1.6:7", "two", false)?;
    for mut process in busy {
        process.close_stdin();
        process
            .wait()
            .context("a connection that was there before")?;
    }
    Ok(())
}

/// The pod `app`, as Kubernetes has it.
#[expect(
    clippy::needless_pass_by_value,
    reason = "made for it where it is called"
)]
fn pod(mode: &str, annotations: Value) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "app",
            "namespace": "default",
            "labels": { "app": "app", "istio.io/dataplane-mode": mode },
            "annotations": annotations,
        },
        "spec": { "nodeName": "node1", "containers": [] },
        "status": {
            "phase": "Running",
            "podIPs": [{ "ip": "10.244.1.8" }, { "ip": "fd00:10:244:1::8" }],
        },
    })
}

fn pods_ask_by_label_and_annotation() -> Result<()> {
    let mut world = World::new()?;
    let pods = world.state.path().join("pods.yaml");
    let mut unlabelled = pod("ambient", json!({}));
    unlabelled["metadata"]["labels"] = json!({});
    let namespace = json!({
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": "default",
            "labels": { "istio.io/dataplane-mode": "ambient" },
            "annotations": { "traffic.sidecar.istio.io/includeOutboundPorts": "7",
                "traffic.sidecar.istio.io/includeOutboundIPRanges": "192.0.2.0/24" },
        },
    });
    let all = json!({ "apiVersion": "v1", "kind": "List", "items": [namespace, unlabelled] });
    fs::write(&pods, all.to_string())?;
    let config = json!({ "rules": { "mode": "proxy" } });
    world.agent_with(&config, &[pods])?;
    let app = world.app();
    let (_, counted) = world.counted(Reason::Captured, || {
        reaches(app, "10.244.1.5:7", "connect --count 3", &["one"])
    })?;
    ensure!(counted == 3, "captured {counted} of 3");
    let (_, counted) = world.counted(Reason::ExcludedRange, || {
        reaches(app, "10.244.1.5:80", "http --count 3", &["one"])
    })?;
    ensure!(counted == 3, "excluded {counted} of 3");
    Ok(())
}

fn without_a_proxy_it_is_refused_or_passes() -> Result<()> {
    let mut world = World::new()?;
    let app = world.app().clone();
    let one = world.lab.pod("one").clone();
    world.capture(foreign(), json!({}))?;
    let ((), counted) = world.counted(Reason::ProxyDown, || {
        refused(&app, "10.244.1.5:7", "connect --count 2")?;
        refused(&one, "10.244.1.8:7", "connect")
    })?;
    ensure!(counted == 3, "{counted} of 3");
    world.capture(foreign(), json!({ "withoutProxy": "pass" }))?;
    let (_, counted) = world.counted(Reason::ProxyBypassed, || {
        reaches(&app, "10.244.1.5:7", "connect --count 2", &["one"])?;
        reaches(&one, "10.244.1.8:7", "connect", &["app"])
    })?;
    ensure!(counted == 3, "{counted} of 3");
    Ok(())
}

fn unknown_destinations_are_refused_at_once() -> Result<()> {
    for mode in ["kernel", "proxy"] {
        let mut world = World::new()?;
        let app = world.app().clone();
        world.capture(json!({}), json!({ "egress": "deny", "mode": mode }))?;
        let ((), counted) = world.counted(Reason::EgressDenied, || {
            refused(&app, "10.244.1.5:7", "connect --count 2")?;
            refused(&app, "192.0.2.1:80", "connect")?;
            refused(&app, "[fd00:10:244:1::6]:7", "connect")
        })?;
        ensure!(counted == 4, "{mode}: {counted} of 4");
        // A service, its endpoint, itself.
        reaches(&app, "10.96.0.10:80", "connect --count 2", &["far"])?;
        reaches(&app, "10.244.2.5:7", "connect", &["far"])?;
    }
    Ok(())
}

fn a_guarded_namespace_waits_for_the_agent() -> Result<()> {
    let mut world = World::new()?;
    let mut config = mesh(foreign(), json!({}));
    config["guard"] = json!(true);
    world.agent_with(&config, &[])?;
    // Known, and no workload.
    let one = world.lab.pod("one");
    reaches(one, "10.244.2.5:7", "connect", &["far"])?;
    // Not looked at: its cookie is new.
    let script = "exec unshare --net \"$0\" connect --to 127.0.0.1:1";
    let probe = world.lab.programs().probe()?;
    let (said, counted) = world.counted(Reason::Guarded, || {
        let output = one
            .command("sh")
            .args(["-c", script])
            .arg(&probe)
            .output()?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    })?;
    ensure!(
        counted == 1 && said.contains("ECONNREFUSED"),
        "{counted}: {said}"
    );
    Ok(())
}

fn what_goes_direct_is_decided_in_the_kernel() -> Result<()> {
    let mut world = World::new()?;
    let app = world.app().clone();
    world.capture(json!({}), json!({ "mode": "kernel" }))?;
    let (report, counted) = world.counted(Reason::Direct, || {
        reaches(&app, "10.96.0.10:80", "connect --count 20", &["far"])
    })?;
    ensure!(counted == 20, "{counted} of 20");
    peer_is(&report, "10.96.0.10:80")?;
    ensure!(world.verdicts(Reason::Captured)? == 0, "some were captured");
    Ok(())
}

fn cleanup_leaves_nothing_of_a_mesh() -> Result<()> {
    let mut world = World::new()?;
    let app = world.app().clone();
    let one = world.lab.pod("one").clone();
    world.capture(foreign(), json!({}))?;
    refused(&app, "10.244.1.5:7", "connect")?;
    let agent = world.agent.as_mut().context("an agent")?;
    agent.kill();
    // Its programs stay, and are as strict.
    refused(&app, "10.244.1.5:7", "connect")?;
    refused(&one, "10.244.1.8:7", "connect")?;
    let said = agent.dataplane(["cleanup"]).run()?;
    ensure!(said.contains("inbound_lookup"), "{said}");
    reaches(&app, "10.244.1.5:7", "connect", &["one"])?;
    reaches(&one, "10.244.1.8:7", "connect", &["app"])?;
    if fs::read_dir(agent.bpffs()).is_ok_and(|mut left| left.next().is_some()) {
        bail!("something is left in {}", agent.bpffs().display());
    }
    Ok(())
}
