//! The words of nft for what the expressions `meta` and `ct` ask, with the types of the answers.

use super::types::{self, Kind};

/// `enum nft_meta_keys`.
pub fn meta(key: u32) -> Option<(&'static str, Kind)> {
    Some(match key {
        0 => ("meta length", types::HOST),
        1 => ("meta protocol", types::BYTES),
        3 => ("meta mark", types::MARK),
        4 => ("iif", types::IFINDEX),
        5 => ("oif", types::IFINDEX),
        6 => ("iifname", types::IFNAME),
        7 => ("oifname", types::IFNAME),
        8 => ("iiftype", types::HOST),
        9 => ("oiftype", types::HOST),
        10 => ("meta skuid", types::UID),
        11 => ("meta skgid", types::GID),
        12 => ("meta nftrace", types::BYTES),
        15 => ("meta nfproto", types::NFPROTO),
        16 => ("meta l4proto", types::PROTOCOL),
        17 => ("meta ibrname", types::IFNAME),
        18 => ("meta obrname", types::IFNAME),
        19 => ("meta pkttype", types::BYTES),
        20 => ("meta cpu", types::HOST),
        21 => ("iifgroup", types::HOST),
        22 => ("oifgroup", types::HOST),
        23 => ("meta cgroup", types::HOST),
        _ => return None,
    })
}

/// `enum nft_ct_keys`, in a direction.
pub fn ct(key: u32, direction: Option<&[u8]>) -> Option<(String, Kind)> {
    let (name, kind) = match key {
        0 => ("state", types::CT_STATE),
        1 => ("direction", types::BYTES),
        2 => ("status", types::CT_STATUS),
        3 => ("mark", types::MARK),
        6 => ("helper", types::IFNAME),
        7 => ("l3proto", types::NFPROTO),
        10 => ("protocol", types::PROTOCOL),
        11 => ("proto-src", types::PORT),
        12 => ("proto-dst", types::PORT),
        13 => ("label", types::BYTES),
        14 => ("packets", types::HOST),
        15 => ("bytes", types::HOST),
        17 => ("zone", types::HOST),
        19 => ("ip saddr", types::IPV4),
        20 => ("ip daddr", types::IPV4),
        21 => ("ip6 saddr", types::IPV6),
        22 => ("ip6 daddr", types::IPV6),
        _ => return None,
    };
    let direction = match direction.and_then(<[u8]>::first) {
        None => "",
        Some(0) => "original ",
        Some(1) => "reply ",
        Some(_) => return None,
    };
    Some((format!("ct {direction}{name}"), kind))
}
