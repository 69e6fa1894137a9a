//! The packet path, for clients without a socket on this node.

use clap::{Args, ValueEnum};
use model::Order;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{FlowTimeouts, Pattern, Range, is_default};

/// The packet path, for clients without a socket on this node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[command(next_help_heading = "Packet path (clients outside the cluster, and pods that are VMs)")]
pub struct Packets {
    /// How packets of services go through the node [default: auto]
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        id = "packet-path",
        long,
        value_enum,
        value_name = "PATH",
        env = "DATAPLANE_PACKET_PATH"
    )]
    pub path: Option<PacketPath>,
    /// Whether connections that belong to no service, such as those between pods, bypass the node's network stack, too, where
    /// `path: auto` chooses `fast`. Default: true.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub bypass: Option<bool>,
    /// Interfaces that lead to other machines: names or shell patterns; `!` excludes. Default: interfaces with a
    /// default route or an address, except pods' interfaces, bridges and dummies.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub uplinks: Vec<Pattern>,
    /// The node's ends of pods' interfaces: names or shell patterns; `!` excludes. Default: every veth and netkit
    /// with its other end in another network namespace, and without a default route and a network of its own.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub pod_interfaces: Vec<Pattern>,
    /// Pods' interfaces at which sources are not checked, because their pods route for others: names or shell
    /// patterns; `!` excludes. Default: none.
    ///
    /// For VPN servers, subnet routers and gateways in pods, whose packets to services come from addresses that are
    /// not the pod's. Such a pod can speak through services as any other pod or host, but not as the node.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub no_source_check: Vec<Pattern>,
    /// Pods' interfaces whose pods are served by packets only, not at their sockets: names or shell patterns; `!`
    /// excludes. Default: pods with NAT rules of their own, and network namespaces nested in pods.
    ///
    /// The rules of such a pod see the VIP, as with kube-proxy. Use it for pods with rules that the agent cannot find.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub packets_only: Vec<Pattern>,
    /// Ranges of pods' addresses: masquerade clients with other addresses on the way to a cluster IP
    /// [default: masquerade no client there]
    ///
    /// Corresponds to kube-proxy's detectLocalMode ClusterCIDR and NodeCIDR.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        id = "pod-cidr",
        long,
        value_name = "CIDR",
        num_args = 1..,
        value_delimiter = ',',
        env = "DATAPLANE_POD_CIDR",
    )]
    pub pod_cidrs: Vec<Range>,
    /// Masquerade clients on the way to a cluster IP if their packets do not arrive at a pod's interface. Default:
    /// false.
    ///
    /// Corresponds to kube-proxy's detectLocalMode BridgeInterface and InterfaceNamePrefix.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub pods_by_interface: bool,
    /// Masquerade every connection to a cluster IP. Default: false.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub masquerade_all: bool,
    /// Position of the agent's programs among other programs on an interface. Default: first.
    ///
    /// `first`: no other program can hide a service. Most programs end the chain for packets that they allow.
    /// `last`: other programs see packets to a service before the translation, and may drop them.
    /// `first` and `last` count at the time of attachment.
    /// `before:NAME` and `after:NAME`: directly next to the program with this name, also if that program is
    /// attached later (TCX only). `program:ID` or `link:ID` names the program by the kernel's number.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub order: Option<Order>,
    /// How the agent attaches its programs to interfaces [default: auto]
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        id = "tc-hook",
        long,
        value_enum,
        value_name = "HOOK",
        env = "DATAPLANE_TC_HOOK"
    )]
    pub hook: Option<TcHook>,
    /// Number of flows that conntrack has room for, rounded up to a power of two. Default: by cores and memory.
    ///
    /// Each flow takes 176 bytes of kernel memory. The default is 32 768 for each core and at least 131 072
    /// (22 MiB), but the tables take at most a 64th of the node's memory, and at most a quarter of the memory
    /// limit of the agent's own cgroup. Existing tables keep their size until `dataplane cleanup`
    /// or an agent with `path: off` removes them.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(range(min = 1024, max = 8_388_608))]
    #[arg(skip)]
    pub conntrack_flows: Option<u32>,
    /// How long flows are kept after their last packet, by their state
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub timeouts: FlowTimeouts,
}

/// How packets of services go through the node.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum PacketPath {
    /// `stack` if rules, IPsec policies or routing rules of others must see the packets, otherwise `fast`
    #[default]
    #[value(alias = "on")]
    Auto,
    /// Past netfilter and IPsec, from interface to interface
    Fast,
    /// Through the node's network stack, with netfilter, IPsec and routing rules
    Stack,
    /// Not at all: the agent serves only sockets of this node's processes, and removes the tables of flows
    Off,
}

/// How the agent attaches programs to interfaces.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum TcHook {
    /// TCX if the kernel has it (Linux 6.6), otherwise clsact
    #[default]
    Auto,
    /// TCX links, which run before all filters of clsact qdiscs
    Tcx,
    /// Filters of a clsact qdisc
    Clsact,
}
