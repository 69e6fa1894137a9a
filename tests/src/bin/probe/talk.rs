//! Applications with blocking sockets, which know nothing about the programs between them. One sends, the other sends
//! the bytes back; every byte is checked.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    thread,
    time::Duration,
};

use anyhow::Result;
use clap::Args;
use dataplane_tests::report::TalkReport;
use rand::{
    RngExt as _, SeedableRng as _,
    rngs::{SmallRng, StdRng},
};
use socket2::SockRef;

use crate::client::name;

/// More bytes at once than a socket takes.
const LARGE: usize = 150_000;

#[derive(Args)]
pub struct Arguments {
    /// Send back the bytes of others here
    #[arg(long, value_name = "ADDR", conflicts_with = "to")]
    serve: Option<SocketAddr>,
    /// Talk with the server that listens here
    #[arg(long, value_name = "ADDR", required_unless_present = "serve")]
    to: Option<SocketAddr>,
    /// How many connections, one after the other
    #[arg(long, default_value_t = 1)]
    count: u64,
    /// The seed of sizes and bytes
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

pub fn run(arguments: &Arguments) -> Result<()> {
    if let Some(at) = arguments.serve {
        return serve(at);
    }
    let Some(to) = arguments.to else {
        return Ok(());
    };
    let mut report = TalkReport::default();
    for number in 0..arguments.count {
        let mut dice = StdRng::seed_from_u64(arguments.seed.wrapping_add(number));
        let kind = number % 4;
        match talk(to, kind, &mut dice) {
            Ok(bytes) => {
                report.answered += 1;
                report.bytes += bytes;
            }
            Err(error) => {
                let error = format!("{} of {}", name(&error), KINDS[kind as usize]);
                *report.errors.entry(error).or_default() += 1;
            }
        }
    }
    serde_json::to_writer(io::stdout().lock(), &report)?;
    Ok(())
}

const KINDS: [&str; 4] = ["exchange", "questions", "half-close", "reset"];

fn talk(to: SocketAddr, kind: u64, dice: &mut StdRng) -> io::Result<u64> {
    let mut stream = TcpStream::connect(to)?;
    stream.set_nodelay(true)?;
    // Reads have no timeout: conversations are short, and this probe has to find connections that hang.
    stream.set_read_timeout(None)?;
    let total = if dice.random_ratio(1, 3) {
        dice.random_range(0..2_000_000)
    } else {
        dice.random_range(0..20_000)
    };
    let mut bytes = vec![0; total];
    // Without optimisation the other generator takes a second for 20 MB.
    SmallRng::seed_from_u64(dice.random()).fill(&mut bytes[..]);
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < total {
        let most = if dice.random() { LARGE } else { 300 };
        let next = total.min(at + dice.random_range(1..=most));
        pieces.push(at..next);
        at = next;
    }
    let same = |back: &[u8]| {
        let same = back == bytes;
        same.then_some(())
            .ok_or_else(|| io::Error::other("other bytes came back"))
    };
    match kind {
        // Both directions at once, by two threads.
        0 => {
            let mut writer = stream.try_clone()?;
            let mut back = Vec::with_capacity(total);
            let (wrote, read) = thread::scope(|scope| {
                let writing = scope.spawn(|| {
                    for piece in &pieces {
                        writer.write_all(&bytes[piece.clone()])?;
                    }
                    writer.shutdown(Shutdown::Write)
                });
                let read = stream.read_to_end(&mut back);
                (writing.join(), read)
            });
            wrote.map_err(|_| io::Error::other("a writer panicked"))??;
            read?;
            same(&back)?;
        }
        // First one direction, then the other.
        1 => {
            let mut back = Vec::with_capacity(total);
            for piece in &pieces {
                // No more than the sockets hold, because the peer does not read while it answers.
                for part in bytes[piece.clone()].chunks(30_000) {
                    stream.write_all(part)?;
                    let start = back.len();
                    back.resize(start + part.len(), 0);
                    stream.read_exact(&mut back[start..])?;
                }
            }
            same(&back)?;
            stream.shutdown(Shutdown::Write)?;
            if stream.read(&mut [0])? != 0 {
                return Err(io::Error::other("more came back"));
            }
        }
        // Sends all bytes and the end of the stream, then reads the answer.
        2 => {
            let bytes = &bytes[..total.min(50_000)];
            stream.write_all(bytes)?;
            stream.shutdown(Shutdown::Write)?;
            thread::sleep(Duration::from_millis(dice.random_range(0..3)));
            let mut back = Vec::new();
            stream.read_to_end(&mut back)?;
            if back != bytes {
                return Err(io::Error::other("other bytes came back"));
            }
        }
        // Something, and no end.
        _ => {
            stream.write_all(&bytes[..total.min(50_000)])?;
            SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
        }
    }
    Ok(total as u64)
}

fn serve(at: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(at)?;
    println!("ready");
    loop {
        let (mut stream, _) = listener.accept()?;
        thread::spawn(move || -> io::Result<()> {
            stream.set_nodelay(true)?;
            let mut buffer = vec![0; 64 << 10];
            loop {
                match stream.read(&mut buffer)? {
                    0 => return Ok(()),
                    read => stream.write_all(&buffer[..read])?,
                }
            }
        });
    }
}
