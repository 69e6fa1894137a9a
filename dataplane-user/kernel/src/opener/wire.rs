//! The messages between the agent and its opener: one packet each, of a fixed size, with descriptors.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use zerocopy::{FromBytes, FromZeros as _, Immutable, IntoBytes, KnownLayout};

/// Descriptors in one packet, at most. (The kernel takes up to 253.)
pub const DESCRIPTORS: usize = 16;

/// A table in `/proc/net`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// Sockets of TCP by IPv4.
    Tcp,
    /// Sockets of TCP by IPv6.
    Tcp6,
    /// The names of iptables' legacy tables that are in use.
    IptablesNames,
    /// The names of ip6tables' legacy tables that are in use.
    Ip6tablesNames,
}

impl Table {
    /// Its file, of the network namespace of the thread that opens it.
    pub const fn path(self) -> &'static str {
        match self {
            Self::Tcp => "/proc/thread-self/net/tcp",
            Self::Tcp6 => "/proc/thread-self/net/tcp6",
            Self::IptablesNames => "/proc/thread-self/net/ip_tables_names",
            Self::Ip6tablesNames => "/proc/thread-self/net/ip6_tables_names",
        }
    }
}

/// The requests. The first four are about the network namespace whose descriptor comes along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Whether the opener can enter it.
    Enter,
    /// Sockets there.
    Sockets {
        /// `AF_INET`…
        domain: i32,
        /// `SOCK_STREAM`…, with `SOCK_NONBLOCK`.
        kind: i32,
        /// `NETLINK_ROUTE`…
        protocol: i32,
        /// How many, up to [`DESCRIPTORS`].
        count: usize,
    },
    /// One of its tables, to read.
    Table(Table),
    /// The sysctls by which answers have marks, to write.
    MarkSettings,
    /// A map of BPF by its id.
    Map(u32),
    /// A program of BPF by its id.
    Program(u32),
    /// To mount a BPF file system where it is usually.
    Mount,
}

/// A request, as it is sent.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Packet {
    what: u32,
    arguments: [i32; 4],
}

impl From<Request> for Packet {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        reason = "at most 16"
    )]
    fn from(request: Request) -> Self {
        let (what, arguments) = match request {
            Request::Enter => (0, [0; 4]),
            Request::Sockets {
                domain,
                kind,
                protocol,
                count,
            } => (1, [domain, kind, protocol, count as i32]),
            Request::Table(Table::Tcp) => (2, [0; 4]),
            Request::Table(Table::Tcp6) => (3, [0; 4]),
            Request::MarkSettings => (4, [0; 4]),
            Request::Map(id) => (5, [id.cast_signed(), 0, 0, 0]),
            Request::Program(id) => (6, [id.cast_signed(), 0, 0, 0]),
            Request::Mount => (7, [0; 4]),
            Request::Table(Table::IptablesNames) => (8, [0; 4]),
            Request::Table(Table::Ip6tablesNames) => (9, [0; 4]),
        };
        Self { what, arguments }
    }
}

impl Packet {
    fn request(self) -> Option<Request> {
        let [first, second, third, fourth] = self.arguments;
        let count = usize::try_from(fourth).ok();
        let count = count.filter(|count| (1..=DESCRIPTORS).contains(count));
        Some(match self.what {
            0 => Request::Enter,
            1 => Request::Sockets {
                domain: first,
                kind: second,
                protocol: third,
                count: count?,
            },
            2 => Request::Table(Table::Tcp),
            3 => Request::Table(Table::Tcp6),
            4 => Request::MarkSettings,
            5 => Request::Map(first.cast_unsigned()),
            6 => Request::Program(first.cast_unsigned()),
            7 => Request::Mount,
            8 => Request::Table(Table::IptablesNames),
            9 => Request::Table(Table::Ip6tablesNames),
            _ => return None,
        })
    }
}

/// An answer, as it is sent: the kernel's error, or 0.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Answer {
    error: i32,
}

/// Sends a request, about a network namespace where it is about one.
pub fn send(to: impl AsFd, request: Request, namespace: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let namespace = namespace.as_ref().map(std::slice::from_ref);
    send_packet(
        to,
        Packet::from(request).as_bytes(),
        namespace.unwrap_or_default(),
    )
}

/// Receives a request, and the descriptor sent with it. Returns `None` if the agent has ended.
///
/// # Errors
/// If the message is not a request, or cannot be received.
pub fn receive(from: impl AsFd) -> io::Result<Option<(Request, Option<OwnedFd>)>> {
    let mut packet = Packet::new_zeroed();
    let (length, mut descriptors) = receive_packet(from, packet.as_mut_bytes())?;
    if length == 0 {
        return Ok(None);
    }
    let request = packet.request().filter(|_| length == size_of::<Packet>());
    let request = request.ok_or(io::ErrorKind::InvalidData)?;
    Ok(Some((request, descriptors.pop())))
}

/// Sends an answer.
pub fn reply(to: impl AsFd, result: &io::Result<Vec<OwnedFd>>) -> io::Result<()> {
    let (error, descriptors) = match result {
        Ok(descriptors) => (0, &descriptors[..]),
        Err(error) => (error.raw_os_error().unwrap_or(libc::EIO), &[][..]),
    };
    let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
    send_packet(to, Answer { error }.as_bytes(), &descriptors)
}

/// Receives an answer.
///
/// # Errors
/// If the opener has ended.
pub fn answer(from: impl AsFd) -> io::Result<io::Result<Vec<OwnedFd>>> {
    let mut answer = Answer::new_zeroed();
    let (length, descriptors) = receive_packet(from, answer.as_mut_bytes())?;
    if length != size_of::<Answer>() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(match answer.error {
        0 => Ok(descriptors),
        error => Err(io::Error::from_raw_os_error(error)),
    })
}

fn send_packet(to: impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    sendmsg(
        to,
        &[IoSlice::new(bytes)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

fn receive_packet(from: impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut bytes = [IoSliceMut::new(bytes)];
        match recvmsg(&from, &mut bytes, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            received => break received?,
        }
    };
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            descriptors.extend(more);
        }
    }
    // Too long a packet, or no file left for the descriptors.
    if received
        .flags
        .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
    {
        return Err(io::Error::from_raw_os_error(libc::EMFILE));
    }
    Ok((received.bytes, descriptors))
}

#[cfg(test)]
mod tests {
    use std::{
        env,
        fs::{self, File},
        os::unix::net::UnixDatagram,
    };

    use rand::{RngExt as _, SeedableRng as _, rngs::SmallRng};

    use super::*;

    #[test]
    fn a_request_arrives_as_it_was_sent() {
        let (agent, opener) = UnixDatagram::pair().unwrap();
        let file = File::open("/proc/self/ns/net").unwrap();
        let sockets = Request::Sockets {
            domain: libc::AF_NETLINK,
            kind: libc::SOCK_DGRAM | libc::SOCK_NONBLOCK,
            protocol: 4,
            count: DESCRIPTORS,
        };
        for request in [
            Request::Enter,
            sockets,
            Request::Table(Table::Tcp),
            Request::Table(Table::Tcp6),
            Request::Table(Table::IptablesNames),
            Request::Table(Table::Ip6tablesNames),
            Request::MarkSettings,
            Request::Map(u32::MAX),
            Request::Program(7),
            Request::Mount,
        ] {
            send(&agent, request, Some(file.as_fd())).unwrap();
            let (received, namespace) = receive(&opener).unwrap().unwrap();
            assert_eq!(received, request);
            assert!(namespace.is_some());
            send(&agent, request, None).unwrap();
            assert!(receive(&opener).unwrap().unwrap().1.is_none());
        }
        let files = (0..DESCRIPTORS).map(|_| file.try_clone().unwrap().into());
        reply(&opener, &Ok(files.collect())).unwrap();
        assert_eq!(answer(&agent).unwrap().unwrap().len(), DESCRIPTORS);
        let refused = Err(io::Error::from_raw_os_error(libc::EPERM));
        reply(&opener, &refused).unwrap();
        let error = answer(&agent).unwrap().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPERM));
    }

    /// For any bytes from the agent, also once an attacker runs in it, the opener gets a request that it knows, or
    /// none.
    #[test]
    fn any_bytes_are_a_request_or_an_error() {
        let (agent, opener) = UnixDatagram::pair().unwrap();
        let file = File::open("/proc/self/ns/net").unwrap();
        let mut random = SmallRng::seed_from_u64(28);
        let runs = env::var("DATAPLANE_FUZZ_RUNS").map_or(20_000, |runs| runs.parse().unwrap());
        let open = || fs::read_dir("/proc/self/fd").unwrap().count();
        let (before, mut requests) = (open(), 0);
        for _ in 0..runs {
            let length = match random.random_range(0..4) {
                0 => random.random_range(1..40),
                _ => size_of::<Packet>(),
            };
            // Small numbers, which most fields have.
            let mut bytes: Vec<u8> = (0..length)
                .map(|at| {
                    if at % 4 == 0 {
                        random.random_range(0..12)
                    } else {
                        0
                    }
                })
                .collect();
            if random.random_bool(0.5) {
                bytes[random.random_range(0..length)] = random.random();
            }
            let files = vec![file.as_fd(); random.random_range(0..=DESCRIPTORS)];
            send_packet(&agent, &bytes, &files).unwrap();
            if let Ok(request) = receive(&opener) {
                let (request, namespace) = request.unwrap();
                assert_eq!(namespace.is_some(), !files.is_empty());
                if let Request::Sockets { count, .. } = request {
                    assert!((1..=DESCRIPTORS).contains(&count));
                }
                requests += 1;
            }
        }
        assert!(requests > runs / 10, "{requests} requests of {runs}");
        // Other tests open some meanwhile.
        assert!(open() < before + 200, "descriptors are left");
    }

    #[test]
    fn what_is_no_request_is_refused() {
        let (agent, opener) = UnixDatagram::pair().unwrap();
        let all = Packet {
            what: 1,
            arguments: [2, 1, 0, 0],
        };
        let none = Packet { what: 10, ..all };
        let many = Packet {
            arguments: [2, 1, 0, 17],
            ..all
        };
        let negative = Packet {
            arguments: [2, 1, 0, -1],
            ..all
        };
        for packet in [all, none, many, negative] {
            agent.send(packet.as_bytes()).unwrap();
            assert!(receive(&opener).is_err(), "{packet:?}");
        }
        for bytes in [&all.as_bytes()[1..], &[0; 64][..]] {
            agent.send(bytes).unwrap();
            assert!(receive(&opener).is_err(), "{bytes:?}");
        }
    }
}
