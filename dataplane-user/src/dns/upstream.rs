//! Resolvers: which of them is asked, by which transport, and what counts as an answer.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use hickory_proto::op::ResponseCode;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, UdpSocket},
    time::timeout_at,
};

use super::{
    metrics::Metrics,
    name::LowerName,
    wire::{PAYLOAD, Stored, Transport, question},
};

/// How long a resolver has to answer before the next is asked.
const ATTEMPT: Duration = Duration::from_millis(1500);
/// How long all attempts take together at most: shorter than the five seconds of clients' own resolvers.
const ALL: Duration = Duration::from_millis(4500);
/// How often the list is gone through.
const ROUNDS: usize = 2;
/// How long a resolver that did not answer is asked only after the others; doubled each time.
const REST: Duration = Duration::from_secs(2);
const REST_MAX: Duration = Duration::from_secs(30);

/// Why resolvers gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// There is nobody to ask.
    #[error("there is no resolver to ask")]
    Nobody,
    /// None of them answered in time.
    #[error("no resolver answered in time; the last error was: {0}")]
    Silence(String),
}

/// How a resolver did lately.
#[derive(Clone, Copy, Debug, Default)]
struct Health {
    /// How often in a row it has not answered.
    failures: u32,
    /// Until when it is asked only after the others.
    rests: Option<Instant>,
}

/// All resolvers, and how they do for each namespace: a resolver does not answer for names of slow servers, and clients
/// choose the names.
#[derive(Debug)]
pub struct Upstream {
    health: Mutex<HashMap<(Arc<str>, SocketAddr), Health>>,
    metrics: Arc<Metrics>,
}

/// A question for resolvers.
#[derive(Clone, Debug)]
pub struct Question {
    /// The name.
    pub name: LowerName,
    /// The type.
    pub of_type: u16,
    /// The query's bits.
    pub bits: u8,
}

impl Upstream {
    /// Resolvers that all do well.
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self {
            health: Mutex::default(),
            metrics,
        }
    }

    /// Asks a client's resolvers, in their order but those first that do well for its namespace, until one answers.
    ///
    /// # Errors
    ///
    /// None of them did.
    pub async fn ask(
        &self,
        namespace: &Arc<str>,
        resolvers: &[SocketAddr],
        question: &Question,
    ) -> Result<Stored, Failure> {
        let start = Instant::now();
        let end = start + ALL;
        let mut last = "there was no time".to_owned();
        // What is said by a resolver that cannot help: better than nothing.
        let mut refused = None;
        for _ in 0..ROUNDS {
            for resolver in self.in_order(namespace, resolvers) {
                let now = Instant::now();
                if now >= end {
                    break;
                }
                self.metrics.upstream_requests.inc();
                let answer = exchange(resolver, question, (now + ATTEMPT).min(end)).await;
                self.note(namespace, resolver, answer.is_ok());
                match answer {
                    Ok(answer) => {
                        let seconds = now.elapsed().as_secs_f64();
                        self.metrics.upstream_duration.observe(seconds);
                        match answer.code() {
                            ResponseCode::ServFail
                            | ResponseCode::Refused
                            | ResponseCode::NotImp => refused = Some(answer),
                            _ => return Ok(answer),
                        }
                    }
                    Err(error) => {
                        self.metrics.upstream_failures.inc();
                        last = format!("{resolver}: {error}");
                    }
                }
            }
            if refused.is_some() {
                break;
            }
        }
        match refused {
            Some(answer) => Ok(answer),
            None if resolvers.is_empty() => Err(Failure::Nobody),
            None => Err(Failure::Silence(last)),
        }
    }

    /// Resolvers in the order in which to ask them.
    fn in_order(&self, namespace: &Arc<str>, resolvers: &[SocketAddr]) -> Vec<SocketAddr> {
        let health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let rests = |resolver: &&SocketAddr| {
            let health = health.get(&(Arc::clone(namespace), **resolver));
            let rests = health.and_then(|health| health.rests);
            rests.is_some_and(|until| until > now)
        };
        let (later, first): (Vec<_>, Vec<_>) = resolvers.iter().partition(rests);
        first.into_iter().chain(later).copied().collect()
    }

    /// Notes how a resolver did.
    fn note(&self, namespace: &Arc<str>, resolver: SocketAddr, answered: bool) {
        let mut health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (Arc::clone(namespace), resolver);
        if answered {
            health.remove(&key);
            return;
        }
        let health = health.entry(key).or_default();
        let rest = REST * 2_u32.saturating_pow(health.failures.min(8));
        health.failures += 1;
        health.rests = Some(Instant::now() + rest.min(REST_MAX));
    }

    /// Has a resolver answer a query that nothing here understands. Its answer is the client's to judge.
    ///
    /// # Errors
    ///
    /// None of them answered.
    pub async fn relay(
        &self,
        namespace: &Arc<str>,
        resolvers: &[SocketAddr],
        query: &[u8],
        transport: Transport,
    ) -> Result<Vec<u8>, Failure> {
        let all = Instant::now() + ALL;
        let mut last = Failure::Nobody;
        let resolvers = self.in_order(namespace, resolvers);
        for resolver in resolvers.iter().cycle().take(resolvers.len() * ROUNDS) {
            let now = Instant::now();
            if now >= all {
                break;
            }
            self.metrics.upstream_requests.inc();
            let end = (now + ATTEMPT).min(all);
            let answer = timeout_at(end.into(), pass_on(*resolver, query, transport)).await;
            match answer.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
                Ok(answer) => {
                    self.note(namespace, *resolver, true);
                    return Ok(answer);
                }
                Err(error) => {
                    // A resolver need not know what nobody understands: it does well, or not, by others.
                    self.metrics.upstream_failures.inc();
                    last = Failure::Silence(format!("{resolver}: {error}"));
                }
            }
        }
        Err(last)
    }
}

/// Passes a query on to one resolver, with another id. A client that came by TCP gets an answer of any length.
async fn pass_on(resolver: SocketAddr, query: &[u8], transport: Transport) -> io::Result<Vec<u8>> {
    let id: u16 = rand::random();
    let mut ours = query.to_vec();
    ours[..2].copy_from_slice(&id.to_be_bytes());
    let fits = |bytes: &[u8]| {
        let is = bytes.len() >= 12 && bytes[..2] == id.to_be_bytes();
        // An answer, to the same opcode.
        (is && bytes[2] & 0xf8 == 0x80 | query[2] & 0x78).then(|| bytes.to_vec())
    };
    let mut answer = by_udp(resolver, &ours, fits).await?;
    if answer[2] & 0x02 != 0 && transport == Transport::Tcp {
        answer = by_tcp(resolver, &ours, fits).await?;
    }
    answer[..2].copy_from_slice(&query[..2]);
    Ok(answer)
}

/// Asks one resolver.
async fn exchange(resolver: SocketAddr, asked: &Question, end: Instant) -> io::Result<Stored> {
    let mut edns = true;
    let mut transport = Transport::Udp;
    loop {
        let id = rand::random();
        let query = question(id, &asked.name, asked.of_type, asked.bits, edns);
        let fits = |bytes: &[u8]| {
            let stored = Stored::read(bytes, &asked.name, asked.of_type, false);
            stored.ok().filter(|_| bytes[..2] == id.to_be_bytes())
        };
        let exchange = async {
            match transport {
                Transport::Udp => by_udp(resolver, &query, fits).await,
                Transport::Tcp => by_tcp(resolver, &query, fits).await,
            }
        };
        let answer = timeout_at(end.into(), exchange).await;
        let answer = answer.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
        if answer.is_truncated() && transport == Transport::Udp {
            transport = Transport::Tcp;
        } else if edns && matches!(answer.code(), ResponseCode::FormErr | ResponseCode::NotImp) {
            // It is from before EDNS (RFC 6891).
            edns = false;
        } else {
            return Ok(answer);
        }
    }
}

/// Each query has a socket of its own, and so a port that nobody can guess.
async fn by_udp<T>(
    resolver: SocketAddr,
    query: &[u8],
    fits: impl Fn(&[u8]) -> Option<T>,
) -> io::Result<T> {
    let any: IpAddr = match resolver {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(resolver).await?;
    socket.send(query).await?;
    loop {
        socket.readable().await?;
        // Others' answers, and forged ones, are not waited for any less.
        if let Some(answer) = receive_one(&socket, &fits)? {
            return Ok(answer);
        }
    }
}

/// Takes a datagram, if there is one that fits.
///
/// The buffer is not part of the future that waits. The allocator places futures between the cache's entries, and large
/// futures leave holes there: 100 000 answers took 640 MiB.
fn receive_one<T>(socket: &UdpSocket, fits: impl Fn(&[u8]) -> Option<T>) -> io::Result<Option<T>> {
    let mut buffer = [0; PAYLOAD as usize * 4];
    match socket.try_recv(&mut buffer) {
        Ok(length) => Ok(fits(&buffer[..length])),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

async fn by_tcp<T>(
    resolver: SocketAddr,
    query: &[u8],
    fits: impl Fn(&[u8]) -> Option<T>,
) -> io::Result<T> {
    let mut stream = TcpStream::connect(resolver).await?;
    send(&mut stream, query).await?;
    let answer = receive(&mut stream).await?;
    fits(&answer).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Sends a message by TCP.
///
/// # Errors
///
/// The connection broke.
pub async fn send(stream: &mut TcpStream, message: &[u8]) -> io::Result<()> {
    let length = u16::try_from(message.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut bytes = Vec::with_capacity(message.len() + 2);
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(message);
    stream.write_all(&bytes).await
}

/// Receives a message by TCP.
///
/// # Errors
///
/// The connection broke, or ended.
pub async fn receive(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let length = stream.read_u16().await?;
    let mut message = vec![0; length.into()];
    stream.read_exact(&mut message).await?;
    Ok(message)
}
