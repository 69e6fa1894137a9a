//! Writes the difference between the entries that a table holds and those that it should hold.

use std::collections::BTreeMap;

use crate::{
    error::{Doing, Error},
    map::{Hash, Plain},
};

/// A table with its name, for messages.
#[derive(Debug)]
pub struct Named<K, V> {
    pub name: &'static str,
    pub hash: Hash<K, V>,
}

/// Adds the wanted entries that a table does not hold.
pub fn add<K: Plain + Ord, V: Plain + PartialEq>(
    table: &Named<K, V>,
    held: &mut BTreeMap<K, V>,
    wanted: &BTreeMap<K, V>,
) -> Result<(), Error> {
    let Named { name, hash } = table;
    for (key, value) in wanted {
        if held.get(key) != Some(value) {
            hash.set(key, value).doing(|| {
                let room = hash.capacity();
                format!("cannot add to {name}, which has room for {room} entries")
            })?;
            held.insert(*key, *value);
        }
    }
    Ok(())
}

/// Makes room if a table cannot hold the new entries beside the unwanted ones: removes those unwanted entries for which
/// `may` allows it.
pub fn make_room<K: Plain + Ord, V: Plain>(
    table: &Named<K, V>,
    held: &mut BTreeMap<K, V>,
    wanted: &BTreeMap<K, V>,
    may: impl Fn(&K, &V) -> bool,
) -> Result<(), Error> {
    let new = wanted.keys().filter(|key| !held.contains_key(key)).count();
    if held.len() + new <= table.hash.capacity() as usize {
        return Ok(());
    }
    remove_if(table, held, wanted, may)
}

/// For [`make_room`]: every unwanted entry may go.
pub fn any<K, V>(_: &K, _: &V) -> bool {
    true
}

/// Removes the entries that are not wanted.
pub fn remove<K: Plain + Ord, V: Plain>(
    table: &Named<K, V>,
    held: &mut BTreeMap<K, V>,
    wanted: &BTreeMap<K, V>,
) -> Result<(), Error> {
    remove_if(table, held, wanted, any)
}

fn remove_if<K: Plain + Ord, V: Plain>(
    table: &Named<K, V>,
    held: &mut BTreeMap<K, V>,
    wanted: &BTreeMap<K, V>,
    may: impl Fn(&K, &V) -> bool,
) -> Result<(), Error> {
    let gone = held.iter();
    let gone = gone.filter(|(key, value)| !wanted.contains_key(key) && may(key, value));
    let gone: Vec<K> = gone.map(|(key, _)| *key).collect();
    for key in gone {
        let removed = table.hash.remove(&key);
        removed.doing(|| format!("cannot remove from {}", table.name))?;
        held.remove(&key);
    }
    Ok(())
}
