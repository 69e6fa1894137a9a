//! Ports of the node at which no object is served: the agent's own, and those that the operator reserves.
//!
//! Authors of Pods write `hostPort`, and authors of Services write `nodePort` and addresses of the node. Without this
//! check, a Pod could answer the kubelet's probe of the agent, or a connection to the kubelet.

use std::net::IpAddr;

use model::{Gravity, Problem, Service, ServiceType};

/// Returns a service without its claims to `ports` at the addresses `own` of the node, and the problem that names them.
/// `None` if it claims none.
pub fn left_out(service: &Service, own: &[IpAddr], ports: &[u16]) -> Option<(Service, Problem)> {
    let mut rest = service.clone();
    let mut left_out = Vec::new();
    if service.kind == ServiceType::HostPort {
        rest.ports.retain(|port| {
            let taken = port.node_port.unwrap_or(port.port);
            let is_reserved = ports.contains(&taken);
            if is_reserved {
                left_out.push(format!("hostPort {taken}"));
            }
            !is_reserved
        });
    } else {
        for port in &mut rest.ports {
            if let Some(taken) = port.node_port.take_if(|port| ports.contains(port)) {
                left_out.push(format!("nodePort {taken}"));
            }
        }
        if let Some(taken) = rest.ports.iter().find(|port| ports.contains(&port.port)) {
            let port = taken.port;
            for ips in [&mut rest.external_ips, &mut rest.load_balancer_ips] {
                ips.retain(|ip| {
                    let is_own = own.contains(ip);
                    if is_own {
                        left_out.push(format!("port {port} at {ip}"));
                    }
                    !is_own
                });
            }
        }
    }
    if left_out.is_empty() {
        return None;
    }
    let problem = Problem {
        gravity: Gravity::Warning,
        place: format!("service {}", service.name),
        text: format!(
            "{} is not served, because the agent listens there or node.reservedPorts names the port. Use another port",
            left_out.join(", ")
        ),
    };
    Some((rest, problem))
}

#[cfg(test)]
mod tests {
    use model::Node;
    use serde_json::json;

    use super::*;
    use crate::objects::{self, Findings, Outcome};

    const RESERVED: [u16; 2] = [15021, 10256];
    const OWN: [&str; 2] = ["192.0.2.1", "2001:db8::1"];

    fn judged(service: &Service) -> Option<(Service, Problem)> {
        left_out(service, &OWN.map(|ip| ip.parse().unwrap()), &RESERVED)
    }

    fn service(ports: &serde_json::Value, ips: &[&str]) -> Service {
        let object = json!({
            "metadata": { "name": "web", "namespace": "shop" },
            "spec": { "type": "NodePort", "clusterIPs": ["10.96.0.1"], "externalIPs": ips, "ports": ports },
        });
        let object = serde_json::from_value(object).unwrap();
        match objects::service(object, &mut Findings::default()) {
            Outcome::Served(service) => service,
            Outcome::LeftAlone => panic!("it is not served"),
        }
    }

    #[test]
    fn a_host_port_takes_no_reserved_port_and_the_pods_others_are_served() {
        for ip in [None, Some("127.0.0.1"), Some("192.0.2.1")] {
            let pod = json!({
                "metadata": { "name": "thief", "namespace": "shop" },
                "spec": { "nodeName": "here", "containers": [{ "ports": [
                    { "containerPort": 80, "hostPort": 15021, "hostIP": ip },
                    { "containerPort": 81, "hostPort": 8081, "hostIP": ip },
                ]}]},
                "status": { "podIP": "10.244.0.5" },
            });
            let pod = serde_json::from_value(pod).unwrap();
            let node = Node {
                name: "here".into(),
                ..Node::default()
            };
            for service in objects::host_ports(&pod, &node, &mut Findings::default()) {
                let (rest, problem) = judged(&service).unwrap();
                assert_eq!(rest.ports.len(), 1, "{ip:?}: {rest:?}");
                assert_eq!(rest.ports[0].node_port.unwrap_or(rest.ports[0].port), 8081);
                assert!(problem.text.contains("hostPort 15021 is not served"));
            }
        }
    }

    #[test]
    fn a_service_takes_no_reserved_port_of_the_node() {
        let one = json!([{ "port": 80, "nodePort": 10256 }]);
        let (rest, problem) = judged(&service(&one, &["203.0.113.1"])).unwrap();
        assert_eq!(rest.ports[0].node_port, None);
        assert_eq!(rest.external_ips.len(), 1);
        assert!(problem.text.contains("nodePort 10256"), "{problem:?}");
        let at = json!([{ "port": 15021 }, { "name": "b", "port": 81 }]);
        let ips = ["192.0.2.1", "203.0.113.1", "2001:db8::1"];
        let (rest, problem) = judged(&service(&at, &ips)).unwrap();
        assert_eq!(
            rest.external_ips[..],
            ["203.0.113.1".parse::<IpAddr>().unwrap()]
        );
        assert!(
            problem
                .text
                .contains("port 15021 at 192.0.2.1, port 15021 at 2001:db8::1")
        );
        // At other addresses the port is free.
        assert!(judged(&service(&at, &["203.0.113.1"])).is_none());
        assert!(judged(&service(&json!([{ "port": 80, "nodePort": 30000 }]), &OWN)).is_none());
    }
}
