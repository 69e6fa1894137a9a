//! Metrics, health and the admin endpoint, as Prometheus, the kubelet and a person see them.

use std::{fs, os::unix::fs::PermissionsExt as _};

use anyhow::{Result, anyhow, bail, ensure};
use dataplane_tests::{
    Host, Lab,
    openmetrics::{self, Sample},
};

use crate::{
    cluster::{Cluster, TCP, UDP, ask, eventually, fails, reaches, refused},
    manifest::{Config, Manifests, Service},
    outcome::{cannot_run, http, run},
};

scenarios! {
    Dataplane:
    metrics_count_what_clients_did,
    a_tenant_with_many_ports_leaves_others_their_series,
    counters_do_not_go_backwards,
    what_nobody_asked_for_is_for_nobody,
    the_admin_endpoint_is_where_it_is_asked_for,
    every_endpoint_can_be_turned_off,
    a_port_in_use_is_named_before_anything_is_touched,
}

/// The metrics of a node.
#[derive(Debug)]
pub struct Metrics(Vec<Sample>);

impl Metrics {
    /// Scrapes them as Prometheus does, on the node, and refuses invalid ones.
    pub fn scrape(node: &Host) -> Result<Self> {
        let (status, body) = http(node, "http://127.0.0.1:15020/metrics")?;
        ensure!(status == 200, "{status} {body}");
        Self::read(&body)
    }

    /// Parses a scraped text, likewise.
    pub fn read(text: &str) -> Result<Self> {
        let samples = openmetrics::parse(text);
        Ok(Self(samples.map_err(|error| anyhow!("{error}"))?))
    }

    /// All series.
    pub fn samples(&self) -> &[Sample] {
        &self.0
    }

    /// The sum over the series of this name with these labels, and perhaps more.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let series = self.0.iter().filter(|sample| {
            let has =
                |(key, value): &(&str, &str)| sample.labels.get(*key).is_some_and(|v| v == value);
            sample.name == name && labels.iter().all(has)
        });
        series.map(|sample| sample.value).sum()
    }

    /// How many connections were counted for a service.
    pub fn connections(&self, service: &str) -> f64 {
        self.sum("dataplane_connections_total", &[("service", service)])
    }

    pub fn is(&self, name: &str, labels: &[(&str, &str)], wanted: f64) -> Result<()> {
        let found = self.sum(name, labels);
        ensure!(
            (found - wanted).abs() < 0.5,
            "{name} with {labels:?} is {found}, not {wanted}: {:#?}",
            self.0.iter().filter(|s| s.name == name).collect::<Vec<_>>()
        );
        Ok(())
    }
}

const WEB: &str = "10.96.0.10:80";

fn web(lab: &Lab) -> Service {
    Service::new("web", &["10.96.0.10"])
        .port("tcp", 80, TCP)
        .port("udp", 53, UDP)
        .endpoints(&[lab.pod("far"), lab.pod("near")])
}

fn a_tenant_with_many_ports_leaves_others_their_series() -> Result<()> {
    let cluster = Cluster::of_sockets(|lab| {
        let many = ["10.96.1.1", "10.96.1.2"].map(|ip| {
            let hog = Service::new(&format!("hog-{ip}"), &[ip]).in_namespace("hog");
            (1..=6000).fold(hog, |hog, port| hog.port(&format!("p{port}"), port, TCP))
        });
        [vec![web(lab)], many.to_vec()].concat()
    })?;
    // The hog's ports are used more than the others'.
    refused(cluster.client(), "10.96.1.1:80", "connect --count 40")?;
    reaches(cluster.client(), WEB, "connect --count 7", &["far", "near"])?;
    let metrics = Metrics::scrape(cluster.lab.node("node2"))?;
    let connections = "dataplane_connections_total";
    let web = [("namespace", "default"), ("service", "web")];
    metrics.is(connections, &[web[0], web[1], ("port", "80")], 7.0)?;
    let refusals = [("namespace", "hog"), ("reason", "no-endpoints")];
    metrics.is("dataplane_refusals_total", &refusals, 40.0)?;
    let series = |namespace: &str| {
        let all = metrics.samples().iter();
        all.filter(|sample| sample.name == connections)
            .filter(|sample| {
                sample
                    .labels
                    .get("namespace")
                    .is_some_and(|n| n == namespace)
            })
            .count()
    };
    let (hogs, others) = (series("hog"), series("default"));
    ensure!(
        others == 2 && (5000..10_000).contains(&hogs),
        "{hogs} series of the hog, {others} of the others"
    );
    Ok(())
}

fn metrics_count_what_clients_did() -> Result<()> {
    let cluster = Cluster::of_sockets(|lab| {
        let empty = Service::new("empty", &["10.96.0.11"]).port("tcp", 80, TCP);
        let local = Service::new("local", &["10.96.0.12"]).port("tcp", 80, TCP);
        let local = local.set("internalTrafficPolicy", "Local");
        vec![web(lab), empty, local.endpoints(&[lab.pod("far")])]
    })?;
    let (client, node) = (cluster.client(), cluster.lab.node("node2"));
    let scrape = || Metrics::scrape(node);
    let before = scrape()?;
    before.is("dataplane_connections_total", &[], 0.0)?;

    reaches(client, WEB, "connect --count 30", &["far", "near"])?;
    // The node's own processes are counted too.
    reaches(node, WEB, "connect --count 12", &["far", "near"])?;
    ask(client, "10.96.0.10:53", "udp --unconnected --count 5")?;
    ask(client, "10.96.0.10:53", "udp --count 4")?;
    refused(client, "10.96.0.11:80", "connect --count 7")?;
    refused(client, "10.96.0.12:80", "connect --count 3")?;
    refused(client, "10.96.0.10:81", "connect --count 2")?;

    let after = scrape()?;
    let port = |port, protocol| {
        [
            ("namespace", "default"),
            ("service", "web"),
            ("port", port),
            ("protocol", protocol),
        ]
    };
    let connections = "dataplane_connections_total";
    after.is(connections, &port("80", "tcp"), 42.0)?;
    after.is(connections, &port("53", "udp"), 9.0)?;
    for (service, reason, wanted) in [
        ("empty", "no-endpoints", 7.0),
        ("local", "no-local-endpoint", 3.0),
        ("web", "port-not-served", 2.0),
    ] {
        let labels = [("service", service), ("reason", reason)];
        after.is("dataplane_refusals_total", &labels, wanted)?;
    }
    for (reason, wanted) in [
        ("translated", 51.0),
        ("no-endpoints", 7.0),
        ("no-local-endpoint", 3.0),
        ("port-not-served", 2.0),
    ] {
        let verdicts =
            |metrics: &Metrics| metrics.sum("dataplane_verdicts_total", &[("reason", reason)]);
        let counted = verdicts(&after) - verdicts(&before);
        ensure!(
            (counted - wanted).abs() < 0.5,
            "{counted} verdicts {reason}, not {wanted}"
        );
    }
    after.is("dataplane_services", &[], 3.0)?;
    // Of `web` two for each of its two ports, and one of `local`.
    after.is("dataplane_endpoints", &[], 5.0)?;
    after.is("dataplane_ready", &[], 1.0)?;
    after.is("dataplane_program_attached", &[], 9.0)?;
    after.is("dataplane_sync_duration_seconds_count", &[], 1.0)?;
    for (name, least) in [
        ("dataplane_last_sync_timestamp_seconds", 1e9),
        ("dataplane_start_time_seconds", 1e9),
        ("dataplane_build_info", 1.0),
        ("dataplane_table_entries", 1.0),
    ] {
        ensure!(after.sum(name, &[]) >= least, "{name}: {after:?}");
    }
    for table in ["FRONTENDS", "ENDPOINTS", "POOLS", "AFFINITY"] {
        let of = |name: &str| after.sum(name, &[("table", table)]);
        let (used, room) = (
            of("dataplane_table_entries"),
            of("dataplane_table_capacity"),
        );
        let limit = of("dataplane_table_limit");
        ensure!(
            used <= room && room <= limit && room > 0.0,
            "{table}: {used} of {room}, at most {limit}"
        );
        ensure!(of("dataplane_table_bytes") > 0.0, "{table} takes no memory");
    }
    // `services` counts as many.
    let services = run(&cluster.agent, "services web -o json")?
        .exits(0)?
        .json()?;
    let counted = |port: usize| services[0]["ports"][port]["connections"].as_u64();
    ensure!(
        (counted(0), counted(1)) == (Some(42), Some(9)),
        "{services:#}"
    );
    Ok(())
}

/// A service's counter does not become smaller by other endpoints, another port beside it, or a new agent.
fn counters_do_not_go_backwards() -> Result<()> {
    let mut cluster = Cluster::of_sockets(|lab| vec![web(lab)])?;
    let client = cluster.lab.pod("sleep").clone();
    let node = cluster.lab.node("node2").clone();
    let counted = |wanted: f64, when: &str| {
        let metrics = Metrics::scrape(&node)?;
        let found = metrics.connections("web");
        ensure!(
            (found - wanted).abs() < 0.5,
            "{when}: {found} connections, not {wanted}"
        );
        anyhow::Ok(())
    };
    reaches(&client, WEB, "connect --count 20", &["far", "near"])?;
    counted(20.0, "at first")?;

    let lab = &cluster.lab;
    let near2 = Service::new("web", &["10.96.0.10"]).port("tcp", 80, TCP);
    let near2 = near2.endpoints(&[lab.pod("near2")]);
    cluster.manifests.write(std::slice::from_ref(&near2))?;
    eventually(|| synced(&cluster, 2))?;
    reaches(&client, WEB, "connect --count 5", &["near2"])?;
    counted(25.0, "with another endpoint and a port less")?;

    let other = Service::new("other", &["10.96.0.11"]).port("tcp", 80, TCP);
    let other = other.endpoints(&[lab.pod("near")]);
    cluster.manifests.write(&[near2, other])?;
    eventually(|| synced(&cluster, 3))?;
    reaches(&client, "10.96.0.11:80", "connect --count 3", &["near"])?;
    reaches(&client, WEB, "connect --count 5", &["near2"])?;
    counted(30.0, "with another service beside it")?;

    cluster.agent.kill();
    reaches(&client, WEB, "connect --count 5", &["near2"])?;
    cluster.agent.start()?;
    counted(35.0, "after a restart, with what was connected meanwhile")
}

/// Checks the number of syncs since the agent started.
fn synced(cluster: &Cluster, syncs: u64) -> Result<()> {
    let status = run(&cluster.agent, "status -o json")?.json()?;
    let found = &status["agent"]["syncs"];
    ensure!(found.as_u64() == Some(syncs), "{found} syncs, not {syncs}");
    Ok(())
}

/// Paths that the agent serves at its socket.
const SOCKETS: [&str; 7] = [
    "/",
    "/status",
    "/services",
    "/pools",
    "/mesh",
    "/dns/cache",
    "/metrics",
];

/// Any user of the node, and any pod in its network, reaches its loopback; any host its address.
fn what_nobody_asked_for_is_for_nobody() -> Result<()> {
    let cluster = Cluster::of_sockets(|lab| vec![web(lab)])?;
    let node = cluster.lab.node("node2");
    fails(node, "127.0.0.1:15000", "connect --silent", "ECONNREFUSED")?;
    for client in [cluster.client(), node] {
        for port in [15000, 15020] {
            let to = format!("{}:{port}", node.ipv4());
            fails(client, &to, "connect --silent", "ECONNREFUSED")?;
        }
    }
    // Listeners for other hosts, and for the node alone.
    let listens = node.command("ss").args(["-Hltn"]).run()?;
    let at = listens
        .lines()
        .filter_map(|line| line.split_whitespace().nth(3));
    let mut at: Vec<&str> = at.collect();
    at.sort_unstable();
    let wanted = [
        "*:10256",
        "0.0.0.0:15021",
        "127.0.0.1:10249",
        "127.0.0.1:15020",
    ];
    ensure!(at == wanted, "{at:?}");
    // No port serves the socket's paths, except for /metrics on loopback.
    let own = node.ipv4().to_string();
    for (client, at, port, has_metrics) in [
        (cluster.client(), &*own, 15021, false),
        (cluster.client(), &*own, 10256, false),
        (node, "127.0.0.1", 15020, true),
        (node, "127.0.0.1", 10249, false),
    ] {
        for path in SOCKETS {
            let url = format!("http://{at}:{port}{path}");
            let (status, said) = http(client, &url)?;
            let wanted = if has_metrics && path == "/metrics" {
                200
            } else {
                404
            };
            ensure!(status == wanted, "{url}: {status} {said}");
        }
    }
    let flush = node.command("curl").args(["-sS", "-X", "POST"]);
    let flush = flush.args(["-w", "%{http_code}"]);
    let said = flush.arg("http://127.0.0.1:15020/dns/cache/flush").run()?;
    ensure!(said.ends_with("404"), "{said}");
    // The socket is root's, and serves all paths.
    run(&cluster.agent, "services")?.exits(0)?;
    let socket = cluster.agent.socket();
    let asked = node
        .command("curl")
        .args(["-sS", "--max-time", "5", "--unix-socket"]);
    let stranger = asked
        .arg(&socket)
        .arg("http://agent/status")
        .user(1000)
        .output()?;
    ensure!(!stranger.status.success(), "{stranger:?}");
    // A process that can open these files can lock them, and keep the next agent from starting.
    for locked in [cluster.agent.bpffs(), &socket.with_extension("turn")] {
        let mode = fs::metadata(locked)?.permissions().mode();
        ensure!(mode & 0o777 & !0o700 == 0, "{}: {mode:o}", locked.display());
    }
    Ok(())
}

fn the_admin_endpoint_is_where_it_is_asked_for() -> Result<()> {
    let flags = ["--admin-addr", "127.0.0.1:15000"];
    let cluster = Cluster::start_with(|lab| vec![web(lab)], &flags)?;
    let node = cluster.lab.node("node2");
    for path in ["status", "services", "pools", "version"] {
        let (status, body) = http(node, &format!("http://127.0.0.1:15000/{path}"))?;
        ensure!(status == 200, "{path}: {status} {body}");
        let _: serde_json::Value = serde_json::from_str(&body)?;
    }
    let (status, body) = http(node, "http://127.0.0.1:15000/nothing")?;
    ensure!(status == 404, "{status} {body}");
    for client in [cluster.client(), node] {
        let to = format!("{}:15000", node.ipv4());
        fails(client, &to, "connect --silent", "ECONNREFUSED")?;
    }
    // The two ports for every client do not serve the node's own state.
    for (port, path) in [(15020, "services"), (15021, "status")] {
        let (status, _) = http(node, &format!("http://127.0.0.1:{port}/{path}"))?;
        ensure!(status == 404, "{port} answers /{path}");
    }
    Ok(())
}

fn every_endpoint_can_be_turned_off() -> Result<()> {
    let off = Config::new("listen: {metrics: off, health: off, admin: off}")?;
    let cluster = Cluster::start_with(|lab| vec![web(lab)], &off.arguments())?;
    let node = cluster.lab.node("node2");
    for port in [15000, 15020, 15021] {
        let to = format!("127.0.0.1:{port}");
        fails(node, &to, "connect --silent", "ECONNREFUSED")?;
    }
    reaches(
        cluster.client(),
        WEB,
        "connect --count 20",
        &["far", "near"],
    )?;
    drop(cluster);
    let elsewhere = ["--metrics-addr", "127.0.0.1:9100"];
    let cluster = Cluster::start_with(|lab| vec![web(lab)], &elsewhere)?;
    let node = cluster.lab.node("node2");
    let (status, _) = http(node, "http://127.0.0.1:9100/metrics")?;
    ensure!(status == 200, "{status}");
    fails(node, "127.0.0.1:15020", "connect --silent", "ECONNREFUSED")
}

fn a_port_in_use_is_named_before_anything_is_touched() -> Result<()> {
    let lab = Cluster::lab()?;
    let manifests = Manifests::new(&[web(&lab)])?;
    let agent = lab
        .agent("node2")
        .sockets_only()
        .manifests(manifests.path())
        .prepare()?;
    let _taken = lab.node("node2").serve(&["--tcp", "0.0.0.0:15021"])?;
    let file = manifests.path();
    let arguments = ["--manifests".as_ref(), file.as_os_str()];
    cannot_run(&agent, arguments)?.exits(1)?.says(&[
        "0.0.0.0:15021",
        "health",
        "listen.health",
        "in use",
    ])?;
    if agent.bpffs().exists() {
        bail!("something was pinned in {}", agent.bpffs().display());
    }
    Ok(())
}
