//! The maps. `dataplane_common::tables` describes their contents.
//!
//! Five maps of the packet path are declared in the files that use them: `SCRATCH`, `WAYS`, `NEIGHBOURS`, `FOUND`
//! (`packet/reverse.rs`) and `EXHAUSTED` (`packet/masquerade.rs`). No other file knows their elements, so
//! this file stands below all others.
//!
//! The five that grow are one-element arrays of maps. The sizes given here for their inner maps
//! are templates: the kernel checks only that type, key size, value size and flags of a real inner
//! map are the same (`bpf_map_meta_equal` in `kernel/bpf/map_in_map.c`; for arrays that takes
//! `BPF_F_INNER_MAP`).

use aya_ebpf::{
    bindings::{BPF_F_INNER_MAP, BPF_F_MMAPABLE, BPF_F_NO_PREALLOC},
    btf_maps::{
        Array, ArrayOfMaps, HashMap, LpmTrie, LruHashMap, PerCpuArray, RingBuf, SkStorage, SockHash,
    },
    macros::btf_map,
};
use dataplane_common::{
    Addr, Event, Reason, VIP_ELEMENTS, VipElement,
    capture::{
        Askers, CaptureConfig, Enrolled, KNOWN as KNOWN_CAPACITY, LISTENERS as LISTENERS_CAPACITY,
        ListenerKey, Local, Meter, MeterSets, ORIGINS as ORIGINS_CAPACITY, Origin,
        PROBES as PROBES_CAPACITY, RULES as RULES_CAPACITY, RuleKey, TRAFFIC as TRAFFIC_CAPACITY,
        Traffic, TrafficKey, Tuple, WORKLOADS,
    },
    cells::{Cell, Slots, cells_for},
    origins::COUNTERS,
    packet::{
        BYPASSES, Bypass, DEFAULT_FLOWS, ERROR_BUCKETS, FRAGMENTS as FRAGMENTS_CAPACITY, FlowKey,
        Fragment, FragmentKey, Iface, NODE_ADDRS as NODE_ADDRS_CAPACITY, PacketConfig,
    },
    tables::{
        Affinity, AffinityKey, BY_PACKETS as BY_PACKETS_CAPACITY, Config, Endpoint, Frontend,
        FrontendKey, PEER_PORTS as PEER_PORTS_CAPACITY, Peer, PeerSets, Pool, PoolStats,
        SIBLINGS as SIBLINGS_CAPACITY, SOCKET_ELEMENTS, Sibling, SiblingKey, UdpFlows,
    },
    tcp::Sequences,
};

/// User space writes these by plain stores into the mapped memory: so a flip is one store and a bulk load a copy.
const MAPPED: usize = BPF_F_MMAPABLE as usize;
const ON_DEMAND: usize = BPF_F_NO_PREALLOC as usize;
const GROWING: usize = (BPF_F_MMAPABLE | BPF_F_INNER_MAP) as usize;

type Frontends = HashMap<FrontendKey, Frontend, 1>;
type Pools = Array<Pool, 1, GROWING>;
type Endpoints = Array<Endpoint, 1, GROWING>;
type Stats = Array<PoolStats, 1, GROWING>;
type Affinities = HashMap<AffinityKey, Affinity, 1, ON_DEMAND>;

#[btf_map]
pub static FRONTENDS: ArrayOfMaps<Frontends, 1> = ArrayOfMaps::new();

#[btf_map]
pub static POOLS: ArrayOfMaps<Pools, 1> = ArrayOfMaps::new();

#[btf_map]
pub static ENDPOINTS: ArrayOfMaps<Endpoints, 1> = ArrayOfMaps::new();

#[btf_map]
pub static STATS: ArrayOfMaps<Stats, 1> = ArrayOfMaps::new();

#[btf_map]
pub static AFFINITY: ArrayOfMaps<Affinities, 1> = ArrayOfMaps::new();

#[btf_map]
pub static REASONS: PerCpuArray<u64, { Reason::SLOTS as usize }> = PerCpuArray::new();

#[btf_map]
pub static EVENTS: RingBuf<Event, { 256 * 1024 }> = RingBuf::new();

#[btf_map]
pub static CONFIG: Array<Config, 1, MAPPED> = Array::new();

#[btf_map]
pub static VIPS: Array<VipElement, { VIP_ELEMENTS as usize }, MAPPED> = Array::new();

#[btf_map]
pub static PEERS: Array<PeerSets, { SOCKET_ELEMENTS as usize }, MAPPED> = Array::new();

#[btf_map]
pub static PEER_PORTS: Array<u64, { PEER_PORTS_CAPACITY as usize }, MAPPED> = Array::new();

#[btf_map]
pub static MORE_PEERS: SkStorage<Peer> = SkStorage::new();

#[btf_map]
pub static FLOWS: SkStorage<UdpFlows> = SkStorage::new();

#[btf_map]
pub static SIBLINGS: LruHashMap<SiblingKey, Sibling, { SIBLINGS_CAPACITY as usize }> =
    LruHashMap::new();

#[btf_map]
pub static SHARED_PORTS: Array<u64, { PEER_PORTS_CAPACITY as usize }, MAPPED> = Array::new();

// The packet path: `dataplane_common::packet`. The agent makes the tables of conntrack, in the configured size.

/// A set and an address in it: `SourceKey` without the prefix length, which the map type has as a
/// field of its own.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Source {
    pub set: u32,
    pub addr: Addr,
}

#[btf_map]
pub static IFACES: HashMap<u32, Iface, 4096, ON_DEMAND> = HashMap::new();

#[btf_map]
pub static SOURCES: LpmTrie<Source, u32, 1_048_576> = LpmTrie::new();

#[btf_map]
pub static NODE_ADDRS: Array<Addr, { NODE_ADDRS_CAPACITY as usize }, MAPPED> = Array::new();

#[btf_map]
pub static PACKET_CONFIG: Array<PacketConfig, 1, MAPPED> = Array::new();

#[btf_map]
pub static CONNTRACK: Array<Cell, { cells_for(DEFAULT_FLOWS) as usize }, MAPPED> = Array::new();

#[btf_map]
pub static ANSWERS: Array<Slots, { cells_for(DEFAULT_FLOWS) as usize / 8 }, MAPPED> = Array::new();

#[btf_map]
pub static SEQUENCES: Array<Sequences, { cells_for(DEFAULT_FLOWS) as usize }, MAPPED> =
    Array::new();

#[btf_map]
pub static CAME_BY: Array<[u32; 2], { cells_for(DEFAULT_FLOWS) as usize / 2 }, MAPPED> =
    Array::new();

#[btf_map]
pub static DIRECT: Array<u64, 1, MAPPED> = Array::new();

#[btf_map]
pub static BYPASS: LruHashMap<FlowKey, Bypass, { BYPASSES as usize }> = LruHashMap::new();

#[btf_map]
pub static FRAGMENTS: LruHashMap<FragmentKey, Fragment, { FRAGMENTS_CAPACITY as usize }> =
    LruHashMap::new();

#[btf_map]
pub static ERRORS: LruHashMap<Addr, u64, { ERROR_BUCKETS as usize }> = LruHashMap::new();

#[btf_map]
pub static ALL_ERRORS: Array<u64, 1> = Array::new();

// Mesh capture: `dataplane_common::capture`. Elements are allocated on demand: a node without a mesh pays for none.

/// A policy and an address: `RangeKey` without the prefix length.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Range {
    pub policy: u32,
    pub addr: Addr,
}

#[btf_map]
pub static CAPTURE: Array<CaptureConfig, 1, MAPPED> = Array::new();

#[btf_map]
pub static BY_PACKETS: HashMap<u64, u64, { BY_PACKETS_CAPACITY as usize }, ON_DEMAND> =
    HashMap::new();

#[btf_map]
pub static NAMESPACES: HashMap<u64, Enrolled, { WORKLOADS as usize }, ON_DEMAND> = HashMap::new();

#[btf_map]
pub static CGROUPS: HashMap<u64, Enrolled, { WORKLOADS as usize }, ON_DEMAND> = HashMap::new();

#[btf_map]
pub static LOCALS: HashMap<Addr, Local, { WORKLOADS as usize * 4 }, ON_DEMAND> = HashMap::new();

#[btf_map]
pub static RULES: HashMap<RuleKey, u32, { RULES_CAPACITY as usize }, ON_DEMAND> = HashMap::new();

#[btf_map]
pub static RANGES: LpmTrie<Range, u32, { RULES_CAPACITY as usize }> = LpmTrie::new();

#[btf_map]
pub static KNOWN: HashMap<FrontendKey, u32, { KNOWN_CAPACITY as usize }, ON_DEMAND> =
    HashMap::new();

#[btf_map]
pub static ASKERS: SkStorage<Askers> = SkStorage::new();

#[btf_map]
pub static ORIGINS: HashMap<Tuple, Origin, { ORIGINS_CAPACITY as usize }, ON_DEMAND> =
    HashMap::new();

#[btf_map]
pub static ORIGIN_COUNTS: Array<u64, { COUNTERS as usize }, MAPPED> = Array::new();

#[btf_map]
pub static PROBES: HashMap<Tuple, u64, { PROBES_CAPACITY as usize }, ON_DEMAND> = HashMap::new();

#[btf_map]
pub static ACCEPTED: SkStorage<Origin> = SkStorage::new();

#[btf_map]
pub static LISTENERS: SockHash<ListenerKey, { LISTENERS_CAPACITY as usize }> = SockHash::new();

#[btf_map]
pub static METERS: Array<MeterSets, { SOCKET_ELEMENTS as usize }, MAPPED> = Array::new();

#[btf_map]
pub static MORE_METERS: SkStorage<Meter> = SkStorage::new();

#[btf_map]
pub static TRAFFIC: HashMap<TrafficKey, Traffic, { TRAFFIC_CAPACITY as usize }, ON_DEMAND> =
    HashMap::new();
