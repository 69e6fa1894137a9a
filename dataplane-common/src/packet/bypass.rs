//! Flows that belong to no service, and that packet programs send from interface to interface past the node's stack.

use crate::Port;

layout! {
    /// The interfaces of a flow, by the flow's key; or those of all flows from a source, at an interface, to an address and port, by a
    /// key with source port 0.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Bypass {
        /// The interfaces of a flow's two ends, in the order of its key. For all flows to a port: the interface at which packets
        /// arrive, and the one by which a packet has left the stack unchanged; 0: none has left yet.
        pub interfaces: [u32; 2],
        /// When it was found, in units of 2^32 ns since boot (CLOCK_MONOTONIC); for a connection, when it had its last packet.
        pub since: u32,
        /// For all flows to a port: the source port of the packet that shows the way.
        pub shown_by: Port,
        /// Zero.
        pub reserved: u16,
    }
}

/// How many flows and destinations are known at once. The least recently used are forgotten; their packets go through the stack.
pub const BYPASSES: u32 = 32_768;

impl Bypass {
    /// Whether it was found in this unit of time or the one before, at most 8.6 s ago.
    #[inline(always)]
    pub const fn is_recent(&self, now: u32) -> bool {
        now.wrapping_sub(self.since) <= 1
    }

    /// Whether a connection whose last packet came at `since` had one within the last 18 minutes.
    #[inline(always)]
    pub const fn is_live(since: u32, now: u32) -> bool {
        now.wrapping_sub(since) < 1 << 8
    }
}

const _: () = assert!(size_of::<Bypass>() == 16);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_counted_in_units_that_wrap() {
        for (since, now, is_recent, is_live) in [
            (7, 7, true, true),
            (7, 8, true, true),
            (7, 9, false, true),
            (7, 262, false, true),
            (7, 263, false, false),
            (u32::MAX, 0, true, true),
            (u32::MAX, 1, false, true),
            (u32::MAX, 255, false, false),
        ] {
            let bypass = Bypass {
                interfaces: [1, 2],
                since,
                shown_by: Port::ANY,
                reserved: 0,
            };
            assert_eq!(bypass.is_recent(now), is_recent, "{since} {now}");
            assert_eq!(Bypass::is_live(since, now), is_live, "{since} {now}");
        }
    }
}
