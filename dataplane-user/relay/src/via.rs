//! The session of a connection that may go to a waypoint.

use std::{net::SocketAddr, sync::Arc};

use model::{HBONE, Identity, ServiceName};

use super::{
    direction::Direction,
    index::{Index, Via, Way},
    session::Session,
};

impl Session {
    /// Returns the way to the chosen endpoint, if the proxy has tunnels. A workload without an identity uses no tunnel, and no
    /// workload uses one to itself.
    pub fn way(&self, index: &Index) -> Way {
        let (workload, ip) = (&self.attached().workload, self.endpoint().ip());
        if self.via.is_some() {
            // Only the service account of its Pod tells the waypoint's identity.
            let pod = index.workload(ip);
            return pod.map_or(Way::Unclear, |pod| Way::Tunnel(Arc::clone(pod)));
        }
        let may_tunnel = !workload.account.is_empty() && !workload.addresses.contains(&ip);
        match self.direction() {
            Direction::Outbound if may_tunnel => index.way(ip),
            _ => Way::Plain,
        }
    }

    /// Whether the connection goes to a waypoint.
    pub fn has_waypoint(&self) -> bool {
        self.via.is_some()
    }

    /// Whether the connection never goes on in plaintext: it goes to a waypoint, or an attempt to reach a workload that speaks HBONE
    /// was made.
    pub fn is_never_plain(&self) -> bool {
        self.via.is_some() || self.has_tried_here
    }

    /// Returns the address at which the chosen endpoint accepts tunnels. `port`: the port of endpoints that are not waypoints.
    pub fn accepts_tunnels_at(&self, port: u16) -> SocketAddr {
        let endpoint = self.endpoint();
        match &self.via {
            Some(via) if via.is_bound => SocketAddr::new(endpoint.ip(), HBONE),
            Some(_) => endpoint,
            None => SocketAddr::new(endpoint.ip(), port),
        }
    }

    /// Notes that a stream with this destination has arrived at a Pod of a Gateway, and goes to the Pod.
    pub fn arrives(&mut self, gateway: ServiceName, authority: SocketAddr) {
        self.via = Some(Box::new(Via {
            gateway,
            target: None,
            at: self.endpoint(),
            authority,
            is_bound: true,
        }));
    }

    /// Returns the identities that the chosen endpoint may have besides that of its workload: those of the service. A waypoint has
    /// its own only.
    pub fn further_identities(&self) -> &[Identity] {
        match &self.target {
            Some(target) if self.via.is_none() => &target.service.identities,
            _ => &[],
        }
    }

    /// Returns the address of the last attempt, for the access log.
    pub(super) fn connects_to(&self) -> SocketAddr {
        match self.direction() {
            Direction::Outbound if self.has_waypoint() => self.accepts_tunnels_at(HBONE),
            _ => self.endpoint(),
        }
    }

    /// Returns the destination of the stream in a tunnel to the chosen endpoint: the endpoint, or what the connection is
    /// addressed to if the endpoint is a waypoint.
    pub fn authority(&self) -> SocketAddr {
        self.via
            .as_ref()
            .map_or(self.endpoint(), |via| via.authority)
    }
}
