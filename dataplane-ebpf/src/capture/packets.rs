//! Whether the first packet of a workload whose egress is denied may go where the packet path sends it. The packet path
//! asks when it has the block from which it draws. The socket programs or [`assign`](super::assign) judged earlier, by
//! an earlier look at the same tables, and the service may have changed since.

use dataplane_common::{
    Protocol,
    capture::{self, Enrolled, Local, MESH_DENIES},
    packet::FlowKey,
    tables::{Block, Endpoint, Frontend},
};

use super::Live;
use crate::socket;

/// The workload that sends a packet, if its egress is denied, and whether its rules exempt the destination.
#[inline(always)]
fn denied(key: &FlowKey) -> Option<(Local, bool)> {
    let mesh = socket::config().map_or(0, |config| config.mesh);
    if mesh & MESH_DENIES == 0 {
        return None;
    }
    let local = super::local(key.src)?;
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
    let (reason, is_judged) = capture::outbound(&Live, &local.enrolled(), to, port, false);
    let is_exempt = capture::is_exempt(reason, is_judged);
    (is_judged || is_exempt).then_some((local, is_exempt))
}

/// Whether a packet may go to an endpoint of a block.
#[inline(always)]
pub fn admits_service(key: &FlowKey, block: Block, endpoint: &Endpoint) -> bool {
    if block.flags() & Block::REACHABLE != 0 {
        return true;
    }
    match denied(key) {
        Some((local, true)) => {
            capture::exempts(&Live, &local.enrolled(), endpoint.addr, endpoint.port)
        }
        Some(_) => false,
        None => true,
    }
}

/// Whether a packet may go to its destination, which does not belong to a service. The socket programs have judged
/// packets of sockets already.
#[inline(always)]
pub fn admits_itself(key: &FlowKey) -> bool {
    match denied(key) {
        Some((local, false)) if local.is_by_packets() => {
            super::is_known(Frontend::NONE, key.dst, key.dst_port, key.protocol)
        }
        _ => true,
    }
}
