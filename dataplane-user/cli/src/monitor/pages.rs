//! Lines that the agent keeps while `dataplane monitor` reads them: DNS queries, and connections that the proxy refuses.

use std::{
    io::{self, BufWriter, Write},
    process::ExitCode,
    thread,
    time::Duration,
};

use admin::client::{self, Client};
use serde::{Serialize, de::DeserializeOwned};
use terminal::output::{self, Format};
use threads::Page;

use super::MonitorArgs;

/// Pause after an answer of the agent without a line.
const POLL: Duration = Duration::from_millis(100);
/// Pause between two attempts to reach an agent.
const RETRY: Duration = Duration::from_secs(1);

/// A kind of lines.
pub struct Kind<T> {
    /// The word for the hook.
    pub hook: &'static str,
    /// The path of the first page.
    pub path: &'static str,
    /// Writes a line for people.
    pub text: fn(&mut dyn Write, &T) -> io::Result<()>,
}

/// Shows lines until the user stops the command, or the requested number is reached.
pub fn show<T: Serialize + DeserializeOwned>(
    args: &MonitorArgs,
    kind: &Kind<T>,
) -> anyhow::Result<ExitCode> {
    anyhow::ensure!(
        args.reason.is_empty() && args.iface.is_none() && args.service.is_none(),
        "--reason, --iface and --service have no meaning with --hook {}; remove them",
        kind.hook
    );
    let client = args.socket.client();
    let mut out = BufWriter::new(output::stdout());
    let mut left = args.count.unwrap_or(u64::MAX);
    let mut page: Page<T> = client.get(kind.path)?;
    loop {
        let Page { events, next, lost } = page;
        if lost > 0 {
            eprintln!("note: {lost} lines came faster than they could be shown");
        }
        let many = usize::try_from(left).unwrap_or(usize::MAX);
        for line in events.iter().take(many) {
            match args.output {
                Format::Text => (kind.text)(&mut out, line)?,
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
        if events.is_empty() {
            thread::sleep(POLL);
        }
        page = match client.get(&format!("{}?from={next}", kind.path)) {
            // Another agent may start, for example after an upgrade. Its numbers begin again.
            Err(client::Error::NotRunning { .. }) => {
                eprintln!("note: no agent runs; waiting for one");
                wait_for_agent(&client, kind.path)
            }
            page => page?,
        };
    }
}

/// Waits for an agent, and returns its first answer. An agent that starts has no earlier lines.
fn wait_for_agent<T: DeserializeOwned>(client: &Client, path: &str) -> Page<T> {
    loop {
        thread::sleep(RETRY);
        if let Ok(page) = client.get(path) {
            return page;
        }
    }
}
