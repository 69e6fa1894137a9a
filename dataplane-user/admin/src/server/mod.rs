//! The agent's endpoints. They show state. Two endpoints of the Unix socket, which is root's, change something: one makes
//! the DNS server forget answers, the other has the CNI plug-in's registrations of pods.

mod certificates;
mod dns;
mod dump;
mod events;
#[cfg(test)]
mod fuzz;
mod waypoints;

use std::{
    fs, io,
    net::{SocketAddr, TcpListener},
    os::unix::{fs::PermissionsExt, net::UnixListener},
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use axum::{
    Json, Router,
    extract::{Query, State as Shared},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use model::ServiceName;
use prometheus_client::{encoding::text, registry::Registry};
use serde::Deserialize;
use source::kubernetes::Reviewer;
use tokio::sync::Semaphore;

use super::{
    access::{self, Encrypted},
    api::{Page, Version},
    client::{self, Client},
    cni::{self, Registrations},
    limits, load_balancers, metrics, policies,
    rendering::Renderings,
    report,
    state::State,
};

/// Items in a page of a list, unless the request has a smaller limit.
const PAGE: usize = 2000;

/// Answers that are made at the same time.
const BODIES: usize = 4;

/// Why the agent cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another process answers on the socket.
    #[error("{agent} on this node answers on {}", socket.display())]
    Busy {
        /// The process.
        agent: String,
        /// The socket.
        socket: PathBuf,
    },
    /// The socket cannot be made.
    #[error("cannot listen on {}: {cause}; choose another place with --socket", socket.display())]
    Socket {
        /// The socket's path.
        socket: PathBuf,
        /// The reason.
        cause: io::Error,
    },
    /// The address cannot be listened on.
    #[error(
        "cannot listen on {addr} for {what}: {cause}; choose another address for {key}, or `off`"
    )]
    Address {
        /// The address.
        addr: SocketAddr,
        /// The purpose.
        what: &'static str,
        /// The setting that chooses another.
        key: &'static str,
        /// The reason.
        cause: io::Error,
    },
}

/// Open sockets that are not served yet: opened before anything is changed, so that a port in use is an error while the
/// error costs nothing.
#[derive(Debug)]
pub struct Listeners {
    socket: UnixListener,
    metrics: Option<TcpListener>,
    health: Option<TcpListener>,
    healthz: Option<SocketAddr>,
    proxy_mode: Option<SocketAddr>,
    admin: Option<TcpListener>,
    path: SocketFile,
}

/// Removes the socket's file in the end.
#[derive(Debug)]
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // It may be gone already, and then there is nothing to do.
        let _ = fs::remove_file(&self.0);
    }
}

impl Listeners {
    /// Opens the sockets. A socket file that an earlier agent left behind is replaced; one with a listener is not.
    ///
    /// # Errors
    ///
    /// If one of them cannot be listened on.
    pub fn open(settings: &settings::Listeners) -> Result<Self, Error> {
        let socket = unix(settings.socket())?;
        // From here on the file is ours to remove.
        let path = SocketFile(settings.socket().to_owned());
        let tcp = |addr: Option<SocketAddr>, what, key| {
            addr.map(|addr| {
                let listener = TcpListener::bind(addr);
                listener
                    .and_then(|l| l.set_nonblocking(true).map(|()| l))
                    .map_err(|cause| Error::Address {
                        addr,
                        what,
                        key,
                        cause,
                    })
            })
            .transpose()
        };
        Ok(Self {
            socket,
            metrics: tcp(
                settings.metrics(),
                "metrics",
                "listen.metrics (--metrics-addr)",
            )?,
            health: tcp(settings.health(), "health checks", "listen.health")?,
            // Opened later, because the port may become free later: kube-proxy has it until it is gone.
            healthz: settings.healthz(),
            // kube-proxy has both at one port; so has the agent if this is configured.
            proxy_mode: settings
                .proxy_mode()
                .filter(|at| settings.metrics() != Some(*at)),
            admin: tcp(
                settings.admin(),
                "the admin endpoint",
                "listen.admin (--admin-addr)",
            )?,
            path,
        })
    }
}

/// Returns the process that answers on a socket, if there is one.
pub fn who_answers(socket: &Path) -> Option<String> {
    match Client::new(socket).get::<Version>("/version") {
        Ok(version) => Some(format!(
            "agent {} (process {})",
            version.version, version.pid
        )),
        Err(client::Error::NotRunning { .. }) => None,
        Err(_) => Some("something that is not this agent".to_owned()),
    }
}

fn unix(path: &Path) -> Result<UnixListener, Error> {
    if let Some(agent) = who_answers(path) {
        return Err(Error::Busy {
            agent,
            socket: path.to_owned(),
        });
    }
    let open = || {
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir)?;
        }
        match fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    open().map_err(|cause| Error::Socket {
        socket: path.to_owned(),
        cause,
    })
}

/// Data that the handlers share.
#[derive(Debug)]
struct Context {
    state: Arc<State>,
    registry: Registry,
    renderings: Renderings,
}

/// Answers until it is dropped. `reviewer`: decides which clients may read the metrics at their own address; `None`:
/// every client may. `pods`: takes the CNI plug-in's registrations.
///
/// # Errors
///
/// If a listener breaks, which does not happen.
pub async fn serve(
    listeners: Listeners,
    state: Arc<State>,
    reviewer: Option<Arc<Reviewer>>,
    pods: Registrations,
) -> io::Result<()> {
    let registry = metrics::registry(&state);
    let context = Arc::new(Context {
        state: Arc::clone(&state),
        registry,
        renderings: Renderings::default(),
    });
    let Listeners {
        socket,
        metrics,
        health,
        healthz,
        proxy_mode,
        admin,
        path: _path,
    } = listeners;
    let socket = tokio::net::UnixListener::from_std(socket)?;
    tokio::try_join!(
        async { axum::serve(socket, socket_routes(&context, pods)).await },
        guarded(metrics, metrics_routes(&context), reviewer),
        tcp(health, health_routes(&context)),
        tcp(admin, admin_routes(&context)),
        async {
            load_balancers::serve(healthz, proxy_mode, state).await;
            Ok(())
        },
    )?;
    Ok(())
}

async fn tcp(listener: Option<TcpListener>, routes: Router) -> io::Result<()> {
    if let Some(listener) = listener {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        limits::serve(listener, routes).await;
    }
    Ok(())
}

/// Answers clients that the reviewer lets through, by HTTPS; without a reviewer every client, by HTTP.
async fn guarded(
    listener: Option<TcpListener>,
    routes: Router,
    reviewer: Option<Arc<Reviewer>>,
) -> io::Result<()> {
    let Some(reviewer) = reviewer else {
        return tcp(listener, routes).await;
    };
    let Some(listener) = listener else {
        return Ok(());
    };
    let listener = Encrypted::new(tokio::net::TcpListener::from_std(listener)?)?;
    limits::serve(listener, access::guarded(routes, reviewer)).await;
    Ok(())
}

fn metrics_routes(context: &Arc<Context>) -> Router {
    Router::new()
        .route("/metrics", get(get_metrics))
        .with_state(Arc::clone(context))
        .merge(load_balancers::proxy_mode())
}

fn health_routes(context: &Arc<Context>) -> Router {
    Router::new()
        .route("/healthz/ready", get(get_ready))
        .route("/healthz/live", get(get_live))
        .with_state(Arc::clone(context))
}

/// The paths of the Unix socket.
fn socket_routes(context: &Arc<Context>, pods: Registrations) -> Router {
    Router::new()
        .route("/dns/cache/flush", post(dns::flush))
        .route("/dns/lookup", get(dns::lookup))
        .route("/dns/queries", get(dns::queries))
        .route("/refusals", get(dump::refusals))
        .with_state(Arc::clone(context))
        .merge(cni::routes(pods))
        .merge(admin_routes(context))
}

const PATHS: &str = "/status /services /pools /mesh /policies /waypoint /dns/cache /certs /config_dump /metrics /version /healthz/ready\n";

fn admin_routes(context: &Arc<Context>) -> Router {
    Router::new()
        .route("/", get(|| async { PATHS }))
        .route("/version", get(|| async { Json(Version::own()) }))
        .route("/status", get(get_status))
        .route("/services", get(get_services))
        .route("/pools", get(get_pools))
        .route("/mesh", get(get_mesh))
        .route("/policies", get(get_policies))
        .route("/waypoint", get(waypoints::get))
        .route("/dns/cache", get(dns::get))
        .route("/certs", get(certificates::get))
        .route("/config_dump", get(dump::get))
        .with_state(Arc::clone(context))
        .merge(metrics_routes(context))
        .merge(health_routes(context))
}

/// Whether the agent answers, and none of its threads hangs. Readiness shows whether it works.
async fn get_live(Shared(context): Shared<Arc<Context>>) -> (StatusCode, String) {
    match context.state.stuck(Instant::now()) {
        None => (StatusCode::OK, "alive\n".to_owned()),
        Some((thread, busy)) => (
            StatusCode::SERVICE_UNAVAILABLE,
            format!(
                "the agent's thread `{thread}` has been at one piece of work for {} s\n",
                busy.as_secs()
            ),
        ),
    }
}

async fn get_ready(Shared(context): Shared<Arc<Context>>) -> (StatusCode, String) {
    match context.state.not_ready_because() {
        None => (StatusCode::OK, "ready\n".to_owned()),
        Some(why) => (
            StatusCode::SERVICE_UNAVAILABLE,
            format!("not ready: {why}\n"),
        ),
    }
}

async fn get_metrics(Shared(context): Shared<Arc<Context>>) -> Response {
    let of = Arc::clone(&context);
    let make = async || {
        aside(move || {
            let mut text = String::new();
            text::encode(&mut text, &of.registry)
                .map_err(|_| "cannot write the metrics\n".to_owned())?;
            Ok(text)
        })
        .await
    };
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    match context.renderings.get(make).await {
        Ok(body) => ([(header::CONTENT_TYPE, kind)], body).into_response(),
        Err(wrong) => wrong,
    }
}

async fn get_status(Shared(context): Shared<Arc<Context>>) -> Response {
    answer(move || {
        let state = &context.state;
        Ok(Json(report::examine(
            &state.paths,
            state.limits,
            Ok(state.status()),
        )))
    })
    .await
}

async fn get_mesh(Shared(context): Shared<Arc<Context>>) -> Response {
    answer(move || Ok(Json(context.state.mesh()))).await
}

async fn get_policies(
    Shared(context): Shared<Arc<Context>>,
    Query(asked): Query<policies::Asked>,
) -> Response {
    answer(move || context.state.policies(&asked).map(Json)).await
}

/// The services to list.
#[derive(Debug, Deserialize)]
struct ServicesQuery {
    namespace: Option<String>,
    after: Option<String>,
    limit: Option<usize>,
}

async fn get_services(
    Shared(context): Shared<Arc<Context>>,
    Query(query): Query<ServicesQuery>,
) -> Response {
    answer(move || {
        let after = match query.after.as_deref().map(|name| name.split_once('/')) {
            None => None,
            Some(Some((namespace, name))) => Some(ServiceName::new(namespace, name)),
            Some(None) => return Err("after: NAMESPACE/NAME is wanted\n".to_owned()),
        };
        let limit = query.limit.unwrap_or(PAGE).clamp(1, PAGE);
        Ok(Json(context.state.services(
            query.namespace.as_deref(),
            after.as_ref(),
            limit,
        )))
    })
    .await
}

/// The pools to list.
#[derive(Debug, Deserialize)]
struct PoolsQuery {
    pool: Option<u32>,
    after: Option<u32>,
}

async fn get_pools(
    Shared(context): Shared<Arc<Context>>,
    Query(query): Query<PoolsQuery>,
) -> Response {
    answer(move || {
        let state = &context.state;
        Ok(Json(match query.pool {
            Some(pool) => Page {
                items: state.pool(pool).into_iter().collect(),
                next: None,
            },
            None => state.pools(query.after.unwrap_or_default(), 10_000),
        }))
    })
    .await
}

/// Answers from a thread of its own: reading tables of many services must not delay a readiness probe.
async fn answer<R: IntoResponse + Send + 'static>(
    work: impl FnOnce() -> Result<R, String> + Send + 'static,
) -> Response {
    aside(work).await.into_response()
}

/// Works on a thread of its own.
///
/// Only a few run at once, because each takes memory, and time of the CPU. The others wait.
async fn aside<R: Send + 'static>(
    work: impl FnOnce() -> Result<R, String> + Send + 'static,
) -> Result<R, Response> {
    static FREE: Semaphore = Semaphore::const_new(BODIES);
    // It is never closed, so this never fails.
    let _place = FREE.acquire().await.ok();
    match tokio::task::spawn_blocking(work).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(wrong)) => Err((StatusCode::BAD_REQUEST, wrong).into_response()),
        Err(_) => Err(StatusCode::INTERNAL_SERVER_ERROR.into_response()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(dir: &Path) -> settings::Listeners {
        let off = Some(settings::Listen(None));
        settings::Listeners {
            socket: Some(dir.join("deep/agent.sock")),
            metrics: off,
            metrics_auth: None,
            health: off,
            healthz: off,
            proxy_mode: off,
            admin: off,
        }
    }

    #[test]
    fn a_socket_left_behind_is_replaced_and_removed_in_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let asked = asked(dir.path());
        fs::create_dir_all(asked.socket().parent().unwrap()).unwrap();
        drop(UnixListener::bind(asked.socket()).unwrap());
        let listeners = Listeners::open(&asked).unwrap();
        let mode = fs::metadata(asked.socket()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        drop(listeners);
        assert!(!asked.socket().exists());
    }

    #[test]
    fn a_port_in_use_names_the_way_out() {
        let dir = tempfile::tempdir().unwrap();
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut asked = asked(dir.path());
        asked.metrics = Some(settings::Listen(taken.local_addr().ok()));
        let error = Listeners::open(&asked).unwrap_err().to_string();
        assert!(
            error.contains("listen.metrics (--metrics-addr), or `off`"),
            "{error}"
        );
        assert!(!asked.socket().exists(), "nothing is left behind");
    }
}
