//! Divides each table among namespaces.
//!
//! As long as all entries fit, namespaces have no limit. Otherwise the budget of every namespace is lowered, by the
//! same steps for all, until the needs of all namespaces within it fit. So the largest namespaces lose first, and a
//! namespace with small needs loses nothing, however much the others want. Budgets follow from the objects alone, so
//! each node and each restart computes the same budgets. The steps are coarse, so budgets seldom change.

use std::collections::HashMap;

/// Entries needed in each of several tables.
pub(super) type Cost<const N: usize> = [u64; N];

/// Entries that a service needs in FRONTENDS, POOLS, ENDPOINTS and SOURCES.
pub(super) type Entries = Cost<4>;

/// Number of budgets between a power of two and the next.
const STEPS_PER_OCTAVE: usize = 4;
/// Number of steps, down to a budget of less than one entry.
const STEPS: usize = 33 * STEPS_PER_OCTAVE;

/// The needs and the budgets of namespaces.
#[derive(Debug)]
pub(super) struct Shares<const N: usize> {
    capacity: Cost<N>,
    /// The budget of each namespace.
    budget: Cost<N>,
    /// For each step, the sum of all needs within the budget of the step.
    sums: Box<[[u64; STEPS]; N]>,
    wanted: HashMap<Box<str>, Cost<N>>,
}

/// Returns the budget of a step for a table of `capacity` entries.
fn at(capacity: u64, step: usize) -> u64 {
    let eighths = (8 - step % STEPS_PER_OCTAVE) as u64;
    (capacity >> (step / STEPS_PER_OCTAVE)) * eighths / 8
}

impl<const N: usize> Shares<N> {
    /// Divides tables of these capacities.
    pub(super) fn of(capacity: Cost<N>) -> Self {
        Self {
            capacity,
            budget: capacity,
            sums: Box::new([[0; STEPS]; N]),
            wanted: HashMap::new(),
        }
    }

    /// Records that the needs of a namespace change from `less` to `more`. The caller then calls [`Shares::divide`].
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

    /// Computes the budgets for the present needs. Returns whether a budget has changed.
    pub(super) fn divide(&mut self) -> bool {
        let before = self.budget;
        for ((budget, sums), capacity) in self.budget.iter_mut().zip(&*self.sums).zip(self.capacity)
        {
            let fits = sums.iter().position(|sum| *sum <= capacity);
            *budget = fits.map_or(0, |step| at(capacity, step));
        }
        before != self.budget
    }

    /// Returns the budget of each namespace.
    pub(super) fn budget(&self) -> Cost<N> {
        self.budget
    }

    /// Returns whether a namespace wants more than its budget.
    pub(super) fn is_over(&self, namespace: &str) -> bool {
        self.wanted
            .get(namespace)
            .is_some_and(|wanted| !fits(wanted, &self.budget))
    }

    /// Returns the namespaces that want more than their budget.
    pub(super) fn over(&self) -> impl Iterator<Item = &str> {
        let over = self
            .wanted
            .iter()
            .filter(|(_, wanted)| !fits(wanted, &self.budget));
        over.map(|(namespace, _)| &**namespace)
    }

    /// Returns how small a cost is: 1 plus the logarithm of how many such costs the scarcest table holds. A cost that
    /// exceeds a table has 0.
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

/// Returns whether `cost` fits into `room` in every table.
fn fits<const N: usize>(cost: &Cost<N>, room: &Cost<N>) -> bool {
    cost.iter().zip(room).all(|(cost, room)| cost <= room)
}

/// Subtracts `cost` from `room` if it fits. Returns whether it fits.
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
        shares.divide();
        shares
    }

    #[test]
    fn the_largest_loses_and_the_others_do_not() {
        let mut shares = shares(1000, &[100, 150, 5000]);
        assert_eq!(shares.budget(), [750]);
        assert_eq!(shares.over().collect::<Vec<_>>(), ["ns2"]);
        shares.change("ns2", &[5000], &[750]);
        assert!(shares.divide());
        assert_eq!(shares.budget(), [1000], "everything fits");
        assert!(!shares.is_over("ns2"));
    }

    #[test]
    fn equal_ones_have_equal_budgets() {
        for (namespaces, budgets) in [(100, 8_000..=10_485), (10_000, 80..=104)] {
            let shares = shares(1 << 20, &vec![20_000; namespaces]);
            let [budget] = shares.budget();
            assert!(budgets.contains(&budget), "{budget}");
            assert_eq!(shares.over().count(), namespaces);
        }
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
        /// After any changes, the needs within the budgets fit, and a namespace within a fair part gets all it wants.
        /// The order of the changes does not matter.
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
                all.divide();
                let [budget] = all.budget();
                let within: u64 = wanted.iter().map(|wanted| budget.min(*wanted)).sum();
                prop_assert!(within <= capacity);
                let namespaces = wanted.iter().filter(|wanted| **wanted != 0).count() as u64;
                let fair = capacity.checked_div(namespaces).unwrap_or(capacity);
                // The budget may be one step below the fair part.
                prop_assert!(budget >= (fair * 4 / 5).saturating_sub(1), "{budget} of {fair}");
                if wanted.iter().sum::<u64>() <= capacity {
                    prop_assert_eq!(all.over().count(), 0);
                }
                prop_assert_eq!(shares(capacity, &wanted).budget(), all.budget());
            }
        }
    }
}
