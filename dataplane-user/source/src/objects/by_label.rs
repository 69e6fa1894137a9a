//! Objects by the labels that they have, or ask for.

use std::collections::{BTreeSet, HashMap};

/// A namespace, and a label in it: the key, and the value.
pub type LabelIn = (Box<str>, Box<str>, Box<str>);

/// Names of objects by label.
#[derive(Debug)]
pub struct ByLabel<N>(HashMap<LabelIn, Names<N>>);

/// The objects at a label. Most labels have one object, such as the selector of a Service, and a set of one takes 200 bytes.
#[derive(Debug)]
enum Names<N> {
    One(N),
    Several(BTreeSet<N>),
}

impl<N: Ord + Clone> Names<N> {
    fn len(&self) -> usize {
        match self {
            Self::One(_) => 1,
            Self::Several(all) => all.len(),
        }
    }

    fn insert(&mut self, name: &N) {
        match self {
            Self::One(one) if one == name => {}
            Self::One(one) => *self = Self::Several(BTreeSet::from([one.clone(), name.clone()])),
            Self::Several(all) => {
                all.insert(name.clone());
            }
        }
    }

    /// Returns whether none is left.
    fn remove(&mut self, name: &N) -> bool {
        match self {
            Self::One(one) => one == name,
            Self::Several(all) => {
                all.remove(name);
                all.is_empty()
            }
        }
    }

    fn iter(&self) -> impl Iterator<Item = &N> {
        let (one, several) = match self {
            Self::One(one) => (Some(one), None),
            Self::Several(all) => (None, Some(all)),
        };
        one.into_iter().chain(several.into_iter().flatten())
    }
}

impl<N> Default for ByLabel<N> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<N: Ord + Clone> ByLabel<N> {
    /// Adds an object to all of its labels.
    pub fn insert(&mut self, labels: impl IntoIterator<Item = LabelIn>, name: &N) {
        for label in labels {
            self.0
                .entry(label)
                .and_modify(|names| names.insert(name))
                .or_insert_with(|| Names::One(name.clone()));
        }
    }

    /// Adds an object that asks for all of these labels to one of them, since an object that has all of them has this one.
    /// It is the one with the fewest objects, so that objects which have one label in common and differ in another do not all
    /// meet.
    pub fn insert_at_one(&mut self, labels: impl IntoIterator<Item = LabelIn>, name: &N) {
        let number = |label: &LabelIn| self.0.get(label).map_or(0, Names::len);
        let rarest = labels.into_iter().min_by_key(number);
        self.insert(rarest, name);
    }

    /// Removes an object from all of its labels.
    pub fn remove(&mut self, labels: impl IntoIterator<Item = LabelIn>, name: &N) {
        for label in labels {
            if self
                .0
                .get_mut(&label)
                .is_some_and(|named| named.remove(name))
            {
                self.0.remove(&label);
            }
        }
    }

    /// Returns the objects at one label.
    pub fn at(&self, label: &LabelIn) -> impl Iterator<Item = &N> {
        self.0.get(label).into_iter().flat_map(Names::iter)
    }

    /// Returns the objects at the label with the fewest of these: no other object is at all of them.
    pub fn at_rarest(&self, labels: impl IntoIterator<Item = LabelIn>) -> impl Iterator<Item = &N> {
        let mut rarest: Option<&Names<N>> = None;
        for label in labels {
            let Some(named) = self.0.get(&label) else {
                rarest = None;
                break;
            };
            if rarest.is_none_or(|rarest| named.len() < rarest.len()) {
                rarest = Some(named);
            }
        }
        rarest.into_iter().flat_map(Names::iter)
    }

    /// Returns whether no object has a label.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_has_none_one_or_several_objects() {
        let label = |value: &str| -> LabelIn { ("shop".into(), "app".into(), value.into()) };
        let mut all = ByLabel::default();
        let at = |all: &ByLabel<u32>, value| all.at(&label(value)).copied().collect::<Vec<_>>();
        for name in [7, 7, 3, 9] {
            all.insert([label("web")], &name);
        }
        assert_eq!(at(&all, "web"), [3, 7, 9]);
        // At the one with fewer objects.
        all.insert([label("db")], &1);
        all.insert_at_one([label("web"), label("db")], &2);
        assert_eq!((at(&all, "web").len(), at(&all, "db")), (3, vec![1, 2]));
        let rarest = all.at_rarest([label("web"), label("db")]);
        assert_eq!(rarest.copied().collect::<Vec<_>>(), [1, 2]);
        for (name, left) in [(8, 3), (7, 2), (9, 1), (3, 0), (3, 0)] {
            all.remove([label("web")], &name);
            assert_eq!(at(&all, "web").len(), left, "without {name}");
        }
        // One object alone, and another's removal.
        all.insert([label("web")], &4);
        all.remove([label("web"), label("db")], &5);
        assert_eq!(at(&all, "web"), [4]);
        for name in [4, 1, 2] {
            assert!(!all.is_empty());
            all.remove([label("web"), label("db")], &name);
        }
        assert!(all.is_empty());
    }
}
