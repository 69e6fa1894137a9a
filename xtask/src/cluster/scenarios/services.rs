//! Services of every type.

use std::{collections::BTreeSet, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::{
    load::Load,
    pods::{From, HTTP, LONG, SHORT, Space, at, servers, source},
};
use crate::cluster::{
    Cluster, agent,
    kubectl::eventually,
    network,
    place::{CONTROL, CONTROL_V4, Node},
};

/// Addresses of load balancers: documentation addresses (RFC 5737, RFC 3849), routed to the first node.
const BALANCER: [&str; 2] = ["198.51.100.10", "2001:db8::10"];
const EXTERNAL: [&str; 2] = ["203.0.113.7", "2001:db8::7"];
const CONNECT: &str = "connect --count 30 --timeout-ms 2000";
const DATAGRAMS: &str = "udp --count 30 --timeout-ms 2000";
const ONCE: &str = "connect --count 3 --timeout-ms 1000";

/// Returns the first two nodes.
pub(super) fn two(cluster: &Cluster) -> Result<[Node; 2]> {
    match cluster.nodes.as_slice() {
        [first, second, ..] => Ok([*first, *second]),
        _ => anyhow::bail!("this takes two nodes"),
    }
}

/// Checks that the service's port 80 by TCP and port 53 by UDP answer at these addresses, by all of these pods.
fn both(
    cluster: &Cluster,
    from: &From,
    addresses: &[String],
    ports: [u16; 2],
    whom: &BTreeSet<String>,
) -> Result<u64> {
    let mut answered = 0;
    for address in addresses {
        for (words, port) in [(CONNECT, ports[0]), (DATAGRAMS, ports[1])] {
            let to = at(address, port);
            answered += eventually(SHORT, || from.reaches(cluster, words, &to, whom))?.answered;
        }
    }
    Ok(answered)
}

pub fn all_types(cluster: &Cluster) -> Result<String> {
    agent::deploy(cluster, &agent::Wanted::default())?;
    let [first, second] = two(cluster)?;
    let space = Space::new(cluster, "services", &json!({}))?;
    space.servers("web", 3, None)?;
    let web = space.pods("web")?;
    let inside = [
        space.client("client-1", first)?,
        space.client("client-2", second)?,
        From::Node(first),
    ];
    let mut answered = 0;

    space.service("cluster-ip", "web", &json!({}))?;
    let addresses = space.cluster_ips("cluster-ip")?;
    ensure!(
        addresses.len() == 2,
        "a dual-stack service has {addresses:?}"
    );
    for from in &inside {
        answered += both(cluster, from, &addresses, [80, 53], &web)?;
    }

    space.service("node-port", "web", &json!({ "type": "NodePort" }))?;
    let service = space.service_object("node-port")?;
    let port = |index: usize| -> Result<u16> {
        let port = service["spec"]["ports"][index]["nodePort"]
            .as_u64()
            .context("a node port")?;
        Ok(port.try_into()?)
    };
    let node_addresses: Vec<String> = [first, second]
        .iter()
        .flat_map(|node| node.addresses())
        .map(|address| address.to_string())
        .collect();
    for from in inside.iter().chain([&From::Outside]) {
        answered += both(cluster, from, &node_addresses, [port(0)?, port(1)?], &web)?;
    }

    space.service("balancer", "web", &json!({ "type": "LoadBalancer" }))?;
    let ingress = BALANCER.map(|ip| json!({ "ip": ip }));
    let status = json!({ "status": { "loadBalancer": { "ingress": ingress } } });
    let patch = [
        "patch",
        "service",
        "balancer",
        "--subresource=status",
        "--type=merge",
        "-p",
    ];
    space.kubectl(&[&patch[..], &[&status.to_string()]].concat())?;
    space.service("external", "web", &json!({ "externalIPs": EXTERNAL }))?;
    for addresses in [BALANCER, EXTERNAL] {
        for address in addresses {
            network::route(address, first)?;
        }
        for from in inside.iter().chain([&From::Outside]) {
            answered += both(cluster, from, &addresses.map(str::to_owned), [80, 53], &web)?;
        }
    }

    answered += headless(cluster, &space, first, &inside)?;

    // A deleted service is not served any more.
    space.kubectl(&["delete", "service", "external"])?;
    let gone = at(EXTERNAL[0], 80);
    eventually(SHORT, || {
        From::Outside.fails(
            cluster,
            ONCE,
            &gone,
            &["TIMEOUT", "EHOSTUNREACH", "ENETUNREACH", "ECONNREFUSED"],
        )
    })?;
    for node in [first, second] {
        agent::healthy(cluster, node)?;
    }
    Ok(format!(
        "{answered} requests: cluster IPs, node ports, load balancer's and external IPs, from two pods, a node and outside"
    ))
}

/// Checks that a headless service has no address, and that clients reach its pods by the pods' own addresses.
fn headless(cluster: &Cluster, space: &Space<'_>, node: Node, inside: &[From]) -> Result<u64> {
    space.service(
        "headless",
        "web",
        &json!({ "clusterIP": "None", "ipFamilyPolicy": "PreferDualStack" }),
    )?;
    let listed = crate::command::output(
        node.command(&cluster.dataplane)?
            .args(["services", "-o", "json"]),
    )?;
    let listed: Vec<Value> = serde_json::from_str(&listed).context("`dataplane services`")?;
    let addresses = |name: &str| -> Result<usize> {
        let service = listed.iter().find(|service| service["name"] == name);
        let service = service.with_context(|| format!("`dataplane services` has no {name}"))?;
        let of = |key: &str| service[key].as_array().map_or(0, Vec::len);
        Ok(of("cluster_ips") + of("external_ips") + of("load_balancer_ips"))
    };
    ensure!(addresses("cluster-ip")? == 2, "{listed:?}");
    ensure!(addresses("headless")? == 0, "{listed:?}");
    let pods = cluster
        .kubectl
        .list(&["-n", &space.name, "pods", "-l", "app=web"])?;
    let mut answered = 0;
    for pod in &pods {
        let name = BTreeSet::from([pod["metadata"]["name"]
            .as_str()
            .context("a name")?
            .to_owned()]);
        let address = pod["status"]["podIP"].as_str().context("an address")?;
        for from in inside {
            answered += from
                .reaches(cluster, ONCE, &at(address, super::pods::TCP), &name)?
                .answered;
        }
    }
    Ok(answered)
}

pub fn policies(cluster: &Cluster) -> Result<String> {
    agent::deploy(cluster, &agent::Wanted::default())?;
    let [first, second] = two(cluster)?;
    let space = Space::new(cluster, "policies", &json!({}))?;
    // The server runs only on the first node.
    space.servers("web", 1, Some(first))?;
    space.servers("all", 4, None)?;
    let (web, all) = (space.pods("web")?, space.pods("all")?);
    let client = space.client("client", second)?;

    // externalTrafficPolicy: Local. Servers see the client's own address, and a node without endpoints does not answer.
    let local = json!({ "type": "LoadBalancer", "externalTrafficPolicy": "Local" });
    space.service("local", "web", &local)?;
    let service = space.service_object("local")?;
    let number =
        |value: &Value| -> Result<u16> { Ok(value.as_u64().context("a port")?.try_into()?) };
    let port = number(&service["spec"]["ports"][0]["nodePort"])?;
    let with = at(&first.ipv4().to_string(), port);
    let report = eventually(SHORT, || {
        From::Outside.reaches(cluster, CONNECT, &with, &web)
    })?;
    let seen = source(&report)?;
    ensure!(
        seen == CONTROL_V4.to_string(),
        "servers saw {seen}, not the client's {CONTROL_V4}"
    );
    let without = at(&second.ipv4().to_string(), port);
    let words = "connect --count 2 --timeout-ms 1000";
    From::Outside.fails(cluster, words, &without, &["TIMEOUT"])?;
    let health = number(&service["spec"]["healthCheckNodePort"])?;
    for (node, wanted) in [(first, 200), (second, 503)] {
        let to = at(&node.ipv4().to_string(), health);
        eventually(SHORT, || {
            let (status, body) = network::get(CONTROL, &to, "/")?;
            ensure!(
                status == wanted,
                "the health check port of {}: {status} {body}",
                node.name()
            );
            Ok(())
        })?;
    }
    // externalTrafficPolicy: Cluster. Every node answers, and servers see the node's address.
    space.service("cluster", "web", &json!({ "type": "NodePort" }))?;
    let port = number(&space.service_object("cluster")?["spec"]["ports"][0]["nodePort"])?;
    let by_other = at(&second.ipv4().to_string(), port);
    let report = eventually(SHORT, || {
        From::Outside.reaches(cluster, CONNECT, &by_other, &web)
    })?;
    let seen = source(&report)?;
    ensure!(
        seen == second.ipv4().to_string(),
        "servers saw {seen}, not the node's {}",
        second.ipv4()
    );

    // internalTrafficPolicy: Local.
    space.service(
        "inside",
        "web",
        &json!({ "internalTrafficPolicy": "Local" }),
    )?;
    let address = space.cluster_ips("inside")?.remove(0);
    let near = space.client("near", first)?;
    eventually(SHORT, || {
        near.reaches(cluster, CONNECT, &at(&address, 80), &web)
    })?;
    client.fails(cluster, ONCE, &at(&address, 80), &["ECONNREFUSED"])?;

    affine(cluster, &space, &client, &all)?;

    // Without endpoints, connections are refused immediately.
    space.service("nobody", "nobody", &json!({}))?;
    let address = space.cluster_ips("nobody")?.remove(0);
    eventually(SHORT, || {
        client.fails(cluster, ONCE, &at(&address, 80), &["ECONNREFUSED"])
    })?;

    // A pod's hostPort answers only on the pod's node.
    let mut host_port = servers("host-port", 1, Some(first));
    let ports = json!([{ "containerPort": HTTP, "hostPort": 8642 }]);
    host_port["spec"]["template"]["spec"]["containers"][0]["ports"] = ports;
    space.apply(host_port)?;
    space.rolled_out("host-port")?;
    let names = space.pods("host-port")?;
    for from in [&From::Outside, &client, &From::Node(first)] {
        for address in first.addresses() {
            let to = at(&address.to_string(), 8642);
            let http = "http --count 3 --timeout-ms 2000";
            eventually(SHORT, || from.reaches(cluster, http, &to, &names))?;
        }
    }
    From::Outside.fails(
        cluster,
        ONCE,
        &at(&second.ipv4().to_string(), 8642),
        &["ECONNREFUSED"],
    )?;
    Ok("externalTrafficPolicy, health check ports, internalTrafficPolicy, affinity, no endpoints, hostPort".into())
}

/// Checks that session affinity keeps a client with one endpoint.
fn affine(
    cluster: &Cluster,
    space: &Space<'_>,
    client: &From,
    all: &BTreeSet<String>,
) -> Result<()> {
    space.service("affine", "all", &json!({ "sessionAffinity": "ClientIP" }))?;
    for address in space.cluster_ips("affine")? {
        let to = at(&address, 80);
        let report = eventually(SHORT, || {
            let report = client.ask(cluster, CONNECT, &to)?;
            ensure!(
                report.answered == report.attempts,
                "{to}: {:?}",
                report.errors
            );
            Ok(report)
        })?;
        ensure!(
            report.endpoints.len() == 1,
            "{to}: {:?} answered",
            report.endpoints.keys()
        );
        ensure!(
            report.endpoints.keys().all(|name| all.contains(name)),
            "{:?}",
            report.endpoints
        );
    }
    Ok(())
}

pub fn rollout(cluster: &Cluster) -> Result<String> {
    agent::deploy(cluster, &agent::Wanted::default())?;
    let [first, second] = two(cluster)?;
    let space = Space::new(cluster, "rollout", &json!({}))?;
    space.servers("web", 4, None)?;
    space.service("web", "web", &json!({ "type": "NodePort" }))?;
    let addresses = space.cluster_ips("web")?;
    let node_port = space.service_object("web")?["spec"]["ports"][0]["nodePort"].as_u64();
    let node_port = node_port.context("a node port")?.try_into()?;
    let pod = space.client("client", first)?;
    let clients = [
        (pod.clone(), at(&addresses[0], 80)),
        (From::Node(second), at(&addresses[1], 80)),
        (From::Outside, at(&second.ipv4().to_string(), node_port)),
    ];
    let before = space.pods("web")?;
    for (from, to) in &clients {
        eventually(SHORT, || from.reaches(cluster, CONNECT, to, &before))?;
    }
    let loads: Vec<Load> = clients
        .iter()
        .map(|(from, to)| Load::start(cluster, from, to))
        .collect::<Result<_>>()?;
    for _ in 0..2 {
        space.kubectl(&["rollout", "restart", "deployment/web"])?;
        space.rolled_out("web")?;
    }
    thread::sleep(Duration::from_secs(6));
    let mut answered = 0;
    for load in loads {
        answered += load.none_failed()?;
    }
    // Only the new pods answer.
    let after = eventually(LONG, || {
        let now = space.pods("web")?;
        ensure!(
            now.len() == 4 && now.is_disjoint(&before),
            "{now:?} are there"
        );
        Ok(now)
    })?;
    for (from, to) in &clients {
        from.reaches(cluster, CONNECT, to, &after)?;
    }
    Ok(format!(
        "none of {answered} connections failed over two rolling updates of four pods"
    ))
}
