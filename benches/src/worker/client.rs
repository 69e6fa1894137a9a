//! The client: carries out jobs and measures them.

use std::{
    io::{BufRead as _, ErrorKind, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use dns::{LowerName, question};
use rand::seq::IndexedRandom as _;
use socket2::{SockAddr, Socket};

use super::{
    ANSWERED, Answer, DATAGRAM, ECHO, HOLD, Job, Order, SILENT, STEADY, STEADY_SEND, STREAM,
    Transport, WARM_UP, WINDOW, handshake::Client, socket,
};
use crate::{
    clock::monotonic_ms,
    stats::{median, percentile},
};

/// Time limit for an answer. An answer that takes longer is a fault of the path, not a slow path.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit for a name to become known.
const PATIENCE: Duration = Duration::from_secs(10);
/// Number of short measurements of a rate.
const SLICES: u32 = 5;

/// Carries out orders until stdin closes.
pub fn run() -> anyhow::Result<()> {
    let mut held = vec![];
    for line in std::io::stdin().lock().lines() {
        let order: Order = serde_json::from_str(&line?).context("an order that is none")?;
        let answer = match carry_out(&order, &mut held) {
            Ok(values) => Answer::Values(values),
            Err(error) => Answer::Error(format!("{error:#}")),
        };
        println!("{}", serde_json::to_string(&answer)?);
    }
    Ok(())
}

fn carry_out(order: &Order, held: &mut Vec<Socket>) -> anyhow::Result<Vec<f64>> {
    let one = |value| vec![value];
    match order.job {
        Job::Connect { count } => connects(order, count as usize),
        Job::Query { count } => queries(order, count as usize),
        Job::LookUp { count } => look_ups(order, count as usize),
        Job::Await => wait_for_name(order).map(one),
        Job::RoundTrip { count, connections } => {
            let mut sums = vec![0.0; 2];
            for _ in 0..connections {
                let of_one = round_trips(order, count as usize)?;
                for (sum, value) in sums.iter_mut().zip(of_one) {
                    *sum += value / f64::from(connections);
                }
            }
            Ok(sums)
        }
        Job::Churn { count, threads } => slices(|| churn(order, count / SLICES, threads)).map(one),
        Job::Handshake { count, threads } => handshakes(order, count, threads).map(one),
        Job::Crowd { clients, millis } => crowd(order, clients, millis),
        Job::Paced { per_milli, millis } => paced(order, per_milli, millis).map(one),
        Job::Flows { ports } => flows(order, ports).map(one),
        Job::Hold { count } => hold(order, count, held).map(one),
        Job::Bulk { bytes } => slices(|| match order.transport {
            Transport::Tcp => stream(order, bytes / u64::from(SLICES)),
            Transport::Udp => datagrams(order, bytes / u64::from(SLICES)),
        })
        .map(one),
        Job::Steady { bytes } => steady(order, bytes).map(one),
    }
}

/// Returns the median of several short measurements of a rate, so that a disturbance of one
/// measurement has no effect.
fn slices(measure: impl Fn() -> anyhow::Result<f64>) -> anyhow::Result<f64> {
    let mut rates = (0..SLICES)
        .map(|_| measure())
        .collect::<Result<Vec<_>, _>>()?;
    Ok(median(&mut rates))
}

/// Returns a new socket. When a TCP socket is closed, it resets the connection, because sockets in
/// TIME_WAIT would use up the ports within seconds. All paths use such sockets.
fn fresh(order: &Order) -> std::io::Result<(Socket, SockAddr)> {
    let to = order
        .to
        .choose(&mut rand::rng())
        .ok_or(ErrorKind::InvalidInput)?;
    let socket = socket(to.ip(), order.transport)?;
    socket.set_read_timeout(Some(TIMEOUT))?;
    if order.transport == Transport::Tcp {
        socket.set_linger(Some(Duration::ZERO))?;
        socket.set_tcp_nodelay(true)?;
    }
    Ok((socket, (*to).into()))
}

/// Sends one byte and waits for the answer.
fn exchange(socket: &mut Socket, byte: u8) -> std::io::Result<()> {
    let mut back = [byte];
    socket.write_all(&back)?;
    match socket.read(&mut back)? {
        0 => Err(ErrorKind::UnexpectedEof.into()),
        _ => Ok(()),
    }
}

const fn byte_for(transport: Transport) -> u8 {
    match transport {
        Transport::Tcp => ECHO,
        Transport::Udp => ANSWERED,
    }
}

/// Returns median and 99th percentile in µs of samples in ns. The first samples are warm-up and do
/// not count.
#[expect(clippy::cast_precision_loss, reason = "below 2^52 ns")]
fn quantiles(samples: &[u64]) -> Vec<f64> {
    let of_interest = samples.iter().skip(WARM_UP as usize);
    let mut samples: Vec<f64> = of_interest.map(|ns| *ns as f64 / 1e3).collect();
    vec![median(&mut samples), percentile(&mut samples, 0.99)]
}

fn nanos(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

fn connects(order: &Order, count: usize) -> anyhow::Result<Vec<f64>> {
    let mut samples = Vec::with_capacity(count + WARM_UP as usize);
    for _ in 0..count + WARM_UP as usize {
        let (mut socket, to) = fresh(order)?;
        let start = Instant::now();
        socket.connect(&to)?;
        if order.transport == Transport::Udp {
            exchange(&mut socket, ANSWERED)?;
        }
        samples.push(nanos(start));
    }
    Ok(quantiles(&samples))
}

fn queries(order: &Order, count: usize) -> anyhow::Result<Vec<f64>> {
    let mut samples = Vec::with_capacity(count + WARM_UP as usize);
    for _ in 0..count + WARM_UP as usize {
        let (socket, to) = fresh(order)?;
        let socket = UdpSocket::from(socket);
        let to = to.as_socket().context("an address that is none")?;
        let start = Instant::now();
        socket.send_to(&[ANSWERED], to)?;
        let (_, from) = socket.recv_from(&mut [0; 1])?;
        samples.push(nanos(start));
        ensure!(from == to, "{to} was asked, and {from} answered");
    }
    Ok(quantiles(&samples))
}

/// Looks up a name once. Returns the time, and the number of records in the answer.
fn look_up(order: &Order, query: &[u8]) -> std::io::Result<(u64, u16)> {
    let (mut socket, to) = fresh(order)?;
    let mut answer = [0; 512];
    let start = Instant::now();
    socket.connect(&to)?;
    socket.write_all(query)?;
    let length = socket.read(&mut answer)?;
    let took = nanos(start);
    if length < 12 || answer[..2] != query[..2] {
        return Err(ErrorKind::InvalidData.into());
    }
    Ok((took, u16::from_be_bytes([answer[6], answer[7]])))
}

fn query(order: &Order) -> anyhow::Result<Vec<u8>> {
    let name = LowerName::parse(&order.name)
        .ok()
        .context("a name that is none")?;
    Ok(question(7, &name, 1, 1, false))
}

fn look_ups(order: &Order, count: usize) -> anyhow::Result<Vec<f64>> {
    let query = query(order)?;
    let mut samples = Vec::with_capacity(count + WARM_UP as usize);
    for _ in 0..count + WARM_UP as usize {
        let (took, records) = look_up(order, &query)?;
        ensure!(records > 0, "{} has no address", order.name);
        samples.push(took);
    }
    Ok(quantiles(&samples))
}

fn wait_for_name(order: &Order) -> anyhow::Result<f64> {
    let query = query(order)?;
    let start = Instant::now();
    while look_up(order, &query)?.1 == 0 {
        ensure!(
            start.elapsed() < PATIENCE,
            "{} is not known in time",
            order.name
        );
    }
    monotonic_ms()
}

fn round_trips(order: &Order, count: usize) -> anyhow::Result<Vec<f64>> {
    let (mut socket, to) = fresh(order)?;
    socket.connect(&to)?;
    let byte = byte_for(order.transport);
    let mut samples = Vec::with_capacity(count + WARM_UP as usize);
    for _ in 0..count + WARM_UP as usize {
        let start = Instant::now();
        exchange(&mut socket, byte)?;
        samples.push(nanos(start));
    }
    Ok(quantiles(&samples))
}

/// See [`Job::Crowd`].
#[expect(clippy::cast_precision_loss, reason = "below 2^52")]
fn crowd(order: &Order, clients: u32, millis: u32) -> anyhow::Result<Vec<f64>> {
    let time = Duration::from_millis(millis.into());
    let start = Instant::now();
    let samples = thread::scope(|scope| -> anyhow::Result<Vec<u64>> {
        let one_after_the_other = || -> std::io::Result<Vec<u64>> {
            let mut samples = vec![];
            while start.elapsed() < time {
                let (mut socket, to) = fresh(order)?;
                socket.set_linger(None)?;
                let began = Instant::now();
                socket.connect(&to)?;
                exchange(&mut socket, ECHO)?;
                samples.push(nanos(began));
            }
            Ok(samples)
        };
        let threads: Vec<_> = (0..clients)
            .map(|_| scope.spawn(one_after_the_other))
            .collect();
        let mut samples = vec![];
        for thread in threads {
            match thread.join() {
                Ok(of_one) => samples.extend(of_one?),
                Err(_) => bail!("a client's thread panicked"),
            }
        }
        Ok(samples)
    })?;
    let seconds = start.elapsed().as_secs_f64();
    let mut times: Vec<f64> = samples.iter().map(|ns| *ns as f64 / 1e3).collect();
    let made = times.len() as f64;
    Ok(vec![made / seconds, percentile(&mut times, 0.99), made])
}

/// See [`Job::Paced`].
fn paced(order: &Order, per_milli: u32, millis: u32) -> anyhow::Result<f64> {
    let (mut socket, to) = fresh(order)?;
    socket.connect(&to)?;
    exchange(&mut socket, ANSWERED)?;
    let payload = [SILENT; 64];
    let start = Instant::now();
    for milli in 1..=millis {
        for _ in 0..per_milli {
            socket.send(&payload)?;
        }
        let next = Duration::from_millis(milli.into());
        thread::sleep(next.saturating_sub(start.elapsed()));
    }
    exchange(&mut socket, ANSWERED)?;
    Ok(f64::from(per_milli * millis))
}

/// See [`Job::Flows`].
fn flows(order: &Order, ports: u16) -> anyhow::Result<f64> {
    // Source ports are above the servers' ports.
    const FIRST: u16 = 10_000;
    let v4 = order.to.iter().all(SocketAddr::is_ipv4);
    let any: IpAddr = if v4 {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    };
    let mut begun = 0;
    for port in (FIRST..).take(ports.into()) {
        // Another socket has this port.
        let Ok(socket) = UdpSocket::bind((any, port)) else {
            continue;
        };
        for to in &order.to {
            socket.send_to(&[SILENT], to)?;
            begun += 1;
        }
    }
    Ok(f64::from(begun))
}

#[expect(clippy::cast_precision_loss, reason = "below 2^52")]
fn hold(order: &Order, count: u32, held: &mut Vec<Socket>) -> anyhow::Result<f64> {
    if count == 0 {
        held.clear();
    }
    held.reserve_exact(count as usize);
    for _ in 0..count {
        let (mut socket, to) = fresh(order)?;
        socket.connect(&to)?;
        exchange(&mut socket, HOLD)?;
        held.push(socket);
    }
    Ok(held.len() as f64)
}

fn churn(order: &Order, count: u32, threads: u32) -> anyhow::Result<f64> {
    let byte = byte_for(order.transport);
    rate(count, threads, || {
        let (mut socket, to) = fresh(order)?;
        socket.connect(&to)?;
        exchange(&mut socket, byte)
    })
}

/// Returns how often per second several threads do `one`.
fn rate(
    count: u32,
    threads: u32,
    one: impl Fn() -> std::io::Result<()> + Sync,
) -> anyhow::Result<f64> {
    let each = count.div_ceil(threads);
    let start = Instant::now();
    thread::scope(|scope| -> anyhow::Result<()> {
        let one = &one;
        let threads: Vec<_> = (0..threads)
            .map(|_| scope.spawn(move || (0..each).try_for_each(|_| one())))
            .collect();
        for thread in threads {
            match thread.join() {
                Ok(done) => done?,
                Err(_) => bail!("a client's thread panicked"),
            }
        }
        Ok(())
    })?;
    Ok(f64::from(each * threads) / start.elapsed().as_secs_f64())
}

/// See [`Job::Handshake`].
fn handshakes(order: &Order, count: u32, threads: u32) -> anyhow::Result<f64> {
    let client = Client::read(Path::new(&order.name))?;
    slices(|| {
        rate(count / SLICES, threads, || {
            let (socket, to) = fresh(order)?;
            socket.connect(&to)?;
            client.shake_hands(TcpStream::from(socket))
        })
    })
}

#[expect(clippy::cast_precision_loss, reason = "below 2^52 bits")]
fn gbit_per_s(bytes: u64, start: Instant) -> f64 {
    (bytes * 8) as f64 / 1e9 / start.elapsed().as_secs_f64()
}

fn stream(order: &Order, bytes: u64) -> anyhow::Result<f64> {
    let (socket, to) = fresh(order)?;
    socket.connect(&to)?;
    let mut stream = TcpStream::from(socket);
    let chunk = vec![0; 64 << 10];
    let start = Instant::now();
    stream.write_all(&[STREAM])?;
    stream.write_all(&bytes.to_be_bytes())?;
    let mut left = bytes;
    while left > 0 {
        let length = usize::try_from(left).unwrap_or(usize::MAX).min(chunk.len());
        stream.write_all(&chunk[..length])?;
        left -= length as u64;
    }
    stream.read_exact(&mut [0])?;
    Ok(gbit_per_s(bytes, start))
}

/// See [`Job::Steady`].
fn steady(order: &Order, bytes: u64) -> anyhow::Result<f64> {
    const PARTS: u8 = 16;
    let (socket, to) = fresh(order)?;
    socket.set_tcp_congestion(b"reno")?;
    socket.set_send_buffer_size(STEADY_SEND)?;
    socket.connect(&to)?;
    let mut stream = TcpStream::from(socket);
    let chunk = vec![0; 64 << 10];
    let chunks = bytes / u64::from(PARTS) / chunk.len() as u64;
    let of_part = chunks * chunk.len() as u64;
    stream.write_all(&[STEADY])?;
    stream.write_all(&(of_part * u64::from(PARTS)).to_be_bytes())?;
    let mut rates = vec![];
    for _ in 0..PARTS {
        let start = Instant::now();
        for _ in 0..chunks {
            stream.write_all(&chunk)?;
        }
        rates.push(gbit_per_s(of_part, start));
    }
    stream.read_exact(&mut [0])?;
    // The first quarter is the warm-up.
    Ok(median(&mut rates[usize::from(PARTS / 4)..]))
}

fn datagrams(order: &Order, bytes: u64) -> anyhow::Result<f64> {
    let (socket, to) = fresh(order)?;
    socket.connect(&to)?;
    let socket = UdpSocket::from(socket);
    let mut payload = [0; DATAGRAM];
    let windows = bytes.div_ceil(DATAGRAM as u64 * WINDOW);
    let start = Instant::now();
    for _ in 0..windows {
        payload[0] = SILENT;
        for _ in 1..WINDOW {
            socket.send(&payload)?;
        }
        payload[0] = ANSWERED;
        socket.send(&payload)?;
        socket
            .recv(&mut [0; 1])
            .context("a window of datagrams was not acknowledged")?;
    }
    Ok(gbit_per_s(windows * WINDOW * DATAGRAM as u64, start))
}
