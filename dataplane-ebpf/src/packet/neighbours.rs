//! Next hops whose neighbour entry the kernel has to refresh.
//!
//! If a packet is sent with the link-layer address from the kernel's table of neighbours, the kernel does not see that
//! the neighbour is in use. So a stale entry stays stale: the kernel does not ask whether the neighbour still has this
//! address. So the program leaves a packet to the kernel now and then (`bpf_redirect_neigh`), which sends it as one of
//! its own, and asks the neighbour if the entry is stale (`neigh_event_send` in `include/net/neighbour.h`).

use aya_ebpf::{btf_maps::PerCpuArray, helpers::generated::bpf_jiffies64, macros::btf_map};

/// How many next hops are remembered, by a hash: a power of two.
const NEIGHBOURS_KEPT: usize = 256;

#[btf_map]
static NEIGHBOURS: PerCpuArray<u32, NEIGHBOURS_KEPT> = PerCpuArray::new();

/// Whether the program has to leave the next packet by this next hop to the kernel: on each CPU the first in 256
/// jiffies, a quarter of a second to 2.6 s. An IPv4 next hop is in the first word.
#[inline(always)]
pub fn is_due(next_hop: &[u32; 4], is_v4: bool, ifindex: u32) -> bool {
    let [mut hop, b, c, d] = *next_hop;
    if !is_v4 {
        hop ^= b ^ c ^ d;
    }
    let key = u64::from(hop) << 32 | u64::from(ifindex);
    // As `VipPlace::of`.
    let hash = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32;
    let Some(last) = NEIGHBOURS.get_ptr_mut(hash % NEIGHBOURS_KEPT as u32) else {
        return false;
    };
    // SAFETY: the helper has no preconditions.
    let jiffies = unsafe { bpf_jiffies64() };
    // Includes some bits of the hash that did not choose the place, to distinguish two next hops with one place.
    let now = ((jiffies >> 8) as u32) << 12 | hash >> 20;
    // SAFETY: this CPU's own four bytes.
    unsafe {
        if *last == now {
            return false;
        }
        *last = now;
    }
    true
}
