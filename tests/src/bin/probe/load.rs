//! Clients that connect all the time, to see whether anything fails while something changes.

use std::{
    io::{self, Read as _},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use clap::Args;
use dataplane_tests::report::{Errors, Failure, LoadEvent, LoadReport, Quantiles};

use crate::client::{Connect, Target, name, now_ns, read_greeting};

/// Further failures add nothing new one by one.
const FAILURES_KEPT: usize = 1000;

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    target: Target,
    /// Stop after so many milliseconds
    #[arg(long, value_name = "MS")]
    duration_ms: Option<u64>,
    /// Stop when stdin is closed
    #[arg(long)]
    until_stdin_closes: bool,
    /// How many clients at the same time
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Wait so many microseconds between two connections of a client
    #[arg(long, value_name = "US", default_value_t = 0)]
    pause_us: u64,
    /// Report every failure, and every answered connection: endpoint, begin and end of connect(2), time of the answer
    #[arg(long)]
    each: bool,
}

/// The results of one client. Endpoints are numbers here: there are few, and many connections.
#[derive(Default)]
struct Client {
    endpoints: Vec<(String, u64)>,
    connect_ns: Vec<u64>,
    /// Begin and duration of connect(2), when the answer was there, and the endpoint's number.
    events: Vec<(u64, u64, u64, usize)>,
    errors: Errors,
    failures: Vec<Failure>,
}

pub fn run(arguments: &Arguments) -> Result<()> {
    if arguments.duration_ms.is_none() && !arguments.until_stdin_closes {
        bail!("say when to stop: --duration-ms or --until-stdin-closes");
    }
    let stop = AtomicBool::new(false);
    let started_at_ns = now_ns();
    // The parent may now begin the change that the clients have to survive.
    println!("{{\"started_at_ns\":{started_at_ns}}}");
    let end = arguments
        .duration_ms
        .map(|ms| Instant::now() + Duration::from_millis(ms));
    let clients: Vec<Client> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..arguments.threads.max(1))
            .map(|_| scope.spawn(|| client(arguments, &stop, end)))
            .collect();
        if arguments.until_stdin_closes {
            let _ = io::stdin().read_to_end(&mut Vec::new());
            stop.store(true, Ordering::Relaxed);
        }
        clients
            .into_iter()
            .map(|client| client.join().expect("no client panics"))
            .collect()
    });
    let mut report = LoadReport {
        started_at_ns,
        ended_at_ns: now_ns(),
        ..LoadReport::default()
    };
    let mut connect_ns = Vec::new();
    for client in clients {
        client.add_to(&mut report, &mut connect_ns);
    }
    report.failures.sort_by_key(|failure| failure.at_ns);
    if !arguments.each {
        report.failures.truncate(FAILURES_KEPT);
    }
    report.connect_ns = Quantiles::of(&mut connect_ns);
    serde_json::to_writer(io::BufWriter::new(io::stdout().lock()), &report)?;
    Ok(())
}

fn client(arguments: &Arguments, stop: &AtomicBool, end: Option<Instant>) -> Client {
    let mut client = Client::default();
    for to in arguments.target.addresses() {
        if stop.load(Ordering::Relaxed) || end.is_some_and(|end| Instant::now() >= end) {
            break;
        }
        let Connect {
            socket,
            started_at_ns,
            took_ns,
        } = arguments.target.connect(to);
        let answer = socket.and_then(|socket| {
            let answer = read_greeting(&socket);
            // A reset leaves no TIME_WAIT behind: a minute of load would run out of ports.
            socket.set_linger(Some(Duration::ZERO))?;
            answer
        });
        match answer {
            Ok((endpoint, _)) => client.answered(started_at_ns, took_ns, endpoint, arguments.each),
            Err(error) => client.failed(started_at_ns, name(&error), arguments.each),
        }
        if arguments.pause_us > 0 {
            std::thread::sleep(Duration::from_micros(arguments.pause_us));
        }
    }
    client
}

impl Client {
    fn answered(&mut self, started_at_ns: u64, took_ns: u64, endpoint: String, each: bool) {
        let known = self
            .endpoints
            .iter()
            .position(|(name, _)| *name == endpoint);
        let number = known.unwrap_or_else(|| {
            self.endpoints.push((endpoint, 0));
            self.endpoints.len() - 1
        });
        self.endpoints[number].1 += 1;
        self.connect_ns.push(took_ns);
        if each {
            self.events.push((started_at_ns, took_ns, now_ns(), number));
        }
    }

    fn failed(&mut self, at_ns: u64, error: String, each: bool) {
        *self.errors.entry(error.clone()).or_default() += 1;
        if each || self.failures.len() < FAILURES_KEPT {
            self.failures.push(Failure { at_ns, error });
        }
    }

    fn add_to(self, report: &mut LoadReport, connect_ns: &mut Vec<u64>) {
        for (error, count) in self.errors {
            *report.errors.entry(error).or_default() += count;
        }
        report.failures.extend(self.failures);
        report.answered += self.connect_ns.len() as u64;
        connect_ns.extend(self.connect_ns);
        report.each.extend(self.events.iter().map(
            |&(started_at_ns, took_ns, answered_at_ns, number)| LoadEvent {
                started_at_ns,
                connected_at_ns: started_at_ns + took_ns,
                answered_at_ns,
                endpoint: self.endpoints[number].0.clone(),
            },
        ));
        for (endpoint, count) in self.endpoints {
            *report.endpoints.entry(endpoint).or_default() += count;
        }
    }
}
