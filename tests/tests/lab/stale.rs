//! Sockets that are connected, through a service, to an endpoint that goes away.

use anyhow::{Result, ensure};
use aya::maps::{Array, Map, MapData};
use dataplane_common::{
    LAYOUT,
    tables::{PeerSets, SOCKET_ELEMENTS, SOCKET_SETS, SOCKET_WAYS},
};
use dataplane_tests::{Process, report::Report};

use crate::{
    cluster::{Cluster, TCP, UDP, eventually, reaches},
    manifest::{Condition, Service},
    metrics::Metrics,
};

scenarios! {
    Dataplane:
    connected_udp_moves_when_its_endpoint_goes,
    tcp_is_destroyed_only_if_asked,
    nothing_is_destroyed_if_not_asked,
    sockets_beyond_the_table_are_found_too,
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

fn start(arguments: &[&str]) -> Result<Cluster> {
    Cluster::start_with(
        |lab| vec![on(lab, &[("near", Condition::Ready)])],
        arguments,
    )
}

/// One connected socket that sends until it is ended; a new one when it fails.
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

/// A resolver's socket that goes on sending to a pod that is gone is what users of kube-proxy
/// complain of most. Here it fails at once, the process makes another, and that one goes to a pod
/// that is there. What is connected to the pod itself, not through the service, is left alone.
fn connected_udp_moves_when_its_endpoint_goes() -> Result<()> {
    let cluster = start(&[])?;
    let near = cluster.lab.pod("near").addresses();
    let mut moving = Vec::new();
    let mut staying = Vec::new();
    for (vip, near) in VIPS.into_iter().zip(near) {
        let to = std::net::SocketAddr::new(vip.parse()?, 53).to_string();
        moving.push((to.clone(), resolver(&cluster, &to, &[])?));
        if near.is_ipv4() {
            moving.push((to.clone(), resolver(&cluster, &to, &["--v4-mapped"])?));
        }
        let direct = std::net::SocketAddr::new(near, UDP).to_string();
        staying.push((direct.clone(), resolver(&cluster, &direct, &[])?));
        let tcp = std::net::SocketAddr::new(vip.parse()?, 80).to_string();
        staying.push((tcp.clone(), connection(&cluster, &tcp)?));
        reaches(cluster.client(), &to, "udp --count 10", &["near"])?;
    }

    // A last endpoint that goes is not gone before there is another.
    cluster.manifests.write(&[service(&cluster, &[])])?;
    eventually(|| crate::cluster::refused(cluster.client(), "10.96.0.40:53", "udp"))?;
    // Nor is one that still serves while it terminates.
    cluster.manifests.write(&[service(
        &cluster,
        &[
            ("far", Condition::Ready),
            ("near", Condition::ServingTerminating),
        ],
    )])?;
    eventually(|| reaches(cluster.client(), "10.96.0.40:53", "udp", &["far"]).map(drop))?;
    std::thread::sleep(std::time::Duration::from_millis(300));
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
    std::thread::sleep(std::time::Duration::from_millis(100));
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
        // The socket has no peer any more; a call that waits is told why.
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
    let cluster = start(&["--destroy-stale", "tcp,udp"])?;
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

fn nothing_is_destroyed_if_not_asked() -> Result<()> {
    let cluster = start(&["--destroy-stale", "none"])?;
    let socket = resolver(&cluster, "10.96.0.40:53", &[])?;
    cluster
        .manifests
        .write(&[service(&cluster, &[("far", Condition::Ready)])])?;
    eventually(|| reaches(cluster.client(), "10.96.0.40:53", "udp", &["far"]).map(drop))?;
    std::thread::sleep(std::time::Duration::from_millis(300));
    let report: Report = socket.wait_json()?;
    ensure!(
        report.errors.is_empty() && report.endpoints.keys().eq(["near"]),
        "{:?} {:?}",
        report.endpoints,
        report.errors
    );
    Ok(())
}

/// Where a socket's set in `PEERS` is full, what `connect` notes is in the socket's own storage,
/// which the kernel lists of TCP sockets.
fn sockets_beyond_the_table_are_found_too() -> Result<()> {
    let cluster = start(&["--destroy-stale", "tcp"])?;
    let pin = cluster.agent.bpffs().join(format!("v{LAYOUT}/maps/PEERS"));
    let peers = Map::Array(MapData::from_pin(pin)?);
    let mut peers = Array::<MapData, [u64; size_of::<PeerSets>() / 8]>::try_from(peers)?;
    // A cookie that is nobody's.
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
