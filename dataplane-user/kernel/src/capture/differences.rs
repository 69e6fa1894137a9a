//! Writes the difference between the entries that a table holds and those that it should hold.

use std::collections::BTreeMap;

use crate::{
    error::{Doing, Error},
    map::{Hash, Plain},
};

/// Adds the wanted entries that a table does not hold.
pub fn add<K: Plain + Ord, V: Plain + PartialEq>(
    name: &str,
    table: &Hash<K, V>,
    held: &mut BTreeMap<K, V>,
    wanted: &BTreeMap<K, V>,
) -> Result<(), Error> {
    for (key, value) in wanted {
        if held.get(key) != Some(value) {
            table.set(key, value).doing(|| {
                format!(
                    "cannot add to {name}, which has room for {} entries",
                    table.capacity()
                )
            })?;
            held.insert(*key, *value);
        }
    }
    Ok(())
}

/// Makes room if a table cannot hold the new entries beside the unwanted ones: removes those unwanted entries for which
/// `may` allows it.
pub fn make_room<K: Plain + Ord, V: Plain>(
    name: &str,
    table: &Hash<K, V>,
    held: &mut BTreeMap<K, V>,
    wanted: &BTreeMap<K, V>,
    may: impl Fn(&V) -> bool,
) -> Result<(), Error> {
    let new = wanted.keys().filter(|key| !held.contains_key(key)).count();
    if held.len() + new <= table.capacity() as usize {
        return Ok(());
    }
    let gone = held.iter();
    let gone = gone.filter(|(key, value)| !wanted.contains_key(key) && may(value));
    let gone: Vec<K> = gone.map(|(key, _)| *key).collect();
    for key in gone {
        let doing = || format!("cannot remove from {name}");
        table.remove(&key).doing(doing)?;
        held.remove(&key);
    }
    Ok(())
}

/// For [`make_room`]: every unwanted entry may go.
pub fn any<V>(_: &V) -> bool {
    true
}

/// Removes the entries that are not wanted.
pub fn remove<K: Plain + Ord, V: Plain>(
    name: &str,
    table: &Hash<K, V>,
    held: &mut BTreeMap<K, V>,
    wanted: &BTreeMap<K, V>,
) -> Result<(), Error> {
    let gone: Vec<K> = held
        .keys()
        .filter(|key| !wanted.contains_key(key))
        .copied()
        .collect();
    for key in gone {
        table
            .remove(&key)
            .doing(|| format!("cannot remove from {name}"))?;
        held.remove(&key);
    }
    Ok(())
}
