//! Taking over the capture of a sidecar from its rules in a pod's network namespace, which this thread is in.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};

use super::{
    back::bring_back,
    captured::{self, Captured},
    place::Place,
    steps::{keep_nat, save, would_remove},
    told::{Outcome, Tell},
};
use crate::{
    kernel::{self, guard},
    takeover::{
        capture, cleanup,
        journal::{Journal, State},
        may_die,
        saved::Saved,
    },
};

/// How long no packet passes at most, if this command dies. Programs of iptables wait for a lock.
const GUARD: Duration = Duration::from_secs(30);

/// Takes the rules over, or says what it would do.
pub fn take_over(place: &Place, dry_run: bool, tell: &mut Tell<'_>) -> anyhow::Result<Outcome> {
    let directory = &place.directory;
    let _lock = place.lock(dry_run)?;
    let mut journal = current(place, dry_run)?;
    if let Some(found) = journal.take_if(|journal| journal.state == State::Restoring) {
        ensure!(
            !dry_run,
            "`takeover --revert` was interrupted: run it again first"
        );
        tell.step(
            "restore",
            "a revert was interrupted, and is finished first".to_owned(),
        );
        let saved = found.saved()?;
        guarded(tell, |tell| bring_back(place, &saved, tell))?;
        Journal::remove(directory)?;
    }
    let begun = journal.as_ref().filter(|of| of.state == State::Removing);
    if let Some(journal) = begun {
        let saved = journal.saved()?;
        if !saved.were_written_since(place.owners)? {
            let file = journal.file.display();
            tell.step(
                "save",
                format!("a take-over was interrupted; the rules are in {file}"),
            );
            tell.saved(&journal.file, &journal.sha256);
            return go_on(place, journal, &saved, dry_run, tell);
        }
        tell.step(
            "save",
            "a take-over was interrupted, and somebody has written rules since: beginning anew"
                .to_owned(),
        );
    }
    let saved = Saved::of_kernel(place.owners)?;
    if saved.is_empty() {
        return nothing(place, journal.as_ref(), tell);
    }
    let new = save(place, &saved, dry_run, tell)?;
    let outcome = begin(place, &new, &saved, dry_run, tell);
    if !dry_run && !new.is_written(directory) {
        // The rules stay, and nobody needs the file.
        fs::remove_file(&new.file).unwrap_or_default();
    }
    outcome
}

/// The journal. What it says of an earlier start of the machine is about a network namespace that is gone.
fn current(place: &Place, dry_run: bool) -> anyhow::Result<Option<Journal>> {
    let directory = &place.directory;
    let journal = Journal::read(directory)?;
    if journal.as_ref().is_some_and(|of| !of.is_of_this_boot()) {
        if !dry_run {
            Journal::remove(directory)?;
        }
        return Ok(None);
    }
    Ok(journal)
}

/// Takes over rules that are all there.
fn begin(
    place: &Place,
    journal: &Journal,
    saved: &Saved,
    dry_run: bool,
    tell: &mut Tell<'_>,
) -> anyhow::Result<Outcome> {
    let same = is_same(place, saved, tell).context("nothing was changed")?;
    if !same {
        return Ok(Outcome::Differs);
    }
    if dry_run {
        keep_nat(true, tell)?;
        tell.step("guard", "would let no packet pass meanwhile".to_owned());
        return would_remove(place, tell);
    }
    keep_nat(false, tell).context("nothing was changed")?;
    ensure!(
        !saved.were_written_since(place.owners)?,
        "somebody has changed the rules meanwhile; nothing was changed: run this command again"
    );
    journal
        .write(&place.directory)
        .context("nothing was changed")?;
    remove_or_restore(place, journal, saved, tell)
}

/// Goes on where another command was killed.
fn go_on(
    place: &Place,
    journal: &Journal,
    saved: &Saved,
    dry_run: bool,
    tell: &mut Tell<'_>,
) -> anyhow::Result<Outcome> {
    let same = is_same(place, saved, tell).context(
        "a take-over was interrupted, and some of the rules may be gone: run `takeover` or `takeover --revert` again",
    )?;
    if dry_run {
        return if same {
            would_remove(place, tell)
        } else {
            Ok(Outcome::Differs)
        };
    }
    if same {
        keep_nat(false, tell)?;
        return remove_or_restore(place, journal, saved, tell);
    }
    guarded(tell, |tell| bring_back(place, saved, tell))?;
    Journal::remove(&place.directory)?;
    Ok(Outcome::Differs)
}

/// There are no rules.
fn nothing(
    place: &Place,
    journal: Option<&Journal>,
    tell: &mut Tell<'_>,
) -> anyhow::Result<Outcome> {
    let owner = place.owner();
    let Some(journal) = journal.filter(|journal| journal.state == State::TakenOver) else {
        tell.step(
            "save",
            format!("there are no rules of {owner} in this network namespace"),
        );
        return Ok(Outcome::Nothing);
    };
    let (at, file) = (&journal.saved, journal.file.display());
    tell.step(
        "save",
        format!("the rules were taken over already; those of {at} are in {file}"),
    );
    tell.saved(&journal.file, &journal.sha256);
    let _: Captured = captured::find(place).context("the rules are gone")?;
    Ok(Outcome::TakenOver)
}

/// Whether the dataplane captures what the rules do. Says what differs.
fn is_same(place: &Place, saved: &Saved, tell: &mut Tell<'_>) -> anyhow::Result<bool> {
    let captured = captured::find(place)?;
    let of_rules = capture::read(&saved.as_texts()).map_err(|fault| anyhow::anyhow!("{fault}"))?;
    let differences = captured.differences(&of_rules);
    if !differences.is_empty() {
        tell.differs_in_capture(&differences);
        return Ok(false);
    }
    tell.step(
        "compare",
        format!("the dataplane captures {} as the rules do", captured.name),
    );
    Ok(true)
}

/// Removes the rules; if that fails, they come back.
fn remove_or_restore(
    place: &Place,
    journal: &Journal,
    saved: &Saved,
    tell: &mut Tell<'_>,
) -> anyhow::Result<Outcome> {
    let removed = guarded(tell, |tell| {
        let Err(why) = remove(place, tell) else {
            return Ok(None);
        };
        tell.step("restore", format!("{why:#}: the rules come back"));
        bring_back(place, saved, tell).with_context(|| {
            let file = journal.file.display();
            format!("{why:#}; the rules could not be brought back: they are in {file}, and the next `takeover` goes on")
        })?;
        Ok(Some(why))
    })?;
    if let Some(why) = removed {
        Journal::remove(&place.directory)?;
        bail!("{why:#}; the rules are back as they were");
    }
    let journal = Journal {
        state: State::TakenOver,
        ..journal.clone()
    };
    let written = journal.write(&place.directory);
    written.context("the rules are gone, and the dataplane captures; run this command again")?;
    Ok(Outcome::TakenOver)
}

/// Removes the rules, and looks whether the pod is captured then.
fn remove(place: &Place, tell: &mut Tell<'_>) -> anyhow::Result<()> {
    let done = cleanup::clean_up(None, place.owners, false).context("rules cannot be removed")?;
    for step in &done.steps {
        tell.change("remove", step, false);
    }
    for stays in done.stays {
        tell.stays(&stays);
    }
    let captured = captured::find(place).context("without the rules")?;
    tell.step(
        "check",
        format!("the dataplane captures {} without the rules", captured.name),
    );
    Ok(())
}

/// Does something while no packet passes this network namespace.
fn guarded<T>(
    tell: &mut Tell<'_>,
    work: impl FnOnce(&mut Tell<'_>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    may_die();
    guard::up(GUARD).context("cannot keep packets from passing; no rule was changed")?;
    may_die();
    let start = Instant::now();
    tell.step(
        "guard",
        format!(
            "no packet passes this network namespace, for {} s at most",
            GUARD.as_secs()
        ),
    );
    let result = work(tell);
    may_die();
    let down = guard::down();
    may_die();
    match down {
        Ok(_) => tell.step(
            "guard",
            format!(
                "packets pass again, after {} ms",
                start.elapsed().as_millis()
            ),
        ),
        Err(why) => tell.step(
            "guard",
            format!(
                "cannot be removed, and ends by itself {} s after its begin: {why}",
                GUARD.as_secs()
            ),
        ),
    }
    result
}

/// Brings the rules back. The agent's capture comes before them, so the workload has to leave it then.
pub fn revert(place: &Place, dry_run: bool, tell: &mut Tell<'_>) -> anyhow::Result<Outcome> {
    let directory = &place.directory;
    let _lock = place.lock(dry_run)?;
    let journal = current(place, dry_run)?;
    let journal = journal.context("nothing was taken over in this network namespace")?;
    let saved = journal.saved()?;
    tell.saved(&journal.file, &journal.sha256);
    let is_there = match journal.state {
        State::TakenOver | State::Restored => !Saved::of_kernel(place.owners)?.is_empty(),
        // Some of the rules may be there.
        State::Removing | State::Restoring => false,
    };
    if is_there {
        tell.step("restore", "the rules are there".to_owned());
    } else {
        has_a_proxy(&saved)?;
        if dry_run {
            for step in &saved.bring_back(place.owners, true)?.steps {
                tell.change("restore", step, true);
            }
            return Ok(Outcome::WouldGiveBack);
        }
        let restoring = Journal {
            state: State::Restoring,
            ..journal.clone()
        };
        restoring.write(directory)?;
        guarded(tell, |tell| bring_back(place, &saved, tell)).context(
            "some of the rules may be missing, and the dataplane captures; run this command again",
        )?;
    }
    if dry_run {
        return Ok(Outcome::WouldGiveBack);
    }
    let restored = Journal {
        state: State::Restored,
        ..journal
    };
    restored.write(directory)?;
    if let Some(captured) = captured::enrolled(place)? {
        tell.step(
            "release",
            format!(
                "the dataplane captures {captured} beside the rules. Take it out of the agent's configuration, or remove its \
                 label, and run this command again"
            ),
        );
        return Ok(Outcome::AgentRuns);
    }
    Journal::remove(directory)?;
    tell.step(
        "release",
        "the dataplane captures nobody in this network namespace".to_owned(),
    );
    Ok(Outcome::GivenBack)
}

/// Fails if nobody listens where the rules lead: with them, the pod's connections would fail.
fn has_a_proxy(saved: &Saved) -> anyhow::Result<()> {
    let of_rules = capture::read(&saved.as_texts()).map_err(|fault| anyhow::anyhow!("{fault}"))?;
    for port in [of_rules.outbound, of_rules.inbound] {
        ensure!(
            port == 0 || !kernel::listening(port)?.is_empty(),
            "the rules lead to port {port}, and nobody listens there: start the sidecar first; nothing was changed"
        );
    }
    Ok(())
}
