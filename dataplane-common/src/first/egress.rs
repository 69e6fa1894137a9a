//! The egress policy of workloads, for the first packet of a flow.

use crate::{
    Addr, Protocol,
    capture::{self, CAPTURED, Enrolled, Local, MESH_DENIES, REACHABLE},
    packet::FlowKey,
    tables::{Block, Endpoint, FrontendKey},
};

/// The tables of mesh capture: the kernel's own, or a copy in user space.
pub trait Workloads: capture::Rules {
    /// Returns the word `mesh` of [`crate::tables::Config`].
    fn mesh(&self) -> u64;
    /// Returns the workload at an address.
    fn local(&self, addr: Addr) -> Option<Local>;
    /// Whether `KNOWN` has a destination.
    fn has(&self, to: &FrontendKey) -> bool;
}

/// Whether a destination that does not belong to a service is an endpoint of a service of Pods, or stated by the operator.
#[inline(always)]
pub fn is_known<T: Workloads>(tables: &T, to: &FrontendKey) -> bool {
    tables.has(to) || tables.range(REACHABLE, to.addr) == CAPTURED
}

/// The workload that sends a packet, if its egress is denied, and whether its rules exempt the destination.
#[inline(always)]
fn denied<T: Workloads>(tables: &T, key: &FlowKey) -> Option<(Local, bool)> {
    if tables.mesh() & MESH_DENIES == 0 {
        return None;
    }
    let local = tables.local(key.src)?;
    let denies = Enrolled::CAPTURED | Enrolled::EGRESS_DENY;
    if local.flags & denies != denies {
        return None;
    }
    // Datagrams of a workload that is captured by packets are judged at sockets only. Whether a rule excludes the user or
    // group of a socket is not seen here, so such a rule exempts nothing: a packet that it would exempt is refused, because
    // another user's packet looks the same.
    if local.is_by_packets() && key.protocol != Protocol::TCP {
        return None;
    }
    let (to, port) = (key.dst, key.dst_port);
    let (reason, is_judged) = capture::outbound(tables, &local.enrolled(), to, port, false);
    let is_exempt = capture::is_exempt(reason, is_judged);
    (is_judged || is_exempt).then_some((local, is_exempt))
}

/// Whether a workload's packet to a service may go to an endpoint of the service's block. The packet path asks when it has the
/// block from which it draws. The programs at sockets, or before the packet path, judged by an earlier look at the same
/// tables, and the service may have changed since.
#[inline(always)]
pub fn admits_service<T: Workloads>(
    tables: &T,
    key: &FlowKey,
    block: Block,
    endpoint: &Endpoint,
) -> bool {
    if block.flags() & Block::REACHABLE != 0 {
        return true;
    }
    match denied(tables, key) {
        Some((local, true)) => {
            capture::exempts(tables, &local.enrolled(), endpoint.addr, endpoint.port)
        }
        Some(_) => false,
        None => true,
    }
}

/// Whether the first packet of a workload's connection may go to its destination, which does not belong to a service. The
/// programs at sockets have judged packets of sockets already.
#[inline(always)]
pub fn admits_itself<T: Workloads>(tables: &T, key: &FlowKey) -> bool {
    match denied(tables, key) {
        Some((local, false)) if local.is_by_packets() => {
            let to = FrontendKey::new(key.dst, key.dst_port, key.protocol);
            is_known(tables, &to)
        }
        _ => true,
    }
}
