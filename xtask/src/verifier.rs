//! `cargo xtask verifier`: reports the cost of the programs for the verifiers of kernels.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader},
    process::{ExitCode, Stdio},
};

use anyhow::{Context, Result, bail};
use dataplane_tests::Requirement;
use serde::{Deserialize, Serialize};

use crate::{
    build,
    progress::note,
    setup::{self, Purpose},
    style::{BOLD, RESET},
    test::{
        self,
        suites::{self, Suite},
    },
    vm::{self, Guest, Task},
    workspace,
};

/// Print each program's cost for the verifier, on this kernel and on others
///
/// Loads every program by itself and prints the number of instructions that the verifier followed
/// (its limit is 1 000 000), the stack of all functions together, the size of the machine code, and
/// the time. `cargo xtask test` compares them, except the time, with verifier-budget.json, and fails if
/// one grew by more than a tenth.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
    cargo xtask verifier                        on this kernel, which takes root
    cargo xtask verifier --kernel debian-6.1    and in a guest
    cargo xtask verifier --kernel debian-6.1 --write")]
pub struct Arguments {
    /// Also load the programs in a guest with this kernel: debian-VERSION or a bzImage; may be repeated
    #[arg(long)]
    kernel: Vec<String>,
    /// Write verifier-budget.json for these kernels
    #[arg(long)]
    write: bool,
}

/// A line of the table.
#[derive(Debug, PartialEq)]
pub struct Row {
    pub program: String,
    pub kernel: String,
    pub processed: u32,
    pub stack: u32,
    pub jited: u32,
    microseconds: u64,
}

impl Row {
    pub fn milliseconds(&self) -> u64 {
        self.microseconds.div_ceil(1000)
    }
}

/// The part of a row that is stored in verifier-budget.json.
#[derive(Debug, Serialize, Deserialize)]
struct Budget {
    processed: u32,
    stack: u32,
    jited: u32,
}

type Budgets = BTreeMap<String, BTreeMap<String, Budget>>;

/// The scenario that prints the rows.
pub const SCENARIO: &str = "verifier::every_program_is_taken";
/// The environment variable with the number of times that the scenario has each program verified, and our value. The
/// shortest time counts.
pub const ROUNDS: (&str, &str) = ("DATAPLANE_VERIFIER_ROUNDS", "3");

/// Returns the scenario as a task for a guest.
pub fn guest_task(scenarios: &Suite) -> Task<'static> {
    let mut task = test::guest_task(scenarios, Some(SCENARIO));
    task.script = format!("{}={} {}", ROUNDS.0, ROUNDS.1, task.script);
    task
}

pub fn main(arguments: &Arguments, no_install: bool) -> Result<ExitCode> {
    let missing = dataplane_tests::missing(Requirement::Dataplane);
    let purpose = if arguments.kernel.is_empty() {
        if let Some(missing) = missing {
            bail!(
                "{missing}; or name another kernel with --kernel {}",
                vm::OLDEST
            );
        }
        Purpose::Lab
    } else {
        Purpose::Guest
    };
    build::programs(&setup::ensure(purpose, no_install)?)?;
    let mut scenarios = suites::compile()?
        .pop()
        .context("the scenarios are compiled")?;

    let mut rows = Vec::new();
    for kernel in &arguments.kernel {
        let guest = Guest::new(kernel, None)?;
        let mut read = Reader::new(&mut rows);
        let status = guest.run(&guest_task(&scenarios), &mut |line| {
            read.line(line);
        })?;
        if status != 0 {
            bail!("{kernel} refuses programs: see above");
        }
    }
    if let Some(missing) = missing {
        note(&format!("not on this kernel: {missing}"));
    } else {
        let mut child = scenarios
            .command
            .arg(SCENARIO)
            .env(ROUNDS.0, ROUNDS.1)
            .env("DATAPLANE_BIN", build::Profile::Debug.binary("dataplane"))
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the scenarios")?;
        let stdout = child.stdout.take().expect("was asked for");
        let mut read = Reader::new(&mut rows);
        for line in BufReader::new(stdout).lines() {
            read.line(&line.context("cannot read what the scenarios write")?);
        }
        if !child.wait()?.success() {
            bail!("this kernel refuses programs: see above");
        }
    }

    print(&rows);
    if arguments.write {
        write(&rows)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Collects the rows. Prints all other lines after a failure.
struct Reader<'a> {
    rows: &'a mut Vec<Row>,
    failed: bool,
}

impl<'a> Reader<'a> {
    fn new(rows: &'a mut Vec<Row>) -> Self {
        Self {
            rows,
            failed: false,
        }
    }

    fn line(&mut self, line: &str) {
        self.failed |= line.starts_with("failures:");
        match row(line) {
            Some(row) => self.rows.push(row),
            None if self.failed => println!("{line}"),
            None => {}
        }
    }
}

/// Reads `verified connect4 on 6.1.0-56: processed 829 stack 112 jited 300 microseconds 9`.
pub fn row(line: &str) -> Option<Row> {
    let (program, rest) = line.strip_prefix("verified ")?.split_once(" on ")?;
    let (kernel, numbers) = rest.split_once(": ")?;
    let words: Vec<&str> = numbers.split(' ').collect();
    let number = |key: &str| {
        let at = words.iter().position(|word| *word == key)?;
        words.get(at + 1)?.parse().ok()
    };
    Some(Row {
        program: program.to_owned(),
        kernel: kernel.to_owned(),
        processed: number("processed")?,
        stack: number("stack")?,
        jited: number("jited")?,
        microseconds: number("microseconds")?.into(),
    })
}

fn print(rows: &[Row]) {
    anstream::println!(
        "{BOLD}{:<15} {:<24} {:>12} {:>11} {:>13} {:>9}{RESET}",
        "PROGRAM",
        "KERNEL",
        "INSTRUCTIONS",
        "STACK BYTES",
        "MACHINE BYTES",
        "TIME"
    );
    for row in rows {
        println!(
            "{:<15} {:<24} {:>12} {:>11} {:>13} {:>6} ms",
            row.program,
            row.kernel,
            row.processed,
            row.stack,
            row.jited,
            row.milliseconds()
        );
    }
}

/// Returns the series of a kernel: `6.1` for `6.1.0-56-cloud-amd64`.
pub fn series(kernel: &str) -> String {
    let numbers: Vec<&str> = kernel.split(['.', '-', '+']).take(2).collect();
    numbers.join(".")
}

fn write(rows: &[Row]) -> Result<()> {
    let file = workspace::root().join("verifier-budget.json");
    let text =
        fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let mut budgets: Budgets =
        serde_json::from_str(&text).with_context(|| format!("in {}", file.display()))?;
    for row in rows {
        budgets.insert(series(&row.kernel), BTreeMap::new());
    }
    for row in rows {
        let budget = Budget {
            processed: row.processed,
            stack: row.stack,
            jited: row.jited,
        };
        budgets
            .entry(series(&row.kernel))
            .or_default()
            .insert(row.program.clone(), budget);
    }
    let mut text = serde_json::to_string_pretty(&budgets)?;
    text.push('\n');
    fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
    note(&format!("wrote {}", file.display()));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_scenario_prints() {
        let line = "verified connect4 on 6.1.0-56-cloud-amd64: processed 829 stack 112 jited 300 \
                    microseconds 9001";
        let row = row(line).unwrap();
        assert_eq!(
            (row.program.as_str(), row.processed, row.stack),
            ("connect4", 829, 112)
        );
        assert_eq!((row.jited, row.microseconds), (300, 9001));
        assert_eq!(series(&row.kernel), "6.1");
        assert_eq!(super::row("test verifier::x ... ok"), None);
    }
}
