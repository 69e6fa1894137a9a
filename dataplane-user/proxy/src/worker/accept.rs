//! Accepting connections, and beginning their sessions.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use relay::{Attached, Direction, Found, Listener, Permit, Session, socket};
use rustix::{
    event::epoll::{self, EventFlags},
    io::Errno,
    net::{self, SocketFlags},
};

use super::{Worker, token::Token};
use crate::{
    connection::{Connection, Side},
    shared::{Accepted, Command},
};

/// The maximum number of connections accepted before the worker serves existing ones again.
const ACCEPTS: usize = 16;
/// How long the worker leaves a listening socket alone when it can accept nothing.
const PAUSE: Duration = Duration::from_millis(50);
/// A worker hands new connections to the least loaded worker if it has this many more than that worker.
const LEAD: usize = 8;

/// A listening socket that this worker accepts from, as the other workers do.
#[derive(Debug)]
pub struct Acceptor {
    attached: Arc<Attached>,
    listeners: Arc<[Listener]>,
    which: usize,
    /// When to try again, if the worker leaves the socket alone.
    pub paused_until: Option<Instant>,
    /// The number of the last wait that reported connections here.
    reported: u64,
}

impl Acceptor {
    fn listener(&self) -> &Listener {
        &self.listeners[self.which]
    }

    /// Accepts a connection that waits; `None` if its client has gone.
    fn accept(&self, permit: Permit) -> Result<Option<Accepted>, Errno> {
        let listener = self.listener();
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (socket, client) = net::acceptfrom_with(&listener.socket, flags)?;
        let client = client.and_then(|client| socket::address(client).ok());
        Ok(client.map(|client| Accepted {
            socket,
            client,
            direction: listener.direction,
            permit,
        }))
    }
}

impl Worker {
    /// Accepts connections at these sockets from now on, except tunnels.
    pub fn open(&mut self, attached: &Arc<Attached>, listeners: &Arc<[Listener]>) {
        let plain = listeners
            .iter()
            .enumerate()
            .filter(|(_, listener)| !listener.is_tunnel);
        for (which, _) in plain {
            let number = self.acceptors.iter().position(Option::is_none);
            let number = number.unwrap_or_else(|| {
                self.acceptors.push(None);
                self.acceptors.len() - 1
            });
            self.acceptors[number] = Some(Acceptor {
                attached: Arc::clone(attached),
                listeners: Arc::clone(listeners),
                which,
                paused_until: None,
                reported: 0,
            });
            self.resume(number);
        }
    }

    /// Asks the kernel to report waiting connections. Of several workers, the kernel wakes one.
    pub fn resume(&mut self, number: usize) {
        let Some(Some(acceptor)) = self.acceptors.get_mut(number) else {
            return;
        };
        let flags = EventFlags::IN | EventFlags::EXCLUSIVE;
        let listener = acceptor.listener();
        let token = Token::Acceptor(number).into();
        match epoll::add(&self.epoll, &listener.socket, token, flags) {
            Ok(()) | Err(Errno::EXIST) => acceptor.paused_until = None,
            Err(error) => {
                let at = listener.address;
                tracing::error!("worker {}: cannot wait for {at}: {error}", self.number);
                let until = self.clock.now + PAUSE;
                acceptor.paused_until = Some(until);
                self.clock.wake_by(until);
            }
        }
    }

    /// Leaves a listening socket alone for a while. Connections wait in the kernel.
    fn pause(&mut self, number: usize) {
        if let Some(Some(acceptor)) = self.acceptors.get_mut(number) {
            let _ = epoll::delete(&self.epoll, &acceptor.listener().socket);
            let until = self.clock.now + PAUSE;
            acceptor.paused_until = Some(until);
            self.clock.wake_by(until);
        }
    }

    /// Stops accepting. Another process may continue with the same sockets. The worker still accepts connections for
    /// which the kernel has woken it, because the kernel has woken no other worker for them.
    pub fn close(&mut self, which: impl Fn(&Attached) -> bool) {
        for number in 0..self.acceptors.len() {
            let Some(acceptor) = self.acceptors[number].take_if(|a| which(&a.attached)) else {
                continue;
            };
            let _ = epoll::delete(&self.epoll, &acceptor.listener().socket);
            let direction = acceptor.listener().direction;
            while let Some(permit) = Permit::acquire(&acceptor.attached, direction) {
                match acceptor.accept(permit) {
                    Ok(Some(accepted)) => self.begin(accepted),
                    Ok(None) => {}
                    Err(_) => break,
                }
            }
        }
    }

    /// Accepts connections that wait at a listening socket.
    pub fn accept_from(&mut self, number: usize) {
        let Some(Some(acceptor)) = self.acceptors.get_mut(number) else {
            return;
        };
        // Usually one connection waits. Several wait if the previous wait also reported some.
        let many = acceptor.reported + 1 == self.waits;
        acceptor.reported = self.waits;
        for _ in 0..if many { ACCEPTS } else { 1 } {
            let Some(Some(acceptor)) = self.acceptors.get(number) else {
                return;
            };
            let direction = acceptor.listener().direction;
            let Some(permit) = Permit::acquire(&acceptor.attached, direction) else {
                self.pause(number);
                return;
            };
            let accepted = match acceptor.accept(permit) {
                Ok(Some(accepted)) => accepted,
                Err(Errno::AGAIN) => return,
                Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                    self.shared.warn(error);
                    self.pause(number);
                    return;
                }
                // The client has gone.
                Ok(None) | Err(_) => continue,
            };
            let Some(other) = self.shared.less_loaded(self.number, LEAD) else {
                self.begin(accepted);
                continue;
            };
            let refused = self.shared.send(other, Command::Relay(accepted));
            if let Err(Command::Relay(accepted)) = refused {
                self.begin(accepted);
            }
        }
    }

    /// Begins the session of an accepted connection, and starts to connect it further.
    pub fn begin(&mut self, accepted: Accepted) {
        let Accepted {
            socket,
            client,
            direction,
            permit,
        } = accepted;
        let attached = permit.attached();
        // A connection that was redirected arrives at the proxy's own address, not at a service's.
        let is_meant = |address| {
            attached.is_elsewhere(address) || matches!(self.index.find(address), Found::Service(_))
        };
        let Ok(destination) = socket::original_destination(&socket, client, is_meant) else {
            // The client has reset the connection: there is nothing to relay, and no destination to
            // record.
            return;
        };
        let keeps_client = self.shared.settings.transparent && direction == Direction::Inbound;
        let (attempts, now) = (self.shared.settings.attempts, self.clock.now);
        let mut session = Session::begin(permit, direction, client, destination, attempts, now);
        let routed = session.route(&self.index);
        self.load().add();
        let mut connection = Connection::new(session, socket);
        connection.active = self.clock.ticks();
        if keeps_client {
            connection.share_port();
        }
        if let Err(refusal) = routed {
            if refusal.is_unknown && self.may_hold(connection.session.attached()) {
                self.hold(connection);
            } else {
                self.end(connection, refusal.flag, true);
            }
            return;
        }
        let first = match connection.read_first(&mut self.buffers) {
            Ok(first) => first,
            Err(flag) => {
                self.end(connection, flag, true);
                return;
            }
        };
        let key = self.table.insert(Box::new(connection));
        self.schedule_upkeep();
        self.dial(key, first);
        self.shed();
        if let Err(error) = self.watch(key, Side::Client) {
            self.fail(key, error);
        }
    }
}
