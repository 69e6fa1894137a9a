//! The maps that are pinned, by name and shape.

use std::path::Path;

use aya_obj::generated::bpf_map_type::{
    self, BPF_MAP_TYPE_ARRAY_OF_MAPS, BPF_MAP_TYPE_HASH, BPF_MAP_TYPE_LPM_TRIE,
    BPF_MAP_TYPE_LRU_HASH, BPF_MAP_TYPE_PERCPU_ARRAY, BPF_MAP_TYPE_RINGBUF,
    BPF_MAP_TYPE_SK_STORAGE, BPF_MAP_TYPE_SOCKHASH,
};
use dataplane_common::{
    Addr, Reason, VIP_ELEMENTS, VipElement,
    capture::{
        Askers, CaptureConfig, Enrolled, KNOWN, LISTENERS, ListenerKey, Local, Meter, MeterSets,
        ORIGINS, Origin, PROBES, RULES, RangeKey, RuleKey, TRAFFIC, Traffic, TrafficKey, Tuple,
        WORKLOADS,
    },
    cells::{Cell, Slots, cells_for},
    origins::COUNTERS,
    packet::{
        BYPASSES, Bypass, FRAGMENTS, FlowKey, Fragment, FragmentKey, IFACES, Iface, NODE_ADDRS,
        PacketConfig, SOURCES, SourceKey,
    },
    tables::{
        BY_PACKETS, Config, FrontendKey, PEER_PORTS, Peer, PeerSets, SIBLINGS, SOCKET_ELEMENTS,
        Sibling, SiblingKey, UdpFlows,
    },
    tcp::Sequences,
};

use crate::{
    error::Error,
    map::{Hash, Mapped, Plain},
    sys::{MapInfo, Shape},
};

/// A map that is pinned.
pub struct MapSpec {
    /// Its name in the object, and of its pin.
    pub name: &'static str,
    pub(super) shape: Shape,
    /// Its capacity; `None` where that is the object's business.
    pub(super) max_entries: Option<u32>,
}

const fn outer(name: &'static str) -> MapSpec {
    let shape = Shape {
        kind: BPF_MAP_TYPE_ARRAY_OF_MAPS,
        key_size: 4,
        value_size: 4,
        flags: 0,
    };
    MapSpec {
        name,
        shape,
        max_entries: Some(1),
    }
}

const NO_PREALLOC: u32 = 1; // BPF_F_NO_PREALLOC

/// A hash in which elements are made as they come; or a trie, which knows no other way.
const fn on_demand<K: Plain, V: Plain>(
    name: &'static str,
    kind: bpf_map_type,
    max_entries: u32,
) -> MapSpec {
    let shape = Shape {
        flags: NO_PREALLOC,
        ..Hash::<K, V>::shape(kind)
    };
    MapSpec {
        name,
        shape,
        max_entries: Some(max_entries),
    }
}

/// An array whose size the agent configures ([`MapSpec::entries`]): one of those of flows
/// ([`dataplane_common::cells`]).
const fn as_told<T: Plain>(name: &'static str) -> MapSpec {
    MapSpec {
        name,
        shape: Mapped::<T>::shape(false),
        max_entries: None,
    }
}

#[expect(clippy::cast_possible_truncation, reason = "small")]
const fn storage<T>(name: &'static str) -> MapSpec {
    let shape = Shape {
        kind: BPF_MAP_TYPE_SK_STORAGE,
        key_size: 4,
        value_size: size_of::<T>() as u32,
        flags: NO_PREALLOC,
    };
    MapSpec {
        name,
        shape,
        max_entries: Some(0),
    }
}

/// Every map that is pinned.
pub const MAPS: [MapSpec; 43] = [
    outer("FRONTENDS"),
    outer("POOLS"),
    outer("ENDPOINTS"),
    outer("STATS"),
    outer("AFFINITY"),
    MapSpec {
        name: "REASONS",
        shape: Shape {
            kind: BPF_MAP_TYPE_PERCPU_ARRAY,
            key_size: 4,
            value_size: 8,
            flags: 0,
        },
        max_entries: Some(Reason::SLOTS),
    },
    MapSpec {
        name: "EVENTS",
        shape: Shape {
            kind: BPF_MAP_TYPE_RINGBUF,
            key_size: 0,
            value_size: 0,
            flags: 0,
        },
        max_entries: None,
    },
    MapSpec {
        name: "CONFIG",
        shape: Mapped::<Config>::shape(false),
        max_entries: Some(1),
    },
    MapSpec {
        name: "PEERS",
        shape: Mapped::<PeerSets>::shape(false),
        max_entries: Some(SOCKET_ELEMENTS),
    },
    MapSpec {
        name: "PEER_PORTS",
        shape: Mapped::<u64>::shape(false),
        max_entries: Some(PEER_PORTS),
    },
    storage::<Peer>("MORE_PEERS"),
    storage::<UdpFlows>("FLOWS"),
    // The least recently used entry makes room for a new one.
    MapSpec {
        name: "SIBLINGS",
        shape: Hash::<SiblingKey, Sibling>::shape(BPF_MAP_TYPE_LRU_HASH),
        max_entries: Some(SIBLINGS),
    },
    MapSpec {
        name: "SHARED_PORTS",
        shape: Mapped::<u64>::shape(false),
        max_entries: Some(PEER_PORTS),
    },
    MapSpec {
        name: "VIPS",
        shape: Mapped::<VipElement>::shape(false),
        max_entries: Some(VIP_ELEMENTS),
    },
    on_demand::<u32, Iface>("IFACES", BPF_MAP_TYPE_HASH, IFACES),
    on_demand::<SourceKey, u32>("SOURCES", BPF_MAP_TYPE_LPM_TRIE, SOURCES),
    MapSpec {
        name: "NODE_ADDRS",
        shape: Mapped::<Addr>::shape(false),
        max_entries: Some(NODE_ADDRS),
    },
    MapSpec {
        name: "PACKET_CONFIG",
        shape: Mapped::<PacketConfig>::shape(false),
        max_entries: Some(1),
    },
    as_told::<Cell>("CONNTRACK"),
    as_told::<Slots>("ANSWERS"),
    as_told::<Sequences>("SEQUENCES"),
    // The uplink on which each flow's client arrives.
    as_told::<[u32; 2]>("CAME_BY"),
    // The agent makes it and reads it: the programs have it from PACKET_CONFIG.
    MapSpec {
        name: "FLOW_SECRET",
        shape: Mapped::<u64>::shape(false),
        max_entries: Some(1),
    },
    // In these two, the least recently used entry makes room for a new one.
    MapSpec {
        name: "BYPASS",
        shape: Hash::<FlowKey, Bypass>::shape(BPF_MAP_TYPE_LRU_HASH),
        max_entries: Some(BYPASSES),
    },
    MapSpec {
        name: "FRAGMENTS",
        shape: Hash::<FragmentKey, Fragment>::shape(BPF_MAP_TYPE_LRU_HASH),
        max_entries: Some(FRAGMENTS),
    },
    MapSpec {
        name: "CAPTURE",
        shape: Mapped::<CaptureConfig>::shape(false),
        max_entries: Some(1),
    },
    on_demand::<u64, u64>("BY_PACKETS", BPF_MAP_TYPE_HASH, BY_PACKETS),
    on_demand::<u64, Enrolled>("NAMESPACES", BPF_MAP_TYPE_HASH, WORKLOADS),
    on_demand::<u64, Enrolled>("CGROUPS", BPF_MAP_TYPE_HASH, WORKLOADS),
    on_demand::<Addr, Local>("LOCALS", BPF_MAP_TYPE_HASH, WORKLOADS * 4),
    on_demand::<RuleKey, u32>("RULES", BPF_MAP_TYPE_HASH, RULES),
    on_demand::<RangeKey, u32>("RANGES", BPF_MAP_TYPE_LPM_TRIE, RULES),
    on_demand::<FrontendKey, u32>("KNOWN", BPF_MAP_TYPE_HASH, KNOWN),
    on_demand::<Tuple, Origin>("ORIGINS", BPF_MAP_TYPE_HASH, ORIGINS),
    on_demand::<Tuple, u64>("PROBES", BPF_MAP_TYPE_HASH, PROBES),
    MapSpec {
        name: "ORIGIN_COUNTS",
        shape: Mapped::<u64>::shape(false),
        max_entries: Some(COUNTERS),
    },
    storage::<Askers>("ASKERS"),
    storage::<Origin>("ACCEPTED"),
    MapSpec {
        name: "LISTENERS",
        shape: Shape {
            flags: 0,
            ..Hash::<ListenerKey, u32>::shape(BPF_MAP_TYPE_SOCKHASH)
        },
        max_entries: Some(LISTENERS),
    },
    MapSpec {
        name: "METERS",
        shape: Mapped::<MeterSets>::shape(false),
        max_entries: Some(SOCKET_ELEMENTS),
    },
    storage::<Meter>("MORE_METERS"),
    on_demand::<TrafficKey, Traffic>("TRAFFIC", BPF_MAP_TYPE_HASH, TRAFFIC),
];

/// The maps that only the packet path needs and that take much memory. They exist only if the packet path does.
pub const FLOW_MAPS: [&str; 6] = [
    "CONNTRACK",
    "ANSWERS",
    "FRAGMENTS",
    "SEQUENCES",
    "CAME_BY",
    "FLOW_SECRET",
];

/// As [`FLOW_MAPS`], but an agent that adopts those makes this one if it is not there.
pub const BYPASS_MAP: &str = "BYPASS";

/// Returns the number of elements of `ANSWERS` for this many cells: two slots for each cell, sixteen slots in an
/// element.
pub fn slots_for(cells: u32) -> u32 {
    (cells / 8).max(1)
}

/// The spec of a map that [`MAPS`] has.
pub fn spec(name: &str) -> &'static MapSpec {
    let found = MAPS.iter().find(|spec| spec.name == name);
    found.expect("the name of one of our maps")
}

impl MapSpec {
    /// Returns the map's number of elements for this many flows; `None` if it does not depend on the number of flows.
    pub fn entries(&self, flows: u32) -> Option<u32> {
        match self.name {
            "CONNTRACK" | "SEQUENCES" => Some(cells_for(flows)),
            "CAME_BY" => Some(cells_for(flows) / 2),
            "ANSWERS" => Some(slots_for(cells_for(flows))),
            _ => None,
        }
    }

    /// Whether the map is one of [`FLOW_MAPS`], or [`BYPASS_MAP`].
    pub fn is_of_flows(&self) -> bool {
        FLOW_MAPS.contains(&self.name) || self.name == BYPASS_MAP
    }

    fn describe(kind: u32, key: u32, value: u32, flags: u32) -> String {
        let kind = bpf_map_type::try_from(kind)
            .map_or_else(|_| format!("type {kind}"), |kind| format!("{kind:?}"));
        format!("a map of {kind} with keys of {key} and values of {value} bytes, flags {flags:#x}")
    }

    /// Checks that a pinned map is this one.
    pub fn check(&self, path: &Path, info: &MapInfo) -> Result<(), Error> {
        let shape = &self.shape;
        let same = info.name == self.name
            && info.kind == shape.kind as u32
            && info.key_size == shape.key_size
            && info.value_size == shape.value_size
            && info.flags == shape.flags
            && self.max_entries.is_none_or(|max| max == info.max_entries);
        if same {
            return Ok(());
        }
        Err(Error::Foreign {
            path: path.into(),
            found: format!(
                "`{}`, {}",
                info.name,
                Self::describe(info.kind, info.key_size, info.value_size, info.flags)
            ),
            wanted: format!(
                "`{}`, {}",
                self.name,
                Self::describe(
                    shape.kind as u32,
                    shape.key_size,
                    shape.value_size,
                    shape.flags
                )
            ),
        })
    }
}
