//! The cluster that this node is of.

use std::sync::Arc;

use super::ServiceName;

/// The names of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// The domain of its services' names (the kubelet's `clusterDomain`), in lower case, without dots around it.
    pub domain: Arc<str>,
    /// Its name in the mesh, for metrics and logs.
    pub name: Arc<str>,
}

impl Default for Cluster {
    /// The defaults of Kubernetes and of Istio.
    fn default() -> Self {
        Self {
            domain: "cluster.local".into(),
            name: "Kubernetes".into(),
        }
    }
}

impl Cluster {
    /// Returns the name of a service in DNS.
    pub fn host(&self, service: &ServiceName) -> String {
        let (name, namespace) = (service.name(), service.namespace());
        format!("{name}.{namespace}.svc.{}", self.domain)
    }
}
