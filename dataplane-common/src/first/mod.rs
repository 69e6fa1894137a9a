//! The first packet of a flow: which pool answers it, whether the endpoint sees the client's own address, and whether the
//! packet can and may go there. The packet programs and `dataplane explain --iface` run this code.

mod egress;

pub use egress::{Workloads, admits_itself, admits_service, is_known};

use crate::{
    Addr, Reason, decide,
    packet::{FlowKey, PacketConfig, SourceKey},
    tables::{Frontend, Kind, Pool},
};

/// A packet, with the node's knowledge about it.
pub trait Packet {
    /// Returns the flags of [`PacketConfig`].
    fn config(&self) -> u32;
    /// Whether the node itself sends the packet.
    fn is_of_node(&self) -> bool;
    /// Whether the interface accepts the packet's source as that of a new flow.
    fn has_right_source(&mut self) -> bool;
    /// Whether the packet arrives at a pod's interface.
    fn is_by_pods_interface(&self) -> bool;
    /// Whether a set of networks contains the packet's source.
    fn is_source_in(&self, set: u32) -> bool;
    /// Reads a pool for [`Packet::pool`]. `false`: there is no such pool.
    fn read_pool(&mut self, index: u32) -> bool;
    /// Returns the pool that was read last.
    fn pool(&self) -> &Pool;
    /// Takes note of a fact that the decision rests on. The programs need none of them.
    #[inline(always)]
    fn note(&mut self, _: Fact) {}
}

/// Facts that a decision rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fact {
    /// The source is in the load balancer's source ranges.
    InRanges,
    /// `externalTrafficPolicy: Cluster`: any endpoint, and the client is masqueraded.
    AnyEndpoint,
    /// `externalTrafficPolicy: Local`, but the client is a pod or the node: any endpoint.
    LocalForPod,
    /// `externalTrafficPolicy: Local`: an endpoint on this node, which sees the client's own address.
    LocalEndpoint,
    /// All clients of cluster IPs are masqueraded.
    MasqueradeAll,
    /// The client of a cluster IP is not a pod, so it is masqueraded.
    Outsider,
    /// The packet arrives at a pod's interface.
    PodByInterface,
    /// The source is in the networks of pods.
    PodByAddress,
    /// The source is not in the networks of pods, and the interface is not a pod's.
    NoPod,
    /// The node's configuration does not say which clients are pods.
    PodsUnknown,
}

/// The decision: the program draws an endpoint of the pool if the reason is [`Reason::Translated`], else it refuses the
/// packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// [`Reason::Translated`], or why the packet is refused.
    pub reason: Reason,
    /// The pool that answers, or that the refused packet was for.
    pub pool: u32,
    /// Whether the endpoint has to see an address of the node's.
    pub masquerade: bool,
}

/// Whether a packet is a pod's, by the configured ways to detect pods.
#[inline(always)]
fn is_from_pod(packet: &mut impl Packet) -> bool {
    let config = packet.config();
    if config & PacketConfig::DETECT_BY_INTERFACE != 0 && packet.is_by_pods_interface() {
        packet.note(Fact::PodByInterface);
        return true;
    }
    if config & PacketConfig::DETECT_BY_ADDRESS != 0 && packet.is_source_in(SourceKey::PODS) {
        packet.note(Fact::PodByAddress);
        return true;
    }
    packet.note(if config & PacketConfig::DETECTS == 0 {
        Fact::PodsUnknown
    } else {
        Fact::NoPod
    });
    false
}

/// Decides about a packet that begins a flow to a service.
#[inline(always)]
pub fn decide(packet: &mut impl Packet, frontend: Frontend) -> Decision {
    let mut decision = Decision {
        reason: Reason::Translated,
        pool: frontend.pool(),
        masquerade: false,
    };
    let of_node = packet.is_of_node();
    if !of_node && !packet.has_right_source() {
        decision.reason = Reason::SourceForged;
        return decision;
    }
    if !packet.read_pool(decision.pool) {
        decision.reason = Reason::Dangling;
        return decision;
    }
    let kind = frontend.kind();
    if kind == Kind::NODE_PORT || kind == Kind::EXTERNAL_IP || kind == Kind::LOAD_BALANCER {
        if kind == Kind::LOAD_BALANCER && packet.pool().ranged != 0 {
            if !packet.is_source_in(decision.pool) {
                decision.reason = Reason::SourceDenied;
                return decision;
            }
            packet.note(Fact::InRanges);
        }
        let external = packet.pool().external;
        decision.masquerade = of_node || external == 0;
        if external == 0 {
            packet.note(Fact::AnyEndpoint);
        } else if of_node || is_from_pod(packet) {
            packet.note(Fact::LocalForPod);
        } else {
            packet.note(Fact::LocalEndpoint);
            decision.pool = external;
            if !packet.read_pool(external) {
                decision.reason = Reason::Dangling;
                return decision;
            }
        }
    } else if of_node || packet.config() & PacketConfig::MASQUERADE_ALL != 0 {
        packet.note(Fact::MasqueradeAll);
        decision.masquerade = true;
    } else if packet.config() & PacketConfig::DETECTS == 0 {
        packet.note(Fact::PodsUnknown);
    } else if !is_from_pod(packet) {
        packet.note(Fact::Outsider);
        decision.masquerade = true;
    }
    let block = packet.pool().block;
    if block.is_empty() {
        decision.reason = decide::refusal(block);
    }
    decision
}

/// Whether IPsec policies forbid the flow that a packet begins to an endpoint: they protect its packets, or the answers,
/// before or after the translation. `protects`: whether a policy protects packets from one address to another.
#[inline(always)]
pub fn is_protected(
    key: &FlowKey,
    endpoint: &Addr,
    mut protects: impl FnMut(&Addr, &Addr) -> bool,
) -> bool {
    protects(&key.src, &key.dst)
        || protects(&key.src, endpoint)
        || protects(&key.dst, &key.src)
        || protects(endpoint, &key.src)
}

/// Whether a packet on the path through the stack would escape an IPsec policy: the policy protects the packet as it arrives, and would
/// drop it in clear, but the stack looks for policies only after the translation, and none drops the packet then. (With kube-proxy the
/// kernel looks for the addresses before its translation: `nf_nat_decode_session` in `__xfrm_policy_check`, `net/xfrm/xfrm_policy.c`.)
/// A packet that was encrypted does not get past the kernel here either, because no policy allows that. `protection`: the
/// [bits](SourceKey::PROTECTED) for packets from one address to another.
#[inline(always)]
pub fn escapes(
    key: &FlowKey,
    new_dst: &Addr,
    mut protection: impl FnMut(&Addr, &Addr) -> u32,
) -> bool {
    key.dst != *new_dst
        && protection(&key.src, &key.dst) & SourceKey::PROTECTED_FORWARD != 0
        && protection(&key.src, new_dst) & SourceKey::SURELY_FORWARD == 0
}

/// The decision of a packet program about a packet.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The interface's next program decides, or the stack.
    LeaveAlone,
    /// Drop it.
    Drop,
    /// Drop it and send its sender an error.
    Complain,
    /// Refuse it. The program still has to count and report the reason.
    Refuse,
    /// Translate it and send it on: its way is not known yet.
    Forward,
    /// Translate it and send it on along its way.
    Send,
    /// Translate it and pass it to the stack.
    Rewrite,
    /// Send it on along another way, as it is.
    Turn,
}

/// The result of a route lookup for a packet.
pub type Answer = u32;
/// Forward by an interface.
pub const ONWARD: Answer = 0;
/// To this host itself.
pub const LOCAL: Answer = 1;
/// Forward, but the packet is too large.
pub const TOO_BIG: Answer = 2;
/// Drop: no route, or one that rejects packets.
pub const NOWHERE: Answer = 3;
/// Forward, but only the stack can send the packet: by a route that encapsulates (LWT), or in fragments.
pub const STACK: Answer = 4;
/// Drop: the packet's source is not valid.
pub const FORGED: Answer = 5;
/// Drop for now: the interface has no programs yet that would see the answers.
pub const UNREADY: Answer = 6;

/// Returns why a packet cannot go this way, or [`Reason::Translated`] if it can. `mtu`: 0 if the packet is short enough.
/// `new_source`: whether the packet's source changes. The stack rejects such a packet, because its new source is one of the
/// node's own addresses.
#[inline(always)]
pub const fn obstacle(answer: Answer, mtu: u32, new_source: bool) -> Reason {
    match answer {
        NOWHERE | UNREADY => Reason::NoRoute,
        FORGED => Reason::SourceForged,
        TOO_BIG => Reason::TooBig,
        STACK if new_source && mtu == 0 => Reason::NoRoute,
        STACK if new_source => Reason::TooBig,
        _ => Reason::Translated,
    }
}

/// As [`obstacle`], for a packet that goes through the stack with a new destination and its own source: the stack finds the
/// way, by rules and marks that the lookup does not know, and sends the errors.
#[inline(always)]
pub const fn obstacle_in_stack(answer: Answer, mtu: u32, new_source: bool) -> Reason {
    match answer {
        UNREADY => Reason::NoRoute,
        // A route that encapsulates: the program on the way out does not see the packet as it is.
        STACK if new_source && mtu == 0 => Reason::NoRoute,
        FORGED => Reason::SourceForged,
        _ => Reason::Translated,
    }
}

layout! {
    /// The way of a packet, as the program `packet_way` writes it into the packet's frame.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Way {
        /// The result of the route lookup to the packet's destination.
        pub answer: Answer,
        /// See [`obstacle`].
        pub mtu: u32,
        /// Whether the interface at which it arrives accepts its source as that of a new flow: 1 or 0.
        pub begins: u32,
    }
}

#[cfg(test)]
mod tests;
