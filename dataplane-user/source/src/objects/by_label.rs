//! Objects by the labels that they have, or ask for.

use std::collections::{BTreeSet, HashMap};

/// A namespace, and a label in it: the key, and the value.
pub type LabelIn = (Box<str>, Box<str>, Box<str>);

/// Names of objects by label.
#[derive(Debug)]
pub struct ByLabel<N>(HashMap<LabelIn, BTreeSet<N>>);

impl<N> Default for ByLabel<N> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<N: Ord + Clone> ByLabel<N> {
    /// Adds an object to all of its labels.
    pub fn insert(&mut self, labels: impl IntoIterator<Item = LabelIn>, name: &N) {
        for label in labels {
            self.0.entry(label).or_default().insert(name.clone());
        }
    }

    /// Adds an object that asks for all of these labels to one of them, since an object that has all of them has this one.
    /// It is the one with the fewest objects, so that objects which have one label in common and differ in another do not all
    /// meet.
    pub fn insert_at_one(&mut self, labels: impl IntoIterator<Item = LabelIn>, name: &N) {
        let number = |label: &LabelIn| self.0.get(label).map_or(0, BTreeSet::len);
        let rarest = labels.into_iter().min_by_key(number);
        self.insert(rarest, name);
    }

    /// Removes an object from all of its labels.
    pub fn remove(&mut self, labels: impl IntoIterator<Item = LabelIn>, name: &N) {
        for label in labels {
            if let Some(named) = self.0.get_mut(&label) {
                named.remove(name);
                if named.is_empty() {
                    self.0.remove(&label);
                }
            }
        }
    }

    /// Returns the objects at one label.
    pub fn at(&self, label: &LabelIn) -> impl Iterator<Item = &N> {
        self.0.get(label).into_iter().flatten()
    }

    /// Returns the objects at the label with the fewest of these: no other object is at all of them.
    pub fn at_rarest(&self, labels: impl IntoIterator<Item = LabelIn>) -> impl Iterator<Item = &N> {
        let mut rarest: Option<&BTreeSet<N>> = None;
        for label in labels {
            let Some(named) = self.0.get(&label) else {
                rarest = None;
                break;
            };
            if rarest.is_none_or(|rarest| named.len() < rarest.len()) {
                rarest = Some(named);
            }
        }
        rarest.into_iter().flatten()
    }

    /// Returns whether no object has a label.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
