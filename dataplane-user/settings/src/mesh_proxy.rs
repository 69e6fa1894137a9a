//! The proxy of a mesh.

use relay::AccessLog;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Timeout, is_default};

/// The proxy to which captured connections go.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct MeshProxy {
    /// The proxy's port for outbound connections, at loopback in the workload's network namespace.
    /// Default: 15001.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(range(min = 1))]
    pub outbound: Option<u16>,
    /// The proxy's port for inbound connections. Default: 15006.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(range(min = 1))]
    pub inbound: Option<u16>,
    /// The user of a proxy that is not the agent's, such as 1500 (Open Service Mesh) or 1337 (Istio).
    /// Connections of this user are not captured. Default: the proxy is the agent's.
    #[serde(skip_serializing_if = "is_default")]
    pub uid: Option<u32>,
    /// The mark (SO_MARK) of the sockets of the agent's proxy. Default: 15006.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(range(min = 1))]
    pub mark: Option<u32>,
    /// Whether the agent's proxy connects to the application from the client's address. The agent
    /// makes a rule and a route for this in the workload's network namespace. Default: true.
    #[serde(skip_serializing_if = "is_default")]
    pub keep_source: Option<bool>,
    /// Maximum number of connections that the agent's proxy relays at the same time; further
    /// connections wait in the backlog. Default: as many as the limit of open files allows.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(range(min = 1))]
    pub max_connections: Option<u32>,
    /// The part of these connections that one workload may have. Default: by what is free. While
    /// several workloads are there, a workload never has more than four times as many as are free.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(range(min = 1))]
    pub max_connections_per_workload: Option<u32>,
    /// Time without a byte after which the agent's proxy resets a connection, such as `2h`. Default: no limit.
    #[serde(skip_serializing_if = "is_default")]
    pub idle_timeout: Option<Timeout>,
    /// Time without a byte after which the kernel probes the client and the application of a connection of the agent's proxy
    /// (TCP keepalive). Five probes without an answer, each after a fifth of this time, end the connection. Default: 3m.
    #[serde(skip_serializing_if = "is_default")]
    pub keepalive: Option<Timeout>,
    /// Time after which the kernel ends a connection of the agent's proxy whose client or application does not acknowledge data
    /// or keepalive probes, or takes no data (`TCP_USER_TIMEOUT`): then one unanswered probe may end a silent connection. Default:
    /// the kernel's limits.
    #[serde(skip_serializing_if = "is_default")]
    pub user_timeout: Option<Timeout>,
    /// How long the agent's proxy holds a connection of a workload with `egress: deny` whose destination the agent does not
    /// know yet, and a connection to a workload while Istio's policies are not read. Default: 5s.
    #[serde(skip_serializing_if = "is_default")]
    pub hold_timeout: Option<Timeout>,
    /// Format of the access log of the agent's proxy, on standard output: one line for each connection,
    /// at its end. Default: text.
    #[serde(skip_serializing_if = "is_default")]
    pub access_log: Option<AccessLog>,
}
