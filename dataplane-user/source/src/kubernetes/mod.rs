//! The Kubernetes API as a source: Services, EndpointSlices, and this node's own Node object;
//! where they are asked for ([`WantedKinds`]), the Pods on this node or on all of them, Namespaces, and Istio's ServiceEntries
//! and WorkloadEntries.
//!
//! Each kind is listed once, page by page, and watched from there on (`follow`). What was seen is
//! kept in the model's terms only, and put together into views (`store`): the first when every
//! kind was listed to its end, so that nothing is taken for gone that was not read yet; then one
//! for whatever has come by the time that somebody looks for a new one.
//!
//! Nothing here ends when the API server is away. It is asked again and again, at growing
//! intervals, and [`Health`] tells since when nothing was heard, and why.
//!
//! A [`Reviewer`] asks the API server what the bearer of a token may do.

mod connect;
mod error;
mod failure;
mod fetch;
mod follow;
mod health;
mod kind;
mod orphans;
mod pods;
mod review;
mod sight;
mod store;
mod token;

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
    thread::JoinHandle,
    time::Duration,
};

use connect::Connector;
pub use connect::{Settings, Target};
pub use error::ConnectError;
pub use failure::Failure;
use follow::Follower;
pub use health::{Health, KindHealth};
pub use kind::{Kind, Scope, WantedKinds};
use model::Node;
pub use review::{Review, ReviewError, Reviewer};
use sight::Perspective;
use store::Store;
use threads::{Deaths, may_panic};
use tokio::{
    runtime::Builder,
    sync::{mpsc, oneshot, watch},
    task::{JoinSet, yield_now},
    time::{Instant, timeout_at},
};
use tracing::info;

use super::{Feed, Notice, OpenError, View, feed};

/// The name of the thread that reads.
const THREAD: &str = "kubernetes";
/// Messages that may wait to be taken in: beyond that, reading waits.
const QUEUE: usize = 1024;

/// How long to wait for what.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For an answer to begin, and for the next piece of one.
    pub answer: Duration,
    /// For the next word of a watch, if the server is known to send bookmarks. It does so every
    /// minute.
    pub idle: Duration,
    /// Before what did not work is tried again, for the first time. Doubled each time.
    pub retry: Duration,
    /// The longest time before what did not work is tried again.
    pub retry_max: Duration,
    /// How long we may be refused what can be done without, before it is. An API server that has
    /// just started refuses for some seconds what it allows once it knows its own rules.
    pub forbidden: Duration,
    /// Before a kind that the cluster does not have is asked for again.
    pub missing: Duration,
    /// How long the Service of an EndpointSlice may be missing before that is said: controllers make
    /// and delete the two one after the other.
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

/// The newest view that nobody has taken yet.
///
/// A reader that is slow finds the last view, not all of those before it: changes that come while
/// the kernel is written to are written together.
#[derive(Debug, Default)]
struct Latest(Mutex<Option<View>>);

impl Latest {
    /// Takes the newest view; none if it was taken before.
    fn take(&self) -> Option<View> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Puts a view there; whether the one before had been taken.
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
    _reader: Reader,
}

impl Api {
    /// Begins to read the API, for this node.
    ///
    /// # Errors
    ///
    /// Nothing says where the API server is, or no thread can be started. A server that is away is no error.
    pub fn open(
        settings: Settings,
        node: &Arc<Node>,
        notify: impl Fn(Notice) + Clone + Send + Sync + 'static,
    ) -> Result<Self, OpenError> {
        settings.target.check()?;
        let server = settings.target.server_text();
        info!("reading {server}");
        let (latest, health) = (Arc::<Latest>::default(), Arc::<Health>::default());
        let died = notify.clone();
        let reader = Reader::start(
            settings,
            Arc::clone(node),
            Arc::clone(&health),
            Arc::clone(&latest),
            move || notify(Notice::Changed),
            &feed::deaths(THREAD, died),
        )
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

/// A thread that reads the API. Dropping it ends it.
#[derive(Debug)]
struct Reader {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Option<()>>>,
}

impl Reader {
    /// Starts to read, for this node. `changed` is called when there is a new view in `latest`
    /// after the one before was taken; `deaths` if nothing is read any more, with the reason, which is a fault
    /// of ours.
    ///
    /// # Errors
    ///
    /// If no thread can be started. That the server is not there is none: it will be.
    fn start(
        settings: Settings,
        node: Arc<Node>,
        health: Arc<Health>,
        latest: Arc<Latest>,
        changed: impl Fn() + Send + 'static,
        deaths: &Deaths,
    ) -> io::Result<Self> {
        let connector = Arc::new(Connector::new(settings.target));
        let runtime = Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(2)
            .build()?;
        let (patience, wanted) = (settings.patience, settings.wanted);
        let (stop, stopped) = oneshot::channel();
        let ended = Arc::clone(deaths);
        let thread = threads::start(THREAD, Arc::clone(deaths), move || {
            runtime.block_on(async {
                tokio::select! {
                    why = read(connector, patience, wanted, node, health, &latest, changed) => ended(THREAD, why),
                    _ = stopped => {}
                }
            });
            // A name that is being looked up does not hold up the end.
            runtime.shutdown_background();
        })?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // It may have ended on its own, and then there is nobody to tell.
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Reads for ever; or until a task dies, and why.
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
    // How EndpointSlices look depends on the node's zone, so they are read when that is known.
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
    let mut store = Store::new(node, wanted, patience);
    let mut batch = Vec::new();
    loop {
        let far = || Instant::now() + Duration::from_hours(1);
        let due = if store.is_behind() {
            // What has come meanwhile goes with the rest.
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
            // They go on for as long as their messages are taken.
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
