//! Answers to lists and watches.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    body::{Body, Bytes},
    extract::{Query, Request, State},
    http::{Method, StatusCode, header},
    response::{IntoResponse, Response},
};
use http_body_util::{
    BodyExt as _, Collected,
    channel::{Channel, Sender},
};
use serde_json::{Value, json};
use tokio::{
    sync::watch::Receiver,
    time::{Interval, MissedTickBehavior, interval_at, sleep, sleep_until},
};

use super::{
    Cluster, Resource,
    cluster::Change,
    faults::{Asked, Break, Faults},
    nodes, patch,
    select::Selector,
    stored::Object,
};

/// The state that the server works with.
pub struct Site {
    pub cluster: Cluster,
    pub faults: Faults,
    pub tokens: Arc<Mutex<BTreeSet<String>>>,
    pub clients: Arc<Mutex<Clients>>,
}

/// Users by token, and the paths that each may get: for reviews.
#[derive(Debug, Default)]
pub struct Clients {
    /// Users by their tokens.
    pub users: HashMap<String, String>,
    /// Users and paths.
    pub may_get: BTreeSet<(String, String)>,
}

type Parameters = HashMap<String, String>;

/// Why a connection is broken.
#[derive(Debug, thiserror::Error)]
#[error("broken on purpose")]
struct Broken;

/// Answers a request.
pub async fn answer(
    State(site): State<Arc<Site>>,
    Query(parameters): Query<Parameters>,
    request: Request,
) -> Response {
    let path = request.uri().path();
    let resource = Resource::of_path(path).filter(|_| site.cluster.knows(path));
    let is_watch = parameters
        .get("watch")
        .is_some_and(|value| value == "true" || value == "1");
    let mut asked = Asked {
        resource,
        watch: is_watch,
        writes: request.method() == Method::PATCH,
        version: parameters.get("resourceVersion").cloned(),
        continued: parameters.contains_key("continue"),
        path: request.uri().path().to_owned(),
        query: request.uri().query().unwrap_or_default().to_owned(),
        answered: 0,
        at: Instant::now(),
    };
    let refusal = refuse(&site, &request);
    let review = Review::of_path(request.uri().path()).filter(|_| request.method() == Method::POST);
    let patched = patch::pod_of(request.uri().path()).filter(|_| asked.writes);
    let response = match (refusal, review, patched) {
        (Some(refusal), ..) => refusal,
        (None, Some(review), _) => review.answer(&site, request).await,
        (None, None, Some(pod)) => {
            let manager = parameters.get("fieldManager").cloned();
            let manager = manager.unwrap_or_default();
            let answer = patch::answer((&site.cluster, &site.faults), pod, &manager, request);
            let refused = |(code, reason, text): patch::Refusal| status(code, reason, &text, None);
            answer.await.unwrap_or_else(refused)
        }
        (None, None, None) => match resource {
            None => nodes::answer(&site.cluster, request)
                .await
                .unwrap_or_else(|| {
                    status(
                        404,
                        "NotFound",
                        "the server could not find the resource",
                        None,
                    )
                }),
            Some(resource) if is_watch => watch(&site, resource, &parameters),
            Some(resource) => list(&site, resource, &parameters),
        },
    };
    asked.answered = response.status().as_u16();
    site.faults.note(asked);
    response
}

fn refuse(site: &Site, request: &Request) -> Option<Response> {
    if let Some((code, retry)) = site.faults.refusal(Resource::of_path(request.uri().path())) {
        if code == 0 {
            let (sender, body) = Channel::<Bytes, Broken>::new(1);
            std::mem::forget(sender);
            return Some(Body::new(body).into_response());
        }
        return Some(status(code, "", "refused on purpose", retry));
    }
    let tokens = site.tokens.lock().unwrap_or_else(PoisonError::into_inner);
    let given = request.headers().get(header::AUTHORIZATION);
    let given = given.and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
    let known = tokens.is_empty() || given.is_some_and(|token| tokens.contains(token));
    (!known).then(|| status(401, "Unauthorized", "Unauthorized", None))
}

/// A review: a question about a client of another server.
#[derive(Clone, Copy)]
enum Review {
    /// The user of a token.
    Token,
    /// Whether a user may get a path.
    Access,
}

impl Review {
    fn of_path(path: &str) -> Option<Self> {
        match path {
            "/apis/authentication.k8s.io/v1/tokenreviews" => Some(Self::Token),
            "/apis/authorization.k8s.io/v1/subjectaccessreviews" => Some(Self::Access),
            _ => None,
        }
    }

    async fn answer(self, site: &Site, request: Request) -> Response {
        let body = request.into_body().collect().await;
        let body = body.map(Collected::to_bytes).unwrap_or_default();
        let Ok(mut review) = serde_json::from_slice::<Value>(&body) else {
            return status(400, "BadRequest", "the body is no review", None);
        };
        let clients = site.clients.lock().unwrap_or_else(PoisonError::into_inner);
        let spec = &review["spec"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        review["status"] = match self {
            Self::Token => match clients.users.get(&text(&spec["token"])) {
                Some(user) => json!({
                    "authenticated": true,
                    "user": { "username": user, "uid": "1", "groups": ["system:authenticated"] },
                }),
                None => json!({ "authenticated": false, "error": "invalid bearer token" }),
            },
            Self::Access => {
                let attributes = &spec["nonResourceAttributes"];
                let what = (text(&spec["user"]), text(&attributes["path"]));
                let may = attributes["verb"] == "get" && clients.may_get.contains(&what);
                json!({ "allowed": may })
            }
        };
        let kind = [(header::CONTENT_TYPE, "application/json")];
        (StatusCode::CREATED, kind, review.to_string()).into_response()
    }
}

/// A `Status`, in the form of the server's refusals.
fn status(code: u16, reason: &str, message: &str, retry: Option<u64>) -> Response {
    let body = status_text(code, reason, message, retry);
    let code = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    (code, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

fn status_text(code: u16, reason: &str, message: &str, retry: Option<u64>) -> String {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "code": code, "reason": reason, "message": message,
        "details": retry.map(|seconds| json!({ "retryAfterSeconds": seconds })),
    })
    .to_string()
}

fn expired() -> (u16, &'static str, &'static str) {
    (
        410,
        "Expired",
        "The resourceVersion is too old: it has been compacted.",
    )
}

fn list(site: &Site, resource: Resource, parameters: &Parameters) -> Response {
    let get = |name: &str| parameters.get(name).map(String::as_str).unwrap_or_default();
    let selector = match Selector::parse(get("labelSelector"), get("fieldSelector")) {
        Ok(selector) => selector,
        Err(wrong) => return status(400, "BadRequest", &wrong, None),
    };
    // Like the real server, answers from the watch cache in one piece.
    let limit = if get("resourceVersion") == "0" {
        0
    } else {
        get("limit").parse().unwrap_or(0)
    };
    let (at, after) = match get("continue").split_once(':') {
        Some((version, key)) => (version.parse().ok(), Some(key)),
        None => (None, None),
    };
    // One object more than the limit shows whether there is a further page.
    let take = if limit > 0 { limit + 1 } else { 0 };
    let cluster = &site.cluster;
    let Some((version, mut page)) = cluster.objects(resource, at, after, &selector, take) else {
        let (code, reason, message) = expired();
        return status(code, reason, message, None);
    };
    let more = limit > 0 && page.len() > limit;
    if more {
        page.truncate(limit);
    }
    let (kind, api_version) = resource.types();
    let mut metadata = json!({ "resourceVersion": version.to_string() });
    if more && let Some(last) = page.last() {
        metadata["continue"] = json!(format!("{version}:{}/{}", last.namespace, last.name));
    }
    let mut text = format!(
        r#"{{"kind":"{kind}List","apiVersion":"{api_version}","metadata":{metadata},"items":["#
    );
    for (index, object) in page.into_iter().enumerate() {
        if index > 0 {
            text.push(',');
        }
        text.push_str(&object.text);
    }
    text.push_str("]}\n");
    let cut = site.faults.cuts_list();
    let slow = site.faults.slowness();
    if !cut && slow.is_none() {
        return ([(header::CONTENT_TYPE, "application/json")], text).into_response();
    }
    let (mut sender, body) = Channel::<Bytes, Broken>::new(1);
    tokio::spawn(async move {
        let text = text.into_bytes();
        let whole = if cut { text.len() / 2 } else { text.len() };
        let (piece, pause) = slow.unwrap_or((usize::MAX, Duration::ZERO));
        for piece in text[..whole].chunks(piece) {
            if sender
                .send_data(Bytes::copy_from_slice(piece))
                .await
                .is_err()
            {
                return;
            }
            sleep(pause).await;
        }
        if cut {
            sender.abort(Broken);
        }
    });
    (
        [(header::CONTENT_TYPE, "application/json")],
        Body::new(body),
    )
        .into_response()
}

fn watch(site: &Arc<Site>, resource: Resource, parameters: &Parameters) -> Response {
    let get = |name: &str| parameters.get(name).map(String::as_str).unwrap_or_default();
    let selector = match Selector::parse(get("labelSelector"), get("fieldSelector")) {
        Ok(selector) => selector,
        Err(wrong) => return status(400, "BadRequest", &wrong, None),
    };
    let Ok(from) = get("resourceVersion").parse::<u64>() else {
        return status(
            400,
            "BadRequest",
            "only watches of a version are served here",
            None,
        );
    };
    if from > site.cluster.version() {
        return status(
            504,
            "Timeout",
            "Too large resource version: come back later",
            None,
        );
    }
    let gone = site.cluster.changes(from, 0).is_none();
    if gone && site.faults.is_gone_as_status() {
        let (code, reason, message) = expired();
        return status(code, reason, message, None);
    }
    let seconds = get("timeoutSeconds").parse().unwrap_or(1800);
    let every = site.faults.bookmarks();
    let mut bookmarks = interval_at(tokio::time::Instant::now() + every, every);
    bookmarks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (sender, body) = Channel::<Bytes, Broken>::new(16);
    let watcher = Watcher {
        site: Arc::clone(site),
        // From here on, and not when the task begins: a client that has the answer knows that it watches, so later
        // events for watches reach this one.
        breaks: site.faults.breaks(),
        muted: site.faults.muted(),
        resource,
        selector,
        sender,
        at: from,
        end: tokio::time::Instant::now() + Duration::from_secs(seconds),
        bookmarks: (get("allowWatchBookmarks") == "true").then_some(bookmarks),
    };
    tokio::spawn(watcher.run());
    (
        [(header::CONTENT_TYPE, "application/json")],
        Body::new(body),
    )
        .into_response()
}

/// A running watch.
struct Watcher {
    site: Arc<Site>,
    breaks: Receiver<(u64, Break)>,
    muted: Receiver<bool>,
    resource: Resource,
    selector: Selector,
    sender: Sender<Bytes, Broken>,
    /// The version up to which changes were sent.
    at: u64,
    end: tokio::time::Instant,
    bookmarks: Option<Interval>,
}

impl Watcher {
    async fn run(mut self) {
        let mut versions = self.site.cluster.subscribe();
        loop {
            if *self.muted.borrow_and_update() {
                tokio::select! {
                    _ = self.muted.changed() => continue,
                    _ = self.breaks.changed() => {}
                }
            } else {
                versions.mark_unchanged();
                let Some(changes) = self.site.cluster.changes(self.at, 512) else {
                    let (code, reason, message) = expired();
                    let status = status_text(code, reason, message, None);
                    let _ = self.send("ERROR", &status).await;
                    return;
                };
                if !changes.is_empty() {
                    if self.tell(&changes).await.is_err() {
                        return;
                    }
                    continue;
                }
                tokio::select! {
                    _ = versions.changed() => continue,
                    _ = self.muted.changed() => continue,
                    () = tick(&mut self.bookmarks) => {
                        if self.bookmark().await.is_err() {
                            return;
                        }
                        continue;
                    }
                    () = sleep_until(self.end) => return,
                    _ = self.breaks.changed() => {}
                }
            }
            let (_, how) = *self.breaks.borrow_and_update();
            if how == Break::Abrupt {
                self.sender.abort(Broken);
            }
            return;
        }
    }

    async fn tell(&mut self, changes: &[Arc<Change>]) -> Result<(), ()> {
        // As many as there are go out together, as from a server that has work to do.
        let mut text = String::new();
        for change in changes {
            self.at = change.version;
            if change.resource != self.resource {
                continue;
            }
            let has = |object: &Arc<Object>| self.selector.has(object);
            let before = change.before.as_ref().is_some_and(has);
            let after = !change.gone && has(&change.after);
            let word = match (before, after) {
                (false, true) => "ADDED",
                (true, true) => "MODIFIED",
                (true, false) => "DELETED",
                (false, false) => continue,
            };
            let (kind, version) = self.resource.types();
            let object = &change.after.text[1..];
            line(
                &mut text,
                word,
                &format!(r#"{{"kind":"{kind}","apiVersion":"{version}",{object}"#),
            );
        }
        self.out(text).await
    }

    async fn bookmark(&mut self) -> Result<(), ()> {
        let (kind, version) = self.resource.types();
        let at = self.at;
        let object = json!({
            "kind": kind, "apiVersion": version,
            "metadata": { "resourceVersion": at.to_string(), "creationTimestamp": null },
        });
        self.send("BOOKMARK", &object.to_string()).await
    }

    async fn send(&mut self, word: &str, object: &str) -> Result<(), ()> {
        let mut text = String::new();
        line(&mut text, word, object);
        self.out(text).await
    }

    async fn out(&mut self, text: String) -> Result<(), ()> {
        let bytes = Bytes::from(text);
        let (piece, pause) = self
            .site
            .faults
            .slowness()
            .unwrap_or((usize::MAX, Duration::ZERO));
        let mut rest = bytes;
        while !rest.is_empty() {
            let next = rest.split_to(piece.min(rest.len()));
            self.sender.send_data(next).await.map_err(drop)?;
            if !pause.is_zero() {
                sleep(pause).await;
            }
        }
        Ok(())
    }
}

fn line(text: &mut String, word: &str, object: &str) {
    use std::fmt::Write as _;
    let _ = writeln!(text, r#"{{"type":"{word}","object":{object}}}"#);
}

async fn tick(bookmarks: &mut Option<Interval>) {
    match bookmarks {
        Some(bookmarks) => _ = bookmarks.tick().await,
        None => std::future::pending().await,
    }
}
