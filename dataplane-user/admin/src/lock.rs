//! Locks that outlive a panic.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A thread that panicked took its writes with it: what is there is still whole.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
