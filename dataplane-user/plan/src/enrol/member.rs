//! One who is captured.

use std::sync::Arc;

use model::{CapturedBy, Place, Policy, Snapshot, Workload, WorkloadName};

use super::Statement;

/// A workload, and how it is captured.
#[derive(Debug)]
pub struct Member {
    /// The workload.
    pub workload: Arc<Workload>,
    /// What its rules come to.
    pub policy: Policy,
    /// What that comes from.
    pub rules: Vec<Statement>,
    /// Whether there is no room for the ports, ranges, users, groups and interfaces of its own and its Namespace's rules:
    /// then all of its connections are captured, but for those that the configuration excludes.
    pub over_budget: bool,
    /// Why something has no effect that labels and annotations say: the configuration says otherwise.
    pub ineffective: Vec<String>,
    /// Whether the configuration denies it egress, and not only its own labels and annotations.
    pub denied_by_operator: bool,
}

impl Member {
    /// Whether it is to be captured by the packets that it sends.
    pub fn is_by_packets(&self) -> bool {
        self.policy.captured_by == CapturedBy::Packets && self.workload.place == Place::Address
    }

    /// The node itself, whose own processes have the network namespace in common.
    pub fn of_node(snapshot: &Snapshot) -> Self {
        let name = &*snapshot.node.name;
        Self {
            workload: Arc::new(Workload {
                addresses: snapshot.node.addresses.iter().copied().collect(),
                ..Workload::new(WorkloadName::new("", name), Place::Address)
            }),
            policy: Policy::default(),
            rules: Vec::new(),
            over_budget: false,
            ineffective: Vec::new(),
            denied_by_operator: false,
        }
    }
}
