//! Converts a Kubernetes Node into the model.

use std::{net::IpAddr, sync::Arc};

use model::{Leaving, Node};

use super::{Findings, address, check_name, label, wire as api};

/// Label with a node's zone.
pub const LABEL_ZONE: &str = "topology.kubernetes.io/zone";
/// Label with a node's region.
pub const LABEL_REGION: &str = "topology.kubernetes.io/region";
/// Istio's label with a node's subzone.
const LABEL_SUBZONE: &str = "topology.istio.io/subzone";
/// Istio's label with the network of addresses: of a pod's, or of those of a node's pods.
pub const LABEL_NETWORK: &str = "topology.istio.io/network";
/// Taint that the cluster autoscaler gives to a node before it deletes the node.
const TAINT_TO_BE_DELETED: &str = "ToBeDeletedByClusterAutoscaler";

/// Facts of a Node object that the node itself does not know.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// Its name.
    pub name: Arc<str>,
    /// Its zone; empty if it has none.
    pub zone: Arc<str>,
    /// Its region; empty if it has none.
    pub region: Arc<str>,
    /// Its subzone; empty if it has none.
    pub subzone: Arc<str>,
    /// The network of its pods; empty if it does not say.
    pub network: Arc<str>,
    /// The reason why it will leave the cluster. `None`: it stays.
    pub leaving: Option<Leaving>,
    /// Its own addresses, at most one of each family, internal addresses before external ones.
    pub addresses: Vec<IpAddr>,
}

impl NodeFacts {
    /// Returns the facts of a node without an object: new connections should not go there.
    pub fn of_no_object() -> Self {
        Self {
            leaving: Some(Leaving::Unknown),
            ..Self::default()
        }
    }

    /// Returns `node` with these facts. A zone from the operator stays.
    pub fn applied_to(&self, node: &Node) -> Node {
        Node {
            zone: if node.zone.is_empty() {
                self.zone.clone()
            } else {
                node.zone.clone()
            },
            region: self.region.clone(),
            subzone: self.subzone.clone(),
            network: self.network.clone(),
            leaving: self.leaving,
            ..node.clone()
        }
    }
}

/// Converts a Node.
pub fn node(object: &api::Node, findings: &mut Findings) -> NodeFacts {
    check_name(&object.metadata, findings);
    let mut taints = object.spec.iter().flat_map(|spec| &spec.taints).flatten();
    let leaving = if object.metadata.deletion_timestamp.is_some() {
        Some(Leaving::Deleted)
    } else {
        let chosen = taints.any(|taint| taint.key == TAINT_TO_BE_DELETED);
        chosen.then_some(Leaving::Tainted)
    };
    let of = |key| {
        label(&object.metadata.labels, key)
            .unwrap_or_default()
            .into()
    };
    NodeFacts {
        name: object.metadata.name.as_deref().unwrap_or_default().into(),
        zone: of(LABEL_ZONE),
        region: of(LABEL_REGION),
        subzone: of(LABEL_SUBZONE),
        network: of(LABEL_NETWORK),
        leaving,
        addresses: addresses(object),
    }
}

/// Returns the primary addresses, by kube-proxy's rules.
fn addresses(object: &api::Node) -> Vec<IpAddr> {
    let mut found = Vec::<IpAddr>::new();
    for kind in ["InternalIP", "ExternalIP"] {
        let all = object.status.iter().flat_map(|status| &status.addresses);
        for given in all.flatten().filter(|given| given.type_ == kind) {
            if let Ok(address) = address::reachable_address(&given.address)
                && found.iter().all(|a| a.is_ipv4() != address.is_ipv4())
            {
                found.push(address);
            }
        }
    }
    found
}
