//! Threads that must not end unnoticed.

use std::{
    any::Any,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc::Sender,
    thread::{self, JoinHandle},
};

use super::Event;

/// Starts a thread. If it panics, the agent is told ([`Event::Died`]) and ends with an error, and `None` is what
/// joining it gives. (Built for release, a panic ends the process at once.)
///
/// # Errors
/// If no thread can be started.
pub fn start<T: Send + 'static>(
    name: &'static str,
    events: Sender<Event>,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<Option<T>>> {
    thread::Builder::new().name(name.to_owned()).spawn(move || {
        let result = catch_unwind(AssertUnwindSafe(work));
        let died = |panic| {
            // Fails only if the agent ends anyway.
            let _ = events.send(Event::Died(name, said(&panic)));
        };
        result.map_err(died).ok()
    })
}

/// What a thread said when it panicked.
fn said(panic: &Box<dyn Any + Send>) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("it panicked").to_owned()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_thread_that_panics_is_told() {
        let (events, happened) = mpsc::channel();
        let fine = start("fine", events.clone(), || 7).unwrap();
        assert_eq!(fine.join().unwrap(), Some(7));
        let sick = start("sick", events, || assert_eq!(1 + 1, 3, "arithmetic")).unwrap();
        assert_eq!(sick.join().unwrap(), None);
        let Ok(Event::Died("sick", text)) = happened.recv() else {
            panic!("nobody was told");
        };
        assert!(text.contains("arithmetic"), "{text}");
        assert!(
            happened.recv().is_err(),
            "the one that is fine said nothing"
        );
    }
}
