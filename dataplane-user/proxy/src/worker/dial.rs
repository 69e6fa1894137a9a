//! Connecting to endpoints.

use std::{collections::VecDeque, io, sync::Arc, time::Instant};

use relay::{
    Direction, Flag, Way,
    socket::{self, From, Manner},
};
use rustix::{
    event::epoll::{self, EventFlags},
    net::sockopt as option,
};

use super::Worker;
use crate::{connection::Side, table::Key};

/// Pending connection attempts in the order of their deadlines: deadline, connection, attempt number.
pub type Pending = VecDeque<(Instant, Key, usize)>;

impl Worker {
    /// Starts to connect to the next endpoint, and refuses the client if none is left. The first `first` bytes of the
    /// shared buffer are data that the client has already sent.
    pub fn dial(&mut self, key: Key, mut first: usize) {
        loop {
            let Some(connection) = self.table.get_mut(key) else {
                return;
            };
            connection.set_endpoint_socket(None);
            let speaks = first > 0 || connection.holds_first();
            let settings = &self.shared.settings;
            let session = &mut connection.session;
            let Some(endpoint) = session.next_endpoint() else {
                self.finish(key, Flag::ConnectFailure, true);
                return;
            };
            let may_tunnel = self.shared.tunnels.get().is_some() || session.has_waypoint();
            let is_plain =
                !session.is_never_plain() && matches!(session.way(&self.index), Way::Plain);
            if may_tunnel && !is_plain {
                let from = session.attached();
                let here = (!session.has_waypoint())
                    .then(|| self.shared.neighbour(from, endpoint.ip(), &self.index));
                let Some(here) = here.flatten() else {
                    self.hand_over(key, first);
                    return;
                };
                match session.arrive(here, &self.index) {
                    // The workload may be attached since the worker's index: then no change of policies has judged this.
                    Ok(()) if self.shared.relay.version() != self.version => {
                        let (_, now) = self.shared.relay.index();
                        if session.forbidden(&now).is_some() || session.is_gone(&now) {
                            self.finish(key, Flag::Denied, true);
                            return;
                        }
                    }
                    Ok(()) => {}
                    // As with a tunnel, whose other side answers 401 or 503.
                    Err(refusal) if refusal.flag == Flag::Denied && !refusal.is_unknown => {
                        self.finish(key, Flag::Denied, true);
                        return;
                    }
                    Err(_) => continue,
                }
            }
            let attempt = session.attempt().unwrap_or_default();
            let last = session.last();
            let transparent = settings.transparent && last.direction() == Direction::Inbound;
            let manner = Manner {
                mark: settings
                    .transparent_mark
                    .filter(|_| transparent)
                    .or(settings.mark),
                from: transparent.then(|| From {
                    ip: last.client().ip(),
                    port: connection.shares_port.then(|| last.client().port()),
                    by_loopback: last.attached().namespace.is_some(),
                }),
                speaks,
            };
            let (stock, attached) = (&mut self.stock, last.attached());
            let open = || stock.take(attached, endpoint.is_ipv4());
            let socket = socket::connect(endpoint, manner, open);
            let socket = match socket {
                Ok(socket) => socket,
                Err(error) => {
                    session.failed(error);
                    continue;
                }
            };
            connection.set_endpoint_socket(Some(socket));
            let written = connection.write_first(&mut self.buffers, first);
            first = 0;
            let reached = match written {
                // An endpoint on the same machine is already connected.
                Ok(reached) => reached,
                Err(error) => {
                    connection.session.failed(error);
                    continue;
                }
            };
            if reached {
                self.reached(key);
            } else {
                let deadline = self.clock.now + settings.connect_timeout;
                self.expect(deadline, key, attempt);
            }
            match self.watch(key, Side::Endpoint) {
                Ok(()) => return,
                // The endpoint has got the first bytes, so no other endpoint can get them.
                Err(_) if reached => {
                    self.finish(key, Flag::ConnectFailure, true);
                    return;
                }
                Err(error) => self.failed(key, error),
            }
        }
    }

    /// Hands a connection over to the engine of tunnels, after the choice of its endpoint. Without such an engine, refuses the
    /// client.
    fn hand_over(&mut self, key: Key, first: usize) {
        let shared = Arc::clone(&self.shared);
        let Some(tunnels) = shared.tunnels.get() else {
            self.finish(key, Flag::Tunnel, true);
            return;
        };
        let Some(connection) = self.table.remove(key) else {
            return;
        };
        let handed = connection.hand_over(&mut self.buffers, first);
        // Fails if this worker does not wait for it yet.
        let _ = epoll::delete(&self.epoll, &handed.client);
        tunnels.carry(handed);
        self.load().sub();
    }

    /// Gives up an attempt at the deadline.
    fn expect(&mut self, deadline: Instant, key: Key, attempt: usize) {
        // Most earlier attempts have succeeded: each new one removes up to two of them.
        for _ in 0..2 {
            if let Some(&(_, key, attempt)) = self.pending.front()
                && !self.is_pending(key, attempt)
            {
                self.pending.pop_front();
            }
        }
        self.pending.push_back((deadline, key, attempt));
        self.clock.wake_by(deadline);
    }

    /// Gives up the attempts whose deadline has passed. Returns the next deadline.
    pub fn give_up(&mut self) -> Option<Instant> {
        while let Some(&(deadline, key, attempt)) = self.pending.front() {
            let is_pending = self.is_pending(key, attempt);
            if is_pending && deadline > self.clock.now {
                return Some(deadline);
            }
            self.pending.pop_front();
            if is_pending {
                self.failed(key, io::ErrorKind::TimedOut.into());
                self.dial(key, 0);
            }
        }
        None
    }

    /// Whether this attempt is still in progress: it has not succeeded or failed yet.
    fn is_pending(&mut self, key: Key, attempt: usize) -> bool {
        let connection = self.table.get_mut(key);
        connection.is_some_and(|connection| connection.session.attempt() == Some(attempt))
    }

    fn failed(&mut self, key: Key, error: io::Error) {
        if let Some(connection) = self.table.get_mut(key) {
            connection.session.failed(error);
        }
    }

    /// Ends a connection by this error of its attempt.
    pub fn fail(&mut self, key: Key, error: io::Error) {
        self.failed(key, error);
        self.finish(key, Flag::ConnectFailure, true);
    }

    /// Handles the kernel's events of a socket that is connecting.
    pub fn on_dial_event(&mut self, key: Key, flags: EventFlags) {
        let Some(connection) = self.table.get_mut(key) else {
            return;
        };
        if flags.intersects(EventFlags::ERR | EventFlags::HUP) {
            let Some(socket) = connection.endpoint_socket() else {
                return;
            };
            let error = match option::socket_error(socket) {
                Ok(Err(error)) | Err(error) => error.into(),
                Ok(Ok(())) => io::Error::from(io::ErrorKind::ConnectionReset),
            };
            connection.session.failed(error);
            self.clock.update();
            self.dial(key, 0);
        } else if flags.contains(EventFlags::OUT) {
            self.reached(key);
            self.drive(key);
        }
    }

    /// Takes note that the endpoint has taken the connection.
    fn reached(&mut self, key: Key) {
        let ticks = self.clock.ticks();
        if let Some(connection) = self.table.get_mut(key) {
            connection.active = ticks;
            connection.session.reached(&self.index);
        }
    }
}
