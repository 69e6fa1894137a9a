//! Keys and values of the tables by which an application's bytes bypass the TCP stack on the way to its proxy: from the
//! application's socket straight into the proxy's socket.
//!
//! ```text
//! PROXIES   hash     ProxyKey -> u32    proxies whose connections are accelerated
//! SENDERS   sockhash Tuple    -> socket applications' sockets: `sk_msg` sees the bytes that they send
//! SENDING   sk       socket   -> Sender how many bytes each of them has sent this way, and may send
//! RECEIVERS sockhash Tuple    -> socket the proxy's ends of the same connections
//! GRANTS    hash     Tuple    -> u64    how many bytes an application may have sent this way so far
//! ```
//!
//! Nothing holds back a sender that bypasses the TCP stack: it meets no window and no receive buffer. So a sender may
//! be ahead of the bytes that the proxy has passed on by at most [`WINDOW`]. A sender that exceeds this limit falls
//! back to TCP for the rest of the connection. It cannot change back: the proxy reads the accelerated bytes before the
//! bytes that TCP brings, and the opposite order is not certain.

use crate::capture::Tuple;

/// Bytes that may wait in the proxy's socket.
pub const WINDOW: u64 = 256 << 10;
/// The proxy reports its progress each time that it has passed on this many bytes more.
pub const STEP: u64 = WINDOW / 2;
/// The most connections that are accelerated at once.
pub const CONNECTIONS: u32 = 65_536;
/// The most network namespaces, times the ports of a proxy.
pub const PROXIES: u32 = 65_536;

layout! {
    /// The network namespace and port at which a proxy listens. Port 0: the network namespace from which the proxy
    /// connects; the value is then the mark of its sockets.
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
    /// How many bytes it may send this way, as far as this socket knows.
    pub granted: u64,
    /// Not 0: the socket has fallen back to TCP.
    pub by_tcp: u64,
}

const _: () = assert!(size_of::<ProxyKey>() == 16);
const _: () = assert!(size_of::<Sender>() == 72);
