//! Ports at addresses of this node that stay the node's own even if a service claims them.
//!
//! **The node's ephemeral UDP ports.** Answers to UDP requests of the node's processes arrive at the node's address and
//! one of these ports. A Service with `externalIPs: [the node's address]` and such ports would receive them. A
//! connection to a TCP port is never an answer, so services may have the TCP ports.
//!
//! **Ports at a cluster IP where a process of the node listens.** The node has the cluster IP on an interface of its
//! own, as with NodeLocal DNSCache. With kube-proxy, operators exempt the address from connection tracking, and so from
//! its rules.

use std::net::{IpAddr, SocketAddr};

use model::{Gravity, Node, Problem, Protocol, Service, ServiceType, VipPort};

/// Returns the service without the node's own ports, and the problem that names them. `None` if the service claims
/// none.
pub fn set_aside(service: &Service, node: &Node) -> Option<(Service, Problem)> {
    if service.kind == ServiceType::HostPort {
        return None;
    }
    let own = |ip: &&IpAddr| node.own.binary_search(ip).is_ok();
    let (mut aside, mut taken, mut listened) = (Vec::<VipPort>::new(), Vec::new(), Vec::new());
    for ip in service.external_ips.iter().filter(own) {
        for port in &service.ports {
            if port.protocol == Protocol::Udp && node.ephemeral.has(port.port) {
                let at = (*ip, port.protocol, port.port);
                aside.push(at);
                taken.push(text(at));
            }
        }
    }
    for ip in service.cluster_ips.iter().filter(own) {
        for port in &service.ports {
            let at = (*ip, port.protocol, port.port);
            if node.listens.contains(&at) {
                aside.push(at);
                listened.push(text(at));
            }
        }
    }
    let mut said = Vec::new();
    if !taken.is_empty() {
        said.push(format!(
            "externalIPs: {} not served: these are UDP ports at which this node's own processes get answers \
             (net.ipv4.ip_local_port_range). Use other ports, or reserve them on the nodes \
             (net.ipv4.ip_local_reserved_ports)",
            few(&taken),
        ));
    }
    if !listened.is_empty() {
        said.push(format!(
            "{} left to a process of this node, which has the cluster IP on an interface and listens there (NodeLocal \
             DNSCache, for example)",
            few(&listened),
        ));
    }
    if said.is_empty() {
        return None;
    }
    let problem = Problem {
        gravity: Gravity::Warning,
        place: format!("service {}", service.name),
        text: said.join("; "),
    };
    let mut rest = service.clone();
    rest.aside = aside;
    Some((rest, problem))
}

/// Returns the cluster IPs of a service that the node has on an interface.
pub fn owned<'a>(service: &'a Service, node: &'a Node) -> impl Iterator<Item = IpAddr> + 'a {
    let ips = service.cluster_ips.iter().copied();
    ips.filter(|ip| node.own.binary_search(ip).is_ok())
}

fn text((ip, protocol, port): VipPort) -> String {
    format!("{}/{}", SocketAddr::new(ip, port), protocol.word())
}

/// Returns the first few names and the number of the others, with the verb.
fn few(all: &[String]) -> String {
    const NAMED: usize = 4;
    let named = all[..all.len().min(NAMED)].join(", ");
    match all.len() {
        1 => format!("{named} is"),
        many if many > NAMED => format!("{named} and {} more are", many - NAMED),
        _ => format!("{named} are"),
    }
}

#[cfg(test)]
mod tests {
    use model::Ephemeral;
    use serde_json::json;

    use super::*;
    use crate::objects::{self, Findings, Outcome};

    fn service(ports: &serde_json::Value) -> Service {
        let object = json!({
            "metadata": { "name": "web", "namespace": "shop" },
            "spec": {
                "clusterIPs": ["10.96.0.10", "fd00:96::10"],
                "externalIPs": ["192.0.2.1", "2001:db8::1", "198.51.100.1"],
                "ports": ports,
            },
        });
        let mut findings = Findings::default();
        match objects::service(serde_json::from_value(object).unwrap(), &mut findings) {
            Outcome::Served(service) => service,
            Outcome::LeftAlone => panic!("{findings:?}"),
        }
    }

    fn node() -> Node {
        Node {
            own: ["10.96.0.10", "192.0.2.1", "2001:db8::1"]
                .map(|ip| ip.parse().unwrap())
                .into(),
            ephemeral: Ephemeral::read("32768 60999", "51820").unwrap(),
            ..Node::default()
        }
    }

    #[test]
    fn a_service_does_not_take_ephemeral_ports_of_the_node() {
        let ports: Vec<_> = [
            ("a", "UDP", 40_000),
            ("b", "TCP", 40_000),
            ("c", "UDP", 53),
            ("d", "UDP", 51_820),
        ]
        .iter()
        .map(|(name, protocol, port)| json!({ "name": name, "protocol": protocol, "port": port }))
        .collect();
        let service = service(&json!(ports));
        let (rest, problem) = set_aside(&service, &node()).unwrap();
        let said: Vec<_> = rest.aside.iter().map(|port| text(*port)).collect();
        assert_eq!(said, ["192.0.2.1:40000/udp", "[2001:db8::1]:40000/udp"]);
        assert!(problem.text.contains("192.0.2.1:40000/udp"), "{problem:?}");
        assert_eq!(set_aside(&service, &Node::default()), None);
    }

    #[test]
    fn a_port_of_a_cluster_ip_is_left_to_who_listens_there() {
        let service = service(&json!([
            { "name": "dns", "protocol": "UDP", "port": 53 },
            { "name": "metrics", "protocol": "TCP", "port": 9153 },
        ]));
        let mut node = node();
        assert_eq!(owned(&service, &node).count(), 1);
        assert_eq!(set_aside(&service, &node), None);
        let at = ("10.96.0.10".parse().unwrap(), Protocol::Udp, 53);
        node.listens = [at].into();
        let (rest, problem) = set_aside(&service, &node).unwrap();
        assert_eq!(rest.aside, [at]);
        assert!(
            problem.text.contains("10.96.0.10:53/udp is left"),
            "{problem:?}"
        );
        // A listener on another node does not matter.
        node.own.clear();
        assert_eq!(set_aside(&service, &node), None);
    }
}
