//! This node, as it is now.

use std::{collections::BTreeSet, fs, io, net::IpAddr};

use model::{Ephemeral, Node};
use source::{ExternalIps, objects::NodeFacts};

use super::addresses;

/// Returns this node, with the facts in its Node object if they are known.
///
/// # Errors
/// If the kernel does not return its name or its addresses.
pub fn of(settings: &settings::Node, facts: Option<&NodeFacts>) -> io::Result<Node> {
    match facts {
        Some(facts) => Ok(facts.applied_to(&primary(settings, &facts.addresses)?)),
        None => primary(settings, &[]),
    }
}

/// This node as it knows itself. `told`: the addresses in its Node object.
fn primary(settings: &settings::Node, told: &[IpAddr]) -> io::Result<Node> {
    let given = settings.name.as_deref().filter(|name| !name.is_empty());
    let name = match given {
        Some(name) => name.to_owned(),
        // Like the kubelet: host names are not case sensitive, node names are.
        None => nix::unistd::gethostname()?.to_string_lossy().to_lowercase(),
    };
    let ranges: Vec<_> = settings
        .node_port_addresses
        .iter()
        .map(|range| range.0)
        .collect();
    let of_node = addresses::of_node(&ranges, told)?;
    let (addresses, addresses_from) = of_node.for_node_ports.into_iter().unzip();
    Ok(Node {
        name: name.into(),
        addresses,
        addresses_from,
        own: of_node.own.into_iter().collect(),
        ephemeral: ephemeral_ports()?,
        listens: BTreeSet::new(),
        zone: settings.zone.as_deref().unwrap_or_default().into(),
        region: std::sync::Arc::default(),
        subzone: std::sync::Arc::default(),
        network: std::sync::Arc::default(),
        leaving: None,
        name_given: given.is_some(),
    })
}

/// The ports that this network namespace assigns to sockets that ask for none.
///
/// # Errors
/// If the kernel does not return them.
pub fn ephemeral_ports() -> io::Result<Ephemeral> {
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")?;
    let reserved = fs::read_to_string("/proc/sys/net/ipv4/ip_local_reserved_ports")?;
    Ephemeral::read(&range, &reserved).ok_or_else(|| {
        io::Error::other(format!(
            "cannot read the ephemeral ports: net.ipv4.ip_local_port_range is `{}`; expected two numbers",
            range.trim()
        ))
    })
}

/// The external IPs that the operator admits.
pub fn external_ips(settings: &settings::Node) -> ExternalIps {
    let said = &settings.external_ips;
    if said.is_empty() {
        return ExternalIps::Any;
    }
    ExternalIps::Within(said.iter().filter_map(|ips| ips.0).collect())
}
