//! Asks the API server for the permissions of the bearer of a token, as Kubernetes' own components do for their
//! metrics. A TokenReview returns the user of the token, and a SubjectAccessReview whether this user may get the path.
//!
//! Answers are cached for some time. Without an answer of the API server no request is allowed: reviews fail closed.

use std::{
    collections::HashMap,
    fmt,
    sync::Mutex,
    time::{Duration, Instant},
};

use http::{Request, header};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tracing::warn;

use super::{Failure, Target, call::Caller};

/// Time limit for the API server's answer, because a scrape does not wait longer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time for which an answer is valid, if it allows or refuses. A withdrawn permission therefore stays in force for up
/// to this time.
const ALLOWED: Duration = Duration::from_mins(1);
const REFUSED: Duration = Duration::from_secs(10);
/// Time for which a token that was allowed is not limited as an unknown token.
const KNOWN: Duration = Duration::from_hours(1);
/// Maximum number of cached answers of each kind.
const ALLOWED_KEPT: usize = 64;
const REFUSED_KEPT: usize = 256;
/// Maximum number of reviews at the same time.
const AT_ONCE: usize = 4;
/// Maximum number of reviews of unknown tokens per second. Any client that reaches the port may send tokens, and this
/// must not load the API server.
const STRANGERS: u32 = 10;
/// Maximum length of an answer to a review, in bytes.
const ANSWER_MAX: usize = 256 * 1024;
/// Time within which a warning is not repeated.
const QUIET: Duration = Duration::from_mins(1);

/// The API server's answer for a token and a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Review {
    /// The bearer may get the path.
    Allowed,
    /// The token belongs to no user.
    Unknown,
    /// The bearer may not get the path.
    Forbidden,
}

/// The reason why there is no answer. The bearer gets no data.
#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    /// The API server was not asked, because too many unknown tokens came within a second.
    #[error("too many unknown tokens within a second; try again later")]
    Busy,
    /// The API server could not be asked.
    #[error("{}", told(.0))]
    Failed(#[from] Failure),
}

/// Returns the operator's message for a failed review.
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

/// Asks the API server for the permissions of bearers.
pub struct Reviewer {
    caller: Caller,
    places: Semaphore,
    memory: Mutex<Memory>,
}

impl fmt::Debug for Reviewer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Tokens must not appear in output.
        write!(f, "Reviewer({})", self.caller.server_text())
    }
}

/// A token and a path.
type Question = (String, String);

/// The cached answers.
struct Memory {
    allowed: HashMap<Question, Instant>,
    refused: HashMap<Question, (Instant, Review)>,
    /// The beginning of the second in which unknown tokens are counted, and their number.
    strangers: (Instant, u32),
    warned: Option<Instant>,
}

impl Reviewer {
    /// Returns a reviewer for this API server. Sends no request yet.
    pub fn new(target: Target) -> Self {
        Self {
            caller: Caller::new(target, PATIENCE, ANSWER_MAX),
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
    ///
    /// If the API server does not answer, or was not asked.
    pub async fn may_get(&self, token: &str, path: &str) -> Result<Review, ReviewError> {
        let question = (token.to_owned(), path.to_owned());
        if let Some(known) = self.memory().ask(&question, Instant::now())? {
            return Ok(known);
        }
        // The semaphore is never closed, so this never fails.
        let _place = self.places.acquire().await.ok();
        // Another request may have asked the same in the meantime.
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
        let request = Request::post(path)
            .header(header::CONTENT_TYPE, "application/json")
            .body(body.to_string().into_bytes());
        Ok(serde_json::from_slice(&self.caller.call(request).await?)?)
    }
}

impl Memory {
    /// Returns a cached answer that is still valid.
    fn known(&self, question: &Question, now: Instant) -> Option<Review> {
        if let Some(at) = self.allowed.get(question)
            && now < *at + ALLOWED
        {
            return Some(Review::Allowed);
        }
        let (at, review) = self.refused.get(question)?;
        (now < *at + REFUSED).then_some(*review)
    }

    /// Returns a cached answer that is still valid, or `None` if the API server must be asked. Limits the number of
    /// unknown tokens.
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

    /// Caches an answer. Refused tokens never evict an allowed one.
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

    /// Returns whether a warning may be written again.
    fn warns(&mut self, now: Instant) -> bool {
        let quiet = self.warned.is_some_and(|at| now < at + QUIET);
        if !quiet {
            self.warned = Some(now);
        }
        !quiet
    }
}

/// The fields of `TokenReview` that are read.
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

/// The user of a token, which goes unchanged into the SubjectAccessReview.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct User {
    username: String,
    uid: String,
    groups: Vec<String>,
    extra: HashMap<String, Vec<String>>,
}

/// The fields of `SubjectAccessReview` that are read.
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
        // A withdrawn permission ends.
        memory.keep(question("a"), Review::Forbidden, later);
        assert_eq!(memory.known(&question("a"), later), Some(Review::Forbidden));
        // Another path needs another review.
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
        // The token that was allowed before is reviewed in spite of the limit.
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
