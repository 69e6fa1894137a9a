//! A proxy's HTTP pages.

use std::{fmt, sync::Arc};

use axum::{
    Router,
    extract::{Query, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use prometheus_client::{encoding::text, registry::Registry};
use serde::Deserialize;

use super::Observer;

/// Sets the log's level.
type SetLevel = dyn Fn(&str) -> Result<(), String> + Send + Sync;

/// Reads and sets the log's level.
#[derive(Clone)]
pub struct Logging {
    /// The present level, as `RUST_LOG` has it.
    pub current: Arc<dyn Fn() -> String + Send + Sync>,
    /// Sets it.
    pub set: Arc<SetLevel>,
}

impl fmt::Debug for Logging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Logging")
    }
}

#[derive(Debug)]
struct Context {
    observer: Observer,
    logging: Logging,
}

/// Metrics, at `/metrics`.
pub fn metrics(observer: &Observer) -> Router {
    let mut registry = Registry::default();
    observer.register(&mut registry);
    let show = async |State(registry): State<Arc<Registry>>| metrics_page(&registry);
    Router::new()
        .route("/metrics", get(show))
        .route("/stats/prometheus", get(show))
        .with_state(Arc::new(registry))
}

/// The rights of a client of the admin endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// Read: every process that reaches an address may.
    Read,
    /// Also change the log's level: every process that may open the Unix socket may.
    Change,
}

/// Everything.
pub fn all(observer: &Observer, logging: Logging, rights: Rights) -> Router {
    let context = Context {
        observer: observer.clone(),
        logging,
    };
    Router::new()
        .route(
            "/",
            get(async || "/config_dump /logging /metrics /healthz/ready\n"),
        )
        .route("/config_dump", get(config_dump))
        .route(
            "/logging",
            match rights {
                Rights::Read => get(get_logging).post(refuse_logging),
                Rights::Change => get(get_logging).post(set_logging),
            },
        )
        .route("/healthz/ready", get(ready))
        .with_state(Arc::new(context))
        .merge(metrics(observer))
}

/// Returns the page of metrics, as OpenMetrics.
pub fn metrics_page(registry: &Registry) -> Response {
    let mut body = String::new();
    match text::encode(&mut body, registry) {
        Ok(()) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(header::CONTENT_TYPE, kind)], body).into_response()
        }
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn config_dump(State(context): State<Arc<Context>>) -> Response {
    let dump = context.observer.dump();
    match serde_json::to_string_pretty(&dump) {
        Ok(text) => ([(header::CONTENT_TYPE, "application/json")], text + "\n").into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn ready(State(context): State<Arc<Context>>) -> (StatusCode, &'static str) {
    if context.observer.is_ready() {
        (StatusCode::OK, "ready\n")
    } else {
        let text = "not ready: services are not known yet, or the proxy is about to end\n";
        (StatusCode::SERVICE_UNAVAILABLE, text)
    }
}

async fn get_logging(State(context): State<Arc<Context>>) -> String {
    format!("{}\n", (context.logging.current)())
}

/// The log's new level.
#[derive(Debug, Deserialize)]
struct Level {
    level: String,
}

async fn refuse_logging() -> (StatusCode, &'static str) {
    let text = "the log's level can only be changed at the Unix socket: start the proxy with --admin-socket\n";
    (StatusCode::FORBIDDEN, text)
}

async fn set_logging(
    State(context): State<Arc<Context>>,
    Query(Level { level }): Query<Level>,
) -> Response {
    match (context.logging.set)(&level) {
        Ok(()) => get_logging(State(context)).await.into_response(),
        Err(error) => {
            let text = format!("{error}; try /logging?level=debug, or info,dataplane=debug\n");
            (StatusCode::BAD_REQUEST, text).into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use axum::{body::Body, http::Request};
    use http_body_util::BodyExt as _;
    use model::Snapshot;
    use threads::none_dies;
    use tower::ServiceExt as _;

    use super::*;
    use crate::{Proxy, Settings, tests::observed::attach};

    /// A level of the log that may be `debug` or `info`.
    fn logging() -> Logging {
        let level = Arc::new(Mutex::new("info".to_owned()));
        let current = Arc::clone(&level);
        Logging {
            current: Arc::new(move || current.lock().unwrap().clone()),
            set: Arc::new(move |to| {
                if to != "debug" {
                    return Err(format!("no level {to}"));
                }
                to.clone_into(&mut level.lock().unwrap());
                Ok(())
            }),
        }
    }

    async fn ask(pages: &Router, method: &str, path: &str) -> (u16, String) {
        let request = Request::builder().method(method).uri(path);
        let request = request.body(Body::empty()).unwrap();
        let response = pages.clone().oneshot(request).await.unwrap();
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn pages_show_the_proxy_and_one_changes_the_level_of_the_log() {
        let proxy = Proxy::start(Settings::default(), &none_dies()).unwrap();
        let observer = proxy.observer();
        let logging = logging();
        let pages = all(&observer, logging.clone(), Rights::Change);
        let reading = all(&observer, logging, Rights::Read);
        for (pages, method, path, status, wanted) in [
            (&pages, "GET", "/", 200, "/config_dump"),
            (
                &pages,
                "GET",
                "/config_dump",
                200,
                "\"max_held_bytes\": 134217728",
            ),
            (
                &pages,
                "GET",
                "/metrics",
                200,
                "dataplane_proxy_connections 0",
            ),
            (&pages, "GET", "/stats/prometheus", 200, "# EOF"),
            (&pages, "GET", "/healthz/ready", 503, "not ready: services"),
            (&pages, "GET", "/logging", 200, "info\n"),
            (
                &reading,
                "POST",
                "/logging?level=debug",
                403,
                "--admin-socket",
            ),
            (&reading, "GET", "/logging", 200, "info\n"),
            (
                &pages,
                "POST",
                "/logging?level=loud",
                400,
                "no level loud; try",
            ),
            (&pages, "POST", "/logging?level=debug", 200, "debug\n"),
            (&reading, "GET", "/logging", 200, "debug\n"),
        ] {
            let answer = ask(pages, method, path).await;
            let is_so = answer.0 == status && answer.1.contains(wanted);
            assert!(is_so, "{method} {path}: {answer:?}");
        }
        proxy.set_snapshot(Snapshot::default());
        attach(&proxy);
        let ready = ask(&pages, "GET", "/healthz/ready").await;
        assert_eq!(ready, (200, "ready\n".to_owned()));
    }
}
