//! What the programs remember.

use dataplane_common::{
    packet::{Fragment, FragmentKey},
    tables::{Affinity, AffinityKey},
};

use super::{room::Flows, table::Table};

/// Everything that programs write to.
#[derive(Clone, Debug)]
pub struct State {
    pub flows: Flows,
    pub fragments: Table<FragmentKey, Fragment>,
    pub affinity: Table<AffinityKey, Affinity>,
}

impl State {
    /// Nothing, with so many cells for flows, in places by this secret.
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
