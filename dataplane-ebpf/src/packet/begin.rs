//! The first packet of a flow: is it for a service, whose endpoint answers it, and what does that
//! see of the client.

use dataplane_common::{
    Addr, Port, Reason,
    cells::{BUSY, MADE, NOWHERE},
    decide,
    packet::{FlowKey, Iface, PacketConfig, SourceKey, Tick},
    tables::{Endpoint, Frontend, Kind, Pool},
};

use super::{
    DROP, LEAVE_ALONE, client_port,
    conntrack::{self, Flow, REQUEST},
    error::Complaint,
    events, masquerade,
    parse::{LATER, Packet},
    route,
    scratch::Scratch,
    skb::Skb,
    sources, table,
};
use crate::{
    select::{Live, choose, count, count_pool},
    tables::PACKET_CONFIG,
};

/// Whether the set contains the packet's source.
#[inline(always)]
fn contains(set: u32, packet: &Packet) -> bool {
    sources::contains(set, packet.key.src)
}

/// Which frontend a packet is for. (Not inlined, like others here: what has its own frame gives its
/// stack back.)
#[inline(never)]
pub fn frontend(key: &FlowKey) -> Frontend {
    decide::find_frontend(&Live, key.dst, key.dst_port, key.protocol, false)
}

/// Chooses an endpoint, given the one in use and [`Endpoint::NONE`] if there is none; that is
/// then the one that was chosen.
#[inline(never)]
fn pick(pool: &Pool, index: u32, client: &Addr, endpoint: &mut Endpoint) -> Reason {
    let verdict = choose(pool, index, *client, endpoint);
    *endpoint = verdict.endpoint;
    verdict.reason
}

/// Whether the packet comes from a pod, as far as anybody told us how to know.
#[inline(always)]
fn is_from_pod(skb: Skb, packet: &Packet, config: u32) -> bool {
    (config & PacketConfig::DETECT_BY_INTERFACE != 0
        && route::interface(skb.ifindex()).flags & Iface::LOCAL != 0)
        || (config & PacketConfig::DETECT_BY_ADDRESS != 0 && contains(SourceKey::PODS, packet))
}

/// [`Scratch::keep`]: the SYN again of a flow that lives.
pub const KEEP: u32 = 1;
/// [`Scratch::keep`]: a SYN on a flow that was reset. It keeps its endpoint, so that who sends a RST and a SYN in another's
/// name moves no connection that lives.
pub const KEEP_RESET: u32 = 2;

/// A packet to the service of [`Scratch::frontend`] that no flow is known of; or, if [`Scratch::keep`], a
/// SYN on the flow that is in `s`, whose endpoint is kept if it is still one.
///
/// In three steps, one after the other rather than one within the other: the frames of all would
/// not fit the stack at once.
#[inline(always)]
pub fn begin(skb: Skb, s: &mut Scratch, now: Tick) -> i32 {
    let action = find_pool(skb, s);
    if action != CHOOSE {
        return action;
    }
    s.endpoint = if s.keep != 0 {
        Endpoint::new(s.flow.endpoint, s.flow.endpoint_port)
    } else {
        Endpoint::NONE
    };
    let chosen = pick(&s.pool, s.index, &s.packet.key.src, &mut s.endpoint);
    if s.endpoint.is_none() {
        return refuse(skb, s, s.index, chosen);
    }
    go(skb, s, now, chosen)
}

/// [`find_pool`]: there is one, and it has endpoints.
const CHOOSE: i32 = 257;

/// Which pool answers the packet, if any, and whether the flow is to be masqueraded.
#[inline(never)]
fn find_pool(skb: Skb, s: &mut Scratch) -> i32 {
    let key = &s.packet.key;
    if key.src.is_nobody() {
        return LEAVE_ALONE;
    }
    let kind = s.frontend.kind();
    if s.packet.fragment == LATER && key.dst_port == Port::ANY {
        // Of a node's address it may be anybody's; a cluster IP is nobody else's.
        if kind != Kind::CLUSTER_ADDRESS {
            return LEAVE_ALONE;
        }
        count(Reason::UnknownFragment);
        return DROP;
    }
    let mut index = s.frontend.pool();
    let Some(pool) = decide::Tables::pool(&Live, index) else {
        count(Reason::Dangling);
        return DROP;
    };
    s.pool = pool;
    let config = match PACKET_CONFIG.get(0) {
        Some(config) => config.flags,
        None => 0,
    };
    let masquerade;
    if kind == Kind::NODE_PORT || kind == Kind::EXTERNAL_IP || kind == Kind::LOAD_BALANCER {
        if kind == Kind::LOAD_BALANCER && s.pool.ranged != 0 && !contains(index, &s.packet) {
            return refuse(skb, s, index, Reason::SourceDenied);
        }
        masquerade = s.pool.external == 0;
        if s.pool.external != 0 && !is_from_pod(skb, &s.packet, config) {
            index = s.pool.external;
            let Some(external) = decide::Tables::pool(&Live, index) else {
                count(Reason::Dangling);
                return DROP;
            };
            s.pool = external;
        }
    } else {
        let detected = PacketConfig::DETECT_BY_ADDRESS | PacketConfig::DETECT_BY_INTERFACE;
        masquerade = config & PacketConfig::MASQUERADE_ALL != 0
            || (config & detected != 0 && !is_from_pod(skb, &s.packet, config));
    }
    if s.pool.block.is_empty() {
        return refuse(skb, s, index, decide::refusal(s.pool.block));
    }
    s.index = index;
    s.masquerade = u32::from(masquerade);
    CHOOSE
}

/// Enters the flow to the endpoint that was chosen, and sends its packet there.
#[inline(never)]
fn go(skb: Skb, s: &mut Scratch, now: Tick, chosen: Reason) -> i32 {
    let index = s.index;
    let mut masquerade = s.masquerade != 0;
    route::find(
        skb,
        &s.packet,
        &s.endpoint.addr,
        s.endpoint.port,
        &mut s.way,
    );
    if s.way.answer == route::NOWHERE {
        return refuse(skb, s, index, Reason::NoRoute);
    }
    if s.way.answer == route::TOO_BIG {
        count(Reason::TooBig);
        return super::complain(s, Complaint::too_big(s.way.mtu));
    }
    if s.keep != 0 {
        if s.endpoint.addr == s.flow.endpoint && s.endpoint.port == s.flow.endpoint_port {
            if s.keep == KEEP_RESET {
                conntrack::begin_anew(&s.packet.key, &s.packet.segment, now);
            }
            s.flow.toward_endpoint(&mut s.ends);
            return super::deliver(skb, s);
        }
        s.flow.remove();
    }
    s.flow.forward = s.packet.key;
    s.flow.endpoint = s.endpoint.addr;
    s.flow.endpoint_port = s.endpoint.port;
    s.flow.node_port = Port::ANY;
    s.flow.node_addr = 0;
    masquerade |= s.packet.key.src == s.endpoint.addr;
    if s.way.answer == route::LOCAL {
        // An endpoint on the host itself answers through us, whoever asks; and a packet with one
        // of the host's own addresses as its source would not be let in (`fib_validate_source`).
        masquerade = false;
    }
    if masquerade && s.way.answer == route::STACK {
        // See `deliver`.
        s.way.keep_from_stack();
        if s.way.answer == route::TOO_BIG {
            count(Reason::TooBig);
            return super::complain(s, Complaint::too_big(s.way.mtu));
        }
        return refuse(skb, s, index, Reason::NoRoute);
    }
    let reason = enter(&s.packet, &mut s.flow, s.way.iface, masquerade, now);
    if reason == Reason::Kept {
        // Another CPU has the same flow's first packet, too, and was faster: its endpoint answers.
        let known = conntrack::request(&s.packet.key, &s.packet.segment, &mut s.flow, now);
        if known != REQUEST {
            return refuse(skb, s, index, Reason::FlowBusy);
        }
        s.flow.toward_endpoint(&mut s.ends);
        return super::FORWARD;
    }
    if reason.is_refusal() {
        return refuse(skb, s, index, reason);
    }
    let reason = if reason == Reason::Masqueraded {
        reason
    } else {
        chosen
    };
    count(reason);
    count_pool(index, reason);
    events::report(skb, &s.packet, reason, index, &s.endpoint);
    s.flow.toward_endpoint(&mut s.ends);
    super::deliver(skb, s)
}

/// Enters the flow into conntrack. The reason is a refusal if that failed, [`Reason::Masqueraded`] if it was given
/// an address and a port of the node's, and [`Reason::Kept`] if another CPU has entered it.
#[inline(never)]
fn enter(packet: &Packet, flow: &mut Flow, iface: Iface, masquerade: bool, now: Tick) -> Reason {
    let mut reason = Reason::Translated;
    if masquerade {
        flow.node_addr = if packet.is_v4() {
            iface.masquerade_v4
        } else {
            iface.masquerade_v6
        };
        if conntrack::node_addr(flow.node_addr).is_unspecified() {
            return Reason::NoNodeAddress;
        }
        reason = Reason::Masqueraded;
    }
    let index = table::hold_or_find(&flow.forward, now);
    if index == NOWHERE {
        return Reason::ConntrackFull;
    }
    if index == BUSY {
        return Reason::FlowBusy;
    }
    if index & MADE != 0 {
        return Reason::Kept;
    }
    if !masquerade {
        reason = client_port::take(flow, index, now);
    } else if !masquerade::take_port(flow, index, now) {
        reason = Reason::PortsExhausted;
    }
    if reason.is_refusal() {
        table::give_back(index, &flow.forward);
        return reason;
    }
    flow.publish(index, now, &packet.segment);
    reason
}

/// A connection to no service is left alone. If it is to an endpoint itself, from a port from which a live flow by
/// way of a VIP goes to it, it is refused: what the endpoint answered would be taken for that flow's.
#[inline(never)]
pub fn pass(skb: Skb, s: &mut Scratch, now: Tick) -> i32 {
    s.flow.forward = s.packet.key;
    s.flow.endpoint = s.packet.key.dst;
    s.flow.endpoint_port = s.packet.key.dst_port;
    s.flow.node_port = Port::ANY;
    if s.flow.replies_taken(now) {
        return refuse(skb, s, 0, Reason::PortTaken);
    }
    LEAVE_ALONE
}

/// Refuses a packet: says so to whoever sent it where iptables' `REJECT` would, else drops it.
#[inline(always)]
fn refuse(skb: Skb, s: &mut Scratch, pool: u32, reason: Reason) -> i32 {
    count(reason);
    // The others are not for want of endpoints: a pool's counter would show them as connections.
    if reason == Reason::NoEndpoints
        || reason == Reason::NoLocalEndpoint
        || reason == Reason::PortNotServed
    {
        count_pool(pool, reason);
    }
    events::report(skb, &s.packet, reason, pool, &Endpoint::NONE);
    if reason == Reason::NoEndpoints
        || reason == Reason::PortNotServed
        || reason == Reason::PortTaken
    {
        super::complain(s, Complaint::PORT_UNREACHABLE)
    } else {
        DROP
    }
}
