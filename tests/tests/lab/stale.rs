//! Sockets that are connected, through a service, to an endpoint that goes away.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use aya::maps::{Array, Map, MapData};
use dataplane_common::{
    Addr, LAYOUT, Port, Protocol,
    packet::FlowKey,
    tables::{PeerSets, SOCKET_ELEMENTS, SOCKET_SETS, SOCKET_WAYS},
};
use dataplane_proof::wire::{Packet, flags};
use dataplane_tests::{Host, Process, report::Report};
use kernel::conntrack::Conntrack;

use crate::{
    cluster::{Cluster, TCP, UDP, eventually, reaches},
    crafted::packet,
    manifest::{Condition, Config, Service},
    metrics::Metrics,
    sockets::{address, inject, link, tcp, transfer},
};

scenarios! {
    Dataplane:
    connected_udp_moves_when_its_endpoint_goes,
    tcp_is_destroyed_only_if_asked,
    nothing_is_destroyed_if_not_asked,
    sockets_beyond_the_table_are_found_too,
    a_syn_goes_to_no_endpoint_that_is_not_listed,
}

const VIPS: [&str; 2] = ["10.96.0.40", "fd00:96::40"];

fn service(cluster: &Cluster, endpoints: &[(&str, Condition)]) -> Service {
    on(&cluster.lab, endpoints)
}

fn on(lab: &dataplane_tests::Lab, endpoints: &[(&str, Condition)]) -> Service {
    endpoints.iter().fold(
        Service::new("stale", &VIPS)
            .port("tcp", 80, TCP)
            .port("udp", 53, UDP),
        |service, (pod, condition)| service.endpoint(lab.pod(pod), *condition),
    )
}

/// Starts an agent with this configuration, which it reads once.
fn start(config: &str) -> Result<Cluster> {
    let config = Config::new(config)?;
    Cluster::start_with(
        |lab| vec![on(lab, &[("near", Condition::Ready)])],
        &config.arguments(),
    )
}

/// One connected socket that sends until the process ends; a new one when it fails.
fn resolver(cluster: &Cluster, to: &str, how: &[&str]) -> Result<Process> {
    let probe = cluster
        .client()
        .probe("udp")
        .args(["--one-socket", "--each", "--until-stdin-closes", "--to", to])
        .arg("--replace-broken")
        .args(how);
    let mut process = probe.stdin_piped().stdout_piped().spawn()?;
    process.wait_for_line()?;
    Ok(process)
}

fn connection(cluster: &Cluster, to: &str) -> Result<Process> {
    Ok(cluster.client().hold(to)?)
}

fn answers(report: &Report) -> Vec<Option<&str>> {
    report.each.iter().map(|a| a.endpoint.as_deref()).collect()
}

/// A resolver's socket that goes on sending to a pod that is gone is the most frequent complaint of kube-proxy's users.
/// Here it fails at once, the process makes another, and that one goes to a pod that is there. A socket that is
/// connected to the pod itself, not through the service, is left alone.
fn connected_udp_moves_when_its_endpoint_goes() -> Result<()> {
    let cluster = start("")?;
    let near = cluster.lab.pod("near").addresses();
    let mut moving = Vec::new();
    let mut staying = Vec::new();
    for (vip, near) in VIPS.into_iter().zip(near) {
        let to = SocketAddr::new(vip.parse()?, 53).to_string();
        moving.push((to.clone(), resolver(&cluster, &to, &[])?));
        if near.is_ipv4() {
            moving.push((to.clone(), resolver(&cluster, &to, &["--v4-mapped"])?));
        }
        let direct = SocketAddr::new(near, UDP).to_string();
        staying.push((direct.clone(), resolver(&cluster, &direct, &[])?));
        let tcp = SocketAddr::new(vip.parse()?, 80).to_string();
        staying.push((tcp.clone(), connection(&cluster, &tcp)?));
        reaches(cluster.client(), &to, "udp --count 10", &["near"])?;
    }

    // A last endpoint that goes leaves its sockets alone until there is another.
    cluster.manifests.write(&[service(&cluster, &[])])?;
    eventually(|| crate::cluster::refused(cluster.client(), "10.96.0.40:53", "udp"))?;
    // An endpoint that still serves while it terminates is not gone either.
    cluster.manifests.write(&[service(
        &cluster,
        &[
            ("far", Condition::Ready),
            ("near", Condition::ServingTerminating),
        ],
    )])?;
    eventually(|| reaches(cluster.client(), "10.96.0.40:53", "udp", &["far"]).map(drop))?;
    std::thread::sleep(Duration::from_millis(300));
    let early = destroyed(&cluster, "udp")?;
    ensure!(early == 0, "{early} sockets too early");

    cluster
        .manifests
        .write(&[service(&cluster, &[("far", Condition::Ready)])])?;
    let expected = moving.len() as u64;
    eventually(|| {
        let count = destroyed(&cluster, "udp")?;
        ensure!(count == expected, "destroyed {count}, not {expected}");
        Ok(())
    })?;
    std::thread::sleep(Duration::from_millis(100));
    for (to, process) in moving {
        let report: Report = process.wait_json()?;
        let answers = answers(&report);
        let left = answers.partition_point(|endpoint| *endpoint == Some("near"));
        ensure!(
            left > 0 && answers.get(left) == Some(&None) && left + 1 < answers.len(),
            "{to}: did not move: {:?} {:?}",
            report.endpoints,
            report.errors
        );
        ensure!(
            answers[left + 1..].iter().all(|e| *e == Some("far")),
            "{to}: not near, then far: {answers:?}"
        );
        let error = report.each[left].error.as_deref();
        // The socket has no peer any more; a call that waits gets the reason as its error.
        ensure!(
            matches!(error, Some("ECONNABORTED" | "EDESTADDRREQ")),
            "{to}: {error:?}"
        );
    }
    for (to, process) in staying {
        let report: Report = process.wait_json()?;
        ensure!(
            report.errors.is_empty() && report.endpoints.keys().eq(["near"]),
            "{to} was not left alone: {:?} {:?}",
            report.endpoints,
            report.errors
        );
    }
    Ok(())
}

fn tcp_is_destroyed_only_if_asked() -> Result<()> {
    let cluster = start("destroyStale: [tcp, udp]")?;
    let through = connection(&cluster, "10.96.0.40:80")?;
    let resolver = resolver(&cluster, "[fd00:96::40]:53", &[])?;
    let direct = connection(&cluster, &format!("10.244.2.10:{TCP}"))?;
    cluster
        .manifests
        .write(&[service(&cluster, &[("far", Condition::Ready)])])?;
    eventually(|| {
        let count = destroyed(&cluster, "tcp")?;
        ensure!(count == 1, "destroyed {count} connections");
        Ok(())
    })?;
    let report: Report = through.wait_json()?;
    ensure!(
        report.errors.get("ECONNABORTED") == Some(&1) && report.answered > 0,
        "{report:?}"
    );
    let report: Report = resolver.wait_json()?;
    ensure!(
        report.errors.values().sum::<u64>() == 1 && report.endpoints.contains_key("far"),
        "{:?} {:?}",
        report.endpoints,
        report.errors
    );
    let report: Report = direct.wait_json()?;
    ensure!(report.errors.is_empty(), "{:?}", report.errors);
    Ok(())
}

/// A SYN in the name of a TCP connection goes to the connection's endpoint as long as the service lists the endpoint,
/// terminating or not. Then its address may be another pod's, and the SYN goes elsewhere, although the old pod answers.
fn a_syn_goes_to_no_endpoint_that_is_not_listed() -> Result<()> {
    let lab = Cluster::lab_of_packets()?;
    let ready = |lab: &dataplane_tests::Lab| vec![on(lab, &[("near", Condition::Ready)])];
    let cluster = Cluster::start_in(lab, &["far", "near"], ready, &[])?;
    let client = cluster.client();
    for vip in VIPS {
        cluster.manifests.write(&ready(&cluster.lab))?;
        let vip = SocketAddr::new(vip.parse()?, 80);
        eventually(|| leads_to(client, vip, "near"))?;
        let mut held = tcp(client, vip)?;
        transfer(&held, b"first")?;
        let from = held.local_addr()?;
        let conntrack = Conntrack::open(cluster.agent.bpffs())?.context("no flows")?;
        let protocol = Protocol::TCP;
        let [src, dst] = [from, vip].map(|end| (Addr::from(end.ip()), Port::new(end.port())));
        let key = FlowKey::new(src.0, src.1, dst.0, dst.1, protocol);
        let endpoint =
            || -> Result<IpAddr> { Ok(conntrack.find(&key).context("no flow")?.endpoint().ip()) };
        let links = [
            link(cluster.lab.node("node2"), "veth-sleep")?,
            link(client, "eth0")?,
        ];
        let syn = Packet {
            link: links,
            ..packet(true, (from.ip(), from.port()), (vip.ip(), 80), flags::SYN)
        };
        let again = || inject(client, "eth0", &[syn.frame()]);
        let of = |pod: &str| address(cluster.lab.pod(pod), vip.is_ipv4());
        let is = |pod: &str| -> Result<()> {
            again()?;
            let now = endpoint()?;
            ensure!(now == of(pod), "the SYN went to {now}");
            Ok(())
        };
        is("near")?;
        let both = [("far", Condition::Ready), ("near", Condition::NotReady)];
        cluster.manifests.write(&[service(&cluster, &both)])?;
        eventually(|| leads_to(client, vip, "far"))?;
        for _ in 0..10 {
            std::thread::sleep(Duration::from_millis(50));
            is("near")?;
        }
        // The connection goes on all the while.
        transfer_more(&mut held)?;
        cluster
            .manifests
            .write(&[service(&cluster, &[("far", Condition::Ready)])])?;
        eventually(|| is("far"))?;
    }
    Ok(())
}

/// A new connection is answered by this pod.
fn leads_to(client: &Host, vip: SocketAddr, pod: &str) -> Result<()> {
    let answered = transfer(&tcp(client, vip)?, b"who")?;
    ensure!(answered == pod, "{answered} answers");
    Ok(())
}

/// Some bytes there and back.
fn transfer_more(stream: &mut TcpStream) -> Result<()> {
    let sent = *b"still there";
    stream.write_all(&sent)?;
    let mut back = [0; 11];
    stream.read_exact(&mut back).context("nothing comes back")?;
    ensure!(back == sent, "other bytes come back");
    Ok(())
}

fn nothing_is_destroyed_if_not_asked() -> Result<()> {
    let cluster = start("destroyStale: [none]")?;
    let socket = resolver(&cluster, "10.96.0.40:53", &[])?;
    cluster
        .manifests
        .write(&[service(&cluster, &[("far", Condition::Ready)])])?;
    eventually(|| reaches(cluster.client(), "10.96.0.40:53", "udp", &["far"]).map(drop))?;
    std::thread::sleep(Duration::from_millis(300));
    let report: Report = socket.wait_json()?;
    ensure!(
        report.errors.is_empty() && report.endpoints.keys().eq(["near"]),
        "{:?} {:?}",
        report.endpoints,
        report.errors
    );
    Ok(())
}

/// If a socket's set in `PEERS` is full, `connect` writes to the socket's own storage, which the kernel lists for TCP
/// sockets.
fn sockets_beyond_the_table_are_found_too() -> Result<()> {
    let cluster = start("destroyStale: [tcp]")?;
    let pin = cluster.agent.bpffs().join(format!("v{LAYOUT}/maps/PEERS"));
    let peers = Map::Array(MapData::from_pin(pin)?);
    let mut peers = Array::<MapData, [u64; size_of::<PeerSets>() / 8]>::try_from(peers)?;
    // A cookie that no socket has.
    let mut full = [0; size_of::<PeerSets>() / 8];
    full[..SOCKET_SETS * SOCKET_WAYS].fill(u64::MAX);
    for set in 0..SOCKET_ELEMENTS {
        peers.set(set, full, 0)?;
    }
    let connection = connection(&cluster, "10.96.0.40:80")?;
    cluster
        .manifests
        .write(&[service(&cluster, &[("far", Condition::Ready)])])?;
    eventually(|| {
        let count = destroyed(&cluster, "tcp")?;
        ensure!(count == 1, "destroyed {count} sockets");
        Ok(())
    })?;
    let report: Report = connection.wait_json()?;
    ensure!(
        report.errors.get("ECONNABORTED") == Some(&1),
        "{:?} {:?}",
        report.endpoints,
        report.errors
    );
    Ok(())
}

/// How many sockets of a protocol the agent has destroyed.
fn destroyed(cluster: &Cluster, protocol: &str) -> Result<u64> {
    let metrics = Metrics::scrape(cluster.agent.node())?;
    let count = metrics.sum(
        "dataplane_sockets_destroyed_total",
        &[("protocol", protocol)],
    );
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a count"
    )]
    Ok(count as u64)
}
