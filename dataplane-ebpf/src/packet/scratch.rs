//! Where a packet's program keeps what it knows while it runs: one place per CPU.
//!
//! The stack has 512 bytes, functions included. And what lies on the stack the verifier remembers
//! by value, on every path; what lies in a table it does not, so that paths that differ in a
//! packet's words only are one to it.
//!
//! No other program of ours runs on the CPU meanwhile: they all run with softirqs off
//! (`sch_handle_ingress`, `sch_handle_egress` in `net/core/dev.c`).

use dataplane_common::tables::{Endpoint, Frontend, Pool};

use super::{conntrack::Flow, error::Complaint, parse::Packet, rewrite::Ends, route::Route};
use crate::tables::SCRATCH;

/// What is known.
#[repr(C)]
pub struct Scratch {
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
    /// Whether the endpoint is to see an address of the node's: 1 or 0.
    pub masquerade: u32,
    pub endpoint: Endpoint,
    /// Whether the packet is a SYN again on the flow that is in `flow`: 1 or 0. Here, and not in a
    /// register: Linux 6.1's verifier would take two paths that differ in nothing else for one, and
    /// remove what only the second has.
    pub keep: u32,
    pub way: Route,
    /// What the sender is told, for [`super::COMPLAIN`].
    pub complaint: Complaint,
}

/// This CPU's place, with whatever the last packet left there.
#[inline(always)]
pub fn scratch() -> Option<&'static mut Scratch> {
    let place = SCRATCH.get_ptr_mut(0)?;
    // SAFETY: nobody else has it while this program runs: see above.
    Some(unsafe { &mut *place })
}
