//! Later fragments have no ports: they follow the first by what they share with it.

use dataplane_common::{
    packet::{Fragment, FragmentKey},
    tcp::Segment,
};

use super::parse::{FIRST, LATER, Packet};
use crate::tables::FRAGMENTS;

/// Remembers the ports of a first fragment, unless that is forged, or gives those of its first to a later one; `false` if
/// that is not known.
#[inline(never)]
pub fn follow(packet: &mut Packet, forged: bool) -> bool {
    if packet.fragment != FIRST && packet.fragment != LATER {
        return true;
    }
    let key = FragmentKey {
        src: packet.key.src,
        dst: packet.key.dst,
        identification: packet.identification,
        protocol: packet.key.protocol,
        padding: 0,
        reserved: 0,
    };
    if packet.fragment == FIRST {
        let value = Fragment {
            src_port: packet.key.src_port,
            dst_port: packet.key.dst_port,
        };
        // Nothing comes to a loopback address from elsewhere, whatever was found right about its source.
        if !forged && !packet.key.dst.is_loopback() {
            let _ = FRAGMENTS.insert(key, value, 0);
        }
        return true;
    }
    let Some(first) = FRAGMENTS.get_ptr(key) else {
        return false;
    };
    // SAFETY: an LRU's element may be reused while it is read: its datagram is then long gone.
    let first = unsafe { *first };
    packet.key.src_port = first.src_port;
    packet.key.dst_port = first.dst_port;
    packet.segment.flags |= Segment::QUOTED.flags;
    true
}
