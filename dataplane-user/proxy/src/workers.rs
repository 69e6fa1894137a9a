//! The proxy's engine: threads that each wait for their sockets with epoll.

use std::{
    io,
    sync::{Arc, mpsc::Receiver},
    thread::JoinHandle,
    time::Instant,
};

use relay::{Attached, Engine, Listener};
use threads::Deaths;

use super::{
    shared::{Command, Shared},
    worker::Worker,
};

/// The workers. All of them wait for the same listening sockets, and the kernel wakes one.
#[derive(Debug)]
pub struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<Option<()>>>,
}

impl Workers {
    /// Starts a worker for each of the mailboxes of [`Shared::new`]. A worker that dies reports to `deaths`.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn start(
        shared: Arc<Shared>,
        mailboxes: Vec<Receiver<Command>>,
        deaths: &Deaths,
    ) -> io::Result<Self> {
        let threads = mailboxes.into_iter().enumerate().map(|(number, commands)| {
            let worker = Worker::new(number, Arc::clone(&shared), commands)?;
            threads::start(format!("relay-{number}"), Arc::clone(deaths), move || {
                worker.run();
            })
        });
        let threads = threads.collect::<io::Result<_>>()?;
        Ok(Self { shared, threads })
    }

    /// Returns the state that the workers share.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl Engine for Workers {
    fn take(&self, attached: &Arc<Attached>, listeners: &Arc<[Listener]>) {
        self.shared
            .send_all(|| Command::Take(Arc::clone(attached), Arc::clone(listeners)));
    }

    fn shut(&self, attached: &Attached, deadline: Instant) {
        self.shared
            .send_all(|| Command::Shut(attached.id, deadline));
    }

    fn drain(&mut self, deadline: Instant) {
        self.shared.send_all(|| Command::Drain(deadline));
        for thread in self.threads.drain(..) {
            // A worker that panicked has reported it.
            let _ = thread.join();
        }
    }
}
