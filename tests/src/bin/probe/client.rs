//! The parts that clients share: sockets with time limits, and errors by errno's names.

use std::{
    io::{self, Read as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use clap::Args;
use dataplane_tests::patience;
use nix::{errno::Errno, time::ClockId};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

/// Where to, and how.
#[expect(clippy::struct_excessive_bools, reason = "each is a flag")]
#[derive(Args)]
pub struct Target {
    /// The address to connect to; several take turns
    #[arg(long, value_name = "ADDRESS:PORT", required = true)]
    to: Vec<SocketAddr>,
    /// Bind the client to this address first
    #[arg(long, value_name = "ADDRESS")]
    pub local: Option<IpAddr>,
    /// Bind each socket to the address after that of the socket before
    #[arg(long, requires = "local")]
    local_next: bool,
    /// How many sockets were made
    #[arg(skip)]
    sockets: AtomicU32,
    /// Bind each socket to this port first; several sockets may have it
    #[arg(long, value_name = "PORT")]
    local_port: Option<u16>,
    /// Let other sockets share the port (SO_REUSEPORT)
    #[arg(long, requires = "local_port")]
    reuse_port: bool,
    /// Use an IPv6 socket to reach an IPv4 address (as ::ffff:a.b.c.d), as Java and Go servers do
    #[arg(long)]
    pub v4_mapped: bool,
    /// Bind to an address that the host does not have (IP_TRANSPARENT, IPV6_FREEBIND)
    #[arg(long)]
    pub feign: bool,
    /// Use MPTCP
    #[arg(long)]
    mptcp: bool,
    /// Connect each TCP socket to this address first, whether that succeeds or not
    #[arg(long, value_name = "ADDRESS:PORT")]
    first: Option<SocketAddr>,
    /// Give up after so many milliseconds without an answer
    #[arg(long, value_name = "MS", default_value_t = 3000)]
    pub timeout_ms: u64,
}

impl Target {
    /// The options for one address.
    pub fn one(to: SocketAddr, timeout_ms: u64) -> Self {
        Self {
            to: vec![to],
            local: None,
            local_next: false,
            sockets: AtomicU32::new(0),
            local_port: None,
            reuse_port: false,
            v4_mapped: false,
            feign: false,
            mptcp: false,
            first: None,
            timeout_ms,
        }
    }

    /// The addresses as they are to be handed to the kernel, again and again in turn.
    pub fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.to.iter().map(|address| self.map(*address)).cycle()
    }

    /// A v4-mapped client's addresses are v6 addresses; other clients' stay.
    fn map(&self, address: SocketAddr) -> SocketAddr {
        match address {
            SocketAddr::V4(v4) if self.v4_mapped => {
                SocketAddrV6::new(v4.ip().to_ipv6_mapped(), v4.port(), 0, 0).into()
            }
            other => other,
        }
    }

    /// The address to bind the next socket to.
    fn next_local(&self) -> Option<IpAddr> {
        let step = if self.local_next {
            self.sockets.fetch_add(1, Ordering::Relaxed)
        } else {
            0
        };
        Some(match self.local? {
            IpAddr::V4(first) => Ipv4Addr::from_bits(first.to_bits() + step).into(),
            IpAddr::V6(first) => Ipv6Addr::from_bits(first.to_bits() + u128::from(step)).into(),
        })
    }

    /// A socket that gives up after the time limit.
    pub fn socket(&self, to: SocketAddr, kind: Type) -> io::Result<Socket> {
        let mptcp = self.mptcp.then_some(Protocol::MPTCP);
        let socket = Socket::new(Domain::for_address(to), kind, mptcp)?;
        if self.v4_mapped {
            socket.set_only_v6(false)?;
        }
        if self.feign && to.is_ipv4() {
            socket.set_ip_transparent_v4(true)?;
        } else if self.feign {
            socket.set_freebind_v6(true)?;
        }
        let limit = Duration::from_millis(self.timeout_ms.max(1));
        // On a machine where every packet takes ten times as long, a fixed limit would count slow answers as lost.
        let limit = Some(patience(limit));
        // connect(2) obeys the limit for sending.
        socket.set_write_timeout(limit)?;
        socket.set_read_timeout(limit)?;
        if self.local.is_some() || self.local_port.is_some() {
            let any: IpAddr = match to {
                SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
            };
            let local = self
                .next_local()
                .map_or(any, |local| self.map(SocketAddr::new(local, 0)).ip());
            socket.set_reuse_address(self.local_port.is_some())?;
            socket.set_reuse_port(self.reuse_port)?;
            let port = self.local_port.unwrap_or_default();
            socket.bind(&SocketAddr::new(local, port).into())?;
        }
        Ok(socket)
    }

    /// Connects over TCP.
    pub fn connect(&self, to: SocketAddr) -> Connect {
        let socket = match self.socket(to, Type::STREAM) {
            Ok(socket) => socket,
            Err(error) => {
                return Connect {
                    socket: Err(error),
                    started_at_ns: now_ns(),
                    took_ns: 0,
                };
            }
        };
        if let Some(first) = self.first {
            let _ = socket.connect(&first.into());
        }
        let address = SockAddr::from(to);
        let started_at_ns = now_ns();
        let result = socket.connect(&address);
        let took_ns = now_ns() - started_at_ns;
        Connect {
            socket: result.map(|()| socket),
            started_at_ns,
            took_ns,
        }
    }
}

/// The outcome of a connect(2), and when it happened.
pub struct Connect {
    pub socket: io::Result<Socket>,
    /// Right before the call: the making of the socket is not in it.
    pub started_at_ns: u64,
    pub took_ns: u64,
}

/// An error as errno(3) names it; a time limit that passed is `TIMEOUT`.
pub fn name(error: &io::Error) -> String {
    match error.raw_os_error().map(Errno::from_raw) {
        // The errors of a blocking connect(2) and recv(2) after the time limit.
        Some(Errno::EINPROGRESS | Errno::EAGAIN) => "TIMEOUT".into(),
        Some(errno) => format!("{errno:?}"),
        None if error.kind() == io::ErrorKind::UnexpectedEof => "EOF".into(),
        None => error.to_string(),
    }
}

/// The machine's monotonic clock in nanoseconds, which all processes share.
pub fn now_ns() -> u64 {
    let now = ClockId::CLOCK_MONOTONIC
        .now()
        .expect("Linux has a monotonic clock");
    Duration::from(now)
        .as_nanos()
        .try_into()
        .unwrap_or(u64::MAX)
}

/// A duration in nanoseconds.
pub fn ns(duration: Duration) -> u64 {
    duration.as_nanos().try_into().unwrap_or(u64::MAX)
}

/// Reads the greeting line of an endpoint of `probe serve`: its name, and the client as it sees it.
pub fn read_greeting(mut socket: &Socket) -> io::Result<(String, SocketAddr)> {
    let mut buffer = [0; 256];
    let mut filled = 0;
    loop {
        let read = socket.read(&mut buffer[filled..])?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        filled += read;
        if buffer[..filled].contains(&b'\n') {
            return parse_greeting(&buffer[..filled]).map(|(name, client, _)| (name, client));
        }
    }
}

/// Splits a greeting, or an answer to a datagram, into name, client, and the rest.
pub fn parse_greeting(answer: &[u8]) -> io::Result<(String, SocketAddr, &[u8])> {
    let parsed = || {
        let end = answer.iter().position(|&byte| byte == b'\n')?;
        let line = str::from_utf8(&answer[..end]).ok()?;
        let (name, client) = line.rsplit_once(' ')?;
        Some((name.to_owned(), client.parse().ok()?, &answer[end + 1..]))
    };
    parsed().ok_or_else(|| io::Error::other("not the greeting of an endpoint"))
}

/// getpeername(2), with a v4-mapped address as a v4 one.
pub fn peer(socket: &Socket) -> Option<SocketAddr> {
    socket
        .peer_addr()
        .ok()
        .and_then(|address| address.as_socket())
        .map(plain)
}

/// getsockname(2), with a v4-mapped address as a v4 one.
pub fn local(socket: &Socket) -> Option<SocketAddr> {
    socket
        .local_addr()
        .ok()
        .and_then(|address| address.as_socket())
        .map(plain)
}

/// Returns a v4-mapped address as a v4 one.
pub fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greeting_is_taken_apart() {
        let (name, client, rest) = parse_greeting(b"a b [fd00::1]:5\nrest\n").unwrap();
        assert_eq!(
            (name.as_str(), client),
            ("a b", "[fd00::1]:5".parse().unwrap())
        );
        assert_eq!(rest, b"rest\n");
        for foreign in [
            &b"a 10.0.0.1:5"[..],
            b"\n",
            b"a\n",
            b"a 10.0.0.1\n",
            b"\xff 1.1.1.1:1\n",
        ] {
            assert!(parse_greeting(foreign).is_err());
        }
    }

    #[test]
    fn errors_have_the_names_of_errno() {
        assert_eq!(name(&Errno::ECONNREFUSED.into()), "ECONNREFUSED");
        assert_eq!(name(&Errno::EINPROGRESS.into()), "TIMEOUT");
    }
}
