//! Asks the API server what the bearer of a token may do, as Kubernetes' own components do for their metrics: a
//! TokenReview tells whose token it is, and a SubjectAccessReview whether this user may get the path.
//!
//! Answers are kept for a while. Without an answer of the API server nobody is allowed anything: it fails closed.

use std::{
    collections::HashMap,
    fmt,
    sync::Mutex,
    time::{Duration, Instant},
};

use http::{Request, header};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio::sync::{Mutex as Shared, Semaphore};
use tracing::warn;

use super::{
    Failure, Target,
    connect::{Connection, Connector},
    fetch::{next, send},
};

/// How long the API server has for an answer: a scrape does not wait longer.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a token is allowed, or refused, without another question. A right that was taken away is still had for so
/// long.
const ALLOWED: Duration = Duration::from_mins(1);
const REFUSED: Duration = Duration::from_secs(10);
/// How long a token that was allowed is asked about before tokens that nobody knows.
const KNOWN: Duration = Duration::from_hours(1);
/// Answers that are kept, of each kind.
const ALLOWED_KEPT: usize = 64;
const REFUSED_KEPT: usize = 256;
/// Questions at the same time.
const AT_ONCE: usize = 4;
/// Tokens that nobody knows: questions about them in each second. Whoever reaches the port may send as many as they
/// like, and the API server shall not notice.
const STRANGERS: u32 = 10;
/// More than that is no answer to a review.
const ANSWER_MAX: usize = 256 * 1024;
/// A warning is not repeated within this time.
const QUIET: Duration = Duration::from_mins(1);

/// What the API server says of a token and a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Review {
    /// The bearer may get the path.
    Allowed,
    /// The token is nobody's.
    Unknown,
    /// The bearer may not get the path.
    Forbidden,
}

/// Why there is no review. The bearer gets nothing.
#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    /// The API server was not asked, because too many unknown tokens came within a second.
    #[error("too many unknown tokens within a second; try again later")]
    Busy,
    /// The API server could not be asked.
    #[error("{}", told(.0))]
    Failed(#[from] Failure),
}

/// What a person should know of a failed review.
fn told(failure: &Failure) -> String {
    match failure {
        Failure::Refused {
            code: 403, message, ..
        } => format!(
            "the API server does not let the agent review tokens: {message}; allow it to create tokenreviews and \
             subjectaccessreviews, as the ClusterRole in deploy/ does"
        ),
        failure => format!("the API server could not be asked: {failure}"),
    }
}

/// Asks the API server what bearers of tokens may do.
pub struct Reviewer {
    connector: Connector,
    connection: Shared<Option<Connection>>,
    places: Semaphore,
    memory: Mutex<Memory>,
}

impl fmt::Debug for Reviewer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Tokens are nobody's business.
        write!(f, "Reviewer({})", self.connector.target.server_text())
    }
}

/// Token and path.
type Question = (String, String);

/// What was answered.
struct Memory {
    allowed: HashMap<Question, Instant>,
    refused: HashMap<Question, (Instant, Review)>,
    /// When the second began in which strangers are counted, and how many came.
    strangers: (Instant, u32),
    warned: Option<Instant>,
}

impl Reviewer {
    /// Asks this API server. Nothing is asked yet.
    pub fn new(target: Target) -> Self {
        Self {
            connector: Connector::new(target),
            connection: Shared::default(),
            places: Semaphore::new(AT_ONCE),
            memory: Mutex::new(Memory {
                allowed: HashMap::new(),
                refused: HashMap::new(),
                strangers: (Instant::now(), 0),
                warned: None,
            }),
        }
    }

    /// Returns whether the bearer of a token may get a path.
    ///
    /// # Errors
    /// If the API server does not say, or was not asked.
    pub async fn may_get(&self, token: &str, path: &str) -> Result<Review, ReviewError> {
        let question = (token.to_owned(), path.to_owned());
        if let Some(known) = self.memory().ask(&question, Instant::now())? {
            return Ok(known);
        }
        // It is never closed, so this never fails.
        let _place = self.places.acquire().await.ok();
        // Somebody else may have asked meanwhile.
        if let Some(known) = self.memory().known(&question, Instant::now()) {
            return Ok(known);
        }
        match self.ask(token, path).await {
            Ok(review) => {
                self.memory().keep(question, review, Instant::now());
                Ok(review)
            }
            Err(failure) => {
                let failure = ReviewError::from(failure);
                if self.memory().warns(Instant::now()) {
                    warn!("metrics are refused to a client: {failure}");
                }
                Err(failure)
            }
        }
    }

    fn memory(&self) -> std::sync::MutexGuard<'_, Memory> {
        let locked = self.memory.lock();
        locked.unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    async fn ask(&self, token: &str, path: &str) -> Result<Review, Failure> {
        let review: TokenReview = self
            .post(
                "/apis/authentication.k8s.io/v1/tokenreviews",
                &json!({
                    "kind": "TokenReview", "apiVersion": "authentication.k8s.io/v1",
                    "spec": { "token": token },
                }),
            )
            .await?;
        if !review.status.authenticated {
            return Ok(Review::Unknown);
        }
        let User {
            username,
            uid,
            groups,
            extra,
        } = review.status.user;
        let review: AccessReview = self
            .post(
                "/apis/authorization.k8s.io/v1/subjectaccessreviews",
                &json!({
                    "kind": "SubjectAccessReview", "apiVersion": "authorization.k8s.io/v1",
                    "spec": {
                        "user": username, "uid": uid, "groups": groups, "extra": extra,
                        "nonResourceAttributes": { "path": path, "verb": "get" },
                    },
                }),
            )
            .await?;
        Ok(if review.status.allowed {
            Review::Allowed
        } else {
            Review::Forbidden
        })
    }

    async fn post<T: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<T, Failure> {
        let connection = {
            let mut kept = self.connection.lock().await;
            match &*kept {
                Some(connection) => connection.clone(),
                None => kept.insert(self.connector.connect().await?).clone(),
            }
        };
        let answer = self.answer(&connection, path, body).await;
        if answer.as_ref().is_err_and(Failure::is_of_connection) {
            // Files may say something else by now: tokens, certificates, addresses.
            *self.connection.lock().await = None;
        }
        Ok(serde_json::from_slice(&answer?)?)
    }

    async fn answer(
        &self,
        connection: &Connection,
        path: &str,
        body: &Value,
    ) -> Result<Vec<u8>, Failure> {
        let request = Request::post(path)
            .header(header::CONTENT_TYPE, "application/json")
            .body(body.to_string().into_bytes())
            .map_err(|error| Failure::Unreachable(error.to_string()))?;
        let token = connection.token.as_deref();
        let mut body = send(&connection.client, token, PATIENCE, request).await?;
        let mut text = Vec::new();
        while let Some(piece) = next(&mut body, PATIENCE).await? {
            text.extend_from_slice(&piece);
            if text.len() > ANSWER_MAX {
                return Err(Failure::Broken("the answer does not end".to_owned()));
            }
        }
        Ok(text)
    }
}

impl Memory {
    /// Returns an answer that still counts.
    fn known(&self, question: &Question, now: Instant) -> Option<Review> {
        if let Some(at) = self.allowed.get(question)
            && now < *at + ALLOWED
        {
            return Some(Review::Allowed);
        }
        let (at, review) = self.refused.get(question)?;
        (now < *at + REFUSED).then_some(*review)
    }

    /// Likewise; or `None` if the API server is to be asked, which it is not about too many strangers.
    fn ask(&mut self, question: &Question, now: Instant) -> Result<Option<Review>, ReviewError> {
        if let Some(known) = self.known(question, now) {
            return Ok(Some(known));
        }
        if self.allowed.contains_key(question) {
            return Ok(None);
        }
        let (since, count) = &mut self.strangers;
        if now >= *since + Duration::from_secs(1) {
            (*since, *count) = (now, 0);
        }
        if *count >= STRANGERS {
            return Err(ReviewError::Busy);
        }
        *count += 1;
        Ok(None)
    }

    /// Keeps an answer. Refused tokens never push out an allowed one.
    fn keep(&mut self, question: Question, review: Review, now: Instant) {
        if review == Review::Allowed {
            self.allowed.retain(|_, at| now < *at + KNOWN);
            if self.allowed.len() >= ALLOWED_KEPT {
                let oldest = self.allowed.iter().min_by_key(|(_, at)| **at);
                if let Some(oldest) = oldest.map(|(question, _)| question.clone()) {
                    self.allowed.remove(&oldest);
                }
            }
            self.refused.remove(&question);
            self.allowed.insert(question, now);
            return;
        }
        self.allowed.remove(&question);
        self.refused.retain(|_, (at, _)| now < *at + REFUSED);
        if self.refused.len() < REFUSED_KEPT {
            self.refused.insert(question, (now, review));
        }
    }

    /// Whether it is time for another warning.
    fn warns(&mut self, now: Instant) -> bool {
        let quiet = self.warned.is_some_and(|at| now < at + QUIET);
        if !quiet {
            self.warned = Some(now);
        }
        !quiet
    }
}

/// `TokenReview`, as far as it is read.
#[derive(Debug, Deserialize)]
struct TokenReview {
    status: TokenReviewStatus,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct TokenReviewStatus {
    authenticated: bool,
    user: User,
}

/// Who has a token: handed on to the second question as it is.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct User {
    username: String,
    uid: String,
    groups: Vec<String>,
    extra: HashMap<String, Vec<String>>,
}

/// `SubjectAccessReview`, as far as it is read.
#[derive(Debug, Deserialize)]
struct AccessReview {
    status: AccessReviewStatus,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct AccessReviewStatus {
    allowed: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(token: &str) -> Question {
        (token.to_owned(), "/metrics".to_owned())
    }

    fn memory(now: Instant) -> Memory {
        Memory {
            allowed: HashMap::new(),
            refused: HashMap::new(),
            strangers: (now, 0),
            warned: None,
        }
    }

    #[test]
    fn an_answer_counts_for_a_while() {
        let now = Instant::now();
        let mut memory = memory(now);
        memory.keep(question("a"), Review::Allowed, now);
        memory.keep(question("b"), Review::Forbidden, now);
        let later = now + REFUSED;
        assert_eq!(memory.known(&question("a"), later), Some(Review::Allowed));
        assert_eq!(memory.known(&question("b"), later), None);
        assert_eq!(memory.known(&question("a"), now + ALLOWED), None);
        // A right that is gone is gone.
        memory.keep(question("a"), Review::Forbidden, later);
        assert_eq!(memory.known(&question("a"), later), Some(Review::Forbidden));
        // Another path is another question.
        let other = ("a".to_owned(), "/proxyMode".to_owned());
        assert_eq!(memory.known(&other, now), None);
    }

    #[test]
    fn strangers_neither_flood_the_api_server_nor_push_out_those_who_may() {
        let now = Instant::now();
        let mut memory = memory(now);
        memory.keep(question("prometheus"), Review::Allowed, now);
        let later = now + ALLOWED;
        let mut asked = 0;
        for n in 0..10_000 {
            let stranger = question(&format!("stranger{n}"));
            if memory.ask(&stranger, later).is_ok() {
                asked += 1;
                memory.keep(stranger, Review::Unknown, later);
            }
        }
        assert_eq!(asked, STRANGERS);
        // The one that was allowed before is asked about meanwhile.
        let asked = memory.ask(&question("prometheus"), later);
        assert!(matches!(asked, Ok(None)), "{asked:?}");
        for n in 0..10_000 {
            memory.keep(question(&format!("{n}")), Review::Unknown, later);
        }
        assert_eq!(memory.refused.len(), REFUSED_KEPT);
        assert!(memory.allowed.contains_key(&question("prometheus")));
        for n in 0..10_000 {
            memory.keep(question(&format!("{n}")), Review::Allowed, later);
        }
        assert_eq!(memory.allowed.len(), ALLOWED_KEPT);
    }
}
