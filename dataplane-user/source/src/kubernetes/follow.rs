//! Follows one kind: lists it, watches it from there, and lists it again when it must.

use std::{borrow::Cow, sync::Arc, time::Duration};

use model::Node;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep},
};
use tracing::{debug, info, warn};

use super::{
    Failure, Health, Kind, Patience,
    backoff::Backoff,
    connect::{Connection, Connector},
    failure::Status,
    fetch::{Fetch, Lines},
    health::KindHealth,
    sight::KindPerspective,
};
use crate::ingest::{Message, Object, Perspective, Text};

/// Range of the duration of a watch, in seconds. Each watch draws its own, so that the watches of a cluster's nodes do
/// not end at the same time.
const WATCH_SECONDS: std::ops::RangeInclusive<u32> = 230..=290;
/// Appended to the failure if the API server cannot be reached at the address in a pod's environment.
const AT_A_SERVICE: &str = ". That is the address of a service (KUBERNETES_SERVICE_HOST), which nothing serves on a \
     node whose only service proxy is this agent: give the server's own address, or that of a load balancer before \
     it, with --api-server (apiServer in the manifests and the chart)";
/// A watch that lasted at least this long did not fail, even if it had no event.
const LASTED: Duration = Duration::from_secs(5);

/// Follows one kind.
pub struct Follower {
    pub kind: Kind,
    pub connector: Arc<Connector>,
    pub patience: Patience,
    /// This node, without the facts of its object.
    pub node: Arc<Node>,
    /// See [`WantedKinds::names`](super::WantedKinds::names).
    pub names: bool,
    pub health: Arc<Health>,
    pub messages: mpsc::Sender<Message>,
}

/// The reason why a watch ended.
enum Ended {
    /// The receiver of the messages is gone.
    Unwanted,
    /// The perspective has changed, so everything must be read again.
    Otherwise,
    /// The server ended the watch, as it does after some time.
    ByServer,
    /// The cluster does not have the kind.
    Missing,
    /// A request failed.
    Failed(Failure),
}

/// A list that was read completely.
struct Listed {
    /// The path of the list.
    path: String,
    /// The version of the list, or of the last event since then.
    version: String,
}

impl From<Failure> for Ended {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// A page of a list.
#[derive(Deserialize)]
struct Page<'a> {
    #[serde(default)]
    metadata: PageMetadata,
    #[serde(borrow)]
    items: Option<Vec<&'a RawValue>>,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct PageMetadata {
    resource_version: String,
    #[serde(rename = "continue")]
    rest: Option<String>,
}

/// A line of a watch.
#[derive(Deserialize)]
struct Event<'a> {
    #[serde(rename = "type", borrow)]
    kind: Cow<'a, str>,
    #[serde(borrow)]
    object: &'a RawValue,
}

/// A bookmark: all changes up to this version were sent.
#[derive(Deserialize)]
struct Bookmark {
    metadata: PageMetadata,
}

impl Follower {
    /// Follows the kind until the receiver of the messages is gone.
    pub async fn run(self, mut eyes: watch::Receiver<Perspective>) {
        let mut backoff = Backoff::new(self.patience);
        let mut connection = None;
        let mut version = None;
        let mut before = None;
        let mut forbidden: Option<Instant> = None;
        // The end of the first failed attempt to read policies since the last success, while the server answers for other
        // kinds.
        let mut failing: Option<Instant> = None;
        let mut back = self.connector.back.subscribe();
        loop {
            let seen = eyes.wait_for(|eyes| self.sight(eyes).is_some()).await;
            let Ok(sight) = seen.map(|eyes| self.sight(&eyes)) else {
                return;
            };
            let Some(sight) = sight else { continue };
            // The perspective may have changed while no watch was running.
            if before.is_some_and(|before| before != sight) {
                version = None;
            }
            before = Some(sight.clone());
            let step = Step {
                follower: &self,
                health: self.health.of(self.kind),
                sight: &sight,
            };
            back.mark_unchanged();
            let watches = step.health.watches();
            let result = step.take(&mut connection, &mut version, &mut eyes, &mut backoff);
            let ended = result.await;
            step.health.unwatch();
            forbidden = match &ended {
                Ended::Failed(failure) if failure.is_forbidden() => {
                    Some(forbidden.unwrap_or_else(Instant::now))
                }
                _ => None,
            };
            let mut kinds = Kind::ALL.into_iter();
            let answers = kinds.any(|kind| self.health.of(kind).is_watching());
            failing = match &ended {
                Ended::Failed(_) if self.kind.is_policy() => {
                    // The cluster may have the kind by now.
                    step.health.miss(false);
                    let was_read = step.health.watches() > watches;
                    let since = failing.filter(|_| !was_read);
                    let since = since.unwrap_or_else(Instant::now);
                    answers.then_some(since)
                }
                _ => None,
            };
            if let Ended::Failed(failure) = &ended
                && self.does_without(forbidden, failing)
                && step.refused(failure).await.is_err()
            {
                return;
            }
            // After `Retry-After`, or without the kind, the success of other kinds does not shorten the wait.
            let waits = match &ended {
                Ended::Failed(failure) => failure.retry_after().is_some() || forbidden.is_some(),
                _ => true,
            };
            let longest = self.longest_rest(&ended, forbidden, failing);
            match ended {
                Ended::Unwanted => return,
                Ended::Otherwise => {
                    version = None;
                    continue;
                }
                Ended::ByServer => {
                    debug!("the watch of {} ended", self.kind);
                }
                Ended::Missing => {
                    version = None;
                    backoff.at_least(Some(self.patience.missing));
                }
                Ended::Failed(failure) if failure.is_expired() && version.is_some() => {
                    info!("{}: listing them anew: {failure}", self.kind);
                    version = None;
                }
                Ended::Failed(failure) => {
                    let doing = if version.is_some() { "watch" } else { "list" };
                    // An API server that has just started forbids everything until it has read the roles.
                    let brief = |since: Instant| since.elapsed() < self.patience.forbidden;
                    let lasting = !forbidden.is_some_and(brief);
                    step.failed(&failure, &mut connection, doing, lasting);
                    backoff.at_least(failure.retry_after());
                }
            }
            let rest = backoff.next();
            let rest = longest.map_or(rest, |longest| rest.min(longest));
            tokio::select! {
                () = sleep(rest) => {}
                // The server answers again.
                Ok(()) = back.changed(), if !waits => {}
            }
        }
    }

    /// Returns whether the agent continues without the kind: the server has forbidden it for long, or reading of Istio's
    /// policies has failed for longer, whatever the failures were.
    fn does_without(&self, forbidden: Option<Instant>, failing: Option<Instant>) -> bool {
        forbidden.is_some_and(|since| since.elapsed() >= self.patience.forbidden)
            || failing.is_some_and(|since| since.elapsed() >= self.patience.missing)
    }

    /// Returns the longest rest after an attempt, if it has a limit: when the patience ends, the agent continues without
    /// the kind at once, not at the next attempt.
    fn longest_rest(
        &self,
        ended: &Ended,
        forbidden: Option<Instant>,
        failing: Option<Instant>,
    ) -> Option<Duration> {
        let has_failed = matches!(ended, Ended::Failed(_));
        let (since, patience) = if forbidden.is_some() {
            (forbidden, self.patience.forbidden)
        } else if has_failed && self.kind.is_policy() && !self.health.of(self.kind).is_refused() {
            (failing, self.patience.missing)
        } else {
            return None;
        };
        let passed = since.map_or(Duration::ZERO, |since| since.elapsed());
        Some(patience.saturating_sub(passed)).filter(|left| !left.is_zero())
    }

    /// Returns the perspective on this kind. `None` if it is not known yet.
    fn sight(&self, eyes: &Perspective) -> Option<KindPerspective> {
        let (node, everywhere) = match self.kind {
            // Their endpoints are compared with this node's zone and region.
            Kind::Slice | Kind::ServiceEntry | Kind::WorkloadEntry => (eyes.node.as_ref()?, false),
            Kind::Pod => (eyes.node.as_ref()?, eyes.everywhere),
            _ => (&self.node, false),
        };
        Some(KindPerspective {
            node: Arc::clone(node),
            everywhere,
            names: self.names,
        })
    }
}

/// One round of listing and watching.
struct Step<'a> {
    follower: &'a Follower,
    health: &'a KindHealth,
    sight: &'a KindPerspective,
}

impl Step<'_> {
    /// Lists if there is no version to continue from, and watches from there until the watch ends.
    async fn take(
        &self,
        connection: &mut Option<Connection>,
        listed: &mut Option<Listed>,
        eyes: &mut watch::Receiver<Perspective>,
        backoff: &mut Backoff,
    ) -> Ended {
        let connected = match connection {
            Some(connection) => connection,
            None => match self.follower.connector.connect().await {
                Ok(new) => connection.insert(new),
                Err(error) => return Ended::Failed(error.into()),
            },
        };
        let fetch = |path: &str| Fetch {
            client: &connected.client,
            token: connected.token.as_deref(),
            path: path.to_owned(),
            patience: self.follower.patience,
            health: self.health,
        };
        let Listed { path, version } = match listed {
            Some(listed) => listed,
            None => match self.find(&fetch).await {
                Ok(found) => listed.insert(found),
                Err(ended) => return ended,
            },
        };
        let fetch = fetch(path);
        let watch = self.sight.watch(self.follower.kind);
        let mut watch = watch.timeout(rand::random_range(WATCH_SECONDS));
        watch.bookmarks = true;
        let mut lines = match fetch.watch(&watch, version).await {
            Ok(lines) => lines,
            Err(failure) => return failure.into(),
        };
        if let Some(failed) = self.health.watch() {
            info!(
                "{}: they can be read again, after {failed} s",
                self.follower.kind
            );
            self.follower.connector.back.send_replace(());
            // The age of views depends on this.
            if let Err(ended) = self.send(Message::Back).await {
                return ended;
            }
        }
        if self.health.refuse(false) {
            let allowed = Message::Refused(self.follower.kind, None);
            if let Err(ended) = self.send(allowed).await {
                return ended;
            }
        }
        let began = Instant::now();
        let mut told = false;
        let ended = tokio::select! {
            ended = self.watch(&mut lines, version, &mut told) => ended,
            true = self.seen_otherwise(eyes) => Ended::Otherwise,
        };
        if told || began.elapsed() > LASTED {
            backoff.reset();
        }
        match ended {
            // A broken connection is normal. It is a failure only if there is no new connection.
            Ended::Failed(failure @ (Failure::Broken(_) | Failure::Silent(_))) => {
                info!("{}: watching them anew: {failure}", self.follower.kind);
                *connection = None;
                Ended::ByServer
            }
            ended => ended,
        }
    }

    /// Waits until the perspective changes, forever if it never does.
    async fn seen_otherwise(&self, eyes: &mut watch::Receiver<Perspective>) -> bool {
        let sight = |eyes: &Perspective| self.follower.sight(eyes);
        let other = |eyes: &Perspective| sight(eyes).is_some_and(|sight| sight != *self.sight);
        eyes.wait_for(other).await.is_ok()
    }

    /// Lists all objects, in the newest version of the API that the server has for the kind.
    async fn find<'a>(&self, fetch: impl Fn(&str) -> Fetch<'a>) -> Result<Listed, Ended> {
        let kind = self.follower.kind;
        for version in kind.api_versions() {
            let apis = if version.contains('/') { "apis" } else { "api" };
            let path = format!("/{apis}/{version}/{}", kind.resource());
            match self.list(&fetch(&path)).await {
                Err(Ended::Failed(failure)) if kind.is_custom() && failure.is_missing() => {}
                Ok(version) => {
                    if self.health.miss(false) {
                        info!("{kind}: the cluster has them now");
                    }
                    return Ok(Listed { path, version });
                }
                Err(ended) => return Err(ended),
            }
        }
        let was_missing = self.health.miss(true);
        if self.health.refuse(false) {
            self.send(Message::Refused(kind, None)).await?;
        }
        // A kind that is installed anew is missing for a moment: known policies stay in force until the next attempt.
        if was_missing || !kind.is_policy() || self.health.lists() == 0 {
            self.send(Message::Missing(kind)).await?;
        }
        if !was_missing {
            let again = self.follower.patience.missing;
            info!("{kind}: the cluster does not have this kind; asking again every {again:?}");
        }
        Err(Ended::Missing)
    }

    /// Lists all objects. Returns the version of the list.
    async fn list(&self, fetch: &Fetch<'_>) -> Result<String, Ended> {
        let kind = self.follower.kind;
        let mut what = self.sight.list(kind);
        if self.health.lists() == 0 && !kind.is_policy() {
            // The first list may come from the API server's cache, because the watch brings newer changes. A later list
            // must not, because the cache may be older than known objects. The first list has one page, because servers
            // answer such a list that way.
            what.limit = None;
            what = what.match_any();
        }
        self.send(Message::Begin(kind)).await?;
        loop {
            let text = fetch.page(&what).await?;
            let page: Page<'_> = serde_json::from_slice(&text).map_err(Failure::from)?;
            for item in page.items.into_iter().flatten() {
                let object = kind.read(Text(item.get()), &self.sight.node, None);
                self.send(Message::Put(object, Instant::now())).await?;
            }
            what.continue_token = page.metadata.rest.filter(|rest| !rest.is_empty());
            // The token names the version of the remaining pages.
            (what.version_match, what.resource_version) = (None, None);
            if what.continue_token.is_none() {
                self.send(Message::End(kind, self.sight.everywhere)).await?;
                self.health.list();
                return Ok(page.metadata.resource_version);
            }
        }
    }

    /// Reads a watch to its end. Updates `version` with each event, and sets `told` if there was any event.
    async fn watch(&self, lines: &mut Lines<'_>, version: &mut String, told: &mut bool) -> Ended {
        let kind = self.follower.kind;
        // A server that sends no bookmarks may be silent until the watch ends.
        let longest = Duration::from_secs(u64::from(*WATCH_SECONDS.end()));
        let mut idle = self.follower.patience.idle.max(longest) + self.follower.patience.answer;
        loop {
            let line = match lines.next(idle).await {
                Ok(Some(line)) => line,
                Ok(None) => return Ended::ByServer,
                Err(failure) => return failure.into(),
            };
            let now = Instant::now();
            if line.is_empty() {
                continue;
            }
            let event: Event<'_> = match serde_json::from_slice(line) {
                Ok(event) => event,
                Err(error) => return Failure::from(error).into(),
            };
            let message: fn(Object, Instant) -> Message = match &*event.kind {
                "ADDED" | "MODIFIED" => Message::Put,
                "DELETED" => Message::Gone,
                "BOOKMARK" => {
                    let bookmark: Bookmark = match serde_json::from_str(event.object.get()) {
                        Ok(bookmark) => bookmark,
                        Err(error) => return Failure::from(error).into(),
                    };
                    *version = bookmark.metadata.resource_version;
                    *told = true;
                    idle = self.follower.patience.idle;
                    continue;
                }
                "ERROR" => {
                    let status = serde_json::from_str(event.object.get());
                    return Failure::from(status.unwrap_or_else(|_| Status {
                        message: event.object.get().to_owned(),
                        ..Status::default()
                    }))
                    .into();
                }
                // A later version of the API may have further events for clients that ask for them.
                other => {
                    debug!("{kind}: an event of an unknown type, {other:?}");
                    continue;
                }
            };
            let object = kind.read(Text(event.object.get()), &self.sight.node, None);
            if object.version.is_empty() {
                warn!(
                    "{kind}: an event without resourceVersion, of {}",
                    object.name
                );
            } else {
                version.clone_from(&object.version);
            }
            self.health.event();
            *told = true;
            if let Err(ended) = self.send(message(object, now)).await {
                return ended;
            }
        }
    }

    async fn send(&self, message: Message) -> Result<(), Ended> {
        let sent = self.follower.messages.send(message).await;
        sent.map_err(|_| Ended::Unwanted)
    }

    /// Continues without the kind, if the agent can serve without it.
    async fn refused(&self, failure: &Failure) -> Result<(), Ended> {
        let kind = self.follower.kind;
        if kind.without().is_none() || self.health.refuse(true) {
            return Ok(());
        }
        self.send(Message::Refused(kind, Some(failure.to_string())))
            .await
    }

    /// Reports a failure, in the log only if it is `lasting`. Makes the next attempt connect again if that may help.
    fn failed(
        &self,
        failure: &Failure,
        connection: &mut Option<Connection>,
        doing: &str,
        lasting: bool,
    ) {
        let server = match connection {
            Some(connection) => connection.server.clone(),
            None => self.follower.connector.target.server_text(),
        };
        let mut text = failure.told(&server, doing, self.follower.kind);
        if failure.is_of_network() && self.follower.connector.target.is_a_service() {
            text += AT_A_SERVICE;
        }
        if self.health.fail(&text, lasting) {
            warn!("{text}");
        } else {
            debug!("{text}");
        }
        if failure.is_of_connection() {
            *connection = None;
        }
    }
}
