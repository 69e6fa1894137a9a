//! Flows that belong to no service, and that packet programs send from interface to interface past the node's stack.

use super::Tick;

layout! {
    /// What is known of packets between two ends, by the key of a flow ([`key`]), or of all flows to a port (source port 0).
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Bypass {
        /// The interfaces of a flow's two ends, in the order of its key. For all flows to a port: the interface at which packets
        /// arrive, and the one by which they have left the stack unchanged; 0: none has left yet.
        pub interfaces: [u32; 2],
        /// When it was found.
        pub since: Tick,
        /// Zero.
        pub reserved: u16,
    }
}

/// How many flows and destinations are known at once. The least recently used are forgotten; their packets go through the stack.
pub const BYPASSES: u32 = 32_768;

impl Bypass {
    /// Whether it was found in this tick or the one before, at most 8.6 s ago.
    #[inline(always)]
    pub const fn is_recent(&self, now: Tick) -> bool {
        self.since.ticks_before(now) <= 1
    }
}

const _: () = assert!(size_of::<Bypass>() == 12);
