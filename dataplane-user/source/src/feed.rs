//! The interface of sources: a [`Feed`] yields [`View`]s, reports its state ([`Health`]), and ends when it is dropped.

use std::{fmt, sync::Arc, time::Instant};

use model::{
    Entry, EntryName, Grant, PodAddresses, Problem, Route, RouteName, Service, ServiceName,
    Workload, WorkloadName,
};
use threads::Deaths;

use super::{health::Health, objects::NodeFacts};

/// A source that is read until it is dropped.
pub trait Feed: Send {
    /// Returns the newest view. `None` if there is no newer view than the last one that was returned.
    ///
    /// A view is complete: a feed that does not know everything yet, or can no longer read its source, returns none,
    /// and [`Feed::health`] has the reason.
    fn take(&mut self) -> Option<View>;

    /// Makes the next [`Feed::take`] read everything again. A feed whose server reports every change need not do so.
    fn refresh(&mut self) {}

    /// Returns the state of the feed, for use in other threads. It is the same object during the life of the feed.
    fn health(&self) -> Health;
}

/// The state of a source at one moment.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Every service, including host ports of pods. Shares unchanged services with the view before.
    pub services: imbl::OrdMap<ServiceName, Arc<Service>>,
    /// Every ServiceEntry with its endpoints, without the addresses that this node assigns to hosts.
    pub entries: imbl::OrdMap<EntryName, Arc<Entry>>,
    /// Every route that is attached to a Service.
    pub routes: imbl::OrdMap<RouteName, Arc<Route>>,
    /// Every ReferenceGrant.
    pub grants: imbl::OrdMap<ServiceName, Arc<Grant>>,
    /// The pods of this node, and of other nodes if they are wanted.
    pub workloads: imbl::OrdMap<WorkloadName, Arc<Workload>>,
    /// The addresses of these pods and their nodes, if entries are read.
    pub pods: PodAddresses,
    /// Whether the view has every Service of the cluster.
    pub whole: bool,
    /// Namespaces in which a Service or an EndpointSlice cannot be read. There, `whole` does not hold.
    pub unread: imbl::OrdSet<Arc<str>>,
    /// All namespaces of the cluster. `None` if the source does not have them.
    pub namespaces: Option<imbl::OrdSet<Arc<str>>>,
    /// Facts from this node's own object. `None` if the source has no nodes.
    pub node: Option<NodeFacts>,
    /// Parts that are left out because they cannot be served as written.
    pub problems: Arc<[Problem]>,
    /// Arrival time of the oldest change since the last view that was taken. `None` if it is unknown, as for a complete
    /// list.
    pub since: Option<Instant>,
}

impl View {
    /// Replaces an older view that was not taken.
    pub(super) fn follows(&mut self, untaken: &Self) {
        self.since = match (self.since, untaken.since) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
    }
}

/// A message from a feed to the thread that takes its views. The feed may send it from any thread.
#[derive(Debug)]
pub enum Notice {
    /// There is a view to [take](Feed::take).
    Changed,
    /// The feed has ended because of a bug in this program.
    Died {
        /// The thread that ended.
        thread: &'static str,
        /// The reason.
        why: String,
    },
}

/// Reports threads of a feed that have died.
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
