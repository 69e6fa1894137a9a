//! A client that sends requests as fast as it can, without waiting for answers: it notices states that last only a
//! moment.

use std::{
    collections::VecDeque,
    io::{self, Read as _},
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::Result;
use clap::{Args, ValueEnum};
use dataplane_tests::report::LoadReport;
use socket2::{Domain, Socket, Type};

use crate::client::{name, parse_greeting};

#[derive(Args)]
pub struct Arguments {
    /// Whom to ask
    #[arg(long, value_name = "ADDRESS:PORT")]
    to: SocketAddr,
    /// By which system calls
    #[arg(long)]
    by: By,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum By {
    /// TCP
    Tcp,
    /// UDP, connect(2)
    Connected,
    /// UDP, sendto(2)
    Unconnected,
}

/// How many requests wait for their answers.
const WAITING: usize = 256;

/// Asks until stdin is closed. Prints a line when it begins.
pub fn run(arguments: &Arguments) -> Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    let stopper = Arc::clone(&stop);
    std::thread::spawn(move || {
        let _ = io::stdin().read_to_end(&mut Vec::new());
        stopper.store(true, Ordering::Relaxed);
    });
    println!("{{}}");
    let mut report = LoadReport::default();
    let mut waiting = VecDeque::new();
    while !stop.load(Ordering::Relaxed) {
        match ask(arguments) {
            Ok(socket) => waiting.push_back(socket),
            Err(error) => *report.errors.entry(name(&error)).or_default() += 1,
        }
        if waiting.len() > WAITING {
            hear(waiting.pop_front(), &mut report);
        }
    }
    std::thread::sleep(std::time::Duration::from_millis(300));
    for socket in waiting {
        hear(Some(socket), &mut report);
    }
    serde_json::to_writer(io::stdout().lock(), &report)?;
    Ok(())
}

fn ask(arguments: &Arguments) -> io::Result<Socket> {
    let to = arguments.to;
    let kind = if arguments.by == By::Tcp {
        Type::STREAM
    } else {
        Type::DGRAM
    };
    let socket = Socket::new(Domain::for_address(to), kind, None)?;
    socket.set_nonblocking(true)?;
    match arguments.by {
        By::Tcp => {
            // A reset leaves no TIME_WAIT behind.
            socket.set_linger(Some(std::time::Duration::ZERO))?;
            match socket.connect(&to.into()) {
                Err(error) if error.raw_os_error() != Some(nix::libc::EINPROGRESS) => {
                    return Err(error);
                }
                _ => {}
            }
        }
        By::Connected => {
            socket.connect(&to.into())?;
            socket.send(b"x")?;
        }
        By::Unconnected => {
            socket.send_to(b"x", &to.into())?;
        }
    }
    Ok(socket)
}

/// Records the endpoint that has answered, if any.
fn hear(socket: Option<Socket>, report: &mut LoadReport) {
    let mut answer = [0; 256];
    if let Some(read) = socket.and_then(|mut socket| socket.read(&mut answer).ok())
        && let Ok((endpoint, _, _)) = parse_greeting(&answer[..read])
    {
        report.answered += 1;
        *report.endpoints.entry(endpoint).or_default() += 1;
    }
}
