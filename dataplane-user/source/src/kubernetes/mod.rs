//! The Kubernetes API as a source. It reads Services, EndpointSlices, and this node's own Node object. On request
//! ([`WantedKinds`]) it also reads the Pods on this node or on all nodes, Namespaces, and Istio's ServiceEntries and
//! WorkloadEntries.
//!
//! Each kind is listed once, page by page, and watched from there on (`follow`). The store combines the objects into
//! views. The first view appears when every kind was listed completely, so that an object that has not been read yet
//! does not count as removed. A later view contains all changes until the caller takes it.
//!
//! The source does not end when the API server is down. It retries with growing delays, and [`Health`] has the time of
//! the last contact, and the failure.
//!
//! Three others send single requests (`call`): a [`Reviewer`] asks the API server for the permissions of the bearer of a
//! token, an [`Announcer`] writes on Pods that they are captured, and [`StartupTaint`] removes a taint of the Node.

mod announce;
mod backoff;
mod call;
mod connect;
mod error;
mod failure;
mod fetch;
mod follow;
mod health;
mod review;
mod sight;
mod taint;
mod token;

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

pub use announce::{Announcer, Pods};
use connect::Connector;
pub use connect::{Settings, Target};
pub use error::ConnectError;
pub use failure::Failure;
use follow::Follower;
pub use health::{Health, KindHealth};
use model::Node;
pub use review::{Review, ReviewError, Reviewer};
pub use taint::StartupTaint;
use threads::may_panic;
use tokio::{
    sync::{mpsc, watch},
    task::{JoinSet, yield_now},
    time::{Instant, timeout_at},
};
use tracing::info;

use super::{
    Feed, Notice, OpenError, View, feed,
    ingest::{Perspective, Store},
    task::Task,
};
pub use crate::ingest::{Kind, Scope, WantedKinds, WantedPolicies};

/// The name of the thread that reads.
const THREAD: &str = "kubernetes";
/// Maximum number of messages that wait for the store. Beyond it, reading waits.
const QUEUE: usize = 1024;
/// Maximum number of endpoints that services of one namespace gain in one view. The others wait for the next view.
const ENDPOINTS_AT_ONCE: u64 = 1 << 17;

/// Time limits.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Limit for the beginning of an answer, and for the next piece of it.
    pub answer: Duration,
    /// Limit for the next line of a watch, if the server is known to send bookmarks, which it sends every minute.
    pub idle: Duration,
    /// Delay before the first retry. It doubles with each retry.
    pub retry: Duration,
    /// Maximum delay before a retry.
    pub retry_max: Duration,
    /// Time for which the server may refuse an optional kind before the agent continues without it. An API server that
    /// has just started refuses for some seconds because it does not know the RBAC rules yet.
    pub forbidden: Duration,
    /// Delay before the agent asks again for a kind that the cluster does not have; and the time for which reading of
    /// Istio's policies may fail in another way than `forbidden`, while the server answers for other kinds, before the
    /// agent continues without changes of the policies.
    pub missing: Duration,
    /// Time for which the Service of an EndpointSlice may be missing before it is reported: controllers create and
    /// delete the two one after the other.
    pub orphan: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            answer: Duration::from_secs(30),
            idle: Duration::from_secs(150),
            retry: Duration::from_millis(100),
            retry_max: Duration::from_secs(15),
            forbidden: Duration::from_secs(5),
            missing: Duration::from_secs(30),
            orphan: Duration::from_secs(30),
        }
    }
}

/// The newest view that was not taken yet.
///
/// A slow reader finds only the last view: changes that arrive during a write to the kernel are written together.
#[derive(Debug, Default)]
struct Latest(Mutex<Option<View>>);

impl Latest {
    /// Returns the newest view. `None` if it was already taken.
    fn take(&self) -> Option<View> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Stores a view. Returns whether the view before it had been taken.
    fn put(&self, mut view: View) -> bool {
        let mut slot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let untaken = slot.take();
        if let Some(untaken) = &untaken {
            view.follows(untaken);
        }
        *slot = Some(view);
        untaken.is_none()
    }
}

/// The API as a feed.
#[derive(Debug)]
pub struct Api {
    latest: Arc<Latest>,
    server: String,
    health: Arc<Health>,
    _reader: Task,
}

impl Api {
    /// Begins to read the API for this node.
    ///
    /// # Errors
    ///
    /// If no setting has the API server's address, or no thread can be started. It is not an error if the server is
    /// down.
    pub fn open(
        settings: Settings,
        node: &Arc<Node>,
        notify: impl Fn(Notice) + Clone + Send + Sync + 'static,
    ) -> Result<Self, OpenError> {
        settings.target.check()?;
        let server = settings.target.server_text();
        info!("reading {server}");
        let (latest, health) = (Arc::<Latest>::default(), Arc::<Health>::default());
        let (views, kinds, node) = (Arc::clone(&latest), Arc::clone(&health), Arc::clone(node));
        let connector = Arc::new(Connector::new(settings.target));
        let (patience, wanted) = (settings.patience, settings.wanted);
        let deaths = feed::deaths(THREAD, notify.clone());
        let ended = Arc::clone(&deaths);
        let reader = Task::start(THREAD, deaths, async move || {
            let changed = move || notify(Notice::Changed);
            let why = read(connector, patience, wanted, node, kinds, &views, changed).await;
            ended(THREAD, why);
        })
        .map_err(|error| OpenError::Thread {
            what: "the Kubernetes API",
            error,
        })?;
        Ok(Self {
            latest,
            server,
            health,
            _reader: reader,
        })
    }
}

impl Feed for Api {
    fn take(&mut self) -> Option<View> {
        self.latest.take()
    }

    fn health(&self) -> crate::Health {
        crate::Health::Kubernetes {
            server: self.server.clone(),
            kinds: Arc::clone(&self.health),
        }
    }
}

/// Reads until a task dies, which is a bug in this program, and returns the reason. Calls `changed` when there is a new
/// view in `latest` and the view before it was taken.
async fn read(
    connector: Arc<Connector>,
    patience: Patience,
    wanted: WantedKinds,
    node: Arc<Node>,
    health: Arc<Health>,
    latest: &Latest,
    changed: impl Fn(),
) -> String {
    let (messages, mut taken) = mpsc::channel(QUEUE);
    // The perspective on EndpointSlices depends on the node's zone, so they are read after the node.
    let (eyes, seen) = watch::channel(Perspective::default());
    let mut followers = JoinSet::new();
    health.want(wanted);
    for kind in Kind::ALL.into_iter().filter(|kind| wanted.includes(*kind)) {
        let follower = Follower {
            kind,
            connector: Arc::clone(&connector),
            patience,
            node: Arc::clone(&node),
            names: wanted.names,
            health: Arc::clone(&health),
            messages: messages.clone(),
        };
        followers.spawn(follower.run(seen.clone()));
    }
    drop(messages);
    let mut store = Store::new(node, wanted, Some(ENDPOINTS_AT_ONCE), patience.orphan);
    let mut batch = Vec::new();
    loop {
        let far = || Instant::now() + Duration::from_hours(1);
        let due = if store.is_behind() {
            // Messages that have arrived in the meantime are taken together with the waiting changes.
            yield_now().await;
            Instant::now()
        } else {
            store.due().unwrap_or_else(far)
        };
        let received = timeout_at(due, taken.recv_many(&mut batch, QUEUE));
        tokio::select! {
            received = received => match received {
                Ok(0) => return "nobody reads any more".to_owned(),
                Ok(_) => {}
                Err(_) => store.pass_time(),
            },
            // Followers run as long as their messages are received.
            Some(ended) = followers.join_next() => {
                return ended.err().map_or_else(|| "a kind is not read any more".to_owned(), |died| died.to_string());
            }
        }
        may_panic(THREAD);
        for message in batch.drain(..) {
            store.take(message);
        }
        eyes.send_if_modified(|eyes| {
            let now = store.eyes();
            let other = *eyes != now;
            *eyes = now;
            other
        });
        if let Some(view) = store.view()
            && latest.put(view)
        {
            changed();
        }
    }
}
