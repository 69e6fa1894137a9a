//! The cluster that this node is of.

use std::sync::Arc;

/// The parts that the names of a cluster's services have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// The domain of its services' names (the kubelet's `clusterDomain`), in lower case, without dots around it.
    pub domain: Arc<str>,
}

impl Default for Cluster {
    /// Kubernetes' default.
    fn default() -> Self {
        Self {
            domain: "cluster.local".into(),
        }
    }
}
