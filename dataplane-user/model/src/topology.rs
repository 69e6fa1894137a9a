//! Topology: the endpoints that a node prefers. The control plane writes hints into EndpointSlices, and Istio's
//! annotation ranks endpoints by where they are.
//!
//! `spec.trafficDistribution` and the annotation `service.kubernetes.io/topology-mode` are for the
//! control plane, which turns them into hints; a node looks at the hints alone, as kube-proxy does.
//! No control plane reads Istio's annotation `networking.istio.io/traffic-distribution` for a node: the ranks
//! that it asks for are made [here](Hints::preferring), from where the endpoints are.

use super::Node;

/// The preference that `networking.istio.io/traffic-distribution` asks for. An endpoint that is in this node's network
/// is nearer than any that is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preference {
    /// Nothing: the hints of EndpointSlices count, if there are any.
    Any,
    /// Endpoints in this node's zone, otherwise in its region, otherwise all.
    SameZone,
    /// Endpoints on this node, otherwise in its subzone, otherwise as [`Preference::SameZone`].
    SameNode,
}

/// Where an endpoint is. An empty part is missing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Locality<'a> {
    /// Its network. Empty: that of the cluster.
    pub network: &'a str,
    /// Its region. `None`: not known, so the zone's name has to say it: clouds name zones after their region
    /// (`us-east-1a`, `eastus-1`).
    pub region: Option<&'a str>,
    /// Its zone.
    pub zone: &'a str,
    /// Its subzone.
    pub subzone: &'a str,
}

impl Locality<'_> {
    /// Returns how many of region, zone and subzone, in this order, are those of `node`: 0 to 3. As for Istio, two that
    /// are missing are equal; but a node of which neither is known is near to nothing, and without its region only the
    /// zone counts.
    fn nearness(self, node: &Node) -> u8 {
        if node.region.is_empty() && node.zone.is_empty() {
            return 0;
        }
        let is_zone = *self.zone == *node.zone;
        let is_region = node.region.is_empty()
            || match self.region {
                Some(region) => *region == *node.region,
                None if is_zone => !self.zone.is_empty(),
                None => self
                    .zone
                    .strip_prefix(&*node.region)
                    .is_some_and(|rest| !rest.starts_with(|next: char| next.is_ascii_digit())),
            };
        let is_subzone = *self.subzone == *node.subzone;
        match (is_region, is_zone, is_subzone) {
            (false, ..) => 0,
            (true, false, _) => 1,
            (true, true, false) => 2,
            (true, true, true) => 3,
        }
    }
}

/// An endpoint's hints (`hints.forZones`, `hints.forNodes`), as seen from this node, and where it is; or its rank. One
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
    /// The bits of hints. Those above are where the endpoint is: two bits of [`Locality::nearness`], and one for the
    /// network. After [`Hints::preferring`], they are the rank, which is 0 if hints count.
    const HINTS: u8 = 0xf;
    /// Position of the bits above.
    const PLACE: u32 = 4;

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

    /// Adds where the endpoint is, as seen from `node`.
    #[must_use]
    pub fn located(self, node: &Node, of: Locality<'_>) -> Self {
        let is_own_network = of.network.is_empty() || *of.network == *node.network;
        let place = of.nearness(node) | (u8::from(is_own_network) << 2);
        Self((self.0 & Self::HINTS) | (place << Self::PLACE))
    }

    /// The hints of an endpoint by what its service asks for. `local`: whether the endpoint is on this node.
    #[must_use]
    pub const fn preferring(self, asked: Preference, local: bool) -> Self {
        let place = if local { 0b111 } else { self.0 >> Self::PLACE };
        let near = place & 0b11;
        let near = match asked {
            Preference::Any => return Self(self.0 & Self::HINTS),
            Preference::SameZone if near > 2 => 2,
            Preference::SameNode if local => 4,
            Preference::SameZone | Preference::SameNode => near,
        };
        // Five ranks, from 0 to 4, in each of two networks. No rank is 0.
        let is_own_network = place >> 2;
        Self((1 + near + 5 * is_own_network) << Self::PLACE)
    }

    /// The rank that [`Hints::preferring`] gave it; 0: none.
    const fn rank(self) -> u8 {
        self.0 >> Self::PLACE
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
    /// Endpoints of this rank, which is the best one.
    Rank(u8),
    /// Endpoints that are hinted to this node.
    Node,
    /// Endpoints that are hinted to the node's zone.
    Zone,
    /// All endpoints of the cluster.
    Cluster,
}

impl Reach {
    /// Returns the reach that the hints of a service's ready endpoints result in. Hints only count if every endpoint
    /// has one and at least one is for this node: otherwise the controller is half-way through writing them, or a node
    /// of a new zone would be left without endpoints.
    pub(super) fn of(ready: impl Iterator<Item = Hints>) -> Self {
        let (mut all, mut any, mut best) = (!0, 0, 0);
        for hints in ready {
            all &= hints.0;
            any |= hints.0;
            best = best.max(hints.rank());
        }
        let (all, any) = (Hints(all), Hints(any));
        if best > 0 {
            Self::Rank(best)
        } else if all.for_nodes() && any.for_this_node() {
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
            Self::Rank(best) => hints.rank() == best,
            Self::Node => hints.for_this_node(),
            Self::Zone => hints.for_this_zone(),
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
