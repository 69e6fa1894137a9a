//! Chooses the port that an endpoint sees of a client if it sees the client's address.

use aya_ebpf::helpers::generated::bpf_get_prandom_u32;
use dataplane_common::{
    Port,
    packet::{Tick, client_ports},
};

use super::{bypass, conntrack::Flow};

/// How many other ports are tried. All of them are taken only if the client has thousands of flows to the endpoint.
const TRIES: u32 = 16;

/// Gives a flow that is not masqueraded the client's port. If a live flow of the same client and port to the same
/// endpoint goes through another VIP, gives it a different port, because the endpoint's replies to both would be alike.
/// `false` if none was found. The function holds no cell meanwhile.
#[inline(always)]
pub fn choose(flow: &mut Flow, now: Tick) -> bool {
    packet_client_port(flow, u32::from(now.number())) != 0
}

/// [`choose`]. With external linkage, as in `table.rs`.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_client_port(flow: *mut Flow, now: u32) -> u32 {
    // SAFETY: a flow, or null: the verifier sees to it where it is called.
    unsafe { flow.as_mut() }.map_or(0, |flow| {
        let now = Tick::from_number(now as u16);
        flow.node_port = Port::ANY;
        u32::from(!is_taken(flow, now) || find_another(flow, now))
    })
}

/// Whether another live flow has the flow's replies: a service's, or one that bypasses the stack.
#[inline(always)]
fn is_taken(flow: &Flow, now: Tick) -> bool {
    flow.replies_taken(now) || bypass::has_answers(&flow.reply_key())
}

/// Gives the flow a port at random from the range of the client's own port, which no live flow of the client to the
/// endpoint has. `false` if none was found.
#[inline(always)]
fn find_another(flow: &mut Flow, now: Tick) -> bool {
    let (first, last) = client_ports(flow.forward.src_port);
    let count = u64::from(last - first) + 1;
    for _ in 0..TRIES {
        // SAFETY: the helper has no preconditions.
        let random = u64::from(unsafe { bpf_get_prandom_u32() });
        flow.node_port = Port::new(first.wrapping_add(((random * count) >> 32) as u16));
        if flow.node_port != flow.forward.src_port && !is_taken(flow, now) {
            return true;
        }
    }
    false
}
