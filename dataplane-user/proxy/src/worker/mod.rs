//! A worker: a thread that relays its share of the connections.
//!
//! It waits for its sockets with epoll and keeps a small record of each connection, rather than a
//! task with a stack of futures: a connection takes a few hundred bytes, and a round trip three system
//! calls in each direction (wait, read, write).

mod accept;
mod clock;
mod dial;
mod hold;
mod policies;
mod shed;
#[cfg(test)]
pub(super) mod tests;
mod token;

use std::{
    collections::{HashSet, VecDeque},
    io,
    os::fd::OwnedFd,
    sync::{Arc, mpsc::Receiver},
    thread,
    time::{Duration, Instant},
};

use relay::{Flag, Index, Stock};
use rustix::{
    event::{
        Timespec,
        epoll::{self, CreateFlags, Event, EventFlags},
    },
    io::Errno,
};
use threads::may_panic;

use self::{accept::Acceptor, clock::Clock, dial::Pending, hold::Held, token::Token};
use super::{
    buffers::Buffers,
    connection::{Connection, Side},
    pump::{End, Step},
    shared::{Command, Load, Shared},
    table::{Key, Table},
};

/// The maximum number of events taken from the kernel at a time.
const EVENTS: usize = 256;
/// How long a worker sleeps whose epoll fails.
const PAUSE: Duration = Duration::from_millis(50);

/// A worker's state.
#[derive(Debug)]
pub struct Worker {
    number: usize,
    shared: Arc<Shared>,
    commands: Receiver<Command>,
    epoll: OwnedFd,
    clock: Clock,
    /// Counts the waits.
    waits: u64,
    acceptors: Vec<Option<Acceptor>>,
    table: Table,
    /// Connections that had more to do than fits a turn.
    queue: VecDeque<Key>,
    pending: Pending,
    held: Held,
    index: Arc<Index>,
    /// The number of the index's snapshot.
    version: u64,
    /// The version of the policies by which all connections were last judged.
    policies: u64,
    buffers: Buffers,
    stock: Stock,
    next_upkeep: Instant,
    /// Attachments that were removed, and the deadlines of their connections.
    shut: Vec<(u64, Instant)>,
    /// The deadline of all connections, once the worker drains.
    drain: Option<Instant>,
}

/// The events of a connection's socket that the kernel should report.
fn interest(end: &End) -> EventFlags {
    let flags = EventFlags::IN | EventFlags::RDHUP | EventFlags::ET;
    if end.asks_for_space {
        flags | EventFlags::OUT
    } else {
        flags
    }
}

impl Worker {
    /// Creates a worker that executes the commands of its mailbox.
    ///
    /// # Errors
    /// If the process has no file descriptors left.
    pub fn new(
        number: usize,
        shared: Arc<Shared>,
        commands: Receiver<Command>,
    ) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let wake = shared.wake(number);
        epoll::add(&epoll, wake, Token::Wake.into(), EventFlags::IN)?;
        let clock = Clock::new()?;
        epoll::add(&epoll, &clock.timer, Token::Timer.into(), EventFlags::IN)?;
        Ok(Self {
            number,
            commands,
            epoll,
            waits: 0,
            acceptors: Vec::new(),
            table: Table::default(),
            queue: VecDeque::new(),
            pending: Pending::new(),
            held: Held::new(),
            index: Arc::default(),
            version: 0,
            policies: 0,
            buffers: Buffers::new(shared.settings.max_held / shared.loads.len().max(1)),
            stock: Stock::default(),
            next_upkeep: clock.now,
            shut: Vec::new(),
            drain: None,
            clock,
            shared,
        })
    }

    /// Works until it has drained.
    pub fn run(mut self) {
        let mut events: Vec<Event> = Vec::with_capacity(EVENTS);
        while !(self.drain.is_some() && self.table.len() == 0) {
            events.clear();
            let at_once = (!self.queue.is_empty()).then(Timespec::default);
            let spare = rustix::buffer::spare_capacity(&mut events);
            self.waits += 1;
            match epoll::wait(&self.epoll, spare, at_once.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    // It does not happen, and if it does, the worker does not spin.
                    tracing::error!("worker {}: epoll: {error}", self.number);
                    thread::sleep(PAUSE);
                }
            }
            // Before the index, which then has these policies.
            let policies = self.shared.relay.policies_version();
            if self.shared.relay.version() != self.version {
                (self.version, self.index) = self.shared.relay.index();
                self.route_held();
            }
            if policies != self.policies {
                self.policies = policies;
                self.judge_again();
            }
            may_panic("relay");
            for event in &events {
                let token = Token::from(event.data);
                if !matches!(token, Token::Socket(..)) {
                    self.clock.update();
                }
                match token {
                    Token::Socket(key, side) => self.on_event(key, side, event.flags),
                    Token::Wake => self.obey(),
                    Token::Timer => self.on_timer(),
                    Token::Acceptor(number) => self.accept_from(number),
                }
            }
            for _ in 0..self.queue.len() {
                if let Some(key) = self.queue.pop_front() {
                    if let Some(connection) = self.table.get_mut(key) {
                        connection.queued = false;
                    }
                    self.drive(key);
                }
            }
        }
    }

    fn load(&self) -> &Load {
        &self.shared.loads[self.number]
    }

    fn obey(&mut self) {
        self.shared.clear_wake(self.number);
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::Take(attached, listeners) => self.open(&attached, &listeners),
                Command::Shut(id, deadline) => {
                    self.close(|attached| attached.id == id);
                    self.stock.leave(id);
                    self.forget_shut();
                    self.shut.push((id, deadline));
                    self.clock.wake_by(deadline);
                }
                Command::Relay(accepted) => self.begin(accepted),
                Command::Drain(deadline) => {
                    self.close(|_| true);
                    self.drain = Some(deadline);
                    self.clock.wake_by(deadline);
                }
            }
        }
    }

    /// Forgets removed attachments of which this worker has no connection left.
    fn forget_shut(&mut self) {
        if !self.shut.is_empty() {
            let sessions = self.table.iter().map(|(_, connection)| &connection.session);
            let open: HashSet<u64> = sessions
                .flat_map(|session| [session.attached().id, session.last().attached().id])
                .collect();
            self.shut.retain(|(id, _)| open.contains(id));
        }
    }

    /// Asks the kernel to report the events of a connection's socket.
    fn watch(&mut self, key: Key, side: Side) -> io::Result<()> {
        let Some(connection) = self.table.get_mut(key) else {
            return Ok(());
        };
        let Some(end) = connection.end_mut(side) else {
            return Ok(());
        };
        end.asks_for_space = !end.writable;
        let token = Token::Socket(key, side).into();
        Ok(epoll::add(&self.epoll, &end.socket, token, interest(end))?)
    }

    /// Handles the kernel's events of a connection's socket.
    fn on_event(&mut self, key: Key, side: Side, flags: EventFlags) {
        let Some(connection) = self.table.get_mut(key) else {
            return;
        };
        let dialing = connection.session.is_dialing();
        let Some(end) = connection.end_mut(side) else {
            return;
        };
        let broken = flags.contains(EventFlags::ERR);
        let closing = broken || flags.intersects(EventFlags::RDHUP | EventFlags::HUP);
        end.broken |= broken;
        end.closing |= closing;
        end.readable |= closing || flags.contains(EventFlags::IN);
        end.writable |= broken || flags.intersects(EventFlags::OUT | EventFlags::HUP);
        match (dialing, side) {
            (false, _) => self.drive(key),
            // The client does not wait any more.
            (true, Side::Client) if broken => self.finish(key, Flag::ClientReset, true),
            (true, Side::Client) => {}
            (true, Side::Endpoint) => self.on_dial_event(key, flags),
        }
    }

    /// Relays all available data of a connection.
    fn drive(&mut self, key: Key) {
        let ticks = self.clock.ticks();
        let Some(connection) = self.table.get_mut(key) else {
            return;
        };
        if connection.session.is_dialing() {
            return;
        }
        connection.active = ticks;
        let step = connection.pump(&mut self.buffers);
        for side in [Side::Client, Side::Endpoint] {
            if let Some(end) = connection
                .end_mut(side)
                .filter(|end| !end.writable && !end.asks_for_space)
            {
                end.asks_for_space = true;
                // If there is space now, the kernel reports it at once. The call fails only if the kernel is out of
                // memory.
                let token = Token::Socket(key, side).into();
                let _ = epoll::modify(&self.epoll, &end.socket, token, interest(end));
            }
        }
        match step {
            Ok(Step::Waiting) => {}
            Ok(Step::More) => {
                if !connection.queued {
                    connection.queued = true;
                    self.queue.push_back(key);
                }
            }
            Ok(Step::Done) => self.finish(key, Flag::None, false),
            Err(flag) => self.finish(key, flag, true),
        }
        self.shed();
    }

    fn finish(&mut self, key: Key, flag: Flag, reset: bool) {
        if let Some(connection) = self.table.remove(key) {
            self.end(*connection, flag, reset);
        }
    }

    /// Ends these connections by a reset, so that no peer takes it for the regular end.
    fn finish_all(&mut self, flag: Flag, which: impl Fn(&Connection) -> bool) {
        let these = self
            .table
            .iter()
            .filter(|(_, connection)| which(connection));
        let keys: Vec<Key> = these.map(|(key, _)| key).collect();
        for key in keys {
            self.finish(key, flag, true);
        }
    }

    /// Ends a connection: its session first, and then its sockets, so that a peer that sees the end
    /// finds it counted.
    fn end(&mut self, mut connection: Connection, flag: Flag, reset: bool) {
        connection.abandon(&mut self.buffers);
        if reset {
            connection.reset();
        }
        let ids = [&connection.session, connection.session.last()].map(|of| of.attached().id);
        connection.session.end(flag);
        self.load().sub();
        for id in ids {
            if self.shut.iter().any(|(shut, _)| *shut == id) {
                self.stock.leave(id);
            }
        }
    }
}
