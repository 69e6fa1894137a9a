//! The state that the programs keep.

use dataplane_common::{
    packet::{Fragment, FragmentKey},
    tables::{Affinity, AffinityKey},
};

use super::{room::Flows, table::Table};

/// Every table that the programs write to.
#[derive(Clone, Debug)]
pub struct State {
    pub flows: Flows,
    pub fragments: Table<FragmentKey, Fragment>,
    pub affinity: Table<AffinityKey, Affinity>,
}

impl State {
    /// Returns an empty state. `cells`: number of cells for flows. `secret`: the hash secret that decides which cells a
    /// flow may use.
    pub fn new(cells: u32, secret: u64) -> Self {
        Self {
            flows: Flows::new(cells, secret),
            fragments: Table::new(),
            affinity: Table::new(),
        }
    }

    pub fn keep(&mut self) {
        self.flows.keep();
        self.fragments.keep();
        self.affinity.keep();
    }

    pub fn take_back(&mut self) {
        self.flows.take_back();
        self.fragments.take_back();
        self.affinity.take_back();
    }
}
