//! Ends connections that changed policies forbid, and those that have arrived at a workload that is gone.

use std::sync::Arc;

use relay::{Denied, Flag};

use super::Worker;
use crate::table::Key;

impl Worker {
    /// Resets the connections that the present policies of their destinations forbid, and those between two workloads of this node
    /// whose destination is gone: another workload may get the address.
    pub fn judge_again(&mut self) {
        let connections = self.table.iter();
        let forbidden = connections.filter_map(|(key, connection)| {
            let denied = connection.session.forbidden(&self.index)?;
            Some((key, denied))
        });
        let forbidden: Vec<(Key, Denied)> = forbidden.collect();
        for (key, denied) in forbidden {
            if let Some(connection) = self.table.get_mut(key) {
                connection.session.deny(denied);
            }
            self.finish(key, Flag::Denied, true);
        }
        let index = Arc::clone(&self.index);
        self.finish_all(Flag::Cut, |connection| connection.session.is_gone(&index));
    }
}
