//! IPsec: the kernel's policies (XFRM) do not see the packets that the packet path forwards, so the kernel would not
//! encrypt these packets. Therefore the program does not forward or accept packets that a policy protects. The
//! agent writes the policies (`dataplane-user/plan/src/ipsec.rs`).
//!
//! On the path through the stack, the kernel applies the policies to a packet with its new destination and its old source. The
//! program drops what the kernel then does not see: a packet that arrives in clear although a policy protects it with its old
//! destination, and one that would leave in clear although a policy protects it with its new source.
//!
//! If there are policies, the check runs for every translated packet, with the addresses before and after the
//! translation. On a node without policies it reads one word.

use aya_ebpf::btf_maps::lpm_trie::Key;
use dataplane_common::{
    Addr, Reason, first,
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

/// Whether a policy forbids to send a packet with these ends. If so, counts it.
#[inline(always)]
pub fn forbids(key: &FlowKey, ends: &Ends) -> bool {
    let policies = policies();
    if policies == 0 || !any(policies, key, ends) {
        return false;
    }
    count(Reason::IpsecPolicy);
    true
}

/// Whether a policy forbids that a packet which the stack forwards leaves with these ends. If so, counts it.
#[inline(always)]
pub fn forbids_leaving(ends: &Ends) -> bool {
    let policies = policies();
    if policies == 0 || protection(policies, &ends.src, &ends.dst) & SourceKey::PROTECTED_OUT == 0 {
        return false;
    }
    count(Reason::IpsecPolicy);
    true
}

/// Whether the stack would not see that a policy protects a packet as it arrives ([`first::escapes`]). Does not count it.
#[inline(always)]
pub fn escapes(key: &FlowKey, new_dst: &Addr) -> bool {
    let policies = policies();
    policies != 0 && escape(policies, key, new_dst)
}

#[inline(never)]
fn escape(policies: u32, key: &FlowKey, new_dst: &Addr) -> bool {
    first::escapes(key, new_dst, move |src, dst| protection(policies, src, dst))
}

/// Whether a policy forbids a flow between a packet's ends and the chosen endpoint: its packets, or the answers to
/// them, would be dropped. Does not count it.
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
    first::is_protected(key, endpoint, move |src, dst| protected(policies, src, dst))
}

/// Whether a policy protects packets from one address to another.
#[inline(always)]
fn protected(policies: u32, src: &Addr, dst: &Addr) -> bool {
    protection(policies, src, dst) & SourceKey::PROTECTED != 0
}

/// Which policies protect packets from one address to another: bits of [`SourceKey::PROTECTED`] and
/// [`SourceKey::SURELY_FORWARD`].
#[inline(never)]
fn protection(policies: u32, src: &Addr, dst: &Addr) -> u32 {
    if policies == PacketConfig::ALL_PROTECTED {
        return SourceKey::PROTECTED;
    }
    match said(policies, dst) {
        0 => 0,
        sources => said(sources, src),
    }
}

/// Returns the value of the longest network of a set that contains an address; 0 if none does.
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
