//! Requests of the CNI plug-in: it registers a pod's network namespace before a process of the pod runs, and asks
//! whether the pod is captured. Only the Unix socket, which is root's, takes these requests.

use std::{fmt, net::IpAddr, sync::Arc, time::Duration};

use axum::{Json, Router, extract::State, routing::post};
use serde::{Deserialize, Serialize};
use tokio::{
    sync::mpsc::{UnboundedSender, unbounded_channel},
    time::{Instant, timeout_at},
};

/// The plug-in's type in a network configuration, and the name of its program.
pub const PLUGIN: &str = "dataplane-cni";

/// The versions of CNI's specification that the plug-in speaks.
pub const VERSIONS: [&str; 4] = ["0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// The path of the requests.
pub const PATH: &str = "/cni";

/// How long a request waits for a decision. The plug-in then asks again: so it notices that the agent was replaced.
const HOLD: Duration = Duration::from_secs(2);

/// A pod's network namespace, as the container runtime made it and as the plug-ins before ours configured it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Attachment {
    /// The attachment's key: the sandbox and the interface.
    pub key: Key,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// The pod's UID; `None` if the runtime did not give it.
    pub uid: Option<String>,
    /// The network namespace's cookie (`SO_NETNS_COOKIE`).
    pub cookie: u64,
    /// The pod's addresses, at most one of each family.
    pub addresses: Vec<IpAddr>,
}

/// Key of an attachment (CNI's specification, section 2).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Key {
    /// The ID of the sandbox.
    pub container: String,
    /// The name of the interface in the sandbox.
    pub interface: String,
}

/// A request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Request {
    /// The pod is about to start: capture it, if its rules ask for that.
    Add(Attachment),
    /// Is the pod captured, if its rules ask for that?
    Check(Attachment),
    /// The pod has ended.
    Del(Key),
    /// Only these attachments exist.
    Gc(Vec<Key>),
}

/// The answer to a [`Request`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Answer {
    /// The kernel has the pod's entry: the first connection of the pod is captured. Also the answer to a request that
    /// is carried out.
    Done,
    /// The pod is not to be captured.
    NotCaptured,
    /// Not yet, for this reason.
    Waiting(String),
}

/// A request, and where its answers go. The last answer counts; the first that is not [`Answer::Waiting`] ends it.
#[derive(Debug)]
pub struct Ask {
    /// The request.
    pub request: Request,
    /// Takes the answers.
    pub answers: UnboundedSender<Answer>,
}

/// Takes requests, without blocking.
#[derive(Clone)]
pub struct Registrations(Arc<dyn Fn(Ask) + Send + Sync>);

impl Registrations {
    /// Passes each request to `take`, which must not block.
    pub fn new(take: impl Fn(Ask) + Send + Sync + 'static) -> Self {
        Self(Arc::new(take))
    }
}

impl fmt::Debug for Registrations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Registrations")
    }
}

/// The routes of these requests.
pub fn routes(pods: Registrations) -> Router {
    Router::new().route(PATH, post(answer)).with_state(pods)
}

async fn answer(State(pods): State<Registrations>, Json(request): Json<Request>) -> Json<Answer> {
    let until = Instant::now() + HOLD;
    let (answers, mut answered) = unbounded_channel();
    (pods.0)(Ask { request, answers });
    let mut last = Answer::Waiting(
        "the agent has not decided yet: it starts or ends, and has not read its source".to_owned(),
    );
    // This is a task, not a thread: many requests wait at the same time, and other requests are answered meanwhile.
    while let Ok(Some(next)) = timeout_at(until, answered.recv()).await {
        last = next;
        if !matches!(last, Answer::Waiting(_)) {
            break;
        }
    }
    Json(last)
}
