//! The cluster that this node is of.

use std::sync::Arc;

/// The parts that the names of a cluster's services, and its identities, have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// The domain of its services' names (the kubelet's `clusterDomain`), in lower case, without dots around it.
    pub domain: Arc<str>,
    /// The trust domain of its workloads' identities (Istio's `meshConfig.trustDomain`).
    pub trust_domain: Arc<str>,
}

impl Default for Cluster {
    /// Kubernetes' default, and Istio's.
    fn default() -> Self {
        let domain: Arc<str> = "cluster.local".into();
        Self {
            trust_domain: Arc::clone(&domain),
            domain,
        }
    }
}
