//! A thread that runs an asynchronous task.

use std::{io, thread::JoinHandle};

use threads::Deaths;
use tokio::{runtime::Builder, sync::oneshot};

/// A thread that runs a task until this is dropped.
#[derive(Debug)]
pub struct Task {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Option<()>>>,
}

impl Task {
    /// Starts the thread. If it panics, it calls `deaths`.
    ///
    /// # Errors
    ///
    /// If the thread cannot be started.
    pub fn start(
        name: &'static str,
        deaths: Deaths,
        work: impl AsyncFnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(2)
            .build()?;
        let (stop, stopped) = oneshot::channel();
        let thread = threads::start(name, deaths, move || {
            runtime.block_on(async {
                tokio::select! {
                    () = work() => {}
                    _ = stopped => {}
                }
            });
            // A pending DNS lookup does not delay the end.
            runtime.shutdown_background();
        })?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Task {
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
