//! Egress stays where it may go, whatever two tenants claim.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Result, ensure};
use dataplane_tests::Host;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng, seq::IndexedRandom as _};
use serde_json::{Value, json};

use super::{FREE, with_outside};
use crate::{
    cluster::{UDP, ask, at_once},
    manifest::Service,
};

/// A property: for any objects of two tenants, with any addresses, a workload whose egress is denied reaches only Pods
/// and itself, by the route of its own packets. Exclusions of the configuration open nothing else either.
pub fn whatever_two_tenants_claim_egress_stays_where_it_may_go() -> Result<()> {
    let said = std::env::var("DATAPLANE_CLAIM_RUNS").ok();
    let rounds: u64 = said.and_then(|said| said.parse().ok()).unwrap_or(1);
    let (mut world, outside, _server) = with_outside()?;
    let app = world.app().clone();
    let hosts = ["app", "one", "two", "far"].map(|name| world.lab.pod(name).clone());
    let all: Vec<&Host> = hosts.iter().chain([&outside]).collect();
    for (seed, mode) in (0..rounds).flat_map(|seed| [(seed, "kernel"), (seed, "proxy")]) {
        let mut random = StdRng::seed_from_u64(seed);
        let services: Vec<Service> = (0..8_u8)
            .map(|number| drawn_service(number, &all, &mut random))
            .collect();
        let others: Vec<Value> = (0..8_u8)
            .flat_map(|number| drawn_others(number, &all, &mut random))
            .collect();
        world.manifests.write_with(&services, &others)?;
        let mut rules = json!({ "egress": "deny", "mode": mode });
        if random.random_bool(0.5) {
            rules["excludeOutboundPorts"] = json!([FREE, 443]);
            rules["excludeOutboundIPRanges"] = json!(["10.96.1.0/25", "fd00:96:1::/64"]);
        }
        world.capture(json!({}), rules)?;
        let mut targets: Vec<IpAddr> = all.iter().flat_map(|host| host.addresses()).collect();
        targets.push(IpAddr::from([203, 0, 113, 9]));
        targets.extend((0..8).map(|number| IpAddr::from([10, 96, 1, number])));
        let services = world.agent()?.dataplane(["services", "-o", "json"]).run()?;
        let services: Vec<Value> = serde_json::from_str(&services)?;
        let of_entries = services.iter().filter(|service| {
            let name = service["name"].as_str();
            name.is_some_and(|name| name.contains("serviceentry:"))
        });
        let vips = of_entries.filter_map(|entry| entry["cluster_ips"].as_array());
        let vips = vips
            .flatten()
            .filter_map(|vip| vip.as_str()?.parse::<IpAddr>().ok());
        let before = targets.len();
        targets.extend(vips);
        ensure!(targets.len() > before, "no entry is served: {services:?}");
        targets.sort();
        targets.dedup();
        let mut answered = 0;
        for ip in targets {
            let asked = [
                (7, "connect --count 3"),
                (FREE, "connect --count 3"),
                (80, "connect --count 3"),
                (443, "connect --count 6"),
                (UDP, "udp --count 3 --timeout-ms 300"),
                (FREE, "udp --count 3 --timeout-ms 300 --unconnected"),
            ]
            .map(|(port, how)| {
                let (app, to) = (&app, SocketAddr::from((ip, port)).to_string());
                move || -> Result<_> { Ok((ask(app, &to, how)?, to, how)) }
            });
            for (report, to, how) in at_once(asked)? {
                answered += report.answered;
                ensure!(
                    !report.endpoints.contains_key("outside"),
                    "{mode}, seed {seed}: {how} to {to} is outside: {report:?}"
                );
            }
        }
        ensure!(answered > 0, "{mode}, seed {seed}: nobody answered");
    }
    Ok(())
}

/// Returns the namespace of one of the two tenants.
fn tenant(number: u8) -> &'static str {
    if number.is_multiple_of(2) { "a" } else { "b" }
}

/// Draws some addresses: of hosts, and of no host.
fn claims(all: &[&Host], random: &mut StdRng) -> Vec<String> {
    let mut claimed: Vec<String> = Vec::new();
    for _ in 0..random.random_range(0..3) {
        let of = all.choose(random).map(|host| host.addresses());
        claimed.extend(of.into_iter().flatten().map(|ip| ip.to_string()));
    }
    if random.random_bool(0.3) {
        claimed.push("203.0.113.9".to_owned());
    }
    claimed.sort();
    claimed.dedup();
    claimed
}

/// Draws one or two hosts.
fn some<'a>(all: &[&'a Host], random: &mut StdRng) -> Vec<&'a Host> {
    let mut endpoints: Vec<&Host> = Vec::new();
    for _ in 0..random.random_range(1..3) {
        let host = *all.choose(random).expect("there are hosts");
        if endpoints.iter().all(|other| other.ipv4() != host.ipv4()) {
            endpoints.push(host);
        }
    }
    endpoints
}

fn drawn_service(number: u8, all: &[&Host], random: &mut StdRng) -> Service {
    let mut service = Service::new(
        &format!("s{number}"),
        &[
            &format!("10.96.1.{number}"),
            &format!("fd00:96:1::{number}"),
        ],
    )
    .in_namespace(tenant(number))
    .set("externalIPs", claims(all, random));
    for (port, name) in [7, UDP, FREE, 80].into_iter().zip(["a", "b", "c", "d"]) {
        service = service.port(&format!("tcp-{name}"), port, 7);
        service = service.port(&format!("udp-{name}"), port, UDP);
    }
    service.endpoints(&some(all, random))
}

/// Draws a ServiceEntry with endpoints of its own or WorkloadEntries, and a route that splits a Service of the tenant
/// between another Service and hosts.
fn drawn_others(number: u8, all: &[&Host], random: &mut StdRng) -> Vec<Value> {
    let metadata =
        |name: &str| json!({ "name": format!("{name}{number}"), "namespace": tenant(number) });
    let host = |number: u8| format!("e{number}.example.com");
    let addresses = some(all, random)
        .into_iter()
        .map(|of| of.ipv4().to_string());
    let addresses: Vec<String> = addresses.collect();
    let mut entry = json!({
        "apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry", "metadata": metadata("e"),
        "spec": {
            "hosts": [host(number)], "resolution": "STATIC",
            "ports": [
                { "number": 443, "name": "tcp", "protocol": "TCP", "targetPort": 7 },
                { "number": FREE, "name": "tcp-free", "protocol": "TCP", "targetPort": 7 },
            ],
        },
    });
    if random.random_bool(0.5) {
        entry["spec"]["addresses"] = claims(all, random).into();
    }
    let mut objects = Vec::new();
    if random.random_bool(0.5) {
        let endpoints = addresses
            .iter()
            .map(|address| json!({ "address": address }));
        entry["spec"]["endpoints"] = endpoints.collect();
    } else {
        entry["spec"]["workloadSelector"] = json!({ "labels": { "of": host(number) } });
        objects.extend(addresses.iter().enumerate().map(|(index, address)| {
            let mut metadata = metadata("w");
            metadata["name"] = format!("w{number}-{index}").into();
            json!({
                "apiVersion": "networking.istio.io/v1", "kind": "WorkloadEntry", "metadata": metadata,
                "spec": { "address": address, "labels": { "of": host(number) } },
            })
        }));
    }
    objects.push(entry);
    if random.random_bool(0.5) {
        let other = (number + 2) % 8;
        let hosts = json!({
            "group": "networking.istio.io", "kind": "Hostname", "name": host(random.random_range(0..8)),
            "port": 443,
        });
        let own = json!({ "name": format!("s{other}"), "port": 7 });
        objects.push(json!({
            "apiVersion": "gateway.networking.k8s.io/v1alpha2", "kind": "TCPRoute",
            "metadata": metadata("r"),
            "spec": {
                "parentRefs": [{ "group": "", "kind": "Service", "name": format!("s{number}") }],
                "rules": [{ "backendRefs": [own, hosts] }],
            },
        }));
    }
    objects
}
