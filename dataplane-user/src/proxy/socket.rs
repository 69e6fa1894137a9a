//! Sockets: what is asked of them and how they are set up.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};

use nix::{
    getsockopt_impl, setsockopt_impl, sockopt_impl,
    sys::socket::{getsockopt, setsockopt, sockopt},
};
use rustix::{
    io::Errno,
    net::{self, AddressFamily, SocketAddrAny, SocketFlags, SocketType, sockopt as option},
};
use socket2::SockRef;

sockopt_impl!(
    /// `TCP_DEFER_ACCEPT`. Of a listening socket it puts off `accept()`; of one that connects, the
    /// acknowledgement that nothing rides on (`tcp_rcv_synsent_state_process` in
    /// `net/ipv4/tcp_input.c`): for at most 200 ms.
    DeferAccept, SetOnly, libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, i32
);

sockopt_impl!(
    /// `TCP_INFO`.
    Info, GetOnly, libc::IPPROTO_TCP, libc::TCP_INFO, TcpInfo
);

/// The beginning of `struct tcp_info` (`include/uapi/linux/tcp.h`), as all kernels since 4.6 have it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TcpInfo {
    before: [u32; 37],
    /// The shortest round trip that was seen, in microseconds.
    min_rtt: u32,
}

/// A peer whose answers were ever seen to take no longer, in microseconds, is on this machine or next
/// to it.
const NEAR: u32 = 100;
/// `SO_SNDBUF` of sockets to such peers. The kernel doubles it, for its own share, and takes less
/// if `net.core.wmem_max` is less.
const ON_ITS_WAY: usize = 256 << 10;

/// Probes before a peer that does not answer is given up.
const KEEPALIVE_PROBES: u32 = 5;

/// Sets up a listening socket: connections inherit what is set here, so that it costs a system call
/// for the listener and none for each connection.
///
/// # Errors
/// The kernel's.
pub fn prepare(listener: impl AsFd) -> io::Result<()> {
    let listener = listener.as_fd();
    rustix::io::ioctl_fionbio(listener, true)?;
    option::set_tcp_nodelay(listener, true)?;
    Ok(())
}

/// A connection's original destination: what the capture says (`SO_ORIGINAL_DST`), and otherwise
/// the socket's own address, as for transparent listeners and those that `sk_lookup` chose. If that
/// is one that `is_meant`, nobody is asked: it saves a system call for each connection.
///
/// # Errors
/// If the connection is gone already.
pub fn original_destination(
    socket: impl AsFd,
    client: SocketAddr,
    is_meant: impl FnOnce(SocketAddr) -> bool,
) -> io::Result<SocketAddr> {
    let socket = socket.as_fd();
    let own = own_address(socket)?;
    if is_meant(own) {
        return Ok(own);
    }
    let told = if client.ip().to_canonical().is_ipv4() {
        option::ip_original_dst(socket).map(SocketAddr::V4)
    } else {
        option::ipv6_original_dst(socket).map(SocketAddr::V6)
    };
    match told {
        Ok(told) if told.port() != 0 => Ok(plain(told)),
        _ => Ok(own),
    }
}

/// A socket's own address.
///
/// # Errors
/// If the connection is gone already.
pub fn own_address(socket: impl AsFd) -> io::Result<SocketAddr> {
    address(net::getsockname(socket.as_fd())?)
}

/// An address that the kernel gave, as IPv4 if it is one.
///
/// # Errors
/// If it is no Internet address.
pub fn address(address: SocketAddrAny) -> io::Result<SocketAddr> {
    Ok(plain(SocketAddr::try_from(address)?))
}

/// A v4-mapped address as the IPv4 one that it is.
pub fn plain(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V6(v6) => match v6.ip().to_ipv4_mapped() {
            Some(v4) => SocketAddr::new(IpAddr::V4(v4), v6.port()),
            None => address,
        },
        SocketAddr::V4(_) => address,
    }
}

/// How to connect.
#[derive(Clone, Copy, Debug, Default)]
pub struct Manner {
    /// `SO_MARK`.
    pub mark: Option<u32>,
    /// From this address, which need not be one of the machine's.
    pub from: Option<IpAddr>,
    /// Whether there is something to send at once: the packet that completes the handshake waits for
    /// it then, and whoever accepts is not woken twice.
    pub speaks: bool,
}

/// The ports of connections from a client's address. Clients' own are not among them, as long as they
/// have the kernel choose (`ip_local_port_range` ends before): a connection with the same ports as one of
/// the client's, in the same namespace, would get that one's packets.
const PORTS: RangeInclusive<u16> = 61_000..=65_535;
/// How many of them are tried before the kernel chooses any.
const TRIES: usize = 8;

/// A socket of the calling thread's network namespace that is connecting.
///
/// # Errors
/// The kernel's.
pub fn connect(to: SocketAddr, manner: Manner) -> io::Result<OwnedFd> {
    if manner.from.is_some() {
        for _ in 0..TRIES {
            match connect_by(to, manner, rand::random_range(PORTS)) {
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::AddrInUse | io::ErrorKind::AddrNotAvailable
                    ) => {}
                connecting => return connecting,
            }
        }
    }
    connect_by(to, manner, 0)
}

/// The same, from this port; 0: from any.
fn connect_by(to: SocketAddr, manner: Manner, port: u16) -> io::Result<OwnedFd> {
    let family = if to.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = net::socket_with(family, SocketType::STREAM, flags, None)?;
    if let Some(mark) = manner.mark {
        SockRef::from(&socket).set_mark(mark)?;
    }
    if manner.speaks {
        // It fails only for what is no socket of TCP.
        let _ = setsockopt(&socket, DeferAccept, &1);
    }
    if let Some(from) = manner.from {
        let options = SockRef::from(&socket);
        if to.is_ipv4() {
            options.set_ip_transparent_v4(true)?;
        } else {
            options.set_ip_transparent_v6(true)?;
        }
        // Others may have the same port, if the whole connection is another.
        if port == 0 {
            setsockopt(&socket, sockopt::IpBindAddressNoPort, &true)?;
        } else {
            options.set_reuse_address(true)?;
        }
        net::bind(&socket, &SocketAddr::new(from, port))?;
    }
    match net::connect(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(error) => Err(error.into()),
    }
}

/// Has the kernel send what is written at once, however little it is.
pub fn send_at_once(socket: impl AsFd) {
    // Fails only for what is no socket of TCP.
    let _ = option::set_tcp_nodelay(socket.as_fd(), true);
}

/// Bounds what is on its way to a peer that is near. Left to itself the kernel has up to 4 MiB of it
/// (`net.ipv4.tcp_wmem`), which no CPU's own cache holds: bytes are then fetched from memory each time
/// that they are touched (docs/measurements/relay-changes.md). The bound is for some 40 Gbit/s at a round
/// trip of [`NEAR`]; whoever is farther away is left alone.
pub fn bound_if_near(socket: impl AsFd) {
    let is_near = getsockopt(&socket, Info).is_ok_and(|info| info.min_rtt <= NEAR);
    if is_near {
        // Nothing but speed depends on it.
        let _ = option::set_socket_send_buffer_size(socket.as_fd(), ON_ITS_WAY);
    }
}

/// Has the kernel find out whether the peer is still there, when nothing was said for so long.
///
/// # Errors
/// The kernel's.
pub fn keep_alive(socket: impl AsFd, after: Duration) -> io::Result<()> {
    let socket = socket.as_fd();
    option::set_socket_keepalive(socket, true)?;
    option::set_tcp_keepidle(socket, after)?;
    option::set_tcp_keepintvl(
        socket,
        (after / KEEPALIVE_PROBES).max(Duration::from_secs(1)),
    )?;
    option::set_tcp_keepcnt(socket, KEEPALIVE_PROBES)?;
    Ok(())
}

/// Has the socket reset its connection when it is closed, and forget what was not sent.
pub fn reset_on_close(socket: impl AsFd) {
    // Fails only for what is no socket.
    let _ = option::set_socket_linger(socket, Some(Duration::ZERO));
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn what_is_on_its_way_to_a_near_peer_is_bounded() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let nowhere =
            TcpStream::from(net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap());
        let before = option::socket_send_buffer_size(&nowhere).unwrap();
        let rtt = getsockopt(&near, Info).unwrap().min_rtt;
        bound_if_near(&near);
        bound_if_near(&nowhere);
        let after = option::socket_send_buffer_size(&near).unwrap();
        assert!(rtt > 0 && rtt < 1_000_000, "{rtt} µs on loopback");
        // Where a loaded machine has taken its time for the handshake, it is not near.
        assert_eq!(
            after <= 2 * ON_ITS_WAY && after != before,
            rtt <= NEAR,
            "{after}"
        );
        assert_eq!(option::socket_send_buffer_size(&nowhere).unwrap(), before);
    }
}
