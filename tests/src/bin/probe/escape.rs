//! Connects as those do who want to get past capture.

use std::{
    io::{self, Read as _, Write as _},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
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
    /// The mark of the socket (`SO_MARK`)
    #[arg(long)]
    mark: Option<u32>,
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
    /// `IORING_OP_CONNECT` of an io_uring
    IoUring,
    /// The same, submitted by a thread of the kernel's (`IORING_SETUP_SQPOLL`)
    IoUringPolled,
}

const PATIENCE: Duration = Duration::from_secs(3);

/// Prints what the other side says. Fails if it is not reached.
pub fn run(arguments: &Arguments) -> Result<()> {
    if let Way::IoUring | Way::IoUringPolled = arguments.by {
        return by_io_uring(arguments);
    }
    let mut socket = connect(arguments)?;
    socket.set_read_timeout(Some(PATIENCE))?;
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
        tokio::time::timeout(PATIENCE, talk).await
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
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(protocol))?;
    if let (Way::Reconnect, Some(first)) = (arguments.by, arguments.first) {
        socket.connect_timeout(&first.into(), PATIENCE)?;
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
        _ => socket.connect_timeout(&to.into(), PATIENCE)?,
    }
    Ok(socket)
}
