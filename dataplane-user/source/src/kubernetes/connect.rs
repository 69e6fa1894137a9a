//! The way to the API server: where it is, whom it must be, and who we are.

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

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(5);
/// When nothing was heard for so long, the kernel asks whether the other side is there, and again in these
/// intervals; and it gives a connection up on which nothing was acknowledged for so long. So one that was cut
/// without a word ends after some 15 s.
const KEEPALIVE: Duration = Duration::from_secs(9);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(3);
const UNHEARD: Duration = Duration::from_secs(12);

/// Where a pod finds what it needs to talk to the API server.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// How to read the API.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where the API server is.
    pub target: Target,
    /// What to read it for.
    pub wanted: WantedKinds,
    /// How long to wait for what.
    pub patience: Patience,
}

/// Where the API server is, and what proves who is who.
#[derive(Clone, Debug)]
pub struct Target {
    /// A kubeconfig file; none: the service account of the pod.
    pub kubeconfig: Option<PathBuf>,
    /// The server's URL, if not the one in the file or, of a pod, in its environment.
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
    /// Whether only the environment of a pod says where it is: at the address of a service.
    pub fn is_a_service(&self) -> bool {
        self.kubeconfig.is_none() && self.server.is_none()
    }

    /// The server as a person knows it, also if there is no way to it.
    pub fn server_text(&self) -> String {
        match (&self.server, &self.kubeconfig) {
            (Some(server), _) => server.clone(),
            (None, Some(file)) => format!("the API server of {}", file.display()),
            (None, None) => {
                from_environment().unwrap_or_else(|| "an unknown API server".to_owned())
            }
        }
    }

    /// Whether files and variables say where it is.
    ///
    /// # Errors
    ///
    /// If they do not, or say nothing that makes sense.
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
    /// Where it is.
    pub target: Target,
    /// Changes when reading a kind works again.
    pub back: watch::Sender<()>,
}

/// A connection to the API server, or several.
#[derive(Clone)]
pub struct Connection {
    /// To ask it.
    pub client: Client,
    /// Its URL.
    pub server: String,
    /// What proves who we are, if that is in a file.
    pub token: Option<Arc<TokenFile>>,
}

impl Connector {
    /// For this one.
    pub fn new(target: Target) -> Self {
        let back = watch::Sender::new(());
        Self { target, back }
    }

    /// A new connection: files are read again, since tokens, certificates and addresses change.
    ///
    /// # Errors
    ///
    /// If files or variables are of no use. The server is not asked.
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
        // Read again now and then, as the cluster's certificate authority may change.
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
        // We have our own patience, which tells what goes wrong meanwhile.
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

    /// What a kubeconfig of the pod would be, and where the certificate authority is.
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
        // Without encryption (`kubectl proxy`) there is nobody to prove anything to.
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

/// Connects to the API server, past all services but those of cluster IPs. The connection is looked after by TCP: a
/// watch may be silent for minutes, and a connection that was cut without a word would be as silent.
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
    // A command of a user without CAP_NET_ADMIN may not, and then services are translated for it.
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

/// Takes the file with the token out of a kubeconfig: we read it ourselves.
fn take_token_file(kubeconfig: &mut Kubeconfig) -> Option<String> {
    let name = kubeconfig.current_context.as_ref()?;
    let context = kubeconfig.contexts.iter().find(|c| c.name == *name)?;
    let user = context.context.as_ref()?.user.as_ref()?;
    let mut users = kubeconfig.auth_infos.iter_mut();
    let user = users.find(|u| u.name == *user)?.auth_info.as_mut()?;
    let file = user.token_file.take()?;
    // As kubectl has it, the file is the one that counts.
    user.token = None;
    Some(file)
}

/// The API server that Kubernetes tells a pod.
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

/// The proxy that a kubeconfig names for its cluster.
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
    // What was found has no user's name and password any more.
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

/// A URL as it was given; `ADDRESS:PORT` will do.
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
