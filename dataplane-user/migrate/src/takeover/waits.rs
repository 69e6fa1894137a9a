//! `--wait`: starts the take-over when an agent serves.

use std::{thread, time::Duration};

use admin::{client::Error, report::Report};

use super::{
    place::Place,
    steps,
    told::{Outcome, Tell},
};

/// Interval at which the agent is asked whether it serves.
const LOOK: Duration = Duration::from_millis(200);
/// Maximum number of attempts if something differs: kube-proxy may be about to write a change that the agent already
/// has.
const TRIES: u32 = 5;
/// The pause before the next attempt.
const PAUSE: Duration = Duration::from_secs(5);

/// Takes over the node as soon as the agent reports that it is healthy.
pub fn take_over(place: &Place, tell: &mut Tell<'_>) -> anyhow::Result<Outcome> {
    let mut said = String::new();
    loop {
        let why = match place.agent.get::<Report>("/status") {
            Ok(report) if report.healthy => break,
            Ok(_) => "the agent is not healthy: `dataplane status` says why".to_owned(),
            Err(error @ Error::Denied { .. }) => return Err(error.into()),
            Err(error) => error.to_string(),
        };
        if said != why {
            tell.step("wait", why.clone());
            said = why;
        }
        thread::sleep(LOOK);
    }
    for _ in 1..TRIES {
        let outcome = steps::take_over(place, false, tell)?;
        if outcome != Outcome::Differs {
            return Ok(outcome);
        }
        let text = format!("something differs: trying again in {PAUSE:?}");
        tell.step("wait", text);
        thread::sleep(PAUSE);
    }
    steps::take_over(place, false, tell)
}
