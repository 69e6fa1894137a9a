//! How much the objects of each namespace come to, before it is expanded.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use model::{Gravity, Problem, ServiceName};

/// A bound on what the objects of one kind and one namespace come to together. An object that exceeds it is over by
/// itself, and the others stay.
#[derive(Debug)]
pub struct Sums {
    most: usize,
    /// The object's kind, as problems name it.
    kind: &'static str,
    sizes: HashMap<ServiceName, usize>,
    by_namespace: HashMap<Box<str>, usize>,
    over: BTreeMap<ServiceName, Problem>,
    /// Namespaces in which an object gave something back, so that there may be room for those that are over.
    freed: BTreeSet<Box<str>>,
}

impl Sums {
    pub fn new(kind: &'static str, most: usize) -> Self {
        Self {
            most,
            kind,
            sizes: HashMap::new(),
            by_namespace: HashMap::new(),
            over: BTreeMap::new(),
            freed: BTreeSet::new(),
        }
    }

    /// Whether an object of this size is within what its namespace may have, in place of what it had. Objects without a
    /// size cost nothing here. `why`: completes the problem's text, if it is not.
    pub fn put(&mut self, name: &ServiceName, size: usize, why: impl FnOnce() -> String) -> bool {
        let before = self.take_back(name);
        self.over.remove(name);
        if size == 0 {
            self.note_freed(name, before > 0);
            return true;
        }
        let sum = self
            .by_namespace
            .get(name.namespace())
            .copied()
            .unwrap_or_default();
        let sum = sum.saturating_add(size);
        if sum > self.most {
            self.note_freed(name, before > 0);
            let problem = Problem {
                gravity: Gravity::Warning,
                place: format!("{} {name}", self.kind),
                text: why(),
            };
            self.over.insert(name.clone(), problem);
            return false;
        }
        self.note_freed(name, before > size);
        self.by_namespace.insert(name.namespace().into(), sum);
        self.sizes.insert(name.clone(), size);
        true
    }

    /// An object is gone.
    pub fn remove(&mut self, name: &ServiceName) {
        self.over.remove(name);
        let before = self.take_back(name);
        self.note_freed(name, before > 0);
    }

    fn note_freed(&mut self, name: &ServiceName, has_freed: bool) {
        if has_freed {
            self.freed.insert(name.namespace().into());
        }
    }

    fn take_back(&mut self, name: &ServiceName) -> usize {
        let size = self.sizes.remove(name).unwrap_or_default();
        if let Some(sum) = self.by_namespace.get_mut(name.namespace()) {
            *sum -= size;
            if *sum == 0 {
                self.by_namespace.remove(name.namespace());
            }
        }
        size
    }

    /// Objects that are over, and that there may be room for since the last call.
    pub fn take_hopeful(&mut self) -> Vec<ServiceName> {
        let freed = std::mem::take(&mut self.freed);
        let over = self
            .over
            .keys()
            .filter(|name| freed.contains(name.namespace()));
        over.cloned().collect()
    }

    /// What the objects of one namespace may come to.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Names the objects that are over.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.over.values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_is_over_leaves_the_others_and_comes_back_when_there_is_room() {
        let name = |name: &str| ServiceName::new("shop", name);
        let why = || String::from("is too large");
        let mut sums = Sums::new("Service", 10);
        assert!(sums.put(&name("a"), 6, why));
        assert!(!sums.put(&name("b"), 5, why));
        assert!(sums.put(&name("c"), 4, why));
        assert!(sums.put(&ServiceName::new("other", "b"), 10, why));
        assert!(sums.take_hopeful().is_empty());
        assert_eq!(sums.problems().count(), 1);
        sums.remove(&name("a"));
        assert_eq!(sums.take_hopeful(), [name("b")]);
        assert!(sums.put(&name("b"), 5, why));
        assert_eq!(sums.problems().count(), 0);
        // One that grows too large gives back what it had.
        assert!(!sums.put(&name("b"), 100, why));
        assert!(sums.put(&name("a"), 6, why));
        assert!(!sums.put(&name("a"), usize::MAX, why));
    }
}
