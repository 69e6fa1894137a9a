//! The settings of the agent: one value, [`Settings`], which a configuration file and the flags of `dataplane run`
//! build.
//!
//! Every setting is a key of the file. The few that an operator types by hand are flags, too: a key and its flag are one
//! field, and the field's comment is its text in `--help` and in the schema of the file. `None` and an empty list mean
//! that the operator set nothing; the methods here return the defaults.

#![forbid(unsafe_code)]

mod cni;
pub mod config;
mod dns;
mod enrolled;
mod faults;
mod flow_timeouts;
mod identity;
mod kernel;
mod listen;
mod mesh;
mod mesh_proxy;
mod node;
mod packets;
mod pattern;
mod probes;
mod range;
mod source;
mod timeout;

use clap::{Args, ValueEnum};
pub use cni::Cni;
use dataplane_common::Protocol;
pub use dns::{Dns, DnsCapture, DnsDestinations};
pub use enrolled::{Enrols, NeverCaptured};
pub use faults::faults;
pub use flow_timeouts::FlowTimeouts;
pub use identity::{IdentitySource, IstioCa, LocalCa, MeshIdentity, TrustedRoots, WithoutWaypoint};
pub use kernel::{DEFAULT_BPFFS, Kernel, Limits};
pub use listen::{Listen, Listeners, MetricsAuth};
pub use mesh::{Mesh, MeshNamespace, MeshRules, MeshWorkload, SameNode, Unsupported};
pub use mesh_proxy::MeshProxy;
use model::Cluster;
pub use node::Node;
pub use packets::{PacketPath, Packets, TcHook};
pub use pattern::{Pattern, Patterns};
pub use probes::MeshProbes;
pub use range::{ExternalIps, Range};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
pub use source::{Kubernetes, Source};
pub use timeout::Timeout;

/// Configuration of the agent. Every key except `source` has a default. Flags and environment
/// variables override the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[schemars(title = "Configuration of the dataplane agent")]
pub struct Settings {
    /// Where the services come from: `manifests` or `kubernetes`.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub source: Source,

    // Options without a heading come first: clap would show them below the heading of the options before them.
    /// Whether the programs and tables stay when the agent ends [default: keep]
    #[serde(skip_serializing_if = "is_default")]
    #[arg(long, value_enum, env = "DATAPLANE_ON_EXIT")]
    pub on_exit: Option<OnExit>,

    /// Take over from the agent that runs on this node, if there is one
    ///
    /// The running agent hands over as soon as the new agent has read its source, and ends when the new agent
    /// serves. The hand-over includes the listening sockets of the mesh's proxy with their backlog, so no
    /// connection is refused. The old proxy relays its existing connections for at most 30 s more. If the new
    /// agent ends before it serves, the old agent takes over again. Without this option, a second agent names
    /// the agent that runs, and exits.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(long, env = "DATAPLANE_REPLACE")]
    pub replace: bool,

    /// Keep the process alive and idle after another agent has taken over, and take over again when that agent
    /// is gone
    ///
    /// Use it under a supervisor that restarts processes that exit, such as Kubernetes: the restarted agent
    /// would take over from the new agent. An agent that takes over again reads the configuration and the
    /// source again.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(long, env = "DATAPLANE_STAY")]
    pub stay: bool,

    /// Protocols of the sockets that the agent destroys if they are connected through a service to an endpoint that
    /// is gone: `udp`, `tcp`, or `none`. Default: udp.
    ///
    /// The process gets an error at once and connects again. As with kube-proxy, a service's last endpoint is
    /// not gone until the service has another endpoint. The agent sees sockets in pods only if it has the
    /// host's /run/netns or the host's PID namespace.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub destroy_stale: Vec<Stale>,

    /// The log on standard error.
    #[serde(skip_serializing_if = "is_default")]
    #[command(flatten)]
    pub log: Log,

    /// The identity of this node.
    #[serde(skip_serializing_if = "is_default")]
    #[command(flatten)]
    pub node: Node,

    /// Where the agent listens. A TCP address is ADDRESS:PORT, or `off`.
    #[serde(skip_serializing_if = "is_default")]
    #[command(flatten)]
    pub listen: Listeners,

    /// The packet path, for clients without a socket on this node: clients outside the cluster, and
    /// pods that are VMs.
    #[serde(skip_serializing_if = "is_default")]
    #[command(flatten)]
    pub packets: Packets,

    /// The workloads whose TCP connections go to a proxy. Default: no workload's.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub mesh: Option<Mesh>,

    /// The CNI plug-in, which holds a pod's start until the pod is captured. Default: the agent leaves the
    /// container runtime's configuration alone.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub cni: Option<Cni>,

    /// The agent's DNS server.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub dns: Option<Dns>,

    /// Paths in the kernel's file systems, and sysctls.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub kernel: Kernel,

    /// Maximum sizes of tables. Tables start small and grow while they serve.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub limits: Limits,
}

/// Whether programs and tables stay when the agent ends.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum OnExit {
    /// They stay and go on serving: services are up while the agent restarts
    #[default]
    Keep,
    /// The agent removes them: services are no longer served
    Detach,
}

/// A protocol whose stale sockets the agent destroys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Stale {
    /// UDP, whose clients would otherwise wait for their own timeouts.
    Udp,
    /// TCP. An endpoint that is not ready may still answer its existing connections.
    Tcp,
    /// No sockets.
    None,
}

/// The log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Log {
    /// Format of the log on standard error [default: text]
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        id = "log-format",
        long,
        value_enum,
        value_name = "FORMAT",
        env = "DATAPLANE_LOG_FORMAT"
    )]
    pub format: Option<LogFormat>,
    /// Level of the log. Default: info. RUST_LOG sets levels by module.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub level: Option<LogLevel>,
}

/// The format of the log.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Text for people
    #[default]
    Text,
    /// One JSON object for each line
    Json,
}

/// The level of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// Events that an operator needs to know.
    #[default]
    Info,
    /// Also the reasons for decisions.
    Debug,
    /// Also every single step.
    Trace,
}

impl Settings {
    /// Returns the names of the cluster, by the settings for DNS and for Istio's CA.
    pub fn cluster(&self) -> Cluster {
        let default = Cluster::default();
        let identity = self.mesh.as_ref().and_then(|mesh| mesh.identity.as_ref());
        let istio = identity.and_then(|identity| identity.source.istio.as_ref());
        let domain = self.dns.as_ref().map(Dns::domain);
        let domain = domain.map(|domain| domain.trim_matches('.').to_lowercase());
        Cluster {
            domain: domain.map_or(default.domain, Into::into),
            name: istio.map_or(default.name, |istio| istio.cluster().into()),
        }
    }

    /// Returns the protocols whose stale sockets the agent destroys.
    pub fn stale_protocols(&self) -> Vec<Protocol> {
        if self.destroy_stale.is_empty() {
            return vec![Protocol::UDP];
        }
        let protocols = self.destroy_stale.iter().filter_map(|stale| match stale {
            Stale::Udp => Some(Protocol::UDP),
            Stale::Tcp => Some(Protocol::TCP),
            Stale::None => None,
        });
        protocols.collect()
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
