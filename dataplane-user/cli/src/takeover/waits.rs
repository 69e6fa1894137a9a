//! `run --takeover`: the take-over that begins when this process's agent serves.

use std::{
    io::{self, Write},
    thread,
    time::Duration,
};

use admin::{client::Client, report::Report};
use anstream::adapter::strip_str;
use settings::Settings;
use takeover::journal::DIRECTORY;
use tracing::{error, info, warn};

use super::{
    place::{OWNERS, Place},
    steps,
    told::{Outcome, Tell},
};
use crate::output::Format;

/// How often the agent is asked whether it serves.
const LOOK: Duration = Duration::from_millis(200);
/// How often a take-over is tried if something differs: kube-proxy may just be writing a change that the agent knows.
const TRIES: u32 = 5;
/// How long it is waited before the next try.
const PAUSE: Duration = Duration::from_secs(5);

/// Starts a thread that takes the node over as soon as the agent calls itself healthy.
///
/// # Errors
/// No thread can be started.
pub fn when_it_serves(settings: Settings, agent: Client) -> io::Result<()> {
    let take_over = move || {
        let of_rules = settings.source.iptables.as_ref();
        let directory = of_rules.and_then(|of| of.takeover_dir.clone());
        let place = Place {
            directory: directory.unwrap_or_else(|| DIRECTORY.into()),
            bpffs: settings.kernel.bpffs(),
            cgroup: kernel::Paths::find_or_guess(
                settings.kernel.bpffs(),
                settings.kernel.cgroup.clone(),
            )
            .cgroup,
            agent,
            owners: OWNERS,
        };
        let is_ready = || {
            place
                .agent
                .get::<Report>("/status")
                .is_ok_and(|report| report.healthy)
        };
        while !is_ready() {
            thread::sleep(LOOK);
        }
        for nth in 1..=TRIES {
            let mut out = Lines::default();
            match steps::take_over(&place, false, &mut Tell::new(Format::Text, &mut out)) {
                Ok(Outcome::Differs) if nth < TRIES => {
                    warn!("take-over: something differs; trying again in {PAUSE:?}");
                    thread::sleep(PAUSE);
                }
                Ok(Outcome::Differs) => {
                    return error!(
                        "take-over: something differs: the agent serves beside kube-proxy's rules; see `dataplane takeover --dry-run`"
                    );
                }
                Ok(_) => return,
                Err(why) => return error!("take-over: {why:#}; the agent goes on serving"),
            }
        }
    };
    thread::Builder::new()
        .name("takeover".to_owned())
        .spawn(take_over)?;
    Ok(())
}

/// Logs each line.
#[derive(Default)]
struct Lines(Vec<u8>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for byte in bytes {
            if *byte == b'\n' {
                let line = String::from_utf8_lossy(&self.0);
                info!("take-over: {}", strip_str(&line));
                self.0.clear();
            } else {
                self.0.push(*byte);
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
