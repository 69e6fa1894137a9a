//! Compares with the rules that the real kube-proxy wrote for `tests/data/kube-proxy-1.36`.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc, time::Duration};

use model::{
    Endpoint, Node, Protocol, Service, ServiceName, ServicePort, ServiceType, Snapshot,
    TrafficPolicy,
};
use smallvec::smallvec;

use super::*;

/// The services of `services.yaml` in that directory, and the two other services that the cluster
/// had.
fn snapshot() -> Snapshot {
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    let endpoint = |text: &str, port, local| Endpoint {
        local,
        ..Endpoint::new(ip(text), port)
    };
    let endpoints = |port| {
        let leaving = Endpoint {
            ready: false,
            terminating: true,
            ..endpoint("10.244.0.103", port, true)
        };
        vec![
            endpoint("10.244.0.101", port, true),
            endpoint("10.244.0.102", port, false),
            leaving,
        ]
    };
    let service = |name: &str, vip: &str, edit: &dyn Fn(&mut Service)| {
        let mut service = Service {
            cluster_ips: smallvec![ip(vip)],
            ports: smallvec![ServicePort {
                name: "p".into(),
                endpoints: endpoints(8080),
                ..ServicePort::new(80, Protocol::Tcp)
            }],
            ..Service::new(ServiceName::new("bench", name), ServiceType::ClusterIp)
        };
        edit(&mut service);
        (service.name.clone(), Arc::new(service))
    };
    let services = [
        service("clusterip", "10.96.1.1", &|_| {}),
        service("nodeport", "10.96.1.2", &|s| {
            s.ports[0].node_port = Some(30080);
        }),
        service("lb-ranges", "10.96.1.3", &|s| {
            s.load_balancer_ips = smallvec![ip("203.0.113.10")];
            s.source_ranges = smallvec!["192.168.77.2/32".parse().unwrap()];
            s.ports[0].node_port = Some(30081);
        }),
        service("lb-local", "10.96.1.4", &|s| {
            s.load_balancer_ips = smallvec![ip("203.0.113.11")];
            s.external_policy = TrafficPolicy::Local;
            s.health_check_node_port = Some(30999);
            s.ports[0].node_port = Some(30082);
        }),
        service("affinity", "10.96.1.5", &|s| {
            s.affinity = Some(Duration::from_secs(10));
            s.ports[0].node_port = Some(30083);
        }),
        service("noeps", "10.96.1.6", &|s| {
            s.ports[0].node_port = Some(30084);
            s.ports[0].endpoints.clear();
        }),
        service("itp-local", "10.96.1.7", &|s| {
            s.internal_policy = TrafficPolicy::Local;
        }),
        service("extip", "10.96.1.8", &|s| {
            s.external_ips = smallvec![ip("203.0.113.50")];
        }),
        service("lb-local-remote", "10.96.1.9", &|s| {
            s.load_balancer_ips = smallvec![ip("203.0.113.12")];
            s.external_policy = TrafficPolicy::Local;
            s.health_check_node_port = Some(30401);
            s.ports[0].node_port = Some(30085);
            s.ports[0].endpoints = vec![endpoint("10.244.0.102", 8080, false)];
        }),
        service("udp", "10.96.1.10", &|s| {
            s.ports[0].port = 53;
            s.ports[0].protocol = Protocol::Udp;
            s.ports[0].endpoints = endpoints(8053);
        }),
        service("iperf", "10.99.0.1", &|s| {
            s.ports[0].port = 5201;
            s.ports[0].endpoints = vec![endpoint("10.244.0.101", 5201, true)];
        }),
        service("kubernetes", "10.96.0.1", &|s| {
            s.name = ServiceName::new("default", "kubernetes");
            s.ports[0].name = "https".into();
            s.ports[0].port = 443;
            s.ports[0].endpoints = vec![endpoint("10.9.0.1", 6443, false)];
        }),
    ];
    Snapshot {
        services: services.into_iter().collect(),
        node: Arc::new(Node {
            name: "node1".into(),
            addresses: vec![ip("192.168.77.1")],
            ..Node::default()
        }),
        ..Snapshot::default()
    }
}

fn cluster() -> Cluster {
    Cluster {
        local: LocalDetector::Networks(vec!["10.244.0.0/16".parse().unwrap()]),
        service_networks: vec!["10.96.0.0/12".parse().unwrap()],
        ..Cluster::default()
    }
}

fn assert_same(ours: &BTreeSet<String>, theirs: &BTreeSet<String>) {
    let missing: Vec<_> = theirs.difference(ours).collect();
    let extra: Vec<_> = ours.difference(theirs).collect();
    assert!(
        missing.is_empty() && extra.is_empty(),
        "missing {missing:#?}\nextra {extra:#?}"
    );
}

/// Rules and chains, each with its table. The order of chains carries no information. To compare
/// the order of rules in a chain, the rules are numbered, except in chains with a rule per service.
fn iptables(text: &str) -> BTreeSet<String> {
    let mut table = String::new();
    let mut seen = std::collections::BTreeMap::<String, usize>::new();
    text.lines()
        .filter(|line| line.starts_with(['*', ':', '-']) && !line.contains(" ACCEPT ["))
        // Without nfacct, kube-proxy leaves out the match, and also the rule that only counted
        // packets.
        .filter(|line| !line.contains("localhost_nps_accepted_pkts"))
        .map(|line| {
            line.replace(
                " -m nfacct --nfacct-name  ct_state_invalid_dropped_pkts",
                "",
            )
        })
        .filter_map(|line| {
            if line.starts_with('*') {
                table = line;
                return None;
            }
            let chain = line.split(' ').nth(1).unwrap().to_owned();
            let per_service = ["SERVICES", "NODEPORTS", "FIREWALL"];
            let unordered =
                line.starts_with(':') || per_service.iter().any(|suffix| chain.ends_with(suffix));
            let number = if unordered {
                0
            } else {
                let number = seen.entry(format!("{table}{chain}")).or_default();
                *number += 1;
                *number
            };
            Some(format!("{table} {number} {line}"))
        })
        .collect()
}

#[test]
fn iptables_rules_are_those_of_kube_proxy() {
    let theirs = include_str!("../../tests/data/kube-proxy-1.36/iptables-save.txt");
    let ours = iptables::rules(&snapshot(), &cluster(), Family::V4);
    assert_same(&iptables(&ours), &iptables(theirs));
}

/// Each line with the headings above it, and each element of a set as its own line. Rules are
/// numbered, because their order matters.
fn nftables(text: &str) -> BTreeSet<String> {
    let mut lines = BTreeSet::new();
    let mut headings: Vec<String> = vec![];
    let mut number = 0;
    let mut in_elements = false;
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if let Some(first) = line.strip_prefix("elements = {") {
            in_elements = true;
            if headings.iter().any(|h| h.starts_with("set affinity-")) {
                // The set lists the clients that it remembered at that moment.
                in_elements = !first.ends_with('}');
                continue;
            }
        }
        if in_elements {
            let elements = line.trim_start_matches("elements = {");
            let elements = elements.strip_suffix('}').unwrap_or(elements);
            for element in elements.split(',').map(str::trim).filter(|e| !e.is_empty()) {
                lines.insert(format!("{} | {element}", headings.join(" / ")));
            }
            in_elements = !line.ends_with('}');
        } else if let Some(heading) = line.strip_suffix(" {") {
            headings.push(heading.to_owned());
            number = 0;
        } else if line == "}" {
            headings.pop();
        } else {
            number += 1;
            lines.insert(format!("{} | {number} {line}", headings.join(" / ")));
        }
    }
    lines
}

#[test]
fn nftables_rules_are_those_of_kube_proxy() {
    let theirs = include_str!("../../tests/data/kube-proxy-1.36/nft-ruleset.txt");
    let ours = nftables::rules(&snapshot(), &cluster(), Family::V4)
        + &nftables::rules(&snapshot(), &cluster(), Family::V6);
    // Since 1.37, a service with one endpoint has no map (`tests/data/kube-proxy-1.37`).
    let theirs: String = theirs.lines().map(|line| since_1_37(line) + "\n").collect();
    assert_same(&nftables(&ours), &nftables(&theirs));
}

fn since_1_37(line: &str) -> String {
    let map = line.split_once(" dnat ip to numgen random mod 1 map { 0 : ");
    match map.and_then(|(start, map)| Some((start, map.strip_suffix(" }")?))) {
        Some((start, to)) => format!("{start} dnat to {}", to.replace(" . ", ":")),
        None => line.to_owned(),
    }
}
