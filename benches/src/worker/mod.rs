//! Clients and servers: processes in the pods' network namespaces and cgroups that live for the
//! whole run. A client takes [`Order`]s as lines on stdin and answers each with a line on stdout,
//! so that nothing is started while something is measured.

mod client;
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

/// What a client shall measure.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Order {
    /// Whom to talk to; of several, one drawn at random for each socket.
    pub to: Vec<SocketAddr>,
    /// How.
    pub transport: Transport,
    /// What.
    pub job: Job,
    /// The name that [`Job::LookUp`] and [`Job::Await`] look up.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
}

/// A measurement.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Job {
    /// Time in µs of a TCP `connect()`; for UDP, whose `connect()` sends nothing, of `connect()`, a
    /// first datagram and its answer. The socket is made before. Outputs: median, 99th percentile.
    Connect {
        /// How many.
        count: u32,
    },
    /// Time in µs of a UDP query as a DNS client makes it: `sendto()` on a new socket that is not
    /// connected, until the answer is received. The socket is made before. Outputs: median, 99th
    /// percentile.
    Query {
        /// How many.
        count: u32,
    },
    /// Time in µs of a round trip of one byte on a connection. Outputs: median, 99th percentile; of
    /// several connections, one after the other, their means. Where the system puts whom on which CPU
    /// it decides anew for each, and a median of all would be that of either kind.
    RoundTrip {
        /// How many on each.
        count: u32,
        /// On so many connections.
        connections: u32,
    },
    /// Sockets per second that connect, exchange one byte and close, from several threads.
    Churn {
        /// How many, over all threads.
        count: u32,
        /// From so many threads.
        threads: u32,
    },
    /// Connections per second that several clients make at the same time, each one after the other: they connect,
    /// exchange one byte and close by FIN. Outputs: the rate, the 99th percentile of the time in µs from
    /// `connect()` to the byte's return, the number of connections.
    Crowd {
        /// How many clients, each a thread.
        clients: u32,
        /// For how long, in milliseconds.
        millis: u32,
    },
    /// UDP datagrams of 64 bytes on one connected socket, at a fixed rate. Outputs: the number of datagrams.
    Paced {
        /// Datagrams per millisecond.
        per_milli: u32,
        /// For how long, in milliseconds.
        millis: u32,
    },
    /// UDP flows that are begun and left: a datagram from each source port to each destination. Outputs: how many.
    Flows {
        /// How many source ports.
        ports: u16,
    },
    /// Gbit/s of payload to the server: a TCP stream; UDP datagrams of 1 400 bytes, each window
    /// of which is acknowledged.
    Bulk {
        /// How many bytes.
        bytes: u64,
    },
    /// Gbit/s of payload to the server on one TCP connection, from when it is under way: what its packets cost. What
    /// makes more of a difference than most paths is left out: what is in flight, once it is more than caches hold,
    /// by buffers that do not grow; and CUBIC, which takes a busy CPU for a full queue and ends its slow start by chance
    /// (`hystart_update` in `net/ipv4/tcp_cubic.c`), from when on it sends small packets: the sender's congestion control
    /// is Reno.
    Steady {
        /// How many bytes.
        bytes: u64,
    },
    /// Time in µs of a lookup as the C library makes it, on a new socket that is connected: `connect()`, the query for an A
    /// record, and its answer. Outputs: median, 99th percentile.
    LookUp {
        /// How many.
        count: u32,
    },
    /// Looks up a name all the time until it has an A record. Outputs: when that was, in ms on the machine's clock.
    Await,
    /// So many TCP connections that were used once and are kept, besides those that are kept already;
    /// answers how many there are.
    Hold {
        /// How many more; 0: all are closed.
        count: u32,
    },
}

/// A client's answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The job's outputs, in the order in which [`Job`] names them.
    Values(Vec<f64>),
    /// What went wrong.
    Error(String),
}

/// Measurements at the start of a job that do not count: caches, neighbour tables, branch
/// predictors.
pub const WARM_UP: u32 = 20;
/// Threads of [`Job::Churn`] where nothing else is said.
pub const CHURN_THREADS: u32 = 2;
/// Payload of a bulk datagram: below the MTU of an overlay network.
const DATAGRAM: usize = 1400;
/// Datagrams before an acknowledgement. 128 of them fit a socket's receive buffer, with overhead.
const WINDOW: u64 = 32;

/// First byte of a TCP connection whose bytes are echoed one by one.
const ECHO: u8 = b'e';
/// First byte of a TCP connection that is answered and kept.
const HOLD: u8 = b'h';
/// First byte of a TCP connection that carries a stream: its length follows as 8 bytes, big-endian.
const STREAM: u8 = b's';
/// Likewise, with [`STEADY_RECEIVE`].
const STEADY: u8 = b'S';
/// Buffers of both ends of a steady stream, in bytes: the kernel doubles them.
const STEADY_SEND: usize = 256 << 10;
const STEADY_RECEIVE: usize = 128 << 10;
/// First byte of a datagram that is not answered.
const SILENT: u8 = b'd';
/// First byte of a datagram that is answered by one byte.
const ANSWERED: u8 = b'a';

/// What a worker is started as.
#[derive(Debug, Subcommand)]
pub enum Worker {
    /// Carries out orders from stdin.
    Client(Client),
    /// Serves until stdin closes.
    Server(Server),
    /// Relays as tokio's `copy_bidirectional` does, until it is killed.
    Relay(crate::relay::Plain),
    /// Imports a file with rules, and says what that cost.
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
    /// TCP port where connections are only made
    #[arg(long)]
    connect_port: u16,
    /// Addresses to listen on
    #[arg(required = true)]
    addresses: Vec<IpAddr>,
}

impl Worker {
    /// Runs it.
    ///
    /// # Errors
    /// If it cannot start.
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

/// Keeps this process, and the threads that it will start, on one CPU, if one was given.
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
