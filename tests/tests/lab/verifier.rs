//! The running kernel's verifier on our programs: whether it takes them, and their cost.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use anyhow::{Context as _, Result, bail, ensure};
use kernel::verifier::{Cost, Verifier};
use serde::Deserialize;

scenarios! {
    Dataplane:
    every_program_is_taken,
    no_program_outgrows_its_budget,
}

/// Costs by `every_program_is_taken`, for the scenario after it: a guest takes a quarter of a minute to measure them.
static MEASURED: Mutex<BTreeMap<String, Cost>> = Mutex::new(BTreeMap::new());

/// By kernel (`6.1`), then by program. `cargo xtask verifier --write` writes it.
const BUDGET: &str = include_str!("../../../verifier-budget.json");

/// The cost of a program when the file was written.
#[derive(Debug, Deserialize)]
struct Budget {
    processed: u32,
    stack: u32,
    jited: u32,
}

/// Rounds for the times that are printed, and written into the budget: the quickest one counts, because the machine's
/// other work can only delay a round. Chores ask for several; one is enough to tell whether the kernel takes the
/// programs.
fn rounds() -> Result<u32> {
    let asked = std::env::var("DATAPLANE_VERIFIER_ROUNDS").ok();
    let rounds = asked.map_or(Ok(1), |asked| asked.parse());
    rounds.context("DATAPLANE_VERIFIER_ROUNDS: a number")
}
/// The running kernel's release, and its first two numbers.
fn kernel() -> Result<(String, String)> {
    let name = nix::sys::utsname::uname()?;
    let release = name.release().to_str().context("a kernel's release")?;
    let series: Vec<&str> = release.split(['.', '-', '+']).take(2).collect();
    Ok((release.to_owned(), series.join(".")))
}

/// Every program loads; its cost is printed, one line for each, for `cargo xtask verifier`.
fn every_program_is_taken() -> Result<()> {
    let (release, _) = kernel()?;
    let mut verifier = Verifier::new()?;
    let mut costs = BTreeMap::new();
    let mut refused = Vec::new();
    for round in 1..=rounds()? {
        refused = quickest(&mut verifier, &mut costs);
        // A guest without output for minutes is taken for one that hangs.
        println!("verified all programs, round {round}");
    }
    MEASURED
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone_from(&costs);
    for (program, cost) in costs {
        println!(
            "verified {program} on {release}: processed {} stack {} jited {} microseconds {}",
            cost.processed,
            cost.stack,
            cost.jited,
            cost.time.as_micros(),
        );
    }
    ensure!(
        refused.is_empty(),
        "{release} refuses {}",
        refused.join("\n")
    );
    Ok(())
}

/// Has every program verified once, and keeps the shortest time that it took. Returns the programs
/// that were refused, and why.
fn quickest(verifier: &mut Verifier, costs: &mut BTreeMap<String, Cost>) -> Vec<String> {
    let mut refused = Vec::new();
    for program in verifier.programs() {
        match verifier.verify(&program).outcome {
            Ok(cost) => {
                let kept = costs.entry(program).or_insert(cost);
                kept.time = kept.time.min(cost.time);
            }
            Err(log) => refused.push(format!("{program}: {log}")),
        }
    }
    refused
}

/// A program may grow only together with its budget, in one change, so that a reviewer sees it.
fn no_program_outgrows_its_budget() -> Result<()> {
    let (release, series) = kernel()?;
    let budgets: BTreeMap<String, BTreeMap<String, Budget>> = serde_json::from_str(BUDGET)?;
    let Some(budgets) = budgets.get(&series) else {
        println!("no budget was written on Linux {series} ({release})");
        return Ok(());
    };
    let mut costs = MEASURED
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone();
    if costs.is_empty() {
        quickest(&mut Verifier::new()?, &mut costs);
    }
    let mut over = Vec::new();
    for (program, cost) in &costs {
        match budgets.get(program) {
            Some(budget) => {
                over.extend(excess(cost, budget).map(|what| format!("{program}: {what}")));
            }
            None => over.push(format!("{program} has no budget")),
        }
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

/// The values that grew by more than a tenth.
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
