//! `cargo xtask kernels`: features of kernels, the programs' cost on them, and the scenarios'
//! results on them, for docs/kernels.md.

mod page;
mod record;

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use dataplane_tests::Requirement;

use self::record::{Feature, Program, Record, Report, Scenarios};
use crate::{
    build::{self, Profile},
    command,
    progress::note,
    setup::{self, Purpose},
    test::{
        self,
        suites::{self, Suite},
        tally::Tally,
    },
    verifier::{self, ROUNDS, Row, SCENARIO},
    vm::{self, Guest},
};

/// Print the features of kernels and the programs' cost on them, for docs/kernels.md
///
/// Runs `dataplane doctor` and has every program verified, on this machine's kernel and in guests
/// with other kernels. Then prints the tables of docs/kernels.md. With --scenarios, all scenarios
/// run on each kernel as well.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
    cargo xtask kernels                              ask, and print the tables
    cargo xtask kernels --write                      and put them into docs/kernels.md
    cargo xtask kernels --scenarios --write          with all scenarios: some ten minutes a kernel
    cargo xtask kernels --kernel debian-6.12 --write that one and this machine's; others stay")]
pub struct Arguments {
    /// The guests' kernels: debian-VERSION or a bzImage; may be repeated
    #[arg(long, default_values = [vm::OLDEST, "debian-6.12"])]
    kernel: Vec<String>,
    /// Run all scenarios on each kernel as well
    #[arg(long)]
    scenarios: bool,
    /// Write docs/kernels.json, and the tables into docs/kernels.md
    #[arg(long)]
    write: bool,
}

pub fn main(arguments: &Arguments, no_install: bool) -> Result<ExitCode> {
    build::programs(&setup::ensure(Purpose::Guest, no_install)?)?;
    let mut lab = suites::compile()?
        .pop()
        .context("the scenarios are compiled")?;

    let mut record = Record::read()?;
    if let Some(missing) = dataplane_tests::missing(Requirement::Dataplane) {
        note(&format!("not on this kernel: {missing}"));
    } else {
        record.add(ask_here(&mut lab, arguments.scenarios)?);
    }
    for kernel in &arguments.kernel {
        let guest = Guest::new(kernel, None)?;
        record.add(ask_guest(&guest, &lab, arguments.scenarios)?);
    }

    println!("{}", page::tables(&record));
    if arguments.write {
        record.write()?;
        page::write(&record)?;
        note("wrote docs/kernels.json and docs/kernels.md");
    }
    Ok(if record.reports.values().all(Report::is_good) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Collects the report of this machine.
fn ask_here(lab: &mut Suite, scenarios: bool) -> Result<Report> {
    let dataplane = Profile::Debug.binary("dataplane");
    // `doctor` exits with 1 if something is missing. This is a valid answer too.
    let doctor = Command::new(&dataplane)
        .args(["doctor", "-o", "json"])
        .output()
        .context("cannot run dataplane doctor")?;
    let features = features(&String::from_utf8_lossy(&doctor.stdout))?;

    lab.command
        .env("DATAPLANE_BIN", &dataplane)
        .env("DATAPLANE_PROBE_BIN", Profile::Debug.binary("probe"));
    let mut verifying = Command::new(lab.command.get_program());
    verifying
        .arg(SCENARIO)
        .env(ROUNDS.0, ROUNDS.1)
        .env("DATAPLANE_BIN", &dataplane)
        .stdout(Stdio::piped());
    let mut child = verifying.spawn().context("cannot start the scenarios")?;
    let stdout = child.stdout.take().context("was asked for")?;
    let lines = BufReader::new(stdout)
        .lines()
        .collect::<Result<Vec<_>, _>>()
        .context("cannot read what the scenarios write")?;
    if !child.wait().context("lost the scenarios")?.success() {
        bail!("this machine: {}", lines.join("\n"));
    }
    let rows: Vec<Row> = lines
        .iter()
        .filter_map(|line| verifier::row(line))
        .collect();

    let scenarios = if scenarios {
        let started = Instant::now();
        let tally = test::run(lab, false)?;
        Some(counted(&tally, started.elapsed()))
    } else {
        None
    };
    let release = command::output(Command::new("uname").arg("-r"))?;
    Ok(Report {
        release: release.trim().to_owned(),
        runs_on: "the machine that this was written on".to_owned(),
        features,
        programs: programs(rows)?,
        scenarios,
    })
}

/// Prefix of the guest's line with the doctor's answer.
const DOCTOR: &str = "doctor: ";
/// Line after which all output belongs to the scenarios.
const ALL: &str = "all scenarios:";

/// Collects the report of a guest.
fn ask_guest(guest: &Guest, lab: &Suite, scenarios: bool) -> Result<Report> {
    let mut task = verifier::guest_task(lab);
    let verify = task.script;
    task.script = format!(
        "uname -r; echo \"{DOCTOR}$(dataplane doctor -o json | tr -d '\\n')\"\n{verify} || exit"
    );
    if scenarios {
        let all = test::guest_task(lab, None).script;
        task.script = [task.script, format!("echo '{ALL}'"), all].join("\n");
    }
    let mut lines = Vec::new();
    let mut started = Instant::now();
    let mut seen_all = false;
    let mut results = test::Results::new("scenarios", false);
    let status = guest.run(&task, &mut |line| {
        if seen_all {
            results.read(line);
            return;
        }
        if line == ALL {
            seen_all = true;
            started = Instant::now();
        }
        lines.push(line.to_owned());
    })?;
    let rows: Vec<Row> = lines
        .iter()
        .filter_map(|line| verifier::row(line))
        .collect();
    let tally = results.tally();
    if status != 0 && !seen_all {
        bail!("{}: {}", guest.kernel(), lines.join("\n"));
    }
    let doctor = lines
        .iter()
        .find_map(|line| line.strip_prefix(DOCTOR))
        .context("the guest did not run dataplane doctor")?;
    Ok(Report {
        release: lines.first().cloned().unwrap_or_default(),
        runs_on: guest.runs_by().to_owned(),
        features: features(doctor)?,
        programs: programs(rows)?,
        scenarios: scenarios.then(|| counted(&tally, started.elapsed())),
    })
}

fn features(doctor: &str) -> Result<Vec<Feature>> {
    serde_json::from_str(doctor)
        .with_context(|| format!("dataplane doctor answered no JSON: {doctor:?}"))
}

fn programs(rows: Vec<Row>) -> Result<BTreeMap<String, Program>> {
    if rows.is_empty() {
        bail!("no program was verified: see above");
    }
    Ok(rows
        .into_iter()
        .map(|row| {
            let program = Program {
                processed: row.processed,
                stack: row.stack,
                jited: row.jited,
                milliseconds: row.milliseconds(),
            };
            (row.program, program)
        })
        .collect())
}

fn counted(tally: &Tally, took: Duration) -> Scenarios {
    Scenarios {
        passed: tally.passed(),
        failed: tally.failed(),
        skipped: tally
            .skipped()
            .iter()
            .map(|(reason, names)| (reason.clone(), names.clone()))
            .collect(),
        seconds: took.as_secs(),
    }
}
