//! A TCP client that keeps its one connection busy.

use std::{
    io::{self, Read as _, Write as _},
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::Result;
use clap::Args;
use dataplane_tests::report::{Attempt, Report};
use socket2::Socket;

use crate::client::{Connect, Target, local, name, ns, peer, read_greeting};

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    target: Target,
    /// Wait so many milliseconds between two questions
    #[arg(long, value_name = "MS", default_value_t = 2)]
    pause_ms: u64,
}

/// Asks for an echo again and again until stdin is closed or the connection fails; each is an attempt.
pub fn run(arguments: &Arguments) -> Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&stop);
    std::thread::spawn(move || {
        let _ = io::stdin().read_to_end(&mut Vec::new());
        seen.store(true, Ordering::Relaxed);
    });
    let mut attempts = Vec::new();
    for to in arguments.target.addresses().take(1) {
        let Connect { socket, .. } = arguments.target.connect(to);
        let opened = socket.and_then(|socket| {
            let greeting = read_greeting(&socket)?;
            Ok((socket, greeting))
        });
        println!("connected");
        let (socket, (endpoint, source)) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                attempts.push(Attempt {
                    error: Some(name(&error)),
                    ..attempt(None, None)
                });
                break;
            }
        };
        while !stop.load(Ordering::Relaxed) {
            let start = Instant::now();
            let mut attempt = Attempt {
                peer: peer(&socket),
                local: local(&socket),
                ..attempt(Some(&endpoint), Some(source))
            };
            let result = echo(&socket);
            attempt.latency_ns = ns(start.elapsed());
            let failed = result.is_err();
            if let Err(error) = result {
                attempt.error = Some(name(&error));
                attempt.endpoint = None;
            }
            attempts.push(attempt);
            if failed {
                break;
            }
            std::thread::sleep(Duration::from_millis(arguments.pause_ms));
        }
    }
    println!("{}", serde_json::to_string(&Report::of(attempts, true))?);
    Ok(())
}

fn attempt(endpoint: Option<&str>, source: Option<SocketAddr>) -> Attempt {
    Attempt {
        endpoint: endpoint.map(str::to_owned),
        source,
        peer: None,
        local: None,
        from: None,
        error: None,
        latency_ns: 0,
    }
}

fn echo(mut socket: &Socket) -> io::Result<()> {
    let sent = *b"echo";
    let mut got = [0; 4];
    socket.write_all(&sent)?;
    socket.read_exact(&mut got)?;
    if sent == got {
        Ok(())
    } else {
        Err(io::Error::other("not what was sent"))
    }
}
