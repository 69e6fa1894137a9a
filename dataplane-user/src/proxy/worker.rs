//! A worker: a thread that relays its share of the connections.
//!
//! It waits for its sockets with epoll and keeps a small record of each connection, rather than a
//! task with a stack of futures: a connection costs a few hundred bytes, a round trip three system
//! calls (wait, read, write).

use std::{
    collections::{HashSet, VecDeque},
    io,
    net::SocketAddr,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, atomic::Ordering, mpsc::Receiver},
    time::{Duration, Instant, SystemTime},
};

use rustix::{
    event::epoll::{self, CreateFlags, Event, EventData, EventFlags},
    io::Errno,
    net::{self, SocketFlags, sockopt as option},
    time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
        timerfd_settime,
    },
};

use super::{
    Shared,
    access::Record,
    attachment::{Attached, Direction, Listener},
    buffers::Buffers,
    connection::{Connection, Dial, Side},
    index::{Found, Index},
    namespace::Namespaces,
    outcome::Flag,
    pump::{End, Step},
    route::{self, Route},
    socket::{self, Manner},
    table::{Key, Table},
};

/// Connections that are accepted in a row, before those that are there have their turn.
const ACCEPTS: usize = 16;
/// Events that are taken from the kernel at a time.
const EVENTS: usize = 256;
/// How long a listening socket rests when nothing can be accepted from it.
const REST: Duration = Duration::from_millis(50);
/// How often connections that go on are looked at, at least: counters are brought up to date.
const LOOK: Duration = Duration::from_secs(5);
/// A worker may have so many connections more than another, before it gives new ones away.
const LEAD: usize = 8;

/// What a worker is told.
#[derive(Debug)]
pub enum Command {
    /// Accept connections.
    Open(Arc<Attached>, Arc<[Listener]>),
    /// Accept none any more, and cut those that are left at the time given.
    Shut(u64, Instant),
    /// Relay a connection that another worker accepted.
    Take(Accepted),
    /// End when all connections have, and cut them at the time given.
    Drain(Instant),
}

/// A connection that was accepted and counted.
#[derive(Debug)]
pub struct Accepted {
    socket: OwnedFd,
    client: SocketAddr,
    attached: Arc<Attached>,
    direction: Direction,
}

/// A listening socket that this worker accepts from, as the others do.
#[derive(Debug)]
struct Door {
    attached: Arc<Attached>,
    listeners: Arc<[Listener]>,
    which: usize,
    /// When to try again, if nothing can be accepted now.
    rests_until: Option<Instant>,
    /// The last wait that told of connections here.
    told: u64,
}

/// A worker's state.
#[derive(Debug)]
pub struct Worker {
    number: usize,
    shared: Arc<Shared>,
    commands: Receiver<Command>,
    epoll: OwnedFd,
    /// Wakes it at `alarm`. A timer of its own rather than a time limit of each wait: it is set every
    /// few seconds, a limit would be set and taken back for each message.
    timer: OwnedFd,
    alarm: Option<Instant>,
    waits: u64,
    doors: Vec<Option<Door>>,
    table: Table,
    /// Connections with more to do than fits their turn.
    turns: VecDeque<Key>,
    /// Attempts to connect, by the time at which they are given up; and the how-manieth it is.
    dialing: VecDeque<(Instant, Key, usize)>,
    index: Arc<Index>,
    version: u64,
    buffers: Buffers,
    namespaces: Namespaces,
    start: Instant,
    /// Not read for each message: at most [`Worker::period`] old.
    now: Instant,
    next_look: Instant,
    /// Attachments that were removed, and when their connections are cut.
    cuts: Vec<(u64, Instant)>,
    drain: Option<Instant>,
}

/// Tokens of the kernel's events: a connection's number and generation with the side in the lowest
/// bit, or with the highest bit something else.
const OTHER: u64 = 1 << 63;
const WAKE: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;

fn token(key: Key, side: Side) -> EventData {
    let side = u64::from(side == Side::Endpoint);
    let generation = u64::from(key.generation) << 32;
    EventData::new_u64(generation | u64::from(key.number) << 1 | side)
}

#[expect(clippy::cast_possible_truncation, reason = "taken apart")]
fn key_of(token: u64) -> (Key, Side) {
    let key = Key {
        number: token as u32 >> 1,
        generation: (token >> 32) as u32,
    };
    let side = if token & 1 == 0 {
        Side::Client
    } else {
        Side::Endpoint
    };
    (key, side)
}

/// What the kernel is to tell of a connection's socket.
fn flags(end: &End) -> EventFlags {
    let flags = EventFlags::IN | EventFlags::RDHUP | EventFlags::ET;
    if end.asks_for_space {
        flags | EventFlags::OUT
    } else {
        flags
    }
}

impl Worker {
    /// A worker that is told by `commands`, and woken for them by `wake`.
    ///
    /// # Errors
    /// If the kernel has no more of what it takes.
    pub fn new(
        number: usize,
        shared: Arc<Shared>,
        commands: Receiver<Command>,
        wake: impl AsFd,
    ) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        let timer = timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
        )?;
        epoll::add(&epoll, &timer, EventData::new_u64(TIMER), EventFlags::IN)?;
        let now = Instant::now();
        Ok(Self {
            number,
            commands,
            epoll,
            timer,
            alarm: None,
            waits: 0,
            doors: Vec::new(),
            table: Table::default(),
            turns: VecDeque::new(),
            dialing: VecDeque::new(),
            index: Arc::default(),
            version: 0,
            buffers: Buffers::default(),
            namespaces: Namespaces::default(),
            start: now,
            now,
            next_look: now + LOOK,
            cuts: Vec::new(),
            drain: None,
            shared,
        })
    }

    /// Works until it was told to drain and has.
    pub fn run(mut self) {
        let mut events: Vec<Event> = Vec::with_capacity(EVENTS);
        while !(self.drain.is_some() && self.table.len() == 0) {
            events.clear();
            let at_once = (!self.turns.is_empty()).then(Timespec::default);
            let spare = rustix::buffer::spare_capacity(&mut events);
            self.waits += 1;
            match epoll::wait(&self.epoll, spare, at_once.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    // It does not happen, and if it does, not in a busy loop.
                    tracing::error!("worker {}: epoll: {error}", self.number);
                    std::thread::sleep(REST);
                }
            }
            if self.shared.version.load(Ordering::Acquire) != self.version {
                (self.version, self.index) = self.shared.index();
            }
            for event in &events {
                let token = event.data.u64();
                if token == WAKE {
                    self.now = Instant::now();
                    self.obey();
                } else if token == TIMER {
                    self.now = Instant::now();
                    self.watch_clock();
                } else if token & OTHER != 0 {
                    self.now = Instant::now();
                    self.answer((token & !OTHER) as usize);
                } else {
                    let (key, side) = key_of(token);
                    self.told(key, side, event.flags);
                }
            }
            for _ in 0..self.turns.len() {
                if let Some(key) = self.turns.pop_front() {
                    if let Some(connection) = self.table.get_mut(key) {
                        connection.queued = false;
                    }
                    self.drive(key);
                }
            }
        }
    }

    /// Sees to it that the clock is watched at this time.
    fn wake_by(&mut self, at: Instant) {
        if self.alarm.is_some_and(|alarm| alarm <= at) {
            return;
        }
        // A millisecond more, so that it is not too early; no time at all would turn it off.
        let wait = at.saturating_duration_since(self.now) + Duration::from_millis(1);
        let time = Itimerspec {
            it_interval: Timespec::default(),
            it_value: Timespec::try_from(wait).unwrap_or_default(),
        };
        match timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &time) {
            Ok(_) => self.alarm = Some(at),
            Err(error) => tracing::error!("worker {}: timer: {error}", self.number),
        }
    }

    /// How often to look at connections that go on.
    fn period(&self) -> Duration {
        let settings = &self.shared.settings;
        let idle = settings.idle_timeout.map(|idle| idle / 4);
        let times = idle.into_iter().chain(settings.keepalive);
        times
            .fold(LOOK, Duration::min)
            .max(Duration::from_millis(250))
    }

    fn obey(&mut self) {
        self.shared.calm(self.number);
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::Open(attached, listeners) => {
                    for which in 0..listeners.len() {
                        self.open(Door {
                            attached: Arc::clone(&attached),
                            listeners: Arc::clone(&listeners),
                            which,
                            rests_until: None,
                            told: 0,
                        });
                    }
                }
                Command::Shut(id, at) => {
                    self.close_doors(|door| door.attached.id == id);
                    self.namespaces.leave(id);
                    self.forget_cuts();
                    self.cuts.push((id, at));
                    self.wake_by(at);
                }
                Command::Take(accepted) => self.begin(accepted),
                Command::Drain(at) => {
                    self.close_doors(|_| true);
                    self.drain = Some(at);
                    self.wake_by(at);
                }
            }
        }
    }

    fn open(&mut self, door: Door) {
        let number = self.doors.iter().position(Option::is_none);
        let number = number.unwrap_or_else(|| {
            self.doors.push(None);
            self.doors.len() - 1
        });
        self.doors[number] = Some(door);
        self.listen(number);
    }

    /// Has the kernel tell of connections; of several workers it wakes one.
    fn listen(&mut self, number: usize) {
        let Some(Some(door)) = self.doors.get_mut(number) else {
            return;
        };
        let flags = EventFlags::IN | EventFlags::EXCLUSIVE;
        let data = EventData::new_u64(OTHER | number as u64);
        let listener = &door.listeners[door.which];
        match epoll::add(&self.epoll, &listener.socket, data, flags) {
            Ok(()) | Err(Errno::EXIST) => door.rests_until = None,
            Err(error) => {
                let at = listener.address;
                tracing::error!("worker {}: cannot wait for {at}: {error}", self.number);
                door.rests_until = Some(self.now + REST);
                self.wake_by(self.now + REST);
            }
        }
    }

    /// Leaves a listening socket alone for a while: connections wait in the kernel.
    fn rest(&mut self, number: usize) {
        if let Some(Some(door)) = self.doors.get_mut(number) {
            let _ = epoll::delete(&self.epoll, &door.listeners[door.which].socket);
            door.rests_until = Some(self.now + REST);
            self.wake_by(self.now + REST);
        }
    }

    /// Stops accepting. Another process may go on with the same sockets: of connections for which the
    /// kernel has woken this worker it told nobody else, so that they are taken still.
    fn close_doors(&mut self, which: impl Fn(&Door) -> bool) {
        for number in 0..self.doors.len() {
            let Some(door) = self.doors[number].take_if(|door| which(door)) else {
                continue;
            };
            let _ = epoll::delete(&self.epoll, &door.listeners[door.which].socket);
            while self.shared.limits.take(&door.attached.open) {
                match self.accept(&door) {
                    Ok(Some(accepted)) => self.begin(accepted),
                    Ok(None) => {}
                    Err(_) => break,
                }
            }
        }
    }

    /// Takes a connection that waits, within the limits already; `None` if its client has given up.
    fn accept(&self, door: &Door) -> Result<Option<Accepted>, Errno> {
        let listener = &door.listeners[door.which];
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let accepted = net::acceptfrom_with(&listener.socket, flags);
        let found = accepted.map(|(socket, client)| {
            let client = client.and_then(|client| socket::address(client).ok())?;
            Some(Accepted {
                socket,
                client,
                attached: Arc::clone(&door.attached),
                direction: listener.direction,
            })
        });
        if !matches!(found, Ok(Some(_))) {
            self.shared.limits.give_back(&door.attached.open);
        }
        found
    }

    /// Accepts from a listening socket.
    fn answer(&mut self, number: usize) {
        let Some(Some(door)) = self.doors.get_mut(number) else {
            return;
        };
        // One, which is all there is as a rule; many, where the last wait told of some, too.
        let many = door.told + 1 == self.waits;
        door.told = self.waits;
        for _ in 0..if many { ACCEPTS } else { 1 } {
            let Some(Some(door)) = self.doors.get(number) else {
                return;
            };
            if !self.shared.limits.take(&door.attached.open) {
                self.rest(number);
                return;
            }
            let accepted = match self.accept(door) {
                Ok(Some(accepted)) => accepted,
                Err(Errno::AGAIN) => return,
                Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                    self.shared.complain(error);
                    self.rest(number);
                    return;
                }
                // The client has given up in the meantime.
                Ok(None) | Err(_) => continue,
            };
            match self.shared.less_busy(self.number, LEAD) {
                Some(other) => {
                    if let Err(Command::Take(accepted)) =
                        self.shared.tell(other, Command::Take(accepted))
                    {
                        self.begin(accepted);
                    }
                }
                None => self.begin(accepted),
            }
        }
    }

    /// Decides on a connection, and goes about connecting it.
    fn begin(&mut self, accepted: Accepted) {
        let Accepted {
            socket,
            client,
            attached,
            direction,
        } = accepted;
        self.shared.loads[self.number].add();
        // A connection that was redirected arrives at the proxy's own address, not at a service's.
        let is_meant = |address| {
            attached.is_elsewhere(address) || matches!(self.index.find(address), Found::Service(_))
        };
        let Ok(destination) = socket::original_destination(&socket, client, is_meant) else {
            // It was reset already: there is nobody to serve, and nothing to say of it.
            self.shared.loads[self.number].sub();
            self.shared.limits.give_back(&attached.open);
            return;
        };
        let route = route::decide(&self.index, &attached, direction, client, destination);
        let addresses = [client, destination];
        let (target, refused) = match route {
            Route::Service(target) => (Some(target), None),
            Route::Straight => (None, None),
            Route::Refused(flag, target) => (target, Some(flag)),
        };
        // Whom a service leads to is known when somebody has taken the connection.
        let peer = match (direction, &target) {
            (Direction::Inbound, _) => self.index.workload(client.ip()),
            (Direction::Outbound, None) => self.index.workload(destination.ip()),
            (Direction::Outbound, Some(_)) => None,
        };
        let flag = refused.unwrap_or_default();
        let counters = attached.counters(direction, target.as_deref(), peer, flag);
        let mut connection =
            Connection::new(socket, attached, direction, addresses, counters, self.now);
        connection.target = target;
        connection.dial = Some(Box::new(Dial {
            tried: Vec::new(),
            error: None,
            left: self.shared.settings.attempts.max(1),
        }));
        if let Some(flag) = refused {
            self.end(connection, flag, true);
            return;
        }
        if self.next_look <= self.now {
            // There was nothing to look at for a while.
            self.next_look = self.now + self.period();
        }
        let first = match connection.first_words(&mut self.buffers) {
            Ok(first) => first,
            Err(flag) => {
                self.end(connection, flag, true);
                return;
            }
        };
        let key = self.table.insert(Box::new(connection));
        self.wake_by(self.next_look);
        self.dial(key, first);
        if let Err(error) = self.watch(key, Side::Client) {
            self.fail(key, error);
        }
    }

    /// Has the kernel tell what happens to a connection's socket.
    fn watch(&mut self, key: Key, side: Side) -> io::Result<()> {
        let Some(connection) = self.table.get_mut(key) else {
            return Ok(());
        };
        let Some(end) = connection.end_mut(side) else {
            return Ok(());
        };
        end.asks_for_space = !end.writable;
        let (token, flags) = (token(key, side), flags(end));
        Ok(epoll::add(&self.epoll, &end.socket, token, flags)?)
    }

    /// Starts to connect to the next endpoint; refuses the client if there is none. What the client has
    /// said already are the first bytes of the shared buffer, `first` of them.
    fn dial(&mut self, key: Key, mut first: usize) {
        loop {
            let Some(connection) = self.table.get_mut(key) else {
                return;
            };
            connection.set_endpoint_socket(None);
            let client = connection.client.ip();
            let v4 = connection.destination.is_ipv4();
            let speaks = first > 0 || connection.has_words();
            let Some(dial) = &mut connection.dial else {
                return;
            };
            let next = match &connection.target {
                _ if dial.left == 0 => None,
                Some(target) => target.choose(v4, client, &dial.tried),
                None => dial.tried.is_empty().then_some(connection.destination),
            };
            let Some(endpoint) = next else {
                self.finish(key, Flag::ConnectFailure, true);
                return;
            };
            if connection.target.is_some() && connection.attached.is_own(endpoint) {
                dial.tried.push(endpoint);
                dial.error = Some(io::Error::other("the endpoint is this proxy"));
                continue;
            }
            dial.left -= 1;
            connection.endpoint = endpoint;
            let settings = &self.shared.settings;
            let transparent = settings.transparent && connection.direction == Direction::Inbound;
            let manner = Manner {
                mark: settings
                    .transparent_mark
                    .filter(|_| transparent)
                    .or(settings.mark),
                from: transparent.then_some(client),
                speaks,
            };
            let made = self
                .namespaces
                .enter(&connection.attached)
                .and_then(|()| socket::connect(endpoint, manner));
            let attempt = dial.tried.len();
            match made {
                Ok(socket) => {
                    connection.set_endpoint_socket(Some(socket));
                    let begun = connection.begin(&mut self.buffers, first);
                    first = 0;
                    let reached = match begun {
                        // Those on the same machine are, by now.
                        Ok(reached) => reached,
                        Err(error) => {
                            self.missed(key, error);
                            continue;
                        }
                    };
                    if reached {
                        self.reached(key);
                    } else {
                        let until = self.now + settings.connect_timeout;
                        self.expect(until, key, attempt);
                    }
                    match self.watch(key, Side::Endpoint) {
                        Ok(()) => return,
                        // What was said to this one cannot be said to another.
                        Err(_) if reached => {
                            self.finish(key, Flag::ConnectFailure, true);
                            return;
                        }
                        Err(error) => self.missed(key, error),
                    }
                }
                Err(error) => self.missed(key, error),
            }
        }
    }

    /// Gives an attempt to connect until this time.
    fn expect(&mut self, until: Instant, key: Key, attempt: usize) {
        // Most before it have connected long since: for each that comes, up to two of them go.
        for _ in 0..2 {
            if let Some(&(_, key, attempt)) = self.dialing.front()
                && !self.is_dialing(key, attempt)
            {
                self.dialing.pop_front();
            }
        }
        self.dialing.push_back((until, key, attempt));
        self.wake_by(until);
    }

    /// Notes that an endpoint was tried in vain.
    fn missed(&mut self, key: Key, error: io::Error) {
        if let Some(connection) = self.table.get_mut(key)
            && let Some(dial) = &mut connection.dial
        {
            dial.tried.push(connection.endpoint);
            dial.error = Some(error);
        }
    }

    fn fail(&mut self, key: Key, error: io::Error) {
        self.missed(key, error);
        self.finish(key, Flag::ConnectFailure, true);
    }

    /// What the kernel tells of a connection's socket.
    fn told(&mut self, key: Key, side: Side, flags: EventFlags) {
        let Some(connection) = self.table.get_mut(key) else {
            return;
        };
        let dialing = connection.dial.is_some();
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
            // Nobody waits for the answer any more.
            (true, Side::Client) if broken => self.finish(key, Flag::ClientReset, true),
            (true, Side::Client) => {}
            (true, Side::Endpoint) => self.dialed(key, flags),
        }
    }

    /// An attempt to connect has come to something.
    fn dialed(&mut self, key: Key, flags: EventFlags) {
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
            self.missed(key, error);
            self.now = Instant::now();
            self.dial(key, 0);
        } else if flags.contains(EventFlags::OUT) {
            self.reached(key);
            self.drive(key);
        }
    }

    /// The endpoint has taken the connection.
    fn reached(&mut self, key: Key) {
        let clock = self.clock();
        if let Some(connection) = self.table.get_mut(key) {
            connection.active = clock;
            connection.dial = None;
            if let Some(target) = &connection.target {
                let peer = self.index.workload(connection.endpoint.ip());
                let (direction, flag) = (connection.direction, Flag::None);
                connection.counters =
                    (connection.attached).counters(direction, Some(target), peer, flag);
            }
            connection.counters.opened.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Relays what there is.
    fn drive(&mut self, key: Key) {
        let clock = self.clock();
        let Some(connection) = self.table.get_mut(key) else {
            return;
        };
        if connection.dial.is_some() {
            return;
        }
        connection.active = clock;
        let step = connection.pump(&mut self.buffers);
        connection.grant();
        for side in [Side::Client, Side::Endpoint] {
            if let Some(end) = connection
                .end_mut(side)
                .filter(|end| !end.writable && !end.asks_for_space)
            {
                end.asks_for_space = true;
                // It tells at once if there is some by now. It fails only for want of memory.
                let _ = epoll::modify(&self.epoll, &end.socket, token(key, side), flags(end));
            }
        }
        match step {
            Ok(Step::Waiting) => {}
            Ok(Step::More) => {
                if !connection.queued {
                    connection.queued = true;
                    self.turns.push_back(key);
                }
            }
            Ok(Step::Done) => self.finish(key, Flag::None, false),
            Err(flag) => self.finish(key, flag, true),
        }
    }

    fn finish(&mut self, key: Key, flag: Flag, reset: bool) {
        if let Some(connection) = self.table.remove(key) {
            self.end(*connection, flag, reset);
        }
    }

    /// Ends a connection: closes its sockets, counts it, and leaves a record.
    fn end(&mut self, mut connection: Connection, flag: Flag, reset: bool) {
        connection.abandon(&mut self.buffers);
        if reset {
            connection.reset();
        }
        let dial = connection.dial.take();
        let reached = dial.is_none();
        if reached {
            connection.count();
            connection.counters.closed.fetch_add(1, Ordering::Relaxed);
        } else {
            let target = connection.target.as_deref();
            let counters = connection
                .attached
                .counters(connection.direction, target, None, flag);
            counters.failed.fetch_add(1, Ordering::Relaxed);
        }
        if self.shared.log.is_on() {
            let tried = dial.as_ref().is_some_and(|dial| !dial.tried.is_empty());
            self.shared.log.record(Record {
                ended: SystemTime::now(),
                attached: Arc::clone(&connection.attached),
                direction: connection.direction,
                client: connection.client,
                destination: connection.destination,
                endpoint: (reached || tried).then_some(connection.endpoint),
                target: connection.target.clone(),
                bytes: connection.bytes(),
                duration: connection.opened.elapsed(),
                flag,
                error: dial.and_then(|dial| dial.error),
            });
        }
        self.shared.limits.give_back(&connection.attached.open);
        self.shared.loads[self.number].sub();
        let id = connection.attached.id;
        if self.cuts.iter().any(|(shut, _)| *shut == id) {
            self.namespaces.leave(id);
        }
    }

    /// Does what it is time for, and sets the timer for what is next.
    fn watch_clock(&mut self) {
        // What has expired is there to be read until it is.
        let _ = rustix::io::read(&self.timer, &mut [0; 8]);
        self.alarm = None;
        while let Some(&(at, key, attempt)) = self.dialing.front() {
            let current = self.is_dialing(key, attempt);
            if current && at > self.now {
                break;
            }
            self.dialing.pop_front();
            if current {
                self.missed(key, io::ErrorKind::TimedOut.into());
                self.dial(key, 0);
            }
        }
        for number in 0..self.doors.len() {
            if let Some(Some(door)) = self.doors.get(number)
                && door.rests_until.is_some_and(|until| until <= self.now)
            {
                self.listen(number);
            }
        }
        if self.next_look <= self.now {
            self.look();
        }
        self.cut();

        let dialing = self.dialing.front().map(|(at, ..)| *at);
        let going_on = self.table.len() > 0 || self.buffers.has_spare();
        let look = going_on.then_some(self.next_look);
        let rests = self.doors.iter().flatten().filter_map(|d| d.rests_until);
        let cuts = self.cuts.iter().map(|(_, at)| *at);
        let times = dialing.into_iter().chain(look).chain(rests).chain(cuts);
        if let Some(next) = times.chain(self.drain).min() {
            self.wake_by(next);
        }
    }

    /// Whether this attempt to connect has come to nothing yet.
    fn is_dialing(&mut self, key: Key, attempt: usize) -> bool {
        let dial = self.table.get_mut(key).and_then(|c| c.dial.as_ref());
        dial.is_some_and(|dial| dial.tried.len() == attempt)
    }

    /// Brings counters up to date, ends what is idle, and gives memory back.
    fn look(&mut self) {
        let period = self.period();
        let keepalive = self.shared.settings.keepalive;
        for connection in self.table.iter_mut().filter(|c| c.dial.is_none()) {
            connection.count();
            if let (false, Some(after)) = (connection.kept_alive, keepalive) {
                connection.keep_alive(after);
            }
        }
        if let Some(idle) = self.shared.settings.idle_timeout {
            let now = self.clock();
            // Clocks in connections may be behind by a period.
            let limit = ticks(idle + period);
            let idle = |c: &Connection| c.dial.is_none() && now.saturating_sub(c.active) >= limit;
            self.finish_all(Flag::Idle, idle);
        }
        if self.buffers.held() == 0 {
            self.buffers.trim();
        }
        let held = &self.shared.loads[self.number].held;
        held.store(self.buffers.held(), Ordering::Relaxed);
        self.next_look = self.now + period;
    }

    /// Time since the start, for connections.
    fn clock(&self) -> u32 {
        ticks(self.now - self.start)
    }

    /// Ends what should have ended by now.
    fn cut(&mut self) {
        let now = self.now;
        if self.drain.is_some_and(|at| at <= now) {
            self.finish_all(Flag::Cut, |_| true);
        }
        while let Some(place) = self.cuts.iter().position(|(_, at)| *at <= now) {
            let (id, _) = self.cuts.swap_remove(place);
            self.finish_all(Flag::Cut, |connection| connection.attached.id == id);
        }
    }

    /// Forgets attachments that are over: none of their connections is left here.
    fn forget_cuts(&mut self) {
        if !self.cuts.is_empty() {
            let open: HashSet<u64> = self.table.iter().map(|(_, c)| c.attached.id).collect();
            self.cuts.retain(|(id, _)| open.contains(id));
        }
    }

    /// Ends these, by a reset: nobody shall take it for the end of what was said.
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
}

/// Tenths of a second: enough for 13 years.
fn ticks(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis() / 100).unwrap_or(u32::MAX)
}
