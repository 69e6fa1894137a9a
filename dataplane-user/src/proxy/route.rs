//! Where a connection goes.

use std::{net::SocketAddr, sync::Arc};

use super::{
    attachment::{Attached, Direction},
    index::{Found, Index, Target},
    outcome::Flag,
};
use crate::model::Egress;

/// What becomes of a connection.
#[derive(Clone, Debug)]
pub enum Route {
    /// It goes to one of a service's endpoints.
    Service(Arc<Target>),
    /// It goes where the client wanted to go.
    Straight,
    /// It is refused; the service, if it is known.
    Refused(Flag, Option<Arc<Target>>),
}

/// Decides on a connection by its original destination.
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
        // Whoever chose the workload did so before.
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
