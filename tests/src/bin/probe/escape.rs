//! Connects in ways that try to bypass capture.

use std::{
    ffi::OsString,
    io::{self, Read as _, Write as _},
    net::{IpAddr, SocketAddr},
    os::unix::ffi::OsStringExt as _,
    time::Duration,
};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use nix::{
    libc, setsockopt_impl,
    sys::socket::{SetSockOpt as _, sockopt::SetOsString},
};
use socket2::{Domain, Protocol, Socket, Type};

#[derive(Args)]
pub struct Arguments {
    /// How to connect
    #[arg(long)]
    by: Way,
    /// The destination
    #[arg(long)]
    to: SocketAddr,
    /// A destination to which the process may connect first
    #[arg(long, required_if_eq("by", "reconnect"))]
    first: Option<SocketAddr>,
    /// Has the kernel send the packets here first, by an option of IPv4 or a routing header of IPv6
    #[arg(long, required_if_eq("by", "source-route"))]
    through: Option<IpAddr>,
    /// The kind of IPv6 routing header
    #[arg(long, default_value = "segments")]
    header: Header,
    /// A datagram instead of a connection
    #[arg(long)]
    udp: bool,
    /// The mark of the socket (`SO_MARK`)
    #[arg(long)]
    mark: Option<u32>,
    /// How long to wait for a connection and for the other side's bytes
    #[arg(long, default_value_t = 30_000)]
    patience_ms: u64,
}

impl Arguments {
    fn patience(&self) -> Duration {
        Duration::from_millis(self.patience_ms)
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum Way {
    /// `connect()`
    Plain,
    /// `connect()` of an IPv6 socket to a v4-mapped address
    Mapped,
    /// `sendto()` with `MSG_FASTOPEN`, which connects
    Fastopen,
    /// `connect()` of a socket of MPTCP
    Mptcp,
    /// `connect()` to another destination, to none, and to this one
    Reconnect,
    /// `connect()` of a socket with a source route
    SourceRoute,
    /// `IORING_OP_CONNECT` of an io_uring
    IoUring,
    /// `IORING_OP_CONNECT`, submitted by a thread of the kernel's (`IORING_SETUP_SQPOLL`)
    IoUringPolled,
}

/// A routing header.
#[derive(Clone, Copy, ValueEnum)]
enum Header {
    /// A segment routing header (RFC 8754)
    Segments,
    /// A segment routing header without segments left: the next host is the destination
    NoneLeft,
}

/// `IP_OPTIONS`.
#[derive(Clone)]
struct Options;
setsockopt_impl!(
    Options,
    libc::IPPROTO_IP,
    libc::IP_OPTIONS,
    OsString,
    SetOsString<'_>
);

/// `IPV6_RTHDR`.
#[derive(Clone)]
struct RoutingHeader;
setsockopt_impl!(
    RoutingHeader,
    libc::IPPROTO_IPV6,
    libc::IPV6_RTHDR,
    OsString,
    SetOsString<'_>
);

/// Prints the other side's bytes. Fails if it is not reached.
pub fn run(arguments: &Arguments) -> Result<()> {
    if let Way::IoUring | Way::IoUringPolled = arguments.by {
        return by_io_uring(arguments);
    }
    let mut socket = connect(arguments)?;
    socket.set_read_timeout(Some(arguments.patience()))?;
    let mut said = [0; 256];
    let count = socket.read(&mut said)?;
    if count == 0 {
        bail!("the connection was closed without a word");
    }
    io::stdout().write_all(&said[..count])?;
    Ok(())
}

/// As [`run`]; the socket is the ring's and has no mark.
fn by_io_uring(arguments: &Arguments) -> Result<()> {
    let mut ring = tokio_uring::uring_builder();
    if let Way::IoUringPolled = arguments.by {
        ring.setup_sqpoll(1000);
    }
    let mut builder = tokio_uring::builder();
    let said = builder.uring_builder(&ring).start(async {
        let talk = async {
            let stream = tokio_uring::net::TcpStream::connect(arguments.to).await?;
            let (count, said) = stream.read(vec![0; 256]).await;
            io::Result::Ok(said[..count?].to_vec())
        };
        tokio::time::timeout(arguments.patience(), talk).await
    })??;
    if said.is_empty() {
        bail!("the connection was closed without a word");
    }
    io::stdout().write_all(&said)?;
    Ok(())
}

fn connect(arguments: &Arguments) -> io::Result<Socket> {
    let to = match (arguments.by, arguments.to.ip()) {
        (Way::Mapped, IpAddr::V4(v4)) => {
            SocketAddr::new(v4.to_ipv6_mapped().into(), arguments.to.port())
        }
        _ => arguments.to,
    };
    let protocol = match arguments.by {
        Way::Mptcp => Protocol::MPTCP,
        _ => Protocol::TCP,
    };
    let (kind, protocol) = if arguments.udp {
        (Type::DGRAM, Protocol::UDP)
    } else {
        (Type::STREAM, protocol)
    };
    let socket = Socket::new(Domain::for_address(to), kind, Some(protocol))?;
    if let Some(through) = arguments.through {
        route(&socket, through, arguments.header)?;
    }
    if let (Way::Reconnect, Some(first)) = (arguments.by, arguments.first) {
        socket.connect_timeout(&first.into(), Duration::from_secs(30))?;
        rustix::net::connect_unspec(&socket)?;
    }
    if let Some(mark) = arguments.mark {
        socket.set_mark(mark)?;
    }
    match arguments.by {
        Way::Fastopen => {
            const MSG_FASTOPEN: i32 = 0x2000_0000;
            socket.send_to_with_flags(b"x", &to.into(), MSG_FASTOPEN)?;
        }
        _ if arguments.udp => {
            socket.send_to(b"escaped", &to.into())?;
        }
        _ => socket.connect_timeout(&to.into(), arguments.patience())?,
    }
    Ok(socket)
}

/// Has the kernel send a socket's packets to `through` first.
fn route(socket: &Socket, through: IpAddr, header: Header) -> io::Result<()> {
    let option = |bytes: Vec<u8>| OsString::from_vec(bytes);
    match through {
        // A loose source route of one address, and an option of one byte without meaning.
        IpAddr::V4(through) => {
            let said = [&[131, 7, 4][..], &through.octets(), &[1]].concat();
            Options.set(socket, &option(said))?;
        }
        IpAddr::V6(through) => {
            let last = match header {
                Header::Segments => 1,
                Header::NoneLeft => 0,
            };
            // The first place, if there are two, is the destination's.
            let before = usize::from(last);
            let words = 2 * (last + 1);
            let mut said = vec![0, words, 4, last, last, 0, 0, 0];
            said.resize(8 + 16 * before, 0);
            said.extend(through.octets());
            RoutingHeader.set(socket, &option(said))?;
        }
    }
    Ok(())
}
