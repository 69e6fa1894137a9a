//! Removes the rules of one owner and no others. Pure functions first compute the rules and chains to remove and the
//! input for `iptables-restore`. The programs and the kernel then make the changes, until a new reading finds no rule
//! of the owner.

#[cfg(test)]
mod tests;

use std::{
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use kernel::netfilter::{self, Kind};
use serde::Serialize;
use takeover::{
    may_die,
    owners::{self, FOREIGN, KUBE_PROXY, Owner},
};

use super::{
    binaries::{self, Binaries, Role},
    collect,
    report::{of_chains, of_rule},
    ruleset::{self, Rule, Table, Text},
};

/// Maximum time for a program that changes rules. It is long because programs for legacy tables wait for a lock.
const PATIENCE: Duration = Duration::from_mins(2);
/// Maximum number of bytes read from the output of a program that changes rules.
const SAID: u64 = 1 << 20;
/// Maximum number of passes. Each pass reads all rules again, because the owner may have added rules.
const PASSES: usize = 3;

/// The changes that remove the owners' rules from the tables of one text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removal {
    /// Input for `iptables-restore --noflush`; empty if nothing is removed.
    pub input: String,
    /// Number of rules removed from chains of others.
    pub jumps: usize,
    /// Number of chains removed.
    pub chains: usize,
    /// Rules of the owners that stay, each with the reason.
    pub stays: Vec<String>,
    /// Rules that others wrote into their own chains. They are removed because they jump to a chain of the owners.
    pub of_others: Vec<String>,
}

/// Plans the removal of the rules of `owners` from a text of `iptables-save`.
///
/// Removes the owners' chains with all their rules, and every rule that jumps to such a chain. A chain stays if a rule
/// of another known owner jumps to it; the owners' chains that it jumps to stay too. In chains of others, a rule
/// without a jump stays. There is one exception: the rules that Istio's sidecar writes there in TPROXY mode are
/// recognized by their marks and removed.
///
/// # Errors
/// If a line is not understood: it may belong to any owner.
pub fn plan(text: &Text<'_>, owners: &[&Owner]) -> io::Result<Removal> {
    let tables = tables(text)?;
    let mut removal = Removal::default();
    for table in &tables {
        let going = going(table, &tables, owners);
        going.write(&mut removal);
        let is_built_in =
            |chain| (table.chains.get(chain)).is_some_and(|chain| chain.hook.is_some());
        let of_others = going.rules.iter().filter(|rule| !is_built_in(rule.chain));
        let named = of_others.map(|rule| format!("{}: {}", table.title(), rule.text));
        removal.of_others.extend(named);
        removal.stays.extend(going.stays);
    }
    Ok(removal)
}

/// Reads a text and fails if a line is not understood. A rule whose target is not known is no error, because its target
/// is not one of the owners' chains.
pub(super) fn tables<'a>(text: &Text<'a>) -> io::Result<Vec<Table<'a>>> {
    let (tables, unread) = ruleset::read(std::slice::from_ref(text));
    match unread.iter().find(|unread| !unread.is_rule) {
        None => Ok(tables),
        Some(unread) => {
            let line = &unread.line;
            Err(io::Error::other(format!(
                "a rule is not understood: {} line {}: {}: {}",
                line.table, line.number, unread.why, line.text
            )))
        }
    }
}

/// The chains and rules to remove from one table.
pub(super) struct Going<'t, 'a> {
    /// The table.
    pub table: &'t Table<'a>,
    /// The chains to remove, with their rules.
    pub chains: Vec<&'a str>,
    /// The rules to remove from chains of others.
    pub rules: Vec<&'t Rule<'a>>,
    /// Rules of the owners that stay, each with the reason.
    stays: Vec<String>,
}

impl Going<'_, '_> {
    /// Returns true if nothing is to be removed.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty() && self.chains.is_empty()
    }

    fn write(&self, removal: &mut Removal) {
        if self.is_empty() {
            return;
        }
        removal.jumps += self.rules.len();
        removal.chains += self.chains.len();
        let rules: Vec<&str> = self.rules.iter().map(|rule| &*rule.text).collect();
        let chains = &self.chains;
        removal.input += &input(&self.table.name, chains, &rules, chains, &[]);
    }
}

/// Returns the input of `iptables-restore --noflush` that changes a table in one transaction: declares chains, removes
/// rules, deletes chains, and runs the commands that add rules.
pub(super) fn input(
    table: &str,
    declared: &[&str],
    removed: &[&str],
    deleted: &[&str],
    added: &[&str],
) -> String {
    // With --noflush, a chain's declaration empties the chain or creates it.
    let declared = declared.iter().map(|chain| format!(":{chain} - [0:0]\n"));
    let removed = removed.iter().map(|rule| {
        let behind = rule.strip_prefix("-A").unwrap_or(rule);
        format!("-D{behind}\n")
    });
    let deleted = deleted.iter().map(|chain| format!("-X {chain}\n"));
    let added = added.iter().map(|rule| format!("{rule}\n"));
    let mut all = format!("*{table}\n");
    all.extend(declared.chain(removed).chain(deleted).chain(added));
    all + "COMMIT\n"
}

/// Finds the chains and rules to remove from `table`, which is one of the tables in `all`.
pub(super) fn going<'t, 'a>(
    table: &'t Table<'a>,
    all: &[Table<'a>],
    owners: &[&Owner],
) -> Going<'t, 'a> {
    let of_chains = of_chains(table, all);
    let owner = |chain: &str| of_chains.get(chain).copied();
    let is_theirs =
        |owner: Option<&'static Owner>| owner.is_some_and(|owner| owners.contains(&owner));
    let mut stays = Vec::new();
    // The owners' chains that must stay, because other owners' rules jump to them.
    let mut needed: BTreeSet<&str> = BTreeSet::new();
    let mut open: Vec<&str> = Vec::new();
    for rule in &table.rules {
        let of = owner(rule.chain);
        if of.is_some_and(|of| of != FOREIGN) && !is_theirs(of) {
            for to in rule.jumps.iter().copied().filter(|to| is_theirs(owner(to))) {
                let by = of.map_or("", |of| of.name);
                stays.push(format!(
                    "{}: chain {to}: {by} needs it: {}",
                    table.title(),
                    rule.text
                ));
                open.push(to);
            }
        }
    }
    while let Some(chain) = open.pop() {
        if needed.insert(chain) {
            let rules = table.rules.iter().filter(|rule| rule.chain == chain);
            open.extend(
                rules
                    .flat_map(|rule| rule.jumps.iter().copied())
                    .filter(|to| is_theirs(owner(to))),
            );
        }
    }
    let goes = |chain: &str| is_theirs(owner(chain)) && !needed.contains(chain);
    let chains: Vec<&str> = table
        .chains
        .keys()
        .copied()
        .filter(|chain| goes(chain))
        .collect();
    let mut rules = Vec::new();
    for rule in table.rules.iter().filter(|rule| !goes(rule.chain)) {
        if rule.jumps.iter().any(|to| goes(to)) {
            rules.push(rule);
        } else if owner(rule.chain).is_none()
            && is_theirs(of_rule(rule, &of_chains))
            && rule.jumps.is_empty()
        {
            let by_mark = rule
                .marks
                .iter()
                .any(|mark| is_theirs(owners::of_mark(*mark)));
            if by_mark && !chains.is_empty() {
                rules.push(rule);
            } else {
                stays.push(format!(
                    "{}: in a chain of others, and no jump: {}",
                    table.title(),
                    rule.text
                ));
            }
        }
    }
    Going {
        table,
        chains,
        rules,
        stays,
    }
}

/// A change of the kernel's rules.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    /// The command of this change, run or only planned: `iptables-nft-restore --noflush`,
    /// `nft delete table ip kube-proxy`.
    pub command: String,
    /// The command's input.
    pub input: String,
    /// Number of rules removed from chains of others.
    pub jumps: usize,
    /// Number of chains removed, including the chains of native tables.
    pub chains: usize,
}

/// The result of a removal, or of its dry run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Done {
    /// The changes.
    pub steps: Vec<Step>,
    /// Rules of the owners that stay, each with the reason.
    pub stays: Vec<String>,
}

/// Removes the rules of `owners` from the network namespace of this thread. Reads the rules again afterwards, because
/// their writer may have added rules in the meantime. A dry run returns the steps without running them.
///
/// # Errors
/// If rules cannot be read, a program is missing or fails, or rules come back. A pass that cannot read all rules
/// changes nothing.
pub fn clean_up(root: Option<&Path>, owners: &[&Owner], dry_run: bool) -> io::Result<Done> {
    let found = binaries::find(root)?;
    let mut done = Done::default();
    for _ in 0..PASSES {
        let (steps, stays) = look(root, &found, owners)?;
        done.stays = stays;
        if dry_run {
            done.steps = steps.into_iter().map(|(step, _)| step).collect();
            return Ok(done);
        }
        if steps.is_empty() {
            return Ok(done);
        }
        for (step, by) in steps {
            may_die();
            by.run(root, &step)?;
            may_die();
            done.steps.push(step);
        }
    }
    let (left, _) = look(root, &found, owners)?;
    match left.first() {
        None => Ok(done),
        Some((step, _)) => Err(io::Error::other(format!(
            "rules come back after they were removed ({}): stop the program that writes them first",
            step.command
        ))),
    }
}

/// The program that makes a change.
pub(super) enum By {
    /// A program of iptables.
    Restore(PathBuf),
    /// `nft`.
    Nft(PathBuf),
    /// The kernel, which deletes a native table: its family and name.
    Kernel(&'static str, String),
}

impl By {
    pub fn run(&self, root: Option<&Path>, step: &Step) -> io::Result<()> {
        let (program, arguments) = match self {
            Self::Kernel(family, name) => {
                netfilter::delete_table(family, name).map_err(io::Error::other)?;
                return Ok(());
            }
            Self::Restore(program) => (program, &["--noflush", "-w", "60"][..]),
            Self::Nft(program) => (program, &["-f", "-"][..]),
        };
        binaries::below(root, || {
            let input = step.input.as_bytes();
            let said = binaries::run_with(program, arguments, input, PATIENCE, SAID)?;
            if said.success {
                return Ok(());
            }
            let why = said.stderr.lines().next();
            let why = why.unwrap_or("it failed without a word");
            Err(io::Error::other(format!("{}: {why}", program.display())))
        })
    }
}

/// The planned changes, each with the program that makes it; then the rules that stay, each with the reason.
pub(super) type Found = (Vec<(Step, By)>, Vec<String>);

/// Reads the kernel's rules and plans the changes.
fn look(root: Option<&Path>, found: &Binaries, owners: &[&Owner]) -> io::Result<Found> {
    let tables = netfilter::tables().map_err(io::Error::other)?;
    let collected = collect::collect(root, found, &tables, collect::Native::Leave)?;
    if let Some(missing) = collected.missing.first() {
        return Err(io::Error::other(format!(
            "cannot read all rules, and changed nothing: {missing}"
        )));
    }
    let (mut steps, mut stays) = (Vec::new(), Vec::new());
    for printed in &collected.texts {
        let removal = plan(&printed.as_text(), owners)?;
        stays.extend(removal.stays);
        if removal.input.is_empty() {
            continue;
        }
        let (jumps, chains) = (removal.jumps, removal.chains);
        let step = by_restore(found, &printed.origin, removal.input, jumps, chains)?;
        steps.push(step);
    }
    for table in tables.iter().filter(|table| table.kind == Kind::Native) {
        if is_of(table, owners) {
            steps.push(deletion(table));
        }
    }
    Ok((steps, stays))
}

/// Returns the change that deletes a native table.
pub(super) fn deletion(table: &netfilter::Table) -> (Step, By) {
    let step = Step {
        command: format!("nft delete table {} {}", table.family, table.name),
        input: String::new(),
        jumps: 0,
        chains: table.chains.len(),
    };
    (step, By::Kernel(table.family, table.name.clone()))
}

/// Returns true if a table of nf_tables belongs to one of the owners. kube-proxy's tables must have exactly its name,
/// in the families `ip` and `ip6`, because tables of other programs may start with the same name.
pub(super) fn is_of(table: &netfilter::Table, owners: &[&Owner]) -> bool {
    let owner = owners::of_table(&table.name).filter(|owner| owners.contains(owner));
    let is_kube_proxys = || table.name == "kube-proxy" && matches!(table.family, "ip" | "ip6");
    owner.is_some_and(|owner| owner != KUBE_PROXY || is_kube_proxys())
}

/// Returns the change that the program makes that loads the output of the program `origin`: `ip6tables-nft-restore` for
/// `ip6tables-nft`.
pub(super) fn by_restore(
    found: &Binaries,
    origin: &str,
    input: String,
    jumps: usize,
    chains: usize,
) -> io::Result<(Step, By)> {
    let mut commands = binaries::commands().filter(|(.., command)| command == origin);
    let program = commands.find_map(|(family, variant, _)| {
        let binary = found.program(family, variant, Role::Restore)?;
        Some(By::Restore(binary.path.clone()))
    });
    let get = super::detect::GET_IPTABLES;
    let program =
        program.ok_or_else(|| io::Error::other(format!("no {origin}-restore is here: {get}")))?;
    let step = Step {
        command: format!("{origin}-restore --noflush"),
        input,
        jumps,
        chains,
    };
    Ok((step, program))
}
