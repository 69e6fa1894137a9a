//! Facts about the rules of other programs, shared by the agent, `dataplane` and `dataplane-migrate`: the owners of
//! rules, the rules that the fast path bypasses, the choice of the path, and the journal of a take-over.

#![forbid(unsafe_code)]

pub mod bypassed;
pub mod disk;
pub mod journal;
pub mod owners;
pub mod path;

/// Environment variable of tests: the number of the point at which a command kills itself; the first point is 1. Only
/// builds with debug assertions read the variable. The shipped binary ignores it.
#[cfg(debug_assertions)]
const DIES: &str = "DATAPLANE_TAKEOVER_DIES";

/// Marks a point between two changes. A test can kill the process here with SIGKILL and then checks that the node still
/// works.
#[cfg(debug_assertions)]
pub fn may_die() {
    use std::{
        env,
        sync::atomic::{AtomicU32, Ordering},
    };

    use nix::sys::signal::{Signal, raise};

    static POINTS: AtomicU32 = AtomicU32::new(0);
    let point = 1 + POINTS.fetch_add(1, Ordering::Relaxed);
    if env::var(DIES).is_ok_and(|dies| dies == point.to_string()) {
        let died = raise(Signal::SIGKILL);
        unreachable!("{died:?}");
    }
}

/// Does nothing: only builds with debug assertions can kill the process here.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub fn may_die() {}
