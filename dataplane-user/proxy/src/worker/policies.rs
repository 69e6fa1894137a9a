//! Ends connections that changed policies forbid.

use relay::{Denied, Flag};

use super::Worker;
use crate::table::Key;

impl Worker {
    /// Resets the inbound connections that the present policies forbid.
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
    }
}
