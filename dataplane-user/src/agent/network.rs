//! What the packet path is told of the node's network.

use dataplane_common::packet::SourceKey;

use super::interfaces::PacketSettings;
use crate::{
    kernel::{self, Interface, Network},
    plan::source_key,
};

/// What the kernel and the settings say, given the node's interfaces.
///
/// # Errors
/// If the kernel does not tell.
pub fn network(
    settings: &PacketSettings,
    interfaces: &[Interface],
) -> Result<Network, kernel::Error> {
    if settings.attach.is_none() {
        return Ok(Network::default());
    }
    let network = settings.network(interfaces, kernel::ways_by_address());
    let mut network = network.map_err(|source| kernel::Error::Io {
        what: "cannot find out the host's ephemeral ports".to_owned(),
        source,
    })?;
    let host = kernel::host_networks()?.into_iter();
    network.host = host.map(|net| source_key(SourceKey::HOST, &net)).collect();
    Ok(network)
}
