//! Sends one question to one resolver: chooses the transport, and decides which message counts as the answer.
//!
//! An attacker who can send datagrams with the resolver's address has to guess the query's port, its id, and the case
//! of the letters in its name (0x20). A datagram that nearly fits is either a wrong guess, or from a resolver that does
//! not repeat the case. The question is then asked again by TCP.

use std::{
    future::Future,
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use hickory_proto::op::ResponseCode;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, Interest},
    net::{TcpSocket, UdpSocket},
    time::{sleep, timeout_at},
};

use super::{
    metrics::Metrics,
    name::LowerName,
    query_socket::{self, is_agents},
    wire::{HEADER, PAYLOAD, Stored, Transport, question},
};

/// How long a resolver has to answer a query with EDNS0 before it gets the query without: some ignore the former.
const SILENCE: Duration = Duration::from_millis(750);
/// A question for resolvers.
#[derive(Clone, Debug)]
pub struct Question {
    /// The name.
    pub name: LowerName,
    /// The type.
    pub of_type: u16,
    /// The query's bits.
    pub bits: u8,
    /// Whether the client's query has EDNS0: a resolver may not answer such a query.
    pub edns: bool,
}

/// The kind of a datagram.
enum Fit<T> {
    /// The answer.
    Answer(T),
    /// Nearly the answer: its id is another, or the case of the name.
    Suspect,
    /// Something else.
    Other,
}

/// A resolver's answer by UDP.
enum Heard<T> {
    Answer(T),
    /// An answer that may be forged has arrived.
    Suspect,
}

/// Asks one resolver until `end`.
///
/// # Errors
///
/// The resolver does not answer.
pub async fn exchange(
    resolver: SocketAddr,
    asked: &Question,
    end: Instant,
    metrics: &Metrics,
) -> io::Result<Stored> {
    let heard = until(end, async {
        if !asked.edns {
            return by_udp(resolver, asked, false).await;
        }
        let without = async {
            sleep(SILENCE).await;
            by_udp(resolver, asked, false).await
        };
        let heard = tokio::select! {
            heard = by_udp(resolver, asked, true) => heard?,
            heard = without => heard?,
        };
        match heard {
            // It is from before EDNS (RFC 6891), or fails because of it.
            Heard::Answer(answer) if is_failure(&answer) => {
                let again = until(end, by_udp(resolver, asked, false)).await;
                Ok(again.unwrap_or(Heard::Answer(answer)))
            }
            heard => Ok(heard),
        }
    })
    .await?;
    match heard {
        Heard::Answer(answer) if answer.is_truncated() => {
            // A resolver may not answer by TCP. Then a part of the answer is all there is.
            let whole = until(end, by_tcp(resolver, asked)).await;
            Ok(whole.unwrap_or(answer))
        }
        Heard::Answer(answer) => Ok(answer),
        Heard::Suspect => {
            metrics.forged.inc();
            match until(end, by_tcp(resolver, asked)).await {
                Ok(answer) => Ok(answer),
                // A new port and id have to be guessed; the resolver need not repeat the case.
                Err(_) => until(end, by_udp_lenient(resolver, asked)).await,
            }
        }
    }
}

async fn until<T>(end: Instant, does: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let done = timeout_at(end.into(), does).await;
    done.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

fn is_failure(answer: &Stored) -> bool {
    matches!(
        answer.code(),
        ResponseCode::FormErr | ResponseCode::NotImp | ResponseCode::ServFail
    )
}

/// A query with a random id.
fn query(asked: &Question, edns: bool) -> Vec<u8> {
    question(rand::random(), &asked.name, asked.of_type, asked.bits, edns)
}

/// An answer with the query's id and question; `case`: with the case of the question's letters.
fn fit(asked: &Question, query: &[u8], bytes: &[u8], case: bool) -> Fit<Stored> {
    let Ok(stored) = Stored::read(bytes, &asked.name, asked.of_type, false) else {
        return Fit::Other;
    };
    let name = HEADER..HEADER + asked.name.bytes().len();
    // An answer that refuses need not have a question.
    let has_name = bytes.get(4..6) == Some(&[0, 1]);
    let is_same = !has_name || !case || bytes.get(name.clone()) == query.get(name);
    if bytes[..2] == query[..2] && is_same {
        Fit::Answer(stored)
    } else if case {
        Fit::Suspect
    } else {
        Fit::Other
    }
}

async fn by_udp(resolver: SocketAddr, asked: &Question, edns: bool) -> io::Result<Heard<Stored>> {
    let mut query = query(asked, edns);
    // Lengths of labels are no letters: they are shorter than 64.
    for byte in query.iter_mut().skip(HEADER).take(asked.name.bytes().len()) {
        if byte.is_ascii_alphabetic() && rand::random() {
            *byte ^= 0x20;
        }
    }
    ask_by_udp(resolver, &query, |bytes| fit(asked, &query, bytes, true)).await
}

/// Asks by UDP a resolver that does not answer by TCP, and need not repeat the case.
async fn by_udp_lenient(resolver: SocketAddr, asked: &Question) -> io::Result<Stored> {
    let query = query(asked, false);
    let fits = |bytes: &[u8]| fit(asked, &query, bytes, false);
    match ask_by_udp(resolver, &query, fits).await? {
        Heard::Answer(answer) => Ok(answer),
        Heard::Suspect => Err(io::ErrorKind::InvalidData.into()),
    }
}

async fn by_tcp(resolver: SocketAddr, asked: &Question) -> io::Result<Stored> {
    let query = query(asked, asked.edns);
    match fit(asked, &query, &ask_by_tcp(resolver, &query).await?, false) {
        Fit::Answer(answer) => Ok(answer),
        Fit::Suspect | Fit::Other => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Passes a query on to one resolver, with another id. A client that came by TCP gets an answer of any length.
///
/// # Errors
///
/// The resolver does not answer.
pub async fn pass_on(
    resolver: SocketAddr,
    query: &[u8],
    transport: Transport,
) -> io::Result<Vec<u8>> {
    let id: u16 = rand::random();
    let mut ours = query.to_vec();
    ours[..2].copy_from_slice(&id.to_be_bytes());
    let fits = |bytes: &[u8]| {
        let is = bytes.len() >= 12 && bytes[..2] == id.to_be_bytes();
        // An answer, to the same opcode.
        if is && bytes[2] & 0xf8 == 0x80 | query[2] & 0x78 {
            Fit::Answer(bytes.to_vec())
        } else {
            Fit::Other
        }
    };
    let Heard::Answer(mut answer) = ask_by_udp(resolver, &ours, fits).await? else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    if answer[2] & 0x02 != 0 && transport == Transport::Tcp {
        answer = match fits(&ask_by_tcp(resolver, &ours).await?) {
            Fit::Answer(answer) => answer,
            Fit::Suspect | Fit::Other => return Err(io::ErrorKind::InvalidData.into()),
        };
    }
    answer[..2].copy_from_slice(&query[..2]);
    Ok(answer)
}

/// Sends a query from a new socket, whose port an attacker cannot know, and waits for the answer.
async fn ask_by_udp<T>(
    resolver: SocketAddr,
    query: &[u8],
    fits: impl Fn(&[u8]) -> Fit<T>,
) -> io::Result<Heard<T>> {
    let socket = query_socket::open(resolver)?;
    socket.connect(resolver).await?;
    socket.send(query).await?;
    loop {
        socket.ready(Interest::READABLE | Interest::ERROR).await?;
        // Others' answers are not waited for any less.
        if let Some(heard) = receive_one(&socket, &fits)? {
            return Ok(heard);
        }
        // If the resolver's machine refuses the port, there is an error and nothing to read.
        let error = || (socket.take_error()?).ok_or_else(|| io::ErrorKind::WouldBlock.into());
        if let Ok(error) = socket.try_io(Interest::ERROR, error) {
            return Err(error);
        }
    }
}

/// Receives a datagram that fits, if one is waiting. If a second, different answer is waiting, neither counts.
///
/// The buffer is not part of the waiting future. The allocator places futures between the cache's entries, and large
/// futures leave holes there: 100 000 answers took 640 MiB.
fn receive_one<T>(
    socket: &UdpSocket,
    fits: impl Fn(&[u8]) -> Fit<T>,
) -> io::Result<Option<Heard<T>>> {
    let mut buffer = [0; PAYLOAD as usize * 4];
    let mut first: Option<(Vec<u8>, T)> = None;
    loop {
        let bytes = match socket.try_recv(&mut buffer) {
            Ok(length) => &buffer[..length],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Ok(first.map(|(_, answer)| Heard::Answer(answer)));
            }
            // The port was closed after the answer.
            Err(_) if first.is_some() => return Ok(first.map(|(_, answer)| Heard::Answer(answer))),
            Err(error) => return Err(error),
        };
        match (fits(bytes), &first) {
            (Fit::Other, _) => {}
            (Fit::Answer(answer), None) => first = Some((bytes.to_vec(), answer)),
            (Fit::Answer(_), Some((before, _))) if before == bytes => {}
            (Fit::Suspect, _) | (Fit::Answer(_), Some(_)) => return Ok(Some(Heard::Suspect)),
        }
    }
}

async fn ask_by_tcp(resolver: SocketAddr, query: &[u8]) -> io::Result<Vec<u8>> {
    let socket = match resolver {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    is_agents(&socket);
    let mut stream = socket.connect(resolver).await?;
    send(&mut stream, query).await?;
    receive(&mut stream).await
}

/// Sends a message by TCP.
///
/// # Errors
///
/// The connection broke.
pub async fn send(stream: &mut (impl AsyncWriteExt + Unpin), message: &[u8]) -> io::Result<()> {
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
pub async fn receive(stream: &mut (impl AsyncReadExt + Unpin)) -> io::Result<Vec<u8>> {
    let length = stream.read_u16().await?;
    let mut message = vec![0; length.into()];
    stream.read_exact(&mut message).await?;
    Ok(message)
}

#[cfg(test)]
mod tests;
