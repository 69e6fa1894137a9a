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
}

/// Returns the sockets that [`open_listeners`] opens, and as many to the kernel's routes, for
/// [`namespaces::within_with`](crate::namespaces::within_with).
pub fn sockets_of_listeners(inbound: bool) -> [Sockets; 3] {
    let sockets = |domain, kind, protocol| Sockets {
        domain,
        kind,
        protocol,
        count: 1 + usize::from(inbound),
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
        outbound: listen_at(options.outbound)?,
        inbound: if inbound {
            listen_at(options.inbound)?
        } else {
            Vec::new()
        },
    })
}

/// Opens the proxy's listening sockets for a workload that is captured by its packets, in the network namespace that
/// this thread is in: at ports that the kernel chooses, and taking connections to any address (`IP_TRANSPARENT`),
/// because only capture leads connections to them.
///
/// # Errors
/// If the kernel refuses.
pub fn open_transparent_listeners() -> io::Result<Vec<TcpListener>> {
    let sockets = listen_at(0)?;
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

/// Listens at loopback of both families: other hosts reach these sockets only by capture.
fn listen_at(port: u16) -> io::Result<Vec<TcpListener>> {
    let mut sockets = vec![listen_on((Ipv4Addr::LOCALHOST, port).into())?];
    match listen_on((Ipv6Addr::LOCALHOST, port).into()) {
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
    }
    socket.set_nonblocking(true)?;
    socket.bind(&addr.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}
