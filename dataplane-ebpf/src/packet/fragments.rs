//! Later fragments have no ports: the program finds the ports of the first fragment by the fields that both share.

use dataplane_common::{
    packet::{Fragment, FragmentKey},
    tcp::Segment,
};

use super::parse::{FIRST, LATER, Packet};
use crate::tables::FRAGMENTS;

/// Remembers the ports of a first fragment, except of a forged one, or fills in the ports of a later one; `false` if
/// its first fragment is unknown.
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
        // No packet to a loopback address comes from elsewhere, even if the check of its source has passed.
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
