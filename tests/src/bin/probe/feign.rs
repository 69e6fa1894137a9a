//! Two sockets of one process: the first sends to the second from an address that the host does not have, and the
//! second answers to this address.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use dataplane_tests::patience;
use socket2::{Domain, Socket, Type};

#[derive(Args)]
pub struct Arguments {
    /// The address to feign, and its port
    #[arg(long, value_name = "ADDRESS:PORT")]
    source: SocketAddr,
    /// An address of the host's own
    #[arg(long, value_name = "ADDRESS")]
    own: IpAddr,
    /// Connect the first socket instead of sending to an address
    #[arg(long)]
    connected: bool,
}

/// Fails if the first socket may not send; or with `cannot answer` if the second may not.
pub fn run(arguments: &Arguments) -> Result<()> {
    let receiver = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))?;
    let limit = std::time::Duration::from_secs(1);
    receiver.set_read_timeout(Some(patience(limit)))?;
    let own = SocketAddr::new(arguments.own, receiver.local_addr()?.port());
    let sender = Socket::new(Domain::IPV6, Type::DGRAM, None)?;
    sender.set_freebind_v6(true)?;
    sender.bind(&arguments.source.into())?;
    let sender = UdpSocket::from(sender);
    if arguments.connected {
        sender.connect(own).context("cannot feign")?;
        sender.send(b"x").context("cannot feign")?;
    } else {
        sender.send_to(b"x", own).context("cannot feign")?;
    }
    let (_, from) = receiver.recv_from(&mut [0; 1]).context("nothing arrives")?;
    ensure!(from == arguments.source, "from {from}");
    receiver.send_to(b"x", from).context("cannot answer")?;
    println!("answered");
    Ok(())
}
