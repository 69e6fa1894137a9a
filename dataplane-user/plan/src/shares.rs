//! How much of each table a namespace may have.
//!
//! As long as everything fits, a namespace may have all there is. If it does not, the budget of every namespace is
//! lowered, by the same steps for all, until what the namespaces want within it fits. So the largest lose first, and
//! a namespace that wants little loses nothing, whatever the others want. Budgets follow from the objects alone, so
//! that each node and each restart comes to the same; steps are coarse, so that budgets seldom change.

use std::collections::HashMap;

/// What something takes of each of several tables.
pub(super) type Cost<const N: usize> = [u64; N];

/// What a service takes of FRONTENDS, POOLS, ENDPOINTS and SOURCES.
pub(super) type Entries = Cost<4>;

/// Budgets between a power of two and the next.
const STEPS_PER_OCTAVE: usize = 4;
/// Down to a budget of less than one entry.
const STEPS: usize = 33 * STEPS_PER_OCTAVE;

/// What namespaces want, and may have.
#[derive(Debug)]
pub(super) struct Shares<const N: usize> {
    capacity: Cost<N>,
    /// What each namespace may have.
    budget: Cost<N>,
    /// What all namespaces want together within the budget of each step.
    sums: Box<[[u64; STEPS]; N]>,
    wanted: HashMap<Box<str>, Cost<N>>,
}

/// The budget of a step, of so many entries for all.
fn at(capacity: u64, step: usize) -> u64 {
    let eighths = (8 - step % STEPS_PER_OCTAVE) as u64;
    (capacity >> (step / STEPS_PER_OCTAVE)) * eighths / 8
}

impl<const N: usize> Shares<N> {
    /// Of tables that have room for so many entries.
    pub(super) fn of(capacity: Cost<N>) -> Self {
        Self {
            capacity,
            budget: capacity,
            sums: Box::new([[0; STEPS]; N]),
            wanted: HashMap::new(),
        }
    }

    /// A namespace wants less of this, and more of that. [`Shares::settle`] it.
    pub(super) fn change(&mut self, namespace: &str, less: &Cost<N>, more: &Cost<N>) {
        if less == more {
            return;
        }
        let before = self.wanted.get(namespace).copied().unwrap_or([0; N]);
        let after: Cost<N> = std::array::from_fn(|n| before[n] + more[n] - less[n]);
        for (n, sums) in self.sums.iter_mut().enumerate() {
            for (step, sum) in sums.iter_mut().enumerate() {
                let budget = at(self.capacity[n], step);
                *sum += after[n].min(budget);
                *sum -= before[n].min(budget);
            }
        }
        if after == [0; N] {
            self.wanted.remove(namespace);
        } else if let Some(known) = self.wanted.get_mut(namespace) {
            *known = after;
        } else {
            self.wanted.insert(namespace.into(), after);
        }
    }

    /// Sets the budgets for what is wanted now. Returns whether any of them has changed.
    pub(super) fn settle(&mut self) -> bool {
        let before = self.budget;
        for ((budget, sums), capacity) in self.budget.iter_mut().zip(&*self.sums).zip(self.capacity)
        {
            let fits = sums.iter().position(|sum| *sum <= capacity);
            *budget = fits.map_or(0, |step| at(capacity, step));
        }
        before != self.budget
    }

    /// What each namespace may have.
    pub(super) fn budget(&self) -> Cost<N> {
        self.budget
    }

    /// Whether a namespace wants more than it may have.
    pub(super) fn is_over(&self, namespace: &str) -> bool {
        self.wanted
            .get(namespace)
            .is_some_and(|wanted| !fits(wanted, &self.budget))
    }

    /// The namespaces that want more than they may have.
    pub(super) fn over(&self) -> impl Iterator<Item = &str> {
        let over = self
            .wanted
            .iter()
            .filter(|(_, wanted)| !fits(wanted, &self.budget));
        over.map(|(namespace, _)| &**namespace)
    }

    /// How small something is: the least part of a table that it takes, as the power of two that the table holds of it.
    /// Who wants more than there is has 0.
    pub(super) fn smallness(&self, cost: &Cost<N>) -> u32 {
        let parts = cost.iter().zip(self.capacity);
        let parts = parts.map(|(cost, capacity)| match capacity.checked_div(*cost) {
            None => u32::MAX,
            Some(0) => 0,
            Some(times) => 1 + times.ilog2(),
        });
        parts.min().unwrap_or(u32::MAX)
    }
}

/// Whether `cost` is within `room` in every table.
fn fits<const N: usize>(cost: &Cost<N>, room: &Cost<N>) -> bool {
    cost.iter().zip(room).all(|(cost, room)| cost <= room)
}

/// Takes `cost` out of `room`, if it is there.
pub(super) fn take<const N: usize>(cost: &Cost<N>, room: &mut Cost<N>) -> bool {
    let fits = fits(cost, room);
    if fits {
        for (room, cost) in room.iter_mut().zip(cost) {
            *room -= cost;
        }
    }
    fits
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shares(capacity: u64, wanted: &[u64]) -> Shares<1> {
        let mut shares = Shares::of([capacity]);
        for (n, wanted) in wanted.iter().enumerate() {
            shares.change(&format!("ns{n}"), &[0], &[*wanted]);
        }
        shares.settle();
        shares
    }

    #[test]
    fn the_largest_loses_and_the_others_do_not() {
        let mut shares = shares(1000, &[100, 150, 5000]);
        assert_eq!(shares.budget(), [750]);
        assert_eq!(shares.over().collect::<Vec<_>>(), ["ns2"]);
        shares.change("ns2", &[5000], &[750]);
        assert!(shares.settle());
        assert_eq!(shares.budget(), [1000], "everything fits");
        assert!(!shares.is_over("ns2"));
    }

    #[test]
    fn equal_ones_have_equal_budgets() {
        let shares = shares(1 << 20, &[20_000; 100]);
        let [budget] = shares.budget();
        assert!((8_000..=10_485).contains(&budget), "{budget}");
        assert_eq!(shares.over().count(), 100);
    }

    #[test]
    fn the_smaller_of_two_has_the_larger_number() {
        let shares = Shares::of([1024, 64]);
        assert_eq!(shares.smallness(&[0, 0]), u32::MAX);
        assert!(shares.smallness(&[1, 1]) > shares.smallness(&[1, 2]));
        assert_eq!(shares.smallness(&[1, 2]), shares.smallness(&[32, 1]));
        assert_eq!(shares.smallness(&[1024, 64]), 1);
        assert_eq!(shares.smallness(&[1, 65]), 0);
    }

    proptest! {
        /// Whatever happens, what is within the budgets fits, and who is within a fair part has all that it wants. The way
        /// there does not matter.
        #[test]
        fn what_is_within_the_budgets_fits(
            capacity in 0u64..5000,
            changes in prop::collection::vec((0usize..6, 0u64..4000), 1..40),
        ) {
            let mut wanted = [0; 6];
            let mut all = Shares::of([capacity]);
            for (n, more) in changes {
                all.change(&format!("ns{n}"), &[wanted[n]], &[more]);
                wanted[n] = more;
                all.settle();
                let [budget] = all.budget();
                let within: u64 = wanted.iter().map(|wanted| budget.min(*wanted)).sum();
                prop_assert!(within <= capacity);
                let namespaces = wanted.iter().filter(|wanted| **wanted != 0).count() as u64;
                let fair = capacity.checked_div(namespaces).unwrap_or(capacity);
                // The budget is the next step below.
                prop_assert!(budget >= (fair * 4 / 5).saturating_sub(1), "{budget} of {fair}");
                if wanted.iter().sum::<u64>() <= capacity {
                    prop_assert_eq!(all.over().count(), 0);
                }
                prop_assert_eq!(shares(capacity, &wanted).budget(), all.budget());
            }
        }
    }
}
