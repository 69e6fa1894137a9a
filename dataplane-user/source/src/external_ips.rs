//! Decides which `externalIPs` of Services, and addresses of ServiceEntries, the operator admits.
//!
//! An author of Services in one namespace writes `externalIPs`, and so takes any address for all clients of the node. A
//! ServiceEntry's `addresses` do the same. Kubernetes' admission plugin `DenyServiceExternalIPs` forbids new
//! `externalIPs` and leaves existing ones. It does not check ServiceEntries.

use std::net::IpAddr;

use ipnet::IpNet;
use model::{Entry, Gravity, Problem, Service, ServiceType, is_allocated};

/// The external addresses that are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExternalIps {
    /// All addresses.
    Any,
    /// Addresses in these ranges.
    Within(Vec<IpNet>),
}

impl ExternalIps {
    /// Returns a service without the external IPs that are not admitted, and the problem that names them. `None` if all
    /// are admitted.
    pub fn left_out(&self, service: &Service) -> Option<(Service, Problem)> {
        // The external IPs of host ports are the node's own addresses.
        if service.kind == ServiceType::HostPort {
            return None;
        }
        let ips = &service.external_ips;
        let left_out = ips.iter().filter(|ip| !self.admits(**ip));
        let left_out: Vec<_> = left_out.map(ToString::to_string).collect();
        if left_out.is_empty() {
            return None;
        }
        let problem = Problem {
            gravity: Gravity::Warning,
            place: format!("service {}", service.name),
            text: format!(
                "externalIPs {} are not served, because node.externalIPs does not admit them. Remove them from the \
                 Service, or add them to node.externalIPs",
                left_out.join(", ")
            ),
        };
        let mut rest = service.clone();
        rest.external_ips.retain(|ip| self.admits(*ip));
        Some((rest, problem))
    }

    /// Returns a ServiceEntry without the addresses that are not admitted, and the problem that names them. `None` if
    /// all are admitted.
    pub fn left_out_of(&self, entry: &Entry) -> Option<(Entry, Problem)> {
        // Addresses in the ranges of hosts cannot take addresses from others, because the node's own assignments come
        // first.
        let admits = |ip: &IpAddr| self.admits(*ip) || is_allocated(*ip);
        let left_out = entry.named_addresses().filter(|ip| !admits(ip));
        let left_out: Vec<_> = left_out.map(|ip| ip.to_string()).collect();
        if left_out.is_empty() {
            return None;
        }
        let problem = Problem {
            gravity: Gravity::Warning,
            place: format!("ServiceEntry {}", entry.name),
            text: format!(
                "addresses {} are not served, because node.externalIPs does not admit them. Remove them from the \
                 ServiceEntry, or add them to node.externalIPs",
                left_out.join(", ")
            ),
        };
        let mut rest = entry.clone();
        rest.addresses.retain(|ip| admits(ip));
        rest.ranges.retain(|ip| admits(ip));
        for host in &mut rest.hosts {
            host.assigned.retain(|ip| admits(ip));
        }
        Some((rest, problem))
    }

    fn admits(&self, ip: IpAddr) -> bool {
        match self {
            Self::Any => true,
            Self::Within(ranges) => ranges.iter().any(|range| range.contains(&ip)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use imbl::OrdMap;
    use model::{Node, ServiceName};
    use serde_json::json;

    use super::*;
    use crate::{
        Admitted,
        objects::{self, Findings, Outcome},
    };

    fn service(name: &str, ips: &[&str]) -> (ServiceName, Arc<Service>) {
        let object = json!({
            "metadata": { "name": name, "namespace": "shop" },
            "spec": {
                "clusterIPs": ["10.96.0.1"],
                "externalIPs": ips,
                "ports": [{ "port": 80 }],
            },
        });
        let object = serde_json::from_value(object).unwrap();
        let mut findings = Findings::default();
        let Outcome::Served(service) = objects::service(object, &mut findings) else {
            panic!("{findings:?}");
        };
        (service.name.clone(), Arc::new(service))
    }

    #[test]
    fn only_what_the_operator_admits_is_served_and_the_rest_of_the_service_is() {
        let ips = ["192.0.2.1", "198.51.100.1", "2001:db8::1"];
        let ranges = |ranges: &[&str]| {
            ExternalIps::Within(ranges.iter().map(|range| range.parse().unwrap()).collect())
        };
        for (admits, wanted) in [
            (ExternalIps::Any, &ips[..]),
            (ranges(&[]), &[]),
            (ranges(&["192.0.2.0/24"]), &ips[..1]),
            (ranges(&["::/0"]), &ips[2..]),
            (ranges(&["0.0.0.0/0", "::/0"]), &ips[..]),
        ] {
            let mut admitted = Admitted::new(admits.clone());
            let services: OrdMap<_, _> = [service("web", &ips), service("none", &[])]
                .into_iter()
                .collect();
            let (served, changed) = admitted.take(&services, &Node::default());
            let [none, web] = served.values().collect::<Vec<_>>()[..] else {
                panic!("{served:?}");
            };
            assert_eq!(web.external_ips, service("web", wanted).1.external_ips);
            assert_eq!(web.cluster_ips, none.cluster_ips);
            let is_whole = wanted.len() == ips.len();
            assert_eq!(changed, !is_whole, "{admits:?}");
            let said: Vec<_> = admitted.problems().collect();
            assert_eq!(said.len(), usize::from(!is_whole));
            for problem in said {
                assert_eq!(problem.place, "service shop/web");
                for ip in ips {
                    let is_named = problem.text.contains(ip);
                    assert_eq!(is_named, !wanted.contains(&ip), "{problem:?}");
                }
            }
        }
    }

    #[test]
    fn what_is_not_admitted_is_named_as_long_as_it_is_there() {
        let mut admitted = Admitted::new(ExternalIps::Within(Vec::new()));
        let node = Node::default();
        let with: OrdMap<_, _> = [service("web", &["192.0.2.1"])].into_iter().collect();
        let without: OrdMap<_, _> = [service("web", &[])].into_iter().collect();
        assert!(admitted.take(&with, &node).1);
        assert!(!admitted.take(&with, &node).1);
        assert!(admitted.take(&without, &node).1);
        assert_eq!(admitted.problems().count(), 0);
    }
}
