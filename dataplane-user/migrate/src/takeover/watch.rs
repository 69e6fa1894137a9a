//! `--watch`: takes over again when kube-proxy writes its rules again.

use std::{thread, time::Duration};

use kernel::netfilter;
use takeover::journal::{Journal, State};

use super::{
    place::Place,
    steps::take_over,
    told::{Outcome, Tell},
};

/// Interval at which the kernel's tables are checked for rules.
const LOOK: Duration = Duration::from_secs(2);

/// Takes over, with all checks, each time that kube-proxy has written its rules again. Returns when the node is
/// returned to kube-proxy.
pub fn watch(place: &Place, tell: &mut Tell<'_>) -> anyhow::Result<()> {
    loop {
        thread::sleep(LOOK);
        let journal = Journal::read(&place.directory)?;
        if !journal
            .is_some_and(|journal| matches!(journal.state, State::TakenOver | State::Removing))
        {
            tell.step("watch", "the node was given back: not watching any more");
            return Ok(());
        }
        if !has_rules()? {
            continue;
        }
        tell.step("watch", "kube-proxy has written its rules again");
        match take_over(place, false, tell) {
            Ok(Outcome::Differs) => {
                tell.step("watch", "the rules stay for now, because they differ");
            }
            Ok(_) => {}
            // The next attempt may succeed.
            Err(why) => tell.step("watch", format!("{why:#}")),
        }
    }
}

/// Returns true if the kernel has rules of kube-proxy. Runs no program.
fn has_rules() -> anyhow::Result<bool> {
    let tables = netfilter::tables()?;
    Ok(tables.iter().any(|table| {
        table.name == "kube-proxy"
            || table
                .chains
                .iter()
                .any(|chain| chain.name == "KUBE-SERVICES")
    }))
}
