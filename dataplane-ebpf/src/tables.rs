//! Every map, in one place. What they mean: `dataplane_common::tables`.
//!
//! The five that grow are one-element arrays of maps. The sizes given here for their inner maps
//! are templates: the kernel checks only that type, key size, value size and flags of a real inner
//! map are the same (`bpf_map_meta_equal` in `kernel/bpf/map_in_map.c`; for arrays that takes
//! `BPF_F_INNER_MAP`).

use aya_ebpf::{
    bindings::{BPF_F_INNER_MAP, BPF_F_MMAPABLE},
    btf_maps::{Array, ArrayOfMaps, HashMap, LruHashMap, PerCpuArray, RingBuf, SkStorage},
    macros::btf_map,
};
use dataplane_common::{
    Event, Reason,
    tables::{
        Affinity, AffinityKey, Config, Endpoint, Frontend, FrontendKey, PEERS_CAPACITY, Peer, Pool,
        PoolStats, UdpFlows,
    },
};

/// User space writes these by plain stores into the mapped memory: that is what makes a flip one
/// store and a bulk load a copy.
const MAPPED: usize = BPF_F_MMAPABLE as usize;
const GROWING: usize = (BPF_F_MMAPABLE | BPF_F_INNER_MAP) as usize;

type Frontends = HashMap<FrontendKey, Frontend, 1>;
type Pools = Array<Pool, 1, GROWING>;
type Endpoints = Array<Endpoint, 1, GROWING>;
type Stats = Array<PoolStats, 1, GROWING>;
type Affinities = LruHashMap<AffinityKey, Affinity, 1>;

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
pub static PEERS: HashMap<u64, Peer, { PEERS_CAPACITY as usize }> = HashMap::new();

#[btf_map]
pub static MORE_PEERS: SkStorage<Peer> = SkStorage::new();

#[btf_map]
pub static FLOWS: SkStorage<UdpFlows> = SkStorage::new();
