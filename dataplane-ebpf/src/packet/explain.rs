//! What `dataplane explain --iface` asks the kernel.

use aya_ebpf::{EbpfContext, programs::TcContext};
use dataplane_common::first;

use super::{
    DROP, LEAVE_ALONE,
    parse::FLOW,
    reverse,
    scratch::scratch,
    skb::{self, Skb},
    ways,
};

/// Writes the way of a packet that no interface sends into the first bytes of its frame ([`first::Way`]): `dataplane explain`
/// runs this program, which is attached nowhere.
#[inline(always)]
pub fn way(ctx: &TcContext) -> i32 {
    let skb = Skb(ctx.as_ptr().cast());
    let Some(s) = scratch() else {
        return DROP;
    };
    let mut action = DROP;
    // The kernel runs the program on an Ethernet frame, also for an interface without a link-layer header.
    if s.packet.read(skb, skb::LINK) == FLOW {
        let begins = reverse::is_right(skb, &s.packet, &mut s.way, reverse::BEGINS);
        let key = s.packet.key;
        ways::find(skb, &s.packet, &key.dst, key.dst_port, &mut s.way);
        let way = first::Way {
            answer: s.way.answer,
            mtu: s.way.mtu,
            begins: u32::from(begins),
        };
        if skb.store::<_, false>(0, &way) {
            action = LEAVE_ALONE;
        }
    }
    s.leave();
    action
}
