//! The route of a connection: to a service's endpoint, straight on, or nowhere.

use std::{net::SocketAddr, sync::Arc};

use super::{
    attachment::Attached,
    direction::Direction,
    index::{Found, Index, Target},
    outcome::Flag,
};
use crate::model::Egress;

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

/// Decides on the route of a connection by its original destination.
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
        Found::Service(target) if !target.admits(client.ip()) => {
            Route::Refused(Flag::Denied, Some(target))
        }
        Found::Service(target) if !target.has_endpoint(destination.is_ipv4()) => {
            Route::Refused(Flag::NoEndpoint, Some(target))
        }
        Found::Service(target) => Route::Service(target),
        Found::UnknownPort => Route::Refused(Flag::NoRoute, None),
        Found::Known | Found::Unknown if attached.is_own(destination) => {
            Route::Refused(Flag::Recursive, None)
        }
        Found::Unknown if attached.egress == Egress::Deny => Route::Refused(Flag::Denied, None),
        Found::Known | Found::Unknown => Route::Straight,
    }
}
