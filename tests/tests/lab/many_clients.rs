//! Clients outside of the cluster, each with an address of its own.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use dataplane_tests::{Host, Lab, report::Report};

use crate::{
    cluster::{Cluster, UDP},
    manifest::{Config, Service},
};

scenarios! {
    Dataplane:
    ten_thousand_clients_keep_their_endpoints,
    clients_without_room_are_counted,
    a_namespace_with_many_clients_leaves_room_for_others,
}

/// The network that the clients' addresses are in, and the first client.
pub const NETWORK: &str = "198.18.0.0/15";
pub const FIRST: &str = "198.18.0.1";

/// A cluster whose node2 serves UDP at node port 30053, and whose `ext` has every address of [`NETWORK`].
pub fn cluster(
    service: impl FnOnce(&Lab, Service) -> Service,
    arguments: &[&str],
) -> Result<Cluster> {
    let services = |lab: &Lab| {
        let web = Service::new("web", &["10.96.0.10"]).node_port("udp", 53, UDP, 30053);
        vec![service(lab, web)]
    };
    cluster_of(services, arguments)
}

fn cluster_of(services: impl FnOnce(&Lab) -> Vec<Service>, arguments: &[&str]) -> Result<Cluster> {
    let lab = Cluster::lab()?;
    let ext = lab.external("ext");
    ext.ip(&format!("route add local {NETWORK} dev lo"))?;
    let way = format!("route add {NETWORK} via {}", ext.ipv4());
    lab.node("node2").ip(&way)?;
    Cluster::start_in(lab, &["far", "near", "near2"], services, arguments)
}

/// So many clients ask once, one after the other.
pub fn each_asks(ext: &Host, count: usize) -> Result<Report> {
    let probe = ext
        .probe("udp")
        .args(["--to", "192.168.77.2:30053", "--each"]);
    let probe = probe.args(["--local", FIRST, "--local-next", "--timeout-ms", "1000"]);
    Ok(probe.args(["--count", &count.to_string()]).json()?)
}

fn sticky(lab: &Lab, service: Service) -> Service {
    let all = ["far", "near", "near2"].map(|name| lab.pod(name));
    service.affinity(3600).endpoints(&all)
}

/// Lets each client ask once and returns the endpoint of each. Fails if a client gets an error.
fn endpoints(cluster: &Cluster, count: usize) -> Result<Vec<Option<String>>> {
    let report = each_asks(cluster.lab.external("ext"), count)?;
    ensure!(report.errors.is_empty(), "{:?}", report.errors);
    Ok(report
        .each
        .into_iter()
        .map(|attempt| attempt.endpoint)
        .collect())
}

fn ten_thousand_clients_keep_their_endpoints() -> Result<()> {
    const CLIENTS: usize = 10_000;
    let cluster = cluster(sticky, &[])?;
    let first = endpoints(&cluster, CLIENTS)?;
    let again = endpoints(&cluster, CLIENTS)?;
    let moved = first.iter().zip(&again).filter(|(a, b)| a != b).count();
    ensure!(moved == 0, "{moved} of {CLIENTS} have another endpoint");
    let status = cluster.status()?;
    ensure!(
        status["verdicts"]["affinity-full"] == 0,
        "{}",
        status["verdicts"]
    );
    Ok(())
}

/// The configuration that limits the clients whose endpoints are remembered.
fn with_room_for(clients: usize) -> std::io::Result<Config> {
    Config::new(&format!("limits: {{affinityClients: {clients}}}"))
}

/// With too little room, remembered clients keep their endpoint, and every other client is counted.
fn clients_without_room_are_counted() -> Result<()> {
    const ROOM: usize = 1024;
    let config = with_room_for(ROOM)?;
    let cluster = cluster(sticky, &config.arguments())?;
    let first = endpoints(&cluster, 2 * ROOM)?;
    let again = endpoints(&cluster, ROOM)?;
    ensure!(first[..ROOM] == again, "some have another endpoint");
    let status = cluster.status()?;
    ensure!(
        status["verdicts"]["affinity-full"] == ROOM,
        "{}",
        status["verdicts"]
    );
    let told = cluster.agent.dataplane(["status"]).output()?;
    let told = String::from_utf8_lossy(&told.stdout).into_owned();
    ensure!(told.contains("limits.affinityClients"), "{told}");
    Ok(())
}

/// A tenant's service has more clients than there is room for: clients of another tenant's service are still
/// remembered.
fn a_namespace_with_many_clients_leaves_room_for_others() -> Result<()> {
    const ROOM: usize = 1024;
    let both = |lab: &Lab| {
        let web = Service::new("web", &["10.96.0.10"]).node_port("udp", 53, UDP, 30053);
        let other = Service::new("other", &["10.96.0.11"]).node_port("udp", 53, UDP, 30054);
        vec![sticky(lab, web), sticky(lab, other.in_namespace("shop"))]
    };
    let config = with_room_for(ROOM)?;
    let cluster = cluster_of(both, &config.arguments())?;
    let ext = cluster.lab.external("ext");
    each_asks(ext, 2 * ROOM)?;
    let others = || -> Result<Vec<Option<String>>> {
        let probe = ext.probe("udp").args(["--to", "192.168.77.2:30054"]);
        let probe = probe.args(["--local", "198.18.100.1", "--local-next", "--each"]);
        let report: Report = probe
            .args(["--count", "20", "--timeout-ms", "1000"])
            .json()?;
        ensure!(report.errors.is_empty(), "{:?}", report.errors);
        Ok(report
            .each
            .into_iter()
            .map(|attempt| attempt.endpoint)
            .collect())
    };
    // The agent looks every ten seconds.
    let end = Instant::now() + Duration::from_mins(1);
    loop {
        let first = others()?;
        let again = others()?;
        if first == again {
            break;
        }
        ensure!(Instant::now() < end, "{first:?}, and then {again:?}");
        thread::sleep(Duration::from_secs(2));
    }
    let told = cluster.agent.dataplane(["status"]).output()?;
    let told = String::from_utf8_lossy(&told.stdout).into_owned();
    ensure!(
        told.contains("namespace default: session affinity"),
        "{told}"
    );
    Ok(())
}
