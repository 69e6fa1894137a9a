//! A workload whose connections are captured.

use std::sync::Arc;

use model::{CapturedBy, Place, Policy, Snapshot, Workload, WorkloadName};

use super::Statement;

/// A workload, and the way in which it is captured.
#[derive(Debug)]
pub struct Member {
    /// The workload.
    pub workload: Arc<Workload>,
    /// The policy that results from its rules.
    pub policy: Policy,
    /// The rules from which the policy results.
    pub rules: Vec<Statement>,
    /// Whether the ports, ranges, users, groups and interfaces of its own and its Namespace's rules exceed the budget.
    /// Then all of its connections are captured, except those that the configuration excludes.
    pub over_budget: bool,
    /// Reasons why labels or annotations have no effect: the configuration overrides them.
    pub ineffective: Vec<String>,
    /// Whether the configuration denies it egress, and not only its own labels and annotations.
    pub denied_by_operator: bool,
    /// Its mode is `auto`, and the agent's proxy makes tunnels: of its outbound connections, only those to destinations that speak
    /// HBONE go to the proxy. Its policy has the mode `proxy`.
    pub auto: Option<Auto>,
    /// The namespaces and names of Istio's policies that limit its inbound connections and that nothing enforces, not all if
    /// they are many.
    pub limited_by: Vec<(Arc<str>, Arc<str>)>,
    /// Whether the kernel enforces Istio's policies for its inbound connections.
    pub by_kernel: bool,
    /// Why the kernel refuses all connections to it in place of the decisions of Istio's policies.
    pub closed: Option<&'static str>,
}

/// The inbound connections of a workload with [`Member::auto`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Auto {
    /// Plain connections go to the proxy: Istio's policies may refuse them, or cannot be read. Otherwise, they go direct.
    pub plain_to_proxy: bool,
}

impl Member {
    /// Returns whether the agent captures it by the packets that it sends.
    pub fn is_by_packets(&self) -> bool {
        self.policy.captured_by == CapturedBy::Packets && self.workload.place == Place::Address
    }

    /// Returns whether the agent's proxy sends its connections to waypoints, if the proxy has tunnels.
    pub(super) fn is_sent_to_waypoints(&self) -> bool {
        self.policy.mode.is_proxied(false) && !self.workload.account.is_empty()
    }

    /// Returns the node itself as a member. The node's own processes share its network namespace.
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
            auto: None,
            limited_by: Vec::new(),
            by_kernel: false,
            closed: None,
        }
    }
}
