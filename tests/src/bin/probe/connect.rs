//! TCP clients, one connection per attempt.

use std::{
    io::{self, Read as _, Write as _},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::Result;
use clap::Args;
use dataplane_tests::report::{Attempt, Report};
use serde::Deserialize;
use socket2::Socket;

use crate::client::{Connect, Target, local, name, peer, read_greeting};

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    target: Target,
    /// How many connections, one after the other
    #[arg(long, default_value_t = 1)]
    count: usize,
    /// Do not wait for the endpoint's greeting: for servers that are not ours
    #[arg(long)]
    silent: bool,
    /// Report every attempt, not only the sum
    #[arg(long)]
    each: bool,
}

#[derive(Args)]
pub struct HttpArguments {
    #[command(flatten)]
    target: Target,
    /// How many requests, one after the other, each over a connection of its own
    #[arg(long, default_value_t = 1)]
    count: usize,
    /// Report every attempt, not only the sum
    #[arg(long)]
    each: bool,
}

/// The endpoint that answered, and the address from which it saw the client.
type Answer = (Option<String>, Option<SocketAddr>);

pub fn run(arguments: &Arguments) -> Result<()> {
    repeat(
        &arguments.target,
        arguments.count,
        arguments.each,
        |socket, _| {
            let answer = if arguments.silent {
                (None, None)
            } else {
                let (endpoint, source) = read_greeting(socket)?;
                (Some(endpoint), Some(source))
            };
            // A reset leaves no TIME_WAIT behind: many attempts would run out of ports.
            socket.set_linger(Some(Duration::ZERO))?;
            Ok(answer)
        },
    )
}

pub fn run_http(arguments: &HttpArguments) -> Result<()> {
    repeat(&arguments.target, arguments.count, arguments.each, get)
}

/// Makes the attempts and prints the report.
fn repeat(
    target: &Target,
    count: usize,
    each: bool,
    mut ask: impl FnMut(&Socket, SocketAddr) -> io::Result<Answer>,
) -> Result<()> {
    let attempts = target
        .addresses()
        .take(count)
        .map(|to| {
            let Connect {
                socket, took_ns, ..
            } = target.connect(to);
            let mut attempt = Attempt {
                endpoint: None,
                source: None,
                peer: socket.as_ref().ok().and_then(peer),
                local: socket.as_ref().ok().and_then(local),
                from: None,
                error: None,
                latency_ns: took_ns,
            };
            match socket.and_then(|socket| ask(&socket, to)) {
                Ok((endpoint, source)) => {
                    attempt.endpoint = endpoint;
                    attempt.source = source;
                }
                Err(error) => attempt.error = Some(name(&error)),
            }
            attempt
        })
        .collect();
    println!("{}", serde_json::to_string(&Report::of(attempts, each))?);
    Ok(())
}

/// An endpoint's answer to a GET.
#[derive(Deserialize)]
struct Body {
    endpoint: String,
    source: IpAddr,
    port: u16,
}

/// A GET over a fresh connection; the endpoint closes it.
fn get(mut socket: &Socket, to: SocketAddr) -> io::Result<Answer> {
    let request =
        format!("GET / HTTP/1.1\r\nHost: {to}\r\nUser-Agent: probe\r\nConnection: close\r\n\r\n");
    socket.write_all(request.as_bytes())?;
    let mut answer = String::new();
    // The peer is one of ours or breaks a rule of the test: the client reads no more than this.
    socket.take(64 * 1024).read_to_string(&mut answer)?;
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .ok_or(io::ErrorKind::UnexpectedEof)?;
    let status = head.lines().next().unwrap_or_default();
    if !status.starts_with("HTTP/1.1 200 ") {
        return Err(io::Error::other(format!("not 200 but {status}")));
    }
    let body: Body = serde_json::from_str(body)?;
    Ok((
        Some(body.endpoint),
        Some(SocketAddr::new(body.source, body.port)),
    ))
}
