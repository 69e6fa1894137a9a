//! The configuration file: what `dataplane run` is told by flags, in YAML.
//!
//! Every key is a flag's, and the flag (or its variable in the environment) overrides it. The types
//! here are the schema, too: `dataplane config schema` prints it, with these comments.

mod keys;
mod kube_proxy;
mod mesh;
mod read;

pub use keys::{Argument, schema};
pub use kube_proxy::{Imported, NotImported, import};
pub use mesh::{
    Mesh, MeshAcceleration, MeshCapturedBy, MeshEgress, MeshMode, MeshNamespace, MeshProxy,
    MeshRules, MeshWithoutProxy, MeshWorkload,
};
pub use read::{parse, read};

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    str::FromStr,
};

use ipnet::IpNet;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::settings::NfConntrack;

/// Configuration of the agent. Everything has a default but `source`; flags and environment
/// variables override what is written here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[schemars(title = "Configuration of the dataplane agent")]
pub struct Config {
    /// Where the services come from: one of its keys.
    #[serde(skip_serializing_if = "is_default")]
    pub source: Source,
    /// What to take this node for.
    #[serde(skip_serializing_if = "is_default")]
    pub node: Node,
    /// What becomes of the programs when the agent ends. Default: keep.
    #[serde(skip_serializing_if = "is_default")]
    pub on_exit: Option<OnExit>,
    /// Take the place of the agent that runs on this node, if one does, instead of saying that it
    /// runs. Default: false.
    #[serde(skip_serializing_if = "is_default")]
    pub replace: bool,
    /// Stay, idle, when another agent has taken this one's place, and take it back when that one is gone: for
    /// those who start again whatever ends. Default: false.
    #[serde(skip_serializing_if = "is_default")]
    pub stay: bool,
    /// Of which protocols to destroy sockets that are connected through a service to an endpoint
    /// that is gone, so that their processes connect anew at once. Default: udp.
    #[serde(skip_serializing_if = "is_default")]
    pub destroy_stale: Vec<Stale>,
    /// The log, on standard error.
    #[serde(skip_serializing_if = "is_default")]
    pub log: Log,
    /// Where the agent answers questions. TCP addresses are ADDRESS:PORT, or `off`.
    #[serde(skip_serializing_if = "is_default")]
    pub listen: Listeners,
    /// Packets that no socket of ours decided on: of clients outside of the cluster, and of pods
    /// that are VMs.
    #[serde(skip_serializing_if = "is_default")]
    pub packets: Packets,
    /// Whose TCP connections go to a proxy. Default: nobody's.
    #[serde(skip_serializing_if = "is_default")]
    pub mesh: Option<Mesh>,
    /// Where the kernel's side of things is, and sysctls.
    #[serde(skip_serializing_if = "is_default")]
    pub kernel: Kernel,
    /// How far the tables may grow. They start small and grow while they serve.
    #[serde(skip_serializing_if = "is_default")]
    pub limits: Limits,
}

/// Where the services come from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Source {
    /// Files or directories with Services and EndpointSlices, as `kubectl get
    /// services,endpointslices -A -o yaml` prints them.
    #[serde(skip_serializing_if = "is_default")]
    pub manifests: Vec<PathBuf>,
    /// The Kubernetes API; `{}` is enough in a pod.
    #[serde(skip_serializing_if = "is_default")]
    pub kubernetes: Option<Kubernetes>,
}

/// The Kubernetes API.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Kubernetes {
    /// A kubeconfig, whose current context is used. Default: the pod's service account.
    #[serde(skip_serializing_if = "is_default")]
    pub kubeconfig: Option<PathBuf>,
    /// The API server's URL, rather than the one in the kubeconfig or in the pod's environment.
    /// The latter is an address that a service proxy has to serve: where this agent is the only
    /// one, give the server's own address or that of a load balancer before it.
    #[serde(skip_serializing_if = "is_default")]
    pub api_server: Option<String>,
}

/// What to take this node for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Node {
    /// Its name, as in the endpoints' `nodeName`. Default: its host name.
    #[serde(skip_serializing_if = "is_default")]
    pub name: Option<String>,
    /// Its zone, for endpoints that are hinted to zones. Default: the label
    /// topology.kubernetes.io/zone of its Node object.
    #[serde(skip_serializing_if = "is_default")]
    pub zone: Option<String>,
    /// Answer node ports on the addresses in these ranges. Default: the node's primary addresses.
    /// Loopback is always answered, for the node's own processes.
    #[serde(skip_serializing_if = "is_default")]
    pub node_port_addresses: Vec<Range>,
}

/// Of which protocol to destroy stale sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Stale {
    /// UDP.
    Udp,
    /// TCP.
    Tcp,
    /// None of them.
    None,
}

/// What becomes of the programs when the agent ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnExit {
    /// They go on, from the tables as they are: services stay up while the agent is restarted.
    Keep,
    /// They are removed with everything else of ours: services stop.
    Detach,
}

/// The log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Log {
    /// How it is written. Default: text.
    #[serde(skip_serializing_if = "is_default")]
    pub format: Option<LogFormat>,
    /// How much of it. Default: info. RUST_LOG is finer.
    #[serde(skip_serializing_if = "is_default")]
    pub level: Option<LogLevel>,
}

/// How the log is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// How much is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// What an operator wants to know.
    Info,
    /// Also why.
    Debug,
    /// Everything.
    Trace,
}

/// Where the agent answers questions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Listeners {
    /// The Unix socket that `dataplane status` and the other commands ask. Default:
    /// /run/dataplane/agent.sock.
    #[serde(skip_serializing_if = "is_default")]
    pub socket: Option<PathBuf>,
    /// Prometheus metrics, at /metrics. Default: 0.0.0.0:15020.
    #[serde(skip_serializing_if = "is_default")]
    pub metrics: Option<Listen>,
    /// Readiness, at /healthz/ready, and liveness, at /healthz/live. Default: 0.0.0.0:15021.
    #[serde(skip_serializing_if = "is_default")]
    pub health: Option<Listen>,
    /// For load balancers and probes, as kube-proxy answers them: /healthz and /livez. Default:
    /// 0.0.0.0:10256.
    #[serde(skip_serializing_if = "is_default")]
    pub healthz: Option<Listen>,
    /// What tools ask kube-proxy to find out its mode: /proxyMode. Default: 127.0.0.1:10249.
    #[serde(skip_serializing_if = "is_default")]
    pub proxy_mode: Option<Listen>,
    /// What the Unix socket shows, over TCP. Default: 127.0.0.1:15000.
    #[serde(skip_serializing_if = "is_default")]
    pub admin: Option<Listen>,
}

/// Packets that no socket of ours decided on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Packets {
    /// Whether they are translated, by programs on the node's interfaces. Default: true.
    #[serde(skip_serializing_if = "is_default")]
    pub enabled: Option<bool>,
    /// The interfaces by which the rest of the world is reached: names or patterns such as eth*; !
    /// excludes. Default: found out.
    #[serde(skip_serializing_if = "is_default")]
    pub uplinks: Vec<String>,
    /// The node's ends of the pairs whose other ends are in pods, likewise. Default: found out.
    #[serde(skip_serializing_if = "is_default")]
    pub pod_interfaces: Vec<String>,
    /// Whoever has an address in these ranges is a pod; others are masqueraded on the way to a
    /// cluster IP. Default: nobody is masqueraded there.
    #[serde(skip_serializing_if = "is_default")]
    pub pod_cidrs: Vec<Range>,
    /// Whoever sends from a pod's interface is a pod, instead. Default: false.
    #[serde(skip_serializing_if = "is_default")]
    pub pods_by_interface: bool,
    /// Masquerade whatever goes to a cluster IP. Default: false.
    #[serde(skip_serializing_if = "is_default")]
    pub masquerade_all: bool,
    /// Where our programs go among other people's on an interface: first, last, before:NAME or after:NAME. Default: first.
    #[serde(skip_serializing_if = "is_default")]
    pub order: Option<String>,
    /// How our programs are put on interfaces. Default: auto.
    #[serde(skip_serializing_if = "is_default")]
    pub hook: Option<Hook>,
    /// How many flows conntrack has room for. Default: by the node's cores and memory.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(range(min = 1024, max = 8_388_608))]
    pub conntrack_flows: Option<u32>,
}

/// How programs are put on interfaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Hook {
    /// TCX if the kernel has it (Linux 6.6), otherwise clsact.
    Auto,
    /// Links, which run before all filters of clsact qdiscs.
    Tcx,
    /// Filters of a clsact qdisc.
    Clsact,
}

/// Where the kernel's side of things is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Kernel {
    /// Directory for pinned programs and tables, on a BPF file system. Default:
    /// /sys/fs/bpf/dataplane.
    #[serde(skip_serializing_if = "is_default")]
    pub bpffs: Option<PathBuf>,
    /// Directory of the cgroup v2 whose processes are served. Default: the root, wherever it is
    /// mounted.
    #[serde(skip_serializing_if = "is_default")]
    pub cgroup: Option<PathBuf>,
    /// Sysctls of the kernel's own conntrack (net.netfilter.nf_conntrack_…), which the agent sets and
    /// keeps. Default: it leaves them alone.
    #[serde(skip_serializing_if = "is_default")]
    pub conntrack: NfConntrack,
}

/// How far the tables may grow.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Limits {
    /// At most so many VIP ports, cluster addresses and node ports together. Default: 2097152.
    #[serde(skip_serializing_if = "is_default")]
    pub frontends: Option<u32>,
    /// At most so many endpoint slots. Default: 4194304.
    #[serde(skip_serializing_if = "is_default")]
    pub endpoints: Option<u32>,
    /// Remember the endpoints of at most so many clients of services with session affinity. Default: 131072.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(range(min = 1024, max = 16_777_216))]
    pub affinity_clients: Option<u32>,
}

impl Config {
    /// As a file would have it.
    pub fn to_yaml(&self) -> String {
        // Nothing in it fails to be written: no maps with keys that are no strings, no bytes.
        serde_saphyr::to_string(self).unwrap_or_default()
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A TCP address to listen on, or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Listen(#[schemars(with = "String")] pub Option<SocketAddr>);

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(Self(None));
        }
        text.parse().map(|addr| Self(Some(addr))).map_err(|_| {
            format!("`{text}` is not an address and port; expected ADDRESS:PORT such as 127.0.0.1:15000 or [::1]:15000, or `off`")
        })
    }
}

impl TryFrom<String> for Listen {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Listen> for String {
    fn from(listen: Listen) -> Self {
        listen
            .0
            .map_or_else(|| "off".to_owned(), |addr| addr.to_string())
    }
}

/// A range of addresses: ADDRESS/LENGTH.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Range(#[schemars(with = "String")] pub IpNet);

impl TryFrom<String> for Range {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let range = text
            .parse()
            .or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
        range.map(Self).map_err(|_| {
            format!(
                "`{text}` is not a range of addresses; expected one like 10.0.0.0/8 or fd00::/64, or an address"
            )
        })
    }
}

impl From<Range> for String {
    fn from(range: Range) -> Self {
        range.0.to_string()
    }
}
