//! The sockets at which queries arrive.

use std::{
    io,
    net::{self, SocketAddr},
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpListener, UdpSocket};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// A socket at which queries arrive, of a worker's.
#[derive(Clone, Debug)]
pub enum Listener {
    /// Queries by UDP.
    Udp(Arc<UdpSocket>),
    /// Queries by TCP.
    Tcp(Arc<TcpListener>),
}

impl Listener {
    /// Whether it is for IPv4.
    pub fn is_ipv4(&self) -> bool {
        let addr = match self {
            Self::Udp(socket) => socket.local_addr(),
            Self::Tcp(socket) => socket.local_addr(),
        };
        addr.is_ok_and(|addr| addr.is_ipv4())
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Udp(socket) => socket.as_fd(),
            Self::Tcp(socket) => socket.as_fd(),
        }
    }
}

/// The sockets of a worker at an address, which other workers have, too.
pub fn open(at: SocketAddr) -> io::Result<(net::UdpSocket, net::TcpListener)> {
    let socket = |kind: Type, protocol| {
        let socket = Socket::new(Domain::for_address(at), kind.nonblocking(), Some(protocol))?;
        socket.set_reuse_port(true)?;
        if at.is_ipv6() {
            socket.set_only_v6(true)?;
        }
        if protocol == Protocol::TCP {
            // Connections that an earlier server left must not keep the next server from binding.
            socket.set_reuse_address(true)?;
        }
        socket.bind(&at.into())?;
        io::Result::Ok(socket)
    };
    let udp = socket(Type::DGRAM, Protocol::UDP)?;
    let tcp = socket(Type::STREAM, Protocol::TCP)?;
    tcp.listen(BACKLOG)?;
    Ok((udp.into(), tcp.into()))
}
