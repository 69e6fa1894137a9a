//! The one way to be a source: a [`Feed`] yields [`View`]s, says how it is doing ([`Health`]), and ends when it
//! is dropped.

use std::{fmt, sync::Arc, time::Instant};

use model::{
    Entry, EntryName, Grant, PodAddresses, Problem, Route, RouteName, Service, ServiceName,
    Workload, WorkloadName,
};
use threads::Deaths;

use super::{health::Health, objects::NodeFacts};

/// A source that is being read, until it is dropped.
pub trait Feed: Send {
    /// Takes the newest view; none if there is nothing newer than the last one that was taken.
    ///
    /// A view is whole: a feed that does not know everything yet, or cannot read it any more, has none, and
    /// [`Feed::health`] says why.
    fn take(&mut self) -> Option<View>;

    /// Reads everything anew before the next [`Feed::take`], although nothing told of a change. A feed that is
    /// told of every change by its server need not.
    fn refresh(&mut self) {}

    /// How reading goes, for other threads to look at. It stays the same one for the life of the feed.
    fn health(&self) -> Health;
}

/// Everything that a source says at one moment.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Every service, host ports of pods among them; shares with the view before what did not change.
    pub services: imbl::OrdMap<ServiceName, Arc<Service>>,
    /// Every ServiceEntry with its endpoints; without the addresses that this node gives to hosts.
    pub entries: imbl::OrdMap<EntryName, Arc<Entry>>,
    /// Every route that is attached to a Service.
    pub routes: imbl::OrdMap<RouteName, Arc<Route>>,
    /// Every ReferenceGrant.
    pub grants: imbl::OrdMap<ServiceName, Arc<Grant>>,
    /// The pods of this node, and of others, as far as they were asked for.
    pub workloads: imbl::OrdMap<WorkloadName, Arc<Workload>>,
    /// The addresses of these pods and their nodes, if entries are read.
    pub pods: PodAddresses,
    /// Whether every Service of the cluster is among them.
    pub whole: bool,
    /// Namespaces in which a Service or an EndpointSlice cannot be read, so that this is true of other namespaces only.
    pub unread: imbl::OrdSet<Arc<str>>,
    /// All namespaces of the cluster; none if the source does not have them.
    pub namespaces: Option<imbl::OrdSet<Arc<str>>>,
    /// What this node's own object tells; none if the source has nothing to say about nodes.
    pub node: Option<NodeFacts>,
    /// What is known to be left out, because it cannot be served as it is written.
    pub problems: Arc<[Problem]>,
    /// When the oldest change since the last view that was taken arrived; none if that is no measure of
    /// anything, as for a list of everything.
    pub since: Option<Instant>,
}

impl View {
    /// Has this view take the place of an older one that nobody took.
    pub(super) fn follows(&mut self, untaken: &Self) {
        self.since = match (self.since, untaken.since) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
    }
}

/// What a feed tells the thread that takes its views. May be called from any thread.
#[derive(Debug)]
pub enum Notice {
    /// There is something to [take](Feed::take).
    Changed,
    /// The feed has ended by a fault of its own.
    Died {
        /// The thread that ended.
        thread: &'static str,
        /// What it said.
        why: String,
    },
}

/// Tells of a thread of a feed's that has died.
pub(super) fn deaths(
    thread: &'static str,
    notify: impl Fn(Notice) + Send + Sync + 'static,
) -> Deaths {
    Arc::new(move |_, why| notify(Notice::Died { thread, why }))
}

impl fmt::Debug for dyn Feed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Feed({:?})", self.health())
    }
}
