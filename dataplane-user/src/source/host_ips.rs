//! A pod's `hostIP` is served only if it is an address of this node.
//!
//! Whoever may create pods writes `hostIP`. Another pod's address, a service's, the API server's or the cloud's
//! metadata address (169.254.169.254) would otherwise be the pod's for every process of the node.

use std::{
    collections::BTreeMap,
    mem,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use imbl::{OrdMap, ordmap::DiffItem};

use crate::model::{Gravity, Node, Problem, Service, ServiceName, ServiceType};

/// Leaves host ports out of a source's services if this node does not have their address, and names them.
#[derive(Debug, Default)]
pub struct HostIps {
    services: OrdMap<ServiceName, Arc<Service>>,
    /// `services` without those that are left out.
    served: OrdMap<ServiceName, Arc<Service>>,
    own: Vec<IpAddr>,
    left_out: BTreeMap<ServiceName, Problem>,
}

impl HostIps {
    /// Returns the services that are served, and whether the [problems](Self::problems) have changed. Takes time for
    /// what changed, however much is left out; for all services if the node's addresses changed.
    pub fn take(
        &mut self,
        services: &OrdMap<ServiceName, Arc<Service>>,
        node: &Node,
    ) -> (OrdMap<ServiceName, Arc<Service>>, bool) {
        let before = (self.own != node.own).then(|| {
            self.own.clone_from(&node.own);
            self.services.clear();
            self.served = services.clone();
            mem::take(&mut self.left_out)
        });
        let mut changed = false;
        for change in self.services.diff(services) {
            let (name, service) = match change {
                DiffItem::Add(name, new)
                | DiffItem::Update {
                    new: (name, new), ..
                } => (name, Some(new)),
                DiffItem::Remove(name, _) => (name, None),
            };
            let problem = service.and_then(|service| self.problem(service));
            match service {
                Some(service) if problem.is_none() => {
                    self.served.insert(name.clone(), Arc::clone(service));
                }
                _ => {
                    self.served.remove(name);
                }
            }
            let last = match &problem {
                Some(problem) => self.left_out.insert(name.clone(), problem.clone()),
                None => self.left_out.remove(name),
            };
            changed |= last != problem;
        }
        self.services = services.clone();
        // Judged anew, all that is left out looks new.
        let changed = before.map_or(changed, |before| before != self.left_out);
        (self.served.clone(), changed)
    }

    /// Names the host ports that are left out.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.left_out.values()
    }

    fn problem(&self, service: &Service) -> Option<Problem> {
        if service.kind != ServiceType::HostPort {
            return None;
        }
        let is_own = |ip: &&IpAddr| {
            let loopback = [
                IpAddr::V4(Ipv4Addr::LOCALHOST),
                IpAddr::V6(Ipv6Addr::LOCALHOST),
            ];
            loopback.contains(ip) || self.own.contains(ip)
        };
        let ip = service.external_ips.iter().find(|ip| !is_own(ip))?;
        Some(Problem {
            gravity: Gravity::Warning,
            place: format!("service {}", service.name),
            text: format!(
                "hostIP {ip} is not served: it is not an address of this node. Use one of the node's addresses that \
                 is neither link-local nor loopback, 127.0.0.1 or ::1, or leave hostIP out"
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::source::objects::{self, Findings};

    /// The host ports of pods on this node, by pod and `hostIP`.
    fn services(pods: &[(&str, &str)]) -> OrdMap<ServiceName, Arc<Service>> {
        let node = Node {
            name: "here".into(),
            ..Node::default()
        };
        let services = pods.iter().flat_map(|(name, ip)| {
            let pod = json!({
                "metadata": { "name": name, "namespace": "shop" },
                "spec": { "nodeName": "here", "containers": [{ "ports": [
                    { "containerPort": 80, "hostPort": 80, "hostIP": ip },
                    { "containerPort": 81, "hostPort": 81 },
                ]}]},
                "status": { "podIP": "10.244.0.5" },
            });
            let pod = serde_json::from_value(pod).unwrap();
            let mut findings = Findings::default();
            let services = objects::host_ports(&pod, &node, &mut findings);
            assert_eq!(findings, Findings::default());
            services
        });
        services
            .map(|service| (service.name.clone(), Arc::new(service)))
            .collect()
    }

    fn node(own: &[&str]) -> Node {
        Node {
            own: own.iter().map(|ip| ip.parse().unwrap()).collect(),
            ..Node::default()
        }
    }

    fn names(services: &OrdMap<ServiceName, Arc<Service>>) -> Vec<&str> {
        services.keys().map(ServiceName::name).collect()
    }

    #[test]
    fn only_the_nodes_own_addresses_are_host_ips() {
        let node = node(&["192.0.2.1", "192.0.2.7", "2001:db8::1"]);
        for (ip, is_own) in [
            ("192.0.2.1", true),
            ("192.0.2.7", true),
            ("::ffff:192.0.2.7", true),
            ("2001:db8::1", true),
            ("127.0.0.1", true),
            ("::1", true),
            ("169.254.169.254", false),
            ("10.96.0.1", false),
            ("10.244.0.9", false),
            ("127.0.0.53", false),
            ("2001:db8::2", false),
            ("fe80::1", false),
            ("224.0.0.1", false),
            ("255.255.255.255", false),
        ] {
            let mut host_ips = HostIps::default();
            let (served, changed) = host_ips.take(&services(&[("web", ip)]), &node);
            // The port at all addresses is served, whatever becomes of the other one.
            assert!(served.contains_key(&ServiceName::new("shop", "hostport:web")));
            assert_eq!(served.len(), 1 + usize::from(is_own), "{ip}");
            assert_eq!(changed, !is_own, "{ip}");
            let said: Vec<_> = host_ips.problems().collect();
            assert_eq!(said.len(), usize::from(!is_own), "{ip}");
            for problem in said {
                assert!(problem.place.contains("shop/hostport:web@"), "{problem:?}");
                assert!(problem.text.contains("is not an address of this node"));
            }
        }
    }

    #[test]
    fn an_address_that_comes_and_goes_takes_its_host_ports_along() {
        let mut host_ips = HostIps::default();
        let floating = services(&[("a", "192.0.2.100"), ("b", "169.254.169.254")]);
        let (with, without) = (node(&["192.0.2.1", "192.0.2.100"]), node(&["192.0.2.1"]));
        let (served, changed) = host_ips.take(&floating, &without);
        assert_eq!(names(&served), ["hostport:a", "hostport:b"]);
        assert!(changed);
        let (served, changed) = host_ips.take(&floating, &with);
        let all = ["hostport:a", "hostport:a@192.0.2.100", "hostport:b"];
        assert_eq!(names(&served), all);
        assert!(changed);
        let (served, changed) = host_ips.take(&floating, &with);
        assert_eq!((names(&served).len(), changed), (3, false));
        // A pod that is served goes, and another one comes that is not.
        let others = services(&[("b", "169.254.169.254"), ("c", "192.0.2.9")]);
        let (served, changed) = host_ips.take(&others, &with);
        assert_eq!(
            (names(&served), changed),
            (vec!["hostport:b", "hostport:c"], true)
        );
        let (served, changed) = host_ips.take(&floating, &with);
        assert_eq!((names(&served), changed), (all.to_vec(), true));
        // The pods go while the address does.
        let (served, changed) = host_ips.take(&OrdMap::new(), &without);
        assert_eq!((served.len(), changed), (0, true));
        assert_eq!(host_ips.problems().count(), 0);
    }
}
