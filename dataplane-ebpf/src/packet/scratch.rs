//! Where a packet's program keeps what it knows while it runs: a place of its CPU's.
//!
//! The stack has 512 bytes, functions included. And what lies on the stack the verifier remembers
//! by value, on every path; what lies in a table it does not, so that paths that differ in a
//! packet's words only are one to it.
//!
//! No other program of ours runs on the CPU meanwhile: they all run with softirqs off
//! (`sch_handle_ingress`, `sch_handle_egress` in `net/core/dev.c`). On a kernel with `PREEMPT_RT` that only holds if
//! softirqs being off is a lock of the CPU's (`__local_bh_disable_ip` in `kernel/softirq.c`, and since Linux 6.18
//! `CONFIG_PREEMPT_RT_NEEDS_BH_LOCK`); without it a program may be preempted by another in its middle. So there, as
//! the agent says ([`PacketConfig::PREEMPTIBLE`]), a program takes one of several places and gives it back.

use core::ptr::write_volatile;

use aya_ebpf::{btf_maps::PerCpuArray, macros::btf_map};
use dataplane_common::{
    Reason,
    capture::Local,
    packet::PacketConfig,
    tables::{Endpoint, Frontend, Pool},
};

use super::{conntrack::Flow, error::Complaint, parse::Packet, rewrite::Ends, route::Route};
use crate::{atomic, select::count, tables::PACKET_CONFIG};

/// How many places a CPU has: one for each program that may have been preempted by the next.
const SCRATCHES: usize = 4;

#[btf_map]
static SCRATCH: PerCpuArray<Scratch, SCRATCHES> = PerCpuArray::new();

/// What is known.
#[repr(C)]
pub struct Scratch {
    /// Whether a program has it: 1 or 0. Nobody asks where programs are not preempted.
    taken: u64,
    pub packet: Packet,
    /// The packet that an ICMP error quotes.
    pub quoted: Packet,
    pub flow: Flow,
    pub ends: Ends,
    /// Which frontend the packet is for.
    pub frontend: Frontend,
    /// The pool that answers, and its index.
    pub pool: Pool,
    pub index: u32,
    /// Whether the endpoint is to see an address of the node's, and at whose cost (flags of `begin.rs`).
    pub masquerade: u32,
    pub endpoint: Endpoint,
    /// Why it is the one: a `Reason`. `PortsExhausted`: those before it have no port left.
    pub reason: u32,
    /// Then, which slot of `ENDPOINTS` it is in.
    pub slot: u32,
    /// Whether the packet is a SYN on the flow that is in `flow`: 0, [`KEEP`](super::begin::KEEP) or
    /// [`KEEP_ENDED`](super::begin::KEEP_ENDED). Here, and not in a register: Linux 6.1's verifier would take two paths that differ in nothing else for one, and
    /// remove what only the second has.
    pub keep: u32,
    pub way: Route,
    /// What is said of the packet's workload, for capture.
    pub local: Local,
    /// What the sender is told, for [`super::COMPLAIN`].
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

/// A place of this CPU's, with whatever the last packet left there, until [`Scratch::leave`]. `None` if all are
/// taken: packets are dropped then, as they are wherever a queue is full.
#[inline(always)]
pub fn scratch() -> Option<&'static mut Scratch> {
    let preemptible = match PACKET_CONFIG.get(0) {
        Some(config) => config.flags & PacketConfig::PREEMPTIBLE != 0,
        None => false,
    };
    if !preemptible {
        let place = SCRATCH.get_ptr_mut(0)?;
        // SAFETY: nobody else has it while this program runs: see above.
        return Some(unsafe { &mut *place });
    }
    for index in 0..SCRATCHES as u32 {
        let place = SCRATCH.get_ptr_mut(index)?;
        // SAFETY: eight aligned bytes of the element's.
        let before = unsafe { atomic::compare_exchange(&raw mut (*place).taken, 0, 1) };
        if before == 0 {
            // SAFETY: nobody else has it until it is given back.
            return Some(unsafe { &mut *place });
        }
    }
    count(Reason::Preempted);
    None
}
