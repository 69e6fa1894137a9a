//! IPsec: the packet path sends packets on past the kernel's policies (XFRM), as they are. So what a policy protects it
//! does not send on at all, nor take in: the agent tells of the policies (`plan/ipsec.rs`).
//!
//! Asked of every packet that is translated, with the addresses that it has before and after, if there are policies at
//! all; a node without any pays for one look at a word.

use aya_ebpf::btf_maps::lpm_trie::Key;
use dataplane_common::{
    Addr, Reason,
    packet::{FlowKey, PacketConfig, SourceKey},
};

use super::rewrite::Ends;
use crate::{
    select::count,
    tables::{PACKET_CONFIG, SOURCES, Source},
};

/// [`PacketConfig::policies`].
#[inline(always)]
fn policies() -> u32 {
    match PACKET_CONFIG.get(0) {
        Some(config) => config.policies,
        None => 0,
    }
}

/// Whether a packet must not go from here with these ends. It is counted then.
#[inline(always)]
pub fn forbids(key: &FlowKey, ends: &Ends) -> bool {
    let policies = policies();
    if policies == 0 || !any(policies, key, ends) {
        return false;
    }
    count(Reason::IpsecPolicy);
    true
}

/// Whether no flow can begin between a packet's ends and the endpoint that was chosen for it: its packets, or the
/// answers to them, would be dropped. Not counted.
#[inline(always)]
pub fn forbids_flow(key: &FlowKey, endpoint: &Addr) -> bool {
    let policies = policies();
    policies != 0 && both_ways(policies, key, endpoint)
}

#[inline(never)]
fn any(policies: u32, key: &FlowKey, ends: &Ends) -> bool {
    protected(policies, &key.src, &key.dst)
        || protected(policies, &key.src, &ends.dst)
        || protected(policies, &ends.src, &ends.dst)
}

#[inline(never)]
fn both_ways(policies: u32, key: &FlowKey, endpoint: &Addr) -> bool {
    protected(policies, &key.src, &key.dst)
        || protected(policies, &key.src, endpoint)
        || protected(policies, &key.dst, &key.src)
        || protected(policies, endpoint, &key.src)
}

/// Whether a policy protects what goes from one address to another.
#[inline(never)]
fn protected(policies: u32, src: &Addr, dst: &Addr) -> bool {
    if policies == PacketConfig::ALL_PROTECTED {
        return true;
    }
    let sources = said(policies, dst);
    sources != 0 && said(sources, src) == SourceKey::PROTECTED
}

/// What a set says of the longest of its networks that an address is in; 0: it is in none.
#[inline(always)]
fn said(set: u32, addr: &Addr) -> u32 {
    let key = SourceKey::host(set, *addr);
    let key = Key::new(
        key.prefix,
        Source {
            set: key.set,
            addr: key.addr,
        },
    );
    SOURCES.get(&key).map_or(0, |said| *said)
}
