//! Indexes of routes by the objects that they name, kept up to date by changes.

use std::collections::{BTreeMap, BTreeSet};

use imbl::ordmap::DiffItem;
use model::{BackendTo, Route, RouteKind, RouteName, ServiceName};

/// Routes by their namespaces and kinds.
pub type OfNamespaces = BTreeMap<(Box<str>, RouteKind), BTreeSet<RouteName>>;

/// Returns the sides of a change: the former value (`false`), and the present value.
pub fn sides<'a, K, V>(
    change: &DiffItem<'a, 'a, K, V>,
) -> impl Iterator<Item = (&'a K, &'a V, bool)> + use<'a, K, V> {
    let (old, new) = match *change {
        DiffItem::Add(key, new) => (None, Some((key, new))),
        DiffItem::Update { old, new } => (Some(old), Some(new)),
        DiffItem::Remove(key, old) => (Some((key, old)), None),
    };
    let old = old.map(|(key, old)| (key, old, false));
    old.into_iter()
        .chain(new.map(|(key, new)| (key, new, true)))
}

/// Returns the Services that a route leads to.
pub fn services_of(route: &Route) -> impl Iterator<Item = &ServiceName> {
    route
        .backends
        .iter()
        .filter_map(|backend| match &backend.to {
            BackendTo::Service(to) => Some(to),
            BackendTo::Host(_) | BackendTo::Invalid(..) => None,
        })
}

/// Adds a route to the routes that name `key`, or removes it.
pub fn note_by_namespace<K: Ord + Clone>(
    map: &mut BTreeMap<K, OfNamespaces>,
    key: &K,
    name: &RouteName,
    is_there: bool,
) {
    let of = map.entry(key.clone()).or_default();
    note(of, &(name.namespace.clone(), name.kind), name, is_there);
    if of.is_empty() {
        map.remove(key);
    }
}

/// Adds a name to the names at `key`, or removes it.
pub fn note<K: Ord + Clone, Name: Ord + Clone>(
    map: &mut BTreeMap<K, BTreeSet<Name>>,
    key: &K,
    name: &Name,
    is_there: bool,
) {
    let names = map.entry(key.clone()).or_default();
    if is_there {
        names.insert(name.clone());
    } else {
        names.remove(name);
        if names.is_empty() {
            map.remove(key);
        }
    }
}
