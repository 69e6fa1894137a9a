//! Sets of networks: the clients of a load balancer, the pods, and the node itself.

use aya_ebpf::btf_maps::lpm_trie::Key;
use dataplane_common::{Addr, packet::SourceKey};

use crate::tables::{SOURCES, Source};

/// Whether a set contains an address.
#[inline(always)]
pub fn contains(set: u32, addr: Addr) -> bool {
    let key = SourceKey::host(set, addr);
    let key = Key::new(
        key.prefix,
        Source {
            set: key.set,
            addr: key.addr,
        },
    );
    SOURCES.get(&key).is_some()
}

/// Whether a bridge of the node that is no uplink has an address. (Not inlined, likewise.)
#[inline(never)]
pub fn is_of_bridge(addr: &Addr) -> bool {
    contains(SourceKey::BRIDGES, *addr)
}

/// Whether an address is the node's own according to its routes. (Not inlined: the key's stack is given back.)
#[inline(never)]
pub fn is_host(addr: &Addr) -> bool {
    contains(SourceKey::HOST, *addr)
}
