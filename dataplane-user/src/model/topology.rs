//! Which endpoints a node prefers: topology hints, as the control plane writes them into
//! EndpointSlices.
//!
//! `spec.trafficDistribution` and the annotation `service.kubernetes.io/topology-mode` are for the
//! control plane, which turns them into hints; a node looks at the hints alone, as kube-proxy does.

use super::Node;

/// What an endpoint's hints (`hints.forZones`, `hints.forNodes`) say, as seen from this node. One
/// byte: there is one for each endpoint of a cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Hints(u8);

impl Hints {
    /// There is a hint for zones.
    const ZONES: u8 = 1;
    /// One of them is this node's.
    const THIS_ZONE: u8 = 1 << 1;
    /// There is a hint for nodes.
    const NODES: u8 = 1 << 2;
    /// One of them is this one.
    const THIS_NODE: u8 = 1 << 3;

    /// Reads hints with the eyes of `node`. Where its zone is not known, none is its own.
    pub fn new<'a>(
        node: &Node,
        for_zones: impl IntoIterator<Item = &'a str>,
        for_nodes: impl IntoIterator<Item = &'a str>,
    ) -> Self {
        let mut bits = 0;
        for zone in for_zones {
            bits |= Self::ZONES;
            if !node.zone.is_empty() && zone == &*node.zone {
                bits |= Self::THIS_ZONE;
            }
        }
        for name in for_nodes {
            bits |= Self::NODES;
            if name == &*node.name {
                bits |= Self::THIS_NODE;
            }
        }
        Self(bits)
    }

    /// Whether it is hinted to zones at all.
    pub const fn for_zones(self) -> bool {
        self.0 & Self::ZONES != 0
    }

    /// Whether it is hinted to nodes at all.
    pub const fn for_nodes(self) -> bool {
        self.0 & Self::NODES != 0
    }

    /// Whether it is hinted to clients in this node's zone.
    pub const fn for_this_zone(self) -> bool {
        self.0 & Self::THIS_ZONE != 0
    }

    /// Whether it is hinted to clients on this node.
    pub const fn for_this_node(self) -> bool {
        self.0 & Self::THIS_NODE != 0
    }
}

/// How far a node looks for endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Those that are hinted to this node.
    Node,
    /// Those that are hinted to its zone.
    Zone,
    /// All of the cluster's.
    Cluster,
}

impl Reach {
    /// What the hints of a service's ready endpoints come to. Hints only count if every endpoint
    /// has one and at least one is for here: otherwise the controller is half-way through writing
    /// them, or a node of a new zone would be left without endpoints.
    pub(super) fn of(ready: impl Iterator<Item = Hints>) -> Self {
        let (mut all, mut any) = (!0, 0);
        for Hints(bits) in ready {
            all &= bits;
            any |= bits;
        }
        let (all, any) = (Hints(all), Hints(any));
        if all.for_nodes() && any.for_this_node() {
            Self::Node
        } else if all.for_zones() && any.for_this_zone() {
            Self::Zone
        } else {
            Self::Cluster
        }
    }

    /// Whether an endpoint with these hints is within reach.
    pub const fn includes(self, hints: Hints) -> bool {
        match self {
            Self::Node => hints.for_this_node(),
            Self::Zone => hints.for_this_zone(),
            Self::Cluster => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::model::Endpoint;

    #[test]
    fn hints_cost_no_memory() {
        // The byte after the four conditions was padding.
        assert_eq!(size_of::<Endpoint>(), 24);
    }
}
