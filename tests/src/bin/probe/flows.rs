//! Many flows in one process, each of few attempts: to compare how two worlds treat them.

use std::{
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{
        Mutex,
        atomic::{AtomicU16, Ordering::Relaxed},
    },
    time::Duration,
};

use anyhow::{Context as _, Result};
use clap::Args;
use dataplane_tests::report::{Attempt, Flow, Report};
use socket2::{Socket, Type};

use crate::client::{Target, local, name, now_ns, parse_greeting, read_greeting};

#[derive(Args)]
pub struct Arguments {
    /// How many flows at the same time
    #[arg(long, default_value_t = 1)]
    parallel: usize,
    /// The client's first port: each attempt has the next one, so that no two attempts share a port
    #[arg(long, default_value_t = FIRST_PORT)]
    first_port: u16,
}

/// The range that the kernel takes clients' ports from by default.
const FIRST_PORT: u16 = 32_768;
const LAST_PORT: u16 = 60_999;

/// Ports in turn.
struct Ports(AtomicU16);

impl Ports {
    fn next(&self) -> u16 {
        let after = |port| {
            Some(if port >= LAST_PORT {
                FIRST_PORT
            } else {
                port + 1
            })
        };
        let taken = self.0.fetch_update(Relaxed, Relaxed, after);
        taken.unwrap_or(FIRST_PORT).clamp(FIRST_PORT, LAST_PORT)
    }
}

pub fn run(arguments: &Arguments) -> Result<()> {
    let flows: Vec<Flow> =
        serde_json::from_reader(io::stdin().lock()).context("read flows from stdin")?;
    let ports = Ports(AtomicU16::new(arguments.first_port));
    let queue = Mutex::new(flows.iter().enumerate());
    let next = || queue.lock().expect("no thread panics").next();
    let mut reports: Vec<(usize, Report)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..arguments.parallel.clamp(1, flows.len().max(1)))
            .map(|_| {
                scope.spawn(|| {
                    let mut reports = Vec::new();
                    while let Some((number, flow)) = next() {
                        reports.push((number, carry_out(flow, &ports)));
                    }
                    reports
                })
            })
            .collect();
        workers
            .into_iter()
            .flat_map(|worker| worker.join().expect("no thread panics"))
            .collect()
    });
    reports.sort_by_key(|(number, _)| *number);
    let reports: Vec<Report> = reports.into_iter().map(|(_, report)| report).collect();
    println!("{}", serde_json::to_string(&reports)?);
    Ok(())
}

/// How long an attempt waits to be certain. A SYN that crosses links of one machine only may be refused by an ICMP
/// message while connect(2) still holds the socket: the kernel then treats the message as a passing trouble, sends
/// another SYN after a second, and believes the next message.
const PATIENCE_MS: u64 = 1700;

fn carry_out(flow: &Flow, ports: &Ports) -> Report {
    let mut attempts: Vec<Attempt> = Vec::new();
    let mut timeouts = 0;
    while attempts.len() < flow.count as usize && timeouts < flow.timeouts {
        let patient = timeouts == 2 && attempts.len() == 2;
        let timeout_ms = if patient {
            PATIENCE_MS
        } else {
            flow.timeout_ms
        };
        let from_port = flow.from_port.unwrap_or_else(|| ports.next());
        let attempt = attempt(flow, from_port, timeout_ms);
        let timed_out = attempt.error.as_deref() == Some("TIMEOUT");
        if patient && attempt.error.is_some() && !timed_out {
            attempts = vec![attempt];
            break;
        }
        timeouts += u32::from(timed_out);
        attempts.push(attempt);
    }
    Report::of(attempts, true)
}

fn attempt(flow: &Flow, from_port: u16, timeout_ms: u64) -> Attempt {
    let target = Target::one(flow.to, timeout_ms);
    let mut attempt = Attempt {
        endpoint: None,
        source: None,
        peer: None,
        local: None,
        from: None,
        error: None,
        latency_ns: 0,
    };
    let begin = now_ns();
    match ask(&target, flow, from_port, &mut attempt) {
        Ok((endpoint, source)) => {
            attempt.endpoint = Some(endpoint);
            attempt.source = Some(source);
        }
        Err(error) => attempt.error = Some(name(&error)),
    }
    attempt.latency_ns = now_ns() - begin;
    attempt
}

/// The endpoint that answered, and the address from which it saw us.
fn ask(
    target: &Target,
    flow: &Flow,
    from_port: u16,
    attempt: &mut Attempt,
) -> io::Result<(String, SocketAddr)> {
    let kind = if flow.udp { Type::DGRAM } else { Type::STREAM };
    let mut socket = target.socket(flow.to, kind)?;
    let any = match flow.to {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    socket.set_reuse_address(true)?;
    socket.bind(&SocketAddr::new(any, from_port).into())?;
    if !flow.udp {
        // A reset leaves no TIME_WAIT behind: many attempts would run out of ports.
        socket.set_linger(Some(Duration::ZERO))?;
    }
    socket.connect(&flow.to.into())?;
    attempt.local = local(&socket);
    if !flow.udp {
        return read_greeting(&socket);
    }
    datagram(&mut socket)
}

fn datagram(socket: &mut Socket) -> io::Result<(String, SocketAddr)> {
    socket.write_all(b"?")?;
    let mut buffer = [0; 512];
    let length = socket.read(&mut buffer)?;
    parse_greeting(&buffer[..length]).map(|(endpoint, source, _)| (endpoint, source))
}
