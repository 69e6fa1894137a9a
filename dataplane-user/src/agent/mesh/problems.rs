//! Workloads that are not captured as they should be.

use std::collections::{BTreeMap, btree_map::Entry};

use tracing::{error, info};

use crate::model::WorkloadName;

/// What is wrong, and with whom.
#[derive(Debug, Default)]
pub struct Problems(BTreeMap<WorkloadName, String>);

impl Problems {
    /// Adds to what is wrong with a workload.
    pub fn add(&mut self, workload: &WorkloadName, text: String) {
        match self.0.entry(workload.clone()) {
            Entry::Vacant(first) => {
                first.insert(text);
            }
            Entry::Occupied(mut said) => {
                let said = said.get_mut();
                said.push_str("; ");
                said.push_str(&text);
            }
        }
    }

    /// What is wrong with a workload.
    pub fn of(&self, workload: &WorkloadName) -> Option<String> {
        self.0.get(workload).cloned()
    }

    /// Whether nothing is.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Logs what is new, and what is over.
    pub fn tell(&self, before: &Self) {
        for (workload, text) in &self.0 {
            if before.0.get(workload) != Some(text) {
                error!("mesh: {workload}: {text}");
            }
        }
        for workload in before.0.keys().filter(|w| !self.0.contains_key(*w)) {
            info!(%workload, "mesh: its problem is over");
        }
    }
}
