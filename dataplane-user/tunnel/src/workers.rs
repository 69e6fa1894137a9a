//! Threads, each with a runtime of its own: a tunnel and its streams stay on one thread.

use std::{
    future::poll_fn,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::Poll,
    thread::{self, JoinHandle},
};

use threads::{Deaths, said};
use tokio::{
    runtime::{Builder, Handle},
    sync::watch,
};

/// The threads. Dropping them ends their tasks.
pub struct Workers {
    all: Arc<[Worker]>,
    threads: Vec<JoinHandle<Option<()>>>,
    /// Dropped to stop the threads.
    stop: Option<watch::Sender<()>>,
}

/// A thread, to which tasks are assigned.
#[derive(Clone)]
pub struct Worker {
    handle: Handle,
    load: Arc<AtomicUsize>,
    deaths: Deaths,
    /// The thread's index.
    pub number: usize,
}

/// A task that counts as load of its thread until it is dropped.
struct Task(Worker);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.load.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Worker {
    /// Starts a task on this thread.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.load.fetch_add(1, Ordering::Relaxed);
        let (guard, mut task) = (Task(self.clone()), Box::pin(task));
        self.handle.spawn(async move {
            let panicked = poll_fn(|cx| {
                // A task that has panicked is not polled again.
                match catch_unwind(AssertUnwindSafe(|| task.as_mut().poll(cx))) {
                    Ok(step) => step.map(|()| None),
                    Err(panic) => Poll::Ready(Some(panic)),
                }
            });
            if let Some(panic) = panicked.await {
                let name = format!("tunnel-{}", guard.0.number);
                (guard.0.deaths)(&name, said(&panic));
            }
        });
    }
}

impl Workers {
    /// Starts threads. A thread or task that panics reports to `deaths`.
    ///
    /// # Errors
    /// If a thread or its runtime cannot be started.
    pub fn start(count: usize, deaths: &Deaths) -> io::Result<Self> {
        let (stop, stopped) = watch::channel(());
        let (mut workers, mut threads) = (Vec::new(), Vec::new());
        for number in 0..count {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            workers.push(Worker {
                handle: runtime.handle().clone(),
                load: Arc::default(),
                deaths: Arc::clone(deaths),
                number,
            });
            let (name, mut stopped) = (format!("tunnel-{number}"), stopped.clone());
            threads.push(threads::start(
                name.clone(),
                Arc::clone(deaths),
                move || {
                    runtime.block_on(async {
                        threads::may_panic(&name);
                        let _ = stopped.changed().await;
                    });
                },
            )?);
        }
        Ok(Self {
            all: workers.into(),
            threads,
            stop: Some(stop),
        })
    }

    /// Returns the threads.
    pub fn all(&self) -> &Arc<[Worker]> {
        &self.all
    }
}

/// Returns the thread with the fewest tasks.
pub fn least(workers: &[Worker]) -> &Worker {
    let load = |worker: &&Worker| worker.load.load(Ordering::Relaxed);
    let least = workers.iter().min_by_key(load);
    least.expect("there is at least one thread")
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.stop = None;
        let own = thread::current().id();
        for thread in self.threads.drain(..) {
            // A task on one of the threads may drop the workers: a thread cannot join itself. A thread that panicked has
            // reported the panic.
            if thread.thread().id() != own {
                let _ = thread.join();
            }
        }
    }
}
