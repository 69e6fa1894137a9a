//! The sockets from which queries to resolvers are sent.

use std::{
    io,
    net::{self, IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::RangeInclusive,
    os::fd::AsFd,
    sync::LazyLock,
};

use dataplane_common::OF_AGENT;
use socket2::SockRef;
use tokio::net::UdpSocket;

/// Ports that queries come from: all that need no privilege. Node ports would lead answers to endpoints of services.
const PORTS: RangeInclusive<u16> = 1024..=u16::MAX;
const NODE_PORTS: RangeInclusive<u16> = 30_000..=32_767;
/// How many ports are tried before the kernel chooses one.
const TRIES: usize = 8;

/// A socket at a random port.
pub fn open(resolver: SocketAddr) -> io::Result<UdpSocket> {
    let any: IpAddr = match resolver {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let ports = (0..TRIES).map(|_| rand::random_range(PORTS));
    let ports = ports.filter(|port| !NODE_PORTS.contains(port) && !is_reserved(*port));
    let mut found = ports.filter_map(|port| net::UdpSocket::bind((any, port)).ok());
    let socket = match found.next() {
        Some(socket) => socket,
        None => net::UdpSocket::bind((any, 0))?,
    };
    is_agents(&socket);
    socket.set_nonblocking(true)?;
    UdpSocket::from_std(socket)
}

/// Says to the programs that a socket is the agent's: no service that has the resolver's address as its external IP takes the
/// query. A user without CAP_NET_ADMIN may not say it.
pub fn is_agents(socket: &impl AsFd) {
    let _ = SockRef::from(socket).set_priority(OF_AGENT);
}

/// Whether the operator keeps a port from sockets that do not ask for it (`net.ipv4.ip_local_reserved_ports`).
fn is_reserved(port: u16) -> bool {
    static RESERVED: LazyLock<Vec<RangeInclusive<u16>>> = LazyLock::new(|| {
        let file = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_reserved_ports");
        ranges(&file.unwrap_or_default())
    });
    RESERVED.iter().any(|range| range.contains(&port))
}

/// Reads ranges such as `8080,9000-9010`.
fn ranges(text: &str) -> Vec<RangeInclusive<u16>> {
    let range = |text: &str| {
        let (from, to) = text.split_once('-').unwrap_or((text, text));
        Some(from.parse().ok()?..=to.parse().ok()?)
    };
    text.trim().split(',').filter_map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn queries_come_from_the_whole_range_of_ports() {
        let at = "127.0.0.1:53".parse().unwrap();
        let ports: Vec<u16> = (0..300)
            .map(|_| open(at).unwrap().local_addr().unwrap().port())
            .collect();
        let (low, high) = (ports.iter().min().unwrap(), ports.iter().max().unwrap());
        assert!(*low < 8000 && *high > 61_000, "{low} to {high}");
        assert!(!ports.iter().any(|port| NODE_PORTS.contains(port)));
        assert_eq!(ranges("8080,9000-9010\n"), [8080..=8080, 9000..=9010]);
        assert_eq!(ranges("\n"), []);
    }
}
