//! The identity of this node.

use clap::Args;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    ExternalIps, Range, is_default,
    range::{one_or_several, one_or_several_schema},
};

/// The identity of this node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[command(next_help_heading = "This node")]
pub struct Node {
    /// Name of this node, as in the endpoints' `nodeName` [default: NODE_NAME, or the host name]
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        id = "node-name",
        long,
        value_name = "NAME",
        env = "DATAPLANE_NODE_NAME"
    )]
    pub name: Option<String>,
    /// Answer node ports at the node's addresses in these ranges [default: the primary addresses]
    ///
    /// Primary are the addresses in the Node object or, without them, the first addresses of the interface
    /// with the default route. The agent always answers node ports at loopback too, for the node's own
    /// processes.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        id = "nodeport-addresses",
        long,
        value_name = "CIDR",
        num_args = 1..,
        value_delimiter = ',',
        env = "DATAPLANE_NODEPORT_ADDRESSES",
    )]
    pub node_port_addresses: Vec<Range>,
    /// Serve `externalIPs` of Services and addresses of ServiceEntries only in these ranges, or `none`. Default: all.
    ///
    /// `dataplane status` names the external IPs that are left out. Kubernetes' admission plugin
    /// `DenyServiceExternalIPs` forbids new external IPs and leaves existing ones.
    #[serde(
        skip_serializing_if = "is_default",
        deserialize_with = "one_or_several"
    )]
    #[schemars(schema_with = "one_or_several_schema")]
    #[arg(skip)]
    #[serde(rename = "externalIPs")]
    pub external_ips: Vec<ExternalIps>,
    /// Ports of the node at which no `hostPort`, no node port and no external IP is served, besides the agent's own.
    /// Default: none.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub reserved_ports: Vec<u16>,
    /// Zone of this node, which selects the endpoints with hints for this zone [default: the label
    /// topology.kubernetes.io/zone of the Node object]
    #[serde(skip_serializing_if = "is_default")]
    #[arg(long, value_name = "ZONE", env = "DATAPLANE_ZONE")]
    pub zone: Option<String>,
}
