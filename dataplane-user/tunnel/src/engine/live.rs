//! The connections that the engine relays.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use relay::{Attached, Direction, Flag, Index, Session};

use super::{
    super::copy::{CloseReason, Flow},
    reset,
};

/// All connections that the engine relays.
#[derive(Debug, Default)]
pub struct Live(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    all: HashMap<u64, Arc<Connection>>,
    next: u64,
}

/// A connection between a plain socket and a stream.
#[derive(Debug)]
struct Connection {
    attachment: u64,
    direction: Direction,
    flow: Arc<Flow>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// `Some` while both sides are connected.
    session: Option<Session>,
    /// The outcome if this side ends the connection.
    cause: Flag,
    /// The counters at the last check: bytes from the client, and bytes to the client.
    carried: [u64; 2],
    /// The time of the last check that found a change.
    since: Instant,
}

impl Connection {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, cause: Flag) {
        self.state().cause = cause;
        self.flow.end();
    }

    /// Ends the connection if the policies of the index forbid it, and returns whether they do.
    fn judge(&self, index: &Index) -> bool {
        let mut state = self.state();
        let Some(session) = &mut state.session else {
            return false;
        };
        let Some(denied) = session.forbidden(index) else {
            return false;
        };
        session.deny(denied);
        drop(state);
        self.end(Flag::Denied);
        true
    }

    /// Returns the number of bytes from the client, and of bytes to the client.
    fn bytes(&self) -> [u64; 2] {
        let [from_socket, to_socket] = self.flow.bytes();
        match self.direction {
            Direction::Outbound => [from_socket, to_socket],
            Direction::Inbound => [to_socket, from_socket],
        }
    }
}

/// A connection's entry in [`Live`]. Dropping it removes the connection.
#[derive(Debug)]
pub struct Entry {
    live: Arc<Live>,
    id: u64,
    one: Arc<Connection>,
}

impl Live {
    /// Adds a connection of an attachment. Its other side is not connected yet.
    pub fn add(self: &Arc<Self>, attached: &Attached, direction: Direction) -> Entry {
        let one = Arc::new(Connection {
            attachment: attached.id,
            direction,
            flow: Arc::default(),
            state: Mutex::new(State {
                session: None,
                cause: Flag::Cut,
                carried: [0; 2],
                since: Instant::now(),
            }),
        });
        let mut table = self.lock();
        let id = table.next;
        table.next += 1;
        table.all.insert(id, Arc::clone(&one));
        drop(table);
        Entry {
            live: Arc::clone(self),
            id,
            one,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn all(&self) -> Vec<Arc<Connection>> {
        self.lock().all.values().cloned().collect()
    }

    /// Returns whether these attachments have no connection.
    pub fn is_empty(&self, of: impl Fn(u64) -> bool) -> bool {
        !self.lock().all.values().any(|one| of(one.attachment))
    }

    /// Resets the connections of these attachments.
    pub fn cut(&self, of: impl Fn(u64) -> bool) {
        let all = self.all().into_iter();
        all.filter(|one| of(one.attachment))
            .for_each(|one| one.end(Flag::Cut));
    }

    /// Resets the connections that the policies of the index forbid.
    pub fn judge(&self, index: &Index) {
        for one in self.all() {
            one.judge(index);
        }
    }

    /// Updates the counters, and resets connections that have been idle for the time `idle`.
    pub fn count(&self, idle: Option<Duration>) {
        let now = Instant::now();
        for one in self.all() {
            let bytes = one.bytes();
            let mut state = one.state();
            let Some(session) = &mut state.session else {
                continue;
            };
            session.bytes = bytes;
            session.count();
            if state.carried != bytes {
                (state.carried, state.since) = (bytes, now);
            }
            if idle.is_some_and(|idle| now - state.since >= idle) {
                drop(state);
                one.end(Flag::Idle);
            }
        }
    }
}

impl Entry {
    /// Returns the flow of the connection.
    pub fn flow(&self) -> &Arc<Flow> {
        &self.one.flow
    }

    /// Stores the session. Both sides of the connection are connected.
    pub fn reached(&self, session: Session) {
        let mut state = self.one.state();
        state.session = Some(session);
        state.since = Instant::now();
    }

    /// Ends the connection if the policies of the index forbid it, and returns whether they do.
    pub fn judge(&self, index: &Index) -> bool {
        self.one.judge(index)
    }

    /// Returns the outcome if this side ends the connection.
    pub fn cause(&self) -> Flag {
        self.one.state().cause
    }

    /// Ends the connection's session.
    pub fn end(self, ended: CloseReason) {
        let by_socket = ended == CloseReason::SocketReset;
        let flag = match ended {
            CloseReason::Closed => Flag::None,
            CloseReason::SocketReset | CloseReason::StreamReset => {
                reset(self.one.direction, by_socket)
            }
            CloseReason::Stalled => Flag::Stalled,
            CloseReason::Aborted => self.cause(),
        };
        let session = self.one.state().session.take();
        if let Some(mut session) = session {
            if flag == Flag::Stalled {
                session.attached().count_stalled(Instant::now());
            }
            session.bytes = self.one.bytes();
            session.end(flag);
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.live.lock().all.remove(&self.id);
    }
}
