//! The statements of a tunnel's sides about a connection: identities, which they have proven, and others.

use std::sync::Arc;

use model::Identity;

use super::{baggage::Baggage, index::Index, labels::Principals, session::Session};

impl Session {
    /// Notes the identities that the workload and the other side have proven, and the other side's description of its workload,
    /// before [`Session::route`] or [`Session::reached`].
    pub fn prove(&mut self, own: Identity, peer: Identity, baggage: Option<Arc<Baggage>>) {
        let peer = Some(peer);
        self.principals = Some(Box::new(Principals {
            own,
            peer,
            is_attested: false,
            baggage,
        }));
    }

    /// Returns the identity that the other side has proven: the client of an inbound connection, the endpoint of an outbound one.
    pub(super) fn peer(&self) -> Option<&Identity> {
        self.principals.as_ref().and_then(|of| of.peer.as_ref())
    }

    /// Notes the name in DNS that the client of an inbound connection addressed, from the peer of the tunnel. Has no effect if
    /// the destination is no endpoint of a service with this name.
    pub fn name_service(&mut self, host: &str, index: &Index) {
        self.named = index.service_of(host, self.destination);
    }
}
