//! `cargo xtask test`: compiles and runs all tests, and counts the results.

pub mod suites;
pub mod tally;

use std::{
    env,
    ffi::OsStr,
    fmt::Write as _,
    io::{BufRead, BufReader},
    num::NonZero,
    path::PathBuf,
    process::{Command, ExitCode, Stdio},
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use dataplane_tests::Requirement;

use self::{
    suites::{Kind, Suite},
    tally::Tally,
};
use crate::{
    build::{self, Profile},
    command::{quoted, shown},
    progress::note,
    setup::{self, Purpose},
    style::{BOLD, ERROR, RESET},
    vm::{self, Guest, Task},
};

/// Run the tests: unit, property, documentation, and the lab's scenarios
///
/// The scenarios load the kernel programs in network namespaces and cgroups of their own, in
/// parallel, and do not touch the machine's own. They need root. Without root they are skipped, and
/// the summary says so. With CI=true, a skipped scenario is a failure.
///
/// With --vm the scenarios run as root in a qemu guest with the oldest supported kernel, for any user
/// and on any kernel. If KVM does not work, qemu emulates the guest, and scenarios that load the
/// machine are skipped.
///
/// The last line is `N passed, N failed, N skipped`; the exit code is 0 if none failed.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
    cargo xtask test                  everything
    cargo xtask test affinity         only tests with `affinity` in their names
    cargo xtask test --list           the tests' names
    cargo xtask test --vm             the scenarios, on Debian's Linux 6.1
    cargo xtask test --vm=auto        everything; the scenarios in a guest if they cannot run here
    cargo xtask test --vm=also        everything, then a core of the scenarios in a guest
    cargo xtask test --vm --kernel debian-6.12 verifier
    cargo xtask test --vm --kernel ./bzImage --modules /lib/modules/6.9.1")]
pub struct Arguments {
    /// Run only tests whose names contain this
    filter: Option<String>,
    /// Print the tests' names instead of running them
    #[arg(long)]
    list: bool,
    /// Run the scenarios in a guest with another kernel
    #[arg(long, value_enum, value_name = "WHEN", num_args = 0..=1, require_equals = true,
          default_missing_value = "only", conflicts_with = "list")]
    vm: Option<When>,
    /// Kernel of the guest: debian-VERSION for one of Debian's cloud kernels, or a bzImage
    #[arg(long, requires = "vm", default_value = vm::OLDEST)]
    kernel: String,
    /// Directory of the modules for the bzImage
    #[arg(long, requires = "vm", value_name = "DIR")]
    modules: Option<PathBuf>,
}

/// When a guest is used, and for which tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum When {
    /// Only the scenarios, in the guest
    Only,
    /// Everything here; the scenarios in the guest if they cannot run here
    Auto,
    /// Everything here, then in the guest the scenarios that depend most on the kernel
    Also,
}

/// The scenarios that depend most on the kernel, for `--vm=also`. They check that every program is loaded, attached,
/// pinned, replaced and removed, how the programs see each kind of socket, and that the packet programs behave like the
/// model (a verifier may remove code that it takes for dead). The programs decide which address is a service's, which
/// endpoint is chosen and which clients are refused, and the agent decides what the tables hold and what happens to
/// damaged pins. These decisions are equal on each kernel, and each such scenario takes the time of an agent's start.
/// Not every machine's kernel has ESP, and the guest's has it.
const CORE: &str = "machine verifier features neighbours fuzz \
                    ipsec::a_tunnel_encrypts_services_through_the_stack \
                    kernel::a_second_agent_adopts_what_the_first_wrote \
                    kernel::another_cgroup_is_attached_to_anew \
                    kernel::tables::tables_grow_and_keep_what_they_hold \
                    kernel::programs::what_is_kept_for_a_socket_goes_with_it \
                    services::tcp_reaches_every_endpoint_and_the_peer_is_the_vip \
                    services::udp_replies_come_from_the_vip \
                    services::what_cannot_be_served_is_refused_at_once";

pub fn main(arguments: &Arguments, no_install: bool) -> Result<ExitCode> {
    let started = Instant::now();
    let missing = dataplane_tests::missing(Requirement::Dataplane);
    let in_guest = match arguments.vm {
        Some(When::Only | When::Also) => true,
        Some(When::Auto) => missing.is_some(),
        None => false,
    };
    let purpose = if in_guest {
        Purpose::Guest
    } else {
        // The scenarios also run kube-proxy's rules.
        Purpose::Bench
    };
    build::programs(&setup::ensure(purpose, no_install)?)?;
    let (mut suites, guest) = compile(arguments, in_guest)?;
    if let (None, Some(missing)) = (arguments.vm, &missing) {
        note(&format!(
            "The scenarios cannot run here: {missing}. With --vm=auto they run in a guest."
        ));
    }
    let guest = guest
        .map(|guest| for_guest(guest, arguments.vm, &mut suites))
        .transpose()?;
    for suite in &mut suites {
        prepare(suite, arguments);
    }
    let compiled = started.elapsed();
    let running = Instant::now();

    let mut total = Tally::default();
    // The lab's scenarios wait for each other, but not for other tests.
    let (mut here, mut pure): (Vec<_>, Vec<_>) = suites
        .into_iter()
        .partition(|suite| suite.kind == Kind::Scenarios);
    let results = side_by_side(&mut pure, arguments.list)?;
    for (suite, (tally, took)) in pure.iter().zip(results) {
        total.add(&suite.title, tally, took);
    }
    for suite in &mut here {
        let started = Instant::now();
        let mut tally = run(suite, arguments.list)?;
        repeat_alone(suite, &mut tally)?;
        total.add(&suite.title, tally, started.elapsed());
    }
    let mut guest_took = None;
    match &guest {
        None => {}
        Some((Err(error), _)) => {
            anstream::eprintln!("{ERROR}error:{RESET} {error:#}");
            total.fail(format!("the guest: {error:#}"));
        }
        Some((Ok(guest), scenarios)) => {
            let title = format!("{}, on {}", scenarios.title, guest.kernel());
            let mut task = guest_task(scenarios, arguments.filter.as_deref());
            let only = match arguments.vm {
                Some(When::Also) => Some(CORE.to_owned()),
                _ => env::var("DATAPLANE_SCENARIOS").ok(),
            };
            if let Some(only) = only {
                let only = quoted(&only);
                task.script = format!("export DATAPLANE_SCENARIOS={only}\n{}", task.script);
            }
            let started = Instant::now();
            let tally = run_in_guest(guest, &task, &title);
            total.add(&title, tally, started.elapsed());
            guest_took = Some(started.elapsed());
        }
    }
    if arguments.list {
        return Ok(ExitCode::SUCCESS);
    }
    if let (0, Some(filter)) = (total.counted(), &arguments.filter) {
        bail!("no test's name contains {filter:?}; `cargo xtask test --list` prints them");
    }
    anstream::println!("\n{BOLD}Summary{RESET}");
    total.print();
    let of_which = guest_took.map_or_else(String::new, |took| {
        format!(", of which {:.0} s in the guest", took.as_secs_f64())
    });
    println!(
        "Compiled in {:.0} s, ran in {:.0} s{of_which}.",
        compiled.as_secs_f64(),
        running.elapsed().as_secs_f64()
    );
    if let (None, Some(missing)) = (arguments.vm, &missing) {
        println!("Here the scenarios cannot run: {missing}. With --vm=auto they run in a guest.");
    }
    println!("{}", total.last_line());
    Ok(if total.failed() == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Compiles the suites. Finds the guest meanwhile: qemu may take ten seconds to find out that KVM does not work.
fn compile(arguments: &Arguments, in_guest: bool) -> Result<(Vec<Suite>, Option<Result<Guest>>)> {
    thread::scope(|scope| {
        let find = || Guest::new(&arguments.kernel, arguments.modules.as_deref());
        let guest = in_guest.then(|| scope.spawn(find));
        let suites = suites::compile();
        let guest = guest.map(|guest| guest.join().expect("it returns its errors"));
        Ok((suites?, guest))
    })
}

/// Returns the guest, and the scenarios that run in it, which leave `suites` unless they also run here.
fn for_guest(
    guest: Result<Guest>,
    when: Option<When>,
    suites: &mut Vec<Suite>,
) -> Result<(Result<Guest>, Suite)> {
    let guest = match guest {
        // With `--vm=also`, the tests on this machine run even if the guest cannot.
        Err(error) if when == Some(When::Also) => Err(error),
        guest => Ok(guest?),
    };
    let scenarios = match when {
        Some(When::Also) => suites.last().map(Suite::again),
        _ => suites.pop(),
    };
    if when == Some(When::Only) {
        suites.clear();
    }
    Ok((guest, scenarios.context("the scenarios are compiled")?))
}

/// Sets the environment and the arguments of a test program.
fn prepare(suite: &mut Suite, arguments: &Arguments) {
    let command = &mut suite.command;
    command
        .env("DATAPLANE_BIN", Profile::Debug.binary("dataplane"))
        .env(
            "DATAPLANE_MIGRATE_BIN",
            Profile::Debug.binary("dataplane-migrate"),
        )
        .env("DATAPLANE_PROBE_BIN", Profile::Debug.binary("probe"));
    if in_ci(env::var_os("CI").as_deref()) {
        command.env("DATAPLANE_REQUIRE_PRIVILEGES", "1");
    }
    command
        .args(arguments.list.then_some("--list"))
        .args(&arguments.filter);
}

/// Runs suites in parallel, as many as there are processors. Returns the results and the duration of each. The output
/// of a suite is printed as a whole when the suite has ended.
fn side_by_side(suites: &mut [Suite], listing: bool) -> Result<Vec<(Tally, Duration)>> {
    let workers = thread::available_parallelism().map_or(1, NonZero::get);
    let mut done: Vec<_> = suites.iter().map(|_| None).collect();
    let waiting = Mutex::new(suites.iter_mut().zip(&mut done));
    let next = || {
        let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.next()
    };
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some((suite, done)) = next() {
                    let started = Instant::now();
                    let results = Results::new(&suite.title, listing).kept();
                    let tally = run_with(&mut suite.command, results);
                    *done = Some(tally.map(|tally| (tally, started.elapsed())));
                }
            });
        }
    });
    done.into_iter()
        .map(|tally| tally.expect("each of them was run"))
        .collect()
}

/// Repeats failed scenarios, each alone, if there are only a few. Scenarios have time limits, and on a slow machine
/// other scenarios may use up the time. A scenario that passes alone counts as passed, and the summary names it. A real
/// fault also fails alone.
fn repeat_alone(suite: &Suite, tally: &mut Tally) -> Result<()> {
    /// More failures are not an accident.
    const FEW: usize = 5;

    let failures = tally.failures().to_vec();
    if failures.len() > FEW {
        return Ok(());
    }
    for name in failures {
        let title = format!("{}, alone", suite.title);
        let mut command = suite.again().command;
        for (variable, value) in suite.command.get_envs() {
            command.env(variable, value.unwrap_or_default());
        }
        command.args(["--exact", &name]);
        let again = run_with(&mut command, Results::new(&title, false))?;
        if again.failed() == 0 && again.passed() == 1 {
            tally.passed_alone(&name);
        }
    }
    Ok(())
}

/// Runs a suite, prints its output, and counts its results.
pub fn run(suite: &mut Suite, listing: bool) -> Result<Tally> {
    run_with(&mut suite.command, Results::new(&suite.title, listing))
}

fn run_with(command: &mut Command, mut results: Results<'_>) -> Result<Tally> {
    let name = shown(command);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {name}"))?;
    let stdout = child.stdout.take().expect("was asked for");

    for line in BufReader::new(stdout).split(b'\n') {
        let line = line.with_context(|| format!("cannot read what {name} writes"))?;
        results.read(&String::from_utf8_lossy(&line));
    }
    let mut tally = results.tally();
    let status = child.wait().with_context(|| format!("lost {name}"))?;
    if !status.success() && tally.failed() == 0 {
        // The suite was killed, or ended before it could count.
        anstream::eprintln!("{ERROR}error:{RESET} {name} ended early: {status}");
        tally.fail(format!("the whole suite: {status}"));
    }
    Ok(tally)
}

/// Returns the scenarios as a task for a guest.
pub fn guest_task(scenarios: &Suite, filter: Option<&str>) -> Task<'static> {
    // The guest's serial line is a terminal, and colours would disturb the counting.
    let script = ["lab", "--color=never"].into_iter().chain(filter);
    Task {
        programs: vec![
            ("lab", scenarios.command.get_program().into()),
            ("probe", Profile::Debug.binary("probe")),
            ("dataplane", Profile::Debug.binary("dataplane")),
            (
                "dataplane-migrate",
                Profile::Debug.binary("dataplane-migrate"),
            ),
        ],
        script: script.map(quoted).collect::<Vec<_>>().join(" "),
    }
}

/// Runs the scenarios in a guest, prints their output, and counts their results.
fn run_in_guest(guest: &Guest, task: &Task<'_>, title: &str) -> Tally {
    let mut results = Results::new(title, false);
    let ended = guest.run(task, &mut |line| results.read(line));
    let mut tally = results.tally();
    match ended {
        Ok(0) => {}
        Ok(status) if tally.failed() == 0 => {
            tally.fail(format!("the whole suite: exit status {status}"));
        }
        Ok(_) => {}
        Err(error) => {
            anstream::eprintln!("{ERROR}error:{RESET} {error:#}");
            tally.fail(format!("the whole suite: {error}"));
        }
    }
    tally
}

/// Prints and counts the output of a suite.
pub struct Results<'a> {
    title: &'a str,
    titled: bool,
    listing: bool,
    tally: Tally,
    /// Output that is not printed yet. `None` if lines are printed immediately.
    kept: Option<String>,
}

impl<'a> Results<'a> {
    pub fn new(title: &'a str, listing: bool) -> Self {
        Self {
            title,
            titled: false,
            listing,
            tally: Tally::default(),
            kept: None,
        }
    }

    /// Delays the output until the suite has ended.
    pub fn kept(self) -> Self {
        Self {
            kept: Some(String::new()),
            ..self
        }
    }

    /// Prints delayed output, and returns the counts.
    pub fn tally(self) -> Tally {
        if let Some(kept) = self.kept {
            anstream::print!("{kept}");
        }
        self.tally
    }

    /// Reads a line of the output.
    pub fn read(&mut self, line: &str) {
        self.tally.read(line);
        // Programs without tests print three lines. Skip them.
        if !self.titled && !self.listing {
            if !tally::announces_tests(line) {
                return;
            }
            self.write(&format!("\n{BOLD}{}{RESET}", self.title));
            self.titled = true;
        }
        let wanted = if self.listing {
            line.ends_with(": test")
        } else {
            !line.is_empty() && !line.starts_with("running 0 tests")
        };
        if wanted {
            self.write(line);
        }
    }

    fn write(&mut self, line: &str) {
        match &mut self.kept {
            Some(kept) => writeln!(kept, "{line}").expect("a text takes all"),
            None => anstream::println!("{line}"),
        }
    }
}

/// Returns whether the variable `CI` says that this is a machine of a continuous integration.
fn in_ci(variable: Option<&OsStr>) -> bool {
    variable.is_some_and(|value| !value.is_empty() && value != "false" && value != "0")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::workspace;

    #[test]
    fn the_core_is_of_scenarios_that_there_are() {
        for wanted in CORE.split(' ') {
            let (module, scenario) = wanted.rsplit_once("::").unwrap_or((wanted, ""));
            let path = format!("tests/tests/lab/{}", module.replace("::", "/"));
            let path = workspace::root().join(path);
            let texts = [path.with_extension("rs"), path.join("mod.rs")].map(fs::read_to_string);
            let text = texts.into_iter().find_map(Result::ok);
            let text = text.unwrap_or_else(|| panic!("no {}", path.display()));
            let line = format!("\n    {scenario},\n");
            assert!(scenario.is_empty() || text.contains(&line), "no {wanted}");
        }
    }

    #[test]
    fn ci_is_what_the_services_set() {
        assert!(in_ci(Some(OsStr::new("true"))));
        assert!(in_ci(Some(OsStr::new("1"))));
        assert!(!in_ci(Some(OsStr::new("false"))));
        assert!(!in_ci(Some(OsStr::new(""))));
        assert!(!in_ci(None));
    }
}
