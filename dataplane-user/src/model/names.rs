//! The names by which clients ask DNS for services.

use std::sync::Arc;

use super::{Service, ServiceName, ServiceType, Snapshot};

/// The services of a [`Snapshot`] by their names in DNS: `SERVICE.NAMESPACE.svc.DOMAIN`.
///
/// It shares the snapshot's map of services, so it costs neither time nor memory to have one for each snapshot.
#[derive(Clone, Debug)]
pub struct Names {
    domain: Arc<str>,
    services: imbl::OrdMap<ServiceName, Arc<Service>>,
}

impl Names {
    /// The names of a snapshot's services.
    pub fn of(snapshot: &Snapshot) -> Self {
        Self {
            domain: Arc::clone(&snapshot.cluster.domain),
            services: snapshot.services.clone(),
        }
    }

    /// The service of a whole name. Upper case counts as lower case, and a dot may end the name. A pod's host ports
    /// have no name.
    pub fn service(&self, name: &str) -> Option<&Arc<Service>> {
        let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
        let name = name.strip_suffix(&*self.domain)?.strip_suffix(".svc.")?;
        let (service, namespace) = name.split_once('.')?;
        let found = self.services.get(&ServiceName::new(namespace, service))?;
        (found.kind != ServiceType::HostPort).then_some(found)
    }

    /// The whole name of a service, without a dot at its end.
    pub fn name(&self, service: &ServiceName) -> String {
        let (name, namespace) = (service.name(), service.namespace());
        format!("{name}.{namespace}.svc.{}", self.domain)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use smallvec::SmallVec;

    use super::*;
    use crate::model::{Cluster, TrafficPolicy};

    fn snapshot(domain: &str, services: &[(&str, &str, ServiceType)]) -> Snapshot {
        let service = |&(namespace, name, kind): &(&str, &str, ServiceType)| {
            let name = ServiceName::new(namespace, name);
            let service = Service {
                name: name.clone(),
                kind,
                created: None,
                cluster_ips: SmallVec::new(),
                external_ips: SmallVec::new(),
                load_balancer_ips: SmallVec::new(),
                source_ranges: SmallVec::new(),
                affinity: None,
                internal_policy: TrafficPolicy::Cluster,
                external_policy: TrafficPolicy::Cluster,
                health_check_node_port: None,
                ports: SmallVec::new(),
            };
            (name, Arc::new(service))
        };
        Snapshot {
            cluster: Arc::new(Cluster {
                domain: domain.into(),
                ..Cluster::default()
            }),
            services: services.iter().map(service).collect(),
            ..Snapshot::default()
        }
    }

    #[test]
    fn a_service_has_one_whole_name() {
        let kind = ServiceType::ClusterIp;
        let snapshot = snapshot(
            "cluster.local",
            &[
                ("shop", "web", kind),
                ("shop", "outside", ServiceType::ExternalName),
                ("shop", "hostport:web-0", ServiceType::HostPort),
                ("default", "svc", kind),
            ],
        );
        let names = Names::of(&snapshot);
        let found = |name: &str| names.service(name).map(|found| found.name.to_string());
        for (name, service) in [
            ("web.shop.svc.cluster.local", "shop/web"),
            ("web.shop.svc.cluster.local.", "shop/web"),
            ("WEB.Shop.SVC.Cluster.LOCAL", "shop/web"),
            ("outside.shop.svc.cluster.local", "shop/outside"),
            ("svc.default.svc.cluster.local", "default/svc"),
        ] {
            assert_eq!(found(name).as_deref(), Some(service), "{name}");
        }
        for name in [
            "",
            ".",
            "cluster.local",
            "svc.cluster.local",
            "shop.svc.cluster.local",
            "web",
            "web.shop",
            "web.shop.svc",
            "web.shop.cluster.local",
            "web.shop.pod.cluster.local",
            "web.shop.svc.cluster.local..",
            "web.shop.svcxcluster.local",
            "web.shop.svc.xcluster.local",
            "web.other.svc.cluster.local",
            "web-0.web.shop.svc.cluster.local",
            "_http._tcp.web.shop.svc.cluster.local",
            "hostport:web-0.shop.svc.cluster.local",
        ] {
            assert_eq!(found(name), None, "{name}");
        }
    }

    #[test]
    fn another_domain_has_other_names() {
        let snapshot = snapshot("corp.example", &[("shop", "web", ServiceType::ClusterIp)]);
        let names = Names::of(&snapshot);
        assert!(names.service("web.shop.svc.corp.example").is_some());
        assert!(names.service("web.shop.svc.cluster.local").is_none());
    }

    proptest! {
        #[test]
        fn the_name_of_a_service_leads_to_it(
            namespace in "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?",
            service in "[a-z]([a-z0-9-]{0,61}[a-z0-9])?",
        ) {
            let snapshot = snapshot("cluster.local", &[(&namespace, &service, ServiceType::NodePort)]);
            let names = Names::of(&snapshot);
            let wanted = ServiceName::new(&namespace, &service);
            let found = names.service(&names.name(&wanted));
            prop_assert_eq!(found.map(|found| &found.name), Some(&wanted));
        }
    }
}
