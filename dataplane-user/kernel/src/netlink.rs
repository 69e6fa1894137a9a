//! One exchange after another over netlink (`netlink(7)`; `include/uapi/linux/netlink.h`): requests, dumps, batches of
//! netfilter, and attributes. `rtnetlink` puts types on top; `sock_diag(7)`, the kernel's own conntrack, IPsec policies
//! and nf_tables, whose messages no crate has whole, are spoken in bytes.

use std::{
    io,
    os::fd::{FromRawFd as _, IntoRawFd as _},
    time::Duration,
};

use netlink_sys::Socket;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use socket2::{Domain, Protocol, Type};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::opener;

/// `struct nlmsghdr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Header {
    length: u32,
    kind: u16,
    flags: u16,
    sequence: u32,
    port: u32,
}

const REQUEST: u16 = 1;
const ACK: u16 = 4;
const DUMP: u16 = 0x300;
/// `NLM_F_DUMP_INTR`.
const DUMP_INTERRUPTED: u16 = 0x10;

const ERROR: u16 = 2;
const DONE: u16 = 3;

/// How long the kernel may take to answer: it does so at once.
const PATIENCE: Duration = Duration::from_secs(5);

/// Larger than any datagram of a dump.
const DATAGRAM: usize = 64 * 1024;

/// A socket to one part of the kernel, in the network namespace of the thread that opened it.
pub struct Netlink {
    socket: Socket,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Netlink {
    /// Opens a socket of a protocol (`netlink_sys::protocols`), in the network namespace that this thread is in.
    ///
    /// # Errors
    /// If the kernel has no such protocol (`EPROTONOSUPPORT`), or refuses.
    pub fn open(protocol: isize) -> io::Result<Self> {
        let protocol = i32::try_from(protocol).map_err(io::Error::other)?;
        let (domain, kind) = (Domain::from(libc::AF_NETLINK), Type::DGRAM);
        let socket = opener::socket(domain, kind, Some(Protocol::from(protocol)))?;
        // SAFETY: the descriptor is the new value's alone.
        let socket = unsafe { Socket::from_raw_fd(socket.into_raw_fd()) };
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
        Ok(Self {
            socket,
            sequence: 0,
            buffer: Vec::with_capacity(DATAGRAM),
        })
    }

    /// Makes the kernel filter a dump by all fields of the request (`NETLINK_GET_STRICT_CHK`), and not return all
    /// objects of the kind.
    pub fn filter(&self) -> io::Result<()> {
        self.socket.set_netlink_get_strict_chk(true)
    }

    /// Asks for a list; `each` gets every item.
    ///
    /// # Errors
    /// [`io::ErrorKind::Interrupted`]: the list has changed meanwhile, so `each` may have missed some of it.
    pub fn dump(
        &mut self,
        kind: u16,
        request: &[u8],
        mut each: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        self.dump_kinds(kind, request, |_, item| each(item))
    }

    /// Like [`Netlink::dump`]; `each` also gets the message's kind.
    pub fn dump_kinds(
        &mut self,
        kind: u16,
        request: &[u8],
        mut each: impl FnMut(u16, &[u8]),
    ) -> io::Result<()> {
        self.send(kind, REQUEST | DUMP, request)?;
        self.answers(&mut each)
    }

    /// Asks for something to be done, and whether it was.
    pub fn ask(&mut self, kind: u16, request: &[u8]) -> io::Result<()> {
        self.request(kind, 0, request, |_, _| {})
    }

    /// Asks for one thing; `each` gets it.
    pub fn get(
        &mut self,
        kind: u16,
        request: &[u8],
        mut each: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        self.request(kind, 0, request, |_, answer| each(answer))
    }

    /// Sends one request that the kernel acknowledges, with `flags` besides (`NLM_F_CREATE`…); `each` gets the kind and
    /// the content of every answer.
    pub fn request(
        &mut self,
        kind: u16,
        flags: u16,
        request: &[u8],
        mut each: impl FnMut(u16, &[u8]),
    ) -> io::Result<()> {
        self.send(kind, REQUEST | ACK | flags, request)?;
        self.answers(&mut each)
    }

    /// Asks a netfilter subsystem for several things, all of which are done or none
    /// (`nfnetlink_rcv_batch`). A request is its kind, flags and content.
    pub fn batch(&mut self, subsystem: u16, requests: &[(u16, u16, Vec<u8>)]) -> io::Result<()> {
        const BEGIN: u16 = 0x10; // NFNL_MSG_BATCH_BEGIN
        const END: u16 = 0x11; // NFNL_MSG_BATCH_END
        self.sequence = self.sequence.wrapping_add(1);
        // struct nfgenmsg: any family, version 0, the subsystem in network order.
        let about = [&[0, 0][..], &subsystem.to_be_bytes()].concat();
        let mut bytes = self.message(BEGIN, REQUEST, &about)?;
        for (kind, flags, content) in requests {
            bytes.extend(self.message(*kind, REQUEST | ACK | flags, content)?);
        }
        bytes.extend(self.message(END, REQUEST, &about)?);
        self.socket.send(&bytes, 0)?;
        // Each request is answered, and the batch as a whole where the kernel could not commit it.
        requests
            .iter()
            .try_for_each(|_| self.answers(&mut |_, _| {}))
    }

    fn send(&mut self, kind: u16, flags: u16, request: &[u8]) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let message = self.message(kind, flags, request)?;
        self.socket.send(&message, 0)?;
        Ok(())
    }

    fn message(&self, kind: u16, flags: u16, request: &[u8]) -> io::Result<Vec<u8>> {
        let length = size_of::<Header>() + request.len();
        let header = Header {
            length: u32::try_from(length).map_err(io::Error::other)?,
            kind,
            flags,
            sequence: self.sequence,
            port: 0,
        };
        let mut message = [header.as_bytes(), request].concat();
        message.resize(message.len().next_multiple_of(4), 0);
        Ok(message)
    }

    fn answers(&mut self, each: &mut dyn FnMut(u16, &[u8])) -> io::Result<()> {
        let mut changed = false;
        loop {
            self.buffer.clear();
            let read = match self.socket.recv(&mut self.buffer, libc::MSG_TRUNC) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                read => read?,
            };
            let mut rest = self
                .buffer
                .get(..read)
                .ok_or_else(|| io::Error::other("a netlink answer larger than a dump's are"))?;
            while let Ok((header, _)) = Header::read_from_prefix(rest) {
                let length = header.length as usize;
                let Some(payload) = rest.get(size_of::<Header>()..length) else {
                    break;
                };
                rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
                // The late answer to a question that the caller abandoned.
                if header.sequence != self.sequence {
                    continue;
                }
                changed |= header.flags & DUMP_INTERRUPTED != 0;
                match header.kind {
                    // Both carry an error number; 0 is an acknowledgement, or the end of a list.
                    ERROR | DONE => {
                        let error = i32::read_from_prefix(payload).map_or(0, |(error, _)| error);
                        return match error {
                            0 if changed => Err(io::ErrorKind::Interrupted.into()),
                            0 => Ok(()),
                            error => Err(io::Error::from_raw_os_error(-error)),
                        };
                    }
                    kind => each(kind, payload),
                }
            }
        }
    }
}

/// The attributes in `bytes`: numbers without flags, and contents.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    const FLAGS: u16 = 0xc000; // NLA_F_NESTED, NLA_F_NET_BYTEORDER
    std::iter::from_fn(move || {
        let ([length, kind], _) = <[u16; 2]>::read_from_prefix(bytes).ok()?;
        let length = usize::from(length);
        let content = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind & !FLAGS, content))
    })
}

/// Returns the content of the first attribute of a kind.
pub fn content(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes)
        .find(|(found, _)| *found == kind)
        .map(|(_, content)| content)
}

/// One attribute.
pub fn attribute(kind: u16, content: &[u8]) -> Vec<u8> {
    let length = u16::try_from(4 + content.len()).expect("our attributes are small");
    let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend_from_slice(content);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// One attribute that contains others.
pub fn nested(kind: u16, content: &[u8]) -> Vec<u8> {
    const NESTED: u16 = 0x8000; // NLA_F_NESTED
    attribute(NESTED | kind, content)
}

/// One attribute that is a text, with a zero at its end.
pub fn string(kind: u16, text: &str) -> Vec<u8> {
    attribute(kind, &[text.as_bytes(), &[0]].concat())
}

/// Whether this error says that the kernel has no netfilter, or not the subsystem of it that was asked.
pub fn is_without_netfilter(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EPROTONOSUPPORT | libc::EOPNOTSUPP | libc::EINVAL)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_read_as_they_are_written() {
        let nested = attribute(3, b"xyz");
        let mut bytes = attribute(1, b"abcde");
        bytes.extend(attribute(0x8000 | 2, &nested));
        let read: Vec<_> = attributes(&bytes).collect();
        assert_eq!(read, [(1, &b"abcde"[..]), (2, &nested[..])]);
        assert_eq!(attributes(read[1].1).next(), Some((3, &b"xyz"[..])));
    }

    #[test]
    fn lies_about_lengths_end_it() {
        for bytes in [
            &[0xff, 0xff, 1, 0, 0, 0, 0, 0][..],
            &[3, 0, 1, 0],
            &[4, 0, 1],
            &[],
        ] {
            assert_eq!(attributes(bytes).count(), 0, "{bytes:?}");
        }
    }
}
