//! The agent's state over its socket, as JSON: the types that both ends share.
//!
//! Addresses, protocols and reasons are the words that people read. Times are seconds since the
//! epoch.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};

use crate::tunnels::WorkloadTunnels;

/// `GET /version`: the agent's version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// The agent's version.
    pub version: String,
    /// The layout of its pinned tables ([`dataplane_common::LAYOUT`]).
    pub layout: u32,
    /// Its process.
    pub pid: u32,
}

impl Version {
    /// Returns this process's version.
    pub fn own() -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            layout: dataplane_common::LAYOUT,
            pid: std::process::id(),
        }
    }
}

/// The facts that only the agent knows: part of `GET /status`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AgentStatus {
    /// The agent's version.
    pub version: Version,
    /// When it started.
    pub started: u64,
    /// Whether it has ever brought the kernel's tables in line with its source.
    pub ready: bool,
    /// The node's name, by which EndpointSlices name the node of an endpoint.
    pub node: String,
    /// The addresses on which node ports are answered, besides loopback.
    pub node_port_addresses: Vec<Learnt>,
    /// The networks whose clients count as pods, and are not masqueraded on the way to a cluster IP; empty: no client
    /// is masqueraded there.
    pub pod_networks: Vec<Learnt>,
    /// The cgroup whose processes are served.
    pub cgroup: Learnt,
    /// Where the sockets of this node's pods are; `None` before the agent has looked.
    pub pods: Option<PodCgroups>,
    /// Why packets of services go through the stack; `None`: they do not.
    pub stack_because: Option<String>,
    /// Why load balancers are asked to send this node no new connections (`/healthz`); `None`: they are not.
    pub leaving: Option<String>,
    /// For how many seconds a change has been waiting to be written, if that is too long (`/livez`).
    pub late_seconds: Option<u64>,
    /// Whether an earlier agent's tables served something when this agent started.
    pub inherited: bool,
    /// The source of the services.
    pub source: Source,
    /// How many services there are, also those without a VIP.
    pub services: u64,
    /// How many endpoints their ports have together.
    pub endpoints: u64,
    /// The last sync that succeeded.
    pub last_sync: Option<Sync>,
    /// Syncs that succeeded since the agent started.
    pub syncs: u64,
    /// Syncs that failed.
    pub sync_errors: u64,
    /// Why the last sync failed; `None` if it succeeded.
    pub sync_error: Option<Failure>,
    /// Frontends that several services claim.
    pub conflicts: Vec<Conflict>,
    /// Objects that were not served as written.
    pub problems: Vec<Problem>,
    /// The workloads whose connections are captured; without rules.
    pub mesh: Vec<MeshWorkload>,
    /// The flows of the packet path; `None` before the first count, or without a packet path.
    pub flows: Option<Flows>,
    /// The DNS server; `None` if it has no clients.
    pub dns: Option<DnsStatus>,
    /// The encrypted connections of the workloads that have some.
    #[serde(default)]
    pub tunnels: Vec<WorkloadTunnels>,
}

/// A setting or fact that the agent uses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Learnt {
    /// The value.
    pub value: String,
    /// The source of the value: an option (of the command line, the environment or the configuration file), or the
    /// place where the agent found it.
    pub from: String,
}

/// Whether the sockets of this node's pods are in the cgroup that the programs are attached to, at the agent's last
/// look.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodCgroups {
    /// When the agent looked.
    pub at: u64,
    /// How many pods have sockets only there.
    pub inside: u64,
    /// How many have sockets in other cgroups: their connections are served by packets only.
    pub outside: u64,
    /// How many pods have no socket that the agent could see.
    pub unknown: u64,
    /// The other cgroups, at most [`PodCgroups::NAMED`].
    pub others: Vec<String>,
    /// The root of the cgroup v2 hierarchy, if the agent sees it.
    pub root: Option<String>,
}

impl PodCgroups {
    /// How many other cgroups are named.
    pub const NAMED: usize = 3;
}

impl From<&kernel::sockets::PodCgroups> for PodCgroups {
    fn from(found: &kernel::sockets::PodCgroups) -> Self {
        let text = |path: &PathBuf| path.display().to_string();
        Self {
            at: super::now(),
            inside: found.inside as u64,
            outside: found.outside as u64,
            unknown: found.unknown as u64,
            others: found.others.iter().take(Self::NAMED).map(text).collect(),
            root: found.root.as_ref().map(text),
        }
    }
}

/// The flows of the packet path at the last count: the agent looks at all of them every ten seconds or somewhat more.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Flows {
    /// When they were counted.
    pub at: u64,
    /// How many there were.
    pub total: u64,
    /// The endpoints that have the most ports of the node's, the one with most first.
    pub ports: Vec<Ports>,
}

/// How many of the node's ports masqueraded flows to an endpoint have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ports {
    /// `tcp` or `udp`.
    pub protocol: String,
    /// The endpoint.
    pub endpoint: String,
    /// How many ports it has.
    pub used: u32,
    /// How many ports it can have.
    pub limit: u32,
}

/// A workload whose connections are captured: what `GET /mesh` lists. The tables in the kernel hold
/// numbers instead of names.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MeshWorkload {
    /// Its number in the tables ([`dataplane_common::capture::Enrolled::workload`]).
    pub number: u32,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Why it is not captured as it should be.
    pub problem: Option<String>,
    /// Whether the node is at fault for that: the agent, the kernel or the operator's configuration.
    pub problem_of_node: bool,
    /// Whether the kernel enforces Istio's policies for connections to it.
    #[serde(default)]
    pub by_kernel: bool,
    /// Why the kernel refuses all connections to it, whatever these policies say.
    pub closed: Option<String>,
    /// Its rules. Of two rules about one subject, only the one that counts. Not in `GET /status`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<MeshRule>,
}

impl MeshWorkload {
    /// Namespace and name.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

/// Istio's policies of a captured workload, an item of `GET /policies`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkloadPolicies {
    /// Its namespace and name.
    pub workload: String,
    /// Who enforces the policies: `proxy`, if the agent's proxy carries its inbound connections, or `kernel`. `None`: nobody.
    pub enforced_by: Option<String>,
    /// Whether the policies cannot be read, so that no new connection is allowed.
    pub unread: bool,
    /// Why all connections are refused, whatever the policies say.
    pub closed: Option<String>,
    /// The policies that select it.
    pub policies: Vec<Policy>,
    /// The decision about the connection that the client asks for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<Decision>,
}

/// A policy of Istio's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// Its kind, namespace and name, such as `AuthorizationPolicy shop/web`.
    pub name: String,
    /// `ALLOW`, `DENY` or `CUSTOM`; of a PeerAuthentication `mTLS`.
    pub action: String,
    /// Whether it is a dry run.
    pub dry_run: bool,
    /// Each rule, or each mode, as text.
    pub rules: Vec<String>,
    /// The parts that the agent cannot read or does not evaluate.
    pub warnings: Vec<String>,
}

/// A decision about a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// Whether the policies allow it.
    pub allowed: bool,
    /// Each policy and rule in the order in which they count, with its result; the last line is the reason.
    pub steps: Vec<String>,
}

/// A rule by which a workload's connections are captured or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeshRule {
    /// The subject: `outbound-range`, `outbound-port`, `inbound-port`, `inbound`, `inbound-others`, `user`,
    /// `group`, `interface`, `virtual-interface`, `captured-by`, `mode`, `egress`, `without-proxy` or `dns`.
    pub about: String,
    /// The range, port, user, group or interface; empty for a setting.
    pub of: String,
    /// `captured` or `excluded`; of a setting, its value.
    pub says: String,
    /// The source of the rule, such as `mesh.rules` or `Pod default/web`.
    pub by: String,
}

/// The source of the services.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Source {
    /// The kind of source.
    pub kind: SourceKind,
    /// Files and directories, or the API server.
    pub paths: Vec<String>,
    /// When they were last read without an error, or the API server last answered; 0: never.
    pub read: u64,
    /// Why they could not be read since: the agent still serves the earlier objects. `at` is when the failure began.
    pub error: Option<Failure>,
}

/// The kinds of sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SourceKind {
    /// Files and directories.
    Manifests,
    /// The Kubernetes API.
    Kubernetes,
}

impl SourceKind {
    /// The word for it, in text and in JSON.
    pub fn word(self) -> &'static str {
        match self {
            Self::Manifests => "manifests",
            Self::Kubernetes => "kubernetes",
        }
    }
}

/// A sync that succeeded.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sync {
    /// When it ended.
    pub at: u64,
    /// How long planning took, in microseconds.
    pub plan_us: u64,
    /// How long writing took, in microseconds; grace period included.
    pub write_us: u64,
    /// How many writes there were.
    pub writes: u64,
}

/// A failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// When it happened.
    pub at: u64,
    /// The event, and what to do.
    pub text: String,
}

/// A frontend that several services claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conflict {
    /// `address:port/protocol`.
    pub frontend: String,
    /// The service that serves it: the oldest, then the first by name.
    pub winner: String,
    /// The services that do not.
    pub losers: Vec<String>,
}

/// An object or setting that was not served as written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// Its gravity.
    pub gravity: Gravity,
    /// A file with line, or an object.
    pub place: String,
    /// The event, and what to do.
    pub text: String,
}

/// The gravity of a [`Problem`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Gravity {
    /// An object is not followed: an error that its author has to correct. The node is healthy.
    Object,
    /// An error of the node or its configuration.
    Node,
    /// Worth a look.
    Warning,
}

/// A page of a list: what `GET /services` and `GET /pools` answer with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Page<T> {
    /// The items.
    pub items: Vec<T>,
    /// The value of `after` for the next page; `None` on the last page.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub next: Option<String>,
}

/// A service.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Service {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// `ClusterIP`, `NodePort`, `LoadBalancer` or `ExternalName`; `HostPort` for a pod's host ports.
    #[serde(rename = "type")]
    pub kind: String,
    /// `spec.clusterIPs`; empty if it is headless.
    pub cluster_ips: Vec<String>,
    /// `spec.externalIPs`.
    pub external_ips: Vec<String>,
    /// The load balancer's addresses.
    pub load_balancer_ips: Vec<String>,
    /// `Cluster` or `Local`.
    pub internal_traffic_policy: String,
    /// `Cluster` or `Local`.
    pub external_traffic_policy: String,
    /// Session affinity's timeout in seconds; none: no affinity.
    pub affinity_seconds: Option<u64>,
    /// Its ports.
    pub ports: Vec<ServicePort>,
    /// Frontends that it and other services claim, whichever service serves them.
    pub conflicts: Vec<Conflict>,
}

/// A port of a service.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ServicePort {
    /// Its name; empty if it has none.
    pub name: String,
    /// The VIPs' port.
    pub port: u16,
    /// `tcp` or `udp`.
    pub protocol: String,
    /// The nodes' port.
    pub node_port: Option<u16>,
    /// How many endpoints are ready.
    pub ready: usize,
    /// Its endpoints.
    pub endpoints: Vec<Endpoint>,
    /// Connections (and datagrams of unconnected sockets) translated.
    pub connections: u64,
    /// Connections refused, by reason; without reasons that have not occurred.
    pub refused: BTreeMap<String, u64>,
}

/// An endpoint.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "the conditions of an EndpointSlice"
)]
pub struct Endpoint {
    /// Its address.
    pub address: String,
    /// Its port.
    pub port: u16,
    /// Whether it is on this node.
    pub local: bool,
    /// `conditions.ready`.
    pub ready: bool,
    /// `conditions.serving`.
    pub serving: bool,
    /// `conditions.terminating`.
    pub terminating: bool,
    /// Whether it is ready but not used, because hints assign other endpoints to this node, in its zone or on it.
    pub hinted_away: bool,
}

/// The service of a pool: the tables in the kernel hold no names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pool {
    /// Its index.
    pub pool: u32,
    /// The service's namespace.
    pub namespace: String,
    /// The service's name.
    pub name: String,
    /// The service's port; `None`: the pool answers the ports that the service does not have.
    pub port: Option<u16>,
    /// `tcp` or `udp`.
    pub protocol: Option<String>,
    /// The route that splits the port's connections, with its rule; `None`: there is no such route.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub route: Option<String>,
}

/// The DNS server at a glance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DnsStatus {
    /// How many workloads' queries it answers.
    pub workloads: usize,
    /// How many queries it has received.
    pub queries: u64,
    /// How many of them it answered from the names of services and hosts.
    pub local: u64,
    /// How many it answered from its cache.
    pub cached: u64,
    /// How many got SERVFAIL, because no resolver answered.
    pub failed: u64,
}

/// The certificates of workloads, the answer to `GET /certs`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Certificates {
    /// The certificates of the node's captured workloads, sorted by identity.
    pub certificates: Vec<identity::Listed>,
    /// The problems of the files of roots and of revoked certificates.
    pub problems: Vec<String>,
}

/// The cache of the DNS server: what `GET /dns/cache` answers with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DnsCache {
    /// How many answers there are.
    pub entries: usize,
    /// Their bytes.
    pub bytes: usize,
    /// How many bytes there is room for.
    pub max_bytes: usize,
    /// The namespaces whose queries brought the answers, by name.
    pub namespaces: Vec<DnsCacheShare>,
}

/// The part of the cache that belongs to a namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DnsCacheShare {
    /// The namespace; empty: clients that are no pods.
    pub namespace: String,
    /// How many answers.
    pub entries: usize,
    /// Their bytes.
    pub bytes: usize,
}

/// The result of `GET /dns/lookup`: the steps by which a workload finds the addresses of each family.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DnsLookup {
    /// The query for A records.
    pub ipv4: Vec<dns::Step>,
    /// The query for AAAA records.
    pub ipv6: Vec<dns::Step>,
}

/// The result of `POST /dns/cache/flush`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DnsFlushed {
    /// How many answers were forgotten.
    pub flushed: usize,
}
