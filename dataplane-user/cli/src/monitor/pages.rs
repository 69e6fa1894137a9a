//! Lines that the agent keeps while `dataplane monitor` reads them: DNS queries, and connections that the proxy refuses.

use std::{
    io::{self, BufWriter, Write},
    process::ExitCode,
    thread,
    time::Duration,
};

use admin::{
    Refusals,
    client::{self, Client},
};
use dns::{Answered, Queries};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use terminal::output::{self, Format};

use super::MonitorArgs;

/// Pause after an answer of the agent without a line.
const POLL: Duration = Duration::from_millis(100);
/// Pause between two attempts to reach an agent.
const RETRY: Duration = Duration::from_secs(1);

/// A page of lines, as the agent answers.
pub trait Page: DeserializeOwned {
    /// A line.
    type Line: Serialize;
    /// The path of the first page.
    const PATH: &'static str;
    /// The word for the hook.
    const HOOK: &'static str;

    /// Returns the lines, the number of the first line of the next page, and the number of lines that were lost.
    fn parts(self) -> (Vec<Self::Line>, u64, u64);

    /// Writes a line for people.
    fn text(out: &mut dyn Write, line: &Self::Line) -> io::Result<()>;
}

impl Page for Queries {
    type Line = Answered;
    const PATH: &'static str = "/dns/queries";
    const HOOK: &'static str = "dns";

    fn parts(self) -> (Vec<Answered>, u64, u64) {
        (self.queries, self.next, self.lost)
    }

    fn text(out: &mut dyn Write, line: &Answered) -> io::Result<()> {
        super::queries::text(out, line)
    }
}

impl Page for Refusals {
    type Line = Value;
    const PATH: &'static str = "/refusals";
    const HOOK: &'static str = "proxy";

    fn parts(self) -> (Vec<Value>, u64, u64) {
        (self.refusals, self.next, self.lost)
    }

    fn text(out: &mut dyn Write, line: &Value) -> io::Result<()> {
        super::refusals::text(out, line)
    }
}

/// Shows lines until the user stops the command, or the requested number is reached.
pub fn show<P: Page>(args: &MonitorArgs) -> anyhow::Result<ExitCode> {
    anyhow::ensure!(
        args.reason.is_empty() && args.iface.is_none() && args.service.is_none(),
        "--reason, --iface and --service have no meaning with --hook {}; remove them",
        P::HOOK
    );
    let client = args.socket.client();
    let mut out = BufWriter::new(output::stdout());
    let mut left = args.count.unwrap_or(u64::MAX);
    let mut page: P = client.get(P::PATH)?;
    loop {
        let (lines, next, lost) = page.parts();
        if lost > 0 {
            eprintln!("note: {lost} lines came faster than they could be shown");
        }
        let many = usize::try_from(left).unwrap_or(usize::MAX);
        for line in lines.iter().take(many) {
            match args.output {
                Format::Text => P::text(&mut out, line)?,
                Format::Json => {
                    serde_json::to_writer(&mut out, line)?;
                    writeln!(out)?;
                }
            }
            left -= 1;
        }
        out.flush()?;
        if left == 0 {
            return Ok(ExitCode::SUCCESS);
        }
        if lines.is_empty() {
            thread::sleep(POLL);
        }
        page = match client.get(&format!("{}?from={next}", P::PATH)) {
            // Another agent may start, for example after an upgrade. Its numbers begin again.
            Err(client::Error::NotRunning { .. }) => {
                eprintln!("note: no agent runs; waiting for one");
                wait_for_agent(&client)
            }
            page => page?,
        };
    }
}

/// Waits for an agent, and returns its first answer. An agent that starts has no earlier lines.
fn wait_for_agent<P: Page>(client: &Client) -> P {
    loop {
        thread::sleep(RETRY);
        if let Ok(page) = client.get(P::PATH) {
            return page;
        }
    }
}
