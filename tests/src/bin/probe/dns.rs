//! Clients that look up a name at a steady rate, as the C libraries do, to see whether any query fails.

use std::{
    collections::BTreeMap,
    io::{self, Read as _},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use clap::{Args, ValueEnum};
use dataplane_tests::report::{Errors, Failure, LookupReport, Quantiles};

use crate::client::{name, now_ns};

/// How many queries at once, at most.
const AT_ONCE: usize = 4096;

#[derive(Args)]
pub struct Arguments {
    /// The resolver
    #[arg(long, value_name = "ADDR:PORT")]
    to: SocketAddr,
    /// The name; in it, the query's number takes the place of {}
    #[arg(long)]
    name: String,
    /// How many queries in a second
    #[arg(long, default_value_t = 200)]
    rate: u32,
    /// How many queries; without it, until stdin is closed
    #[arg(long)]
    count: Option<usize>,
    /// The kind of sockets, of which each query has one of its own
    #[arg(long, value_enum, default_value_t)]
    sockets: Sockets,
    /// How long a query waits for its answer
    #[arg(long, value_name = "MS", default_value_t = 2000)]
    timeout_ms: u64,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Sockets {
    /// Connected ones, as glibc has them
    #[default]
    Connected,
    /// Unconnected ones, as musl has them: answers from other addresses do not count
    Unconnected,
}

/// The outcome of all queries.
#[derive(Default)]
struct Results {
    took_ns: Vec<u64>,
    sources: BTreeMap<SocketAddr, u64>,
    errors: Errors,
    failures: Vec<Failure>,
}

pub fn run(arguments: &Arguments) -> Result<()> {
    let started_at_ns = now_ns();
    println!("{{\"started_at_ns\":{started_at_ns}}}");
    let results = Mutex::new(Results::default());
    let stop = Mutex::new(false);
    let mut asked = 0;
    thread::scope(|scope| {
        if arguments.count.is_none() {
            scope.spawn(|| {
                let _ = io::stdin().read_to_end(&mut Vec::new());
                *stop.lock().unwrap_or_else(PoisonError::into_inner) = true;
            });
        }
        let period = Duration::from_secs(1) / arguments.rate.max(1);
        let mut next = Instant::now();
        let mut threads: Vec<thread::ScopedJoinHandle<'_, ()>> = Vec::new();
        while arguments.count.is_none_or(|count| asked < count)
            && !*stop.lock().unwrap_or_else(PoisonError::into_inner)
        {
            threads.retain(|thread| !thread.is_finished());
            if threads.len() < AT_ONCE {
                asked += 1;
                let results = &results;
                threads.push(scope.spawn(move || look_up(arguments, asked, results)));
            }
            next += period;
            thread::sleep(next.saturating_duration_since(Instant::now()));
        }
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.failures.sort_by_key(|failure| failure.at_ns);
    let report = LookupReport {
        asked: asked as u64,
        answered: results.took_ns.len() as u64,
        sources: results.sources,
        errors: results.errors,
        failures: results.failures,
        took_ns: Quantiles::of(&mut results.took_ns),
    };
    serde_json::to_writer(io::stdout().lock(), &report)?;
    Ok(())
}

fn look_up(arguments: &Arguments, number: usize, results: &Mutex<Results>) {
    let (at_ns, start) = (now_ns(), Instant::now());
    let answer = exchange(arguments, number);
    let took = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
    match answer {
        Ok(source) => {
            results.took_ns.push(took);
            *results.sources.entry(source).or_default() += 1;
        }
        Err(error) => {
            let error = name(&error);
            *results.errors.entry(error.clone()).or_default() += 1;
            results.failures.push(Failure { at_ns, error });
        }
    }
}

/// Sends one query; returns the address that answered.
fn exchange(arguments: &Arguments, number: usize) -> io::Result<SocketAddr> {
    let to = arguments.to;
    let socket = match to {
        SocketAddr::V4(_) => UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)),
    }?;
    let timeout = Duration::from_millis(arguments.timeout_ms);
    socket.set_read_timeout(Some(timeout))?;
    let id = u16::try_from(number % (1 << 16)).unwrap_or_default();
    let [a, b] = id.to_be_bytes();
    let query = query(&arguments.name.replace("{}", &number.to_string()), [a, b]);
    match arguments.sockets {
        Sockets::Connected => {
            socket.connect(to)?;
            if socket.peer_addr()? != to {
                return Err(io::Error::other("another peer"));
            }
            socket.send(&query)?;
        }
        Sockets::Unconnected => _ = socket.send_to(&query, to)?,
    }
    let deadline = Instant::now() + timeout;
    let mut buffer = [0; 1500];
    while Instant::now() < deadline {
        let (length, source) = socket.recv_from(&mut buffer)?;
        if source != to {
            return Err(io::Error::other(format!("an answer from {source}")));
        }
        let answer = &buffer[..length];
        if answer.len() < 12 || answer[..2] != [a, b] {
            continue;
        }
        // No error, and records.
        return match (answer[3] & 15, &answer[6..8]) {
            (0, records) if *records != [0, 0] => Ok(source),
            (code, _) => Err(io::Error::other(format!("code {code}, or no records"))),
        };
    }
    Err(io::ErrorKind::TimedOut.into())
}

/// A query for an A record, recursion desired.
fn query(name: &str, [a, b]: [u8; 2]) -> Vec<u8> {
    let mut query = vec![a, b, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.trim_end_matches('.').split('.') {
        query.push(u8::try_from(label.len()).unwrap_or_default());
        query.extend_from_slice(label.as_bytes());
    }
    query.extend_from_slice(&[0, 0, 1, 0, 1]);
    query
}
