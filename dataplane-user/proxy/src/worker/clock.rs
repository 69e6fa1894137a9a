//! The clock: time limits, and the upkeep of connections that last.

use std::{
    io,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use relay::Flag;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use super::Worker;
use crate::connection::Connection;

/// The maximum time between two upkeeps.
const UPKEEP: Duration = Duration::from_secs(5);

/// A worker's clock.
#[derive(Debug)]
pub struct Clock {
    /// Wakes the worker at `alarm`. It is set every few seconds; a time limit of each wait would be set
    /// and taken back for each message.
    pub timer: OwnedFd,
    pub(super) alarm: Option<Instant>,
    start: Instant,
    /// The time, which is not read for each message: at most [`Worker::period`] old.
    pub now: Instant,
}

impl Clock {
    /// Creates a clock without an alarm.
    ///
    /// # Errors
    /// If the process has no file descriptors left.
    pub fn new() -> io::Result<Self> {
        let timer = timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
        )?;
        let now = Instant::now();
        Ok(Self {
            timer,
            alarm: None,
            start: now,
            now,
        })
    }

    /// Reads the time.
    pub fn update(&mut self) {
        self.now = Instant::now();
    }

    /// Wakes the worker at this time, or before.
    pub fn wake_by(&mut self, at: Instant) {
        if self.alarm.is_some_and(|alarm| alarm <= at) {
            return;
        }
        // A millisecond more, so that it is not too early; a time of 0 would turn the timer off.
        let wait = at.saturating_duration_since(self.now) + Duration::from_millis(1);
        let time = Itimerspec {
            it_interval: Timespec::default(),
            it_value: Timespec::try_from(wait).unwrap_or_default(),
        };
        match timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &time) {
            Ok(_) => self.alarm = Some(at),
            Err(error) => tracing::error!("cannot set a worker's timer: {error}"),
        }
    }

    /// Takes note that the timer has expired.
    fn clear_alarm(&mut self) {
        // An expiry is reported until it is read.
        let _ = rustix::io::read(&self.timer, &mut [0; 8]);
        self.alarm = None;
    }

    /// The time since the start, for [`Connection::active`].
    pub fn ticks(&self) -> u32 {
        ticks(self.now - self.start)
    }
}

/// A duration in tenths of a second: enough for 13 years.
fn ticks(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis() / 100).unwrap_or(u32::MAX)
}

impl Worker {
    /// The time between two upkeeps.
    fn period(&self) -> Duration {
        let settings = &self.shared.settings;
        let idle = settings.idle_timeout.map(|idle| idle / 4);
        let times = idle.into_iter().chain(settings.patience.keepalive);
        times
            .fold(UPKEEP, Duration::min)
            .max(Duration::from_millis(250))
    }

    /// Sees to it that a new connection is looked at a period from now at the latest.
    pub fn schedule_upkeep(&mut self) {
        if self.next_upkeep <= self.clock.now {
            // There was no connection for a while.
            self.next_upkeep = self.clock.now + self.period();
        }
        self.clock.wake_by(self.next_upkeep);
    }

    /// Performs the tasks that are due, and sets the timer for the next.
    pub fn on_timer(&mut self) {
        self.clock.clear_alarm();
        let (attempt, held) = (self.give_up(), self.give_up_held());
        for number in 0..self.acceptors.len() {
            if let Some(Some(acceptor)) = self.acceptors.get(number)
                && (acceptor.paused_until).is_some_and(|until| until <= self.clock.now)
            {
                self.resume(number);
            }
        }
        if self.next_upkeep <= self.clock.now {
            self.upkeep();
        }
        self.cut();

        let has_spare = self.buffers.has_spare() || self.stock.has_some();
        let needs_upkeep = self.table.len() > 0 || has_spare;
        let upkeep = needs_upkeep.then_some(self.next_upkeep);
        let acceptors = self.acceptors.iter().flatten();
        let pauses = acceptors.filter_map(|acceptor| acceptor.paused_until);
        let shut = self.shut.iter().map(|(_, deadline)| *deadline);
        let times = attempt
            .into_iter()
            .chain(held)
            .chain(upkeep)
            .chain(pauses)
            .chain(shut);
        if let Some(next) = times.chain(self.drain).min() {
            self.clock.wake_by(next);
        }
    }

    /// Brings the counters up to date, turns on keepalive, ends idle connections, and returns spare
    /// memory to the system.
    fn upkeep(&mut self) {
        let period = self.period();
        let patience = self.shared.settings.patience;
        let connections = self.table.iter_mut();
        for connection in connections.filter(|connection| !connection.session.is_dialing()) {
            connection.session.count();
            if !connection.kept_alive {
                connection.keep_alive(patience);
            }
        }
        if let Some(idle) = self.shared.settings.idle_timeout {
            let now = self.clock.ticks();
            // Clocks in connections may be behind by a period.
            let limit = ticks(idle + period);
            let is_idle = |connection: &Connection| {
                !connection.session.is_dialing() && now.saturating_sub(connection.active) >= limit
            };
            self.finish_all(Flag::Idle, is_idle);
        }
        if self.buffers.held() == 0 {
            self.buffers.trim();
        }
        self.stock.clear();
        self.load().set_held(self.buffers.held());
        self.next_upkeep = self.clock.now + period;
    }

    /// Resets the connections whose deadline has passed.
    fn cut(&mut self) {
        let now = self.clock.now;
        if self.drain.is_some_and(|deadline| deadline <= now) {
            self.finish_all(Flag::Cut, |_| true);
        }
        let is_due = |(_, deadline): &(u64, Instant)| *deadline <= now;
        while let Some(position) = self.shut.iter().position(is_due) {
            let (id, _) = self.shut.swap_remove(position);
            self.finish_all(Flag::Cut, |connection| connection.session.is_of(id));
        }
    }
}
