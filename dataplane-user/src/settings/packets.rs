//! Packets that no socket of ours decided on.

use clap::{
    Args, ValueEnum,
    builder::{PossibleValuesParser, TypedValueParser as _},
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Pattern, Range, is_default};
use crate::kernel::{Hook, Order};

/// Packets that no socket of ours decided on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[command(
    next_help_heading = "Packet path (clients outside of the cluster, and pods that are VMs)"
)]
pub struct Packets {
    /// Whether packets are translated too, by programs on the node's interfaces [default: on]; off:
    /// only what the sockets of this node's processes do
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        id = "packet-path",
        long,
        value_name = "ON|OFF",
        env = "DATAPLANE_PACKET_PATH",
        hide_env_values = true,
        value_parser = PossibleValuesParser::new(["on", "off"]).map(|word| word == "on")
    )]
    pub enabled: Option<bool>,
    /// The interfaces by which the rest of the world is reached: names or patterns, `!` excludes
    /// [default: those with a default route or an address, without pods' sides, bridges and
    /// dummies]
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        id = "uplink",
        long,
        value_name = "PATTERN",
        num_args = 1..,
        value_delimiter = ',',
        env = "DATAPLANE_UPLINK",
        hide_env_values = true
    )]
    pub uplinks: Vec<Pattern>,
    /// The node's ends of the pairs whose other ends are in pods: names or patterns, `!` excludes
    /// [default: every veth and netkit with its other end in another network namespace, and with no
    /// default route and no network of its own]
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        id = "pod-interface",
        long,
        value_name = "PATTERN",
        num_args = 1..,
        value_delimiter = ',',
        env = "DATAPLANE_POD_INTERFACE",
        hide_env_values = true
    )]
    pub pod_interfaces: Vec<Pattern>,
    /// Whoever has an address in these networks is a pod; others are masqueraded on the way to a
    /// cluster IP (kube-proxy's detectLocalMode ClusterCIDR and NodeCIDR) [default: nobody is]
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        id = "pod-cidr",
        long,
        value_name = "CIDR",
        num_args = 1..,
        value_delimiter = ',',
        env = "DATAPLANE_POD_CIDR",
        hide_env_values = true,
        conflicts_with = "pods-by-interface"
    )]
    pub pod_cidrs: Vec<Range>,
    /// Whoever sends from a pod's interface is a pod; others are masqueraded on the way to a cluster
    /// IP (kube-proxy's detectLocalMode BridgeInterface and InterfaceNamePrefix)
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        id = "pods-by-interface",
        long,
        env = "DATAPLANE_PODS_BY_INTERFACE",
        hide_env_values = true
    )]
    pub pods_by_interface: bool,
    /// Masquerade whatever goes to a cluster IP
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        id = "masquerade-all",
        long,
        env = "DATAPLANE_MASQUERADE_ALL",
        hide_env_values = true
    )]
    pub masquerade_all: bool,
    /// Where our programs go among other people's on an interface [default: first]
    ///
    /// First: a program that ends the chain, as most do for packets they let pass, hides no service.
    /// Last: others see, and may drop, what clients send to a service before it is translated.
    /// Whoever comes later may still go before ours. `before:NAME`, `after:NAME`: next to the program with that name, also
    /// if it comes later (TCX only). `program:ID` or `link:ID` in place of the name: by the kernel's number.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        id = "tc-order",
        long,
        value_name = "first|last|before:NAME|after:NAME",
        env = "DATAPLANE_TC_ORDER",
        hide_env_values = true
    )]
    pub order: Option<Order>,
    /// How our programs are put on interfaces [default: auto]
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        id = "tc-hook",
        long,
        value_enum,
        value_name = "HOOK",
        env = "DATAPLANE_TC_HOOK",
        hide_env_values = true
    )]
    pub hook: Option<TcHook>,
    /// How many flows conntrack has room for, rounded up to a power of two: 176 bytes of kernel memory each. Taken
    /// when the tables are made; those of an earlier agent keep their size until `dataplane cleanup`, or until an
    /// agent runs with --packet-path off [default: 32 768 for each of the node's cores, at least 131 072 (22 MiB),
    /// but at most what takes a 64th of the node's memory]
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(range(min = 1024, max = 8_388_608))]
    #[arg(
        id = "conntrack-flows",
        long,
        value_name = "N",
        env = "DATAPLANE_CONNTRACK_FLOWS",
        hide_env_values = true,
        value_parser = clap::value_parser!(u32).range(1024..=8_388_608)
    )]
    pub conntrack_flows: Option<u32>,
}

/// How programs are put on interfaces.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum TcHook {
    /// TCX if the kernel has it (Linux 6.6), otherwise clsact
    #[default]
    Auto,
    /// Links, which run before all filters of clsact qdiscs
    Tcx,
    /// Filters of a clsact qdisc
    Clsact,
}

impl TcHook {
    /// The hook that is asked for; `None`: the best that the kernel has.
    pub fn wanted(self) -> Option<Hook> {
        match self {
            Self::Auto => None,
            Self::Tcx => Some(Hook::Tcx),
            Self::Clsact => Some(Hook::Clsact),
        }
    }
}
