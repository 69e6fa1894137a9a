//! Addresses, ports and protocols, as the tables hold them.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use network_types::ip::IpProto;

layout! {
    /// An IP address of either family: 16 bytes in network order, IPv4 as v4-mapped
    /// (`::ffff:a.b.c.d`, RFC 4291 section 2.5.5.2).
    ///
    /// One type for both families means one code path: a v4-mapped address in `connect6` and the same address in
    /// `connect4` are one key. The address is four words, each with its bytes in memory order, because
    /// `bpf_sock_addr::user_ip6` hands it over in this form, and the programs compare words fastest.
    #[repr(C)]
    #[derive(Clone, Copy, PartialEq, Eq, Hash)]
    pub struct Addr([u32; 4]);
}

/// The third word of a v4-mapped address.
const MAPPED: u32 = u32::from_ne_bytes([0, 0, 0xff, 0xff]);

impl Addr {
    /// `::`, which no service and no endpoint has.
    pub const UNSPECIFIED: Self = Self([0; 4]);

    /// From the four bytes of an IPv4 address, in network order.
    #[inline(always)]
    pub const fn from_v4(octets: [u8; 4]) -> Self {
        Self([0, 0, MAPPED, u32::from_ne_bytes(octets)])
    }

    /// From an IPv4 address as the kernel's `bpf_sock_addr::user_ip4` holds it: in network order.
    #[inline(always)]
    pub const fn from_v4_word(word: u32) -> Self {
        Self([0, 0, MAPPED, word])
    }

    /// From the sixteen bytes of an IPv6 address, in network order.
    #[inline(always)]
    pub const fn from_v6(o: [u8; 16]) -> Self {
        Self([
            u32::from_ne_bytes([o[0], o[1], o[2], o[3]]),
            u32::from_ne_bytes([o[4], o[5], o[6], o[7]]),
            u32::from_ne_bytes([o[8], o[9], o[10], o[11]]),
            u32::from_ne_bytes([o[12], o[13], o[14], o[15]]),
        ])
    }

    /// From four words as the kernel's `bpf_sock_addr::user_ip6` holds them: each in network
    /// order, so their memory is the address.
    #[inline(always)]
    pub const fn from_words(words: [u32; 4]) -> Self {
        Self(words)
    }

    /// The inverse of [`Addr::from_words`].
    #[inline(always)]
    pub const fn words(self) -> [u32; 4] {
        self.0
    }

    /// The sixteen bytes, in network order.
    #[inline(always)]
    pub const fn octets(self) -> [u8; 16] {
        let [a, b, c, d] = self.0;
        let [a, b, c, d] = [
            a.to_ne_bytes(),
            b.to_ne_bytes(),
            c.to_ne_bytes(),
            d.to_ne_bytes(),
        ];
        [
            a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3], d[0], d[1],
            d[2], d[3],
        ]
    }

    /// Whether this is a (v4-mapped) IPv4 address.
    #[inline(always)]
    pub const fn is_v4(self) -> bool {
        self.0[0] == 0 && self.0[1] == 0 && self.0[2] == MAPPED
    }

    /// Whether this is in 127.0.0.0/8 or is `::1`.
    #[inline(always)]
    pub const fn is_loopback(self) -> bool {
        if self.is_v4() {
            self.0[3].to_ne_bytes()[0] == 127
        } else {
            self.0[0] == 0
                && self.0[1] == 0
                && self.0[2] == 0
                && self.0[3] == u32::from_ne_bytes([0, 0, 0, 1])
        }
    }

    /// Whether this is in 169.254.0.0/16 or fe80::/10.
    #[inline(always)]
    pub const fn is_link_local(self) -> bool {
        if self.is_v4() {
            let [a, b, _, _] = self.0[3].to_ne_bytes();
            a == 169 && b == 254
        } else {
            let [a, b, _, _] = self.0[0].to_ne_bytes();
            a == 0xfe && b & 0xc0 == 0x80
        }
    }

    /// Whether this is `0.0.0.0` or `::`. As a destination, that is loopback (`ip_route_connect` and
    /// `tcp_v6_connect` in the kernel's `net/`); as a frontend's address, it stands for node ports.
    #[inline(always)]
    pub const fn is_unspecified(self) -> bool {
        let [a, b, c, d] = self.0;
        a == 0 && b == 0 && d == 0 && (c == 0 || c == MAPPED)
    }

    /// Whether no single host has this address as its own on a network: `0.0.0.0/8` and `::`, loopback, multicast, and
    /// the reserved addresses above (RFC 1122 section 3.2.1.3, RFC 4291). No host answers packets with such a source.
    #[inline(always)]
    pub const fn is_nobody(self) -> bool {
        let [a, b, c, d] = self.0;
        if self.is_v4() {
            let first = d.to_ne_bytes()[0];
            first == 0 || first == 127 || first >= 224
        } else {
            a.to_ne_bytes()[0] == 0xff || (a == 0 && b == 0 && c == 0 && u32::from_be(d) <= 1)
        }
    }

    /// A name for "every socket in the network namespace with this cookie", used as the client if the client's address
    /// is not known yet (at `connect`). The first byte, 0xff, is a multicast address's, so no client has it.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the low half of two")]
    pub const fn from_netns_cookie(cookie: u64) -> Self {
        Self([
            u32::from_ne_bytes([0xff, 0, 0, 0]),
            0,
            (cookie >> 32) as u32,
            cookie as u32,
        ])
    }

    /// Returns the address in the standard library's type: IPv4 if v4-mapped, else IPv6.
    pub const fn ip(self) -> IpAddr {
        let o = self.octets();
        if self.is_v4() {
            IpAddr::V4(Ipv4Addr::new(o[12], o[13], o[14], o[15]))
        } else {
            IpAddr::V6(Ipv6Addr::from_octets(o))
        }
    }

    /// The address as two numbers in the order of addresses: words instead of bytes, so that the verifier follows a
    /// comparison in a few instructions instead of hundreds.
    #[inline(always)]
    pub const fn halves(self) -> (u64, u64) {
        let [a, b, c, d] = self.0;
        (
            (u32::from_be(a) as u64) << 32 | u32::from_be(b) as u64,
            (u32::from_be(c) as u64) << 32 | u32::from_be(d) as u64,
        )
    }
}

impl PartialOrd for Addr {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// Addresses compare as their bytes in network order.
impl Ord for Addr {
    #[inline(always)]
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        let (a, b) = (self.halves(), other.halves());
        if a.0 == b.0 {
            a.1.cmp(&b.1)
        } else {
            a.0.cmp(&b.0)
        }
    }
}

impl From<IpAddr> for Addr {
    fn from(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(v4) => Self::from_v4(v4.octets()),
            IpAddr::V6(v6) => Self::from_v6(v6.octets()),
        }
    }
}

impl core::fmt::Display for Addr {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.ip().fmt(f)
    }
}

impl core::fmt::Debug for Addr {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.ip().fmt(f)
    }
}

layout! {
    /// A port, in network order, as on the wire and in `bpf_sock_addr::user_port`.
    #[repr(C)]
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Port(u16);
}

impl Port {
    /// Port 0, which stands for "any port" in a key.
    pub const ANY: Self = Self(0);

    /// From a number in host order, as people write it.
    #[inline(always)]
    pub const fn new(host: u16) -> Self {
        Self(host.to_be())
    }

    /// From a number in network order.
    #[inline(always)]
    pub const fn from_be(be: u16) -> Self {
        Self(be)
    }

    /// In network order.
    #[inline(always)]
    pub const fn be(self) -> u16 {
        self.0
    }

    /// In host order, as people read it.
    #[inline(always)]
    pub const fn host(self) -> u16 {
        u16::from_be(self.0)
    }
}

impl PartialOrd for Port {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// Ports compare by the number in host order.
impl Ord for Port {
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        self.host().cmp(&other.host())
    }
}

impl core::fmt::Display for Port {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.host().fmt(f)
    }
}

impl core::fmt::Debug for Port {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.host().fmt(f)
    }
}

layout! {
    /// An IP protocol number (IANA). Only TCP and UDP are ever in a table's key.
    #[repr(C)]
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub struct Protocol(u8);
}

impl Protocol {
    /// Stands for "any protocol" in a key.
    pub const ANY: Self = Self(0);
    /// TCP.
    pub const TCP: Self = Self(IpProto::Tcp as u8);
    /// UDP.
    pub const UDP: Self = Self(IpProto::Udp as u8);

    /// From the number in a packet or a socket.
    #[inline(always)]
    pub const fn from_number(number: u8) -> Self {
        Self(number)
    }

    /// The number in a packet.
    #[inline(always)]
    pub const fn number(self) -> u8 {
        self.0
    }
}

impl core::fmt::Display for Protocol {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match *self {
            Self::TCP => f.pad("tcp"),
            Self::UDP => f.pad("udp"),
            Self::ANY => f.pad("any"),
            Self(n) => n.fmt(f),
        }
    }
}

impl core::fmt::Debug for Protocol {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        core::fmt::Display::fmt(self, f)
    }
}

const _: () = assert!(size_of::<Addr>() == 16 && align_of::<Addr>() == 4);
const _: () = assert!(size_of::<Port>() == 2);
const _: () = assert!(size_of::<Protocol>() == 1);
const _: () = assert!(Addr::from_v4([1, 2, 3, 4]).is_v4());

#[cfg(test)]
mod tests {
    extern crate std;

    use std::{format, string::ToString as _};

    use super::*;

    /// Addresses at both edges of each range, and IPv6 addresses that differ from them in one word.
    const ADDRESSES: &str = "0.0.0.0 0.0.0.1 0.255.255.255 1.0.0.0 10.96.0.1 126.255.255.255 127.0.0.0 127.0.0.1 \
        127.255.255.255 128.0.0.0 168.254.0.1 169.253.255.255 169.254.0.0 169.254.255.255 169.255.0.0 223.255.255.255 \
        224.0.0.0 239.1.2.3 255.255.255.255 :: ::1 ::2 ::100:0 1::1 0:0:1::1 ::1:0:0:1 1:: 0:0:1:: ::1:0:0:0 \
        ::7f00:1 1::ffff:7f00:1 0:0:1:0:0:ffff:7f00:1 ::1:ffff:7f00:1 1::ffff:0:0 0:0:1:0:0:ffff:0:0 \
        fc00::1 fe7f:ffff:: fe80:: fe80::1 febf::1 fec0:: ffff:: feff:: ff00:: ff02::1 7e80::1 2001:db8:1:2:3:4:5:6";

    fn addresses() -> impl Iterator<Item = IpAddr> + Clone {
        ADDRESSES
            .split_whitespace()
            .map(|text| text.parse().unwrap())
    }

    /// The standard library judges.
    #[test]
    fn addresses_have_the_standard_librarys_properties() {
        for ip in addresses() {
            let addr = Addr::from(ip);
            let (link_local, reserved) = match ip {
                IpAddr::V4(ip) => (
                    ip.is_link_local(),
                    ip.octets()[0] == 0 || ip.octets()[0] >= 224,
                ),
                IpAddr::V6(ip) => (
                    ip.is_unicast_link_local(),
                    ip.is_multicast() || ip.is_unspecified(),
                ),
            };
            assert_eq!(addr.ip(), ip);
            assert_eq!(addr.is_v4(), ip.is_ipv4(), "{ip}");
            assert_eq!(addr.is_loopback(), ip.is_loopback(), "{ip}");
            assert_eq!(addr.is_unspecified(), ip.is_unspecified(), "{ip}");
            assert_eq!(addr.is_link_local(), link_local, "{ip}");
            assert_eq!(addr.is_nobody(), reserved || ip.is_loopback(), "{ip}");
            assert_eq!(
                format!("{addr} {addr:?} {addr:>20}"),
                format!("{ip} {ip} {ip:>20}")
            );
            assert_eq!(Addr::from_words(addr.words()), addr);
        }
    }

    #[test]
    fn addresses_are_ordered_by_their_bytes() {
        for (one, other) in addresses().flat_map(|one| addresses().map(move |other| (one, other))) {
            let (one, other) = (Addr::from(one), Addr::from(other));
            let wanted = one.octets().cmp(&other.octets());
            assert_eq!(one.cmp(&other), wanted, "{one} {other}");
            assert_eq!(one.partial_cmp(&other), Some(wanted));
            let halves = |addr: Addr| u128::from_be_bytes(addr.octets());
            let (high, low) = one.halves();
            assert_eq!(u128::from(high) << 64 | u128::from(low), halves(one));
        }
    }

    #[test]
    fn addresses_come_from_the_kernels_words() {
        let v4 = [192, 0, 2, 7];
        let word = u32::from_ne_bytes(v4);
        assert_eq!(Addr::from_v4_word(word), Addr::from_v4(v4));
        assert_eq!(Addr::from_v4(v4).octets()[10..], [0xff, 0xff, 192, 0, 2, 7]);
        let v6 = core::array::from_fn(|n| u8::try_from(n).unwrap() * 16 + 1);
        assert_eq!(Addr::from_v6(v6).octets(), v6);
        let netns = Addr::from_netns_cookie(0x1122_3344_5566_7788);
        let first = u32::from_ne_bytes([0xff, 0, 0, 0]);
        assert_eq!(netns.words(), [first, 0, 0x1122_3344, 0x5566_7788]);
        assert!(netns.is_nobody());
    }

    #[test]
    fn ports_are_numbers_in_host_order() {
        let port = Port::new(0x1234);
        assert_eq!(port.be().to_ne_bytes(), [0x12, 0x34]);
        assert_eq!((port.host(), Port::from_be(port.be())), (0x1234, port));
        assert_eq!(format!("{port} {port:?} {port:>6}"), "4660 4660   4660");
        let (less, more) = (Port::new(0x00ff), Port::new(0x0100));
        assert!(less < more && more.cmp(&less).is_gt() && less.cmp(&less).is_eq());
    }

    #[test]
    fn protocols_have_words() {
        for (number, word) in [(0, "any"), (6, "tcp"), (17, "udp"), (132, "132")] {
            let protocol = Protocol::from_number(number);
            assert_eq!(protocol.number(), number);
            assert_eq!(protocol.to_string(), word);
            assert_eq!(format!("{protocol:?}"), word);
        }
    }
}
