//! The flows that the kernel's own conntrack translates: the packet path leaves them alone.

use std::{cell::OnceCell, collections::HashSet, io, path::Path};

use dataplane_common::{Addr, Port, Protocol, packet::FlowKey};
use kernel::{
    conntrack::{Conntrack, Listed},
    nf_conntrack,
};
use model::Snapshot;
use tracing::warn;

/// The flows of the kernel's own conntrack that are recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Imported {
    /// UDP flows whose packets are left alone.
    pub flows: usize,
    /// Ports of the node that no flow of ours gets.
    pub ports: usize,
}

/// Imports the UDP flows that the kernel's own conntrack translates for `is_vip`, so that the packet path leaves them alone; and the
/// ports from which it masquerades connections to endpoints of the snapshot ([`hold_ports`]).
///
/// # Errors
/// If the kernel does not return them.
pub fn import(
    bpffs: &Path,
    snapshot: &Snapshot,
    is_vip: impl Fn(Addr, Port, Protocol) -> bool,
) -> Result<Imported, kernel::Error> {
    let Some(conntrack) = Conntrack::open(bpffs)? else {
        return Ok(Imported::default());
    };
    let cannot_ask = |source| kernel::Error::Io {
        what: "cannot ask the kernel's own conntrack for its flows".to_owned(),
        source,
    };
    let flows = nf_conntrack::translated_udp().map_err(cannot_ask)?;
    let listed = hold_ports(&conntrack, snapshot).map_err(cannot_ask)?;
    let mut imported = Imported {
        flows: 0,
        ports: listed.ports.len(),
    };
    for flow in flows {
        let FlowKey {
            dst,
            dst_port,
            protocol,
            ..
        } = flow.key;
        if is_vip(dst, dst_port, protocol) && conntrack.add_foreign(flow.key, flow.endpoint) {
            imported.flows += 1;
        }
    }
    Ok(imported)
}

/// Holds the ports from which the kernel's own conntrack masquerades connections to endpoints of the snapshot:
/// connections that rules translated before the agent came, and others that still begin, for example by the rules of a
/// network plug-in. Otherwise a flow of ours could get one of these ports, and the endpoint would treat both as one
/// connection.
///
/// These ports take at most half of the room for flows.
pub fn hold_ports(conntrack: &Conntrack, snapshot: &Snapshot) -> io::Result<Listed> {
    let asked = kernel::conntrack::now();
    let most = conntrack.capacity() as usize / 2;
    // Most nodes masquerade their pods' connections to the outside, and many nodes masquerade nothing.
    let endpoints = OnceCell::new();
    let is_endpoint = |key: &FlowKey| {
        let endpoints = endpoints.get_or_init(|| endpoints_of(snapshot));
        endpoints.contains(&(key.dst, key.dst_port)) || conntrack.holds_port(key)
    };
    let (ports, are_more) = nf_conntrack::masqueraded(most, is_endpoint)?;
    if are_more {
        warn!(
            "the kernel's conntrack masquerades more than {most} connections to endpoints; the packet path does not know the ports of \
             the others, and may give them to its own flows; raise packets.conntrackFlows"
        );
    }
    for key in &ports {
        conntrack.hold_port(*key);
    }
    Ok(Listed { ports, asked })
}

/// Every endpoint that a flow may go to.
fn endpoints_of(snapshot: &Snapshot) -> HashSet<(Addr, Port)> {
    let ports = snapshot
        .services
        .values()
        .flat_map(|service| &service.ports);
    ports
        .flat_map(|port| &port.endpoints)
        .map(|endpoint| (Addr::from(endpoint.addr), Port::new(endpoint.port)))
        .collect()
}

/// The flows that the kernel's own conntrack translates; none if they cannot be read.
pub fn foreign() -> Option<HashSet<FlowKey>> {
    match nf_conntrack::translated_udp() {
        Ok(flows) => Some(flows.into_iter().map(|flow| flow.key).collect()),
        Err(error) => {
            warn!(
                "cannot ask the kernel's own conntrack for its flows, so that those which are over stay in the \
                 table: {error}; trying again"
            );
            None
        }
    }
}
