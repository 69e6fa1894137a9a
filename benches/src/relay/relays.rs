//! The relays that `bench relay` compares, and their pods.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// A way to relay connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relay {
    /// No relay: the client connects to the server.
    Direct,
    /// `dataplane proxy`, with as many workers as there are CPUs. Unlike the other relays, it looks up the original
    /// destination and chooses an endpoint.
    Dataplane,
    /// No process relays: the client is captured with `mode: kernel`, and connects to a VIP.
    Kernel,
    /// HAProxy with one thread.
    Haproxy,
    /// HAProxy with two threads and `splice-auto`.
    Haproxy2,
    /// nginx's stream module with two workers.
    Nginx,
    /// tokio's `copy_bidirectional`.
    Tokio,
    /// Two agents, on the nodes of client and server: a tunnel leads from one agent to the other agent.
    Hbone,
    /// Two of Istio's ztunnels, in the network namespaces of client and server, in the places of the agents.
    Ztunnel,
}

impl Relay {
    /// All relays, in the order of their declaration.
    pub const ALL: [Self; 9] = [
        Self::Direct,
        Self::Dataplane,
        Self::Kernel,
        Self::Haproxy,
        Self::Haproxy2,
        Self::Nginx,
        Self::Tokio,
        Self::Hbone,
        Self::Ztunnel,
    ];

    /// Returns the relay's `path` in the rows.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Dataplane => "dataplane",
            Self::Kernel => "dataplane-kernel",
            Self::Haproxy => "haproxy",
            Self::Haproxy2 => "haproxy-2",
            Self::Nginx => "nginx",
            Self::Tokio => "tokio",
            Self::Hbone => "hbone",
            Self::Ztunnel => "ztunnel",
        }
    }

    /// Returns whether the relay has processes of its own.
    pub const fn is_process(self) -> bool {
        !matches!(self, Self::Direct | Self::Kernel)
    }

    /// Returns whether the relay encrypts, by two processes on two nodes.
    pub const fn is_tunnel(self) -> bool {
        matches!(self, Self::Hbone | Self::Ztunnel)
    }

    /// Returns the index of the client's pod in [`SEATS`]. The server of a tunnel is in the next pod; other servers are in
    /// the client's pod.
    pub const fn seat(self) -> usize {
        match self {
            Self::Direct => 1,
            Self::Kernel => 2,
            Self::Hbone => 3,
            Self::Ztunnel => 5,
            _ => 0,
        }
    }

    /// Returns the address that the client connects to.
    pub fn address(self) -> SocketAddr {
        let port = match self {
            Self::Direct => return server(self.seat()),
            Self::Hbone | Self::Ztunnel => return server(self.seat() + 1),
            Self::Dataplane | Self::Kernel => return VIP,
            Self::Haproxy => 15_011,
            Self::Haproxy2 => 15_012,
            Self::Nginx => 15_013,
            Self::Tokio => 15_014,
        };
        SocketAddr::new(server(self.seat()).ip(), port)
    }
}

/// The pods, each with its node.
pub const SEATS: [(&str, &str); 7] = [
    ("bench", "node1"),
    ("direct", "node2"),
    ("captured", "node3"),
    ("app", "node4"),
    ("far", "node5"),
    ("zapp", "node6"),
    ("zfar", "node7"),
];
/// The service's VIP. A pod with proxies that listen at the VIP has it as an address.
pub const VIP: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 96, 0, 1)), 15_001);

/// Returns the address of the server in a pod.
pub fn server(seat: usize) -> SocketAddr {
    let node = [1, 2, 3, 4, 5, 6, 7][seat];
    (Ipv4Addr::new(10, 244, node, 10), 8_080).into()
}
