//! The guard rails while a mesh's rules change: no packet passes the network namespace.

use std::{
    io,
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread::{self, JoinHandle},
    time::Duration,
};

use kernel::guard;

/// The time after which the kernel lets packets pass if this process dies.
pub const TIME: Duration = Duration::from_secs(15);
/// The time between two renewals.
const RENEW: Duration = Duration::from_secs(3);

/// Renews the guard ([`guard::up`]) of a network namespace until [`Rails::down`]. After a drop, and after the death of this process,
/// the kernel lets packets pass when the guard's time is over.
#[derive(Debug)]
#[must_use = "the guard is renewed until this is dropped"]
pub struct Rails {
    /// Ends the thread when it is dropped.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Rails {
    /// Closes the network namespace that this thread is in.
    ///
    /// # Errors
    /// The kernel refuses, or no thread can be started. No packet is dropped then.
    pub fn up() -> io::Result<Self> {
        let table = guard::TABLE;
        let refused = |error: io::Error| {
            let text = format!("cannot add the guard (nftables table inet {table}): {error}");
            io::Error::new(error.kind(), text)
        };
        guard::up(TIME).map_err(refused)?;
        let (stop, stopped) = mpsc::channel();
        let renew = move || {
            while stopped.recv_timeout(RENEW) == Err(RecvTimeoutError::Timeout) {
                if let Err(error) = guard::renew(TIME) {
                    eprintln!(
                        "dataplane-migrate: cannot renew the guard (nftables table inet {table}), so packets may pass again before the end: {error}"
                    );
                }
            }
        };
        // A thread begins in the network namespace of the thread that starts it.
        let thread = thread::Builder::new().name("guard".to_owned()).spawn(renew);
        match thread {
            Ok(thread) => Ok(Self {
                stop: Some(stop),
                thread: Some(thread),
            }),
            Err(error) => {
                guard::down()?;
                Err(refused(error))
            }
        }
    }

    /// Lets packets pass again.
    ///
    /// # Errors
    /// The kernel refuses. It lets packets pass when the guard's time is over.
    pub fn down(self) -> io::Result<()> {
        drop(self);
        guard::down().map(drop)
    }
}

impl Drop for Rails {
    fn drop(&mut self) {
        self.stop = None;
        // A renewal after the guard's removal would fail.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
