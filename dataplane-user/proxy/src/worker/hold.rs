//! Connections whose destination is not known yet: each waits for a snapshot that has it, for a limited time.

use std::{collections::VecDeque, sync::Arc, time::Instant};

use relay::{Attached, Flag};

use super::Worker;
use crate::{
    connection::{Connection, Side},
    table::Key,
};

/// Waiting connections in the order of their deadlines.
pub type Held = VecDeque<(Instant, Key)>;

/// The maximum number of waiting connections of a worker.
const MAX: usize = 1024;
/// The part of them that one workload may have.
const MAX_OF_WORKLOAD: usize = 128;

impl Worker {
    /// Whether another connection of a workload may wait.
    pub fn may_hold(&mut self, attached: &Arc<Attached>) -> bool {
        if self.shared.settings.hold.is_zero() {
            return false;
        }
        let table = &mut self.table;
        if self.held.len() >= MAX {
            // Those whose client has gone take no room of others.
            self.held.retain(|(_, key)| table.get_mut(*key).is_some());
        }
        if self.held.len() >= MAX {
            return false;
        }
        let waiting = self.held.iter().filter(|(_, key)| {
            let connection = table.get_mut(*key);
            connection.is_some_and(|connection| connection.session.attached().id == attached.id)
        });
        waiting.count() < MAX_OF_WORKLOAD
    }

    /// Keeps an accepted connection until a snapshot has its destination.
    pub fn hold(&mut self, connection: Connection) {
        connection.session.attached().count_unknown();
        let deadline = self.clock.now + self.shared.settings.hold;
        let key = self.table.insert(Box::new(connection));
        self.schedule_upkeep();
        self.held.push_back((deadline, key));
        self.clock.wake_by(deadline);
        self.load().set_waiting(self.held.len());
        if let Err(error) = self.watch(key, Side::Client) {
            self.fail(key, error);
        }
        self.shared.wake_if_newer(self.number, self.version);
    }

    /// Routes the waiting connections by a new snapshot.
    pub fn route_held(&mut self) {
        for (deadline, key) in std::mem::take(&mut self.held) {
            let Some(connection) = self.table.get_mut(key) else {
                continue;
            };
            match connection.session.route(&self.index) {
                Ok(()) => self.dial_held(key),
                Err(refusal) if refusal.is_unknown => self.held.push_back((deadline, key)),
                Err(refusal) => self.finish(key, refusal.flag, true),
            }
        }
        self.load().set_waiting(self.held.len());
    }

    fn dial_held(&mut self, key: Key) {
        let Some(connection) = self.table.get_mut(key) else {
            return;
        };
        match connection.read_first(&mut self.buffers) {
            Ok(first) => {
                self.clock.update();
                self.dial(key, first);
                self.shed();
            }
            Err(flag) => self.finish(key, flag, true),
        }
    }

    /// Refuses the connections that have waited for too long. Returns the next deadline.
    pub fn give_up_held(&mut self) -> Option<Instant> {
        let mut next = None;
        while let Some(&(deadline, key)) = self.held.front() {
            if self.table.get_mut(key).is_some() {
                if deadline > self.clock.now {
                    next = Some(deadline);
                    break;
                }
                self.finish(key, Flag::Denied, true);
            }
            self.held.pop_front();
        }
        self.load().set_waiting(self.held.len());
        next
    }
}
