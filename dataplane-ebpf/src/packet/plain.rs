//! The headers of almost all packets: Ethernet, IP without options or extensions, TCP or UDP, whole and not a fragment,
//! and in the buffer's linear part. The program reads them in place, without a helper call for each.

use core::ptr::read_volatile;

use dataplane_common::{Addr, Port, Protocol};

use super::{
    parse::{ETHERTYPE_V4, ETHERTYPE_V6, Packet},
    skb::{LINK, Skb},
};

/// Where the transport header begins, by family.
const L4_V4: usize = LINK as usize + 20;
const L4_V6: usize = LINK as usize + 40;
/// UDP's header, and TCP's without options.
const UDP: usize = 8;
const TCP: usize = 20;

/// The linear part of a packet.
#[derive(Clone, Copy)]
struct Linear {
    start: usize,
    end: usize,
}

impl Linear {
    #[inline(always)]
    fn has(self, length: usize) -> bool {
        self.start + length <= self.end
    }

    /// Reads a value at `offset`, after the caller has checked that it is there.
    ///
    /// `T` is aligned as far as machines require: the IP header begins at a multiple of four on machines that require
    /// it (`NET_IP_ALIGN` in `include/linux/skbuff.h`), and the verifier of their kernels checks it; other machines
    /// read words from any address.
    #[inline(always)]
    fn read<T: Copy>(self, offset: usize) -> T {
        // SAFETY: the verifier does not load a program that reads behind `end`.
        unsafe { read_volatile((self.start + offset) as *const T) }
    }
}

/// Returns the source port of a packet whose IP header begins at `l3`, if it is a datagram of the usual form; otherwise
/// [`Port::ANY`].
#[inline(always)]
pub fn datagram_source(skb: Skb, l3: u32) -> Port {
    let (start, end) = skb.linear();
    let linear = Linear { start, end };
    if l3 == LINK {
        linear.datagram_source::<{ LINK as usize }>()
    } else {
        linear.datagram_source::<0>()
    }
}

impl Linear {
    #[inline(always)]
    fn datagram_source<const L3: usize>(self) -> Port {
        if !self.has(L3 + 20 + UDP) {
            return Port::ANY;
        }
        let version = self.read::<u8>(L3);
        if version == 0x45 && self.read::<u8>(L3 + 9) == Protocol::UDP.number() {
            return Port::from_be(self.read(L3 + 20));
        }
        let is_v6 = version >> 4 == 6 && self.read::<u8>(L3 + 6) == Protocol::UDP.number();
        if is_v6 && self.has(L3 + 40 + UDP) {
            return Port::from_be(self.read(L3 + 40));
        }
        Port::ANY
    }
}

impl Packet {
    /// Reads the headers of a packet of the usual form; `false` if it has another form, and must be read step by step.
    /// That code also detects malformed packets.
    #[inline(never)]
    pub fn read_plain(&mut self, skb: Skb) -> bool {
        let (start, end) = skb.linear();
        let linear = Linear { start, end };
        if !linear.has(L4_V4 + UDP) {
            return false;
        }
        let available = skb.len().wrapping_sub(LINK);
        match linear.read::<u16>(12) {
            ETHERTYPE_V4 => self.read_plain_v4(linear, available),
            ETHERTYPE_V6 => self.read_plain_v6(linear, available),
            _ => false,
        }
    }

    #[inline(always)]
    fn read_plain_v4(&mut self, linear: Linear, available: u32) -> bool {
        let [version, tos, high, low] = linear.read::<u32>(14).to_ne_bytes();
        let [_, _, fragment0, fragment1] = linear.read::<u32>(18).to_ne_bytes();
        let [hops, protocol, sum0, sum1] = linear.read::<u32>(22).to_ne_bytes();
        let length = u32::from(u16::from_be_bytes([high, low]));
        // "Don't fragment" may be set.
        if version != 0x45 || fragment0 & 0xbf != 0 || fragment1 != 0 || length > available {
            return false;
        }
        if !self.read_plain_l4::<L4_V4>(linear, protocol, length) {
            return false;
        }
        self.v4 = 1;
        self.tos = tos;
        self.hops = hops;
        self.checksum = u16::from_ne_bytes([sum0, sum1]);
        self.key.src = Addr::from_v4_word(linear.read(26));
        self.key.dst = Addr::from_v4_word(linear.read(30));
        true
    }

    #[inline(always)]
    fn read_plain_v6(&mut self, linear: Linear, available: u32) -> bool {
        if !linear.has(L4_V6 + UDP) {
            return false;
        }
        let [version, class, ..] = linear.read::<u32>(14).to_ne_bytes();
        let [high, low, next, hops] = linear.read::<u32>(18).to_ne_bytes();
        let payload = u32::from(u16::from_be_bytes([high, low]));
        let src = Addr::from_words([22, 26, 30, 34].map(|at| linear.read(at)));
        let dst = Addr::from_words([38, 42, 46, 50].map(|at| linear.read(at)));
        let length = payload + 40;
        if version >> 4 != 6 || length > available || src.is_v4() || dst.is_v4() {
            return false;
        }
        if !self.read_plain_l4::<L4_V6>(linear, next, length) {
            return false;
        }
        self.v4 = 0;
        self.tos = version << 4 | class >> 4;
        self.hops = hops;
        self.key.src = src;
        self.key.dst = dst;
        true
    }

    /// Reads ports and flags; `length` is from the IP header on.
    #[inline(always)]
    fn read_plain_l4<const L4: usize>(
        &mut self,
        linear: Linear,
        protocol: u8,
        length: u32,
    ) -> bool {
        let protocol = Protocol::from_number(protocol);
        let l4 = L4 as u32;
        if protocol == Protocol::TCP {
            if !linear.has(L4 + TCP) || length < l4 - LINK + TCP as u32 {
                return false;
            }
            self.set_segment(
                length - (l4 - LINK),
                linear.read(L4 + 4),
                linear.read(L4 + 8),
                linear.read(L4 + 12),
            );
        } else if protocol != Protocol::UDP || length < l4 - LINK + UDP as u32 {
            return false;
        }
        self.key.protocol = protocol;
        self.key.src_port = Port::from_be(linear.read(L4));
        self.key.dst_port = Port::from_be(linear.read(L4 + 2));
        self.l3 = LINK;
        self.l4 = l4;
        self.length = length;
        true
    }
}
