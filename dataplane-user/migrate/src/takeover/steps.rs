//! The steps of a take-over, in their order. The journal records a change before a step makes it, so that the next
//! command can finish or undo the work of a killed command.

use std::{fs, path::Path};

use anyhow::{Context as _, bail, ensure};
use kernel::{
    netfilter::{self, Chain, keep_nat},
    nf_conntrack,
    packet::PacketTables,
    sockets::own_elsewhere,
};
use takeover::{
    bypassed,
    journal::{Journal, State},
    may_die,
};

use super::{
    back::bring_back,
    check::{self, ClusterIp, Outcomes},
    place::Place,
    told::{Outcome, Tell},
};
use crate::{
    commands::{
        compare::{Comparison, compare},
        rules,
    },
    rules::{
        cleanup,
        saved::{self, Saved},
    },
};

/// Takes over from kube-proxy's rules. A dry run only reports the steps.
pub fn take_over(place: &Place, dry_run: bool, tell: &mut Tell<'_>) -> anyhow::Result<Outcome> {
    let directory = &place.directory;
    let _lock = place.lock(dry_run)?;
    let mut journal = Journal::read(directory)?;
    if let Some(found) = journal.take_if(|journal| journal.state == State::Restoring) {
        ensure!(
            !dry_run,
            "`dataplane-migrate takeover --revert` was interrupted: run it again first"
        );
        tell.step("restore", "a revert was interrupted, and is finished first");
        bring_back(place, &Saved::of(&found)?, tell)?;
        Journal::remove(directory)?;
    }
    if let Some(journal) = (journal.as_ref()).filter(|journal| journal.state == State::Removing) {
        let saved = Saved::of(journal)?;
        if !saved.were_written_since(place.owners)? {
            return finish(place, journal, &saved, dry_run, tell);
        }
        let file = journal.file.display();
        tell.step(
            "save",
            format!(
                "a take-over was interrupted, and kube-proxy has written rules since: beginning anew. {file} keeps those of before"
            ),
        );
    }
    let saved = Saved::of_kernel(place.owners)?;
    if let Some(count) = netfilter::ipvs_services()?.filter(|count| *count > 0) {
        bail!(
            "kube-proxy's mode ipvs is not taken over: IPVS has {count} services, and nothing was changed. When the agent \
             serves, stop kube-proxy and run `kube-proxy --cleanup`"
        );
    }
    if saved.is_empty() {
        return nothing(place, journal.as_ref(), tell);
    }
    ensure!(
        !saved.is_mixed(),
        "kube-proxy has rules of mode iptables and of mode nftables: one of them is out of date. Restart kube-proxy, which removes those of its other mode, and run this command again. Nothing was changed"
    );
    let journal = save(place, &saved, dry_run, tell)?;
    let file = (!dry_run).then_some(&*journal.file);
    let begun = begin(place, file, &saved, dry_run, tell);
    if !dry_run && !matches!(begun, Ok(Verdict::Serves(_))) {
        // The rules stay, so the file is not needed.
        fs::remove_file(&journal.file).unwrap_or_default();
    }
    let addresses = match begun.context("nothing was changed")? {
        Verdict::Serves(addresses) => addresses,
        Verdict::Differs => return Ok(Outcome::Differs),
    };
    if dry_run {
        return would_remove(place, tell);
    }
    let written = journal.write(State::Removing, directory);
    written.context("nothing was changed")?;
    remove_or_restore(place, &journal, &saved, &addresses, tell)
}

/// Finishes a take-over that was interrupted while rules were removed. If the dataplane does not serve the services of
/// the rules, undoes the take-over.
fn finish(
    place: &Place,
    journal: &Journal,
    saved: &Saved,
    dry_run: bool,
    tell: &mut Tell<'_>,
) -> anyhow::Result<Outcome> {
    let file = journal.file.display();
    tell.step(
        "save",
        format!("a take-over was interrupted; the rules are in {file}"),
    );
    tell.saved(&journal.file, &journal.sha256);
    let begun = begin(place, Some(&journal.file), saved, dry_run, tell);
    let addresses = match begun.context("a take-over was interrupted, and some of the rules may be gone: run `dataplane-migrate takeover` or `dataplane-migrate takeover --revert` again")? {
        Verdict::Serves(addresses) => addresses,
        Verdict::Differs if dry_run => return Ok(Outcome::Differs),
        Verdict::Differs => {
            bring_back(place, saved, tell)?;
            Journal::remove(&place.directory)?;
            return Ok(Outcome::Differs);
        }
    };
    if dry_run {
        return would_remove(place, tell);
    }
    remove_or_restore(place, journal, saved, &addresses, tell)
}

pub fn would_remove(place: &Place, tell: &mut Tell<'_>) -> anyhow::Result<Outcome> {
    for step in cleanup::clean_up(None, place.owners, true)?.steps {
        tell.change("remove", &step, true);
    }
    Ok(Outcome::WouldTakeOver)
}

/// Runs the steps before the first rule is removed. `file`: the saved rules.
fn begin(
    place: &Place,
    file: Option<&Path>,
    saved: &Saved,
    dry_run: bool,
    tell: &mut Tell<'_>,
) -> anyhow::Result<Verdict> {
    let verdict = verify(place, file, tell)?;
    if matches!(verdict, Verdict::Differs) {
        return Ok(verdict);
    }
    keep_nat(dry_run, tell)?;
    notice_rules(place, tell)?;
    for rule in saved.of_others(place.owners)? {
        tell.step(
            "notice",
            format!("goes, because it leads to a chain of kube-proxy: {rule}"),
        );
    }
    for (process, program) in kube_proxies() {
        let text = if program == KUBE_PROXY {
            format!(
                "kube-proxy runs in this network namespace (process {process}), and will write its rules again: stop it, or use --watch"
            )
        } else {
            format!(
                "{program} runs in this network namespace (process {process}): unless its kube-proxy is off, it will write its \
                 rules again: use --watch"
            )
        };
        tell.step("notice", text);
    }
    ensure!(
        !saved.were_written_since(place.owners)?,
        "kube-proxy has changed its rules meanwhile: stop it, and run this command again"
    );
    Ok(verdict)
}

/// Reports that kube-proxy has no rules.
fn nothing(
    place: &Place,
    journal: Option<&Journal>,
    tell: &mut Tell<'_>,
) -> anyhow::Result<Outcome> {
    let Some(journal) = journal.filter(|journal| journal.state == State::TakenOver) else {
        tell.step(
            "save",
            "there are no rules of kube-proxy in this network namespace, in tables of iptables-legacy, of iptables-nft or of nft, so \
             nothing was taken over. If kube-proxy serves this node, run this command in the node's network namespace"
                .to_owned(),
        );
        return Ok(Outcome::Nothing);
    };
    let (at, file) = (&journal.saved, journal.file.display());
    tell.step(
        "save",
        format!("the rules were taken over already; those of {at} are in {file}"),
    );
    tell.saved(&journal.file, &journal.sha256);
    place.healthy().context("the rules are gone")?;
    Ok(Outcome::TakenOver)
}

/// Removes the rules. If that fails, restores them.
fn remove_or_restore(
    place: &Place,
    journal: &Journal,
    saved: &Saved,
    addresses: &[ClusterIp],
    tell: &mut Tell<'_>,
) -> anyhow::Result<Outcome> {
    if let Err(why) = remove(place, addresses, tell) {
        tell.step("restore", format!("{why:#}: the rules come back"));
        let are_back = bring_back(place, saved, tell).with_context(|| {
            let file = journal.file.display();
            format!("{why:#}; the rules could not be brought back: they are in {file}, and the next `dataplane-migrate takeover` goes on")
        })?;
        Journal::remove(&place.directory)?;
        ensure!(
            are_back,
            "{why:#}; kube-proxy has written other rules meanwhile, which stay; the saved rules are in {}",
            journal.file.display()
        );
        bail!("{why:#}; the rules are back as they were");
    }
    let written = journal.write(State::TakenOver, &place.directory);
    written.context("the rules are gone, and the dataplane serves; run this command again")?;
    Ok(Outcome::TakenOver)
}

/// Reports the effect of rules that refuse forwarded packets on packets to services.
fn notice_rules(place: &Place, tell: &mut Tell<'_>) -> anyhow::Result<()> {
    let chains = netfilter::bypassed_chains()?;
    let tables = PacketTables::open(&place.bpffs);
    if !tables.is_ok_and(|tables| tables.is_through_stack())
        && let Some(warning) = bypassed::warning(&chains)
    {
        tell.step("notice", warning);
    }
    let drops = |chain: &&Chain| {
        let base = chain.base.filter(|base| base.hook == "forward");
        base.is_some_and(|base| base.drops)
    };
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

/// The name of kube-proxy's process.
const KUBE_PROXY: &str = "kube-proxy";

/// Process names of programs that contain kube-proxy: k3s, MicroK8s.
const WITH_KUBE_PROXY: &[&str] = &["k3s-server", "k3s-agent", "kubelite"];

/// Returns the processes in this network namespace that are kube-proxy or may contain it, each with its name.
fn kube_proxies() -> Vec<(u32, String)> {
    let own = fs::read_link("/proc/self/ns/net").ok();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut found: Vec<(u32, String)> = entries
        .filter_map(|entry| {
            let path = entry.path();
            let name = fs::read_to_string(path.join("comm")).ok()?;
            let name = name.trim();
            let writes = name == KUBE_PROXY || WITH_KUBE_PROXY.contains(&name);
            if !writes || own.is_none() || fs::read_link(path.join("ns/net")).ok() != own {
                return None;
            }
            let process = entry.file_name().to_str()?.parse().ok()?;
            Some((process, name.to_owned()))
        })
        .collect();
    found.sort_unstable();
    found
}

/// Writes the rules to a file. The caller writes the journal before the rules are removed.
pub fn save(
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
    let counts: Vec<String> = (saved.counts(place.owners)?.into_iter())
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
        boot: String::new(),
    })
}

/// The decision on whether the rules can be removed.
enum Verdict {
    /// The rules can be removed. These addresses answer through the dataplane.
    Serves(Vec<ClusterIp>),
    /// Something differs. The differences are already printed.
    Differs,
}

/// Compares the rules with the tables, and connects to the services. Reads the rules from the kernel, or from a file if
/// some are already removed.
fn verify(place: &Place, file: Option<&Path>, tell: &mut Tell<'_>) -> anyhow::Result<Verdict> {
    let report = place.healthy()?;
    let snapshot = rules::snapshot(file)?;
    let found: Comparison = compare(&snapshot, &place.bpffs)?;
    if !found.is_same() {
        tell.differs(&found);
        return Ok(Verdict::Differs);
    }
    ensure!(
        !found.is_for_outside || !report.interfaces.is_empty(),
        "the rules serve node ports, external IPs or load balancers, and the agent's packet path is off (--packet-path): \
         clients outside would not be served"
    );
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
    let Outcomes {
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

/// Keeps connections alive that the rules translate.
pub fn keep_nat(dry_run: bool, tell: &mut Tell<'_>) -> anyhow::Result<()> {
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
            // Without a translated connection, the table is not needed.
            Err(why) if translated == 0 => {
                format!(
                    "no connection is translated, and nftables table inet {table} cannot be added: {why}"
                )
            }
            Err(why) => bail!(
                "cannot add nftables table inet {table}: {why}; {translated} connections would break"
            ),
        }
    };
    may_die();
    tell.step("keep-nat", text);
    Ok(())
}

/// Removes the rules, and reports the changes and the rules that stay.
pub fn remove_rules(place: &Place, tell: &mut Tell<'_>) -> anyhow::Result<()> {
    let done = cleanup::clean_up(None, place.owners, false).context("rules cannot be removed")?;
    for step in &done.steps {
        tell.change("remove", step, false);
    }
    for stays in done.stays {
        tell.stays(&stays);
    }
    Ok(())
}

/// Removes the rules, and connects to the services again.
fn remove(place: &Place, addresses: &[ClusterIp], tell: &mut Tell<'_>) -> anyhow::Result<()> {
    remove_rules(place, tell)?;
    if addresses.is_empty() {
        return Ok(());
    }
    let asked = check::ask(addresses, &place.bpffs)?;
    if let Some((address, why)) = asked.failed.first() {
        bail!("without the rules, {address} is not served: {why}");
    }
    if asked.silent > 0 {
        bail!(
            "without the rules, {} of {} addresses do not answer any more",
            asked.silent,
            addresses.len()
        );
    }
    let (answered, all) = (asked.answered.len(), addresses.len());
    tell.step(
        "connect",
        format!("{answered} of {all} answer without the rules"),
    );
    Ok(())
}
