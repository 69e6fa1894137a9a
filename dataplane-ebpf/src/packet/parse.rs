//! Parses a packet's headers. The packet path leaves a packet alone if it is not complete and well-formed.

use core::mem::MaybeUninit;

use dataplane_common::{
    Addr, Port, Protocol,
    packet::FlowKey,
    tcp::{
        Segment,
        flags::{ACK, SYN},
    },
};

use super::{
    options::packet_source_route,
    skb::{LINK, Skb},
};

pub const ETHERTYPE_V4: u16 = 0x0800_u16.to_be();
pub const ETHERTYPE_V6: u16 = 0x86dd_u16.to_be();
/// Protocol numbers (IANA) of IPv6's extension headers.
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;
/// The most extension headers that are walked: more than any sender uses.
const MAX_EXTENSIONS: usize = 6;

/// The result of parsing a packet.
pub type Outcome = u32;
/// TCP or UDP, or a fragment of one.
pub const FLOW: Outcome = 0;
/// ICMP of the packet's family.
pub const ICMP: Outcome = 1;
/// Neither: the packet path does not handle it.
pub const OTHER: Outcome = 2;
/// Truncated or contradicting headers.
pub const MALFORMED: Outcome = 3;

/// Not a fragment.
pub const WHOLE: u32 = 0;
/// The first fragment: with ports, and more to come.
pub const FIRST: u32 = 1;
/// Another fragment: without ports.
pub const LATER: u32 = 2;

/// The longest packet that IPv6's header can tell the length of.
const LONGEST: u32 = 0xffff + 40;
/// TCP's protocol number.
const TCP: u8 = 6;

/// Whether a packet whose length field is 0 is one of BIG TCP: longer than the field allows. Such packets exist only
/// between the hosts' stacks, before segmentation (`iph_totlen` in `include/linux/ip.h`). `available`: as in
/// [`Packet::read_v4`]; a packet that an ICMP error quotes is never one of these.
#[inline(always)]
fn is_big(skb: Skb, available: u32) -> bool {
    available != u32::MAX && skb.gso_size() != 0
}

/// A packet's headers.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Packet {
    /// Addresses, ports and protocol. Ports of [`LATER`] fragments and of ICMP are 0.
    pub key: FlowKey,
    /// Whether it is IPv4: 1 or 0.
    pub v4: u32,
    /// Where the IP header begins: behind Ethernet's, or at 0 where there is none
    /// ([`Iface::BARE`](dataplane_common::packet::Iface::BARE)).
    pub l3: u32,
    /// Where the transport header begins.
    pub l4: u32,
    /// [`WHOLE`], [`FIRST`] or [`LATER`].
    pub fragment: u32,
    /// The identification, of a fragment only.
    pub identification: [u8; 4],
    /// Time to live, hop limit.
    pub hops: u8,
    /// Type of service, traffic class.
    pub tos: u8,
    /// IPv4's header checksum.
    pub checksum: u16,
    /// Length from the IP header on, according to the header; the length of the whole buffer if the field is too small
    /// for it ([`is_big`]).
    pub length: u32,
    /// Whether it has a source route, or may have one where the parser did not look
    /// ([`source_routes`](super::source_routes)): 1 or 0.
    pub routed: u32,
    /// The fields of TCP's header; zeros for other protocols.
    pub segment: Segment,
}

impl Packet {
    /// Clears the fields that reading does not always write.
    #[inline(always)]
    pub fn clear(&mut self) {
        self.key.src_port = Port::ANY;
        self.key.dst_port = Port::ANY;
        self.key.protocol = Protocol::ANY;
        self.key.padding = 0;
        self.key.reserved = 0;
        self.fragment = WHOLE;
        self.routed = 0;
        self.segment.flags = 0;
    }

    #[inline(always)]
    pub fn is_v4(&self) -> bool {
        self.v4 != 0
    }

    #[inline(always)]
    pub fn is_tcp(&self) -> bool {
        self.key.protocol == Protocol::TCP
    }

    /// Whether it asks to begin a TCP connection.
    #[inline(always)]
    pub fn is_syn(&self) -> bool {
        self.segment.flags & u32::from(SYN | ACK) == u32::from(SYN)
    }

    /// Whether it accepts a TCP connection.
    #[inline(always)]
    pub fn is_syn_ack(&self) -> bool {
        self.segment.flags & u32::from(SYN | ACK) == u32::from(SYN | ACK)
    }

    /// Reads the headers of a frame whose IP header begins at `l3`, TCP's flags included.
    #[inline(always)]
    pub fn read(&mut self, skb: Skb, l3: u32) -> Outcome {
        self.clear();
        if l3 == LINK && self.read_plain(skb) {
            return FLOW;
        }
        let outcome = self.read_any(skb, l3);
        if outcome == FLOW && !self.read_segment(skb) {
            return MALFORMED;
        }
        outcome
    }

    #[inline(never)]
    fn read_any(&mut self, skb: Skb, l3: u32) -> Outcome {
        let mut ethertype = skb.ethertype();
        if l3 != 0 && !skb.load(LINK - 2, &mut ethertype) {
            return OTHER;
        }
        self.l3 = l3;
        let len = skb.len().wrapping_sub(l3);
        if ethertype == ETHERTYPE_V4 {
            self.read_v4(skb, len)
        } else if ethertype == ETHERTYPE_V6 {
            self.read_v6(skb, len)
        } else {
            OTHER
        }
    }

    /// Reads an IPv4 header at `l3` and the headers behind it; `available` bytes are there.
    #[inline(always)]
    pub fn read_v4(&mut self, skb: Skb, available: u32) -> Outcome {
        let mut header = MaybeUninit::<[u32; 5]>::uninit();
        if !skb.load_new(self.l3, &mut header) {
            return MALFORMED;
        }
        // SAFETY: just loaded.
        let header = unsafe { header.assume_init_ref() };
        let [version, tos, high, low] = header[0].to_ne_bytes();
        let header_length = u32::from(version & 15) * 4;
        self.v4 = 1;
        self.tos = tos;
        self.length = u32::from(u16::from_be_bytes([high, low]));
        if version >> 4 != 4 || header_length < 20 {
            return MALFORMED;
        }
        let big = self.length == 0 && is_big(skb, available);
        if big {
            self.length = available;
        }
        if self.length < header_length || self.length > available {
            return MALFORMED;
        }
        let [id0, id1, fragment0, fragment1] = header[1].to_ne_bytes();
        let [hops, protocol, sum0, sum1] = header[2].to_ne_bytes();
        self.identification = [id0, id1, 0, 0];
        self.hops = hops;
        self.checksum = u16::from_ne_bytes([sum0, sum1]);
        self.l4 = self.l3 + header_length;
        // No host forwards a packet that an ICMP error quotes.
        if header_length > 20 && available != u32::MAX {
            self.routed = packet_source_route(skb.0, self.l3 + 20, self.l4);
        }
        self.key.src = Addr::from_v4_word(header[3]);
        self.key.dst = Addr::from_v4_word(header[4]);
        let fragment = u16::from_be_bytes([fragment0, fragment1]);
        if fragment & 0x1fff != 0 {
            self.fragment = LATER;
        } else if fragment & 0x2000 != 0 {
            self.fragment = FIRST;
        }
        if big && protocol != TCP {
            return MALFORMED;
        }
        // IPPROTO_ICMP
        self.read_transport(skb, protocol, 1, self.length - header_length)
    }

    /// Reads an IPv6 header at `l3` and the headers behind it; `available` bytes are there.
    #[inline(always)]
    pub fn read_v6(&mut self, skb: Skb, available: u32) -> Outcome {
        let mut header = MaybeUninit::<[u32; 10]>::uninit();
        if !skb.load_new(self.l3, &mut header) {
            return MALFORMED;
        }
        // SAFETY: just loaded.
        let header = unsafe { header.assume_init_ref() };
        let [version, class, ..] = header[0].to_ne_bytes();
        let [high, low, first, hops] = header[1].to_ne_bytes();
        let payload = u32::from(u16::from_be_bytes([high, low]));
        self.v4 = 0;
        self.tos = version << 4 | class >> 4;
        self.hops = hops;
        self.length = payload + 40;
        // A payload of 0 means a jumbogram (RFC 2675), which no known link carries, or an empty packet.
        let big = payload == 0 && is_big(skb, available);
        if big {
            self.length = available;
        } else if payload == 0 {
            return MALFORMED;
        }
        if version >> 4 != 6 || self.length > available {
            return MALFORMED;
        }
        self.key.src = Addr::from_words([header[2], header[3], header[4], header[5]]);
        self.key.dst = Addr::from_words([header[6], header[7], header[8], header[9]]);
        // No such address may be on the wire (`ip6_rcv_core` in `net/ipv6/ip6_input.c`); in our tables it would be an
        // IPv4 address.
        if self.key.src.is_v4() || self.key.dst.is_v4() {
            return OTHER;
        }
        let mut next = first;
        let mut offset = 40_u32;
        for _ in 0..MAX_EXTENSIONS {
            if next == ROUTING {
                self.routed = 1;
            }
            if next == FRAGMENT {
                let mut extension = [0_u8; 8];
                if !skb.load(self.l3 + offset, &mut extension) {
                    return MALFORMED;
                }
                let [after, _, high, low, id0, id1, id2, id3] = extension;
                next = after;
                self.identification = [id0, id1, id2, id3];
                let fragment = u16::from_be_bytes([high, low]);
                offset += 8;
                if fragment & 0xfff8 != 0 {
                    self.fragment = LATER;
                    break;
                }
                if fragment & 1 != 0 {
                    self.fragment = FIRST;
                }
            } else if next == HOP_BY_HOP || next == ROUTING || next == DESTINATION_OPTIONS {
                let mut extension = [0_u8; 2];
                if !skb.load(self.l3 + offset, &mut extension) {
                    return MALFORMED;
                }
                next = extension[0];
                offset += (u32::from(extension[1]) + 1) * 8;
            } else {
                break;
            }
        }
        // There are more extension headers than the loop walks.
        if self.fragment != LATER
            && matches!(next, HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION_OPTIONS)
        {
            self.routed = 1;
        }
        if offset > self.length || (big && next != TCP) {
            return MALFORMED;
        }
        self.l4 = self.l3 + offset;
        // IPPROTO_ICMPV6
        self.read_transport(skb, next, 58, self.length - offset)
    }

    #[inline(always)]
    fn read_transport(&mut self, skb: Skb, protocol: u8, icmp: u8, available: u32) -> Outcome {
        self.key.protocol = Protocol::from_number(protocol);
        let tcp = self.is_tcp();
        if !tcp && self.key.protocol != Protocol::UDP {
            return if protocol == icmp && self.fragment == WHOLE {
                ICMP
            } else {
                OTHER
            };
        }
        if self.fragment == LATER {
            return FLOW;
        }
        // In an ICMP error only the first eight bytes may be there, and no flags.
        let mut ports = [0_u16; 2];
        if available < 8 || !skb.load(self.l4, &mut ports) {
            return MALFORMED;
        }
        self.key.src_port = Port::from_be(ports[0]);
        self.key.dst_port = Port::from_be(ports[1]);
        FLOW
    }

    /// Length of the longest packet on the wire, from the IP header on: of a segment, if the packet is not segmented
    /// yet. (For a datagram that is not fragmented yet, UFO, the length is eight bytes more than that of its
    /// fragments.)
    #[inline(always)]
    pub fn longest(&self, skb: Skb) -> u32 {
        let size = skb.gso_size();
        if size == 0 {
            return self.length;
        }
        let mut network = self.l4 - self.l3;
        // Segmentation removes the option with the length (`ipv6_hopopt_jumbo_remove` in `include/net/ipv6.h`).
        if !self.is_v4() && self.length > LONGEST && network > 40 {
            network -= 8;
        }
        let mut transport = 8;
        if self.is_tcp() {
            let mut offset = 0_u8;
            skb.load(self.l4 + 12, &mut offset);
            transport = u32::from(offset >> 4) * 4;
        }
        network + transport + size
    }

    /// Whether a router may send it on in fragments.
    #[inline(always)]
    pub fn may_be_fragmented(&self, skb: Skb) -> bool {
        let mut flags = 0xff_u8;
        self.is_v4() && skb.load(self.l3 + 6, &mut flags) && flags & 0x40 == 0
    }

    /// Reads the fields of a TCP header behind the ports; `false` if they are not there.
    #[inline(always)]
    fn read_segment(&mut self, skb: Skb) -> bool {
        if !self.is_tcp() || self.fragment == LATER {
            return true;
        }
        let carried = self.length.wrapping_sub(self.l4 - self.l3);
        if self.length < self.l4 - self.l3 + 20 {
            return false;
        }
        let mut words = MaybeUninit::<[u32; 3]>::uninit();
        if !skb.load_new(self.l4 + 4, &mut words) {
            return false;
        }
        // SAFETY: just loaded.
        let [sequence, ack, rest] = unsafe { words.assume_init() };
        self.set_segment(carried, sequence, ack, rest);
        true
    }

    /// Takes three words of TCP's header as they lie in the packet; `carried` bytes belong to TCP.
    #[inline(always)]
    pub fn set_segment(&mut self, carried: u32, sequence: u32, ack: u32, rest: u32) {
        let [offset, flags, ..] = rest.to_ne_bytes();
        let data = carried.wrapping_sub(u32::from(offset >> 4) * 4);
        self.segment.end = u32::from_be(sequence).wrapping_add(data);
        self.segment.ack = u32::from_be(ack);
        self.segment.flags = u32::from(flags);
    }
}
