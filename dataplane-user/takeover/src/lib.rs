//! The facts about rules of other programs that the agent, `dataplane` and `dataplane-migrate` share: their owners, those that
//! refuse packets which the packet path sends on, and the journal of a take-over.

#![forbid(unsafe_code)]

pub mod disk;
pub mod forward;
pub mod journal;
pub mod owners;

/// The variable by which a test says at which point a command is to die: 1 for the first. Only builds with debug assertions look
/// there: the binary that is shipped does not know the variable.
#[cfg(debug_assertions)]
const DIES: &str = "DATAPLANE_TAKEOVER_DIES";

/// A point between two changes, where kill -9 has to leave a node that works. Dies if a test asks for that.
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

/// Does nothing: only tests have commands die.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub fn may_die() {}
