//! The guard: drops the packets of a network namespace, except on loopback, while the rules of a mesh change.

use std::{
    io,
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread::{self, JoinHandle},
    time::Duration,
};

use kernel::netfilter::guard;

/// The guard's lifetime after a renewal. If this process dies, the kernel lets packets pass after this time.
pub const TIME: Duration = Duration::from_secs(15);
/// The interval between two renewals.
const RENEW: Duration = Duration::from_secs(3);

/// Renews the guard ([`guard::up`]) of a network namespace until [`Rails::down`]. If this value is dropped or this
/// process dies, renewals stop, and the kernel lets packets pass when the guard's time is over.
#[derive(Debug)]
#[must_use = "the guard is renewed until this is dropped"]
pub struct Rails {
    /// Ends the thread when it is dropped.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Rails {
    /// Closes the network namespace of this thread: the kernel drops its packets.
    ///
    /// # Errors
    /// If the kernel refuses, or no thread can be started. No packet is dropped then.
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
        // A new thread starts in the network namespace of its creator.
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

    /// Removes the guard, so that packets pass again.
    ///
    /// # Errors
    /// If the kernel refuses. Packets then pass when the guard's time is over.
    pub fn down(self) -> io::Result<()> {
        drop(self);
        guard::down().map(drop)
    }
}

impl Drop for Rails {
    fn drop(&mut self) {
        self.stop = None;
        // The thread must end first: a renewal after the guard's removal would fail.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
