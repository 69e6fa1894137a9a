//! The server as a whole: it starts, goes away, comes back.

use std::{
    collections::BTreeSet,
    fmt, fs, io,
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use axum::{Router, serve::ListenerExt as _};
use serde_json::json;
use tokio::runtime::{Builder, Runtime};

use super::{
    Cluster, Faults,
    serve::{self, Clients, Site},
    tls::Identity,
};

/// Makes the socket that the server listens on, anew each time that it starts.
pub type Bind = Box<dyn Fn() -> io::Result<TcpListener> + Send + Sync>;

/// How to serve.
pub struct Options {
    /// Names and addresses of the server's certificate; none: without TLS.
    pub certified: Option<Vec<String>>,
    /// Tokens that it accepts; `None`: it accepts every client.
    pub tokens: Vec<String>,
    /// Threads that serve.
    pub threads: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            certified: Some(vec!["127.0.0.1".to_owned(), "localhost".to_owned()]),
            tokens: vec!["secret".to_owned()],
            threads: 1,
        }
    }
}

/// An API server. Dropping it ends it.
pub struct ApiServer {
    cluster: Cluster,
    faults: Faults,
    tokens: Arc<Mutex<BTreeSet<String>>>,
    clients: Arc<Mutex<Clients>>,
    identity: Option<Arc<Identity>>,
    bind: Bind,
    address: SocketAddr,
    threads: usize,
    running: Option<Runtime>,
}

impl fmt::Debug for ApiServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiServer({})", self.url())
    }
}

impl ApiServer {
    /// Serves a cluster on a free port of 127.0.0.1.
    ///
    /// # Errors
    ///
    /// If there is no port, or no certificate can be made.
    pub fn start(cluster: Cluster, options: Options) -> io::Result<Self> {
        let first = TcpListener::bind("127.0.0.1:0")?;
        let address = first.local_addr()?;
        drop(first);
        Self::bind(
            cluster,
            options,
            Box::new(move || TcpListener::bind(address)),
        )
    }

    /// Serves a cluster on the socket that `bind` makes.
    ///
    /// # Errors
    ///
    /// If it cannot be made, or no certificate.
    pub fn bind(cluster: Cluster, options: Options, bind: Bind) -> io::Result<Self> {
        let identity = options
            .certified
            .as_deref()
            .map(Identity::new)
            .transpose()?;
        let mut server = Self {
            cluster,
            faults: Faults::default(),
            tokens: Arc::new(Mutex::new(options.tokens.into_iter().collect())),
            clients: Arc::default(),
            identity: identity.map(Arc::new),
            bind,
            address: SocketAddr::from(([0, 0, 0, 0], 0)),
            threads: options.threads,
            running: None,
        };
        server.come_back()?;
        Ok(server)
    }

    /// The cluster that it serves.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Its faults.
    pub fn faults(&self) -> &Faults {
        &self.faults
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its URL.
    pub fn url(&self) -> String {
        let scheme = if self.identity.is_some() {
            "https"
        } else {
            "http"
        };
        format!("{scheme}://{}", self.address)
    }

    /// The certificate authority's certificate, PEM; empty without TLS.
    pub fn authority(&self) -> &str {
        self.identity.as_ref().map_or("", |i| &i.authority)
    }

    /// Accepts these tokens from now on, and no others.
    ///
    /// # Panics
    ///
    /// If a thread that served has panicked.
    pub fn accept_tokens(&self, tokens: &[&str]) {
        let tokens = tokens.iter().map(|&token| token.to_owned()).collect();
        *self.tokens.lock().expect("no thread has panicked") = tokens;
    }

    /// Knows this token as a user's from now on, in reviews. `may_get`: the paths that the user may get.
    ///
    /// # Panics
    ///
    /// If a thread that served has panicked.
    pub fn knows(&self, token: &str, user: &str, may_get: &[&str]) {
        let mut clients = self.clients.lock().expect("no thread has panicked");
        clients.users.insert(token.to_owned(), user.to_owned());
        clients.may_get.retain(|(of, _)| of != user);
        let paths = may_get
            .iter()
            .map(|&path| (user.to_owned(), path.to_owned()));
        clients.may_get.extend(paths);
    }

    /// Writes a kubeconfig for it into a directory, with the first token that it accepts.
    ///
    /// # Errors
    ///
    /// If it cannot be written.
    ///
    /// # Panics
    ///
    /// If a thread that served has panicked.
    pub fn kubeconfig(&self, directory: &Path) -> io::Result<PathBuf> {
        let tokens = self.tokens.lock().expect("no thread has panicked");
        let authority = directory.join("ca.crt");
        fs::write(&authority, self.authority())?;
        let mut cluster = json!({ "server": self.url() });
        if self.identity.is_some() {
            cluster["certificate-authority"] = json!(authority);
        }
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "lab", "cluster": cluster }],
            "users": [{ "name": "lab", "user": { "token": tokens.first() } }],
            "contexts": [{ "name": "lab", "context": { "cluster": "lab", "user": "lab" } }],
            "current-context": "lab",
        });
        let path = directory.join("kubeconfig");
        fs::write(&path, config.to_string())?;
        Ok(path)
    }

    /// Writes the files of a pod's service account, `ca.crt` and `token`, into a directory.
    ///
    /// # Errors
    ///
    /// If it cannot be written.
    pub fn service_account(&self, directory: &Path, token: &str) -> io::Result<()> {
        fs::write(directory.join("ca.crt"), self.authority())?;
        fs::write(directory.join("token"), token)
    }

    /// Goes away at once: connections break, and no socket listens.
    pub fn go_away(&mut self) {
        if let Some(runtime) = self.running.take() {
            runtime.shutdown_background();
        }
    }

    /// Listens again where it did.
    ///
    /// # Errors
    ///
    /// If it cannot.
    pub fn come_back(&mut self) -> io::Result<()> {
        self.go_away();
        let runtime = Builder::new_multi_thread()
            .worker_threads(self.threads)
            .thread_name("api-server")
            .enable_all()
            .build()?;
        let listener = self.listener()?;
        listener.set_nonblocking(true)?;
        self.address = listener.local_addr()?;
        let site = Site {
            cluster: self.cluster.clone(),
            faults: self.faults.clone(),
            tokens: Arc::clone(&self.tokens),
            clients: Arc::clone(&self.clients),
        };
        let router = Router::new()
            .fallback(serve::answer)
            .with_state(Arc::new(site));
        let inside = runtime.enter();
        let listener = tokio::net::TcpListener::from_std(listener)?;
        if let Some(identity) = &self.identity {
            let listener = identity.listener(listener);
            runtime.spawn(axum::serve(listener, router).into_future());
        } else {
            let listener = listener.tap_io(|stream| {
                let _ = stream.set_nodelay(true);
            });
            runtime.spawn(axum::serve(listener, router).into_future());
        }
        drop(inside);
        self.running = Some(runtime);
        Ok(())
    }

    /// The sockets of the last time may take a moment to go.
    fn listener(&self) -> io::Result<TcpListener> {
        for _ in 0..200 {
            match (self.bind)() {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                    std::thread::sleep(std::time::Duration::from_millis(10));
                }
                other => return other,
            }
        }
        (self.bind)()
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.go_away();
    }
}
