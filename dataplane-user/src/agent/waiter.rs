//! The thread that waits: for signals, for changed files, and for whoever asks the endpoints.

use std::{
    io,
    sync::{Arc, mpsc::Sender},
    thread::{self, JoinHandle},
};

use tokio::{
    runtime::Builder,
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};

use super::Event;
use crate::{
    admin::{self, Listeners, State},
    source::manifests::Watcher,
};

/// The running thread.
pub struct Waiter {
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl Waiter {
    /// Starts it. Signals are taken from here on, before it returns.
    pub fn start(
        listeners: Listeners,
        state: Arc<State>,
        watcher: Watcher,
        events: Sender<Event>,
    ) -> io::Result<Self> {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(4)
            .build()?;
        let (stop, stopped) = oneshot::channel();
        let signals = {
            let _inside = runtime.enter();
            signals(events.clone())?
        };
        let thread = thread::Builder::new()
            .name("waiter".to_owned())
            .spawn(move || {
                let result = runtime.block_on(async {
                    tokio::select! {
                        result = admin::serve(listeners, state) => result,
                        () = signals => Ok(()),
                        () = changes(watcher, events.clone()) => Ok(()),
                        _ = stopped => Ok(()),
                    }
                });
                if let Err(error) = result {
                    // Fails only if the other side ends anyway.
                    let _ = events.send(Event::Failed(error));
                }
                // Whoever was just asking does not hold up the end.
                runtime.shutdown_background();
            })?;
        Ok(Self { stop, thread })
    }

    /// Ends it.
    pub fn stop(self) {
        // It may have ended on its own, and then there is nobody to tell.
        let _ = self.stop.send(());
        let _ = self.thread.join();
    }
}

/// Passes signals on, for ever.
fn signals(events: Sender<Event>) -> io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    Ok(async move {
        loop {
            let event = tokio::select! {
                _ = terminate.recv() => Event::Stop("SIGTERM"),
                _ = interrupt.recv() => Event::Stop("SIGINT"),
                _ = hangup.recv() => Event::Reload("SIGHUP"),
            };
            if events.send(event).is_err() {
                return;
            }
        }
    })
}

/// Tells of changed files, for ever.
async fn changes(mut watcher: Watcher, events: Sender<Event>) {
    loop {
        watcher.changed().await;
        if events.send(Event::Reload("a manifest changed")).is_err() {
            return;
        }
    }
}
