//! The running kernel's verifier on our programs: whether it takes them, and their cost.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use dataplane_tests::patience;
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
    /// How long its verification took, where the file was written.
    microseconds: u32,
}

/// Rounds for the times that are printed, and written into the budget: the quickest one counts, because the machine's
/// other work can only delay a round. Chores ask for several; one is enough to tell whether the kernel takes the
/// programs.
fn rounds() -> Result<u32> {
    let asked = std::env::var("DATAPLANE_VERIFIER_ROUNDS").ok();
    let rounds = asked.map_or(Ok(1), |asked| asked.parse());
    rounds.context("DATAPLANE_VERIFIER_ROUNDS: a number")
}
/// For how long rounds go on before a program is found to take longer than it may. A busy machine
/// disturbs most rounds.
const MOST: Duration = Duration::from_secs(45);
/// A time of less than this share of all programs' together does not matter (1 ms, emulated 27 ms), and a clock cannot
/// tell a tenth of it.
const NO_TIME: f64 = 0.005;

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
    let mut over = slower(&costs, budgets);
    if costs.is_empty() || !over.is_empty() {
        let mut verifier = Verifier::new()?;
        // Every program in each round, so that a machine which is slower for a while is slower for all.
        let limit = Instant::now() + patience(MOST);
        loop {
            quickest(&mut verifier, &mut costs);
            over = slower(&costs, budgets);
            if over.is_empty() || Instant::now() > limit {
                break;
            }
            // A guest without output for minutes is taken for one that hangs.
            println!("another round for {}", over.join("; "));
        }
    }
    // A machine that does something else meanwhile takes longer: the time is shown, and the counts decide.
    for what in over.drain(..) {
        println!("slower than it was: {what}");
    }
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

/// The programs whose verification takes a tenth longer than the budget says, after a correction for the speed of this
/// machine: the median program's ratio. A program of a known cost cannot give that ratio: another processor took 17 to
/// 33 % more for ours, compared with a row of simple instructions that was tried for it.
fn slower(costs: &BTreeMap<String, Cost>, budgets: &BTreeMap<String, Budget>) -> Vec<String> {
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    let both: Vec<(&String, f64, f64)> = costs
        .iter()
        .filter_map(|(program, cost)| {
            let before = f64::from(budgets.get(program)?.microseconds);
            Some((program, micros(cost.time), before))
        })
        .collect();
    let no_time = NO_TIME * both.iter().map(|(_, _, before)| before).sum::<f64>();
    let mut ratios: Vec<f64> = both
        .iter()
        .filter(|(_, _, before)| *before >= no_time)
        .map(|(_, now, before)| now / before)
        .collect();
    ratios.sort_unstable_by(f64::total_cmp);
    let Some(machine) = ratios.get(ratios.len() / 2) else {
        return Vec::new();
    };
    both.iter()
        .filter(|(_, now, before)| *now > machine * (before * 1.1 + no_time))
        .map(|(program, now, before)| {
            format!(
                "{program}: {now:.0} us to verify, {:.0} before, by how long others take",
                machine * before
            )
        })
        .collect()
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
