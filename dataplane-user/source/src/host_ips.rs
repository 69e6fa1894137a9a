//! A pod's `hostIP` is served only if it is an address of this node.
//!
//! The author of a pod writes `hostIP`. Without this check, the pod could take the address of another pod, of a
//! service, of the API server, or the cloud's metadata address (169.254.169.254) for every process of the node.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use model::{Gravity, Problem, Service, ServiceType};

/// Returns the reason why the node with the addresses `own` does not serve a host port. `None` if it serves the port,
/// or if the service is not a host port.
pub fn problem(service: &Service, own: &[IpAddr]) -> Option<Problem> {
    if service.kind != ServiceType::HostPort {
        return None;
    }
    let is_own = |ip: &&IpAddr| {
        let loopback = [
            IpAddr::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V6(Ipv6Addr::LOCALHOST),
        ];
        loopback.contains(ip) || own.contains(ip)
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use imbl::OrdMap;
    use model::{Node, Service, ServiceName};
    use serde_json::json;

    use crate::{
        Admitted, ExternalIps,
        objects::{self, Findings},
    };

    /// Returns the host ports of pods on this node, by pod and `hostIP`.
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
            let mut host_ips = Admitted::new(ExternalIps::Any);
            let (served, changed) = host_ips.take(&services(&[("web", ip)]), &node);
            // The port at all addresses is served, independent of the other port.
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
        let mut host_ips = Admitted::new(ExternalIps::Any);
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
        // A served pod is removed, and a pod that cannot be served is added.
        let others = services(&[("b", "169.254.169.254"), ("c", "192.0.2.9")]);
        let (served, changed) = host_ips.take(&others, &with);
        assert_eq!(
            (names(&served), changed),
            (vec!["hostport:b", "hostport:c"], true)
        );
        let (served, changed) = host_ips.take(&floating, &with);
        assert_eq!((names(&served), changed), (all.to_vec(), true));
        // The pods are removed together with the address.
        let (served, changed) = host_ips.take(&OrdMap::new(), &without);
        assert_eq!((served.len(), changed), (0, true));
        assert_eq!(host_ips.problems().count(), 0);
    }
}
