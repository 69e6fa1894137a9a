//! Connecting plain sockets in the network namespace of a workload.

use std::{io, net::SocketAddr, os::fd::OwnedFd};

use relay::{
    Attached,
    socket::{self, Manner},
};
use tokio::net::TcpStream;

/// Connects in the workload's network namespace.
///
/// # Errors
/// The kernel's error.
pub async fn dial(attached: &Attached, to: SocketAddr, manner: Manner) -> io::Result<TcpStream> {
    let socket = socket::connect(to, manner, || open(attached, to.is_ipv4()))?;
    let socket = TcpStream::from_std(socket.into())?;
    socket.writable().await?;
    match socket.take_error()? {
        Some(error) => Err(error),
        None => Ok(socket),
    }
}

fn open(attached: &Attached, v4: bool) -> io::Result<OwnedFd> {
    let Some(namespace) = &attached.namespace else {
        return socket::new(v4);
    };
    let opened = (namespace.open)(v4, 1)?.pop();
    opened.ok_or_else(|| io::Error::other("no socket was opened"))
}
