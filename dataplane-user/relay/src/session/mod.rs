//! The session of a relayed connection: its connection to an endpoint, its counters and its line in the access log.
//!
//! An engine acquires a [`Permit`], accepts a connection, and begins a [`Session`] for it. The engine reports events to
//! the session. A dropped session accounts for itself: it updates the counters, leaves a record for the access log, and
//! returns the permit.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
    time::{Instant, SystemTime},
};

use model::{ServiceName, Workload};

use super::{
    access::Record,
    attachment::Attached,
    counters::Counters,
    direction::Direction,
    index::{Denied, Index, Target, Via},
    labels::Principals,
    outcome::Flag,
    permit::Permit,
    route::{self, Route},
};

/// The reason to refuse a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The flag to end the session with.
    pub flag: Flag,
    /// Whether the only reason is that the snapshot does not have the destination: a later snapshot may have it.
    pub is_unknown: bool,
}

impl From<Flag> for Refusal {
    fn from(flag: Flag) -> Self {
        Self {
            flag,
            is_unknown: false,
        }
    }
}

/// A relayed connection.
#[derive(Debug)]
pub struct Session {
    progress: Progress,
    direction: Direction,
    client: SocketAddr,
    pub(super) destination: SocketAddr,
    /// The endpoint of the last attempt; the destination before the first one.
    endpoint: SocketAddr,
    /// The service's port, if the destination is one.
    pub(super) target: Option<Arc<Target>>,
    /// The service that the client of an inbound connection addressed, as the peer of the tunnel says.
    pub(super) named: Option<ServiceName>,
    /// The waypoint to which the connection goes.
    pub(super) via: Option<Box<Via>>,
    /// The inbound session of the same connection, if it arrives at a workload of this node without a tunnel.
    pub(super) arrival: Option<Box<Session>>,
    /// Whether such an arrival was tried.
    pub(super) has_tried_here: bool,
    /// Bytes relayed so far: from the client, and to the client. The engine adds to them.
    pub bytes: [u64; 2],
    /// The part of `bytes` that the counters have.
    counted: [u64; 2],
    accepted: Instant,
    flag: Flag,
    /// The identities that both sides have proven; `None`: none.
    pub(super) principals: Option<Box<Principals>>,
    /// The workload at the other side, if it is known.
    peer_workload: Option<Arc<Workload>>,
    /// The reason if policies refuse or end the connection.
    denied: Option<Box<Denied>>,
    /// Last, because a workload whose permits are all back has counted everything.
    permit: Permit,
}

/// The progress of a session.
#[derive(Debug)]
enum Progress {
    /// No endpoint has taken the connection yet.
    Dialing(Box<Attempts>),
    /// An endpoint has taken the connection; its counters.
    Reached(Arc<Counters>),
}

/// Attempts to reach an endpoint.
#[derive(Debug)]
struct Attempts {
    /// Endpoints that did not take the connection.
    failed: Vec<SocketAddr>,
    /// The error of the last of these endpoints.
    error: Option<io::Error>,
    /// Attempts that may still follow.
    left: usize,
}

impl Session {
    /// Begins the session of an accepted connection. `attempts`: how many endpoints are tried at
    /// most.
    pub fn begin(
        permit: Permit,
        direction: Direction,
        client: SocketAddr,
        destination: SocketAddr,
        attempts: usize,
        now: Instant,
    ) -> Self {
        Self {
            progress: Progress::Dialing(Box::new(Attempts {
                failed: Vec::new(),
                error: None,
                left: attempts.max(1),
            })),
            direction,
            client,
            destination,
            endpoint: destination,
            target: None,
            named: None,
            via: None,
            arrival: None,
            has_tried_here: false,
            bytes: [0; 2],
            counted: [0; 2],
            accepted: now,
            flag: Flag::Cut,
            principals: None,
            peer_workload: None,
            denied: None,
            permit,
        }
    }

    /// The workload.
    pub fn attached(&self) -> &Arc<Attached> {
        self.permit.attached()
    }

    /// Out of the workload or into it.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// The client's address.
    pub fn client(&self) -> SocketAddr {
        self.client
    }

    /// The endpoint of the last attempt; the destination before the first one.
    pub fn endpoint(&self) -> SocketAddr {
        self.endpoint
    }

    /// Returns the service that the client addressed.
    pub fn service(&self) -> Option<&ServiceName> {
        let target = self.target.as_ref().map(|target| target.service());
        target.or(self.named.as_ref())
    }

    /// Decides where the connection goes. The client of a plain inbound connection has proven no identity. If a
    /// connection is refused because its destination is not known, or because policies have not been read, an engine may
    /// ask again with a later snapshot.
    ///
    /// # Errors
    /// Why the connection is refused.
    pub fn route(&mut self, index: &Index) -> Result<(), Refusal> {
        if self.direction == Direction::Inbound {
            self.peer_workload = index.workload(self.client.ip()).cloned();
        }
        // Before the client's share, which a session takes once.
        if let Err(denied) = self.authorize(index) {
            let is_unknown = denied.is_unread;
            self.denied = Some(Box::new(denied));
            return Err(Refusal {
                flag: Flag::Denied,
                is_unknown,
            });
        }
        self.denied = None;
        if !self.permit.admit(index, self.client) {
            return Err(Flag::ClientsShare.into());
        }
        let (attached, direction) = (self.permit.attached(), self.direction);
        match route::decide(index, attached, direction, self.client, self.destination) {
            Route::Straight => Ok(()),
            Route::Service(target) => {
                self.target = Some(target);
                Ok(())
            }
            Route::Waypoint(via, target) => {
                (self.via, self.target) = (Some(via), target);
                Ok(())
            }
            Route::NoWaypoint(why, target) => {
                self.target = target;
                if let Progress::Dialing(attempts) = &mut self.progress {
                    attempts.error = Some(io::Error::other(why));
                }
                Err(Flag::Tunnel.into())
            }
            Route::Refused(flag, target) => {
                self.target = target;
                Err(flag.into())
            }
            Route::Unknown => Err(Refusal {
                flag: Flag::Denied,
                is_unknown: true,
            }),
        }
    }

    fn authorize(&self, index: &Index) -> Result<(), Denied> {
        let (attached, peer) = (self.attached(), self.peer());
        match self.direction {
            Direction::Outbound => Ok(()),
            Direction::Inbound => {
                index.authorize(attached.own(), peer, self.client, self.destination)
            }
        }
    }

    /// Returns the reason if policies forbid an inbound connection that former policies may have allowed, or its arrival.
    pub fn forbidden(&self, index: &Index) -> Option<Denied> {
        if let Some(arrival) = &self.arrival {
            return arrival.forbidden(index);
        }
        let is_inbound = self.direction == Direction::Inbound;
        let (attached, client) = (self.attached(), self.client);
        is_inbound
            .then(|| index.forbids(attached.own(), self.peer(), client, self.destination))
            .flatten()
    }

    /// Notes the reason for which policies end the connection, for the access log.
    pub fn deny(&mut self, denied: Denied) {
        if let Some(arrival) = &mut self.arrival {
            arrival.deny(denied.clone());
        }
        self.denied = Some(Box::new(denied));
    }

    /// Chooses the endpoint to try next; `None` if no attempt is left.
    pub fn next_endpoint(&mut self) -> Option<SocketAddr> {
        let Progress::Dialing(attempts) = &mut self.progress else {
            return None;
        };
        if attempts.left == 0 {
            return None;
        }
        let (target, at) = match &self.via {
            Some(via) => (&via.target, via.at),
            None => (&self.target, self.destination),
        };
        let endpoint = match target {
            None => attempts.failed.is_empty().then_some(at)?,
            Some(target) => loop {
                let v4 = at.is_ipv4();
                let attached = self.permit.attached();
                let client = attached.source(self.direction, self.client.ip());
                let endpoint = target.choose(v4, client, &attempts.failed)?;
                if !attached.is_own(endpoint) {
                    break endpoint;
                }
                attempts.failed.push(endpoint);
                attempts.error = Some(io::Error::other("the endpoint is this proxy"));
            },
        };
        attempts.left -= 1;
        self.endpoint = endpoint;
        Some(endpoint)
    }

    /// The number of the attempt that is under way; `None` once an endpoint has taken the connection.
    pub fn attempt(&self) -> Option<usize> {
        match &self.progress {
            Progress::Dialing(attempts) => Some(attempts.failed.len()),
            Progress::Reached(_) => None,
        }
    }

    /// Whether no endpoint has taken the connection yet.
    pub fn is_dialing(&self) -> bool {
        matches!(self.progress, Progress::Dialing(_))
    }

    /// Notes that the attempt under way has failed.
    pub fn failed(&mut self, error: io::Error) {
        self.fail_arrival(&error);
        if let Progress::Dialing(attempts) = &mut self.progress {
            attempts.failed.push(self.endpoint);
            attempts.error = Some(error);
        }
    }

    /// Notes that the endpoint has taken the connection, and counts the connection as opened. `index`
    /// knows the workload at the other side.
    pub fn reached(&mut self, index: &Index) {
        self.reach_arrival(index);
        let peer = match self.direction {
            Direction::Inbound => self.client,
            Direction::Outbound => self.endpoint,
        };
        let peer = index.workload(peer.ip());
        self.peer_workload = peer.cloned();
        let counters = self.counters(peer, Flag::None);
        counters.opened.fetch_add(1, Ordering::Relaxed);
        self.progress = Progress::Reached(counters);
    }

    /// Brings the counters up to date. A session that is dropped does so by itself.
    pub fn count(&mut self) {
        if let Some(arrival) = &mut self.arrival {
            arrival.bytes = self.bytes;
            arrival.count();
        }
        let Progress::Reached(counters) = &self.progress else {
            return;
        };
        let [received, sent] = [0, 1].map(|way| self.bytes[way] - self.counted[way]);
        counters.received.fetch_add(received, Ordering::Relaxed);
        counters.sent.fetch_add(sent, Ordering::Relaxed);
        self.counted = self.bytes;
    }

    /// Ends the session. A session that is dropped without this ends by [`Flag::Cut`].
    pub fn end(mut self, flag: Flag) {
        self.flag = flag;
    }

    fn counters(&self, peer: Option<&Arc<Workload>>, flag: Flag) -> Arc<Counters> {
        let key = (self.direction, self.principals.as_deref(), flag);
        self.attached().counters(key, self.service(), peer)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.count();
        if let Some(arrival) = self.arrival.take() {
            arrival.end(self.flag);
        }
        let at = self.connects_to();
        let (endpoint, error) = match &mut self.progress {
            Progress::Reached(counters) => {
                counters.closed.fetch_add(1, Ordering::Relaxed);
                (Some(at), None)
            }
            Progress::Dialing(attempts) => {
                let error = attempts.error.take();
                let endpoint = (!attempts.failed.is_empty()).then_some(at);
                let counters = self.counters(None, self.flag);
                counters.failed.fetch_add(1, Ordering::Relaxed);
                (endpoint, error)
            }
        };
        let log = &self.permit.attached().log;
        if log.wants(self.flag) {
            log.record(Record {
                ended: SystemTime::now(),
                workload: Arc::clone(&self.permit.attached().workload),
                direction: self.direction,
                client: self.client,
                destination: self.destination,
                endpoint,
                authority: self.via.as_ref().map(|via| via.authority),
                service: self.service().cloned(),
                cluster: log.cluster(),
                bytes: self.bytes,
                duration: self.accepted.elapsed(),
                flag: self.flag,
                error,
                principals: self.principals.take(),
                peer: self.peer_workload.take(),
                denied: self.denied.take(),
            });
        }
    }
}

#[cfg(test)]
mod tests;
