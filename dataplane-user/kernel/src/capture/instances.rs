//! Instances of the program at the socket lookup that are attached to no network namespace: of pods that have ended, for those
//! that start next. The verifier takes some milliseconds for each new one, most of what the agent does for a pod's start.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// How many are kept, two files each.
pub const MOST: usize = 32;

/// How long they are kept after the last one came.
const KEPT: Duration = Duration::from_secs(5);

/// An instance of the program.
#[derive(Debug)]
pub struct Instance {
    pub program: OwnedFd,
    /// The table of its constants.
    pub constants: OwnedFd,
}

/// The instances that are attached nowhere.
#[derive(Clone, Debug, Default)]
pub struct Instances(Arc<Mutex<Spare>>);

#[derive(Debug, Default)]
struct Spare {
    instances: Vec<Instance>,
    last: Option<Instant>,
}

impl Spare {
    fn add(&mut self, more: impl IntoIterator<Item = Instance>) {
        self.instances.extend(more);
        self.instances.truncate(MOST);
        self.last = Some(Instant::now());
    }
}

impl Instances {
    fn lock(&self) -> MutexGuard<'_, Spare> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes one.
    pub fn take(&self) -> Option<Instance> {
        self.lock().instances.pop()
    }

    /// Has so many at least, or [`MOST`]: `load`s the missing ones, as many at the same time as there are CPUs.
    pub fn have(&self, count: usize, load: impl Fn() -> io::Result<Instance> + Sync) {
        let there = self.lock().instances.len();
        let missing = count.min(MOST).saturating_sub(there);
        let threads = thread::available_parallelism().map_or(1, Into::into);
        let threads = threads.min(missing);
        let work = |first| {
            for _ in (first..missing).step_by(threads) {
                // Who needs one loads it, and has the error.
                let Ok(instance) = load() else { return };
                self.lock().add([instance]);
            }
        };
        thread::scope(|scope| {
            for first in 1..threads {
                // Without it, the missing ones are loaded when they are needed.
                let _ = thread::Builder::new()
                    .name("load".to_owned())
                    .spawn_scoped(scope, move || work(first));
            }
            if threads > 0 {
                work(0);
            }
        });
    }

    /// Keeps instances that were detached just now, after `wait`: until it returns, lookups may still run them, which must not
    /// see another namespace's constants.
    pub fn retire(
        &self,
        retired: Vec<Instance>,
        wait: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) {
        if retired.is_empty() {
            return;
        }
        let kept = self.clone();
        let work = move || {
            if wait().is_ok() {
                kept.lock().add(retired);
            }
        };
        // Without it, the next pods get new instances.
        let _ = thread::Builder::new()
            .name("instances".to_owned())
            .spawn(work);
    }

    /// Closes those that no pod has needed for a while.
    pub fn tidy(&self, now: Instant) {
        let mut kept = self.lock();
        if kept.last.is_some_and(|last| now > last + KEPT) {
            *kept = Spare::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[expect(clippy::unnecessary_wraps, reason = "as the kernel loads one")]
    fn load() -> io::Result<Instance> {
        let file = || File::open("/dev/null").unwrap().into();
        Ok(Instance {
            program: file(),
            constants: file(),
        })
    }

    fn some(count: usize) -> Vec<Instance> {
        (0..count).map(|_| load().unwrap()).collect()
    }

    /// Waits for the thread that keeps them.
    fn when_kept(instances: &Instances) -> usize {
        while Arc::strong_count(&instances.0) > 1 {
            thread::sleep(Duration::from_millis(1));
        }
        instances.lock().instances.len()
    }

    #[test]
    fn an_instance_serves_again_only_after_the_last_lookup_and_not_for_ever() {
        let instances = Instances::default();
        let (go, wait) = std::sync::mpsc::channel();
        instances.retire(some(2), move || wait.recv().map_err(io::Error::other));
        assert!(instances.take().is_none());
        go.send(()).unwrap();
        assert_eq!(when_kept(&instances), 2);
        instances.retire(some(2), || Err(io::ErrorKind::Unsupported.into()));
        assert_eq!(when_kept(&instances), 2, "others may still run");
        instances.retire(some(MOST), || Ok(()));
        assert_eq!(when_kept(&instances), MOST);
        assert!(instances.take().is_some());
        let now = Instant::now();
        instances.tidy(now);
        assert_eq!(when_kept(&instances), MOST - 1);
        instances.tidy(now + 2 * KEPT);
        assert!(instances.take().is_none());
    }

    #[test]
    fn missing_ones_are_loaded() {
        let instances = Instances::default();
        for (count, there) in [(0, 0), (3, 3), (2, 3), (MOST + 1, MOST)] {
            instances.have(count, load);
            assert_eq!(instances.lock().instances.len(), there, "{count}");
        }
        let instances = Instances::default();
        instances.have(3, || Err(io::ErrorKind::OutOfMemory.into()));
        assert!(instances.take().is_none());
    }
}
