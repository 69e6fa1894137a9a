//! The session of a connection that may go to a waypoint.

use std::net::SocketAddr;

use super::session::Session;

impl Session {
    /// Whether the connection goes to a waypoint, and so never in plaintext.
    pub fn has_waypoint(&self) -> bool {
        self.via.is_some()
    }

    /// Returns the address at which the chosen endpoint accepts tunnels. `port`: the port of endpoints that are not waypoints.
    pub fn accepts_tunnels_at(&self, port: u16) -> SocketAddr {
        match self.via {
            Some(_) => self.endpoint(),
            None => SocketAddr::new(self.endpoint().ip(), port),
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
