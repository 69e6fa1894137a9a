//! What the running kernel's verifier makes of the programs, and what it may cost.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use dataplane::kernel::verifier::{Cost, Verifier};
use serde::Deserialize;

scenarios! {
    Dataplane:
    every_program_is_taken,
    no_program_outgrows_its_budget,
}

/// By kernel (`6.1`), then by program. `cargo xtask verifier --write` writes it.
const BUDGET: &str = include_str!("../../../verifier-budget.json");

/// What a program cost when the file was written.
#[derive(Debug, Deserialize)]
struct Budget {
    processed: u32,
    stack: u32,
    jited: u32,
    /// How long its verification took, in times that of a program which never changes
    /// ([`Verifier::yardstick`]).
    time: f64,
}

/// How long it takes to verify a program, in yardsticks: both at their quickest of some tries. A
/// try can only be held up, by whatever else this machine does, and never be quicker than it is.
#[derive(Debug)]
struct Stopwatch {
    program: Duration,
    yardstick: Duration,
}

impl Stopwatch {
    fn new(first: Duration) -> Result<Self> {
        Ok(Self {
            program: first,
            yardstick: Verifier::yardstick()?,
        })
    }

    fn again(&mut self, verifier: &mut Verifier, program: &str) -> Result<()> {
        self.yardstick = self.yardstick.min(Verifier::yardstick()?);
        if let Ok(cost) = verifier.verify(program).outcome {
            self.program = self.program.min(cost.time);
        }
        Ok(())
    }

    fn yardsticks(&self) -> f64 {
        self.program.as_secs_f64() / self.yardstick.as_secs_f64()
    }
}

/// Tries for the time that is printed, and written into the budget.
const TRIES: usize = 7;
/// Tries before a program is found to take longer than it may. On a busy machine it takes many to
/// have one that nobody disturbed.
const MOST_TRIES: usize = 60;
/// Below this nobody waits for it, and a clock of microseconds says little of a tenth of it.
const NO_TIME: f64 = 0.1;

/// The running kernel's release, and its first two numbers.
fn kernel() -> Result<(String, String)> {
    let name = nix::sys::utsname::uname()?;
    let release = name.release().to_str().context("a kernel's release")?;
    let series: Vec<&str> = release.split(['.', '-', '+']).take(2).collect();
    Ok((release.to_owned(), series.join(".")))
}

/// Every program loads; what that costs is printed, one line for each, for `cargo xtask verifier`.
fn every_program_is_taken() -> Result<()> {
    let (release, _) = kernel()?;
    let mut verifier = Verifier::new()?;
    let mut refused = Vec::new();
    for program in verifier.programs() {
        match verifier.verify(&program).outcome {
            Ok(cost) => {
                let mut watch = Stopwatch::new(cost.time)?;
                for _ in 1..TRIES {
                    watch.again(&mut verifier, &program)?;
                }
                println!(
                    "verified {program} on {release}: processed {} stack {} jited {} microseconds \
                     {} yardsticks {:.2}",
                    cost.processed,
                    cost.stack,
                    cost.jited,
                    watch.program.as_micros(),
                    watch.yardsticks()
                );
            }
            Err(log) => refused.push(format!("{program}: {log}")),
        }
    }
    ensure!(
        refused.is_empty(),
        "{release} refuses {}",
        refused.join("\n")
    );
    Ok(())
}

/// A program that grows takes its budget along, in the same change, so that it is seen.
fn no_program_outgrows_its_budget() -> Result<()> {
    let (release, series) = kernel()?;
    let budgets: BTreeMap<String, BTreeMap<String, Budget>> = serde_json::from_str(BUDGET)?;
    let Some(budgets) = budgets.get(&series) else {
        println!("no budget was written on Linux {series} ({release})");
        return Ok(());
    };
    let mut over = Vec::new();
    let mut verifier = Verifier::new()?;
    for program in verifier.programs() {
        let Ok(cost) = verifier.verify(&program).outcome else {
            continue;
        };
        let Some(budget) = budgets.get(&program) else {
            over.push(format!("{program} has no budget"));
            continue;
        };
        over.extend(excess(&cost, budget).map(|what| format!("{program}: {what}")));
        over.extend(
            delay(&mut verifier, &program, cost.time, budget.time)?
                .map(|what| format!("{program}: {what}")),
        );
    }
    if over.is_empty() {
        return Ok(());
    }
    bail!(
        "{} on Linux {release}: if it must be, `cargo xtask verifier --kernel debian-6.1 --write` \
         and commit verifier-budget.json",
        over.join("; ")
    )
}

/// That it takes more than a tenth longer to verify a program than it did.
fn delay(
    verifier: &mut Verifier,
    program: &str,
    first: Duration,
    before: f64,
) -> Result<Option<String>> {
    let most = before * 1.1 + NO_TIME;
    let mut watch = Stopwatch::new(first)?;
    for _ in 0..MOST_TRIES {
        if watch.yardsticks() <= most {
            return Ok(None);
        }
        watch.again(verifier, program)?;
    }
    Ok(Some(format!(
        "{:.2} times as long to verify as the yardstick, {before:.2} before",
        watch.yardsticks()
    )))
}

/// What grew by more than a tenth.
fn excess(cost: &Cost, budget: &Budget) -> Option<String> {
    // Machine code differs by some bytes with the processor and its mitigations; a kernel that
    // interprets programs has none.
    const MITIGATIONS: u32 = 32;
    let rows = [
        ("instructions verified", cost.processed, budget.processed, 0),
        ("bytes of stack", cost.stack, budget.stack, 0),
        (
            "bytes of machine code",
            cost.jited,
            budget.jited,
            MITIGATIONS,
        ),
    ];
    let over: Vec<String> = rows
        .into_iter()
        .filter(|(_, now, then, slack)| {
            u64::from(*now) * 10 > u64::from(*then) * 11 + u64::from(*slack) * 10
        })
        .map(|(what, now, then, _)| format!("{now} {what}, {then} before"))
        .collect();
    (!over.is_empty()).then(|| over.join(", "))
}
