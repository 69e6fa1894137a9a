//! Runs the same flows in the same cluster with different workers, and finds where they differ.

use anyhow::{Result, ensure};
use dataplane_peers::Mode;
use dataplane_tests::Lab;

use super::{
    case::{Case, Seen},
    differences::{Difference, KEPT_PORT},
    world::{Settings, Tries, Worker, World},
};
use crate::manifest::Service;

/// kube-proxy's modes for the comparison. Mode iptables writes the same rules for every variant of `iptables`.
pub const MODES: [Mode; 2] = [Mode::IptablesNft, Mode::Nftables];

/// Ours: by the fast path, and through the stack.
const OURS: [Worker; 2] = [Worker::Dataplane, Worker::Strict];

/// The page of the differences.
const DOCS: &str = include_str!("../../../../docs/differences.md");

/// A comparison to be made.
pub struct Comparison<'a> {
    pub settings: Settings,
    pub services: &'a dyn Fn(&Lab) -> Vec<Service>,
    pub cases: Vec<Case>,
    /// Where the dataplane is known to differ. Each of them must be seen.
    pub differences: &'a [&'a Difference],
}

impl Comparison<'_> {
    /// Makes it.
    pub fn run(&self) -> Result<()> {
        // Ours are the first of them. All run at one time: a case that is tried again is tried in all worlds.
        // Otherwise one mode would be compared with results that were joined for another mode.
        let worlds = || -> Result<Vec<World>> {
            let modes = MODES.into_iter().map(Worker::KubeProxy);
            OURS.into_iter()
                .chain(modes)
                .map(|worker| World::start(worker, &self.settings, self.services))
                .collect()
        };
        let first = worlds()?;
        let mut seen = first
            .iter()
            .map(|world| world.see(&self.cases, Tries::FEW))
            .collect::<Result<Vec<_>>>()?;
        for tries in [Tries::MANY, Tries::PATIENT] {
            let (doubtful, cases) = self.doubtful(&seen);
            if doubtful.is_empty() {
                break;
            }
            for (world, seen) in first.iter().zip(&mut seen) {
                again(world, &cases, tries, &doubtful, seen)?;
            }
        }
        drop(first);
        // A real difference also occurs in another lab. A difference that does not was this lab's: one flow among
        // thousands whose endpoint a busy machine never let answer.
        let (doubtful, cases) = self.doubtful(&seen);
        if !doubtful.is_empty() {
            for (world, seen) in worlds()?.iter().zip(&mut seen) {
                for (number, now) in doubtful.iter().zip(world.see(&cases, Tries::PATIENT)?) {
                    let case = &self.cases[*number];
                    println!("again: {case}: {} -> {now}", seen[*number]);
                    seen[*number] = now;
                }
            }
        }

        let mut used = vec![0; self.differences.len()];
        let mut wrong = vec![];
        let (ours, there) = seen.split_at(OURS.len());
        for (mode, there) in MODES.into_iter().zip(there) {
            for (number, case) in self.cases.iter().enumerate() {
                for (worker, here) in OURS.into_iter().zip(ours) {
                    let (expected, applied) = self.expect(mode, worker, number, &there[number]);
                    for index in applied {
                        used[index] += 1;
                    }
                    if expected != here[number] {
                        let (there, here) = (&there[number], &here[number]);
                        wrong.push(format!("{mode}, {worker:?}: {case}: {there} -> {here}"));
                    }
                }
            }
        }
        let flows = self.cases.len();
        println!("{flows} flows compared with each of kube-proxy's modes");
        for (difference, used) in self.differences.iter().zip(&used) {
            println!("  {used} times: {}", difference.what);
            if *used == 0 {
                wrong.push(format!("a difference that is none: {}", difference.what));
            }
            if !DOCS.contains(&format!("| {} |", difference.what)) {
                wrong.push(format!("not in docs/differences.md: {}", difference.what));
            }
        }
        ensure!(
            wrong.is_empty(),
            "kube-proxy -> here:\n{}",
            wrong.join("\n")
        );
        Ok(())
    }

    /// Returns the cases whose results are not as expected for one of the modes, by number. Our results come first.
    fn doubtful(&self, seen: &[Vec<Seen>]) -> (Vec<usize>, Vec<Case>) {
        let (ours, there) = seen.split_at(OURS.len());
        let as_it_should_be = |number: &usize| {
            MODES.into_iter().zip(there).all(|(mode, there)| {
                OURS.into_iter().zip(ours).all(|(worker, here)| {
                    let there = &there[*number];
                    here[*number] == self.expect(mode, worker, *number, there).0
                })
            })
        };
        (0..self.cases.len())
            .filter(|number| !as_it_should_be(number))
            .map(|number| (number, self.cases[number].clone()))
            .unzip()
    }

    /// Returns the expected results here for the results `there` with kube-proxy, and the differences that were used.
    fn expect(
        &self,
        mode: Mode,
        worker: Worker,
        number: usize,
        there: &Seen,
    ) -> (Seen, Vec<usize>) {
        let case = &self.cases[number];
        let mut expected = there.clone();
        let mut uses = vec![];
        for (index, difference) in self.differences.iter().enumerate() {
            if worker != Worker::Dataplane && difference.what == KEPT_PORT.what {
                continue;
            }
            if let Some(instead) = (difference.here)(case, mode, &expected)
                && instead != expected
            {
                expected = instead;
                uses.push(index);
            }
        }
        (expected, uses)
    }
}

/// Tries some of the cases again. Answers of either time count; a failure only at the first time may have happened
/// because the machine was busy.
fn again(
    world: &World,
    cases: &[Case],
    tries: Tries,
    numbers: &[usize],
    seen: &mut [Seen],
) -> Result<()> {
    for (number, report) in numbers.iter().zip(world.reports(cases, tries, 16)?) {
        let now = Seen::of(&report);
        let before = &mut seen[*number];
        *before = Seen {
            failures: now.failures.clone(),
            ..before.and(&now)
        };
    }
    Ok(())
}
