//! ICMP errors that this node sends: built from the packet that they answer, in its place.

use dataplane_common::{Reason, packet::ErrorLimits};

use super::{
    DROP, limits,
    parse::{LATER, Packet},
    skb::{Skb, fold16, sum},
};
use crate::select::count;

/// An ICMP error about a packet.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Complaint {
    /// Type and code of ICMP (RFC 792), and of ICMPv6 (RFC 4443).
    v4: [u8; 2],
    v6: [u8; 2],
    /// The MTU of the route; 0 for other errors.
    mtu: u32,
    /// Its flag of [`ErrorLimits::kinds`], for IPv4 and for IPv6; 0: it is never limited, because path MTU discovery
    /// depends on it.
    limited: [u32; 2],
}

impl Complaint {
    /// No process answers at this port: iptables' `REJECT` sends this by default, for TCP as well as for UDP. Both show
    /// as `ECONNREFUSED`.
    pub const PORT_UNREACHABLE: Self = Self {
        v4: [3, 3],
        v6: [1, 4],
        mtu: 0,
        limited: [ErrorLimits::UNREACHABLE_V4, ErrorLimits::UNREACHABLE_V6],
    };
    /// The time to live, or hop limit, ran out.
    pub const TIME_EXCEEDED: Self = Self {
        v4: [11, 0],
        v6: [3, 0],
        mtu: 0,
        limited: [ErrorLimits::EXCEEDED_V4, ErrorLimits::EXCEEDED_V6],
    };

    /// Larger than the route allows (RFC 1191, RFC 8201).
    #[inline(always)]
    pub fn too_big(mtu: u32) -> Self {
        Self {
            v4: [3, 4],
            v6: [2, 0],
            mtu,
            limited: [0; 2],
        }
    }
}

/// How many bytes of the transport header are quoted: RFC 792 asks for eight. Of TCP, the whole header is quoted.
const TCP: usize = 20;
const UDP: usize = 8;
/// An error is a new packet: it starts with a fresh time to live.
const HOPS: u8 = 64;

/// Sends the packet back as an error, from the packet's destination address; up the stack of this host if the packet
/// `leaves`. Packets that cannot be answered in this way (later fragments, options) are dropped. First fragments are
/// answered: their sender then makes smaller ones. So are packets that are not segmented yet: cut off, such a packet is
/// one packet (`__bpf_skb_change_tail` in `net/core/filter.c`).
#[inline(never)]
pub fn send(skb: Skb, packet: &Packet, complaint: &Complaint, leaves: bool) -> i32 {
    let network = packet.l4 - packet.l3;
    let plain = if packet.is_v4() {
        network == 20
    } else {
        // With one extension header of eight bytes: a fragment header, or the one with the length of a BIG TCP packet.
        network == 40 || network == 48
    };
    if packet.fragment == LATER || !plain {
        return DROP;
    }
    let [v4, v6] = complaint.limited;
    let kind = if packet.is_v4() { v4 } else { v6 };
    if kind != 0 && !limits::allow(&packet.key.src, kind) {
        count(Reason::ErrorLimited);
        return DROP;
    }
    if packet.is_v4() {
        if packet.is_tcp() {
            send_v4::<{ (20 + TCP) / 4 }>(skb, packet, complaint, leaves)
        } else {
            send_v4::<{ (20 + UDP) / 4 }>(skb, packet, complaint, leaves)
        }
    } else if packet.is_tcp() {
        if network == 48 {
            send_v6::<{ (48 + TCP) / 4 }>(skb, packet, complaint, leaves)
        } else {
            send_v6::<{ (40 + TCP) / 4 }>(skb, packet, complaint, leaves)
        }
    } else if network == 48 {
        send_v6::<{ (48 + UDP) / 4 }>(skb, packet, complaint, leaves)
    } else {
        send_v6::<{ (40 + UDP) / 4 }>(skb, packet, complaint, leaves)
    }
}

/// `WORDS`: how much of the packet is quoted, in units of four bytes.
#[inline(never)]
fn send_v4<const WORDS: usize>(
    skb: Skb,
    packet: &Packet,
    complaint: &Complaint,
    leaves: bool,
) -> i32 {
    let quoted = WORDS as u32 * 4;
    let mut quote = [0_u32; WORDS];
    if !skb.load(packet.l3, &mut quote) || !skb.make_blank(packet.l3, 20 + 8 + quoted) {
        return DROP;
    }
    let [kind, code] = complaint.v4;
    let rest = (complaint.mtu & 0xffff).to_be();
    let icmp = [u32::from_ne_bytes([kind, code, 0, 0]), rest];
    let icmp_sum = !fold16(sum(&icmp) + sum(&quote));
    let [sum0, sum1] = icmp_sum.to_ne_bytes();
    let [len0, len1] = ((20 + 8 + quoted) as u16).to_be_bytes();
    let mut ip = [
        u32::from_ne_bytes([0x45, 0, len0, len1]),
        // Never to be fragmented: no identification is needed (RFC 6864).
        u32::from_ne_bytes([0, 0, 0x40, 0]),
        u32::from_ne_bytes([HOPS, 1, 0, 0]),
        packet.key.dst.words()[3],
        packet.key.src.words()[3],
    ];
    let ip_sum = !fold16(sum(&ip));
    let [ip0, ip1] = ip_sum.to_ne_bytes();
    ip[2] = u32::from_ne_bytes([HOPS, 1, ip0, ip1]);
    let icmp = [u32::from_ne_bytes([kind, code, sum0, sum1]), rest];
    if !skb.store::<_, true>(packet.l3, &ip)
        || !skb.store::<_, true>(packet.l3 + 20, &icmp)
        || !skb.store::<_, true>(packet.l3 + 28, &quote)
    {
        return DROP;
    }
    skb.send_back(packet.l3, leaves)
}

#[inline(never)]
fn send_v6<const WORDS: usize>(
    skb: Skb,
    packet: &Packet,
    complaint: &Complaint,
    leaves: bool,
) -> i32 {
    let quoted = WORDS as u32 * 4;
    let mut quote = [0_u32; WORDS];
    if !skb.load(packet.l3, &mut quote) || !skb.make_blank(packet.l3, 40 + 8 + quoted) {
        return DROP;
    }
    let [kind, code] = complaint.v6;
    let rest = complaint.mtu.to_be();
    let icmp = [u32::from_ne_bytes([kind, code, 0, 0]), rest];
    let length = 8 + quoted;
    // The pseudo header of RFC 8200 section 8.1.
    let pseudo = sum(&packet.key.src.words())
        + sum(&packet.key.dst.words())
        + u64::from(length.to_be())
        + u64::from(58_u32.to_be());
    let icmp_sum = !fold16(pseudo + sum(&icmp) + sum(&quote));
    let [sum0, sum1] = icmp_sum.to_ne_bytes();
    let (src, dst) = (packet.key.dst.words(), packet.key.src.words());
    let [len0, len1] = (length as u16).to_be_bytes();
    let ip = [
        u32::from_ne_bytes([0x60, 0, 0, 0]),
        u32::from_ne_bytes([len0, len1, 58, HOPS]),
        src[0],
        src[1],
        src[2],
        src[3],
        dst[0],
        dst[1],
        dst[2],
        dst[3],
    ];
    let icmp = [u32::from_ne_bytes([kind, code, sum0, sum1]), rest];
    if !skb.store::<_, true>(packet.l3, &ip)
        || !skb.store::<_, true>(packet.l3 + 40, &icmp)
        || !skb.store::<_, true>(packet.l3 + 48, &quote)
    {
        return DROP;
    }
    skb.send_back(packet.l3, leaves)
}
