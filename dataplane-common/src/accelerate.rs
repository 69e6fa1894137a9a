//! Keys and values of the tables by which what an application says to its proxy goes past the TCP
//! stack: from its socket straight into the proxy's.
//!
//! ```text
//! PROXIES   hash     ProxyKey -> u32    whose connections are accelerated
//! SENDERS   sockhash Tuple    -> socket applications' sockets: what they send, `sk_msg` sees
//! SENDING   sk       socket   -> Sender how far they are
//! RECEIVERS sockhash Tuple    -> socket the proxy's ends of the same connections
//! GRANTS    hash     Tuple    -> u64    how many bytes an application may have sent this way so far
//! ```
//!
//! Nothing holds back who sends past the TCP stack: no window, no receive buffer. So a sender may be
//! ahead of what the proxy has passed on by [`WINDOW`] and no more; who would exceed it goes on by
//! TCP, for good: what went before is read before what TCP brings, and the other way round is not
//! certain.

use crate::capture::Tuple;

/// Bytes that may wait in the proxy's socket.
pub const WINDOW: u64 = 256 << 10;
/// The proxy says how far it is when it has passed on so much more.
pub const STEP: u64 = WINDOW / 2;
/// The most connections that are accelerated at once.
pub const CONNECTIONS: u32 = 65_536;
/// The most network namespaces, times the ports of a proxy.
pub const PROXIES: u32 = 65_536;

layout! {
    /// Where a proxy listens; or, for port 0, the network namespace that it connects from, and the value
    /// is the mark of its sockets.
    #[repr(C, align(8))]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct ProxyKey {
        /// The network namespace's cookie.
        pub netns: u64,
        /// The port, in host order.
        pub port: u32,
        /// Zero.
        pub reserved: u32,
    }
}

/// An application's socket.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sender {
    /// Its connection, by which the proxy's end is found.
    pub tuple: Tuple,
    /// Bytes that went past the TCP stack.
    pub sent: u64,
    /// How many may, as far as is known here.
    pub granted: u64,
    /// Not 0: by TCP from now on.
    pub by_tcp: u64,
}

const _: () = assert!(size_of::<ProxyKey>() == 16);
const _: () = assert!(size_of::<Sender>() == 72);
