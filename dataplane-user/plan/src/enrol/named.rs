//! Findings that `status` names, of which each namespace has a part.

use std::collections::{BTreeMap, BTreeSet};

/// The number of findings of a namespace that are named, and the number of namespaces.
pub(super) const NAMED: [usize; 2] = [5, 100];

/// Returns the findings of each namespace as one text, as far as they are named: first the namespaces in `own`.
pub(super) fn named<N: AsRef<str>>(
    found: BTreeMap<N, BTreeSet<String>>,
    own: &BTreeSet<&str>,
    separator: &str,
) -> impl Iterator<Item = (N, String)> {
    let mut found: Vec<_> = found.into_iter().collect();
    found.sort_by_key(|(namespace, _)| !own.contains(namespace.as_ref()));
    let found = found.into_iter().take(NAMED[1]);
    found.map(move |(namespace, names)| {
        let others = (names.len() > NAMED[0]).then(|| "others".to_owned());
        let names = names.into_iter().take(NAMED[0]).chain(others);
        (namespace, names.collect::<Vec<_>>().join(separator))
    })
}
