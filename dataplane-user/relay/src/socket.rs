//! Socket addresses and options.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
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
    /// `TCP_DEFER_ACCEPT`. A listening socket puts off `accept()`. A connecting socket puts off the
    /// acknowledgement that completes the handshake, for at most 200 ms, so that data can go with it
    /// (`tcp_rcv_synsent_state_process` in `net/ipv4/tcp_input.c`).
    DeferAccept, SetOnly, libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, i32
);

sockopt_impl!(
    /// `TCP_INFO`.
    Info, GetOnly, libc::IPPROTO_TCP, libc::TCP_INFO, TcpInfo
);

/// The beginning of `struct tcp_info` (`include/uapi/linux/tcp.h`), as in all kernels since 4.6.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TcpInfo {
    before: [u32; 30],
    /// The number of bytes that the peer has acknowledged.
    bytes_acked: u64,
    between: [u32; 5],
    /// The shortest round trip so far, in microseconds.
    min_rtt: u32,
}

/// The shortest round trip, in microseconds, up to which a peer counts as near: on this machine or next
/// to it.
const NEAR: u32 = 100;
/// `SO_SNDBUF` of sockets to near peers. The kernel doubles it, for its own share, and limits it to
/// `net.core.wmem_max`.
const ON_ITS_WAY: usize = 256 << 10;

/// The number of unanswered probes after which the kernel gives a peer up.
const KEEPALIVE_PROBES: u32 = 5;
/// The maximum time that the kernel takes for keepalive (`MAX_TCP_KEEPIDLE`).
const KEEPALIVE_MAX: Duration = Duration::from_secs(32_767);

/// Sets up a listening socket. Its connections inherit its options, which saves a system call for each of them.
///
/// # Errors
/// The kernel's.
pub fn prepare(listener: impl AsFd) -> io::Result<()> {
    let listener = listener.as_fd();
    rustix::io::ioctl_fionbio(listener, true)?;
    option::set_tcp_nodelay(listener, true)?;
    Ok(())
}

/// Returns a connection's original destination: the answer of `SO_ORIGINAL_DST`, or else the socket's own address, as
/// for transparent listeners and sockets that `sk_lookup` chose. If `is_meant` accepts the own address, it is returned
/// at once, which saves a system call.
///
/// # Errors
/// If the connection is gone.
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

/// Returns a socket's own address.
///
/// # Errors
/// If the connection is gone.
fn own_address(socket: impl AsFd) -> io::Result<SocketAddr> {
    address(net::getsockname(socket.as_fd())?)
}

/// Converts an address from the kernel, a v4-mapped one to IPv4.
///
/// # Errors
/// If it is not an Internet address.
pub fn address(address: SocketAddrAny) -> io::Result<SocketAddr> {
    Ok(plain(SocketAddr::try_from(address)?))
}

/// Converts a v4-mapped address to IPv4, and returns others as they are.
pub fn plain(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V6(v6) => match v6.ip().to_ipv4_mapped() {
            Some(v4) => SocketAddr::new(IpAddr::V4(v4), v6.port()),
            None => address,
        },
        SocketAddr::V4(_) => address,
    }
}

/// Options of a connection to an endpoint.
#[derive(Clone, Copy, Debug, Default)]
pub struct Manner {
    /// `SO_MARK`.
    pub mark: Option<u32>,
    /// The client to connect from, whose address need not be one of the machine's.
    pub from: Option<From>,
    /// Whether there are bytes to send at once. The packet that completes the handshake then waits for
    /// them, so that the accepting process wakes once.
    pub speaks: bool,
}

/// Options of a connection from the client's address.
#[derive(Clone, Copy, Debug)]
pub struct From {
    /// The address.
    pub ip: IpAddr,
    /// The port to try first; `None`: one of 61000 to 65535.
    pub port: Option<u16>,
    /// Whether the connection takes packets from the loopback interface only, and its packets go there.
    pub by_loopback: bool,
}

/// The ports of connections from a client's address. They must differ from the ports of the client's own
/// connections in the same namespace, whose packets they would get otherwise. Ports that the kernel
/// chooses for clients are lower (`ip_local_port_range`).
const PORTS: RangeInclusive<u16> = 61_000..=65_535;
/// How many of these ports are tried before the kernel chooses one.
const TRIES: usize = 8;

/// Opens a socket of TCP that does not block, in the calling thread's network namespace. `v4`: its family.
///
/// # Errors
/// The kernel's.
pub fn new(v4: bool) -> io::Result<OwnedFd> {
    let family = if v4 {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(net::socket_with(family, SocketType::STREAM, flags, None)?)
}

/// Starts to connect. `open`: opens a socket of the destination's family that does not block.
///
/// # Errors
/// The kernel's, and those of `open`.
pub fn connect(
    to: SocketAddr,
    manner: Manner,
    mut open: impl FnMut() -> io::Result<OwnedFd>,
) -> io::Result<OwnedFd> {
    if let Some(from) = manner.from {
        let any = std::iter::repeat_with(|| rand::random_range(PORTS));
        for port in from.port.into_iter().chain(any.take(TRIES)) {
            match connect_by(open()?, to, manner, port) {
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::AddrInUse | io::ErrorKind::AddrNotAvailable
                    ) => {}
                connecting => return connecting,
            }
        }
    }
    connect_by(open()?, to, manner, 0)
}

/// The loopback interface.
const LOOPBACK: &[u8] = b"lo";

/// Binds the socket to this interface, so that it takes packets from no other. Returns `false` if there is no such
/// interface.
pub fn bind_to(socket: impl AsFd, interface: &str) -> bool {
    SockRef::from(&socket)
        .bind_device(Some(interface.as_bytes()))
        .is_ok()
}

/// Starts to connect from this port; 0: from any port.
fn connect_by(socket: OwnedFd, to: SocketAddr, manner: Manner, port: u16) -> io::Result<OwnedFd> {
    if let Some(mark) = manner.mark {
        SockRef::from(&socket).set_mark(mark)?;
    }
    if manner.speaks {
        // Fails only for a socket that is not of TCP.
        let _ = setsockopt(&socket, DeferAccept, &1);
    }
    if let Some(from) = manner.from {
        let options = SockRef::from(&socket);
        if from.by_loopback {
            options.bind_device(Some(LOOPBACK))?;
        }
        if to.is_ipv4() {
            options.set_ip_transparent_v4(true)?;
        } else {
            options.set_ip_transparent_v6(true)?;
        }
        // Other sockets may have the same port, if their destinations differ.
        if port == 0 {
            setsockopt(&socket, sockopt::IpBindAddressNoPort, &true)?;
        } else {
            options.set_reuse_address(true)?;
        }
        net::bind(&socket, &SocketAddr::new(from.ip, port))?;
    }
    match net::connect(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(error) => Err(error.into()),
    }
}

/// Makes the kernel send short writes at once.
pub fn send_at_once(socket: impl AsFd) {
    // Fails only for a socket that is not of TCP.
    let _ = option::set_tcp_nodelay(socket.as_fd(), true);
}

/// Bounds the bytes in flight to a near peer. The kernel's own bound is 4 MiB (`net.ipv4.tcp_wmem`),
/// which no CPU's own cache holds, so the bytes would be fetched from memory each time that they are
/// touched (docs/measurements/relay-changes.md). The bound allows some 40 Gbit/s at a round trip of
/// `NEAR`. Peers farther away have no bound.
pub fn bound_if_near(socket: impl AsFd) {
    let is_near = getsockopt(&socket, Info).is_ok_and(|info| info.min_rtt <= NEAR);
    if is_near {
        // An error only affects speed.
        let _ = option::set_socket_send_buffer_size(socket.as_fd(), ON_ITS_WAY);
    }
}

/// Returns the number of bytes that the peer of a TCP connection has acknowledged.
///
/// # Errors
/// The kernel's.
pub fn acknowledged(socket: impl AsFd) -> io::Result<u64> {
    Ok(getsockopt(&socket, Info)?.bytes_acked)
}

/// The times after which the kernel gives up a peer that is gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Patience {
    /// The time without a byte after which the kernel sends keepalive probes; `None`: never.
    pub keepalive: Option<Duration>,
    /// The time without an acknowledgement of data or probes after which the kernel ends the connection; `None`: the kernel's
    /// limits.
    pub user_timeout: Option<Duration>,
}

impl Patience {
    /// Sets the times for a socket. Fails without an error if its connection has just ended.
    pub fn apply(self, socket: impl AsFd) {
        let socket = socket.as_fd();
        let _ = self.keepalive.map(|after| keep_alive(socket, after));
        let _ = self.user_timeout.map(|time| {
            // The kernel takes a signed number.
            let most = i32::MAX.unsigned_abs();
            let millis = u32::try_from(time.as_millis()).map_or(most, |time| time.min(most));
            option::set_tcp_user_timeout(socket, millis)
        });
    }
}

/// Makes the kernel check whether the peer is alive, after `after` without a byte.
fn keep_alive(socket: BorrowedFd<'_>, after: Duration) -> io::Result<()> {
    let after = after.min(KEEPALIVE_MAX);
    option::set_socket_keepalive(socket, true)?;
    option::set_tcp_keepidle(socket, after)?;
    option::set_tcp_keepintvl(
        socket,
        (after / KEEPALIVE_PROBES).max(Duration::from_secs(1)),
    )?;
    option::set_tcp_keepcnt(socket, KEEPALIVE_PROBES)?;
    Ok(())
}

/// Makes close reset the connection, and drop unsent bytes.
pub fn reset_on_close(socket: impl AsFd) {
    // Fails only for a file that is not a socket.
    let _ = option::set_socket_linger(socket, Some(Duration::ZERO));
}

/// Makes close send unsent bytes and FIN, as by default. Undoes [`reset_on_close`].
pub fn end_on_close(socket: impl AsFd) {
    // Fails only for a file that is not a socket.
    let _ = option::set_socket_linger(socket, None);
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn the_kernel_has_the_times_after_which_it_gives_up_a_peer() {
        let seconds = Duration::from_secs;
        for (keepalive, user_timeout, wanted) in [
            (None, None, (false, None, 0)),
            (Some(60), None, (true, Some((60, 12)), 0)),
            (None, Some(30), (false, None, 30_000)),
            (
                Some(100_000),
                Some(10_000_000),
                (true, Some((32_767, 6554)), i32::MAX.unsigned_abs()),
            ),
        ] {
            let socket = net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
            Patience {
                keepalive: keepalive.map(seconds),
                user_timeout: user_timeout.map(seconds),
            }
            .apply(&socket);
            let is_on = option::socket_keepalive(&socket).unwrap();
            let times = is_on.then(|| {
                let [idle, interval] = [
                    option::tcp_keepidle(&socket),
                    option::tcp_keepintvl(&socket),
                ];
                (idle.unwrap().as_secs(), interval.unwrap().as_secs())
            });
            let user_timeout = option::tcp_user_timeout(&socket).unwrap();
            assert_eq!((is_on, times, user_timeout), wanted);
        }
    }

    #[test]
    fn the_kernel_counts_acknowledged_bytes() {
        use std::io::{Read as _, Write as _};
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let before = acknowledged(&client).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        client.write_all(&[0; 5000]).unwrap();
        server.read_exact(&mut [0; 5000]).unwrap();
        // The bytes of the answer acknowledge those of the client.
        server.write_all(&[0]).unwrap();
        client.read_exact(&mut [0]).unwrap();
        assert_eq!(acknowledged(&client).unwrap() - before, 5000);
    }

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
        // On a loaded machine the handshake may be slow; the endpoint then does not count as near.
        assert_eq!(
            after <= 2 * ON_ITS_WAY && after != before,
            rtt <= NEAR,
            "{after}"
        );
        assert_eq!(option::socket_send_buffer_size(&nowhere).unwrap(), before);
    }
}
