//! Calls of gRPC, made with `h2`, which tunnels use anyway, and `prost`. `tonic` would add a stack of layers for clients that
//! balance, retry and serve.

use std::{fmt, future::poll_fn};

use http::{HeaderMap, HeaderValue, Request, StatusCode, header, request};
use prost::{Message, bytes::Bytes};
use tokio::io::{AsyncRead, AsyncWrite};

/// The largest message that is read, in bytes.
const MESSAGE_MAX: usize = 1 << 20;
/// Bytes before each message: whether it is compressed, and its length.
const PREFIX: usize = 5;

/// The failure of a call.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    #[error(transparent)]
    Http2(#[from] h2::Error),
    #[error("the connection was closed")]
    Closed,
    #[error("HTTP status {0}")]
    Status(StatusCode),
    #[error("a message is compressed, cut off, or longer than {MESSAGE_MAX} bytes")]
    Framing,
    #[error("a message cannot be read: {0}")]
    Unreadable(#[from] prost::DecodeError),
    #[error("the answer has no message")]
    Empty,
    #[error("refused: {0}")]
    Refused(Refused),
    /// A reason of the caller's own.
    #[error("{0}")]
    Other(String),
}

impl CallError {
    /// Returns whether the server denies this client the request.
    pub fn is_denied(&self) -> bool {
        matches!(self, Self::Refused(refused) if matches!(&*refused.code, "7" | "16"))
    }
}

/// A status of gRPC other than success.
#[derive(Debug)]
pub struct Refused {
    code: String,
    message: String,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match &*self.code {
            "7" => "permission denied",
            "12" => "not implemented",
            "14" => "unavailable",
            "16" => "not authenticated",
            code => return write!(f, "{} (status {code})", self.message),
        };
        write!(f, "{} ({name})", self.message)
    }
}

/// Returns a request for a method.
pub fn post(scheme: &str, authority: &str, method: &str) -> request::Builder {
    Request::post(format!("{scheme}://{authority}{method}"))
        .header(header::CONTENT_TYPE, "application/grpc")
        .header(header::TE, "trailers")
}

/// Calls a method over a new connection, and reads the answer.
pub async fn call<T>(
    io: impl AsyncRead + AsyncWrite + Unpin,
    request: Request<()>,
    message: &impl Message,
    read: impl AsyncFnOnce(&mut Answer) -> Result<T, CallError>,
) -> Result<T, CallError> {
    let (client, connection) = h2::client::handshake(io).await?;
    let exchange = async {
        let mut client = client.ready().await?;
        let (response, mut sender) = client.send_request(request, false)?;
        sender.send_data(frame(message), true)?;
        let response = response.await?;
        if response.status() != StatusCode::OK {
            return Err(CallError::Status(response.status()));
        }
        let mut answer = Answer {
            headers: response.headers().clone(),
            body: response.into_body(),
            bytes: Vec::new(),
        };
        read(&mut answer).await
    };
    tokio::select! {
        result = exchange => result,
        ended = connection => Err(ended.map_or_else(CallError::Http2, |()| CallError::Closed)),
    }
}

/// An answer, whose messages are read one by one.
pub struct Answer {
    headers: HeaderMap,
    body: h2::RecvStream,
    bytes: Vec<u8>,
}

impl Answer {
    /// Reads the answer's only message.
    pub async fn only<M: Message + Default>(&mut self) -> Result<M, CallError> {
        let message = self.next().await?.ok_or(CallError::Empty)?;
        match self.next::<M>().await? {
            None => Ok(message),
            Some(_) => Err(CallError::Framing),
        }
    }

    /// Reads the next message. `None` at the end of an answer that succeeded.
    pub async fn next<M: Message + Default>(&mut self) -> Result<Option<M>, CallError> {
        loop {
            if let Some(length) = self.length()?
                && let Some(message) = self.bytes.get(PREFIX..PREFIX + length)
            {
                let message = M::decode(message)?;
                self.bytes.drain(..PREFIX + length);
                return Ok(Some(message));
            }
            match poll_fn(|context| self.body.poll_data(context)).await {
                Some(chunk) => {
                    let chunk = chunk?;
                    self.body.flow_control().release_capacity(chunk.len())?;
                    self.bytes.extend_from_slice(&chunk);
                }
                None => return self.end().await.map(|()| None),
            }
        }
    }

    /// Returns the length of the next message. `None`: it has not arrived.
    fn length(&self) -> Result<Option<usize>, CallError> {
        match self.bytes[..] {
            [0, a, b, c, d, ..] => {
                let length = usize::try_from(u32::from_be_bytes([a, b, c, d]));
                let length = length.ok().filter(|length| *length <= MESSAGE_MAX);
                length.map(Some).ok_or(CallError::Framing)
            }
            [] | [0, ..] => Ok(None),
            _ => Err(CallError::Framing),
        }
    }

    async fn end(&mut self) -> Result<(), CallError> {
        let trailers = self.body.trailers().await?;
        // An answer without a message has its status in the headers.
        let trailers = trailers.as_ref().unwrap_or(&self.headers);
        let value = |name| trailers.get(name).map_or(&b""[..], HeaderValue::as_bytes);
        let code = String::from_utf8_lossy(value("grpc-status")).into_owned();
        if code != "0" {
            let message = percent_encoding::percent_decode(value("grpc-message"));
            let message = message.decode_utf8_lossy().into_owned();
            return Err(CallError::Refused(Refused { code, message }));
        }
        if self.bytes.is_empty() {
            Ok(())
        } else {
            Err(CallError::Framing)
        }
    }
}

/// Returns a message as gRPC frames it: not compressed, with its length.
pub fn frame(message: &impl Message) -> Bytes {
    let encoded = message.encode_to_vec();
    let length = u32::try_from(encoded.len()).unwrap_or(u32::MAX);
    let mut bytes = vec![0];
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(&encoded);
    bytes.into()
}
