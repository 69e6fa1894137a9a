//! The route of a connection: to a service's endpoint, straight on, or nowhere.

use std::{net::SocketAddr, sync::Arc};

use model::{CapturedBy, Egress};

use super::{
    attachment::Attached,
    direction::Direction,
    index::{Found, Index, Target, Via},
    outcome::Flag,
};

/// The route of a connection.
#[derive(Clone, Debug)]
pub enum Route {
    /// To one of a service's endpoints.
    Service(Arc<Target>),
    /// To its original destination.
    Straight,
    /// To a waypoint. The service, if the destination is one's.
    Waypoint(Box<Via>, Option<Arc<Target>>),
    /// Nowhere: it would have to go to a waypoint, which cannot be used. The reason, and the service.
    NoWaypoint(String, Option<Arc<Target>>),
    /// Nowhere, as far as the snapshot knows: the workload may only connect to known destinations. A later snapshot may
    /// have the destination.
    Unknown,
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
    let is_denied = || {
        direction == Direction::Outbound
            && attached.egress == Egress::Deny
            && !index.is_reachable(destination)
    };
    match found {
        Found::Service(target) if !attached.is_admitted(&target, client.ip()) => {
            Route::Refused(Flag::Denied, Some(target))
        }
        Found::Service(target) => to_service(index, attached, target, destination),
        Found::UnknownPort => Route::Refused(Flag::NoRoute, None),
        Found::Known | Found::Unknown if attached.is_own(destination) => {
            Route::Refused(Flag::Recursive, None)
        }
        Found::Known if is_denied() => Route::Refused(Flag::Denied, None),
        Found::Unknown if is_denied() => Route::Unknown,
        Found::Known | Found::Unknown => {
            let via = (direction == Direction::Outbound)
                .then(|| index.via_workload(&attached.workload, destination));
            via.flatten()
                .map_or(Route::Straight, |via| through(via, None))
        }
    }
}

fn to_service(
    index: &Index,
    attached: &Attached,
    target: Arc<Target>,
    destination: SocketAddr,
) -> Route {
    let v4 = destination.is_ipv4();
    let via = index.via_service(&attached.workload, &target, destination);
    // A waypoint has its own endpoints, and applies the service's routes itself.
    if via.is_none() && !target.has_endpoint(v4) {
        return Route::Refused(Flag::NoEndpoint, Some(target));
    }
    if is_refused(index, attached, &target, v4) {
        return Route::Refused(Flag::Denied, Some(target));
    }
    match via {
        Some(via) => through(via, Some(target)),
        None => Route::Service(target),
    }
}

fn through(via: Result<Via, String>, target: Option<Arc<Target>>) -> Route {
    match via {
        Ok(via) => Route::Waypoint(Box::new(via), target),
        Err(why) => Route::NoWaypoint(why, target),
    }
}

/// Whether a workload may not connect to a service. The kernel's programs have judged this already, unless the connection
/// came by a virtual interface; the service's endpoints may have changed since.
fn is_refused(index: &Index, attached: &Attached, target: &Target, v4: bool) -> bool {
    let capture = attached.workload.capture.as_deref();
    // The proxy connects as the node.
    let as_node = capture.is_some_and(|policy| policy.captured_by == CapturedBy::Packets);
    index.is_refused(target) && !index.sends_to_waypoints(&attached.workload)
        || attached.egress == Egress::Deny && !index.is_service_reachable(target, v4)
        || as_node && index.leads_to_node(target, v4)
}

#[cfg(test)]
mod tests {
    use model::{Place, Reachable, Snapshot, Workload, WorkloadName};
    use threads::none_dies;

    use super::*;
    use crate::{AccessLog, Attachment, Limits, Log, limits::Holders};

    fn attached(egress: Egress) -> Arc<Attached> {
        let (log, _) = Log::start(AccessLog::Off, std::io::sink(), none_dies()).unwrap();
        let attachment = Attachment {
            workload: Arc::new(Workload::new(WorkloadName::new("a", "b"), Place::Address)),
            namespace: None,
            outbound: vec![],
            inbound: vec![],
            tunnels: vec![],
            egress,
        };
        let limits = Arc::new(Limits::new(Some(1), None, 1024));
        let shared = (limits, Holders::default(), Arc::new(log));
        Attached::new(0, attachment, Box::default(), shared)
            .unwrap()
            .0
    }

    /// Only a destination that the snapshot does not have at all may become known.
    #[test]
    fn what_is_unknown_is_told_from_what_a_rule_denies() {
        let at = |text: &str| -> SocketAddr { text.parse().unwrap() };
        let mut pod = Workload::new(WorkloadName::new("a", "known"), Place::Elsewhere);
        pod.addresses = [at("10.0.0.1:0").ip()].into_iter().collect();
        let mut snapshot = Snapshot::default();
        let name = pod.name.clone();
        snapshot.workloads.insert(name, Arc::new(pod));
        snapshot.reachable = Some(Arc::new(Reachable::default()));
        let index = Index::default().updated(snapshot);
        let decided = |egress, direction, to: &str| {
            let attached = attached(egress);
            decide(&index, &attached, direction, at("10.0.0.9:1"), at(to))
        };
        let (outbound, inbound) = (Direction::Outbound, Direction::Inbound);
        let unknown = decided(Egress::Deny, outbound, "10.0.0.2:80");
        assert!(matches!(unknown, Route::Unknown), "{unknown:?}");
        // A Pod that does not declare the port.
        let known = decided(Egress::Deny, outbound, "10.0.0.1:80");
        assert!(
            matches!(known, Route::Refused(Flag::Denied, None)),
            "{known:?}"
        );
        for (egress, direction) in [(Egress::Allow, outbound), (Egress::Deny, inbound)] {
            let allowed = decided(egress, direction, "10.0.0.2:80");
            assert!(matches!(allowed, Route::Straight), "{allowed:?}");
        }
    }
}
