//! Inputs of a server that runs without an agent: its source, and signals.

use std::sync::Arc;

use agent::Input;
use model::{Istio, Snapshot};
use settings::Node;
use source::{Notice, Source};
use threads::Deaths;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::Notify,
};

/// The signal that makes a server read its source again.
pub const SIGHUP: &str = "SIGHUP";

/// The signals that a server handles.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for the next signal.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.hangup.recv() => SIGHUP,
        }
    }

    /// Waits for a signal that ends the server.
    pub async fn end(&mut self) -> &'static str {
        loop {
            let signal = self.next().await;
            if signal != SIGHUP {
                return signal;
            }
        }
    }
}

/// The source of the services.
pub struct Services {
    input: Input,
    changed: Arc<Notify>,
}

impl Services {
    pub fn open(source: &Source, node: &Node, deaths: Deaths) -> anyhow::Result<Self> {
        let changed = Arc::<Notify>::default();
        let tell = Arc::clone(&changed);
        let input = Input::open(source, node, None, move |notice| match notice {
            Notice::Changed => tell.notify_one(),
            Notice::Died { thread, why } => deaths(thread, why),
        })?;
        Ok(Self { input, changed })
    }

    /// Waits for the first snapshot.
    pub async fn first(&mut self) -> Snapshot {
        loop {
            if self.input.is_known() {
                return self.snapshot();
            }
            self.next().await;
        }
    }

    /// Waits for a change, or returns the next part of a large change. May be dropped and called again.
    pub async fn next(&mut self) -> Option<Snapshot> {
        if self.input.is_behind() {
            tokio::task::yield_now().await;
        } else {
            self.changed.notified().await;
        }
        self.take()
    }

    /// Reads the source again if it does not report changes. If the change is large, [`Services::next`] has the rest.
    pub fn read(&mut self) -> Option<Snapshot> {
        self.input.look();
        self.input.refresh();
        self.take()
    }

    /// Returns whether the source has failed for so long that the snapshot may be stale.
    pub fn is_behind(&self) -> bool {
        self.input.health().is_behind(admin::now())
    }

    /// The snapshot without Istio's policies: manifests have them, but only the agent knows the root namespace and the
    /// labels of workloads by which they count.
    fn snapshot(&self) -> Snapshot {
        Snapshot {
            istio: Istio::default(),
            ..self.input.snapshot().clone()
        }
    }

    fn take(&mut self) -> Option<Snapshot> {
        self.input.take()?;
        Some(self.snapshot())
    }
}
