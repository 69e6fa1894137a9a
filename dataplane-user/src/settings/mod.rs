//! What an operator can ask of the agent: one value, [`Settings`], which a configuration file and the flags of
//! `dataplane run` build.
//!
//! A key and its flag are one field. The comments are what `--help` and the schema of the file say of it.
//! `None`, and an empty list, mean that nothing was said; the methods here fill in the defaults.

mod faults;
mod kernel;
mod listen;
mod mesh;
mod nf_conntrack;
mod node;
mod packets;
mod pattern;
mod range;
mod source;

pub use faults::faults;
pub use kernel::{Kernel, Limits};
pub use listen::{Listen, Listeners};
pub use mesh::{Mesh, MeshNamespace, MeshProxy, MeshRules, MeshWorkload};
pub use nf_conntrack::{NfConntrack, Timeout};
pub use node::Node;
pub use packets::{Packets, TcHook};
pub use pattern::{Pattern, Patterns};
pub use range::Range;
pub use source::{Kubernetes, Source};

use clap::{Args, ValueEnum};
use dataplane_common::Protocol;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Configuration of the agent. Everything has a default but `source`; flags and environment
/// variables override what is written here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[schemars(title = "Configuration of the dataplane agent")]
pub struct Settings {
    /// Where the services come from: one of its keys.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub source: Source,

    // Options without a heading of their own come first: they would be shown below that of the ones before.
    /// What becomes of the programs when the agent ends [default: keep]
    #[serde(skip_serializing_if = "is_default")]
    #[arg(long, value_enum, env = "DATAPLANE_ON_EXIT", hide_env_values = true)]
    pub on_exit: Option<OnExit>,

    /// Take the place of the agent that runs on this node, if one does
    ///
    /// It gives its place away when this one has read its source, and ends when this one serves; what its
    /// proxy has it relays for at most 30 s more. The proxy's listening sockets are handed over, with the
    /// connections that wait in them: none is refused. If this one ends before it serves, the other takes
    /// its place back. Without this, a second agent ends and says who runs.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(long, env = "DATAPLANE_REPLACE", hide_env_values = true)]
    pub replace: bool,

    /// Stay, idle, when another agent has taken this one's place, and take it back when that one is gone
    ///
    /// For those who start again whatever ends, as Kubernetes does: it would take the place back from the
    /// other. The configuration and the source are read anew then.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(long, env = "DATAPLANE_STAY", hide_env_values = true)]
    pub stay: bool,

    /// Destroy sockets that are connected through a service to an endpoint that is gone, so that
    /// their processes connect anew at once [default: udp]
    ///
    /// As kube-proxy has it, a service's last endpoint does not count as gone before there is
    /// another one. TCP connections otherwise stay until one side ends them. Takes the host's PID
    /// namespace, to see the pods' network namespaces.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        long,
        value_enum,
        num_args = 1..,
        value_delimiter = ',',
        value_name = "PROTOCOL",
        env = "DATAPLANE_DESTROY_STALE",
        hide_env_values = true
    )]
    pub destroy_stale: Vec<Stale>,

    /// The log, on standard error.
    #[serde(skip_serializing_if = "is_default")]
    #[command(flatten)]
    pub log: Log,

    /// What to take this node for.
    #[serde(skip_serializing_if = "is_default")]
    #[command(flatten)]
    pub node: Node,

    /// Where the agent answers questions. TCP addresses are ADDRESS:PORT, or `off`.
    #[serde(skip_serializing_if = "is_default")]
    #[command(flatten)]
    pub listen: Listeners,

    /// Packets that no socket of ours decided on: of clients outside of the cluster, and of pods
    /// that are VMs.
    #[serde(skip_serializing_if = "is_default")]
    #[command(flatten)]
    pub packets: Packets,

    /// Whose TCP connections go to a proxy [default: nobody's]
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub mesh: Option<Mesh>,

    /// Where the kernel's side of things is, and sysctls.
    #[serde(skip_serializing_if = "is_default")]
    #[command(flatten)]
    pub kernel: Kernel,

    /// How far the tables may grow. They start small and grow while they serve.
    #[serde(skip_serializing_if = "is_default")]
    #[command(flatten)]
    pub limits: Limits,
}

/// What becomes of the programs when the agent ends.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum OnExit {
    /// They go on, from the tables as they are: services stay up while the agent is restarted
    #[default]
    Keep,
    /// They are removed with everything else of ours: services stop
    Detach,
}

/// Of which protocol to destroy stale sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Stale {
    /// UDP: a client that sends to an address that nobody has would wait for its own timeouts
    Udp,
    /// TCP: an endpoint that is not ready may still answer the connections that it has
    Tcp,
    /// None of them
    None,
}

/// The log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Log {
    /// How to write the log, on standard error [default: text]
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        id = "log-format",
        long,
        value_enum,
        value_name = "FORMAT",
        env = "DATAPLANE_LOG_FORMAT",
        hide_env_values = true
    )]
    pub format: Option<LogFormat>,
    /// How much of it [default: info]. RUST_LOG is finer
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub level: Option<LogLevel>,
}

/// How to write the log.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people
    #[default]
    Text,
    /// One JSON object a line
    Json,
}

/// How much is logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// What an operator wants to know.
    #[default]
    Info,
    /// Also why.
    Debug,
    /// Everything.
    Trace,
}

impl Settings {
    /// Of which protocols to destroy stale sockets.
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
