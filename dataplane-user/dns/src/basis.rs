//! The inputs of answers besides a snapshot's objects: the cluster's domain and DNS, and the node's resolvers.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use model::{Cluster, Names, ServiceName, Snapshot};

use super::{
    LowerName, ResolvConf,
    client::PORT,
    zone::{CLUSTER_DNS, Ttls, Zone},
};

/// The kubelet's DNS settings on a node.
#[derive(Clone, Debug)]
pub struct Basis {
    /// `clusterDomain`.
    pub domain: LowerName,
    /// `clusterDNS`; none: the cluster IPs of the Service `kube-system/kube-dns`.
    pub cluster_dns: Vec<IpAddr>,
    /// `resolvConf`.
    pub node: ResolvConf,
    /// How long clients may keep answers.
    pub ttls: Ttls,
}

impl Basis {
    /// The names of a snapshot, in the cluster's domain. `before`: those of a snapshot before.
    pub fn names(&self, before: Names, snapshot: &Snapshot) -> Names {
        let domain = self.domain.to_string();
        let snapshot = Snapshot {
            cluster: Arc::new(Cluster {
                domain: domain.trim_end_matches('.').into(),
                name: Arc::clone(&snapshot.cluster.name),
            }),
            ..snapshot.clone()
        };
        let mut names = before;
        names.follow(&snapshot);
        names
    }

    /// The zone of a snapshot.
    pub fn zone(&self, snapshot: &Snapshot) -> Zone {
        Zone::new(self.names(Names::default(), snapshot), self.ttls)
    }

    /// Returns the addresses of the cluster's DNS.
    pub fn cluster_dns(&self, snapshot: &Snapshot) -> Vec<SocketAddr> {
        let found = || {
            let name = ServiceName::new(CLUSTER_DNS.0, CLUSTER_DNS.1);
            let service = snapshot.services.get(&name);
            service.map(|service| service.named_ips().to_vec())
        };
        let addrs = if self.cluster_dns.is_empty() {
            found().unwrap_or_default()
        } else {
            self.cluster_dns.clone()
        };
        let addrs = addrs.into_iter();
        addrs.map(|addr| SocketAddr::new(addr, PORT)).collect()
    }
}

#[cfg(test)]
mod tests {
    use model::{Service, ServiceType};

    use super::*;

    #[test]
    fn the_clusters_dns_is_that_of_the_kubelet_or_the_service() {
        let (namespace, name) = CLUSTER_DNS;
        let addr = |last| IpAddr::from([10, 96, 0, last]);
        let name = ServiceName::new(namespace, name);
        let service = Service {
            cluster_ips: [addr(10)].into_iter().collect(),
            ..Service::new(name.clone(), ServiceType::ClusterIp)
        };
        let snapshot = Snapshot {
            services: [(name, Arc::new(service))].into_iter().collect(),
            ..Snapshot::default()
        };
        let basis = |cluster_dns| Basis {
            domain: LowerName::parse("cluster.example").unwrap(),
            cluster_dns,
            node: ResolvConf::default(),
            ttls: Ttls {
                services: 5,
                entries: 30,
            },
        };
        let at = |last| vec![SocketAddr::new(addr(last), 53)];
        assert_eq!(basis(vec![addr(9)]).cluster_dns(&snapshot), at(9));
        assert_eq!(basis(Vec::new()).cluster_dns(&snapshot), at(10));
        assert_eq!(basis(Vec::new()).cluster_dns(&Snapshot::default()), []);
        let zone = basis(Vec::new()).zone(&snapshot);
        assert_eq!(zone.domain.to_string(), "cluster.example.");
        assert!(zone.names.service("kube-system", "kube-dns").is_some());
    }
}
