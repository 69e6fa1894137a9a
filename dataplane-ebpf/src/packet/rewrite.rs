//! Writes new addresses and ports to a packet, and corrects its checksums.

use dataplane_common::{Addr, Port};

use super::{
    parse::{LATER, Packet},
    skb::{Skb, difference, fold16, fold32},
};

/// The addresses and ports that a packet gets.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Ends {
    pub src: Addr,
    pub dst: Addr,
    pub src_port: Port,
    pub dst_port: Port,
}

impl Ends {
    /// Both addresses, as IPv6's header has them.
    #[inline(always)]
    pub const fn addresses(&self) -> [Addr; 2] {
        [self.src, self.dst]
    }
}

/// The difference that new addresses make to a sum.
#[inline(always)]
pub fn addresses_difference(packet: &Packet, ends: &Ends) -> u64 {
    let (src, dst) = (packet.key.src.words(), packet.key.dst.words());
    let (new_src, new_dst) = (ends.src.words(), ends.dst.words());
    if packet.is_v4() {
        difference(src[3], new_src[3]) + difference(dst[3], new_dst[3])
    } else {
        difference(src[0], new_src[0])
            + difference(src[1], new_src[1])
            + difference(src[2], new_src[2])
            + difference(src[3], new_src[3])
            + difference(dst[0], new_dst[0])
            + difference(dst[1], new_dst[1])
            + difference(dst[2], new_dst[2])
            + difference(dst[3], new_dst[3])
    }
}

/// Two ports as they lie in the packet.
#[inline(always)]
pub fn ports_word(src: Port, dst: Port) -> u32 {
    let [a, b] = src.be().to_ne_bytes();
    let [c, d] = dst.be().to_ne_bytes();
    u32::from_ne_bytes([a, b, c, d])
}

/// The word of an IPv4 header that its addresses follow: time to live, protocol and checksum.
#[inline(always)]
fn hops_word(packet: &Packet, ends: &Ends, hops: u8) -> u32 {
    let protocol = packet.key.protocol.number();
    let old_hops = u32::from(u16::from_ne_bytes([packet.hops, protocol]));
    let new_hops = u32::from(u16::from_ne_bytes([hops, protocol]));
    let sum = u64::from(!packet.checksum)
        + addresses_difference(packet, ends)
        + difference(old_hops, new_hops);
    let [sum0, sum1] = (!fold16(sum)).to_ne_bytes();
    u32::from_ne_bytes([hops, protocol, sum0, sum1])
}

/// Writes the IP header's addresses, and `hops` (the time to live or hop limit).
///
/// If a network card has summed the whole packet up, the transport checksum's change corrects the sum for IPv4, whose
/// own header always has the same sum. IPv6's header has no checksum, so the helper has to add the change of its bytes.
#[inline(always)]
pub fn write_addresses(skb: Skb, packet: &Packet, ends: &Ends, hops: u8) -> bool {
    if packet.is_v4() {
        let words = [
            hops_word(packet, ends, hops),
            ends.src.words()[3],
            ends.dst.words()[3],
        ];
        skb.store::<_, false>(packet.l3 + 8, &words)
    } else {
        skb.store::<_, true>(packet.l3 + 8, &ends.addresses())
            && (hops == packet.hops || skb.store::<_, true>(packet.l3 + 7, &hops))
    }
}

/// Writes new ends to the packet.
#[inline(never)]
pub fn rewrite(skb: Skb, packet: &Packet, ends: &Ends, hops: u8) -> bool {
    if packet.fragment == LATER {
        return write_addresses(skb, packet, ends, hops);
    }
    let udp = !packet.is_tcp();
    // The offset of the checksum (RFC 768, RFC 9293 section 3.1).
    let checksum = packet.l4 + if udp { 6 } else { 16 };
    let addresses = fold32(addresses_difference(packet, ends));
    if !skb.sum::<true>(checksum, addresses, udp) {
        return false;
    }
    let old = ports_word(packet.key.src_port, packet.key.dst_port);
    let new = ports_word(ends.src_port, ends.dst_port);
    if old != new && !skb.sum::<false>(checksum, fold32(difference(old, new)), udp) {
        return false;
    }
    if packet.is_v4() && packet.l4 == packet.l3 + 20 {
        // Without options the ports follow the addresses: one call for both.
        let words = [
            hops_word(packet, ends, hops),
            ends.src.words()[3],
            ends.dst.words()[3],
            new,
        ];
        return skb.store::<_, false>(packet.l3 + 8, &words);
    }
    write_addresses(skb, packet, ends, hops)
        && (old == new || skb.store::<_, false>(packet.l4, &new))
}
