//! The route of a connection: to a service's endpoint, straight on, or nowhere.

use std::{net::SocketAddr, sync::Arc};

use model::{CapturedBy, Egress};

use super::{
    attachment::Attached,
    direction::Direction,
    index::{Found, Index, Target},
    outcome::Flag,
};

/// The route of a connection.
#[derive(Clone, Debug)]
pub enum Route {
    /// To one of a service's endpoints.
    Service(Arc<Target>),
    /// To its original destination.
    Straight,
    /// Nowhere: the connection is refused. The service, if the destination is one's.
    Refused(Flag, Option<Arc<Target>>),
}

/// Decides on the route of a connection by its original destination. A service's source ranges are for the workload's
/// addresses: which address a client connects to the proxy from, it chooses itself, and by loopback it has none that says
/// anything.
pub fn decide(
    index: &Index,
    attached: &Attached,
    direction: Direction,
    client: SocketAddr,
    destination: SocketAddr,
) -> Route {
    let found = match direction {
        // An exact VIP comes first: a service may well have a port that the proxy has.
        Direction::Outbound => index.find(destination),
        // The client, or its proxy, has already chosen the workload.
        Direction::Inbound => Found::Known,
    };
    match found {
        Found::Service(target) if !attached.is_admitted(&target, client.ip()) => {
            Route::Refused(Flag::Denied, Some(target))
        }
        Found::Service(target) if !target.has_endpoint(destination.is_ipv4()) => {
            Route::Refused(Flag::NoEndpoint, Some(target))
        }
        Found::Service(target) if is_refused(index, attached, &target, destination.is_ipv4()) => {
            Route::Refused(Flag::Denied, Some(target))
        }
        Found::Service(target) => Route::Service(target),
        Found::UnknownPort => Route::Refused(Flag::NoRoute, None),
        Found::Known | Found::Unknown if attached.is_own(destination) => {
            Route::Refused(Flag::Recursive, None)
        }
        Found::Known | Found::Unknown
            if direction == Direction::Outbound
                && attached.egress == Egress::Deny
                && !index.is_reachable(destination) =>
        {
            Route::Refused(Flag::Denied, None)
        }
        Found::Known | Found::Unknown => Route::Straight,
    }
}

/// Whether a workload may not connect to a service. The kernel's programs have judged this already, unless the connection
/// came by a virtual interface; the service's endpoints may have changed since.
fn is_refused(index: &Index, attached: &Attached, target: &Target, v4: bool) -> bool {
    let capture = attached.workload.capture.as_deref();
    // The proxy connects as the node.
    let as_node = capture.is_some_and(|policy| policy.captured_by == CapturedBy::Packets);
    index.is_refused(target)
        || attached.egress == Egress::Deny && !index.is_service_reachable(target, v4)
        || as_node && index.leads_to_node(target, v4)
}
