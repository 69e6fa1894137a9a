//! Topology hints: the endpoints that a node prefers. The control plane writes hints into EndpointSlices, and Istio's
//! annotation asks for hints.
//!
//! `spec.trafficDistribution` and the annotation `service.kubernetes.io/topology-mode` are for the
//! control plane, which turns them into hints; a node looks at the hints alone, as kube-proxy does.
//! No control plane reads Istio's annotation `networking.istio.io/traffic-distribution` for a node: the hints
//! that it asks for are made [here](Hints::preferring), from where the endpoints are.

use super::Node;

/// The preference that `networking.istio.io/traffic-distribution` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preference {
    /// Nothing: the hints of EndpointSlices count, if there are any.
    Any,
    /// Endpoints in this node's zone, otherwise in its region, otherwise all.
    SameZone,
    /// Endpoints on this node, otherwise as [`Preference::SameZone`].
    SameNode,
}

/// An endpoint's hints (`hints.forZones`, `hints.forNodes`), as seen from this node. One byte: there is one for each
/// endpoint of a cluster.
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
    /// It is hinted to regions. No EndpointSlice has such hints.
    const REGIONS: u8 = 1 << 4;
    /// Not a hint: the endpoint is in this node's zone.
    const IN_ZONE: u8 = 1 << 5;
    /// Likewise, in this node's region.
    const IN_REGION: u8 = 1 << 6;

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

    /// Adds where the endpoint is: in `zone`, and in `region`. Without a region, the zone's name has to say it: clouds
    /// name zones after their region (`us-east-1a`, `eastus-1`).
    #[must_use]
    pub fn located(self, node: &Node, zone: &str, region: Option<&str>) -> Self {
        let is_region = !node.region.is_empty()
            && match region {
                Some(region) => *region == *node.region,
                None => zone
                    .strip_prefix(&*node.region)
                    .is_some_and(|rest| !rest.starts_with(|next: char| next.is_ascii_digit())),
            };
        // Two regions may have zones of one name.
        let is_other_region = region.is_some() && !node.region.is_empty() && !is_region;
        let is_zone = !zone.is_empty() && *zone == *node.zone && !is_other_region;
        let mut bits = self.0;
        if is_zone {
            bits |= Self::IN_ZONE | Self::IN_REGION;
        } else if is_region {
            bits |= Self::IN_REGION;
        }
        Self(bits)
    }

    /// The hints of an endpoint by what its service asks for. `local`: whether the endpoint is on this node.
    #[must_use]
    pub const fn preferring(self, asked: Preference, local: bool) -> Self {
        let of_node = match asked {
            Preference::Any => return Self(self.0 & !(Self::IN_ZONE | Self::IN_REGION)),
            Preference::SameZone => 0,
            Preference::SameNode if local => Self::NODES | Self::THIS_NODE,
            Preference::SameNode => Self::NODES,
        };
        let mut bits = Self::ZONES | Self::REGIONS | of_node;
        if local || self.0 & Self::IN_ZONE != 0 {
            bits |= Self::THIS_ZONE;
        }
        if local || self.0 & Self::IN_REGION != 0 {
            bits |= Self::IN_REGION;
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
    /// Endpoints that are hinted to this node.
    Node,
    /// Endpoints that are hinted to the node's zone.
    Zone,
    /// Endpoints that are hinted to the node's region.
    Region,
    /// All endpoints of the cluster.
    Cluster,
}

impl Reach {
    /// Returns the reach that the hints of a service's ready endpoints result in. Hints only count if every endpoint
    /// has one and at least one is for this node: otherwise the controller is half-way through writing them, or a node
    /// of a new zone would be left without endpoints.
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
        } else if all.0 & Hints::REGIONS != 0 && any.0 & Hints::IN_REGION != 0 {
            Self::Region
        } else {
            Self::Cluster
        }
    }

    /// Whether an endpoint with these hints is within reach.
    pub const fn includes(self, hints: Hints) -> bool {
        match self {
            Self::Node => hints.for_this_node(),
            Self::Zone => hints.for_this_zone(),
            Self::Region => hints.0 & Hints::IN_REGION != 0,
            Self::Cluster => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::Endpoint;

    #[test]
    fn hints_cost_no_memory() {
        // The byte after the four conditions was padding.
        assert_eq!(size_of::<Endpoint>(), 24);
    }
}
