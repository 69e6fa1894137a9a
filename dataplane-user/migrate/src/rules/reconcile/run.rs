//! Changes the rules of a mesh to the expected ones, in the network namespace of the thread.

use std::{
    io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixListener},
    },
    path::Path,
    thread,
    time::Duration,
};

use kernel::netfilter::{self, Kind, guard, make_ip_sets};
use nix::sched::{CloneFlags, unshare};
use serde::Serialize;
use takeover::may_die;

use super::{
    super::{
        binaries::{self, Binaries, Family, Role, Variant},
        cleanup::{By, Step, by_restore, deletion, is_of, tables},
        collect::{self, Printed},
        detect::{self, Decision},
        rails::Rails,
        ruleset::{Form, Table},
    },
    expected::{Expected, ExpectedTable},
    plan::{self, Change, How},
};

/// Maximum time for a program that loads or prints the expected rules in a separate network namespace.
const PATIENCE: Duration = Duration::from_mins(2);
/// Maximum number of bytes that `iptables-save` may print of the expected rules.
const LIMIT: u64 = 16 << 20;
/// The abstract socket that serves as a lock: only one command runs in a network namespace (`unix(7)`, "Abstract
/// sockets").
const LOCK: &[u8] = b"dataplane-iptables-apply";

/// The changes that a run makes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Replace rules that differ, while the guard is up.
    pub reconcile: bool,
    /// Only remove rules.
    pub cleanup_only: bool,
    /// Report the changes without making them.
    pub dry_run: bool,
}

/// The result of a run in one word; with a dry run, the result that it would have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The rules are as expected.
    Same,
    /// The kernel had no rule of the mesh, or the expected rules were added and are now complete.
    Applied,
    /// The kernel had other rules of the mesh. The expected rules were added to them.
    OnTop,
    /// The kernel had other rules of the mesh. The expected rules replaced them.
    Reconciled,
    /// The rules of the mesh were removed.
    Removed,
    /// There was no rule to remove.
    Nothing,
}

/// The result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Done {
    /// The result in one word.
    pub outcome: Outcome,
    /// The choice of programs for each family that has expected rules.
    #[serde(rename = "families")]
    pub decisions: Vec<Decision>,
    /// The differences, each with its program and table.
    pub differences: Vec<String>,
    /// The changes.
    pub steps: Vec<Step>,
    /// Notices for the operator.
    pub notes: Vec<String>,
}

/// The expected rules of a family, as the family's program prints them.
struct Printing {
    family: Family,
    variant: Variant,
    printed: Printed,
}

/// The result of a comparison: the differences, the changes that remove them, and the rules that were read.
#[derive(Default)]
struct Found {
    differences: Vec<String>,
    has_some: bool,
    changes: Vec<(Step, By)>,
    texts: Vec<Printed>,
}

/// The programs and the expected rules.
struct Place<'a> {
    root: Option<&'a Path>,
    found: Binaries,
    expected: &'a Expected,
    printings: Vec<Printing>,
    /// Whether the mesh's rules are only removed.
    only_remove: bool,
}

/// Changes the rules to the expected ones.
///
/// # Errors
/// If a program is missing, rules cannot be read or are not understood, or another command runs: then no rule was
/// changed. If a program fails during the changes, the error says whether the old rules are restored.
pub fn apply(root: Option<&Path>, expected: &Expected, options: Options) -> io::Result<Done> {
    let _alone = alone()?;
    let found = binaries::find(root)?;
    let listed = netfilter::tables().map_err(io::Error::other)?;
    let families = expected.families();
    let decisions: Vec<Decision> = families
        .map(|family| detect::decide(family, &found, &listed))
        .collect();
    let printings = (decisions.iter())
        .map(|decision| print(root, decision, expected))
        .collect::<io::Result<_>>()?;
    let place = Place {
        root,
        found,
        expected,
        printings,
        only_remove: options.cleanup_only,
    };
    let reconcile = options.reconcile || options.cleanup_only;
    let how = if reconcile { How::Replace } else { How::OnTop };
    let mut before = place.look(how)?;
    let differences = std::mem::take(&mut before.differences);
    let outcome = match (differences.is_empty(), before.has_some) {
        (true, _) if options.cleanup_only => Outcome::Nothing,
        (false, _) if options.cleanup_only => Outcome::Removed,
        (true, _) => Outcome::Same,
        (false, false) => Outcome::Applied,
        (false, true) if options.reconcile => Outcome::Reconciled,
        (false, true) => Outcome::OnTop,
    };
    let changes = std::mem::take(&mut before.changes);
    let mut done = Done {
        outcome,
        decisions,
        differences,
        steps: changes.iter().map(|(step, _)| step.clone()).collect(),
        notes: Vec::new(),
    };
    done.notes = place.notes(&done);
    if options.dry_run {
        return Ok(done);
    }
    let is_guarded = outcome == Outcome::Reconciled;
    let rails = is_guarded.then(Rails::up).transpose();
    let rails = rails
        .map_err(|error| io::Error::new(error.kind(), format!("{error}; nothing was changed")))?;
    may_die();
    let mut made = Vec::new();
    let result = changes.into_iter().try_for_each(|(step, by)| {
        by.run(root, &step)?;
        made.push(step);
        may_die();
        Ok(())
    });
    let result = result.and_then(|()| match place.look(How::Replace)? {
        left if left.differences.is_empty() => {
            if outcome == Outcome::OnTop {
                done.outcome = Outcome::Applied;
            }
            Ok(())
        }
        _ if outcome == Outcome::OnTop => Ok(()),
        left => Err(io::Error::other(format!(
            "the rules are not those that are expected although every change was made ({}): does another program write them?",
            left.differences[0]
        ))),
    });
    let mut is_whole = true;
    let result = result.map_err(|why| {
        let (why, is_back) = place.undo(&before.texts, &made, &why);
        is_whole = is_back;
        why
    });
    done.steps = made;
    let down = match rails {
        // The rules are incomplete, so the guard stays up until its time is over.
        Some(rails) if !is_whole => {
            drop(rails);
            Ok(())
        }
        Some(rails) => rails.down(),
        // Removes the guard of a command that was killed.
        None if result.is_ok() => guard::down().map(drop),
        None => Ok(()),
    };
    result?;
    down?;
    Ok(done)
}

/// Ensures that no other command changes rules in this network namespace.
fn alone() -> io::Result<UnixListener> {
    UnixListener::bind_addr(&SocketAddr::from_abstract_name(LOCK)?).map_err(|error| {
        if error.kind() == io::ErrorKind::AddrInUse {
            let name = String::from_utf8_lossy(LOCK);
            io::Error::other(format!(
                "another `dataplane-migrate apply` runs in this network namespace (abstract socket {name})"
            ))
        } else {
            error
        }
    })
}

/// Makes the program print the expected rules, because it prints addresses, options and quotes in one form only. The
/// program loads the rules into a separate network namespace, which has no effect on packets.
fn print(root: Option<&Path>, decision: &Decision, expected: &Expected) -> io::Result<Printing> {
    let family = decision.family;
    let missing = || {
        let problem = decision
            .problems
            .first()
            .map_or("a program is missing", |why| why);
        io::Error::other(format!("{}: {problem}", family.word()))
    };
    let variant = decision.variant.ok_or_else(missing)?;
    let (save, restore) = (decision.save.as_ref(), decision.restore.as_ref());
    let (save, restore) = (save.ok_or_else(missing)?, restore.ok_or_else(missing)?);
    let origin = binaries::name(family, Some(variant), Role::Command);
    let wanted = expected
        .tables
        .iter()
        .filter(|table| table.family == family);
    let there = || {
        let mut text = String::new();
        // iptables accepts a rule that matches a set only if the set exists.
        let sets = wanted.clone().flat_map(ExpectedTable::sets).collect();
        make_ip_sets(&sets, family == Family::V4).map_err(|error| {
            let why = format!(
                "cannot make the sets that the expected rules ask, to try the rules: {error}"
            );
            io::Error::new(error.kind(), why)
        })?;
        for table in wanted {
            let refused = |why: &str| {
                let program = restore.display();
                let (name, line) = (&table.name, table.line);
                io::Error::other(format!(
                    "{program} does not take the expected rules of table {name} (from line {line} on): {why}"
                ))
            };
            let input = table.text.as_bytes();
            let said =
                binaries::run_with(restore, &["--noflush", "-w", "60"], input, PATIENCE, LIMIT)?;
            if !said.success {
                return Err(refused(said.stderr.lines().next().unwrap_or("no reason")));
            }
            let said = binaries::run(save, &["-t", &table.name], PATIENCE, LIMIT)?;
            if !said.success {
                return Err(refused(said.stderr.lines().next().unwrap_or("no reason")));
            }
            text += &String::from_utf8_lossy(&said.stdout);
        }
        Ok(text)
    };
    let text = in_a_new_namespace(|| binaries::below(root, there))?;
    let form = Form::Saved;
    Ok(Printing {
        family,
        variant,
        printed: Printed { origin, form, text },
    })
}

fn in_a_new_namespace<T: Send>(work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    let there = || {
        unshare(CloneFlags::CLONE_NEWNET).map_err(|error| {
            let error = io::Error::from(error);
            let why = format!(
                "cannot make a network namespace in which the expected rules are tried: {error}; run as root or add CAP_SYS_ADMIN"
            );
            io::Error::new(error.kind(), why)
        })?;
        work()
    };
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("trial".to_owned());
        thread
            .spawn_scoped(scope, there)?
            .join()
            .map_err(|_| io::Error::other("the thread in a new network namespace panicked"))?
    })
}

impl Place<'_> {
    /// Reads the present rules of both families and variants and the native tables, and compares them with the expected
    /// rules.
    fn look(&self, how: How) -> io::Result<Found> {
        let whose = &self.expected.whose;
        let listed = netfilter::tables().map_err(io::Error::other)?;
        let mut found = Found {
            texts: self.read(&listed)?,
            ..Found::default()
        };
        for (family, variant, origin) in binaries::commands() {
            let known = self.printing(family)?;
            let is_wanted = !self.only_remove
                && self
                    .printings
                    .iter()
                    .any(|printing| (printing.family, printing.variant) == (family, variant));
            let wanted = if is_wanted { &known[..] } else { &[] };
            let now = of_origin(&found.texts, &origin)?;
            let in_front = |table: &str, chain: &str| self.expected.in_front(family, table, chain);
            let changes = plan::changes(&now, wanted, &known, whose, how, &in_front);
            for change in changes {
                found.has_some |= change.has_some;
                let title = format!("{origin} {}", change.table);
                let named = change
                    .differences
                    .iter()
                    .map(|line| format!("{title}: {line}"));
                found.differences.extend(named);
                if !change.input.is_empty() {
                    found.changes.push(self.step(&origin, change)?);
                }
            }
        }
        for table in listed
            .iter()
            .filter(|table| table.kind == Kind::Native && is_of(table, &whose.owners))
        {
            found.has_some = true;
            found.differences.push(format!(
                "left over: nf_tables table {} {}",
                table.family, table.name
            ));
            if how == How::Replace {
                // A native table cannot be restored, so it is removed last.
                found.changes.push(deletion(table));
            }
        }
        Ok(found)
    }

    /// Returns the rules of all tables of iptables, as one text for each program.
    fn read(&self, listed: &[netfilter::Table]) -> io::Result<Vec<Printed>> {
        collect::collect(self.root, &self.found, listed, collect::Native::Leave)?.whole()
    }

    /// Returns the expected rules of a family.
    fn printing(&self, family: Family) -> io::Result<Vec<Table<'_>>> {
        let printing = self
            .printings
            .iter()
            .find(|printing| printing.family == family);
        printing.map_or(Ok(Vec::new()), |printing| {
            tables(&printing.printed.as_text())
        })
    }

    fn step(&self, origin: &str, change: Change) -> io::Result<(Step, By)> {
        let (rules, chains) = (change.rules, change.chains);
        by_restore(&self.found, origin, change.input, rules, chains)
    }

    /// Returns the notices about a result.
    fn notes(&self, done: &Done) -> Vec<String> {
        let mut notes = Vec::new();
        for family in Family::BOTH {
            let is_expected = self.expected.families().any(|expected| expected == family);
            let of_family = |line: &String| {
                let mut commands = binaries::commands().filter(|(of, ..)| *of == family);
                commands.any(|(.., origin)| {
                    let rest = line.strip_prefix(&origin);
                    rest.is_some_and(|rest| rest.starts_with(' '))
                })
            };
            if !self.only_remove && !is_expected && done.differences.iter().any(of_family) {
                notes.push(format!(
                    "{}: no rules are expected, and the mesh has some: without them, no connection of this family is captured",
                    family.word()
                ));
            }
        }
        let mut tables = self.expected.tables.iter();
        if !self.only_remove && tables.any(|table| table.text.contains("TPROXY")) {
            notes.push(
                "the rules use TPROXY, which needs a routing rule and a route of the mesh's as well (`ip rule`): this command makes \
                 and checks rules of iptables only"
                    .to_owned(),
            );
        }
        notes
    }

    /// Restores the former rules. Returns the error to report, and whether the rules are complete.
    fn undo(&self, before: &[Printed], made: &[Step], why: &io::Error) -> (io::Error, bool) {
        if let Some(step) = made.iter().find(|step| step.input.is_empty()) {
            let text = format!(
                "{why}; the expected rules are there, and what `{}` removed does not come back",
                step.command
            );
            return (io::Error::other(text), true);
        }
        // A program may have failed after it changed the rules.
        let (text, is_back) = match self.bring_back(before) {
            Ok(false) => (format!("{why}; nothing was changed"), true),
            Ok(true) => (format!("{why}; the rules are as they were before"), true),
            Err(error) => (
                format!(
                    "{why}; the rules that were there before could not be brought back: {error}"
                ),
                false,
            ),
        };
        (io::Error::other(text), is_back)
    }

    /// Restores the former rules. Returns whether any rule had to be restored.
    fn bring_back(&self, before: &[Printed]) -> io::Result<bool> {
        let mut is_changed = false;
        let listed = netfilter::tables().map_err(io::Error::other)?;
        let texts = self.read(&listed)?;
        for (family, _, origin) in binaries::commands() {
            let (was, now) = (of_origin(before, &origin)?, of_origin(&texts, &origin)?);
            let known = self.printing(family)?;
            for name in ["raw", "mangle", "nat", "filter", "security"] {
                let [was, now, known] = [&was, &now, &known]
                    .map(|tables| tables.iter().find(|table| table.name == name));
                if let Some(change) = plan::back(was, now, known, &self.expected.whose) {
                    let (step, by) = self.step(&origin, change)?;
                    by.run(self.root, &step)?;
                    is_changed = true;
                }
            }
        }
        Ok(is_changed)
    }
}

/// Returns the tables that a program printed.
fn of_origin<'a>(texts: &'a [Printed], origin: &str) -> io::Result<Vec<Table<'a>>> {
    let text = texts.iter().find(|text| text.origin == origin);
    text.map_or(Ok(Vec::new()), |text| tables(&text.as_text()))
}
