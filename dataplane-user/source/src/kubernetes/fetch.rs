//! Requests, and answers that arrive in pieces.

use std::{future::Future, sync::LazyLock, time::Duration};

use http::{HeaderValue, header};
use http_body_util::BodyExt;
use kube::{
    Client,
    client::Body,
    core::{
        Request,
        params::{ListParams, WatchParams},
    },
};
use tokio::time::timeout;

use super::{
    Failure, Patience, error::chain, failure::Status, health::KindHealth, token::TokenFile,
};

/// The agent's name in the server's log and audit.
static USER_AGENT: LazyLock<HeaderValue> = LazyLock::new(|| {
    let (version, arch) = (env!("CARGO_PKG_VERSION"), std::env::consts::ARCH);
    let text = format!("dataplane/{version} (linux/{arch})");
    HeaderValue::from_str(&text).unwrap_or_else(|_| HeaderValue::from_static("dataplane"))
});
/// Maximum length of an error's text that is read.
const ERROR_MAX: usize = 64 * 1024;

/// Requests for objects of a kind.
pub struct Fetch<'a> {
    pub client: &'a Client,
    pub token: Option<&'a TokenFile>,
    /// The path of the objects at the API server.
    pub path: String,
    pub patience: Patience,
    pub health: &'a KindHealth,
}

impl<'a> Fetch<'a> {
    /// Returns a page of a list as text.
    pub async fn page(&self, what: &ListParams) -> Result<Vec<u8>, Failure> {
        let request = Request::new(&self.path).list(what);
        let mut body = self.answer(request).await?;
        let mut page = Vec::new();
        while let Some(piece) = next(&mut body, self.patience.answer).await? {
            self.health.hear();
            page.extend_from_slice(&piece);
        }
        Ok(page)
    }

    /// Starts a watch at a version.
    pub async fn watch(&self, what: &WatchParams, from: &str) -> Result<Lines<'a>, Failure> {
        let request = Request::new(&self.path).watch(what, from);
        Ok(Lines {
            body: self.answer(request).await?,
            text: Vec::new(),
            taken: 0,
            searched: 0,
            health: self.health,
        })
    }

    /// Returns the body of the answer, or an error.
    async fn answer(
        &self,
        request: Result<http::Request<Vec<u8>>, kube::core::request::Error>,
    ) -> Result<Body, Failure> {
        let request = request.map_err(|error| Failure::Unreachable(chain(&error)))?;
        send(self.client, self.token, self.patience.answer, request).await
    }
}

/// Sends a request, and returns the body of the answer, or an error. `patience`: time limit for the beginning of the
/// answer, and for the next piece of an error.
pub async fn send(
    client: &Client,
    token: Option<&TokenFile>,
    patience: Duration,
    request: http::Request<Vec<u8>>,
) -> Result<Body, Failure> {
    let mut request = request.map(Body::from);
    let headers = request.headers_mut();
    headers.insert(header::USER_AGENT, USER_AGENT.clone());
    if let Some(token) = token {
        headers.insert(header::AUTHORIZATION, token.header()?);
    }
    let answer = in_time(patience, client.send(request)).await?;
    let answer = answer.map_err(|error| Failure::Unreachable(chain(&error)))?;
    let code = answer.status();
    if code.is_success() {
        return Ok(answer.into_body());
    }
    let mut body = answer.into_body();
    let mut text = Vec::new();
    // A part of the error's text is better than none.
    while let Ok(Some(piece)) = next(&mut body, patience).await {
        text.extend_from_slice(&piece);
        if text.len() > ERROR_MAX {
            break;
        }
    }
    let status = serde_json::from_slice(&text).unwrap_or_else(|_| Status {
        message: String::from_utf8_lossy(&text).trim().to_owned(),
        ..Status::default()
    });
    Err(Status {
        code: code.as_u16(),
        ..status
    }
    .into())
}

/// The lines of a watch.
pub struct Lines<'a> {
    body: Body,
    /// Received text.
    text: Vec<u8>,
    /// Number of bytes that were already returned.
    taken: usize,
    /// Number of further bytes that contain no end of a line.
    searched: usize,
    health: &'a KindHealth,
}

impl Lines<'_> {
    /// Returns the next line. `None` when the server has ended the watch.
    pub async fn next(&mut self, patience: Duration) -> Result<Option<&[u8]>, Failure> {
        loop {
            let rest = &self.text[self.taken..];
            if let Some(end) = rest[self.searched..].iter().position(|&byte| byte == b'\n') {
                let line = self.taken..self.taken + self.searched + end;
                self.taken = line.end + 1;
                self.searched = 0;
                return Ok(Some(&self.text[line]));
            }
            self.searched = rest.len();
            self.text.drain(..self.taken);
            self.taken = 0;
            match next(&mut self.body, patience).await? {
                Some(piece) => {
                    self.health.hear();
                    self.text.extend_from_slice(&piece);
                }
                // A line without an end is incomplete. The server sends it again.
                None => return Ok(None),
            }
        }
    }
}

/// Returns the next piece of an answer.
pub async fn next(
    body: &mut Body,
    patience: Duration,
) -> Result<Option<impl AsRef<[u8]> + std::ops::Deref<Target = [u8]> + use<>>, Failure> {
    loop {
        match in_time(patience, body.frame()).await? {
            None => return Ok(None),
            Some(Err(error)) => return Err(Failure::Broken(chain(&error))),
            Some(Ok(frame)) => {
                // Trailers do not belong to the text.
                if let Ok(piece) = frame.into_data() {
                    return Ok(Some(piece));
                }
            }
        }
    }
}

async fn in_time<T>(patience: Duration, work: impl Future<Output = T>) -> Result<T, Failure> {
    timeout(patience, work)
        .await
        .map_err(|_| Failure::Silent(patience))
}
