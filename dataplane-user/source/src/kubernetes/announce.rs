//! Annotates the captured Pods of this node with [`REDIRECTION`], which Istio's control plane reads. It tells clients to connect
//! to such a Pod by HBONE.
//!
//! The annotation is written by server-side apply through `pods/status`, with a field manager of its own ([`MANAGER`]). So the
//! API server knows which annotations are the agent's: to withdraw one is to apply an object without it, and never removes an
//! annotation that another program wrote.

use std::{
    collections::BTreeSet,
    io,
    ops::Bound,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use http::{Request, header};
use model::{Uid, WorkloadName};
use serde::Deserialize;
use serde_json::json;
use threads::{Deaths, may_panic};
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};
use tracing::{debug, info, warn};

use super::{Failure, Patience, Target, backoff::Backoff, call::Caller};
use crate::{objects::REDIRECTION, task::Task};

/// The field manager of the annotation.
const MANAGER: &str = "dataplane";
/// The name of the thread that writes.
const THREAD: &str = "announcer";
/// Pause after a request: a node writes at most 20 annotations per second.
const PACE: Duration = Duration::from_millis(50);
/// Time after which the annotations are read again: others may have removed some.
const AGAIN: Duration = Duration::from_mins(10);
/// Time limit for an answer, and the delays before the next attempt after a failure.
const PATIENCE: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_millis(500);
const RETRY_MAX: Duration = Duration::from_secs(30);
/// Maximum length of an answer, in bytes. A list has the metadata of all Pods of a node.
const ANSWER_MAX: usize = 16 << 20;
/// How often [`Announcer::withdraw`] checks whether nothing is left.
const POLL: Duration = Duration::from_millis(20);

/// Pods by name, with the UIDs that distinguish them from earlier Pods of these names.
pub type Pods = BTreeSet<(WorkloadName, Uid)>;

/// The Pods that carry the annotation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Wanted {
    captured: Pods,
    /// Pods of which the agent does not know whether they are captured: their annotations stay as they are.
    unsure: BTreeSet<WorkloadName>,
}

/// The state for other threads.
#[derive(Debug, Default)]
struct State {
    /// The present failure.
    trouble: Mutex<Option<String>>,
    /// Whether no Pod carries the annotation, and none is to.
    is_empty: AtomicBool,
}

impl State {
    fn trouble(&self) -> MutexGuard<'_, Option<String>> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread that writes the annotation. It ends when this is dropped; the annotations stay.
#[derive(Debug)]
pub struct Announcer {
    wanted: watch::Sender<Option<Wanted>>,
    state: Arc<State>,
    _task: Task,
}

impl Announcer {
    /// Starts to write for the Pods of this node. Sends no request before the first [`Announcer::announce`].
    ///
    /// # Errors
    ///
    /// If no thread can be started. It is not an error if the server is down.
    pub fn start(target: Target, node: &str, deaths: &Deaths) -> io::Result<Self> {
        let (wanted, mut changes) = watch::channel(None);
        let state = Arc::<State>::default();
        let mut writer = Writer {
            caller: Caller::new(target, PATIENCE, ANSWER_MAX),
            node: node.to_owned(),
            carried: None,
            left: Pods::new(),
            last: None,
        };
        let shared = Arc::clone(&state);
        let task = Task::start(THREAD, Arc::clone(deaths), async move || {
            writer.run(&mut changes, &shared).await;
        })?;
        Ok(Self {
            wanted,
            state,
            _task: task,
        })
    }

    /// Sets which Pods are captured. All other Pods of the node lose the annotation, except those that are `unsure`, and except
    /// annotations that another program wrote.
    pub fn announce(&self, captured: Pods, unsure: BTreeSet<WorkloadName>) {
        let wanted = Some(Wanted { captured, unsure });
        self.wanted.send_if_modified(|before| {
            let is_news = *before != wanted;
            if is_news {
                self.state.is_empty.store(false, Ordering::Release);
                *before = wanted;
            }
            is_news
        });
    }

    /// Returns why annotations could not be written or read, for people.
    pub fn trouble(&self) -> Option<String> {
        self.state.trouble().clone()
    }

    /// Withdraws all annotations. Waits until this is done, for so long at most.
    pub fn withdraw(self, at_most: Duration) {
        self.announce(Pods::new(), BTreeSet::new());
        let mut left = at_most;
        while !self.state.is_empty.load(Ordering::Acquire) && !left.is_zero() {
            thread::sleep(POLL);
            left = left.saturating_sub(POLL);
        }
        if left.is_zero() {
            warn!("not all annotations {REDIRECTION} of this agent were removed from Pods");
        }
    }
}

/// Writes the annotation, one Pod after the other.
struct Writer {
    caller: Caller,
    node: String,
    /// Pods of the node that carry the annotation of this manager; `None`: to be read.
    carried: Option<Pods>,
    /// Pods that the API server does not have any more, or that carry another value of another program.
    left: Pods,
    /// The Pod of the last request: a Pod that is refused does not hold up the others.
    last: Option<(WorkloadName, Uid)>,
}

impl Writer {
    /// Writes for ever, from the first [`Wanted`] on: before, nobody knows which annotations are stale.
    async fn run(&mut self, changes: &mut watch::Receiver<Option<Wanted>>, state: &State) {
        let mut backoff = Backoff::new(Patience {
            retry: RETRY,
            retry_max: RETRY_MAX,
            ..Patience::default()
        });
        if changes.wait_for(Option::is_some).await.is_err() {
            return;
        }
        loop {
            may_panic(THREAD);
            let wanted = changes.borrow_and_update().clone().unwrap_or_default();
            match self.step(&wanted).await {
                Ok(true) => {
                    backoff.reset();
                    sleep(PACE).await;
                }
                Ok(false) => {
                    if state.trouble().take().is_some() {
                        info!("the annotations {REDIRECTION} of Pods are written again");
                    }
                    let carried = self.carried.as_ref();
                    let is_empty =
                        wanted == Wanted::default() && carried.is_some_and(Pods::is_empty);
                    state.is_empty.store(is_empty, Ordering::Release);
                    match timeout(AGAIN, changes.changed()).await {
                        Ok(Ok(())) => {}
                        Ok(Err(_)) => return,
                        Err(_) => self.carried = None,
                    }
                }
                Err(failure) => {
                    backoff.at_least(failure.retry_after());
                    let text = told(&failure);
                    if state.trouble().replace(text.clone()).is_none() {
                        warn!("{text}");
                    }
                    sleep(backoff.next()).await;
                }
            }
        }
    }

    /// Sends the next request. Returns whether one was needed.
    async fn step(&mut self, wanted: &Wanted) -> Result<bool, Failure> {
        let Some(carried) = &self.carried else {
            self.carried = Some(self.read().await?);
            self.left.clear();
            return Ok(true);
        };
        let todo = todo(wanted, carried, &self.left);
        let from = self.last.take().map_or(Bound::Unbounded, Bound::Excluded);
        let mut next = todo.range((from, Bound::Unbounded)).chain(&todo);
        let Some(pod) = next.next().cloned() else {
            return Ok(false);
        };
        self.last = Some(pod.clone());
        let is_captured = wanted.captured.contains(&pod);
        let answer = self.caller.call(request(&pod, is_captured)).await;
        let carried = self.carried.get_or_insert_default();
        match answer {
            Ok(_) if is_captured => _ = carried.insert(pod),
            Ok(_) => _ = carried.remove(&pod),
            // It is gone, it is another Pod of this name, or the annotation is another program's.
            Err(
                failure @ Failure::Refused {
                    code: 404 | 409 | 422,
                    ..
                },
            ) => {
                debug!("{}: {REDIRECTION} is not written: {failure}", pod.0);
                carried.remove(&pod);
                self.left.insert(pod);
            }
            Err(failure) => return Err(failure),
        }
        Ok(true)
    }

    /// Reads which Pods of the node carry the annotation of this manager.
    async fn read(&self) -> Result<Pods, Failure> {
        let path = format!(
            "/api/v1/pods?fieldSelector=spec.nodeName%3D{}&resourceVersion=0",
            self.node
        );
        // The metadata alone, if the server can.
        let kinds =
            "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json";
        let request = Request::get(path)
            .header(header::ACCEPT, kinds)
            .body(Vec::new());
        carriers(&self.caller.call(request).await?)
    }
}

/// Returns the Pods whose annotation has to be written or withdrawn.
fn todo(wanted: &Wanted, carried: &Pods, left: &Pods) -> Pods {
    let stale = carried.difference(&wanted.captured);
    let stale = stale.filter(|(name, _)| !wanted.unsure.contains(name));
    let missing = wanted.captured.difference(carried);
    let missing = missing.filter(|pod| !left.contains(*pod));
    stale.chain(missing).cloned().collect()
}

/// Returns the request that writes the annotation of a Pod, or withdraws it.
fn request((name, uid): &(WorkloadName, Uid), is_captured: bool) -> http::Result<Request<Vec<u8>>> {
    let path = format!(
        "/api/v1/namespaces/{}/pods/{}/status?fieldManager={MANAGER}",
        name.namespace(),
        name.name()
    );
    let mut object = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "namespace": name.namespace(), "name": name.name(), "uid": uid.to_string() },
    });
    if is_captured {
        object["metadata"]["annotations"] = json!({ REDIRECTION: "enabled" });
    }
    Request::patch(path)
        .header(header::CONTENT_TYPE, "application/apply-patch+yaml")
        .body(object.to_string().into_bytes())
}

/// Returns the Pods of a list in which this manager has applied something to the status subresource: it applies nothing but
/// the annotation.
fn carriers(list: &[u8]) -> Result<Pods, Failure> {
    let list: List = serde_json::from_slice(list)?;
    let items = list.items.into_iter().map(|item| item.metadata);
    let ours = items.filter(|metadata| {
        let mut managers = metadata.managed_fields.iter();
        managers.any(|by| {
            by.manager == MANAGER && by.operation == "Apply" && by.subresource == "status"
        })
    });
    let pods = ours.filter_map(|metadata| {
        let uid = Uid::parse(&metadata.uid)?;
        Some((WorkloadName::new(&metadata.namespace, &metadata.name), uid))
    });
    Ok(pods.collect())
}

/// Returns the operator's message for a failure.
fn told(failure: &Failure) -> String {
    let consequence = "so Istio's control plane may not know which Pods are captured";
    match failure {
        Failure::Refused {
            code: 403, message, ..
        } => format!(
            "the API server does not let the agent write the annotation {REDIRECTION}, {consequence}: {message}; allow the agent \
             to patch pods/status and to list pods, as the kustomize component announce and the chart do, or unset mesh.announce"
        ),
        failure => format!(
            "cannot read or write the annotation {REDIRECTION} of Pods, {consequence}; trying again: {failure}"
        ),
    }
}

/// The fields of a list of Pods that are read.
#[derive(Debug, Deserialize)]
struct List {
    items: Vec<Item>,
}

#[derive(Debug, Deserialize)]
struct Item {
    metadata: Metadata,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    namespace: String,
    name: String,
    uid: String,
    #[serde(default)]
    managed_fields: Vec<ManagedFields>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ManagedFields {
    manager: String,
    operation: String,
    subresource: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pods(names: &str) -> Pods {
        let of = |name: &str| {
            let (name, uid) = name.split_once('#').unwrap_or((name, "1"));
            let uid = Uid::parse(&format!("00000000-0000-4000-8000-00000000000{uid}"));
            (WorkloadName::new("shop", name), uid.unwrap())
        };
        names.split_whitespace().map(of).collect()
    }

    /// Each line has the captured Pods, the unsure ones, those that carry the annotation, those that are left alone, and those
    /// whose annotation changes. `#2` is another Pod of the same name.
    #[test]
    fn what_is_captured_carries_the_annotation_and_nothing_else() {
        for (captured, unsure, carried, left, wanted) in [
            ("", "", "", "", ""),
            ("a b", "", "", "", "a b"),
            ("a b", "", "a", "", "b"),
            ("a", "", "a b", "", "b"),
            ("", "b", "a b", "", "a"),
            ("a b", "", "", "b", "a"),
            ("a#2", "", "a", "", "a a#2"),
            ("a#2", "a", "a", "", "a#2"),
            ("", "", "a", "a", "a"),
        ] {
            let of = Wanted {
                captured: pods(captured),
                unsure: pods(unsure).into_iter().map(|(name, _)| name).collect(),
            };
            let found = todo(&of, &pods(carried), &pods(left));
            assert_eq!(
                found,
                pods(wanted),
                "{captured}, {unsure}, {carried}, {left}"
            );
        }
    }

    #[test]
    fn only_annotations_of_this_manager_are_its_own() {
        let pod = |name: &str, fields: serde_json::Value| {
            json!({ "metadata": {
                "namespace": "shop", "name": name, "managedFields": fields,
                "uid": "00000000-0000-4000-8000-000000000001",
                "annotations": { REDIRECTION: "enabled" },
            } })
        };
        let by = |manager: &str, operation: &str, subresource: &str| {
            let of =
                json!({ "manager": manager, "operation": operation, "subresource": subresource });
            json!([of])
        };
        let list = json!({ "items": [
            pod("a", by(MANAGER, "Apply", "status")),
            pod("b", by("istio-cni", "Apply", "status")),
            pod("c", by(MANAGER, "Update", "status")),
            pod("d", by(MANAGER, "Apply", "")),
            pod("e", json!([])),
        ] });
        assert_eq!(carriers(list.to_string().as_bytes()).unwrap(), pods("a"));
        for unreadable in ["{}", r#"{"items":[{}]}"#, ""] {
            assert!(carriers(unreadable.as_bytes()).is_err(), "{unreadable}");
        }
    }

    #[test]
    fn a_withdrawal_applies_an_object_without_the_annotation() {
        let pod = pods("a").pop_first().unwrap();
        for (is_captured, wanted) in [
            (true, json!({ REDIRECTION: "enabled" })),
            (false, json!(null)),
        ] {
            let request = request(&pod, is_captured).unwrap();
            assert_eq!(
                request.uri(),
                "/api/v1/namespaces/shop/pods/a/status?fieldManager=dataplane"
            );
            let body: serde_json::Value = serde_json::from_slice(request.body()).unwrap();
            assert_eq!(body["metadata"]["annotations"], wanted);
            assert_eq!(body["metadata"]["uid"], pod.1.to_string());
        }
    }
}
