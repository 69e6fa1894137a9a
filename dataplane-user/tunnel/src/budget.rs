//! The budget for bytes that the process buffers for slow sockets.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
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

/// The budget for bytes that all streams of the process buffer for slow sockets. Namespaces share it: the part of each is the
/// budget, divided by the number of namespaces that hold bytes.
#[derive(Debug)]
pub struct Budget {
    most: usize,
    bytes: AtomicUsize,
    /// The number of namespaces that hold bytes. Changes only while `accounts` is locked.
    holders: AtomicUsize,
    /// The namespaces that have streams.
    accounts: Mutex<HashMap<Box<str>, Weak<Account>>>,
}

/// The bytes of a budget that the streams of the workloads of one namespace hold.
#[derive(Debug)]
pub struct Account {
    budget: Arc<Budget>,
    bytes: AtomicUsize,
    /// The number of streams that hold bytes.
    streams: AtomicUsize,
}

impl Budget {
    /// Makes a budget of `most` bytes.
    pub fn new(most: usize) -> Self {
        Self {
            most,
            bytes: AtomicUsize::new(0),
            holders: AtomicUsize::new(0),
            accounts: Mutex::default(),
        }
    }

    /// Returns the bytes that all streams hold, and their maximum.
    pub fn held(&self) -> [usize; 2] {
        [self.bytes.load(Ordering::Relaxed), self.most]
    }

    /// Returns the account of a namespace.
    pub fn account(self: &Arc<Self>, namespace: &str) -> Arc<Account> {
        let mut accounts = self.lock();
        if let Some(known) = accounts.get(namespace).and_then(Weak::upgrade) {
            return known;
        }
        accounts.retain(|_, account| account.strong_count() > 0);
        let account = Arc::new(Account {
            budget: Arc::clone(self),
            bytes: AtomicUsize::new(0),
            streams: AtomicUsize::new(0),
        });
        accounts.insert(namespace.into(), Arc::downgrade(&account));
        account
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Box<str>, Weak<Account>>> {
        self.accounts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Account {
    /// Returns whether the streams of the namespace have small windows: more than half of the budget is in use, and the
    /// namespace holds more than its part of this half.
    pub fn is_scarce(&self) -> bool {
        self.exceeds(self.budget.most / 2)
    }

    /// Returns whether a stream with `own` bytes must end: the budget is exceeded, the namespace holds more than its part,
    /// and the stream holds at least the average of the namespace's streams.
    pub fn ends(&self, own: usize) -> bool {
        let all = self.bytes.load(Ordering::Relaxed);
        let streams = self.streams.load(Ordering::Relaxed).max(1);
        self.exceeds(self.budget.most) && own >= all / streams
    }

    /// Returns whether all namespaces together hold more than `most` bytes, and this one more than its part of them.
    fn exceeds(&self, most: usize) -> bool {
        let holders = self.budget.holders.load(Ordering::Relaxed).max(1);
        self.budget.bytes.load(Ordering::Relaxed) > most
            && self.bytes.load(Ordering::Relaxed) > most / holders
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

/// The share of one stream in its namespace's account.
#[derive(Debug)]
pub struct Share {
    /// The account.
    pub account: Arc<Account>,
    /// The bytes of the stream.
    pub own: usize,
}

impl Share {
    /// Makes a share without bytes.
    pub fn new(account: &Arc<Account>) -> Self {
        Self {
            account: Arc::clone(account),
            own: 0,
        }
    }

    /// Sets the bytes of the stream.
    pub fn set(&mut self, own: usize) {
        let was = std::mem::replace(&mut self.own, own);
        let (account, budget) = (&self.account, &self.account.budget);
        if (own > 0) != (was > 0) {
            // Adding `usize::MAX` wraps around, so it subtracts one.
            let change = if own > 0 { 1 } else { usize::MAX };
            let locked = budget.lock();
            let before = account.streams.fetch_add(change, Ordering::Relaxed);
            if before == 0 || before.wrapping_add(change) == 0 {
                budget.holders.fetch_add(change, Ordering::Relaxed);
            }
            drop(locked);
        }
        if own != was {
            let change = own.wrapping_sub(was);
            account.bytes.fetch_add(change, Ordering::Relaxed);
            budget.bytes.fetch_add(change, Ordering::Relaxed);
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each line has the bytes of the streams of each namespace, of a budget of 100; and the namespaces whose streams have
    /// small windows, and those whose largest stream ends.
    #[test]
    fn a_namespace_that_holds_much_leaves_others_their_part() {
        let cases = "
            50 | |
            51 | a |
            60 5 | a |
            49 1 | |
            30 30 | ab |
            40 20 | a |
            20 20 20 | abc |
            90 5 | a |
            100 1 | a | a
            30+30+60 20 | a | a
            60 50 | ab | a
            90 5 15 | a | a
            200 25 | a | a";
        for case in cases.lines().skip(1) {
            let [given, scarce, ends] = case.split('|').collect::<Vec<_>>()[..] else {
                panic!("{case}")
            };
            let budget = Arc::new(Budget::new(100));
            let mut shares = Vec::new();
            for (name, streams) in ["a", "b", "c"].into_iter().zip(given.split_whitespace()) {
                for own in streams.split('+') {
                    let mut share = Share::new(&budget.account(name));
                    // Shares that change are counted once.
                    share.set(7);
                    share.set(0);
                    share.set(own.parse().unwrap());
                    shares.push((name, share));
                }
            }
            let named = |is_so: &dyn Fn(&Share) -> bool| {
                let mut names: Vec<_> = shares
                    .iter()
                    .filter_map(|(name, share)| is_so(share).then_some(*name))
                    .collect();
                names.dedup();
                names.concat()
            };
            let found = named(&|share| share.account.is_scarce());
            assert_eq!(found, scarce.trim(), "{case}");
            let found = named(&|share| share.account.ends(share.own));
            assert_eq!(found, ends.trim(), "{case}");
            let average = |(_, share): &(_, Share)| share.own != 30 || !share.account.ends(30);
            assert!(shares.iter().all(average), "{case}: below the average");
            drop(shares);
            let is_empty = |of: &AtomicUsize| of.load(Ordering::Relaxed) == 0;
            assert!(is_empty(&budget.bytes) && is_empty(&budget.holders));
        }
    }

    #[test]
    fn accounts_without_streams_are_forgotten() {
        let budget = Arc::new(Budget::new(100));
        drop(budget.account("a"));
        let first = budget.account("b");
        assert!(Arc::ptr_eq(&first, &budget.account("b")));
        assert_eq!(budget.lock().len(), 1);
    }
}
