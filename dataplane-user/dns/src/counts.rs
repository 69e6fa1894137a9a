//! How many of something each client has, or each namespace.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// How many of something each has.
#[derive(Debug)]
pub struct Counts<K>(Arc<Mutex<State<K>>>);

#[derive(Debug)]
struct State<K> {
    /// Each in the map has at least one.
    of_each: HashMap<K, usize>,
    of_all: usize,
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub struct Counted<K: Eq + Hash>(Counts<K>, K);

impl<K> Default for Counts<K> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(State {
            of_each: HashMap::new(),
            of_all: 0,
        })))
    }
}

impl<K> Clone for Counts<K> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<K: Clone + Eq + Hash> Counts<K> {
    /// Counts one more use of `of`, if it has fewer than `most`.
    pub fn below(&self, most: usize, of: &K) -> Option<Counted<K>> {
        self.one(of, |own, _| own < most)
    }

    /// One more of something that there is room for: each has at most as many as are free, so one alone has half of
    /// the room, and two have a third each.
    pub fn share(&self, room: usize, of: &K) -> Option<Counted<K>> {
        self.one(of, |own, all| own < room.saturating_sub(all))
    }

    fn one(&self, of: &K, allows: impl FnOnce(usize, usize) -> bool) -> Option<Counted<K>> {
        let mut state = self.locked();
        let own = state.of_each.get(of).copied().unwrap_or_default();
        if !allows(own, state.of_all) {
            return None;
        }
        state.of_each.insert(of.clone(), own + 1);
        state.of_all += 1;
        drop(state);
        Some(Counted(self.clone(), of.clone()))
    }
}

impl<K> Counts<K> {
    fn locked(&self) -> MutexGuard<'_, State<K>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Eq + Hash> Drop for Counted<K> {
    fn drop(&mut self) {
        let mut state = self.0.locked();
        state.of_all -= 1;
        if let Some(count) = state.of_each.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                state.of_each.remove(&self.1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_client_does_not_take_the_room_of_others() {
        let counts = Counts::default();
        let mut held: Vec<_> = (0..5).map_while(|_| counts.below(3, &"greedy")).collect();
        assert_eq!(held.len(), 3);
        assert!(counts.below(3, &"other").is_some());
        // One that ends makes room for one.
        held.pop();
        held.extend(counts.below(3, &"greedy"));
        assert!(held.len() == 3 && counts.below(3, &"greedy").is_none());
        drop(held);
        assert!(counts.below(3, &"greedy").is_some());
    }

    #[test]
    fn one_namespace_leaves_room_for_others() {
        let counts = Counts::default();
        let all_of = |namespace| -> Vec<_> {
            let held = (0..100).map_while(|_| counts.share(100, &namespace));
            held.collect()
        };
        let greedy = all_of("greedy");
        assert_eq!(greedy.len(), 50);
        let second = all_of("second");
        assert_eq!(second.len(), 25);
        let small = counts.share(100, &"small");
        assert!(small.is_some() && counts.share(100, &"greedy").is_none());
        drop((greedy, second, small));
        assert_eq!(all_of("greedy").len(), 50, "what has ended is free again");
    }
}
