//! What to take this node for.

use clap::Args;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Range, is_default};

/// What to take this node for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[command(next_help_heading = "This node")]
pub struct Node {
    /// Its name, as in the endpoints' `nodeName` [default: NODE_NAME, or its host name]
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        id = "node-name",
        long,
        value_name = "NAME",
        env = "DATAPLANE_NODE_NAME",
        hide_env_values = true
    )]
    pub name: Option<String>,
    /// Answer node ports on the addresses in these ranges [default: the node's primary addresses,
    /// those of the interface with the default route]
    ///
    /// Loopback is always answered, for the node's own processes.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        id = "nodeport-addresses",
        long,
        value_name = "CIDR",
        num_args = 1..,
        value_delimiter = ',',
        env = "DATAPLANE_NODEPORT_ADDRESSES",
        hide_env_values = true
    )]
    pub node_port_addresses: Vec<Range>,
    /// Its zone, for endpoints that are hinted to zones [default: the label
    /// topology.kubernetes.io/zone of its Node object]
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        long,
        value_name = "ZONE",
        env = "DATAPLANE_ZONE",
        hide_env_values = true
    )]
    pub zone: Option<String>,
}
