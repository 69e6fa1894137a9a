//! The facts about the node's network that the packet path gets.

use std::{collections::BTreeMap, io};

use dataplane_common::packet::{Iface, PacketConfig, SourceKey};
use ipnet::IpNet;
use kernel::{interfaces::Interface, packet::Network};
use nix::sys::utsname::uname;
use plan::source_key;

use super::{earlier::Earlier, interfaces::PacketSettings};

/// Returns the settings and the kernel's facts, for the node's interfaces, with their history.
///
/// # Errors
/// If the kernel does not return them.
pub fn network(
    settings: &PacketSettings,
    interfaces: &[Interface],
    earlier: &Earlier,
) -> Result<Network, kernel::Error> {
    if settings.attach.is_none() {
        return Ok(Network::default());
    }
    let preemptible = is_preemptible()?;
    // Ways are cached for each CPU, and with preemption no program has its CPU to itself.
    let by_address = !preemptible && kernel::interfaces::ways_by_address();
    let network = settings.network(interfaces, earlier, by_address);
    let mut network = network.map_err(|source| kernel::Error::Io {
        what: "cannot find out the host's ephemeral ports".to_owned(),
        source,
    })?;
    let mut uplinks = BTreeMap::new();
    for interface in interfaces {
        if let Some(known) = network.interfaces.get(&interface.index)
            && known.flags & Iface::LOCAL == 0
        {
            uplinks.insert(
                interface.index,
                kernel::routing::reverse_path(&interface.name),
            );
        }
    }
    let shown =
        !uplinks.values().any(|asked| *asked == 1) || kernel::routing::shows_reverse_paths()?;
    for (index, asked) in uplinks {
        if let Some(known) = network.interfaces.get_mut(&index) {
            known.flags |= match asked {
                0 => 0,
                1 if shown => Iface::STRICT,
                _ => Iface::LOOSE,
            };
        }
    }
    if preemptible {
        network.config.flags |= PacketConfig::PREEMPTIBLE;
    }
    network.config.errors = kernel::packet::error_limits();
    network.policies = kernel::routing::ipsec_policies()?;
    let host = kernel::routing::host_networks()?.into_iter();
    network.host = host.map(|net| source_key(SourceKey::HOST, &net)).collect();
    for bridge in interfaces.iter().filter(|known| known.kind == "bridge") {
        let known = network.interfaces.get(&bridge.index);
        if known.is_none_or(|known| known.flags & Iface::ATTACHED == 0) {
            let own = bridge.addresses.iter().map(IpNet::addr);
            let own = own.map(|addr| SourceKey::host(SourceKey::BRIDGES, addr.into()));
            network.host.extend(own);
        }
    }
    Ok(network)
}

/// Whether the kernel may preempt programs in their middle: a kernel with `PREEMPT_RT`, according to its version
/// (`UTS_VERSION` in `init/Makefile`). Such a kernel may also take a lock while softirqs are off, and then does not
/// preempt programs, but it does not report that.
fn is_preemptible() -> Result<bool, kernel::Error> {
    let name = uname().map_err(|source| kernel::Error::Io {
        what: "cannot ask for the kernel's version".to_owned(),
        source: io::Error::from(source),
    })?;
    let version = name.version().to_string_lossy();
    Ok(version.split_whitespace().any(|word| word == "PREEMPT_RT"))
}
