//! UDP clients: one datagram and its answer per attempt.

use std::{
    hint,
    io::{self, IoSlice, Read as _},
    net::{IpAddr, SocketAddr, UdpSocket},
    os::fd::{AsFd as _, AsRawFd as _},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use clap::Args;
use dataplane_tests::{
    patience,
    report::{Attempt, Report},
};
use nix::{
    errno::Errno,
    libc,
    net::if_::if_nametoindex,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sched::{CpuSet, sched_setaffinity},
    sys::socket::{ControlMessage, MsgFlags, SockaddrStorage, sendmsg},
    unistd::Pid,
};
use socket2::{Domain, Protocol, Socket, Type};

use crate::client::{Target, name, ns, parse_greeting, plain};

#[derive(Args)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "flags of a command are independent"
)]
pub struct Arguments {
    #[command(flatten)]
    target: Target,
    /// How many datagrams, one after the other
    #[arg(long, default_value_t = 1)]
    count: u32,
    /// Use sendto(2) on a socket that is not connected, as DNS servers do; connect(2) otherwise
    #[arg(long)]
    unconnected: bool,
    /// Send all datagrams from one socket; a fresh one for each otherwise
    #[arg(long)]
    one_socket: bool,
    /// Connect that one socket again before each datagram
    #[arg(long, requires = "one_socket", conflicts_with = "unconnected")]
    reconnect: bool,
    /// From the datagram with this number on (the first is 0), connect that one socket before each
    #[arg(long, value_name = "NUMBER", requires_all = ["one_socket", "unconnected"])]
    connect_after: Option<u32>,
    /// Name the interface that each datagram is to leave by (IP_PKTINFO, IPV6_PKTINFO)
    #[arg(long, value_name = "NAME", requires = "unconnected")]
    pktinfo: Option<String>,
    /// Send each datagram by a raw socket, from the address and port that the client is bound to
    #[arg(long, requires_all = ["local", "local_port"])]
    raw: bool,
    /// Then send every second datagram by the socket itself
    #[arg(long, requires = "raw", conflicts_with = "deaf")]
    alternate: bool,
    /// Then let no socket take the answers: the kernel answers them with an error
    #[arg(long, requires = "raw")]
    deaf: bool,
    /// Send each datagram from two processors at once, by one socket, and wait for both answers
    #[arg(long, conflicts_with = "raw")]
    twice: bool,
    /// Name the source of each datagram (IP_PKTINFO, IPV6_PKTINFO)
    #[arg(long, value_name = "ADDRESS", conflicts_with = "pktinfo")]
    source: Option<IpAddr>,
    /// Make so many sockets at the one port, send from each in turn, and take the answer from any of them
    #[arg(long, value_name = "SOCKETS", requires_all = ["unconnected", "reuse_port"], conflicts_with = "one_socket")]
    workers: Option<usize>,
    /// After an error, make a new socket in place of that one
    #[arg(long, requires = "one_socket")]
    replace_broken: bool,
    /// Go on until stdin is closed, and ignore the count
    ///
    /// Prints a line when the first datagram is about to be sent.
    #[arg(long)]
    until_stdin_closes: bool,
    /// Then wait so many milliseconds between two datagrams
    #[arg(long, value_name = "MS", default_value_t = 2)]
    pause_ms: u64,
    /// Report every attempt, not only the sum
    #[arg(long)]
    each: bool,
}

impl Arguments {
    /// Whether a socket that was not connected is to be from this datagram on.
    fn connects(&self, number: u32) -> bool {
        self.connect_after.is_some_and(|first| number >= first)
    }
}

pub fn run(arguments: &Arguments) -> Result<()> {
    let mut kept = None;
    let workers = workers(arguments)?;
    let others = Others {
        raw: raw(arguments)?,
        workers,
    };
    let stop = Arc::new(AtomicBool::new(false));
    let count = if arguments.until_stdin_closes {
        let stop = Arc::clone(&stop);
        thread::spawn(move || {
            let _ = io::stdin().read_to_end(&mut Vec::new());
            stop.store(true, Ordering::Relaxed);
        });
        println!("sending");
        u32::MAX
    } else {
        arguments.count
    };
    let attempts = (0..count)
        .zip(arguments.target.addresses())
        .take_while(|_| !stop.load(Ordering::Relaxed))
        .map(|(number, to)| {
            if arguments.until_stdin_closes && number > 0 {
                thread::sleep(Duration::from_millis(arguments.pause_ms));
            }
            let mut attempt = Attempt {
                endpoint: None,
                source: None,
                peer: None,
                local: None,
                from: None,
                error: None,
                latency_ns: 0,
            };
            let result = kept
                .take()
                .map_or_else(
                    || match others.workers.first() {
                        Some(worker) => worker.try_clone(),
                        None => open(arguments, to),
                    },
                    |socket| again(socket, arguments, to, number),
                )
                .and_then(|socket| {
                    let result = exchange(&socket, &others, to, arguments, number, &mut attempt);
                    if arguments.one_socket && !(arguments.replace_broken && result.is_err()) {
                        kept = Some(socket);
                    }
                    result
                });
            attempt.error = result.err().map(|error| name(&error));
            attempt
        })
        .collect();
    println!(
        "{}",
        serde_json::to_string(&Report::of(attempts, arguments.each))?
    );
    Ok(())
}

fn open(arguments: &Arguments, to: SocketAddr) -> io::Result<UdpSocket> {
    let socket = arguments.target.socket(to, Type::DGRAM)?;
    if !arguments.unconnected && !arguments.raw {
        socket.connect(&to.into())?;
    }
    if arguments.deaf {
        // The socket keeps the port, and hears nobody else.
        socket.connect(&socket.local_addr()?)?;
    }
    Ok(socket.into())
}

/// Sends a datagram by an interface or from an address. `is_connected`: without a destination.
fn send_by(
    socket: &UdpSocket,
    payload: &[u8],
    to: SocketAddr,
    (interface, source): (Option<&str>, Option<IpAddr>),
    is_connected: bool,
) -> io::Result<()> {
    let index = interface.map_or(Ok(0), if_nametoindex)?;
    let of_v4 = match source {
        Some(IpAddr::V4(v4)) => u32::from_ne_bytes(v4.octets()),
        _ => 0,
    };
    let of_v6 = match source {
        Some(IpAddr::V6(v6)) => v6.octets(),
        _ => [0; 16],
    };
    let v4 = libc::in_pktinfo {
        ipi_ifindex: index.cast_signed(),
        ipi_spec_dst: libc::in_addr { s_addr: of_v4 },
        ipi_addr: libc::in_addr { s_addr: 0 },
    };
    let v6 = libc::in6_pktinfo {
        ipi6_addr: libc::in6_addr { s6_addr: of_v6 },
        ipi6_ifindex: index,
    };
    let control = match to {
        SocketAddr::V4(_) => ControlMessage::Ipv4PacketInfo(&v4),
        SocketAddr::V6(_) => ControlMessage::Ipv6PacketInfo(&v6),
    };
    let to = SockaddrStorage::from(to);
    let payload = [IoSlice::new(payload)];
    sendmsg(
        socket.as_raw_fd(),
        &payload,
        &[control],
        MsgFlags::empty(),
        (!is_connected).then_some(&to),
    )?;
    Ok(())
}

/// The sockets beside that of an attempt.
struct Others {
    /// Sockets that share a port.
    workers: Vec<UdpSocket>,
    /// A raw socket.
    raw: Option<Socket>,
}

/// Opens the raw socket, at the address that the client is bound to.
fn raw(arguments: &Arguments) -> io::Result<Option<Socket>> {
    let Some(local) = arguments.target.local.filter(|_| arguments.raw) else {
        return Ok(None);
    };
    let bound = SocketAddr::new(local, 0);
    let raw = Socket::new(Domain::for_address(bound), Type::RAW, Some(Protocol::UDP))?;
    raw.bind(&bound.into())?;
    Ok(Some(raw))
}

/// Sends a datagram by a raw socket, from the address and port of another socket.
fn send_raw(raw: &Socket, from: SocketAddr, payload: &[u8], to: SocketAddr) -> io::Result<()> {
    let [from_octets, to_octets] = [from, to].map(|end| match end.ip() {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    });
    let length = u16::try_from(8 + payload.len()).map_err(io::Error::other)?;
    let mut datagram = from.port().to_be_bytes().to_vec();
    for word in [to.port(), length, 0] {
        datagram.extend(word.to_be_bytes());
    }
    datagram.extend(payload);
    // RFC 768; the pseudo headers of both families have the same sum.
    let [high, low] = length.to_be_bytes();
    let summed = [&from_octets[..], &to_octets, &[0, 17, high, low], &datagram].concat();
    let words = summed.chunks(2);
    let mut sum: u32 = words
        .map(|word| u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0)))
        .sum();
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    let sum = u16::try_from(!sum & 0xffff).map_err(io::Error::other)?;
    datagram[6..8].copy_from_slice(&if sum == 0 { 0xffff } else { sum }.to_be_bytes());
    raw.send_to(&datagram, &SocketAddr::new(to.ip(), 0).into())?;
    Ok(())
}

/// Sends a datagram by a socket from two processors at once, so that both begin the flow. `to`: if it is not connected.
fn send_twice(socket: &UdpSocket, payload: &[u8], to: Option<SocketAddr>) -> io::Result<()> {
    const PROCESSORS: usize = 2;
    let processors = thread::available_parallelism()?.get();
    let ready = AtomicUsize::new(0);
    let send = |processor: usize| -> io::Result<()> {
        let mut only = CpuSet::new();
        let pinned = only
            .set(processor % processors)
            .and_then(|()| sched_setaffinity(Pid::from_raw(0), &only));
        // Before any error, because the other thread waits.
        ready.fetch_add(1, Ordering::SeqCst);
        pinned?;
        while ready.load(Ordering::SeqCst) < PROCESSORS {
            hint::spin_loop();
        }
        match to {
            Some(to) => socket.send_to(payload, to),
            None => socket.send(payload),
        }
        .map(drop)
    };
    let send = &send;
    thread::scope(|scope| {
        let all: Vec<_> = (0..PROCESSORS)
            .map(|processor| scope.spawn(move || send(processor)))
            .collect();
        all.into_iter().try_for_each(|one| {
            let result = one.join();
            result.unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
        })
    })
}

/// The sockets that share a port.
fn workers(arguments: &Arguments) -> io::Result<Vec<UdpSocket>> {
    let count = arguments.workers.unwrap_or_default();
    let targets = arguments.target.addresses().take(count);
    targets.map(|to| open(arguments, to)).collect()
}

/// The socket of the last attempt, for the next.
fn again(
    socket: UdpSocket,
    arguments: &Arguments,
    to: SocketAddr,
    number: u32,
) -> io::Result<UdpSocket> {
    if arguments.reconnect || arguments.connects(number) {
        socket.connect(to)?;
    }
    Ok(socket)
}

fn exchange(
    socket: &UdpSocket,
    others: &Others,
    address: SocketAddr,
    arguments: &Arguments,
    number: u32,
    attempt: &mut Attempt,
) -> io::Result<()> {
    let payload = number.to_be_bytes();
    let begin = Instant::now();
    let by_itself = arguments.alternate && !number.is_multiple_of(2);
    let workers = &others.workers;
    if let Some(worker) = workers.get(number as usize % workers.len().max(1)) {
        worker.send_to(&payload, address)?;
    } else if let Some(raw) = others.raw.as_ref().filter(|_| !by_itself) {
        send_raw(raw, socket.local_addr()?, &payload, address)?;
    } else if arguments.pktinfo.is_some() || arguments.source.is_some() {
        let by = (arguments.pktinfo.as_deref(), arguments.source);
        send_by(socket, &payload, address, by, !arguments.unconnected)?;
    } else if arguments.twice {
        let is_connected = !arguments.unconnected || arguments.connects(number);
        send_twice(socket, &payload, (!is_connected).then_some(address))?;
    } else if (arguments.unconnected || by_itself) && !arguments.connects(number) {
        socket.send_to(&payload, address)?;
    } else {
        socket.send(&payload)?;
    }
    let mut buffer = [0; 512];
    let mut missing = 1 + u32::from(arguments.twice);
    loop {
        let (length, from) = if workers.is_empty() {
            socket.recv_from(&mut buffer)?
        } else {
            from_any(workers, arguments.target.timeout_ms, &mut buffer)?
        };
        let took = begin.elapsed();
        let (endpoint, source, echoed) = parse_greeting(&buffer[..length])?;
        if echoed != payload {
            // A late answer to an earlier datagram, which was abandoned.
            continue;
        }
        missing -= 1;
        if missing > 0 {
            continue;
        }
        attempt.endpoint = Some(endpoint);
        attempt.source = Some(source);
        attempt.from = Some(plain(from));
        attempt.peer = socket.peer_addr().ok().map(plain);
        attempt.local = socket.local_addr().ok().map(plain);
        attempt.latency_ns = ns(took);
        return Ok(());
    }
}

/// Receives the next datagram of any of the sockets.
fn from_any(
    sockets: &[UdpSocket],
    timeout_ms: u64,
    buffer: &mut [u8],
) -> io::Result<(usize, SocketAddr)> {
    let mut polled: Vec<_> = sockets
        .iter()
        .map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN))
        .collect();
    let limit = patience(Duration::from_millis(timeout_ms));
    poll(
        &mut polled,
        PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX),
    )?;
    let ready = polled.iter().position(|one| one.any() == Some(true));
    let socket = ready.map(|index| &sockets[index]);
    socket
        .ok_or(io::Error::from(Errno::EAGAIN))?
        .recv_from(buffer)
}
