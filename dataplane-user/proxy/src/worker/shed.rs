//! Ending connections whose readers have stalled, when the worker's connections hold more than they may.

use std::collections::HashMap;

use relay::Flag;

use super::Worker;
use crate::table::Key;

/// A connection that holds bytes.
#[derive(Clone, Copy, Debug)]
struct Holder {
    key: Key,
    /// The number of its workload's attachment.
    workload: u64,
    /// When it last carried something.
    active: u32,
    bytes: usize,
}

impl Worker {
    /// Resets stalled connections if the worker's connections hold more than they may.
    pub fn shed(&mut self) {
        if !self.buffers.is_over() {
            return;
        }
        let connections = self.table.iter();
        let holders = connections.filter_map(|(key, connection)| {
            let bytes = connection.held();
            (bytes > 0).then(|| Holder {
                key,
                workload: connection.session.attached().id,
                active: connection.active,
                bytes,
            })
        });
        for key in choose(holders.collect(), self.buffers.excess()) {
            if let Some(connection) = self.table.get_mut(key) {
                connection.session.attached().count_stalled(self.clock.now);
            }
            self.finish(key, Flag::Stalled, true);
        }
        self.load().set_held(self.buffers.held());
    }
}

/// Chooses connections that hold `excess` bytes together. In each step it takes the workload that holds the most, and
/// its connection that has been inactive for longest.
fn choose(mut holders: Vec<Holder>, mut excess: usize) -> Vec<Key> {
    holders.sort_unstable_by_key(|holder| std::cmp::Reverse(holder.active));
    let mut workloads: HashMap<u64, (usize, Vec<Holder>)> = HashMap::new();
    for holder in holders {
        let (bytes, own) = workloads.entry(holder.workload).or_default();
        *bytes += holder.bytes;
        own.push(holder);
    }
    let mut chosen = Vec::new();
    while excess > 0 {
        let most = workloads.values_mut().max_by_key(|(bytes, _)| *bytes);
        let Some((bytes, own)) = most else { break };
        let Some(holder) = own.pop() else { break };
        *bytes -= holder.bytes;
        excess = excess.saturating_sub(holder.bytes);
        chosen.push(holder.key);
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(workload: u64, number: u32, active: u32, bytes: usize) -> Holder {
        let key = Key {
            number,
            generation: 0,
        };
        Holder {
            key,
            workload,
            active,
            bytes,
        }
    }

    fn chosen(holders: &[Holder], excess: usize) -> Vec<u32> {
        let chosen = choose(holders.to_vec(), excess);
        chosen.iter().map(|key| key.number).collect()
    }

    #[test]
    fn the_workload_that_holds_most_loses_its_least_active_connections() {
        // The first workload's one connection has stalled for longest.
        let mut all = vec![holder(1, 0, 1, 100)];
        all.extend((1..=10).map(|number| holder(2, number, 100 - number, 100)));
        assert_eq!(chosen(&all, 250), [10, 9, 8]);
        assert_eq!(chosen(&all, 0), [0; 0]);
        // Only when both hold as much may either lose.
        assert_eq!(chosen(&all, 900)[..9], [10, 9, 8, 7, 6, 5, 4, 3, 2]);
        assert_eq!(chosen(&all, 5000).len(), all.len());
        // A workload with fewer connections is chosen if it holds the most bytes.
        all.push(holder(3, 99, 200, 2000));
        assert_eq!(chosen(&all, 1), [99]);
    }
}
