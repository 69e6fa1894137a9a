//! The kinds of objects that an agent reads, by its purpose.

use super::kind::Kind;

/// The kinds to read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a part that is wanted or not, and all of their combinations can be"
)]
pub struct WantedKinds {
    /// The part of Kubernetes' own objects.
    pub scope: Scope,
    /// Whether to read Istio's ServiceEntries, and the WorkloadEntries and pods that they select.
    pub entries: bool,
    /// Whether to read Gateway API's routes and ReferenceGrants.
    pub routes: bool,
    /// Whether to read Gateways, which may be waypoints, and GatewayClasses.
    pub waypoints: bool,
    /// Whether to read Istio's policies.
    pub policies: WantedPolicies,
    /// Whether to answer the names of services. If so, headless services and services of other proxies are read with
    /// their slices, because they have names.
    pub names: bool,
}

/// The purpose of reading Istio's policies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WantedPolicies {
    /// None: the policies are not read.
    #[default]
    None,
    /// The proxy and the kernel enforce the policies. The first view waits for them: the kernel cannot hold connections, and
    /// keeps the earlier agent's decisions until then. If the policies cannot be read, all connections that they may limit are
    /// refused.
    Enforced,
}

impl From<Scope> for WantedKinds {
    fn from(scope: Scope) -> Self {
        Self {
            scope,
            ..Self::default()
        }
    }
}

impl WantedKinds {
    /// All kinds, with names.
    pub const ALL: Self = Self {
        scope: Scope::Registry,
        entries: true,
        routes: true,
        waypoints: true,
        policies: WantedPolicies::Enforced,
        names: true,
    };

    /// Returns whether a kind is read.
    pub fn includes(self, kind: Kind) -> bool {
        match kind {
            Kind::Service | Kind::Slice | Kind::Node => true,
            Kind::Pod => self.entries || self.scope >= Scope::HostPorts,
            Kind::Namespace => self.scope >= Scope::Mesh,
            Kind::ServiceEntry | Kind::WorkloadEntry => self.entries,
            Kind::Gateway | Kind::GatewayClass => self.waypoints,
            kind if kind.is_policy() => self.policies != WantedPolicies::None,
            _ => self.routes,
        }
    }
}

/// The purpose of reading the API. Each purpose includes those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// Services, their endpoints, and this node.
    #[default]
    Services,
    /// The host ports of this node's pods.
    HostPorts,
    /// The pods of this node that are captured, with their rules. Also the pods of all nodes while a pod of this node
    /// may reach only known destinations (`dataplane.io/egress: deny`).
    Mesh,
    /// As [`Scope::Mesh`], and the pods of all nodes in any case.
    Registry,
}
