//! Working memory of a packet program while it runs: a place of its CPU's.
//!
//! The stack has 512 bytes for all functions together. The verifier tracks values on the stack, on every path. It does
//! not track values in a table, so it treats paths that differ only in a packet's words as one.
//!
//! No other program of ours runs on the CPU meanwhile: they all run with softirqs off (`sch_handle_ingress`,
//! `sch_handle_egress` in `net/core/dev.c`). On a kernel with `PREEMPT_RT` that only holds if softirqs being off is a
//! lock of the CPU's (`__local_bh_disable_ip` in `kernel/softirq.c`, and since Linux 6.18
//! `CONFIG_PREEMPT_RT_NEEDS_BH_LOCK`); without this lock another program may preempt a program. There, as the agent
//! sets it ([`PacketConfig::PREEMPTIBLE`]), a program takes one of several places and gives it back.

use core::ptr::write_volatile;

use aya_ebpf::{btf_maps::PerCpuArray, macros::btf_map};
use dataplane_common::{
    Reason,
    capture::Local,
    packet::{FlowKey, PacketConfig},
    tables::{Endpoint, Frontend, Pool},
};

use super::{conntrack::Flow, error::Complaint, parse::Packet, rewrite::Ends, route::Route};
use crate::{atomic, select::count, tables::PACKET_CONFIG};

/// How many places a CPU has: one for each program that the next may have preempted.
const SCRATCHES: usize = 4;

/// [`Scratch::keep`]: a repeated SYN on a live flow.
pub const KEEP: u32 = 1;
/// [`Scratch::keep`]: a SYN on a flow that was reset, or closed by both sides. The flow keeps its endpoint. So a sender that
/// forges a RST or FINs, and then a SYN, moves no live connection.
pub const KEEP_ENDED: u32 = 2;
/// [`Scratch::masquerade`]: the endpoint sees an address of the node's.
pub const MASQUERADE: u32 = 1;
/// [`Scratch::masquerade`]: in addition, a flow that may be evicted gives its port up, because no endpoint has a free one.
pub const EVICT: u32 = 2;

#[btf_map]
static SCRATCH: PerCpuArray<Scratch, SCRATCHES> = PerCpuArray::new();

/// The facts about a packet.
#[repr(C)]
pub struct Scratch {
    /// Whether a program uses it: 1 or 0. Not used if programs are not preempted.
    taken: u64,
    pub packet: Packet,
    /// The packet that an ICMP error quotes.
    pub quoted: Packet,
    pub flow: Flow,
    pub ends: Ends,
    /// The addresses that an ICMP error gets itself.
    pub outer: Ends,
    /// The frontend that the packet is for.
    pub frontend: Frontend,
    /// The pool that answers, and its index.
    pub pool: Pool,
    pub index: u32,
    /// Whether the endpoint has to see an address of the node's, and at what cost: [`MASQUERADE`], [`EVICT`].
    pub masquerade: u32,
    pub endpoint: Endpoint,
    /// The last endpoint without a free port.
    pub exhausted: Endpoint,
    /// The slot of the endpoint in `ENDPOINTS`, if it is not the first that was tried.
    pub slot: u32,
    /// The reason for this endpoint. `PortsExhausted`: it is not the first that was tried.
    pub reason: Reason,
    /// Why the packet is refused, for [`Action::Refuse`](dataplane_common::first::Action::Refuse).
    pub refusal: Reason,
    /// Whether the packet is a SYN on the flow that is in `flow`: 0, [`KEEP`] or
    /// [`KEEP_ENDED`]. Here instead of in a register: Linux 6.1's verifier would treat two
    /// paths that differ only in this register as one, and remove code that only the second path has.
    pub keep: u32,
    /// Whether the packet is an answer of a known flow: 1 or 0.
    pub is_answer: u32,
    /// Whether the packet begins a flow that belongs to no service: 1 or 0.
    pub may_bypass: u32,
    pub way: Route,
    /// The key of a look at BYPASS.
    pub bypass: FlowKey,
    /// The packet's workload, for capture.
    pub local: Local,
    /// The error for the packet's sender, for [`Action::Complain`](dataplane_common::first::Action::Complain).
    pub complaint: Complaint,
}

impl Scratch {
    /// Gives the place back.
    #[inline(always)]
    pub fn leave(&mut self) {
        // SAFETY: a field of ours.
        unsafe { write_volatile(&raw mut self.taken, 0) };
    }
}

/// Returns a place of this CPU's, with the last packet's contents, until [`Scratch::leave`]. `None` if all are taken:
/// the packet is dropped then, as if a queue were full.
#[inline(always)]
pub fn scratch() -> Option<&'static mut Scratch> {
    let preemptible = match PACKET_CONFIG.get(0) {
        Some(config) => config.flags & PacketConfig::PREEMPTIBLE != 0,
        None => false,
    };
    if !preemptible {
        let place = SCRATCH.get_ptr_mut(0)?;
        // SAFETY: no other program uses it while this program runs: see above.
        return Some(unsafe { &mut *place });
    }
    for index in 0..SCRATCHES as u32 {
        let place = SCRATCH.get_ptr_mut(index)?;
        // SAFETY: eight aligned bytes of the element's.
        let before = unsafe { atomic::compare_exchange(&raw mut (*place).taken, 0, 1) };
        if before == 0 {
            // SAFETY: no other program uses it until it is given back.
            return Some(unsafe { &mut *place });
        }
    }
    count(Reason::Preempted);
    None
}
