//! The interface of sources: a [`Feed`] yields [`View`]s, reports its state ([`Health`]), and ends when it is dropped.

use std::{fmt, sync::Arc};

use threads::Deaths;

use super::{health::Health, view::View};

/// A source that is read until it is dropped.
pub trait Feed: Send {
    /// Returns the newest view. `None` if there is no newer view than the last one that was returned.
    ///
    /// A view is complete: a feed that does not know everything yet, or can no longer read its source, returns none,
    /// and [`Feed::health`] has the reason.
    fn take(&mut self) -> Option<View>;

    /// Makes the next [`Feed::take`] read everything again. A feed whose server reports every change need not do so.
    fn refresh(&mut self) {}

    /// Returns the state of the feed, for use in other threads. It is the same object during the life of the feed.
    fn health(&self) -> Health;
}

/// A message from a feed to the thread that takes its views. The feed may send it from any thread.
#[derive(Debug)]
pub enum Notice {
    /// There is a view to [take](Feed::take).
    Changed,
    /// The feed has ended because of a bug in this program.
    Died {
        /// The thread that ended.
        thread: &'static str,
        /// The reason.
        why: String,
    },
}

/// Reports threads of a feed that have died.
pub(super) fn deaths(
    thread: &'static str,
    notify: impl Fn(Notice) + Send + Sync + 'static,
) -> Deaths {
    Arc::new(move |_, why| notify(Notice::Died { thread, why }))
}

impl fmt::Debug for dyn Feed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Feed({:?})", self.health())
    }
}
