//! Gives a node back: restores the rules first, and then removes the dataplane.

use std::{fs, path::Path};

use admin::{client, report::Report};
use anyhow::{Context as _, bail, ensure};
use kernel::{conntrack::Conntrack, nf_conntrack};
use takeover::{
    journal::{Journal, State},
    may_die,
};
use terminal::{GIVE_BACK, pods_that_need_it};

use super::{
    place::Place,
    told::{Outcome, Tell},
};
use crate::{
    commands::{compare::compare, rules},
    rules::saved::Saved,
};

/// Restores the rules. Removes the dataplane if no agent runs.
pub fn revert(
    place: &Place,
    file: Option<&Path>,
    dry_run: bool,
    tell: &mut Tell<'_>,
) -> anyhow::Result<Outcome> {
    let directory = &place.directory;
    let _lock = place.lock(dry_run)?;
    let (saved, journal) = wanted(directory, file)?;
    tell.saved(&journal.file, &journal.sha256);
    let is_written = match journal.state {
        State::TakenOver | State::Restored => !Saved::of_kernel(place.owners)?.is_empty(),
        // The kernel may still have some of the rules.
        State::Removing | State::Restoring => false,
    };
    if is_written {
        let text = match journal.state {
            State::Restored => "the rules are back",
            _ => "kube-proxy has written its rules: they stay as they are",
        };
        tell.step("restore", text.to_owned());
    } else {
        changed_since(place, &journal.file, tell);
    }
    if dry_run {
        for step in saved
            .bring_back(place.owners, true)?
            .steps
            .iter()
            .filter(|_| !is_written)
        {
            tell.change("restore", step, true);
        }
        let place = place.bpffs.display();
        tell.step(
            "detach",
            format!("would remove the dataplane's programs and tables in {place}"),
        );
        return Ok(Outcome::WouldGiveBack);
    }
    if !is_written {
        journal.write(State::Restoring, directory)?;
        bring_back(place, &saved, tell).context(
            "some of the rules may be missing, and the dataplane serves; run this command again",
        )?;
    }
    journal.write(State::Restored, directory)?;
    match place.agent.get::<Report>("/status") {
        Err(client::Error::NotRunning { .. }) => {}
        Err(error @ client::Error::Denied { .. }) => return Err(error.into()),
        _ => {
            tell.step(
                "detach",
                "an agent runs, and serves beside the rules. End it, and run `dataplane-migrate takeover --revert` again: it then \
                 removes the dataplane's programs and tables"
                    .to_owned(),
            );
            return Ok(Outcome::AgentRuns);
        }
    }
    no_pod_needs_it(directory)?;
    detach(place, tell).context("the rules are back; run this command again")?;
    Journal::remove(directory)?;
    Ok(Outcome::GivenBack)
}

/// Fails if the rules of a pod on this node were taken over: without the dataplane, its connections would not be
/// captured.
fn no_pod_needs_it(directory: &Path) -> anyhow::Result<()> {
    let found = pods_that_need_it(directory)?;
    ensure!(
        found.is_empty(),
        "the rules are back, and the dataplane stays: it captures what rules of a mesh captured in {}; give these back first \
         ({GIVE_BACK})",
        found.join(", ")
    );
    Ok(())
}

/// Returns the rules to restore, and their journal.
pub fn wanted(directory: &Path, file: Option<&Path>) -> anyhow::Result<(Saved, Journal)> {
    let journal = Journal::read(directory)?;
    let Some(file) = file else {
        let Some(journal) = journal else {
            bail!(
                "nothing was taken over: {} has no journal. With --revert FILE, the rules of a file come back",
                directory.display()
            );
        };
        return Ok((Saved::of(&journal)?, journal));
    };
    let file = fs::canonicalize(file).with_context(|| file.display().to_string())?;
    if let Some(journal) = journal.filter(|journal| journal.file == file) {
        return Ok((Saved::of(&journal)?, journal));
    }
    let (saved, sha256) = Saved::read(&file, None)?;
    let journal = Journal {
        state: State::TakenOver,
        file,
        sha256,
        saved: String::new(),
        boot: String::new(),
    };
    Ok((saved, journal))
}

/// Restores the missing rules. Returns false if their owner has written rules since: these are newer, and stay.
pub fn bring_back(place: &Place, saved: &Saved, tell: &mut Tell<'_>) -> anyhow::Result<bool> {
    if saved.were_written_since(place.owners)? {
        let owner = place.owner();
        tell.step(
            "restore",
            format!("{owner} has written its rules: they stay as they are"),
        );
        return Ok(false);
    }
    let back = saved.bring_back(place.owners, false)?;
    if back.steps.is_empty() {
        tell.step("restore", "nothing was missing");
    }
    for step in &back.steps {
        tell.change("restore", step, false);
    }
    for lost in back.lost {
        tell.stays(&lost);
    }
    Ok(true)
}

/// Removes the dataplane in three steps. New connections are left to the rules; then the packet path's flows are handed
/// over to the kernel's conntrack; then the programs are removed. So no flow starts that is not handed over.
fn detach(place: &Place, tell: &mut Tell<'_>) -> anyhow::Result<()> {
    may_die();
    let conntrack = Conntrack::open(&place.bpffs)?;
    kernel::cleanup::retire(&place.bpffs)?;
    may_die();
    if let Some(conntrack) = &conntrack {
        let given = nf_conntrack::give(conntrack)?;
        let flows = if given.flows == 1 { "flow" } else { "flows" };
        tell.step(
            "give",
            format!(
                "{} {flows} of the packet path to the kernel's conntrack",
                given.flows
            ),
        );
        if let Some(why) = given.why {
            let refused = given.refused;
            tell.step("notice", format!("the kernel's conntrack did not take {refused} flows, which end; the first: {why}"));
        }
    }
    may_die();
    let items = kernel::cleanup::cleanup(&place.bpffs, false)?;
    may_die();
    let ours = items.iter().filter(|item| item.ours).count();
    tell.step(
        "detach",
        format!("removed {ours} pins, filters, rules and routes of the dataplane"),
    );
    Ok(())
}

/// Reports the services that changed since the rules were saved, by comparing the rules in the file with the tables.
fn changed_since(place: &Place, file: &Path, tell: &mut Tell<'_>) {
    let found = rules::snapshot(Some(file)).and_then(|rules| compare(&rules, &place.bpffs));
    match found {
        Ok(found) if found.is_same() => {
            tell.step(
                "compare",
                "no service has changed since the rules were saved",
            );
        }
        Ok(found) => {
            let text = "services have changed since the rules were saved (RULES: the saved ones; TABLES: now). kube-proxy brings its rules up to date when it starts:";
            tell.step("compare", text.to_owned());
            tell.differs(&found);
        }
        // The rules are restored even if the comparison fails.
        Err(why) => tell.step(
            "compare",
            format!("cannot tell which services have changed since: {why:#}"),
        ),
    }
}
