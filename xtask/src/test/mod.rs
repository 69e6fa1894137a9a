//! `cargo xtask test`: everything is compiled, run, and counted.

mod suites;
mod tally;

use std::{
    env,
    ffi::OsStr,
    io::{BufRead, BufReader},
    process::{ExitCode, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, bail};

use self::{suites::Suite, tally::Tally};
use crate::{
    build::{self, Profile},
    command::shown,
    setup::{self, Purpose},
    style::{BOLD, ERROR, RESET},
};

/// Run the tests: unit, property, documentation, and the lab's scenarios
///
/// The scenarios load the kernel programs in network namespaces and cgroups of their own, in
/// parallel; nothing of the machine itself is touched. They need root. Without it they are
/// skipped, and the summary says so, except under CI=true, where that is a failure.
///
/// The last line is `N passed, N failed, N skipped`; the exit code is 0 if none failed.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
    cargo xtask test              everything
    cargo xtask test affinity     only tests with `affinity` in their names
    cargo xtask test --list       the tests' names")]
pub struct Arguments {
    /// Only tests whose name contains this
    filter: Option<String>,
    /// Print the tests' names instead of running them
    #[arg(long)]
    list: bool,
}

pub fn main(arguments: &Arguments, no_install: bool) -> Result<ExitCode> {
    let started = Instant::now();
    build::programs(&setup::ensure(Purpose::Lab, no_install)?)?;
    let mut suites = suites::compile()?;
    for suite in &mut suites {
        let command = &mut suite.command;
        command
            .env("DATAPLANE_BIN", Profile::Debug.binary("dataplane"))
            .env("DATAPLANE_PROBE_BIN", Profile::Debug.binary("probe"));
        if in_ci(env::var_os("CI").as_deref()) {
            command.env("DATAPLANE_REQUIRE_PRIVILEGES", "1");
        }
        command
            .args(arguments.list.then_some("--list"))
            .args(&arguments.filter);
    }
    let compiled = started.elapsed();
    let running = Instant::now();

    let mut total = Tally::default();
    for suite in &mut suites {
        let tally = run(suite, arguments.list)?;
        total.add(&suite.title, tally);
    }
    if arguments.list {
        return Ok(ExitCode::SUCCESS);
    }
    if let (0, Some(filter)) = (total.counted(), &arguments.filter) {
        bail!("no test's name contains {filter:?}; `cargo xtask test --list` prints them");
    }
    anstream::println!("\n{BOLD}Summary{RESET}");
    total.print();
    println!(
        "Compiled in {:.0} s, ran in {:.0} s.",
        compiled.as_secs_f64(),
        running.elapsed().as_secs_f64()
    );
    println!("{}", total.last_line());
    Ok(if total.failed() == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Runs a suite, passing on what it writes, and counts its results.
fn run(suite: &mut Suite, listing: bool) -> Result<Tally> {
    let name = shown(&suite.command);
    let mut child = suite
        .command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {name}"))?;
    let stdout = child.stdout.take().expect("was asked for");

    let mut tally = Tally::default();
    let mut titled = false;
    for line in BufReader::new(stdout).split(b'\n') {
        let line = line.with_context(|| format!("cannot read what {name} writes"))?;
        let line = String::from_utf8_lossy(&line);
        tally.read(&line);
        // Programs without tests say so in three lines that nobody misses.
        if !titled && !listing {
            if !tally::announces_tests(&line) {
                continue;
            }
            anstream::println!("\n{BOLD}{}{RESET}", suite.title);
            titled = true;
        }
        let wanted = if listing {
            line.ends_with(": test")
        } else {
            !line.is_empty() && !line.starts_with("running 0 tests")
        };
        if wanted {
            println!("{line}");
        }
    }
    let status = child.wait().with_context(|| format!("lost {name}"))?;
    if !status.success() && tally.failed() == 0 {
        // Killed, or ended before it could count.
        anstream::eprintln!("{ERROR}error:{RESET} {name} ended early: {status}");
        tally.fail(format!("the whole suite: {status}"));
    }
    Ok(tally)
}

/// Whether the variable `CI` says that this is a machine of a continuous integration.
fn in_ci(variable: Option<&OsStr>) -> bool {
    variable.is_some_and(|value| !value.is_empty() && value != "false" && value != "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ci_is_what_the_services_set() {
        assert!(in_ci(Some(OsStr::new("true"))));
        assert!(in_ci(Some(OsStr::new("1"))));
        assert!(!in_ci(Some(OsStr::new("false"))));
        assert!(!in_ci(Some(OsStr::new(""))));
        assert!(!in_ci(None));
    }
}
