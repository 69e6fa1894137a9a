//! The numbers of hosts, the addresses that follow from a number, and the order in which a host tries numbers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The numbers are 1 to this. It is a prime, so a sequence with any step visits all numbers.
pub const NUMBERS: u32 = 65_521;
/// A number that leads to a host's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Number(u16);

impl Number {
    /// Returns the number; `None` outside of 1 to 65521.
    pub fn new(number: u16) -> Option<Self> {
        (1..=NUMBERS)
            .contains(&number.into())
            .then_some(Self(number))
    }

    /// Returns the number as an integer.
    pub fn get(self) -> u16 {
        self.0
    }

    /// Returns both addresses, for example 240.240.1.2 and 2001:2::f0f0:102 for 258.
    pub fn addresses(self) -> [IpAddr; 2] {
        let [high, low] = self.0.to_be_bytes();
        [
            IpAddr::V4(Ipv4Addr::new(240, 240, high, low)),
            IpAddr::V6(Ipv6Addr::new(0x2001, 2, 0, 0, 0, 0, 0xf0f0, self.0)),
        ]
    }

    /// Returns the number of an address. `None` if no number leads to the address.
    pub fn of(address: IpAddr) -> Option<Self> {
        let number = match address {
            IpAddr::V4(v4) => {
                let [_, _, high, low] = v4.octets();
                u16::from_be_bytes([high, low])
            }
            IpAddr::V6(v6) => v6.segments()[7],
        };
        Self::new(number).filter(|number| number.addresses().contains(&address))
    }
}

/// A host name in a namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostName {
    /// The namespace.
    pub namespace: Box<str>,
    /// The host.
    pub host: Box<str>,
}

/// Returns all numbers, in an order that the namespace and the host determine. The order must never change, because
/// nodes of different versions agree by it.
pub fn sequence(host: &HostName) -> impl Iterator<Item = Number> + use<> {
    // FNV-1a, and the finaliser of SplitMix64.
    let bytes = host
        .namespace
        .bytes()
        .chain([b'/'])
        .chain(host.host.bytes());
    let mut hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^= hash >> 31;
    let numbers = u64::from(NUMBERS);
    let first = (hash & 0xffff_ffff) % numbers;
    let step = 1 + (hash >> 32) % (numbers - 1);
    (0..numbers).filter_map(move |turn| {
        let number = (first + turn * step) % numbers + 1;
        Number::new(u16::try_from(number).ok()?)
    })
}
