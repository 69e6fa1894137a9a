//! Several datagrams with one system call.

use std::{
    io::{self, IoSlice, IoSliceMut},
    net::SocketAddr,
    os::fd::AsRawFd,
};

use nix::sys::socket::{
    ControlMessage, MsgFlags, MultiHeaders, SockaddrStorage, recvmmsg, sendmmsg,
};

/// How many datagrams one call takes.
pub const BATCH: usize = 32;
/// The longest query. Longer ones are cut, and malformed.
const LONGEST: usize = 4096;

/// Room for the datagrams of a call.
pub struct Batch {
    buffers: Vec<Box<[u8]>>,
    /// For sockets of IPv4 and of IPv6: the kernel leaves the length of an address there, as the room for the next.
    received: [MultiHeaders<SockaddrStorage>; 2],
    sent: MultiHeaders<SockaddrStorage>,
}

impl Batch {
    /// Room for [`BATCH`] datagrams.
    pub fn new() -> Self {
        Self {
            buffers: (0..BATCH).map(|_| vec![0; LONGEST].into()).collect(),
            received: [(); 2].map(|()| MultiHeaders::preallocate(BATCH, None)),
            sent: MultiHeaders::preallocate(BATCH, None),
        }
    }

    /// Receives the waiting datagrams, and passes each of them to `take`. `v4`: the socket's family.
    ///
    /// # Errors
    ///
    /// No datagram is waiting, or the socket has an error.
    pub fn receive(
        &mut self,
        socket: &impl AsRawFd,
        v4: bool,
        mut take: impl FnMut(&[u8], SocketAddr),
    ) -> io::Result<()> {
        let buffers = self.buffers.iter_mut();
        let mut slices: Vec<_> = buffers.map(|of| [IoSliceMut::new(of)]).collect();
        let flags = MsgFlags::MSG_DONTWAIT;
        let messages = recvmmsg(
            socket.as_raw_fd(),
            &mut self.received[usize::from(v4)],
            slices.iter_mut(),
            flags,
            None,
        )?;
        for message in messages {
            let from = message.address.as_ref().and_then(address);
            if let (Some(bytes), Some(from)) = (message.iovs().next(), from) {
                take(bytes, from);
            }
        }
        Ok(())
    }

    /// Sends up to [`BATCH`] messages. A message that does not fit into the socket's buffer is lost, like any datagram.
    pub fn send(&mut self, socket: &impl AsRawFd, messages: &[(Vec<u8>, SocketAddr)]) {
        let slices: Vec<_> = messages
            .iter()
            .map(|(bytes, _)| [IoSlice::new(bytes)])
            .collect();
        let addresses = messages.iter();
        let addresses: Vec<_> = addresses
            .map(|(_, to)| Some(SockaddrStorage::from(*to)))
            .collect();
        let (flags, none) = (MsgFlags::MSG_DONTWAIT, <[ControlMessage; 0]>::default());
        let sent = sendmmsg(
            socket.as_raw_fd(),
            &mut self.sent,
            &slices,
            &addresses,
            none,
            flags,
        );
        if let Err(error) = sent {
            tracing::debug!("cannot send answers: {error}");
        }
    }
}

fn address(storage: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = storage
        .as_sockaddr_in()
        .map(|of| SocketAddr::V4((*of).into()));
    v4.or_else(|| {
        storage
            .as_sockaddr_in6()
            .map(|of| SocketAddr::V6((*of).into()))
    })
}
