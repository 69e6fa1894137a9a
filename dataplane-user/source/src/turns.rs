//! Chooses the changes that are applied next.
//!
//! Each change costs work, and the changes of one step are applied together. A step has a limit of work, so that the
//! changes of one author do not delay those of others. A step first takes the complete changes of the namespaces with
//! the least work. The rest of its limit goes to one other namespace, a different one in each step.
//!
//! A change that arrives during a step waits for the end of that step. If it is small, it does not wait for the next large
//! part as well: after a step with much work, small changes have a step of their own.

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
    ops::Bound,
};

/// The part of a step's limit that small changes cost at most: one in this number.
const SMALL: u64 = 4;

/// Changed objects that were not applied yet, by namespace.
#[derive(Debug)]
pub struct Turns<K> {
    waiting: BTreeMap<Box<str>, Waiting<K>>,
    /// The namespace from which the last step took a part.
    last: Box<str>,
    /// Whether the last step had more than small changes.
    was_large: bool,
    /// Number of changes so far.
    count: u64,
}

/// The position of an object in its namespace's queue. Removed objects come first, because they free space for others.
/// Then the object that has waited longest comes first.
type Place = (bool, u64);

#[derive(Debug)]
struct Waiting<K> {
    cost: u64,
    places: HashMap<K, (Place, u64)>,
    queue: BTreeMap<Place, K>,
}

impl<K> Default for Turns<K> {
    fn default() -> Self {
        Self {
            waiting: BTreeMap::new(),
            last: "".into(),
            was_large: false,
            count: 0,
        }
    }
}

impl<K: Clone + Eq + Hash> Turns<K> {
    /// Adds a changed object. An object that already waits does not lose its position. `stays`: the object still
    /// exists.
    pub fn put(&mut self, namespace: &str, object: &K, cost: u64, stays: bool) {
        if !self.waiting.contains_key(namespace) {
            self.waiting.insert(namespace.into(), Waiting::default());
        }
        let Some(waiting) = self.waiting.get_mut(namespace) else {
            return;
        };
        let before = waiting.remove(object);
        self.count += 1;
        let turn = before.map_or(self.count, |(_, turn)| turn);
        waiting.insert((stays, turn), object.clone(), cost);
    }

    /// Takes the next objects, with a total cost of `budget`. Of one namespace with more, takes at least one object at
    /// any cost.
    pub fn take(&mut self, budget: u64) -> Vec<K> {
        let small = budget / SMALL;
        if std::mem::take(&mut self.was_large) {
            let (taken, _) = self.take_whole(small);
            if !taken.is_empty() {
                return taken;
            }
        }
        let (mut taken, left) = self.take_whole(budget);
        self.was_large = budget - left > small;
        let after = (Bound::Excluded(self.last.clone()), Bound::Unbounded);
        let next = self.waiting.range(after).next();
        let next = next.or_else(|| self.waiting.iter().next());
        let Some(next) = next.map(|(namespace, _)| namespace.clone()) else {
            return taken;
        };
        self.was_large = true;
        if let Some(waiting) = self.waiting.get_mut(&next) {
            waiting.take(left, &mut taken);
            if waiting.queue.is_empty() {
                self.waiting.remove(&next);
            }
        }
        self.last = next;
        taken
    }

    /// Takes all objects of the namespaces with the least work, as far as their total cost is within `budget`. Returns
    /// them, and the rest of the budget.
    fn take_whole(&mut self, budget: u64) -> (Vec<K>, u64) {
        let mut left = budget;
        let mut taken = Vec::new();
        let mut by_cost: Vec<(u64, Box<str>)> = self
            .waiting
            .iter()
            .map(|(namespace, waiting)| (waiting.cost, namespace.clone()))
            .collect();
        by_cost.sort_unstable();
        for (cost, namespace) in by_cost {
            if cost > left {
                break;
            }
            left -= cost;
            let whole = self.waiting.remove(&namespace);
            taken.extend(whole.into_iter().flat_map(|of| of.queue.into_values()));
        }
        (taken, left)
    }

    /// Returns whether the last step had more than small changes.
    pub const fn was_large(&self) -> bool {
        self.was_large
    }

    /// Returns the namespaces with waiting objects.
    pub fn namespaces(&self) -> impl Iterator<Item = &str> {
        self.waiting.keys().map(|namespace| &**namespace)
    }

    /// Returns whether no object waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

impl<K> Default for Waiting<K> {
    fn default() -> Self {
        Self {
            cost: 0,
            places: HashMap::new(),
            queue: BTreeMap::new(),
        }
    }
}

impl<K: Clone + Eq + Hash> Waiting<K> {
    fn insert(&mut self, place: Place, object: K, cost: u64) {
        self.cost += cost;
        self.places.insert(object.clone(), (place, cost));
        self.queue.insert(place, object);
    }

    fn remove(&mut self, object: &K) -> Option<Place> {
        let (place, cost) = self.places.remove(object)?;
        self.cost -= cost;
        self.queue.remove(&place);
        Some(place)
    }

    /// Takes objects from the front of the queue, at least one.
    fn take(&mut self, budget: u64, taken: &mut Vec<K>) {
        let mut left = budget;
        let mut is_first = true;
        while let Some((_, object)) = self.queue.first_key_value() {
            let object = object.clone();
            let cost = self.places.get(&object).map_or(0, |(_, cost)| *cost);
            if cost > left && !is_first {
                return;
            }
            left = left.saturating_sub(cost);
            is_first = false;
            self.remove(&object);
            taken.push(object);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(turns: &mut Turns<(&'static str, u32)>, namespace: &'static str, n: u32, cost: u64) {
        turns.put(namespace, &(namespace, n), cost, true);
    }

    #[test]
    fn a_namespace_with_little_never_waits_for_one_with_much() {
        let mut turns = Turns::default();
        for n in 0..1000 {
            put(&mut turns, "much", n, 100);
        }
        let mut taken = Vec::new();
        for step in 0..100 {
            put(&mut turns, "little", step, 10);
            put(&mut turns, "other", step, 10);
            let of_step = turns.take(1000);
            for namespace in ["little", "other"] {
                assert!(of_step.contains(&(namespace, step)), "{of_step:?}");
            }
            assert!(of_step.len() <= 2 + 9, "{of_step:?}");
            taken.extend(of_step.into_iter().filter(|(of, _)| *of == "much"));
        }
        // The objects come in their order of arrival, and none is lost.
        while !turns.is_empty() {
            taken.extend(turns.take(1000));
        }
        let all: Vec<_> = (0..1000).map(|n| ("much", n)).collect();
        assert_eq!(taken, all);
    }

    #[test]
    fn a_small_change_waits_for_one_large_step_and_not_for_two() {
        let mut turns = Turns::default();
        for n in 0..100 {
            put(&mut turns, "much", n, 100);
        }
        assert_eq!(turns.take(1000).len(), 10);
        assert!(turns.was_large());
        // Both arrived during the step: the small change does not go with another part, and does not wait for it.
        put(&mut turns, "little", 0, 10);
        put(&mut turns, "more", 0, 500);
        assert_eq!(turns.take(1000), [("little", 0)]);
        assert!(!turns.was_large());
        // Small changes all the time do not keep the large ones waiting.
        put(&mut turns, "little", 1, 10);
        let next = turns.take(1000);
        assert_eq!(next[..2], [("little", 1), ("more", 0)]);
        assert_eq!(next.len(), 2 + 4);
        // Without a small change, the next part comes at once.
        assert_eq!(turns.take(1000).len(), 10);
    }

    #[test]
    fn those_with_much_have_a_step_each_and_one_object_however_large() {
        let mut turns = Turns::default();
        for n in 0..4 {
            put(&mut turns, "a", n, 5000);
            put(&mut turns, "b", n, 600);
        }
        let steps: Vec<Vec<_>> = (0..6).map(|_| turns.take(1000)).collect();
        let wanted = [
            vec![("a", 0)],
            vec![("b", 0)],
            vec![("a", 1)],
            vec![("b", 1)],
            vec![("a", 2)],
            vec![("b", 2)],
        ];
        assert_eq!(steps, wanted);
    }

    #[test]
    fn what_goes_makes_room_for_what_comes_and_what_changes_again_keeps_its_place() {
        let mut turns = Turns::default();
        for n in 0..3 {
            turns.put("a", &n, 10, true);
        }
        turns.put("a", &2, 10, false);
        turns.put("a", &0, 10, true);
        let order: Vec<_> = (0..3).flat_map(|_| turns.take(10)).collect();
        assert_eq!(order, [2, 0, 1]);
        assert!(turns.is_empty());
    }
}
