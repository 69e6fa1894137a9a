//! Faults of the server, and the requests that it got.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::watch;

use super::Resource;

/// A request.
#[derive(Clone, Debug)]
pub struct Asked {
    /// The kind of objects.
    pub resource: Option<Resource>,
    /// Whether the request is a watch.
    pub watch: bool,
    /// Whether the request changes an object.
    pub writes: bool,
    /// `resourceVersion`.
    pub version: Option<String>,
    /// Whether it asks for a further page of a list.
    pub continued: bool,
    /// The path.
    pub path: String,
    /// The parameters as they came.
    pub query: String,
    /// The status that it was answered with.
    pub answered: u16,
    /// When.
    pub at: Instant,
}

/// How watches are broken off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Break {
    /// As the server ends them after their time.
    Orderly,
    /// In the middle, as a connection breaks.
    Abrupt,
}

#[derive(Debug)]
struct Knobs {
    bookmarks: Duration,
    gone_as_status: bool,
    slow: Option<(usize, Duration)>,
    refusals: VecDeque<(u16, Option<u64>)>,
    withheld: Option<(Resource, u16)>,
    refused_writes: Option<u16>,
    cut_lists: usize,
    asked: Vec<Asked>,
    log_requests: bool,
}

/// The server's faults. A handle: clones are of the same server.
#[derive(Clone, Debug)]
pub struct Faults {
    knobs: Arc<Mutex<Knobs>>,
    breaks: watch::Sender<(u64, Break)>,
    mute: watch::Sender<bool>,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            knobs: Arc::new(Mutex::new(Knobs {
                bookmarks: Duration::from_mins(1),
                gone_as_status: false,
                slow: None,
                refusals: VecDeque::new(),
                withheld: None,
                refused_writes: None,
                cut_lists: 0,
                asked: Vec::new(),
                log_requests: true,
            })),
            breaks: watch::Sender::new((0, Break::Orderly)),
            mute: watch::Sender::new(false),
        }
    }
}

impl Faults {
    /// Sets how often watches get a bookmark: by default every minute.
    pub fn bookmarks_every(&self, interval: Duration) {
        self.lock().bookmarks = interval;
    }

    /// Whether a watch of a version that is forgotten is answered with status 410, rather than with
    /// an `ERROR` event.
    pub fn gone_as_status(&self, yes: bool) {
        self.lock().gone_as_status = yes;
    }

    /// Answers come in pieces of so many bytes, with a pause after each.
    pub fn slow(&self, pieces: Option<(usize, Duration)>) {
        self.lock().slow = pieces;
    }

    /// Answers the next requests with a status, and with how many seconds to stay away.
    pub fn refuse(&self, times: usize, status: u16, retry_after: Option<u64>) {
        let more = std::iter::repeat_n((status, retry_after), times);
        self.lock().refusals.extend(more);
    }

    /// Answers all requests for a resource with a status. 0: an answer of which nothing comes; 429: with an hour to stay
    /// away.
    pub fn withhold(&self, what: Option<(Resource, u16)>) {
        self.lock().withheld = what;
    }

    /// Answers all requests that change an object with a status.
    pub fn refuse_writes(&self, status: Option<u16>) {
        self.lock().refused_writes = status;
    }

    /// Breaks off the next lists halfway through.
    pub fn cut_lists(&self, times: usize) {
        self.lock().cut_lists = times;
    }

    /// Ends all watches, as after their time.
    pub fn end_watches(&self) {
        self.breaks.send_modify(|b| *b = (b.0 + 1, Break::Orderly));
    }

    /// Breaks the connections of all watches.
    pub fn break_watches(&self) {
        self.breaks.send_modify(|b| *b = (b.0 + 1, Break::Abrupt));
    }

    /// Makes watches stay open and send nothing, as if their machine had vanished.
    pub fn mute(&self, yes: bool) {
        self.mute.send_replace(yes);
    }

    /// The requests so far.
    pub fn asked(&self) -> Vec<Asked> {
        self.lock().asked.clone()
    }

    /// Forgets the requests, and sets whether to record them from now on.
    pub fn note_requests(&self, yes: bool) {
        let mut knobs = self.lock();
        knobs.asked.clear();
        knobs.log_requests = yes;
    }

    pub(super) fn note(&self, asked: Asked) {
        let mut knobs = self.lock();
        if knobs.log_requests {
            knobs.asked.push(asked);
        }
    }

    pub(super) fn bookmarks(&self) -> Duration {
        self.lock().bookmarks
    }

    pub(super) fn is_gone_as_status(&self) -> bool {
        self.lock().gone_as_status
    }

    pub(super) fn slowness(&self) -> Option<(usize, Duration)> {
        self.lock().slow
    }

    pub(super) fn refusal(&self, resource: Option<Resource>) -> Option<(u16, Option<u64>)> {
        let mut knobs = self.lock();
        match knobs.withheld {
            Some((withheld, status)) if resource == Some(withheld) => {
                Some((status, (status == 429).then_some(3600)))
            }
            _ => knobs.refusals.pop_front(),
        }
    }

    pub(super) fn refused_writes(&self) -> Option<u16> {
        self.lock().refused_writes
    }

    pub(super) fn cuts_list(&self) -> bool {
        let mut knobs = self.lock();
        let cuts = knobs.cut_lists > 0;
        knobs.cut_lists -= usize::from(cuts);
        cuts
    }

    pub(super) fn breaks(&self) -> watch::Receiver<(u64, Break)> {
        self.breaks.subscribe()
    }

    pub(super) fn muted(&self) -> watch::Receiver<bool> {
        self.mute.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, Knobs> {
        self.knobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
