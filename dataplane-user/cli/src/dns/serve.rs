//! `dataplane dns serve`.

use std::{
    net::{IpAddr, SocketAddr},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use axum::{Router, routing::get};
use clap::Args;
use dns::{Basis, Room, Server, Settings};
use model::Snapshot;
use prometheus_client::registry::Registry;
use proxy::admin::metrics_page;
use relay::raise_open_files;
use settings::{Listen, LogFormat, LogLevel};
use threads::Deaths;
use tokio::{runtime::Builder, time::sleep};
use tracing::{error, info};

use super::CommonArgs;
use crate::{
    live::{SIGHUP, Services, Signals},
    log,
};

/// Interval at which the server checks that its source can be read.
const LOOK: Duration = Duration::from_secs(5);
/// The port of DNS resolvers.
const PORT: u16 = 53;

/// Run a DNS server alone, in this network namespace.
///
/// Answers queries for the names of services from the source, and all others from a cache and by
/// asking resolvers. The server recognises a pod by its source address. A pod gets answers by its
/// own search list, from the resolvers of its own resolv.conf.
///
/// Runs in the foreground, and logs to standard error. SIGTERM and Ctrl-C end it. SIGHUP makes it
/// read the manifests again; it also notices changes by itself.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
    dataplane dns serve -f services/ --listen 169.254.20.10:53 --resolver 192.0.2.53
    dataplane dns serve --kubernetes --listen 169.254.20.10:53 --metrics-addr 127.0.0.1:9253")]
pub struct ServeArgs {
    /// Listen here, by UDP and TCP
    #[arg(long, value_name = "ADDR:PORT", num_args = 1.., value_delimiter = ',', required = true)]
    listen: Vec<SocketAddr>,

    /// Ask these resolvers, for all clients [default: those of the client's own resolv.conf; of a
    /// client that is not a pod, those of the node's]
    #[arg(long, value_name = "ADDR[:PORT]", num_args = 1.., value_delimiter = ',', value_parser = resolver)]
    resolver: Vec<SocketAddr>,

    /// Number of threads [default: one for each CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    workers: Option<u16>,

    /// Serve Prometheus metrics, at /metrics [default: off]
    #[arg(long, value_name = "ADDR")]
    metrics_addr: Option<Listen>,

    /// Log more (-v: debug, -vv: trace)
    #[arg(short, long, action = clap::ArgAction::Count)]
    verbose: u8,

    /// Format of the log on standard error [default: text]
    #[arg(long, value_enum)]
    log_format: Option<LogFormat>,

    #[arg(skip)]
    log_level: LogLevel,

    #[command(flatten)]
    pub(super) common: CommonArgs,
}

fn resolver(text: &str) -> Result<SocketAddr, String> {
    let addr = text
        .parse::<IpAddr>()
        .map(|addr| SocketAddr::new(addr, PORT));
    addr.or_else(|_| text.parse()).map_err(|_| {
        format!("`{text}` is not an address; expected one like 192.0.2.53 or 192.0.2.53:53")
    })
}

impl ServeArgs {
    /// Completes the options from the configuration file.
    pub(super) fn fill_from(&mut self, file: &settings::Settings) {
        terminal::fill(&mut self.log_format, file.log.format.as_ref());
        let level = log::level(self.verbose).or(file.log.level);
        self.log_level = level.unwrap_or_default();
    }

    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        log::start(self.log_level, self.log_format.unwrap_or_default());
        for at in &self.listen {
            ensure!(
                !at.ip().is_unspecified(),
                "cannot listen on {at}: answers would come from another address than that which a client asked; name \
                 an address of this machine with --listen"
            );
        }
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let _inside = runtime.enter();
        let (tell, mut died) = tokio::sync::mpsc::unbounded_channel();
        let deaths: Deaths = Arc::new(move |thread, why| {
            // Fails only while the server ends.
            let _ = tell.send(format!("the thread {thread} has died ({why})"));
        });
        let source = self.common.source.source_of_names();
        let mut services = Services::open(&source, &self.common.node, Arc::clone(&deaths))?;
        let mut signals = Signals::new()?;
        let first = runtime.block_on(async {
            tokio::select! {
                snapshot = services.first() => Ok(Some(snapshot)),
                _ = signals.end() => Ok(None),
                Some(died) = died.recv() => Err(died),
            }
        });
        let snapshot = match first {
            Ok(Some(snapshot)) => snapshot,
            Ok(None) => return Ok(ExitCode::SUCCESS),
            Err(died) => bail!("{died}. Please report this"),
        };
        let basis = self.common.basis()?;
        let server = self.start(&basis, &snapshot, &deaths)?;
        let (mut last, mut was_behind) = (snapshot, false);
        let end = runtime.block_on(async {
            let metrics = self.metrics(&server);
            tokio::pin!(metrics);
            loop {
                let snapshot = tokio::select! {
                    snapshot = services.next() => snapshot,
                    () = sleep(LOOK) => None,
                    signal = signals.next() => {
                        if signal != SIGHUP {
                            return Ok(signal);
                        }
                        services.read()
                    }
                    Some(died) = died.recv() => return Err(anyhow::anyhow!("{died}: start the server again. Please report this")),
                    ended = &mut metrics => return Err(ended),
                };
                let is_behind = services.is_behind();
                if snapshot.is_none() && is_behind == was_behind {
                    continue;
                }
                last = snapshot.unwrap_or(last);
                was_behind = is_behind;
                server.set_zone(basis.zone(&last.in_doubt(is_behind)));
            }
        });
        match end {
            Ok(signal) => {
                info!("{signal}: ended");
                Ok(ExitCode::SUCCESS)
            }
            Err(why) => {
                error!("{why:#}");
                Ok(ExitCode::FAILURE)
            }
        }
    }

    fn start(&self, basis: &Basis, snapshot: &Snapshot, deaths: &Deaths) -> anyhow::Result<Server> {
        let cpus = std::thread::available_parallelism().map_or(1, Into::into);
        let node = basis.node.clone();
        let resolvers = Some(self.resolver.clone()).filter(|resolvers| !resolvers.is_empty());
        let cluster_dns = basis.cluster_dns(snapshot);
        let all = resolvers
            .iter()
            .chain([&node.resolvers, &cluster_dns])
            .flatten();
        if let Some(own) = all.into_iter().find(|at| self.listen.contains(at)) {
            bail!(
                "{own} is both an address of this server and a resolver, so it would ask itself; name other resolvers \
                 with --resolver, --resolv-conf or --cluster-dns"
            );
        }
        let files = raise_open_files().context("cannot read the limit of open files")?;
        let settings = Settings {
            workers: self.workers.map_or(cpus, Into::into),
            cache_bytes: self.common.dns.cache_bytes(),
            stale: self.common.dns.stale(),
            longest: self.common.dns.max_ttl(),
            room: Room::of(files),
            cluster_dns,
            node,
            resolvers,
        };
        let zone = basis.zone(snapshot);
        let places: Vec<_> = self.listen.iter().map(ToString::to_string).collect();
        let places = places.join(", ");
        let server = Server::start(settings, zone, Box::new(drop), deaths)
            .context("cannot start a thread")?;
        server.listen(&self.listen).with_context(|| {
            format!("cannot listen on {places}; choose other addresses with --listen")
        })?;
        info!(
            "answering at {places}: {} services",
            snapshot.services.len()
        );
        Ok(server)
    }

    /// Serves metrics. Returns only an error.
    async fn metrics(&self, server: &Server) -> anyhow::Error {
        let Some(at) = self.metrics_addr.and_then(|listen| listen.0) else {
            return std::future::pending().await;
        };
        let mut registry = Registry::default();
        registry.register_collector(Box::new(server.observer()));
        let registry = Arc::new(registry);
        let show = move || std::future::ready(metrics_page(&registry));
        let routes = Router::new().route("/metrics", get(show));
        let page = async {
            let listener = tokio::net::TcpListener::bind(at).await?;
            axum::serve(listener, routes).await
        };
        let place =
            format!("cannot serve metrics at {at}; choose another address with --metrics-addr");
        match page.await {
            Ok(()) => anyhow::anyhow!(place),
            Err(error) => anyhow::Error::from(error).context(place),
        }
    }
}
