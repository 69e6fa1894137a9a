//! Access to the metrics: with a [`Reviewer`], only clients whose bearer token the API server knows and whose user may
//! get the path in the cluster. By HTTPS, because a token must not cross the network in clear.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderMap, Method, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    serve::Listener,
};
use rcgen::{CertificateParams, KeyPair};
use rustls::{
    ServerConfig,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
};
use source::kubernetes::{Review, ReviewError, Reviewer};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::{Accept, TlsAcceptor, server::TlsStream};

/// Makes routes answer only clients that may get them.
pub fn guarded(routes: Router, reviewer: Arc<Reviewer>) -> Router {
    routes.layer(middleware::from_fn_with_state(reviewer, check))
}

async fn check(State(reviewer): State<Arc<Reviewer>>, request: Request, next: Next) -> Response {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return StatusCode::METHOD_NOT_ALLOWED.into_response();
    }
    let Some(token) = bearer(request.headers()) else {
        return unknown("a bearer token is needed\n");
    };
    let review = reviewer.may_get(token, request.uri().path()).await;
    match review {
        Ok(Review::Allowed) => next.run(request).await,
        Ok(Review::Unknown) => unknown("the API server does not know the token\n"),
        Ok(Review::Forbidden) => {
            let text = format!(
                "the token's user may not get {}: a ClusterRole with this nonResourceURL allows it\n",
                request.uri().path()
            );
            (StatusCode::FORBIDDEN, text).into_response()
        }
        Err(ReviewError::Busy) => (
            StatusCode::TOO_MANY_REQUESTS,
            format!("{}\n", ReviewError::Busy),
        )
            .into_response(),
        // The reason is for the operator, and in the log.
        Err(ReviewError::Failed(_)) => (
            StatusCode::SERVICE_UNAVAILABLE,
            "the API server does not say who has the token: see the agent's log\n",
        )
            .into_response(),
    }
}

fn unknown(text: &'static str) -> Response {
    let challenge = [(header::WWW_AUTHENTICATE, "Bearer")];
    (StatusCode::UNAUTHORIZED, challenge, text).into_response()
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

/// A listener whose connections are encrypted, with a self-made certificate that is new with each start: it protects
/// tokens from eavesdroppers, and proves nothing about the agent.
pub struct Encrypted {
    listener: TcpListener,
    acceptor: TlsAcceptor,
}

impl Encrypted {
    /// Encrypts the connections of a listener.
    ///
    /// # Errors
    /// If no certificate can be made.
    pub fn new(listener: TcpListener) -> io::Result<Self> {
        let wrong = io::Error::other::<rcgen::Error>;
        let key = KeyPair::generate().map_err(wrong)?;
        let names = vec!["dataplane".to_owned()];
        let certificate = CertificateParams::new(names)
            .and_then(|params| params.self_signed(&key))
            .map_err(wrong)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_no_client_auth()
            .with_single_cert(
                vec![certificate.der().clone()],
                PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der())),
            )
            .map_err(io::Error::other)?;
        Ok(Self {
            listener,
            acceptor: TlsAcceptor::from(Arc::new(config)),
        })
    }
}

impl Listener for Encrypted {
    type Io = Tls;
    type Addr = std::net::SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        let (stream, addr) = Listener::accept(&mut self.listener).await;
        (Tls::Greeting(self.acceptor.accept(stream)), addr)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// An encrypted connection. It performs its handshake when it is first read from, so that a slow client delays no
/// other.
pub enum Tls {
    /// The handshake is in progress.
    Greeting(Accept<TcpStream>),
    /// The handshake is done.
    Open(TlsStream<TcpStream>),
}

impl Tls {
    /// Returns the connection after the handshake.
    fn open(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<Pin<&mut TlsStream<TcpStream>>>> {
        let this = self.get_mut();
        if let Self::Greeting(accept) = this {
            let stream = ready!(Pin::new(accept).poll(context))?;
            *this = Self::Open(stream);
        }
        match this {
            Self::Open(stream) => Poll::Ready(Ok(Pin::new(stream))),
            Self::Greeting(_) => Poll::Pending,
        }
    }
}

impl AsyncRead for Tls {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.open(context))?.poll_read(context, buffer)
    }
}

impl AsyncWrite for Tls {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.open(context))?.poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            // Nothing was written yet.
            Self::Greeting(_) => Poll::Ready(Ok(())),
            Self::Open(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Greeting(_) => Poll::Ready(Ok(())),
            Self::Open(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_token_is_what_follows_bearer() {
        let of = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
            bearer(&headers).map(str::to_owned)
        };
        assert_eq!(of("Bearer abc"), Some("abc".to_owned()));
        assert_eq!(of("bearer  abc"), Some("abc".to_owned()));
        for wrong in ["Bearer", "Bearer ", "Basic abc", "abc"] {
            assert_eq!(of(wrong), None, "{wrong}");
        }
        assert_eq!(bearer(&HeaderMap::new()), None);
    }
}
