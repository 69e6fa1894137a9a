//! The session of a connection that may go to a waypoint.

use std::net::SocketAddr;

use model::ServiceName;

use super::{direction::Direction, index::Via, session::Session};

/// The port at which the proxies of the nodes accept tunnels.
const HBONE: u16 = 15_008;

impl Session {
    /// Whether the connection goes to a waypoint, and so never in plaintext.
    pub fn has_waypoint(&self) -> bool {
        self.via.is_some()
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
