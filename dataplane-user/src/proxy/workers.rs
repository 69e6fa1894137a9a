//! The proxy's engine: threads that each wait for their sockets with epoll.

use std::{
    io,
    sync::{Arc, mpsc::Receiver},
    thread::{self, JoinHandle},
    time::Instant,
};

use super::{
    shared::{Command, Shared},
    worker::Worker,
};
use crate::relay::{Attached, Engine, Listener};

/// The workers. All of them wait for the same listening sockets, and the kernel wakes one.
#[derive(Debug)]
pub struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    /// Starts a worker for each of the mailboxes of [`Shared::new`].
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn start(shared: Arc<Shared>, mailboxes: Vec<Receiver<Command>>) -> io::Result<Self> {
        let threads = mailboxes.into_iter().enumerate().map(|(number, commands)| {
            let worker = Worker::new(number, Arc::clone(&shared), commands)?;
            thread::Builder::new()
                .name(format!("relay-{number}"))
                .spawn(move || worker.run())
        });
        let threads = threads.collect::<io::Result<_>>()?;
        Ok(Self { shared, threads })
    }

    /// What the workers share.
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
            if thread.join().is_err() {
                tracing::error!("a worker of the proxy panicked");
            }
        }
    }
}
