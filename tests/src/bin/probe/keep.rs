//! Many open connections, which are asked again and again whether they are alive.

use std::{
    fs,
    io::{self, BufRead as _, Read as _, Write as _},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use clap::Args;
use dataplane_tests::report::{Errors, KeepReport};
use nix::{
    errno::Errno,
    sys::resource::{Resource, getrlimit, setrlimit},
};
use socket2::{Domain, Socket, Type};

use crate::client::{Connect, Target, name, ns, read_greeting};

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    target: Target,
    /// How many connections to make and to keep
    #[arg(long)]
    count: usize,
    /// Only begin to connect, and send and wait for nothing; they are reset in the end
    #[arg(long)]
    slow: bool,
    /// Send this once on each connection, and read nothing
    #[arg(long, value_name = "TEXT", conflicts_with = "slow")]
    say: Option<String>,
    /// From how many threads
    #[arg(long, default_value_t = 2)]
    threads: usize,
}

pub fn run(arguments: &Arguments) -> Result<()> {
    raise_files()?;
    let begin = Instant::now();
    let threads = arguments.threads.max(1);
    let opened: Vec<(Vec<Socket>, Errors)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                let share = (arguments.count + threads - 1 - thread) / threads;
                scope.spawn(move || {
                    if arguments.slow {
                        return begin_to_open(&arguments.target, share);
                    }
                    open(&arguments.target, share, |socket| match &arguments.say {
                        Some(text) => (&*socket).write_all(text.as_bytes()),
                        None => read_greeting(socket).map(drop),
                    })
                })
            })
            .collect();
        workers
            .into_iter()
            .map(|worker| worker.join().expect("no thread panics"))
            .collect()
    });
    let (mut held, errors): (Vec<_>, Vec<_>) = opened.into_iter().unzip();
    report(&held, errors, begin)?;
    for line in io::stdin().lock().lines() {
        line?;
        let begin = Instant::now();
        let errors = std::thread::scope(|scope| {
            let workers: Vec<_> = held
                .iter_mut()
                .map(|held| scope.spawn(|| ask(held)))
                .collect();
            workers
                .into_iter()
                .map(|worker| worker.join().expect("no thread panics"))
                .collect()
        });
        report(&held, errors, begin)?;
    }
    Ok(())
}

/// As many files as the kernel can give; without the privilege, as many as the limit allows.
pub fn raise_files() -> Result<()> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).context("ask for the limit of files")?;
    let all = fs::read_to_string("/proc/sys/fs/nr_open").unwrap_or_default();
    let all = all.trim().parse().unwrap_or(most);
    setrlimit(Resource::RLIMIT_NOFILE, all, all)
        .or_else(|_| setrlimit(Resource::RLIMIT_NOFILE, most, most))
        .context("raise the limit of files")
}

fn open(
    target: &Target,
    count: usize,
    begin: impl Fn(&Socket) -> io::Result<()>,
) -> (Vec<Socket>, Errors) {
    let mut held = Vec::with_capacity(count);
    let mut errors = Errors::new();
    for to in target.addresses().take(count) {
        let Connect { socket, .. } = target.connect(to);
        match socket.and_then(|socket| begin(&socket).map(|()| socket)) {
            Ok(socket) => held.push(socket),
            Err(error) => *errors.entry(name(&error)).or_default() += 1,
        }
    }
    (held, errors)
}

fn begin_to_open(target: &Target, count: usize) -> (Vec<Socket>, Errors) {
    let mut held = Vec::with_capacity(count);
    let mut errors = Errors::new();
    for to in target.addresses().take(count) {
        let begin = || {
            let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
            socket.set_nonblocking(true)?;
            socket.set_linger(Some(Duration::ZERO))?;
            match socket.connect(&to.into()) {
                Err(error) if error.raw_os_error() != Some(Errno::EINPROGRESS as i32) => Err(error),
                _ => Ok(socket),
            }
        };
        match begin() {
            Ok(socket) => held.push(socket),
            Err(error) => *errors.entry(name(&error)).or_default() += 1,
        }
    }
    (held, errors)
}

/// Sends a byte on each connection and reads it back; closes those that fail.
fn ask(held: &mut Vec<Socket>) -> Errors {
    let mut errors = Errors::new();
    held.retain_mut(|socket| match echo(socket) {
        Ok(()) => true,
        Err(error) => {
            *errors.entry(name(&error)).or_default() += 1;
            false
        }
    });
    errors
}

fn echo(socket: &mut Socket) -> io::Result<()> {
    socket.write_all(b"?")?;
    socket.read_exact(&mut [0])
}

fn report(held: &[Vec<Socket>], errors: Vec<Errors>, begin: Instant) -> Result<()> {
    let mut all = Errors::new();
    for (error, count) in errors.into_iter().flatten() {
        *all.entry(error).or_default() += count;
    }
    let report = KeepReport {
        alive: held.iter().map(|held| held.len() as u64).sum(),
        errors: all,
        took_ns: ns(begin.elapsed()),
    };
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}
