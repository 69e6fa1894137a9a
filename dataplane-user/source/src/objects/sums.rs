//! Limits the expanded size of the objects of each namespace, before they are expanded.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use model::{Gravity, Problem, ServiceName};

/// Limits the total size of the objects of one kind in each namespace. An object that exceeds the limit is refused by
/// itself, and the others stay.
#[derive(Debug)]
pub struct Sums {
    most: usize,
    /// The kind of the objects, for problems.
    kind: &'static str,
    sizes: HashMap<ServiceName, usize>,
    by_namespace: HashMap<Box<str>, usize>,
    over: BTreeMap<ServiceName, Problem>,
    /// Namespaces in which an object freed space, so that there may be room for refused objects.
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

    /// Replaces the size of an object, and returns whether the object is within the limit of its namespace. An object
    /// of size 0 is always within it. `why` returns the problem's text if the object is refused.
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

    /// Removes an object.
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

    /// Returns refused objects for which there may be room since the last call.
    pub fn take_hopeful(&mut self) -> Vec<ServiceName> {
        let freed = std::mem::take(&mut self.freed);
        let over = self
            .over
            .keys()
            .filter(|name| freed.contains(name.namespace()));
        over.cloned().collect()
    }

    /// Returns the maximum size of one namespace.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Returns a problem for each refused object.
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
        // An object that grows too large frees its former size.
        assert!(!sums.put(&name("b"), 100, why));
        assert!(sums.put(&name("a"), 6, why));
        assert!(!sums.put(&name("a"), usize::MAX, why));
    }
}
