//! Events that a kernel program reports while `dataplane monitor` listens.

use crate::{Addr, Port, Protocol};

/// The hook that reported an [`Event`].
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// `connect4` or `connect6`.
    Connect = 1,
    /// `sendmsg4` or `sendmsg6`: a datagram from an unconnected socket.
    Sendmsg = 2,
    /// `recvmsg4` or `recvmsg6`.
    Recvmsg = 3,
    /// TC: a packet that arrived at, or is about to leave by, an interface.
    Packet = 4,
    /// `sk_lookup`: a connection that arrives at a workload.
    Lookup = 5,
}

impl Hook {
    /// The word that a person reads.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Sendmsg => "sendmsg",
            Self::Recvmsg => "recvmsg",
            Self::Packet => "packet",
            Self::Lookup => "lookup",
        }
    }

    /// From the number in an event.
    pub const fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Connect),
            2 => Some(Self::Sendmsg),
            3 => Some(Self::Recvmsg),
            4 => Some(Self::Packet),
            5 => Some(Self::Lookup),
            _ => None,
        }
    }
}

layout! {
    /// One decision, as the ring buffer carries it.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Event {
        /// Nanoseconds since boot (`bpf_ktime_get_ns`, CLOCK_MONOTONIC).
        pub at: u64,
        /// The client's network namespace (`SO_NETNS_COOKIE`); 0 of a packet; at a lookup, the workload's.
        pub netns: u64,
        /// The client's socket (`SO_COOKIE`); 0 of a packet and at a lookup.
        pub socket: u64,
        /// The packet's source; unspecified at the socket, where there is none yet.
        pub source: Addr,
        /// The destination that the client asked for: the VIP, if it is one.
        pub destination: Addr,
        /// The endpoint; unspecified if none was chosen.
        pub endpoint: Addr,
        /// The destination's port.
        pub destination_port: Port,
        /// The endpoint's port.
        pub endpoint_port: Port,
        /// The pool, 0 if none matched.
        pub pool: u32,
        /// The client's process (tgid in the initial pid namespace); 0 of a packet and at a lookup.
        pub pid: u32,
        /// The packet's interface; 0 at the socket and at a lookup.
        pub ifindex: u32,
        /// The packet's source port.
        pub source_port: Port,
        /// Zero.
        pub reserved: u16,
        /// A [`crate::Reason`].
        pub reason: u8,
        /// A [`Hook`].
        pub hook: u8,
        /// TCP or UDP.
        pub protocol: Protocol,
        /// Zero.
        pub padding: u8,
        /// The client's command name, padded with zeros (`TASK_COMM_LEN`).
        pub comm: [u8; 16],
    }
}

const _: () = assert!(size_of::<Event>() == 112 && align_of::<Event>() == 8);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hooks_have_numbers_and_words() {
        for (number, hook, word) in [
            (1, Hook::Connect, "connect"),
            (2, Hook::Sendmsg, "sendmsg"),
            (3, Hook::Recvmsg, "recvmsg"),
            (4, Hook::Packet, "packet"),
            (5, Hook::Lookup, "lookup"),
        ] {
            assert_eq!((hook as u8, hook.word()), (number, word));
            assert_eq!(Hook::from_number(number), Some(hook));
        }
        assert!(Hook::from_number(0).is_none() && Hook::from_number(6).is_none());
    }
}
