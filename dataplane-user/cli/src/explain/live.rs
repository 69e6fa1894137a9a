//! What an explanation reads.

use std::path::Path;

use kernel::{conntrack::Conntrack, packet::PacketTables, tables::Tables};

use super::capture::Mesh;

/// The live tables.
pub struct Live<'a> {
    pub tables: &'a Tables,
    pub packet: &'a PacketTables,
    pub conntrack: &'a Conntrack,
    /// Why packets of services go through the stack, if the agent says it.
    pub stack_because: Option<String>,
    /// `None`: there is no mesh on this node.
    pub mesh: Option<&'a Mesh>,
    /// The directory with the tables.
    pub bpffs: &'a Path,
}
