//! Values by their type, as nft writes them. The numbers of types are nft's own (`enum datatypes` in its
//! `include/datatype.h`); it leaves them with each set, and the kernel keeps them.

use std::{
    fmt::Write as _,
    net::{Ipv4Addr, Ipv6Addr},
};

/// A type's number.
pub type Kind = u32;

/// Bytes that no type of this list has: they are written in hexadecimal digits.
pub const BYTES: Kind = 0;
pub const VERDICT: Kind = 1;
pub const NFPROTO: Kind = 2;
pub const INTEGER: Kind = 4;
pub const IPV4: Kind = 7;
pub const IPV6: Kind = 8;
pub const PROTOCOL: Kind = 12;
pub const PORT: Kind = 13;
pub const MARK: Kind = 19;
pub const IFINDEX: Kind = 20;
pub const UID: Kind = 24;
pub const GID: Kind = 25;
pub const CT_STATE: Kind = 26;
pub const CT_STATUS: Kind = 28;
/// Of interfaces' groups.
pub const GROUP: Kind = 35;
pub const FIB_TYPE: Kind = 38;
pub const IFNAME: Kind = 41;
/// Whether there is a route: no type of nft's.
pub const ROUTE: Kind = Kind::MAX;
/// A number in this machine's order, of any length: no type of nft's.
pub const HOST: Kind = Kind::MAX - 1;

/// Bits of a number in one of several types (`TYPE_BITS`).
const BITS: u32 = 6;

/// `IPCTNL`'s states and `ip_conntrack_status`, as nft calls them.
const STATES: [(u32, &str); 5] = [
    (1, "invalid"),
    (2, "established"),
    (4, "related"),
    (8, "new"),
    (64, "untracked"),
];
const STATUSES: [(u32, &str); 8] = [
    (1, "expected"),
    (2, "seen-reply"),
    (4, "assured"),
    (8, "confirmed"),
    (16, "snat"),
    (32, "dnat"),
    (512, "dying"),
    (16384, "helper"),
];
/// `RTN_UNSPEC`… (`include/uapi/linux/rtnetlink.h`).
const ROUTES: [&str; 12] = [
    "unspec",
    "unicast",
    "local",
    "broadcast",
    "anycast",
    "multicast",
    "blackhole",
    "unreachable",
    "prohibit",
    "throw",
    "nat",
    "xresolve",
];
const PROTOCOLS: [(u8, &str); 9] = [
    (1, "icmp"),
    (6, "tcp"),
    (17, "udp"),
    (33, "dccp"),
    (50, "esp"),
    (51, "ah"),
    (58, "ipv6-icmp"),
    (132, "sctp"),
    (136, "udplite"),
];

/// The types that a number stands for: those of the parts of a concatenation, in their order.
pub fn parts(number: Kind) -> Vec<Kind> {
    let (mut rest, mut all) = (number, Vec::new());
    while rest > 0 {
        all.insert(0, rest & ((1 << BITS) - 1));
        rest >>= BITS;
    }
    all
}

/// The name of a type, as `type …` has it; `None`: not known here.
pub fn name(kind: Kind) -> Option<&'static str> {
    Some(match kind {
        VERDICT => "verdict",
        NFPROTO => "nf_proto",
        INTEGER => "integer",
        IPV4 => "ipv4_addr",
        IPV6 => "ipv6_addr",
        PROTOCOL => "inet_proto",
        PORT => "inet_service",
        MARK => "mark",
        IFINDEX => "iface_index",
        UID => "uid",
        GID => "gid",
        CT_STATE => "ct_state",
        CT_STATUS => "ct_status",
        FIB_TYPE => "fib_addrtype",
        GROUP => "devgroup",
        IFNAME => "ifname",
        9 => "ether_addr",
        10 => "ether_type",
        14 => "icmp_type",
        15 => "tcp_flag",
        29 => "icmpv6_type",
        31 => "pkt_type",
        _ => return None,
    })
}

/// The length of a value in bytes, if the type has one.
pub fn length(kind: Kind) -> Option<usize> {
    Some(match kind {
        // Types and codes of ICMP, flags of TCP and the kind of a packet are numbers here.
        NFPROTO | PROTOCOL | 14 | 15 | 29 | 31..=34 => 1,
        PORT | 10 => 2,
        // A MAC address.
        9 => 6,
        IPV4 | MARK | IFINDEX | UID | GID | CT_STATE | CT_STATUS | GROUP | FIB_TYPE | INTEGER => 4,
        IPV6 | IFNAME => 16,
        _ => return None,
    })
}

/// Whether values are in the order of this machine.
pub fn is_host_order(kind: Kind) -> bool {
    matches!(
        kind,
        MARK | IFINDEX | UID | GID | CT_STATE | CT_STATUS | GROUP | FIB_TYPE | INTEGER
    )
}

/// A number of up to 16 bytes in network order.
pub fn number(bytes: &[u8]) -> u128 {
    let fold = |number: u128, byte: &u8| number << 8 | u128::from(*byte);
    bytes.iter().take(16).fold(0, fold)
}

/// A value in the words of nft.
pub fn show(kind: Kind, bytes: &[u8]) -> String {
    // Names of interfaces may be beginnings, and numbers have several lengths.
    let is_odd = |length: usize| length != bytes.len() && !matches!(kind, IFNAME | INTEGER);
    if length(kind).is_some_and(is_odd) {
        return hex(bytes);
    }
    let host = || bytes.first_chunk().map(|word| u32::from_ne_bytes(*word));
    let shown = match kind {
        IPV4 => bytes
            .first_chunk::<4>()
            .map(|a| Ipv4Addr::from(*a).to_string()),
        IPV6 => bytes
            .first_chunk::<16>()
            .map(|a| Ipv6Addr::from(*a).to_string()),
        PORT => bytes
            .first_chunk()
            .map(|port| u16::from_be_bytes(*port).to_string()),
        PROTOCOL => bytes.first().map(|number| protocol(*number)),
        NFPROTO => bytes.first().and_then(|number| match number {
            2 => Some("ipv4".to_owned()),
            10 => Some("ipv6".to_owned()),
            _ => None,
        }),
        MARK => host().map(|mark| format!("0x{mark:08x}")),
        IFINDEX => host().map(interface_of),
        UID | GID | INTEGER if bytes.len() == 4 => host().map(|number| number.to_string()),
        HOST | GROUP | INTEGER => host_number(bytes),
        CT_STATE => host().and_then(|bits| flags(bits, &STATES)),
        CT_STATUS => host().and_then(|bits| flags(bits, &STATUSES)),
        FIB_TYPE => host().and_then(|n| ROUTES.get(n as usize).map(|name| (*name).to_owned())),
        IFNAME => Some(interface(bytes)),
        ROUTE => bytes
            .first()
            .map(|is| if *is == 0 { "missing" } else { "exists" }.to_owned()),
        _ => None,
    };
    shown.unwrap_or_else(|| hex(bytes))
}

/// A number in this machine's order.
fn host_number(bytes: &[u8]) -> Option<String> {
    Some(match bytes.len() {
        1 => bytes.first()?.to_string(),
        2 => u16::from_ne_bytes(*bytes.first_chunk()?).to_string(),
        4 => u32::from_ne_bytes(*bytes.first_chunk()?).to_string(),
        8 => u64::from_ne_bytes(*bytes.first_chunk()?).to_string(),
        _ => return None,
    })
}

/// A value that no type says how to write.
pub fn hex(bytes: &[u8]) -> String {
    let mut text = String::from("0x");
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

fn protocol(number: u8) -> String {
    let known = PROTOCOLS.iter().find(|(of, _)| *of == number);
    known.map_or_else(|| number.to_string(), |(_, name)| (*name).to_owned())
}

/// The names of bits; `None` if one has none.
fn flags(bits: u32, names: &[(u32, &str)]) -> Option<String> {
    let known = names.iter().filter(|(bit, _)| bits & bit != 0);
    let (mut rest, mut all) = (bits, Vec::new());
    for (bit, name) in known {
        rest &= !bit;
        all.push(*name);
    }
    (rest == 0 && !all.is_empty()).then(|| all.join(","))
}

/// An interface by its number; one that is gone has no name.
fn interface_of(number: u32) -> String {
    match nix::net::if_::if_indextoname(number) {
        Ok(name) => format!("\"{}\"", plain(&name.to_string_lossy())),
        Err(_) => number.to_string(),
    }
}

/// A name of an interface; of names with a beginning, the comparison has no end.
fn interface(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0);
    let any = if end.is_none() && bytes.len() < 16 {
        "*"
    } else {
        ""
    };
    let name = String::from_utf8_lossy(&bytes[..end.unwrap_or(bytes.len())]);
    format!("\"{}{any}\"", plain(&name))
}

/// A text that can stand between quotes.
pub fn plain(text: &str) -> String {
    let odd = |c: char| c == '"' || c.is_control();
    text.replace(odd, "?")
}

/// The bits of a mask that begins with ones and goes on with zeros only.
pub fn prefix(mask: &[u8]) -> Option<usize> {
    let ones = |byte: &u8| byte.leading_ones() as usize;
    let bits: usize = mask.iter().map(ones).sum();
    let whole = bits / 8;
    let expected = |index: usize| match index.cmp(&whole) {
        std::cmp::Ordering::Less => 0xff,
        std::cmp::Ordering::Equal => !(0xff_u8 >> (bits % 8)),
        std::cmp::Ordering::Greater => 0,
    };
    let is = mask
        .iter()
        .enumerate()
        .all(|(index, byte)| *byte == expected(index));
    is.then_some(bits)
}
