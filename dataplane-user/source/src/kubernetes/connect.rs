//! Connections to the API server: its address, its identity, and the agent's own credentials.

use std::{env, fs, io, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use dataplane_common::OF_AGENT;
use http::Uri;
use hyper_util::{
    client::{legacy, proxy::matcher::Matcher},
    rt::{TokioExecutor, TokioIo},
};
use kube::{
    Client, Config,
    client::{ClientBuilder, ConfigExt as _},
    config::{
        AuthInfo, Cluster, Context, KubeConfigOptions, Kubeconfig, NamedAuthInfo, NamedCluster,
        NamedContext,
    },
};
use socket2::{SockRef, TcpKeepalive};
use tokio::{
    net::{TcpSocket, TcpStream, lookup_host},
    sync::watch,
    time::timeout,
};
use tower::{BoxError, ServiceBuilder};

use super::{
    Patience, WantedKinds,
    error::{ConnectError, chain},
    token::TokenFile,
};

/// Time limit for establishing a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// Idle time after which the kernel probes a connection, the interval of the probes, and the time after which the kernel
/// closes a connection without an acknowledgement. So a connection that was cut silently ends after about 15 s.
const KEEPALIVE: Duration = Duration::from_secs(9);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(3);
const UNHEARD: Duration = Duration::from_secs(12);

/// Directory of the service account's files in a pod.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Settings for reading the API.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The API server.
    pub target: Target,
    /// The kinds to read.
    pub wanted: WantedKinds,
    /// Time limits.
    pub patience: Patience,
}

/// The API server's address, and the credentials of both sides.
#[derive(Clone, Debug)]
pub struct Target {
    /// A kubeconfig file. `None`: the pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// The server's URL. `None`: the URL of the kubeconfig or, in a pod, of the environment.
    pub server: Option<String>,
    /// The directory with the service account's `token` and `ca.crt`.
    pub service_account: PathBuf,
}

impl Default for Target {
    fn default() -> Self {
        Self {
            kubeconfig: None,
            server: None,
            service_account: SERVICE_ACCOUNT.into(),
        }
    }
}

impl Target {
    /// Returns whether only a pod's environment has the server's address, which is that of a service.
    pub fn is_a_service(&self) -> bool {
        self.kubeconfig.is_none() && self.server.is_none()
    }

    /// Returns the server's name for people, also if there is no connection to it.
    pub fn server_text(&self) -> String {
        match (&self.server, &self.kubeconfig) {
            (Some(server), _) => server.clone(),
            (None, Some(file)) => format!("the API server of {}", file.display()),
            (None, None) => {
                from_environment().unwrap_or_else(|| "an unknown API server".to_owned())
            }
        }
    }

    /// Checks that files and variables have the server's address.
    ///
    /// # Errors
    ///
    /// If they do not have it, or have an invalid value.
    pub fn check(&self) -> Result<(), ConnectError> {
        let connector = Connector::new(self.clone());
        match &self.kubeconfig {
            Some(path) => connector.kubeconfig(path).map(drop),
            None => connector.service_account().map(drop),
        }
    }
}

/// Makes connections to the API server.
#[derive(Debug)]
pub struct Connector {
    /// The API server.
    pub target: Target,
    /// Changes when reading of a kind works again.
    pub back: watch::Sender<()>,
}

/// One or more connections to the API server.
#[derive(Clone)]
pub struct Connection {
    /// The client for requests.
    pub client: Client,
    /// The server's URL.
    pub server: String,
    /// The agent's token, if it is in a file.
    pub token: Option<Arc<TokenFile>>,
}

impl Connector {
    /// Returns a connector for this server.
    pub fn new(target: Target) -> Self {
        let back = watch::Sender::new(());
        Self { target, back }
    }

    /// Returns a new connection. Reads files again, because tokens, certificates and addresses change.
    ///
    /// # Errors
    ///
    /// If files or variables cannot be used. This does not contact the server.
    pub async fn connect(&self) -> Result<Connection, ConnectError> {
        let (mut kubeconfig, bundle) = match &self.target.kubeconfig {
            Some(path) => (self.kubeconfig(path)?, None),
            None => self.service_account()?,
        };
        let proxy = proxy_of(&kubeconfig);
        let token = take_token_file(&mut kubeconfig);
        let token = token.map(|path| Arc::new(TokenFile::new(path.into())));
        let path = self
            .target
            .kubeconfig
            .as_ref()
            .unwrap_or(&self.target.service_account);
        let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
            .await
            .map_err(|error| ConnectError::Kubeconfig {
                path: path.clone(),
                error: error.into(),
            })?;
        // The client reads the file again from time to time, because the cluster's certificate authority may change.
        config.root_cert_file = bundle;
        if config.cluster_url.host().is_none() {
            return Err(ConnectError::Url {
                url: config.cluster_url.to_string(),
            });
        }
        config.proxy_url = match proxy {
            Some(url) => Some(url.parse().map_err(|_| ConnectError::Url { url })?),
            None => proxy_in_environment(&config.cluster_url),
        };
        // The followers have their own retries, which report the failures.
        config.default_retry = false;
        config.connect_timeout = Some(CONNECT);
        let server = config.cluster_url.to_string();
        let client = client(config).map_err(|error| ConnectError::Client(chain(&error)))?;
        Ok(Connection {
            client,
            server: server.trim_end_matches('/').to_owned(),
            token,
        })
    }

    fn kubeconfig(&self, path: &PathBuf) -> Result<Kubeconfig, ConnectError> {
        let mut kubeconfig =
            Kubeconfig::read_from(path).map_err(|error| ConnectError::Kubeconfig {
                path: path.clone(),
                error: error.into(),
            })?;
        if let Some(server) = &self.target.server {
            for cluster in &mut kubeconfig.clusters {
                cluster.cluster.get_or_insert_default().server = Some(checked(server)?);
            }
        }
        Ok(kubeconfig)
    }

    /// Returns a kubeconfig for the pod's service account, and the path of the certificate authority.
    fn service_account(&self) -> Result<(Kubeconfig, Option<PathBuf>), ConnectError> {
        let server = match &self.target.server {
            Some(server) => checked(server)?,
            None => from_environment().ok_or(ConnectError::Nowhere)?,
        };
        let directory = &self.target.service_account;
        let unusable = |text: String| ConnectError::ServiceAccount {
            path: directory.clone(),
            text,
        };
        // Without encryption (`kubectl proxy`) no token is sent.
        let plain = server.starts_with("http://");
        let token = directory.join("token");
        let bundle = directory.join("ca.crt");
        if !plain {
            for file in [&token, &bundle] {
                fs::metadata(file)
                    .map_err(|error| unusable(format!("{}: {error}", file.display())))?;
            }
        }
        let text = |path: &PathBuf| path.to_string_lossy().into_owned();
        let kubeconfig = Kubeconfig {
            clusters: vec![NamedCluster {
                name: "pod".to_owned(),
                cluster: Some(Cluster {
                    server: Some(server),
                    certificate_authority: (!plain).then(|| text(&bundle)),
                    ..Cluster::default()
                }),
                ..NamedCluster::default()
            }],
            auth_infos: vec![NamedAuthInfo {
                name: "pod".to_owned(),
                auth_info: Some(AuthInfo {
                    token_file: (!plain).then(|| text(&token)),
                    ..AuthInfo::default()
                }),
                ..NamedAuthInfo::default()
            }],
            contexts: vec![NamedContext {
                name: "pod".to_owned(),
                context: Some(Context {
                    cluster: "pod".to_owned(),
                    user: Some("pod".to_owned()),
                    ..Context::default()
                }),
                ..NamedContext::default()
            }],
            current_context: Some("pod".to_owned()),
            ..Kubeconfig::default()
        };
        Ok((kubeconfig, (!plain).then_some(bundle)))
    }
}

/// Connects to the API server. The connection bypasses all services except cluster IPs. TCP keepalive checks it,
/// because a watch may be silent for minutes and then looks like a connection that was cut silently.
async fn dial(server: Uri) -> io::Result<TokioIo<TcpStream>> {
    let host = server.host().unwrap_or_default();
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let port = server.port_u16().unwrap_or(443);
    let mut failed = io::Error::new(io::ErrorKind::NotFound, format!("{host} has no address"));
    for address in lookup_host((host, port)).await? {
        match timeout(CONNECT, dial_address(address)).await {
            Ok(Ok(stream)) => return Ok(TokioIo::new(stream)),
            Ok(Err(error)) => failed = error,
            Err(_) => failed = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(failed)
}

async fn dial_address(address: SocketAddr) -> io::Result<TcpStream> {
    let socket = if address.is_ipv4() {
        TcpSocket::new_v4()?
    } else {
        TcpSocket::new_v6()?
    };
    let options = SockRef::from(&socket);
    // A command of a user without CAP_NET_ADMIN cannot set the priority, so services translate its connection.
    let _ = options.set_priority(OF_AGENT);
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE)
        .with_interval(KEEPALIVE_INTERVAL);
    options.set_tcp_keepalive(&keepalive)?;
    options.set_tcp_user_timeout(Some(UNHEARD))?;
    socket.connect(address).await
}

/// A client.
fn client(config: Config) -> kube::Result<Client> {
    if config.proxy_url.is_some() {
        return Ok(ClientBuilder::try_from(config)?.build());
    }
    let connector = config.rustls_https_connector_with_connector(tower::service_fn(dial))?;
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(legacy::Client::builder(TokioExecutor::new()).build(connector));
    Ok(Client::new(service, config.default_namespace))
}

/// Removes the token's file from a kubeconfig, because the agent reads the file itself.
fn take_token_file(kubeconfig: &mut Kubeconfig) -> Option<String> {
    let name = kubeconfig.current_context.as_ref()?;
    let context = kubeconfig.contexts.iter().find(|c| c.name == *name)?;
    let user = context.context.as_ref()?.user.as_ref()?;
    let mut users = kubeconfig.auth_infos.iter_mut();
    let user = users.find(|u| u.name == *user)?.auth_info.as_mut()?;
    let file = user.token_file.take()?;
    // As for kubectl, the file wins over the token.
    user.token = None;
    Some(file)
}

/// Returns the API server from a pod's environment.
fn from_environment() -> Option<String> {
    let host = env::var("KUBERNETES_SERVICE_HOST")
        .ok()
        .filter(|host| !host.is_empty())?;
    let port = env::var("KUBERNETES_SERVICE_PORT").unwrap_or_else(|_| "443".to_owned());
    Some(if host.contains(':') {
        format!("https://[{host}]:{port}")
    } else {
        format!("https://{host}:{port}")
    })
}

/// Returns the proxy of a kubeconfig's cluster.
fn proxy_of(kubeconfig: &Kubeconfig) -> Option<String> {
    let name = kubeconfig.current_context.as_ref()?;
    let context = kubeconfig.contexts.iter().find(|c| c.name == *name)?;
    let cluster = &context.context.as_ref()?.cluster;
    let cluster = kubeconfig.clusters.iter().find(|c| c.name == *cluster)?;
    let proxy = cluster.cluster.as_ref()?.proxy_url.clone();
    proxy.filter(|url| !url.is_empty())
}

/// The proxy that the environment names: `HTTPS_PROXY` (`HTTP_PROXY` for a server without
/// encryption) or `ALL_PROXY`, unless `NO_PROXY` has the server.
fn proxy_in_environment(server: &Uri) -> Option<Uri> {
    let found = Matcher::from_env().intercept(server)?;
    // The found URL no longer has user and password.
    let plain = server.scheme_str() == Some("http");
    let names = if plain {
        ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"]
    } else {
        ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"]
    };
    let given = names.into_iter().filter_map(|name| env::var(name).ok());
    given
        .map(|url| {
            if url.contains("://") {
                url
            } else {
                format!("http://{url}")
            }
        })
        .filter_map(|url| url.parse::<Uri>().ok())
        .find(|url| url.host() == found.uri().host())
        .or_else(|| Some(found.uri().clone()))
}

/// Returns a URL with a scheme. Accepts `ADDRESS:PORT`, too.
fn checked(url: &str) -> Result<String, ConnectError> {
    let full = if url.contains("://") {
        url.to_owned()
    } else {
        format!("https://{url}")
    };
    let wrong = || ConnectError::Url {
        url: url.to_owned(),
    };
    let parsed: Uri = full.parse().map_err(|_| wrong())?;
    match parsed.scheme_str() {
        Some("http" | "https") if parsed.host().is_some() => Ok(full),
        _ => Err(wrong()),
    }
}
