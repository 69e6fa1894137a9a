//! What the running kernel's verifier makes of the programs, and what it may cost.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail, ensure};
use dataplane::kernel::verifier::{self, Cost, Verified};
use serde::Deserialize;

scenarios! {
    Dataplane:
    every_program_is_taken,
    no_program_outgrows_its_budget,
}

/// By kernel (`6.1`), then by program. `cargo xtask verifier --write` writes it.
const BUDGET: &str = include_str!("../../../verifier-budget.json");

/// What a program cost when the file was written. The time that it took is kept there too, and not
/// compared: on one machine it is twice what it was a minute ago, emulated ten times that. The
/// instructions that the verifier followed are what it takes time for, and always the same.
#[derive(Debug, Deserialize)]
struct Budget {
    processed: u32,
    stack: u32,
    jited: u32,
}

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
    let mut refused = Vec::new();
    for Verified {
        program,
        time,
        outcome,
    } in verifier::verify()?
    {
        match outcome {
            Ok(cost) => println!(
                "verified {program} on {release}: processed {} stack {} jited {} microseconds {}",
                cost.processed,
                cost.stack,
                cost.jited,
                time.as_micros()
            ),
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
    for Verified {
        program, outcome, ..
    } in verifier::verify()?
    {
        let Ok(cost) = outcome else { continue };
        match budgets.get(&program) {
            Some(budget) => {
                over.extend(excess(&cost, budget).map(|what| format!("{program}: {what}")));
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
