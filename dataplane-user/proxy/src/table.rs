//! A worker's connections, by number.

use super::connection::Connection;

/// Names a connection. Numbers are reused; the generation distinguishes the connection from earlier ones with its
/// number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// Below 2^31.
    pub number: u32,
    /// How often the number was in use before.
    pub generation: u32,
}

/// Generations have 31 bits.
const GENERATIONS: u32 = u32::MAX >> 1;

/// A worker's connections. Each has its own box, so that ended connections leave no memory behind.
#[derive(Debug, Default)]
pub struct Table {
    slots: Vec<(u32, Option<Box<Connection>>)>,
    free: Vec<u32>,
}

impl Table {
    /// Puts one in.
    ///
    /// # Panics
    /// Above 2^31 connections.
    pub fn insert(&mut self, connection: Box<Connection>) -> Key {
        let number = self.free.pop().unwrap_or_else(|| {
            self.slots.push((0, None));
            u32::try_from(self.slots.len() - 1).expect("file descriptors are fewer")
        });
        let slot = &mut self.slots[number as usize];
        slot.1 = Some(connection);
        Key {
            number,
            generation: slot.0,
        }
    }

    /// Looks one up, if it is still there.
    pub fn get_mut(&mut self, key: Key) -> Option<&mut Connection> {
        match self.slots.get_mut(key.number as usize) {
            Some((generation, Some(connection))) if *generation == key.generation => {
                Some(connection)
            }
            _ => None,
        }
    }

    /// Takes one out, if it is still there.
    pub fn remove(&mut self, key: Key) -> Option<Box<Connection>> {
        self.get_mut(key)?;
        let slot = self.slots.get_mut(key.number as usize)?;
        slot.0 = slot.0.wrapping_add(1) & GENERATIONS;
        self.free.push(key.number);
        slot.1.take()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Iterates over the connections with their keys.
    pub fn iter(&self) -> impl Iterator<Item = (Key, &Connection)> {
        (0..).zip(&self.slots).filter_map(|(number, slot)| {
            let (generation, connection) = slot;
            let key = Key {
                number,
                generation: *generation,
            };
            connection.as_deref().map(|connection| (key, connection))
        })
    }

    /// Iterates over the connections, mutably.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Connection> {
        self.slots
            .iter_mut()
            .filter_map(|(_, slot)| slot.as_deref_mut())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::tests::connection;

    #[test]
    fn a_key_names_one_connection_and_none_that_has_its_number_later() {
        let mut table = Table::default();
        let mut keys = vec![];
        for (round, generation) in [0, 1, 2, GENERATIONS, 0].into_iter().enumerate() {
            if let Some(slot) = table.slots.first_mut() {
                slot.0 = generation;
            }
            let key = table.insert(connection());
            assert_eq!((key.number, key.generation), (0, generation));
            assert_eq!((table.len(), table.iter_mut().count()), (1, 1));
            assert!(table.iter().map(|(key, _)| key).eq([key]));
            for old in keys.iter().filter(|old| **old != key) {
                assert!(table.get_mut(*old).is_none() && table.remove(*old).is_none());
            }
            assert!(table.get_mut(key).is_some());
            if round == 1 {
                let other = table.insert(connection());
                assert_eq!((other.number, table.len()), (1, 2));
                assert!(table.remove(other).is_some());
            }
            assert!(table.remove(key).is_some() && table.get_mut(key).is_none());
            assert_eq!((table.len(), table.iter_mut().count()), (0, 0));
            let next = if generation == GENERATIONS {
                0
            } else {
                generation + 1
            };
            assert_eq!(table.slots[0].0, next);
            keys.push(key);
        }
        assert_eq!(GENERATIONS, 0x7fff_ffff, "31 bits, as a token has room for");
    }
}
