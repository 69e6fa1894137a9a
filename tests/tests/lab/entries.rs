//! ServiceEntries, as clients see them: hosts outside of the cluster's services, at addresses of their own.

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, SocketAddr},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::{Port, Protocol, decide, tables::FrontendKey};
use dataplane_tests::{
    Agent, Lab,
    api::{ApiServer, Cluster as Objects, Options, Resource, objects},
    patience,
    report::LoadReport,
};
use kernel::tables::Tables;
use serde_json::{Value, json};

use crate::{
    cluster::{Cluster, TCP, ask, eventually, peer_is, reaches, refused, serve},
    outcome::run,
    readers::memory,
};

scenarios! {
    Dataplane:
    a_host_is_reached_at_the_addresses_that_it_was_given,
    stated_addresses_and_weights_hold_and_a_wrong_entry_is_left_out,
    a_restart_moves_no_address,
    an_address_serves_on_when_a_control_plane_gives_another,
    entries_are_noticed_when_the_cluster_has_them,
    large_entries_cost_a_bounded_amount_of_memory_and_give_it_back,
    changes_of_one_namespace_come_between_those_of_another,
}

/// An entry of `default` with the TCP port 80, which leads to these endpoints, with their weights.
fn entry(name: &str, endpoints: &[(IpAddr, u32)], fields: Value) -> Value {
    let endpoints = endpoints.iter().map(|(address, weight)| {
        json!({ "address": address, "weight": weight, "ports": { "web": TCP } })
    });
    let mut spec = json!({
        "hosts": [format!("{name}.example.com")], "resolution": "STATIC",
        "ports": [{ "number": 80, "name": "web", "protocol": "HTTP" }],
        "endpoints": endpoints.collect::<Vec<_>>(),
    });
    if let Value::Object(fields) = fields {
        for (field, value) in fields {
            spec[field] = value;
        }
    }
    json!({
        "apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry",
        "metadata": { "name": name, "namespace": "default" }, "spec": spec,
    })
}

fn both(lab: &Lab, pod: &str) -> [(IpAddr, u32); 2] {
    let pod = lab.pod(pod);
    [(pod.ipv4().into(), 1), (pod.ipv6().into(), 1)]
}

/// Returns the addresses of an entry's hosts.
fn vips(agent: &Agent, name: &str) -> Result<Vec<IpAddr>> {
    let services = run(agent, &format!("services serviceentry:{name} -o json"))?.json()?;
    let vips = services[0]["cluster_ips"].as_array().context("no list")?;
    let vips = vips.iter().filter_map(|vip| vip.as_str()?.parse().ok());
    Ok(vips.collect())
}

/// Two hosts at one port, each with its own endpoint, by both families.
fn a_host_is_reached_at_the_addresses_that_it_was_given() -> Result<()> {
    let cluster = Cluster::of_sockets(|_| Vec::new())?;
    let lab = &cluster.lab;
    let entries = [
        entry("one", &both(lab, "far"), json!({})),
        entry("two", &both(lab, "near"), json!({})),
    ];
    cluster.manifests.write_with(&[], &entries)?;
    eventually(|| vips(&cluster.agent, "two").map(drop))?;
    for (name, endpoint) in [("one", "far"), ("two", "near")] {
        let vips = vips(&cluster.agent, name)?;
        ensure!(
            vips.len() == 2 && vips[0].to_string().starts_with("240.240."),
            "{vips:?}"
        );
        for vip in vips {
            let to = SocketAddr::new(vip, 80).to_string();
            for client in [cluster.client(), lab.node("node2")] {
                let report = reaches(client, &to, "connect --count 5", &[endpoint])?;
                peer_is(&report, &to)?;
                // Not a port of the entry.
                refused(
                    client,
                    &SocketAddr::new(vip, 81).to_string(),
                    "connect --count 2",
                )?;
            }
            run(&cluster.agent, &format!("explain node {to}"))?
                .says(&[&format!("default/serviceentry:{name}")])?;
        }
    }
    Ok(())
}

/// A client that has the host's first address goes on while the host has another address from the agent or a control
/// plane.
fn an_address_serves_on_when_a_control_plane_gives_another() -> Result<()> {
    let cluster = Cluster::of_sockets(|_| Vec::new())?;
    let lab = &cluster.lab;
    // Of one host, each with its own port.
    let more = json!({
        "hosts": ["one.example.com"], "ports": [{ "number": 81, "name": "web", "protocol": "HTTP" }],
    });
    let plain = [
        entry("one", &both(lab, "far"), json!({})),
        entry("more", &both(lab, "near"), more),
    ];
    cluster.manifests.write_with(&[], &plain)?;
    eventually(|| vips(&cluster.agent, "one").map(drop))?;
    let own = vips(&cluster.agent, "one")?;
    let client = cluster.client();
    let reached = |vip: IpAddr| -> Result<()> {
        for (port, endpoint) in [(80, "far"), (81, "near")] {
            let to = SocketAddr::new(vip, port).to_string();
            reaches(client, &to, "connect --count 3", &[endpoint])?;
        }
        Ok(())
    };
    own.iter().try_for_each(|vip| reached(*vip))?;
    let status = cluster.status()?.to_string();
    ensure!(!status.contains("claimed by several"), "{status}");
    let load = client.load(&[
        "--to",
        &SocketAddr::new(own[0], 80).to_string(),
        "--pause-us",
        "500",
    ])?;
    let told = plain.map(|mut entry| {
        entry["status"] = json!({ "addresses": [
            { "host": "one.example.com", "value": "240.240.7.7" },
            { "host": "one.example.com", "value": "2001:2::7:7" },
        ]});
        entry
    });
    cluster.manifests.write_with(&[], &told)?;
    for vip in ["240.240.7.7", "2001:2::7:7"] {
        let vip = vip.parse()?;
        eventually(|| reached(vip))?;
    }
    own.iter().try_for_each(|vip| reached(*vip))?;
    let report: LoadReport = load.wait_json()?;
    ensure!(
        report.errors.is_empty() && report.answered > 20,
        "{report:?}"
    );
    Ok(())
}

fn stated_addresses_and_weights_hold_and_a_wrong_entry_is_left_out() -> Result<()> {
    const COUNT: u32 = 5_000;
    let cluster = Cluster::of_sockets(|_| Vec::new())?;
    let lab = &cluster.lab;
    let node = lab.node("node2").ipv4();
    let weighted = [
        (lab.pod("far").ipv4().into(), 90),
        (lab.pod("near").ipv4().into(), 10),
    ];
    let stated = json!({ "addresses": ["203.0.113.7", "2001:db8:7::7"] });
    let [_, v6] = both(lab, "near2");
    let all = [&weighted[..], &[v6]].concat();
    cluster.manifests.write_with(
        &[],
        &[
            entry("db", &all, stated),
            entry("wrong", &[([127, 0, 0, 1].into(), 1)], json!({})),
            entry("thief", &weighted, json!({ "addresses": [node] })),
        ],
    )?;
    let client = cluster.client();
    let to = "203.0.113.7:80";
    eventually(|| {
        reaches(
            client,
            "[2001:db8:7::7]:80",
            "connect --count 3",
            &["near2"],
        )
        .map(drop)
    })?;
    let report = ask(client, to, &format!("connect --count {COUNT}"))?;
    ensure!(report.answered == u64::from(COUNT), "{report:?}");
    let near = report
        .endpoints
        .get("near")
        .map_or(0, |endpoint| endpoint.answers);
    let part = f64::from(u32::try_from(near)?) / f64::from(COUNT);
    // Six times the deviation that chance has here.
    ensure!((part - 0.1).abs() < 0.025, "{part} of the connections");
    // The node's own address is not an entry's.
    let report = ask(
        client,
        &format!("{node}:80"),
        "connect --count 2 --timeout-ms 300",
    )?;
    ensure!(report.answered == 0, "{report:?}");
    let status = cluster.status()?.to_string();
    for part in [
        "ServiceEntry default/wrong",
        "spec.endpoints[0].address: 127.0.0.1 is a loopback address",
        "ServiceEntry default/thief",
        "it is an address of this node",
    ] {
        ensure!(status.contains(part), "no {part} in {status}");
    }
    // Its author has to act; the node is healthy.
    run(&cluster.agent, "status")?.says(&["ServiceEntry default/wrong"])?;
    ensure!(
        run(&cluster.agent, "services -o json")?
            .json()?
            .as_array()
            .map(Vec::len)
            == Some(1),
        "more than the one that makes sense"
    );
    Ok(())
}

fn a_restart_moves_no_address() -> Result<()> {
    let mut cluster = Cluster::of_sockets(|_| Vec::new())?;
    let entry = entry("db", &both(&cluster.lab, "near"), json!({}));
    cluster
        .manifests
        .write_with(&[], std::slice::from_ref(&entry))?;
    eventually(|| vips(&cluster.agent, "db").map(drop))?;
    let file = cluster.agent.socket().with_file_name("vips");
    let text = fs::read_to_string(&file)?;
    ensure!(text.starts_with("default db.example.com "), "{text}");
    // As if another host had been before it in its sequence.
    cluster.agent.kill();
    fs::write(&file, "default db.example.com 258\n")?;
    cluster.agent.start()?;
    let wanted: [IpAddr; 2] = ["240.240.1.2".parse()?, "2001:2::f0f0:102".parse()?];
    ensure!(vips(&cluster.agent, "db")? == wanted);
    reaches(
        cluster.client(),
        "240.240.1.2:80",
        "connect --count 3",
        &["near"],
    )?;
    // A file that cannot be read loses the remembered addresses, and nothing else.
    cluster.agent.kill();
    fs::write(&file, [0xff, b'\n', b'x'])?;
    cluster.agent.start()?;
    let [first, _] = vips(&cluster.agent, "db")?[..] else {
        anyhow::bail!("no address");
    };
    let to = SocketAddr::new(first, 80).to_string();
    reaches(cluster.client(), &to, "connect --count 3", &["near"]).map(drop)
}

/// The cluster gets Istio's kinds while the agent runs.
fn entries_are_noticed_when_the_cluster_has_them() -> Result<()> {
    let lab = Cluster::lab()?;
    let _server = serve(lab.pod("near"))?;
    let cluster = Objects::default();
    let node = lab.node("node2");
    cluster.apply(objects::node("node2", "zone-a", &[node.ipv4().into()]));
    let outside = lab.external("ext").clone();
    let address = SocketAddr::from((outside.ipv4(), 6443));
    let options = Options {
        certified: Some(vec![outside.ipv4().to_string()]),
        ..Options::default()
    };
    let server = ApiServer::bind(cluster, options, Box::new(move || outside.listen(address)))?;
    let directory = tempfile::tempdir()?;
    let kubeconfig = server.kubeconfig(directory.path())?;
    let file = directory.path().join("dataplane.yaml");
    let source = json!({ "kubernetes": { "kubeconfig": kubeconfig, "serviceEntries": true } });
    fs::write(&file, json!({ "source": source }).to_string())?;
    let agent = lab
        .agent("node2")
        .sockets_only()
        .args(["--config".as_ref(), file.as_os_str()])
        .start()?;
    let status = run(&agent, "status -o json")?.json()?;
    ensure!(status["agent"]["source"]["error"].is_null(), "{status}");
    server
        .cluster()
        .apply(entry("db", &both(&lab, "near"), json!({})));
    server.cluster().install_istio(Some("v1beta1"));
    let mut last = Ok(());
    // It asks every half minute.
    for _ in 0..patience(Duration::from_mins(2)).as_secs() {
        last = vips(&agent, "db").map(drop);
        if last.is_ok() {
            break;
        }
        std::thread::sleep(Duration::from_secs(1));
    }
    last?;
    for vip in vips(&agent, "db")? {
        let to = SocketAddr::new(vip, 80).to_string();
        reaches(lab.pod("sleep"), &to, "connect --count 3", &["near"])?;
    }
    Ok(())
}

/// A tenant's Service whose endpoint changes.
struct Changes<'a> {
    lab: &'a Lab,
    cluster: &'a Objects,
    bpffs: &'a Path,
    vip: IpAddr,
}

impl<'a> Changes<'a> {
    fn begin(lab: &'a Lab, cluster: &'a Objects, agent: &'a Agent) -> Result<Self> {
        let vip = IpAddr::from([10, 96, 7, 7]);
        cluster.apply(objects::service("changes", vip));
        let changes = Self {
            lab,
            cluster,
            bpffs: agent.bpffs(),
            vip,
        };
        eventually(|| {
            changes.change("near");
            ensure!(changes.endpoint().is_some(), "not there yet");
            Ok(())
        })?;
        Ok(changes)
    }

    fn change(&self, pod: &str) {
        let at = objects::endpoint(self.lab.pod(pod).ipv4().into(), "node2");
        self.cluster
            .apply(objects::slice("changes", "changes-1", TCP, &[at]));
    }

    /// The endpoint in the kernel's tables, which are others when they have grown.
    fn endpoint(&self) -> Option<IpAddr> {
        let tables = Tables::open(self.bpffs).ok()?;
        let (addr, port) = (self.vip.into(), Port::new(80));
        let frontend = decide::find_frontend(&tables, addr, port, Protocol::TCP, false);
        let endpoint = decide::only_endpoint(&tables, frontend);
        (!endpoint.is_none()).then(|| endpoint.addr.ip())
    }

    /// Returns the longest time that one of so many changes takes to reach the kernel's tables.
    fn longest(&self, count: u32) -> Result<Duration> {
        let mut longest = Duration::ZERO;
        for _ in 0..count {
            let pods = ["near", "near2"].map(|pod| IpAddr::from(self.lab.pod(pod).ipv4()));
            let to = usize::from(self.endpoint() == Some(pods[0]));
            let start = Instant::now();
            self.change(["near", "near2"][to]);
            while self.endpoint() != Some(pods[to]) {
                let waited = start.elapsed();
                ensure!(
                    waited < patience(Duration::from_mins(1)),
                    "after {waited:?}"
                );
                std::thread::sleep(Duration::from_micros(500));
            }
            longest = longest.max(start.elapsed());
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(longest)
    }
}

/// An agent on `node2` that reads an API server, ServiceEntries among it.
struct Site {
    server: ApiServer,
    agent: Agent,
    _directory: tempfile::TempDir,
}

impl Site {
    fn start(lab: &Lab) -> Result<Self> {
        let cluster = Objects::default();
        let node = lab.node("node2");
        cluster.apply(objects::node("node2", "zone-a", &[node.ipv4().into()]));
        cluster.install_istio(Some("v1beta1"));
        cluster.apply(entry("other", &both(lab, "near"), json!({})));
        let outside = lab.external("ext").clone();
        let address = SocketAddr::from((outside.ipv4(), 6443));
        let options = Options {
            certified: Some(vec![outside.ipv4().to_string()]),
            ..Options::default()
        };
        let server = ApiServer::bind(cluster, options, Box::new(move || outside.listen(address)))?;
        let directory = tempfile::tempdir()?;
        let kubeconfig = server.kubeconfig(directory.path())?;
        let file = directory.path().join("dataplane.yaml");
        let source = json!({ "kubernetes": { "kubeconfig": kubeconfig, "serviceEntries": true } });
        fs::write(&file, json!({ "source": source }).to_string())?;
        let agent = lab
            .agent("node2")
            .sockets_only()
            .args(["--config".as_ref(), file.as_os_str()])
            .start()?;
        eventually(|| vips(&agent, "other").map(drop))?;
        Ok(Self {
            server,
            agent,
            _directory: directory,
        })
    }
}

/// One of a tenant's entries, with so many ranges of 256 addresses.
fn large(lab: &Lab, number: u32, ranges: u32) -> Value {
    let ranges =
        (0..ranges).map(|range| format!("11.{}.{}.0/24", number * 4 + range / 256, range % 256));
    let addresses: Vec<String> = ranges.collect();
    let mut entry = entry(
        &format!("large{number}"),
        &both(lab, "near"),
        json!({ "addresses": addresses }),
    );
    entry["metadata"]["namespace"] = "tenant".into();
    entry
}

/// Ten million addresses in 0.8 MB of entries, which come and go. An earlier agent had gigabytes for them, and never
/// freed most.
fn large_entries_cost_a_bounded_amount_of_memory_and_give_it_back() -> Result<()> {
    const MIB: u64 = 1024;
    let lab = Cluster::lab()?;
    let _server = serve(lab.pod("near"))?;
    let site = Site::start(&lab)?;
    let Site { server, agent, .. } = &site;
    let before = memory(agent)?;
    let delete = || {
        for number in 0..40 {
            let name = format!("large{number}");
            server
                .cluster()
                .delete(Resource::ServiceEntries, "tenant", &name);
        }
    };
    // Nearly as many as a namespace may have: they are served, and a tenant's changes go on.
    let tables = || Tables::open(agent.bpffs());
    let changes = Changes::begin(&lab, server.cluster(), agent)?;
    let quiet = changes.longest(20)?;
    let mut longest = Duration::ZERO;
    for round in 0..2 {
        for number in 0..40 {
            server.cluster().apply(large(&lab, number, 9));
            if number % 8 == 0 {
                longest = longest.max(changes.longest(1)?);
            }
        }
        longest = longest.max(changes.longest(20)?);
        eventually(|| {
            let used = tables()?.contents()?.frontends.len();
            ensure!(used > 40 * 9 * 256, "round {round}: {used} frontends");
            Ok(())
        })?;
        if round == 0 {
            let with = memory(agent)?;
            eprintln!("{before} KiB before, {with} KiB with 92 160 addresses");
            ensure!(
                with < before + 192 * MIB,
                "{before} KiB, {with} KiB with them"
            );
        }
        delete();
        longest = longest.max(changes.longest(20)?);
        eventually(|| {
            let used = tables()?.contents()?.frontends.len();
            ensure!(used < 1000, "round {round}: {used} frontends");
            Ok(())
        })?;
    }
    eprintln!("a change of another tenant took at most {quiet:?}, and {longest:?} meanwhile");
    for number in 0..40 {
        server.cluster().apply(large(&lab, number, 1000));
    }
    eventually(|| {
        let status = run(agent, "status -o json")?.json()?.to_string();
        ensure!(
            status.contains("the entries of namespace tenant have more than"),
            "{status}"
        );
        Ok(())
    })?;
    let with = memory(agent)?;
    delete();
    // The agent gives memory back every half minute.
    let mut after = u64::MAX;
    for _ in 0..patience(Duration::from_mins(3)).as_secs() {
        after = memory(agent)?;
        if after < before + 16 * MIB {
            break;
        }
        std::thread::sleep(Duration::from_secs(1));
    }
    eprintln!("{before} KiB before, {with} KiB with them, {after} KiB afterwards");
    ensure!(
        with < before + 192 * MIB,
        "{before} KiB, {with} KiB with them"
    );
    ensure!(
        after < before + 16 * MIB,
        "{before} KiB, {after} KiB afterwards"
    );
    vips(agent, "other").map(drop)
}

/// A tenant's large change is written in parts. Changes of other tenants are written between the parts, so they do not
/// wait for the whole change.
fn changes_of_one_namespace_come_between_those_of_another() -> Result<()> {
    let lab = Cluster::lab()?;
    let site = Site::start(&lab)?;
    let Site { server, agent, .. } = &site;
    let changes = Changes::begin(&lab, server.cluster(), agent)?;
    let all = 40 * 9 * 256;
    let of_tenant = || -> Result<usize> {
        let contents = Tables::open(agent.bpffs())?.contents()?;
        let is_tenants =
            |key: &FrontendKey| matches!(key.addr.ip(), IpAddr::V4(ip) if ip.octets()[0] == 11);
        let keys = contents.frontends.iter();
        Ok(keys.filter(|(key, _)| is_tenants(key)).count())
    };
    for comes in [true, false] {
        for number in 0..40 {
            if comes {
                server.cluster().apply(large(&lab, number, 9));
            } else {
                let name = format!("large{number}");
                server
                    .cluster()
                    .delete(Resource::ServiceEntries, "tenant", &name);
            }
        }
        // How much of it was written when each of the other's changes was.
        let mut between = BTreeSet::new();
        let start = Instant::now();
        loop {
            changes.longest(1)?;
            let now = of_tenant()?;
            if now == if comes { all } else { 0 } {
                break;
            }
            if now != if comes { 0 } else { all } {
                between.insert(now);
            }
            ensure!(
                start.elapsed() < patience(Duration::from_mins(2)),
                "{now} of {all}"
            );
        }
        eprintln!("changes came when {between:?} of {all} were written");
        ensure!(between.len() >= 5, "{between:?}");
    }
    Ok(())
}
