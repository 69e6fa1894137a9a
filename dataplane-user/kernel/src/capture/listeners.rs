//! The sockets at which a proxy listens for captured connections.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket},
};

use dataplane_common::capture::DNS;
use netlink_sys::protocols::NETLINK_ROUTE;
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use super::CaptureOptions;
use crate::opener::{self, Sockets};

/// The backlog of the proxy's listeners; the kernel cuts it to `net.core.somaxconn`.
const BACKLOG: i32 = 65_535;

/// The proxy's listening sockets in one namespace.
#[derive(Debug)]
pub struct Listeners {
    /// Sockets for outbound connections of the workload.
    pub outbound: Vec<TcpListener>,
    /// Sockets for inbound connections to the workload.
    pub inbound: Vec<TcpListener>,
    /// Sockets for tunnels to the workload.
    pub tunnels: Vec<TcpListener>,
}

/// The addresses of the sockets for tunnels, which nobody connects to: the programs give these sockets the connections to
/// another port. An address that no interface has (RFC 6666), because IPv6 has only one address of loopback.
const TUNNELS_AT: (Ipv4Addr, Ipv6Addr) = (
    Ipv4Addr::new(127, 0, 0, 2),
    Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0, 1),
);

/// Returns the sockets that [`open_listeners`] and [`open_tunnel_listeners`] open, and as many to the kernel's routes, for
/// [`namespaces::within_with`](crate::namespaces::within_with).
pub fn sockets_of_listeners(inbound: bool, tunnels: bool) -> [Sockets; 3] {
    let sockets = |domain, kind, protocol| Sockets {
        domain,
        kind,
        protocol,
        count: 1 + usize::from(inbound) + usize::from(tunnels),
    };
    let [stream, routes] = [Type::STREAM, Type::DGRAM];
    let netlink = i32::try_from(NETLINK_ROUTE).ok().map(Protocol::from);
    [
        sockets(Domain::IPV4, stream, None),
        sockets(Domain::IPV6, stream, None),
        sockets(Domain::from(libc::AF_NETLINK), routes, netlink),
    ]
}

/// Opens the proxy's listening sockets in the network namespace that this thread is in. `inbound`: whether to open the
/// sockets for inbound connections, too.
///
/// # Errors
/// If the kernel refuses: most likely, another process listens at the port.
pub fn open_listeners(options: &CaptureOptions, inbound: bool) -> io::Result<Listeners> {
    Ok(Listeners {
        outbound: listen_at(LOOPBACK, options.outbound)?,
        inbound: if inbound {
            listen_at(LOOPBACK, options.inbound)?
        } else {
            Vec::new()
        },
        tunnels: Vec::new(),
    })
}

/// Opens the proxy's listening sockets for tunnels, in the network namespace that this thread is in: at the proxy's port for
/// inbound connections, so that they take no further port from the workload's applications.
///
/// # Errors
/// If the kernel refuses: most likely, another process listens at the port.
pub fn open_tunnel_listeners(options: &CaptureOptions) -> io::Result<Vec<TcpListener>> {
    listen_at(TUNNELS_AT, options.inbound)
}

/// Opens the proxy's listening sockets for a workload that is captured by its packets, in the network namespace that
/// this thread is in: at ports that the kernel chooses, and taking connections to any address (`IP_TRANSPARENT`),
/// because only capture leads connections to them.
///
/// # Errors
/// If the kernel refuses.
pub fn open_transparent_listeners() -> io::Result<Vec<TcpListener>> {
    let sockets = listen_at(LOOPBACK, 0)?;
    for socket in &sockets {
        let options = SockRef::from(socket);
        if socket.local_addr()?.is_ipv4() {
            options.set_ip_transparent_v4(true)?;
        } else {
            options.set_ip_transparent_v6(true)?;
        }
    }
    Ok(sockets)
}

/// The sockets of the agent's DNS server in one namespace, of one family.
#[derive(Debug)]
pub struct QuerySockets {
    /// For datagrams.
    pub udp: UdpSocket,
    /// For connections.
    pub tcp: TcpListener,
}

/// Opens the sockets of the agent's DNS server in the network namespace that this thread is in, at loopback; `None`:
/// IPv6 is off.
///
/// # Errors
/// The kernel's refusal: most likely, another process has the port.
pub fn open_query_sockets(port: u16, v4: bool) -> io::Result<Option<QuerySockets>> {
    let loopback: IpAddr = if v4 {
        Ipv4Addr::LOCALHOST.into()
    } else {
        Ipv6Addr::LOCALHOST.into()
    };
    let addr = SocketAddr::new(loopback, port);
    let open_both = || {
        let udp = open(Domain::for_address(addr), Type::DGRAM)?;
        if addr.is_ipv6() {
            udp.set_only_v6(true)?;
        }
        udp.set_nonblocking(true)?;
        udp.bind(&addr.into())?;
        Ok(QuerySockets {
            udp: udp.into(),
            tcp: listen_on(addr)?,
        })
    };
    match open_both() {
        Err(error) if !v4 && says_v6_is_off(&error) => Ok(None),
        opened => opened.map(Some),
    }
}

/// Opens the sockets of the agent's DNS server for the queries that workloads send to a resolver and that are captured by
/// their packets, in the network namespace that this thread is in. They are bound to the resolver's address
/// (`IP_TRANSPARENT`) and have this mark, by which the program knows them.
///
/// # Errors
/// The kernel's refusal: most likely, a server of the node has the address.
pub fn open_resolver_sockets(resolver: IpAddr, mark: u32) -> io::Result<QuerySockets> {
    let addr = SocketAddr::new(resolver, DNS.host());
    let bound = |kind| {
        let socket = open(Domain::for_address(addr), kind)?;
        if addr.is_ipv6() {
            socket.set_only_v6(true)?;
            socket.set_ip_transparent_v6(true)?;
        } else {
            socket.set_ip_transparent_v4(true)?;
        }
        socket.set_mark(mark)?;
        socket.set_nonblocking(true)?;
        if kind == Type::STREAM {
            socket.set_reuse_address(true)?;
        }
        socket.bind(&addr.into())?;
        io::Result::Ok(socket)
    };
    let tcp = bound(Type::STREAM)?;
    tcp.listen(BACKLOG)?;
    Ok(QuerySockets {
        udp: bound(Type::DGRAM)?.into(),
        tcp: tcp.into(),
    })
}

/// The loopback addresses of both families: other hosts reach sockets there only by capture.
const LOOPBACK: (Ipv4Addr, Ipv6Addr) = (Ipv4Addr::LOCALHOST, Ipv6Addr::LOCALHOST);

/// Listens at an address of each family, unless IPv6 is off.
fn listen_at((v4, v6): (Ipv4Addr, Ipv6Addr), port: u16) -> io::Result<Vec<TcpListener>> {
    let mut sockets = vec![listen_on((v4, port).into())?];
    match listen_on((v6, port).into()) {
        Ok(socket) => sockets.push(socket),
        Err(error) if says_v6_is_off(&error) => {}
        Err(error) => return Err(error),
    }
    Ok(sockets)
}

/// Whether IPv6 is off in the network namespace that this thread is in.
pub fn is_v6_off() -> bool {
    let bound = open(Domain::IPV6, Type::DGRAM).and_then(|socket| {
        let any_port = SocketAddr::from((Ipv6Addr::LOCALHOST, 0));
        socket.bind(&any_port.into())
    });
    bound.is_err_and(|error| says_v6_is_off(&error))
}

fn says_v6_is_off(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EADDRNOTAVAIL | libc::EAFNOSUPPORT)
    )
}

fn open(domain: Domain, kind: Type) -> io::Result<Socket> {
    Ok(opener::socket(domain, kind, None)?.into())
}

fn listen_on(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = open(Domain::for_address(addr), Type::STREAM)?;
    socket.set_reuse_address(true)?;
    if addr.is_ipv6() {
        socket.set_only_v6(true)?;
        // No interface has an address of `TUNNELS_AT`.
        socket.set_freebind_v6(!addr.ip().is_loopback())?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&addr.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_of_tunnels_share_the_inbound_port_and_take_no_other() {
        let free = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let [outbound, inbound] = free.map(|socket| socket.local_addr().unwrap().port());
        let options = CaptureOptions {
            outbound,
            inbound,
            mark: 1,
            foreign: false,
            denies: false,
            dns: None,
        };
        let listeners = open_listeners(&options, true).unwrap();
        assert!(listeners.tunnels.is_empty());
        let tunnels = open_tunnel_listeners(&options).unwrap();
        let at = |sockets: &[TcpListener]| -> Vec<SocketAddr> {
            let addrs = sockets.iter().map(|socket| socket.local_addr().unwrap());
            addrs.collect()
        };
        assert_eq!(at(&tunnels)[0], (TUNNELS_AT.0, inbound).into());
        assert!(tunnels.len() >= listeners.inbound.len());
        for addr in at(&tunnels).iter().chain(&at(&listeners.inbound)) {
            assert_eq!(addr.port(), inbound, "{addr}");
        }
        for addr in &at(&tunnels)[1..] {
            assert_eq!(addr.ip(), TUNNELS_AT.1, "{addr}");
        }
        // A second agent in the same namespace is refused, as with the other listeners.
        let again = open_tunnel_listeners(&options).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AddrInUse);
    }
}
