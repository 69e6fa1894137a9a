//! Clients and servers: processes in the pods' network namespaces and cgroups that run as long as the benchmark. A
//! client reads [`Order`]s as lines on stdin and answers each with a line on stdout, so that no process starts during a
//! measurement.

mod client;
mod handshake;
mod server;

use std::net::{IpAddr, SocketAddr};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};
use serde::{Deserialize, Serialize};
use socket2::{Domain, Protocol, Socket, Type};

/// TCP or UDP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// An order for a client to measure something.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Order {
    /// The destinations. For each socket the client chooses one at random.
    pub to: Vec<SocketAddr>,
    /// The transport protocol.
    pub transport: Transport,
    /// The measurement.
    pub job: Job,
    /// The name that [`Job::LookUp`] and [`Job::Await`] look up; the file with the certificate and the key of
    /// [`Job::Handshake`].
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
}

/// A measurement.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Job {
    /// Time in µs of a TCP `connect()`. For UDP, whose `connect()` sends nothing, time of `connect()`, a first datagram
    /// and its answer. The socket is made before. Outputs: median, 99th percentile.
    Connect {
        /// Number of connections.
        count: u32,
    },
    /// Time in µs of a UDP query like a DNS client's: from `sendto()` on a new, unconnected socket until the answer is
    /// received. The socket is made before. Outputs: median, 99th percentile.
    Query {
        /// Number of queries.
        count: u32,
    },
    /// Time in µs of a round trip of one byte on a connection. Outputs: median, 99th percentile. With several
    /// connections, one after the other, the outputs are the means of the connections' values. The system places the
    /// processes on CPUs anew for each connection, so a median over all round trips would show only the more frequent
    /// placement.
    RoundTrip {
        /// Round trips on each connection.
        count: u32,
        /// Number of connections.
        connections: u32,
    },
    /// Sockets per second that connect, exchange one byte and close, from several threads.
    Churn {
        /// Number of sockets of all threads together.
        count: u32,
        /// Number of threads.
        threads: u32,
    },
    /// Handshakes of TLS and HTTP/2 per second, with certificates of both sides and without resumption, from several threads.
    Handshake {
        /// Number of handshakes of all threads together.
        count: u32,
        /// Number of threads.
        threads: u32,
    },
    /// Connections per second of several simultaneous clients, each of which makes one connection after the other:
    /// connect, exchange one byte, close by FIN. Outputs: the rate, the 99th percentile of the time in µs from
    /// `connect()` to the byte's return, the number of connections.
    Crowd {
        /// Number of clients, each a thread.
        clients: u32,
        /// Duration in milliseconds.
        millis: u32,
    },
    /// UDP datagrams of 64 bytes on one connected socket, at a fixed rate. Outputs: the number of datagrams.
    Paced {
        /// Datagrams per millisecond.
        per_milli: u32,
        /// Duration in milliseconds.
        millis: u32,
    },
    /// UDP flows without a second packet: one datagram from each source port to each destination. Outputs: the number
    /// of flows.
    Flows {
        /// Number of source ports.
        ports: u16,
    },
    /// Gbit/s of payload to the server: a TCP stream, or UDP datagrams of 1 400 bytes with an acknowledgement for each
    /// window.
    Bulk {
        /// Number of bytes.
        bytes: u64,
    },
    /// Gbit/s of payload to the server on one TCP connection after a warm-up: the cost of its packets. Two effects that
    /// are larger than the difference between most paths are excluded:
    ///
    /// * Data in flight that exceeds the CPU's caches: the sockets' buffers do not grow.
    /// * CUBIC, which takes a busy CPU for a full queue and ends its slow start at a random moment (`hystart_update` in
    ///   `net/ipv4/tcp_cubic.c`); from then on it sends small packets. The sender's congestion control is Reno.
    Steady {
        /// Number of bytes.
        bytes: u64,
    },
    /// Time in µs of a lookup as the C library makes it: `connect()` of a new socket, the query for an A record, and
    /// its answer. Outputs: median, 99th percentile.
    LookUp {
        /// Number of lookups.
        count: u32,
    },
    /// Repeats a lookup until the name has an A record. Outputs: when the name had it, in ms on the machine's clock.
    Await,
    /// Makes TCP connections, uses each once, and holds them open in addition to the connections already held. Outputs:
    /// the number of open connections.
    Hold {
        /// Number of additional connections. 0 closes all connections.
        count: u32,
    },
}

/// A client's answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The job's outputs, in the order in which [`Job`] lists them.
    Values(Vec<f64>),
    /// The error.
    Error(String),
}

/// Number of measurements at the start of a job that do not count. They warm up caches, neighbour tables and branch
/// predictors.
pub const WARM_UP: u32 = 20;
/// Default number of threads of [`Job::Churn`].
pub const CHURN_THREADS: u32 = 2;
/// Payload of a bulk datagram, in bytes. It is below the MTU of an overlay network.
const DATAGRAM: usize = 1400;
/// Number of datagrams before an acknowledgement. 128 of them, with overhead, fit into a socket's receive buffer.
const WINDOW: u64 = 32;

/// First byte of a TCP connection whose bytes the server echoes one by one.
const ECHO: u8 = b'e';
/// First byte of a TCP connection that the server answers and holds open.
const HOLD: u8 = b'h';
/// First byte of a TCP connection that carries a stream. The stream's length follows as 8 bytes, big-endian.
const STREAM: u8 = b's';
/// First byte of a TCP connection that carries a stream, with a receive buffer of [`STEADY_RECEIVE`].
const STEADY: u8 = b'S';
/// Buffers of both ends of a steady stream, in bytes. The kernel doubles these values.
const STEADY_SEND: usize = 256 << 10;
const STEADY_RECEIVE: usize = 128 << 10;
/// First byte of a datagram that the server does not answer.
const SILENT: u8 = b'd';
/// First byte of a datagram that the server answers by one byte.
const ANSWERED: u8 = b'a';

/// The kind of worker.
#[derive(Debug, Subcommand)]
pub enum Worker {
    /// Carries out orders from stdin.
    Client(Client),
    /// Serves until stdin closes.
    Server(Server),
    /// Relays as tokio's `copy_bidirectional` does, until it is killed.
    Relay(crate::relay::Plain),
    /// Imports a file with rules, and reports the cost.
    Import(crate::import::Import),
}

/// Arguments of a client.
#[derive(Debug, Args)]
pub struct Client {
    /// CPU to run on [default: any]
    #[arg(long)]
    cpu: Option<usize>,
}

/// Arguments of a server.
#[derive(Debug, Args)]
pub struct Server {
    /// CPU to run on [default: any]
    #[arg(long)]
    cpu: Option<usize>,
    /// Connections that are served at the same time, at each address
    #[arg(long, default_value_t = CHURN_THREADS)]
    threads: u32,
    /// Port, for TCP and UDP
    #[arg(long)]
    port: u16,
    /// TCP port at which clients only connect
    #[arg(long)]
    connect_port: u16,
    /// Addresses to listen on
    #[arg(required = true)]
    addresses: Vec<IpAddr>,
}

impl Worker {
    /// Runs the worker.
    ///
    /// # Errors
    /// Fails if it cannot start.
    pub fn run(&self) -> anyhow::Result<()> {
        match self {
            Self::Relay(relay) => relay.run(),
            Self::Import(import) => import.run(),
            Self::Client(Client { cpu }) => {
                pin(*cpu)?;
                client::run()
            }
            Self::Server(Server {
                cpu,
                threads,
                port,
                connect_port,
                addresses,
            }) => {
                pin(*cpu)?;
                server::run(addresses, *port, *connect_port, *threads)
            }
        }
    }
}

/// Restricts this process, and the threads that it will start, to `cpu`. Does nothing for `None`.
fn pin(cpu: Option<usize>) -> anyhow::Result<()> {
    let Some(cpu) = cpu else { return Ok(()) };
    let mut set = CpuSet::new();
    set.set(cpu)?;
    sched_setaffinity(Pid::from_raw(0), &set).with_context(|| format!("cannot run on CPU {cpu}"))
}

fn socket(addr: IpAddr, transport: Transport) -> std::io::Result<Socket> {
    let domain = if addr.is_ipv4() {
        Domain::IPV4
    } else {
        Domain::IPV6
    };
    match transport {
        Transport::Tcp => Socket::new(domain, Type::STREAM, Some(Protocol::TCP)),
        Transport::Udp => Socket::new(domain, Type::DGRAM, Some(Protocol::UDP)),
    }
}
