//! Answers packets in the middle of a TCP connection to a service's address, if both the program's tables and the
//! kernel's conntrack lack the connection. Such a packet arrives after a failover of the address, or after a reboot.
//! The program resets the connection at once, as the endpoint would (RFC 9293, section 3.10.7.1).
//!
//! The program at ingress cannot look into the kernel's conntrack, which may have an entry. So it only marks the packet
//! as unknown ([`Skb::is_unknown`]). The kernel translates packets of its own connections before it routes them. If a
//! packet then still leaves with a service's address as its destination, no connection of the kernel has it.

use dataplane_common::{
    Reason, decide,
    tables::{Endpoint, Kind},
    tcp::flags::{ACK, FIN, RST, SYN},
};

use super::{
    DROP, LEAVE_ALONE, begin, events,
    parse::{Packet, WHOLE},
    skb::{Skb, fold16, send_bare, sum},
    sources,
};
use crate::select::{Live, count};

/// A fresh time to live.
const HOPS: u8 = 64;
/// TCP's header without options, and its protocol number.
const TCP: u32 = 20;
const PROTOCOL: u8 = 6;

/// Handles an unknown packet that leaves: if its destination is a service, drops it and sends its sender a reset.
#[inline(never)]
pub fn unknown(skb: Skb, packet: &Packet) -> i32 {
    if !packet.is_tcp() || packet.fragment != WHOLE {
        return LEAVE_ALONE;
    }
    let frontend = begin::frontend(&packet.key);
    if frontend.is_none() {
        return LEAVE_ALONE;
    }
    let pool = frontend.pool();
    let is_ranged = frontend.kind() == Kind::LOAD_BALANCER
        && decide::Tables::pool(&Live, pool).is_some_and(|pool| pool.ranged != 0);
    if is_ranged && !sources::contains(pool, packet.key.src) {
        count(Reason::SourceDenied);
        return DROP;
    }
    count(Reason::UnknownFlow);
    events::report(skb, packet, Reason::UnknownFlow, pool, &Endpoint::NONE);
    // A reset gets no answer.
    if packet.segment.has(RST) {
        return DROP;
    }
    let network = packet.l4 - packet.l3;
    let sent = if packet.is_v4() && network == 20 {
        write_v4(skb, packet)
    } else if !packet.is_v4() && network == 40 {
        write_v6(skb, packet)
    } else {
        false
    };
    if !sent || (packet.l3 == 0 && !skb.add_link()) {
        return DROP;
    }
    send_bare(skb.ingress())
}

/// TCP's header of the reset, with its checksum; `pseudo`: the sum of the addresses.
#[inline(always)]
fn header(packet: &Packet, pseudo: u64) -> [u32; 5] {
    let key = &packet.key;
    let [a, b] = key.dst_port.be().to_ne_bytes();
    let [c, d] = key.src_port.be().to_ne_bytes();
    let ports = u32::from_ne_bytes([a, b, c, d]);
    let mut segment = packet.segment;
    let (sequence, ack, flags) = if segment.has(ACK) {
        (segment.ack, 0, RST)
    } else {
        if segment.has(SYN) {
            segment.end = segment.end.wrapping_add(1);
        }
        if segment.has(FIN) {
            segment.end = segment.end.wrapping_add(1);
        }
        (0, segment.end, RST | ACK)
    };
    let length = (TCP / 4) as u8;
    let mut words = [
        ports,
        sequence.to_be(),
        ack.to_be(),
        u32::from_ne_bytes([length << 4, flags, 0, 0]),
        0,
    ];
    let rest = u32::from_ne_bytes([0, PROTOCOL, 0, TCP as u8]);
    let [sum0, sum1] = (!fold16(pseudo + u64::from(rest) + sum(&words))).to_ne_bytes();
    words[4] = u32::from_ne_bytes([sum0, sum1, 0, 0]);
    words
}

#[inline(never)]
fn write_v4(skb: Skb, packet: &Packet) -> bool {
    let (src, dst) = (packet.key.dst.words()[3], packet.key.src.words()[3]);
    let tcp = header(packet, u64::from(src) + u64::from(dst));
    let mut ip = [
        u32::from_ne_bytes([0x45, 0, 0, 20 + TCP as u8]),
        // Never to be fragmented: no identification is needed (RFC 6864).
        u32::from_ne_bytes([0, 0, 0x40, 0]),
        u32::from_ne_bytes([HOPS, PROTOCOL, 0, 0]),
        src,
        dst,
    ];
    let [sum0, sum1] = (!fold16(sum(&ip))).to_ne_bytes();
    ip[2] = u32::from_ne_bytes([HOPS, PROTOCOL, sum0, sum1]);
    skb.make_blank(packet.l3, 20 + TCP)
        && skb.store::<_, true>(packet.l3, &ip)
        && skb.store::<_, true>(packet.l3 + 20, &tcp)
}

#[inline(never)]
fn write_v6(skb: Skb, packet: &Packet) -> bool {
    let (src, dst) = (packet.key.dst.words(), packet.key.src.words());
    let tcp = header(packet, sum(&src) + sum(&dst));
    let ip = [
        u32::from_ne_bytes([0x60, 0, 0, 0]),
        u32::from_ne_bytes([0, TCP as u8, PROTOCOL, HOPS]),
        src[0],
        src[1],
        src[2],
        src[3],
        dst[0],
        dst[1],
        dst[2],
        dst[3],
    ];
    skb.make_blank(packet.l3, 40 + TCP)
        && skb.store::<_, true>(packet.l3, &ip)
        && skb.store::<_, true>(packet.l3 + 40, &tcp)
}
