//! A thread that reports changes of a source.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
};

use threads::may_panic;
use tokio::{runtime::Builder, sync::oneshot};

use super::feed::{self, Notice};

/// A thread that reports changes of a source until it is dropped.
#[derive(Debug)]
pub struct Watching {
    changed: Arc<AtomicBool>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Option<()>>>,
}

impl Watching {
    /// Starts the thread. `next` waits for the next change.
    ///
    /// # Errors
    ///
    /// If the thread cannot be started.
    pub fn start(
        thread: &'static str,
        notify: impl Fn(Notice) + Clone + Send + Sync + 'static,
        mut next: impl AsyncFnMut() + Send + 'static,
    ) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (stop, stopped) = oneshot::channel();
        let changed = Arc::<AtomicBool>::default();
        let deaths = feed::deaths(thread, notify.clone());
        let tell = Arc::clone(&changed);
        let thread = threads::start(thread, deaths, move || {
            let watch = async {
                loop {
                    next().await;
                    may_panic(thread);
                    tell.store(true, Ordering::Release);
                    notify(Notice::Changed);
                }
            };
            runtime.block_on(async {
                tokio::select! {
                    () = watch => {}
                    _ = stopped => {}
                }
            });
        })?;
        Ok(Self {
            changed,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Returns whether there was a change since the last call.
    pub fn changed(&self) -> bool {
        self.changed.swap(false, Ordering::Acquire)
    }

    /// Reports a change without a change of the source.
    pub fn refresh(&self) {
        self.changed.store(true, Ordering::Release);
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        // The thread may have ended on its own, and then no receiver is left.
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
