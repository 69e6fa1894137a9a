//! The steps of a take-over and of giving back, in their order. Each is written to the journal before it changes something, so that
//! the next command finishes or undoes what one that was killed has begun.

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};

use super::{
    check::{self, Asked, ClusterIp},
    told::{Outcome, Tell},
};
use crate::{
    admin::{
        client::{self, Client},
        report::{Report, Severity},
    },
    cli::{
        iptables::compare::{Comparison, compare},
        source,
    },
    kernel::{
        self,
        conntrack::Conntrack,
        keep_nat,
        netfilter::{self, Chain},
        nf_conntrack,
        sockets::own_elsewhere,
    },
    takeover::{
        cleanup::{self, Step},
        forward,
        journal::{self, Journal, State},
        may_die,
        owners::{KUBE_PROXY, Owner},
        saved::{self, Saved},
    },
};

/// Whose rules are taken over.
const OWNERS: &[&Owner] = &[KUBE_PROXY];
/// How often `--watch` looks whether rules have come back.
const LOOK: Duration = Duration::from_secs(5);

/// Where everything is.
pub struct Place {
    /// The directory with the journal and the files with rules.
    pub directory: PathBuf,
    /// Where the agent pins its tables.
    pub bpffs: PathBuf,
    /// The cgroup whose processes the agent serves.
    pub cgroup: PathBuf,
    /// Asks the agent.
    pub agent: Client,
}

/// Takes kube-proxy's rules over, or says what it would do.
pub fn take_over(place: &Place, dry_run: bool, tell: &mut Tell<'_>) -> anyhow::Result<Outcome> {
    let directory = &place.directory;
    let _lock = if dry_run {
        None
    } else {
        Some(lock(directory)?)
    };
    let mut journal = Journal::read(directory)?;
    if let Some(found) = journal.take_if(|journal| journal.state == State::Restoring) {
        ensure!(
            !dry_run,
            "`takeover --revert` was interrupted: run it again first"
        );
        tell.step(
            "restore",
            "a revert was interrupted, and is finished first".to_owned(),
        );
        bring_back(&found.saved()?, tell)?;
        Journal::remove(directory)?;
    }
    if let Some(journal) = journal
        .as_ref()
        .filter(|journal| journal.state == State::Removing)
    {
        return finish(place, journal, dry_run, tell);
    }
    let saved = Saved::of_kernel(OWNERS)?;
    if saved.is_empty() {
        return nothing(journal.as_ref(), tell);
    }
    ensure!(
        !saved.is_mixed(),
        "kube-proxy has rules of mode iptables and of mode nftables: one of them is out of date; remove it first"
    );
    let journal = save(place, &saved, dry_run, tell)?;
    let verdict = verify(place, None, tell).and_then(|verdict| {
        if matches!(verdict, Verdict::Serves(_)) {
            keep_nat(dry_run, tell)?;
        }
        Ok(verdict)
    });
    let addresses = match verdict {
        Ok(Verdict::Serves(addresses)) => addresses,
        other => {
            // The rules stay, and nobody needs the file.
            if !dry_run {
                fs::remove_file(&journal.file)?;
            }
            return other.map(|_| Outcome::Differs);
        }
    };
    notice_forward(tell)?;
    for process in kube_proxies() {
        tell.step(
            "notice",
            format!(
                "kube-proxy runs in this network namespace (process {process}), and will write its rules again: stop it, or use --watch"
            ),
        );
    }
    if dry_run {
        for step in cleanup::clean_up(None, OWNERS, true)?.steps {
            tell.change("remove", &step, true);
        }
        return Ok(Outcome::WouldTakeOver);
    }
    journal.write(directory)?;
    remove_or_restore(place, &journal, &saved, &addresses, tell)
}

/// Finishes a take-over that was interrupted while rules were removed, or undoes it if the dataplane does not serve what they
/// did.
fn finish(
    place: &Place,
    journal: &Journal,
    dry_run: bool,
    tell: &mut Tell<'_>,
) -> anyhow::Result<Outcome> {
    let saved = journal.saved()?;
    let file = journal.file.display();
    tell.step(
        "save",
        format!("a take-over was interrupted; the rules are in {file}"),
    );
    let addresses = match verify(place, Some(&journal.file), tell)? {
        Verdict::Serves(addresses) => addresses,
        Verdict::Differs if dry_run => return Ok(Outcome::Differs),
        Verdict::Differs => {
            bring_back(&saved, tell)?;
            Journal::remove(&place.directory)?;
            return Ok(Outcome::Differs);
        }
    };
    if dry_run {
        for step in cleanup::clean_up(None, OWNERS, true)?.steps {
            tell.change("remove", &step, true);
        }
        return Ok(Outcome::WouldTakeOver);
    }
    remove_or_restore(place, journal, &saved, &addresses, tell)
}

/// There are no rules.
fn nothing(journal: Option<&Journal>, tell: &mut Tell<'_>) -> anyhow::Result<Outcome> {
    if let Some(journal) = journal.filter(|journal| journal.state == State::TakenOver) {
        let (at, file) = (&journal.saved, journal.file.display());
        tell.step(
            "save",
            format!("the rules were taken over already; those of {at} are in {file}"),
        );
        return Ok(Outcome::TakenOver);
    }
    if let Some(count) = netfilter::ipvs_services()?.filter(|count| *count > 0) {
        bail!(
            "kube-proxy's mode ipvs is not taken over: IPVS has {count} services, and nothing was changed. When the agent \
             serves, stop kube-proxy and run `kube-proxy --cleanup`"
        );
    }
    tell.step("save", "there are no rules of kube-proxy".to_owned());
    Ok(Outcome::Nothing)
}

/// Removes the rules; if that fails, they come back.
fn remove_or_restore(
    place: &Place,
    journal: &Journal,
    saved: &Saved,
    addresses: &[ClusterIp],
    tell: &mut Tell<'_>,
) -> anyhow::Result<Outcome> {
    if let Err(why) = remove(place, addresses, tell) {
        tell.step("restore", format!("{why:#}: the rules come back"));
        bring_back(saved, tell).with_context(|| {
            let file = journal.file.display();
            format!("{why:#}; the rules could not be brought back: they are in {file}, and the next `takeover` goes on")
        })?;
        Journal::remove(&place.directory)?;
        bail!("{why:#}; the rules are back as they were");
    }
    let journal = Journal {
        state: State::TakenOver,
        ..journal.clone()
    };
    journal.write(&place.directory)?;
    Ok(Outcome::TakenOver)
}

/// Says what chains at the forward hook mean for packets to services.
fn notice_forward(tell: &mut Tell<'_>) -> anyhow::Result<()> {
    let chains = netfilter::forward_chains()?;
    if let Some(warning) = forward::warning(&chains) {
        tell.step("notice", warning);
    }
    let drops = |chain: &&Chain| chain.base.is_some_and(|base| base.drops);
    for Chain { table, name, .. } in chains.iter().filter(drops) {
        tell.step(
            "notice",
            format!(
                "{table} {name} drops what no rule accepts, and kube-proxy's rules that accept packets of connections to services \
                 go: connections that its rules translate end, unless rules of others accept them"
            ),
        );
    }
    Ok(())
}

/// The processes of kube-proxy in this network namespace.
fn kube_proxies() -> Vec<u32> {
    let own = fs::read_link("/proc/self/ns/net").ok();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut found: Vec<u32> = entries
        .filter(|entry| {
            let path = entry.path();
            let is_kube_proxy =
                fs::read_to_string(path.join("comm")).is_ok_and(|name| name.trim() == "kube-proxy");
            is_kube_proxy && own.is_some() && fs::read_link(path.join("ns/net")).ok() == own
        })
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect();
    found.sort_unstable();
    found
}

fn lock(directory: &Path) -> anyhow::Result<impl Sized> {
    journal::lock(directory).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => anyhow::anyhow!(
            "another `dataplane takeover` runs: it has {}",
            directory.join("lock").display()
        ),
        _ => anyhow::Error::new(error).context("nothing was changed"),
    })
}

/// Writes the rules to a file. The journal is written when they are to go.
fn save(
    place: &Place,
    saved: &Saved,
    dry_run: bool,
    tell: &mut Tell<'_>,
) -> anyhow::Result<Journal> {
    let (file, at) = saved::new_file(&place.directory);
    let sha256 = if dry_run {
        String::new()
    } else {
        saved.write(&file)?
    };
    let counts: Vec<String> = (saved.counts(OWNERS)?.into_iter())
        .map(|count| {
            format!(
                "{}: {} chains, {} rules in chains of others",
                count.origin, count.chains, count.jumps
            )
        })
        .collect();
    let (would, sum) = if dry_run {
        ("would be in ", String::new())
    } else {
        ("", format!(", SHA-256 {sha256}"))
    };
    tell.step(
        "save",
        format!("{would}{}{sum}; {}", file.display(), counts.join("; ")),
    );
    tell.saved(&file, &sha256);
    Ok(Journal {
        state: State::Removing,
        file,
        sha256,
        saved: at,
    })
}

/// Whether the rules can go.
enum Verdict {
    /// These addresses answer by the dataplane.
    Serves(Vec<ClusterIp>),
    /// Something differs, which has been said.
    Differs,
}

/// Compares the rules with the tables, and asks the services. The rules are those in the kernel, or in a file if some have gone.
fn verify(place: &Place, file: Option<&Path>, tell: &mut Tell<'_>) -> anyhow::Result<Verdict> {
    is_healthy(place)?;
    let snapshot = source::of_rules(file.map(Path::to_owned))?;
    let found: Comparison = compare(&snapshot, &place.bpffs)?;
    if !found.is_same() {
        tell.differs(&found)?;
        return Ok(Verdict::Differs);
    }
    tell.step(
        "compare",
        format!(
            "{} addresses and ports: the dataplane serves all as the rules do",
            found.compared
        ),
    );
    if let Some(elsewhere) = own_elsewhere(&place.cgroup)? {
        let own = elsewhere.own.map_or_else(
            || "another hierarchy".to_owned(),
            |own| own.display().to_string(),
        );
        tell.step(
            "connect",
            format!(
                "not tried: this command runs in {own}, which the agent does not serve; it serves {}",
                place.cgroup.display()
            ),
        );
        return Ok(Verdict::Serves(Vec::new()));
    }
    let Asked {
        answered,
        silent,
        failed,
    } = check::ask(&found.cluster_ips, &place.bpffs)?;
    if !failed.is_empty() {
        tell.failed(&failed);
        return Ok(Verdict::Differs);
    }
    let silent = match silent {
        0 => String::new(),
        silent => format!("; {silent} others have no endpoint that answers"),
    };
    tell.step(
        "connect",
        format!(
            "{} TCP ports of cluster IPs answer by the dataplane's programs{silent}",
            answered.len()
        ),
    );
    Ok(Verdict::Serves(answered))
}

/// Refuses unless an agent runs that calls itself healthy.
fn is_healthy(place: &Place) -> anyhow::Result<()> {
    let report: Report = place.agent.get("/status").context(
        "an agent has to serve before rules can go: start `dataplane run`, with --from-iptables if it has no access to the cluster",
    )?;
    let errors: Vec<&str> = (report.findings.iter())
        .filter(|finding| finding.severity == Severity::Error && finding.object.is_none())
        .map(|finding| finding.text.as_str())
        .collect();
    ensure!(
        errors.is_empty(),
        "the agent is not healthy: {}",
        errors.join("\n")
    );
    Ok(())
}

/// Has connections that the rules translate live on.
fn keep_nat(dry_run: bool, tell: &mut Tell<'_>) -> anyhow::Result<()> {
    let translated = nf_conntrack::translated()?;
    let table = keep_nat::TABLE;
    let text = if dry_run {
        format!(
            "would add nftables table inet {table}, by which {translated} translated connections live on"
        )
    } else {
        may_die();
        match keep_nat::add() {
            Ok(_) => {
                format!("nftables table inet {table}: {translated} translated connections live on")
            }
            // Nothing breaks.
            Err(why) if translated == 0 => {
                format!(
                    "no connection is translated, and nftables table inet {table} cannot be added: {why}"
                )
            }
            Err(why) => bail!(
                "cannot add nftables table inet {table}: {why}; {translated} connections would break, and nothing was changed"
            ),
        }
    };
    may_die();
    tell.step("keep-nat", text);
    Ok(())
}

/// Removes the rules, and asks again.
fn remove(place: &Place, addresses: &[ClusterIp], tell: &mut Tell<'_>) -> anyhow::Result<()> {
    let done = cleanup::clean_up(None, OWNERS, false).context("rules cannot be removed")?;
    for step in &done.steps {
        tell.change("remove", step, false);
    }
    for stays in done.stays {
        tell.stays(stays);
    }
    if addresses.is_empty() {
        return Ok(());
    }
    let asked = check::ask(addresses, &place.bpffs)?;
    if let Some((address, why)) = asked.failed.first() {
        bail!("without the rules, {address} is not served: {why}");
    }
    let (answered, all) = (asked.answered.len(), addresses.len());
    tell.step(
        "connect",
        format!("{answered} of {all} answer without the rules"),
    );
    Ok(())
}

fn bring_back(saved: &Saved, tell: &mut Tell<'_>) -> anyhow::Result<()> {
    let back = saved.bring_back(OWNERS, false)?;
    if back.steps.is_empty() {
        tell.step("restore", "nothing was missing".to_owned());
    }
    for step in &back.steps {
        tell.change("restore", step, false);
    }
    for lost in back.lost {
        tell.stays(lost);
    }
    Ok(())
}

/// Removes rules that come back, until the process is ended. The dataplane serves all the time.
pub fn watch(tell: &mut Tell<'_>) -> anyhow::Result<()> {
    loop {
        thread::sleep(LOOK);
        match cleanup::clean_up(None, OWNERS, false) {
            Ok(done) => {
                for step in &done.steps {
                    tell.step(
                        "watch",
                        format!("kube-proxy's rules came back: {}", said(step)),
                    );
                }
            }
            // The next look may be better: a lock that others hold, or rules that are being written.
            Err(why) => tell.step(
                "watch",
                format!("kube-proxy's rules cannot be removed: {why}"),
            ),
        }
    }
}

/// What a step was.
pub fn said(step: &Step) -> String {
    format!(
        "{}: {} chains, and {} rules in chains of others",
        step.command, step.chains, step.jumps
    )
}

/// Brings the rules back, and removes the dataplane once no agent runs.
pub fn revert(
    place: &Place,
    file: Option<&Path>,
    dry_run: bool,
    tell: &mut Tell<'_>,
) -> anyhow::Result<Outcome> {
    let directory = &place.directory;
    let _lock = if dry_run {
        None
    } else {
        Some(lock(directory)?)
    };
    let journal = Journal::read(directory)?;
    let (saved, file) = match (file, &journal) {
        (Some(file), _) => (Saved::read(file, None)?, file.to_owned()),
        (None, Some(journal)) => (journal.saved()?, journal.file.clone()),
        (None, None) => bail!(
            "nothing was taken over: {} has no journal. With --revert FILE, the rules of a file come back",
            directory.display()
        ),
    };
    let is_back = journal
        .as_ref()
        .is_some_and(|journal| journal.state == State::Restored);
    if !is_back {
        changed_since(place, &file, tell)?;
    }
    if dry_run {
        for step in saved.bring_back(OWNERS, true)?.steps {
            tell.change("restore", &step, true);
        }
        tell.step(
            "detach",
            format!(
                "would remove the dataplane's programs and tables in {}",
                place.bpffs.display()
            ),
        );
        return Ok(Outcome::WouldGiveBack);
    }
    // Without a journal, one that is interrupted is begun again with the same FILE.
    let write = |state| {
        journal.iter().try_for_each(|journal| {
            Journal {
                state,
                ..journal.clone()
            }
            .write(directory)
        })
    };
    if !is_back {
        write(State::Restoring)?;
    }
    bring_back(&saved, tell)?;
    write(State::Restored)?;
    match place.agent.get::<Report>("/status") {
        Err(client::Error::NotRunning { .. }) => {}
        Err(error @ client::Error::Denied { .. }) => return Err(error.into()),
        _ => {
            tell.step(
                "detach",
                "an agent runs, and serves beside the rules. End it, and run this command again: it then removes the \
                 dataplane's programs and tables"
                    .to_owned(),
            );
            return Ok(Outcome::AgentRuns);
        }
    }
    give_flows(place, tell)?;
    may_die();
    let items = kernel::cleanup(&place.bpffs, false)?;
    may_die();
    let ours = items.iter().filter(|item| item.ours).count();
    tell.step(
        "detach",
        format!("removed {ours} pins, filters, rules and routes of the dataplane"),
    );
    if journal.is_some() {
        Journal::remove(directory)?;
    }
    Ok(Outcome::GivenBack)
}

/// Gives the packet path's flows to the kernel's conntrack, whose rules are back.
fn give_flows(place: &Place, tell: &mut Tell<'_>) -> anyhow::Result<()> {
    let Some(conntrack) = Conntrack::open(&place.bpffs)? else {
        return Ok(());
    };
    may_die();
    let given = nf_conntrack::give(&conntrack)?;
    tell.step(
        "give",
        format!(
            "{} flows of the packet path to the kernel's conntrack",
            given.flows + given.known
        ),
    );
    Ok(())
}

/// Says what the rules of the file do not serve as the tables do: services changed since they were saved.
fn changed_since(place: &Place, file: &Path, tell: &mut Tell<'_>) -> anyhow::Result<()> {
    if !kernel::Tables::exist(&place.bpffs)? {
        return Ok(());
    }
    let found = compare(&source::of_rules(Some(file.to_owned()))?, &place.bpffs)?;
    if found.is_same() {
        tell.step(
            "compare",
            "no service has changed since the rules were saved".to_owned(),
        );
    } else {
        tell.step("compare", "services have changed since the rules were saved; kube-proxy brings its rules up to date:".to_owned());
        tell.differs(&found)?;
    }
    Ok(())
}
