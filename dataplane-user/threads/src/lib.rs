//! Threads that report it if they panic, and a log that threads share.

#![forbid(unsafe_code)]

mod recent;

use std::{
    any::Any,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread::{self, JoinHandle},
};

pub use recent::{Page, Recent};

/// A callback that gets the name of a thread that has panicked, and the panic's message.
pub type Deaths = Arc<dyn Fn(&str, String) + Send + Sync>;

/// Starts a thread. If the thread panics, it calls `deaths`, and its result is `None`.
///
/// # Errors
/// If no thread can be started.
pub fn start<T: Send + 'static>(
    name: impl Into<String>,
    deaths: Deaths,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<Option<T>>> {
    let name = name.into();
    thread::Builder::new().name(name.clone()).spawn(move || {
        let result = catch_unwind(AssertUnwindSafe(work));
        result.map_err(|panic| deaths(&name, said(&panic))).ok()
    })
}

/// Returns the message of a thread's or task's panic.
pub fn said(panic: &Box<dyn Any + Send>) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("it panicked").to_owned()
}

/// The environment variable with the directory in which tests request a panic of a thread, by a file with the thread's
/// name. Only builds with debug assertions read it: release builds do not contain the variable.
#[cfg(debug_assertions)]
const PANICS: &str = "DATAPLANE_PANICS";

/// Panics once, if a test has requested it for this name.
#[cfg(debug_assertions)]
pub fn may_panic(name: &str) {
    use std::{env, ffi::OsString, fs, path::Path, sync::OnceLock};

    static DIRECTORY: OnceLock<Option<OsString>> = OnceLock::new();
    let Some(directory) = DIRECTORY.get_or_init(|| env::var_os(PANICS)) else {
        return;
    };
    let asked = fs::remove_file(Path::new(directory).join(name));
    assert!(asked.is_err(), "a test asked for it");
}

/// Does nothing in release builds: only tests request panics.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub fn may_panic(_: &str) {}

/// Returns a callback for threads that must not panic: those of tests.
pub fn none_dies() -> Deaths {
    Arc::new(|name, why| panic!("{name}: {why}"))
}

/// Returns the CPU time of this thread, for tests. Unlike elapsed time, it does not depend on the machine's other work.
pub fn computed() -> std::time::Duration {
    use nix::time::{ClockId, clock_gettime};

    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
        .unwrap()
        .into()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_thread_that_panics_is_told() {
        let (told, happened) = mpsc::channel();
        let deaths: Deaths = Arc::new(move |name, why| told.send((name.to_owned(), why)).unwrap());
        let fine = start("fine", Arc::clone(&deaths), || 7).unwrap();
        assert_eq!(fine.join().unwrap(), Some(7));
        let sick = start("sick", deaths, || assert_eq!(1 + 1, 3, "arithmetic")).unwrap();
        assert_eq!(sick.join().unwrap(), None);
        let (name, why) = happened.recv().unwrap();
        assert!(
            name == "sick" && why.contains("arithmetic"),
            "{name}: {why}"
        );
        assert!(
            happened.recv().is_err(),
            "the one that is fine said nothing"
        );
    }
}
