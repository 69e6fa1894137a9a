//! The budget for bytes that the process buffers for slow sockets.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use h2::RecvStream;
use tokio::time::sleep;

/// The interval at which the bytes of a stream without an answer are counted.
///
/// The library gives all streams of a tunnel the same window: it sends the size in SETTINGS, and afterwards returns to a
/// stream's window only as many bytes as the stream has received. So a stream cannot begin with a small window that grows
/// with the answer. Its peer can send a whole window before the answer, and these bytes count.
const UNANSWERED: Duration = Duration::from_millis(100);

/// The budget for bytes that all streams of the process buffer for slow sockets.
#[derive(Debug)]
pub struct Budget {
    bytes: AtomicUsize,
    streams: AtomicUsize,
    most: usize,
}

impl Budget {
    /// Makes a budget of `most` bytes.
    pub fn new(most: usize) -> Self {
        Self {
            bytes: AtomicUsize::new(0),
            streams: AtomicUsize::new(0),
            most,
        }
    }

    /// Returns whether more than half of the budget is in use.
    pub fn is_scarce(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) > self.most / 2
    }

    /// Returns whether the budget is exceeded, and a stream with `own` bytes must end: it has at least the average.
    pub fn ends(&self, own: usize) -> bool {
        let all = self.bytes.load(Ordering::Relaxed);
        let streams = self.streams.load(Ordering::Relaxed).max(1);
        all > self.most && own >= all / streams
    }

    /// Counts the bytes that the peer of a stream sends before this side has answered. Returns when the stream must end.
    pub async fn count_unanswered(self: &Arc<Self>, recv: &mut RecvStream) {
        let mut share = Share::new(self);
        loop {
            sleep(UNANSWERED).await;
            let held = recv.flow_control().used_capacity();
            share.set(held);
            if self.ends(held) {
                return;
            }
        }
    }
}

/// The share of one stream in the budget.
#[derive(Debug)]
pub struct Share {
    /// The budget.
    pub budget: Arc<Budget>,
    /// The bytes of the stream.
    pub own: usize,
}

impl Share {
    /// Makes a share without bytes.
    pub fn new(budget: &Arc<Budget>) -> Self {
        Self {
            budget: Arc::clone(budget),
            own: 0,
        }
    }

    /// Sets the bytes of the stream.
    pub fn set(&mut self, own: usize) {
        let was = std::mem::replace(&mut self.own, own);
        if (own > 0) != (was > 0) {
            // Adding `usize::MAX` wraps around, so it subtracts one.
            let change = if own > 0 { 1 } else { usize::MAX };
            self.budget.streams.fetch_add(change, Ordering::Relaxed);
        }
        if own != was {
            let change = own.wrapping_sub(was);
            self.budget.bytes.fetch_add(change, Ordering::Relaxed);
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.set(0);
    }
}
