//! Takes over the capture of a pod's connections from a sidecar's rules. The thread is in the pod's network namespace.

use std::{fs, path::Path, time::Instant};

use anyhow::{Context as _, bail, ensure};
use kernel::netfilter::guard;
use model::HBONE;
use takeover::{
    journal::{Journal, State},
    may_die,
};

use super::{
    back::{bring_back, wanted},
    captured,
    place::Place,
    steps::{keep_nat, remove_rules, save, would_remove},
    told::{Outcome, Tell},
};
use crate::{
    commands::import_mesh,
    rules::{
        capture::{self, Capture},
        rails::{self, Rails},
        saved::Saved,
    },
};

/// Takes over from the rules. A dry run only reports the steps.
pub fn take_over(place: &Place, dry_run: bool, tell: &mut Tell<'_>) -> anyhow::Result<Outcome> {
    let directory = &place.directory;
    let _lock = place.lock(dry_run)?;
    let mut journal = current(place, dry_run)?;
    if let Some(found) = journal.take_if(|journal| journal.state == State::Restoring) {
        ensure!(
            !dry_run,
            "`dataplane-migrate takeover --revert` was interrupted: run it again first"
        );
        tell.step("restore", "a revert was interrupted, and is finished first");
        let saved = Saved::of(&found)?;
        no_others_are_there(place, &saved)?;
        guarded(tell, |tell| come_back(place, &saved, tell))?;
        Journal::remove(directory)?;
    }
    let begun = journal.as_ref().filter(|of| of.state == State::Removing);
    if let Some(journal) = begun {
        let saved = Saved::of(journal)?;
        if !saved.were_written_since(place.owners)? {
            let file = journal.file.display();
            tell.step(
                "save",
                format!("a take-over was interrupted; the rules are in {file}"),
            );
            tell.saved(&journal.file, &journal.sha256);
            return go_on(place, journal, &saved, dry_run, tell);
        }
        let file = journal.file.display();
        tell.step(
            "save",
            format!(
                "a take-over was interrupted, and somebody has written rules since: beginning anew. {file} keeps those of before"
            ),
        );
    }
    let saved = Saved::of_kernel(place.owners)?;
    if saved.is_empty() {
        return nothing(place, journal.as_ref(), tell);
    }
    let new = save(place, &saved, dry_run, tell)?;
    let checked = check(place, &saved, dry_run, tell);
    if !dry_run && !matches!(checked, Ok(true)) {
        // The rules stay, so the file is not needed.
        fs::remove_file(&new.file).unwrap_or_default();
    }
    if !checked.context("nothing was changed")? {
        return Ok(Outcome::Differs);
    }
    if dry_run {
        tell.step("guard", "would let no packet pass meanwhile");
        return would_remove(place, tell);
    }
    remove_or_restore(place, &new, &saved, tell)
}

/// Reads the journal. A journal from before the last boot concerns a network namespace that no longer exists.
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

/// Fails if the rules do more than capture connections, so that the pod's connections would break without them.
fn only_capture() -> anyhow::Result<()> {
    // Reads all rules: rules of others are not saved, but may precede the mesh's.
    let of_rules = import_mesh::of_namespace(None)?;
    ensure!(
        of_rules.owner != capture::AMBIENT,
        "the rules are those of Istio's ambient mode. The pod's connections are in ztunnel's tunnels (HBONE, port {HBONE}), and would break \
         without the rules. Take the pod out of ambient mode, so that Istio's CNI agent removes the rules; then have the dataplane capture it"
    );
    ensure!(
        !of_rules.by_tproxy,
        "the rules capture inbound connections by TPROXY: the sidecar connects to the application from its clients' addresses, and only \
         these rules bring the application's answers back to the sidecar. Have the sidecar capture by REDIRECT \
         (sidecar.istio.io/interceptionMode), or restart the pod without it"
    );
    Ok(())
}

/// Runs the checks before the first rule is removed. Returns false if something differs; the differences are then
/// printed.
fn check(place: &Place, saved: &Saved, dry_run: bool, tell: &mut Tell<'_>) -> anyhow::Result<bool> {
    only_capture()?;
    if !is_same(place, saved, "compare", tell)? {
        tell.step("compare", "nothing was changed");
        return Ok(false);
    }
    keep_nat(dry_run, tell)?;
    ensure!(
        !saved.were_written_since(place.owners)?,
        "somebody has changed the rules meanwhile: run this command again"
    );
    Ok(true)
}

/// Finishes a take-over that was killed. If something differs, undoes the take-over.
fn go_on(
    place: &Place,
    journal: &Journal,
    saved: &Saved,
    dry_run: bool,
    tell: &mut Tell<'_>,
) -> anyhow::Result<Outcome> {
    let same = is_same(place, saved, "compare", tell).context(
        "a take-over was interrupted, and some of the rules may be gone: run `dataplane-migrate takeover` or `dataplane-migrate takeover --revert` again",
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
    guarded(tell, |tell| come_back(place, saved, tell))?;
    Journal::remove(&place.directory)?;
    Ok(Outcome::Differs)
}

/// Reports that the mesh has no rules, or has none since an earlier take-over.
fn nothing(
    place: &Place,
    journal: Option<&Journal>,
    tell: &mut Tell<'_>,
) -> anyhow::Result<Outcome> {
    let owner = place.owner();
    let Some(journal) = journal.filter(|journal| journal.state == State::TakenOver) else {
        tell.step(
            "save",
            format!(
                "there are no rules of {owner} in this network namespace, so nothing was taken over. --netns names the \
                 network namespace of a pod"
            ),
        );
        return Ok(Outcome::Nothing);
    };
    let (at, file) = (&journal.saved, journal.file.display());
    tell.step(
        "save",
        format!("the rules were taken over already; those of {at} are in {file}"),
    );
    tell.saved(&journal.file, &journal.sha256);
    // A command may have been killed after its last change, so the guard may still be up.
    guard::down()?;
    let same = is_same(place, &Saved::of(journal)?, "check", tell).context("the rules are gone")?;
    ensure!(
        same,
        "the rules are gone, and the dataplane captures other connections than they did"
    );
    Ok(Outcome::TakenOver)
}

/// Returns true if the dataplane captures the connections that the rules capture. Prints the differences.
fn is_same(
    place: &Place,
    saved: &Saved,
    step: &'static str,
    tell: &mut Tell<'_>,
) -> anyhow::Result<bool> {
    let captured = captured::find(place)?;
    let of_rules = of_rules(saved)?;
    let differences = captured.differences(&of_rules)?;
    if !differences.is_empty() {
        tell.differs_in_capture(&differences);
        return Ok(false);
    }
    tell.step(
        step,
        format!("the dataplane captures {} as the rules do", captured.name),
    );
    Ok(true)
}

/// Determines the connections that the saved rules capture in this network namespace.
fn of_rules(saved: &Saved) -> anyhow::Result<Capture> {
    let read = capture::read(&saved.as_texts()).map_err(|fault| anyhow::anyhow!("{fault}"))?;
    let ways = if read.at_interfaces.is_empty() {
        None
    } else {
        kernel::routing::ways_out()?
    };
    let read = read.by_routes(ways.as_deref());
    read.map_err(|fault| anyhow::anyhow!("{fault}"))
}

/// Removes the rules. If a step fails, restores them.
fn remove_or_restore(
    place: &Place,
    journal: &Journal,
    saved: &Saved,
    tell: &mut Tell<'_>,
) -> anyhow::Result<Outcome> {
    let removed = guarded(tell, |tell| {
        // From here on, the next command continues this take-over.
        journal
            .write(State::Removing, &place.directory)
            .context("nothing was changed")?;
        let Err(why) = remove(place, saved, tell) else {
            return Ok(None);
        };
        tell.step("restore", format!("{why:#}: the rules come back"));
        come_back(place, saved, tell).with_context(|| {
            let file = journal.file.display();
            format!("{why:#}; the rules could not be brought back: they are in {file}, and the next `dataplane-migrate takeover` goes on")
        })?;
        Ok(Some(why))
    })?;
    if let Some(why) = removed {
        Journal::remove(&place.directory)?;
        bail!("{why:#}; the rules are back as they were");
    }
    let written = journal.write(State::TakenOver, &place.directory);
    written.context("the rules are gone, and the dataplane captures; run this command again")?;
    Ok(Outcome::TakenOver)
}

/// Removes the rules, and checks that the dataplane still captures the connections that they captured.
fn remove(place: &Place, saved: &Saved, tell: &mut Tell<'_>) -> anyhow::Result<()> {
    remove_rules(place, tell)?;
    ensure!(
        is_same(place, saved, "check", tell).context("without the rules")?,
        "without the rules, the dataplane captures other connections than they did"
    );
    Ok(())
}

/// Restores the rules. Fails if the mesh has other rules, because a mesh writes its rules only once.
fn come_back(place: &Place, saved: &Saved, tell: &mut Tell<'_>) -> anyhow::Result<()> {
    ensure!(
        bring_back(place, saved, tell)?,
        "somebody has written other rules: they stay, and the saved ones do not come back"
    );
    Ok(())
}

/// Fails if the kernel has rules of the mesh that are not among the saved ones. Call it before the guard is up and
/// before the first change.
fn no_others_are_there(place: &Place, saved: &Saved) -> anyhow::Result<()> {
    ensure!(
        !saved.were_written_since(place.owners)?,
        "somebody has written other rules of {} than those that were saved, and nothing was changed. If the saved ones are to come \
         back, remove the others (`dataplane-migrate cleanup`), and run this command again",
        place.owner()
    );
    Ok(())
}

/// Runs `work` while no packet passes this network namespace, except on loopback. If `work` fails, the guard stays up
/// until its time is over.
fn guarded<T>(
    tell: &mut Tell<'_>,
    work: impl FnOnce(&mut Tell<'_>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let seconds = rails::TIME.as_secs();
    may_die();
    let rails = Rails::up().context("no rule was changed")?;
    may_die();
    let start = Instant::now();
    tell.step(
        "guard",
        format!("no packet passes this network namespace; if this command dies, for {seconds} s"),
    );
    let result = work(tell).with_context(|| format!("packets pass again in {seconds} s"));
    may_die();
    let result = result?;
    let down = rails.down();
    may_die();
    let text = match down {
        Ok(()) => format!(
            "packets pass again, after {} ms",
            start.elapsed().as_millis()
        ),
        Err(why) => {
            format!("cannot be removed, and ends by itself within {seconds} s: {why}")
        }
    };
    tell.step("guard", text);
    Ok(result)
}

/// Restores the rules. The agent's capture takes precedence over them, so the operator must then remove the workload
/// from the agent's configuration.
pub fn revert(
    place: &Place,
    file: Option<&Path>,
    dry_run: bool,
    tell: &mut Tell<'_>,
) -> anyhow::Result<Outcome> {
    let directory = &place.directory;
    let _lock = place.lock(dry_run)?;
    let (saved, journal) = if file.is_some() {
        wanted(directory, file)?
    } else {
        let journal = current(place, dry_run)?;
        let journal = journal.context("nothing was taken over in this network namespace")?;
        (Saved::of(&journal)?, journal)
    };
    tell.saved(&journal.file, &journal.sha256);
    let missing = saved.bring_back(place.owners, true)?;
    if missing.steps.is_empty() {
        tell.step("restore", "the rules are there");
        // A command may have been killed after its last change, so the guard may still be up.
        if !dry_run {
            guard::down()?;
        }
    } else {
        no_others_are_there(place, &saved)?;
        has_a_proxy(&saved)?;
        if dry_run {
            for step in &missing.steps {
                tell.change("restore", step, true);
            }
            return Ok(Outcome::WouldGiveBack);
        }
        guarded(tell, |tell| {
            journal.write(State::Restoring, directory)?;
            come_back(place, &saved, tell)
        })
        .context(
            "some of the rules may be missing, and the dataplane captures; run this command again",
        )?;
    }
    if dry_run {
        return Ok(Outcome::WouldGiveBack);
    }
    journal.write(State::Restored, directory)?;
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
    // The listener in the check above may have been the agent's own proxy.
    has_a_proxy(&saved)?;
    Journal::remove(directory)?;
    tell.step(
        "release",
        "the dataplane captures nobody in this network namespace",
    );
    Ok(Outcome::GivenBack)
}

/// Fails if the rules redirect to a port without a listener: the restored rules would break the pod's connections.
fn has_a_proxy(saved: &Saved) -> anyhow::Result<()> {
    let of_rules = of_rules(saved)?;
    let inbound = of_rules.takes_inbound.then_some(of_rules.inbound);
    for port in inbound.into_iter().chain([of_rules.outbound]) {
        ensure!(
            port == 0 || !kernel::listening::listening(port)?.is_empty(),
            "the rules lead to port {port}, and nobody listens there: start the sidecar, and run this command again"
        );
    }
    Ok(())
}
