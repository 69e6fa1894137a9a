//! Runs the proxy: reads its source and signals, and hands over.

use std::{
    net::TcpListener,
    os::unix::net::{UnixListener, UnixStream},
    process::ExitCode,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use model::Snapshot;
use proxy::{
    Observer, Proxy,
    admin::{self, Logging},
    handover::{self, Named},
};
use relay::Attachment;
use source::kubernetes::Scope;
use threads::Deaths;
use tokio::{
    runtime::{Builder, Runtime},
    sync::{
        mpsc::{self, UnboundedReceiver},
        oneshot,
    },
    task::JoinSet,
};
use tracing::{error, info, warn};

use super::{
    ProxyArgs,
    sockets::{self, Sockets},
};
use crate::live::{SIGHUP, Services, Signals};

/// The reason why the proxy ends.
#[derive(Debug)]
enum End {
    Signal(&'static str),
    /// A thread or task died, with its message.
    Died(String),
    /// Another proxy has taken the sockets. It waits at this stream until this proxy no longer accepts.
    Replaced(UnixStream),
}

/// Runs the proxy until a signal, a death or another proxy ends it.
pub fn run(arguments: &ProxyArgs, logging: Logging) -> anyhow::Result<ExitCode> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let _inside = runtime.enter();
    let (mut events, deaths) = Events::open(arguments)?;
    // The source is read before the sockets exist, so that no connection is accepted without a route.
    let snapshot = match runtime.block_on(events.first()) {
        Ok(snapshot) => snapshot,
        Err(End::Died(died)) => bail!("{died}. Please report this"),
        Err(end) => {
            info!("{end:?}: the proxy ended before it had read its source");
            return Ok(ExitCode::SUCCESS);
        }
    };
    let mut relaying = Relaying::start(arguments, logging, snapshot, &deaths)?;
    let end = runtime.block_on(relaying.run(&mut events));
    if let End::Signal(_) | End::Died(_) = &end {
        // The sockets at these paths have no listener any more.
        for path in [&arguments.handover, &arguments.listen.admin_socket] {
            let _ = path.as_ref().map(std::fs::remove_file);
        }
    }
    let drain = arguments.limits.drain_time;
    let code = relaying.end(end, drain, &runtime, &mut events.signals);
    // A pending request does not delay the end.
    runtime.shutdown_background();
    Ok(code)
}

/// The inputs of the proxy.
struct Events {
    services: Services,
    signals: Signals,
    died: UnboundedReceiver<String>,
}

impl Events {
    /// Opens the source, and handles signals from here on. Also returns the place to report dead threads.
    fn open(arguments: &ProxyArgs) -> anyhow::Result<(Self, Deaths)> {
        let source = arguments.source.source(Scope::Services);
        let (tell, died) = mpsc::unbounded_channel();
        let deaths: Deaths = Arc::new(move |thread, why| {
            // Fails only while the proxy ends.
            let _ = tell.send(format!("the thread {thread} has died ({why})"));
        });
        let events = Self {
            services: Services::open(&source, &arguments.node, Arc::clone(&deaths))?,
            signals: Signals::new()?,
            died,
        };
        Ok((events, deaths))
    }

    /// Waits for the first snapshot.
    async fn first(&mut self) -> Result<Snapshot, End> {
        tokio::select! {
            snapshot = self.services.first() => Ok(snapshot),
            signal = self.signals.end() => Err(End::Signal(signal)),
            Some(died) = self.died.recv() => Err(End::Died(died)),
        }
    }
}

/// The proxy while it accepts connections.
struct Relaying {
    proxy: Proxy,
    /// Answers metrics and commands.
    http: JoinSet<()>,
    /// The listening sockets, for the proxy that takes over.
    copies: Named,
    /// The listener at which the next proxy may ask.
    waiting: Option<tokio::net::UnixListener>,
}

impl Relaying {
    /// Opens the sockets and accepts connections.
    fn start(
        arguments: &ProxyArgs,
        logging: Logging,
        snapshot: Snapshot,
        deaths: &Deaths,
    ) -> anyhow::Result<Self> {
        let mut sockets = Sockets::open(arguments)?;
        let proxy = Proxy::start(arguments.settings(), deaths)?;
        let observer = proxy.observer();
        let metrics = sockets.metrics.take();
        let admin = (sockets.admin.take(), sockets.admin_socket.take());
        let mut http = JoinSet::new();
        http.spawn(serve_http(metrics, admin, observer.clone(), logging));
        let attachment = Attachment {
            workload: arguments.workload()?,
            namespace: None,
            outbound: std::mem::take(&mut sockets.outbound),
            inbound: std::mem::take(&mut sockets.inbound),
            tunnels: Vec::new(),
            egress: arguments.egress,
        };
        proxy.set_snapshot(snapshot);
        proxy.add(attachment)?;
        let copies = match &arguments.handover {
            Some(_) => sockets.take_copies(),
            None => Named::new(),
        };
        let waiting = take_place(arguments, &mut sockets)?;
        drop(sockets);
        info!(
            "relaying: at most {} connections",
            observer.max_connections()
        );
        Ok(Self {
            proxy,
            http,
            copies,
            waiting,
        })
    }

    /// Relays connections with the present services until the proxy has to end.
    async fn run(&mut self, events: &mut Events) -> End {
        loop {
            tokio::select! {
                snapshot = events.services.next() => {
                    if let Some(snapshot) = snapshot {
                        self.proxy.set_snapshot(snapshot);
                    }
                }
                signal = events.signals.next() => {
                    if signal != SIGHUP {
                        return End::Signal(signal);
                    }
                    if let Some(snapshot) = events.services.read() {
                        self.proxy.set_snapshot(snapshot);
                    }
                }
                stream = replaced(self.waiting.as_ref(), &self.copies) => {
                    return End::Replaced(stream);
                }
                Some(died) = events.died.recv() => return End::Died(died),
                Some(Err(died)) = self.http.join_next() => return End::Died(died.to_string()),
            }
        }
    }

    /// Accepts no more connections, and waits until the present ones have ended, for at most `drain`.
    fn end(self, end: End, drain: Duration, runtime: &Runtime, signals: &mut Signals) -> ExitCode {
        let Self {
            proxy,
            mut http,
            copies,
            waiting,
        } = self;
        let (why, other, died) = match end {
            End::Signal(signal) => (signal.to_owned(), None, false),
            End::Died(died) => (died, None, true),
            End::Replaced(stream) => {
                let why = "another proxy has taken over".to_owned();
                (why, Some(stream), false)
            }
        };
        if died {
            error!("{why}: start the proxy again. Please report this");
        }
        info!(
            "{why}: draining {} connections for at most {drain:?}",
            proxy.connections()
        );
        // The copies would keep the sockets open.
        drop((copies, waiting));
        let start = Instant::now();
        let (done, drained) = oneshot::channel();
        thread::spawn(move || {
            proxy.drain(drain);
            // Fails if the receiver no longer waits.
            let _ = done.send(());
        });
        // Metrics stay available in the meantime, unless another proxy has taken the port.
        let handed_over = other.is_some();
        if let Some(stream) = other {
            http.abort_all();
            handover::gone(&stream);
        }
        runtime.block_on(async {
            tokio::select! {
                _ = drained => {}
                signal = signals.end() => warn!("{signal} again: not waiting any more"),
            }
        });
        info!(
            "ended after {:.1?}{}",
            start.elapsed(),
            if handed_over {
                "; another proxy keeps accepting"
            } else {
                ""
            }
        );
        if died {
            ExitCode::FAILURE
        } else {
            ExitCode::SUCCESS
        }
    }
}

/// Tells the former proxy that its sockets are in use, and returns the listener at which the next proxy may ask.
fn take_place(
    arguments: &ProxyArgs,
    sockets: &mut Sockets,
) -> anyhow::Result<Option<tokio::net::UnixListener>> {
    if let Some(before) = sockets.before.take() {
        // Both proxies accept until the former one has stopped. Without its answer this may take a while.
        match handover::taken(before) {
            Ok(_) => info!("took over from the earlier proxy"),
            Err(error) => warn!("the earlier proxy does not say that it has stopped: {error}"),
        }
    }
    let Some(path) = &arguments.handover else {
        return Ok(None);
    };
    let listener = handover::listen(path)
        .and_then(|listener| {
            listener.set_nonblocking(true)?;
            tokio::net::UnixListener::from_std(listener)
        })
        .with_context(|| format!("cannot wait at {} for the next proxy", path.display()))?;
    Ok(Some(listener))
}

/// Waits until another proxy has taken the sockets.
async fn replaced(waiting: Option<&tokio::net::UnixListener>, copies: &Named) -> UnixStream {
    let Some(waiting) = waiting else {
        return std::future::pending().await;
    };
    loop {
        let offered = async {
            let (stream, _) = waiting.accept().await?;
            let stream = stream.into_std()?;
            handover::offer(stream, &sockets::borrowed(copies))
        };
        match offered.await {
            Ok(stream) => return stream,
            Err(error) => {
                warn!("cannot hand the listening sockets over to the next proxy: {error}");
                // The pause prevents a busy loop after an error.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn serve_http(
    metrics: Option<TcpListener>,
    (admin, socket): (Option<TcpListener>, Option<UnixListener>),
    observer: Observer,
    logging: Logging,
) {
    let serve = async |listener: Option<TcpListener>, routes| -> std::io::Result<()> {
        let Some(listener) = listener else {
            return Ok(());
        };
        listener.set_nonblocking(true)?;
        axum::serve(tokio::net::TcpListener::from_std(listener)?, routes).await
    };
    let read_only = admin::all(&observer, logging.clone(), admin::Rights::Read);
    let all = admin::all(&observer, logging, admin::Rights::Change);
    let served = tokio::try_join!(
        serve(metrics, admin::metrics(&observer)),
        serve(admin, read_only),
        async {
            let Some(socket) = socket else { return Ok(()) };
            socket.set_nonblocking(true)?;
            axum::serve(tokio::net::UnixListener::from_std(socket)?, all).await
        },
    );
    if let Err(error) = served {
        error!("metrics and the admin endpoint are not answered any more: {error}");
    }
}
