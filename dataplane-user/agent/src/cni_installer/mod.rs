//! Keeps the CNI plug-in in the container runtime's network configuration.
//!
//! The agent is its own installer: it knows the configuration that the entry depends on, and it lives as long as the
//! entry has to be looked after. When another program writes the configuration anew, the agent joins it again.

mod files;
mod list;

use std::{
    io,
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use admin::{State, cni::PLUGIN};
use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use serde_json::{Value, json};
use settings::Settings;
use threads::may_panic;
use tracing::{info, warn};

pub use self::files::leave;
use self::files::{Directories, Installed};
use super::{Event, deaths};

/// How often to look without a notification.
const LOOK: Duration = Duration::from_secs(10);
/// How often to look after a failure, or if the kernel gives no notifications.
const LOOK_SOON: Duration = Duration::from_secs(1);
/// How long the changes of one writer are gathered.
const QUIET: Duration = Duration::from_millis(50);

/// The entry of the plug-in; `None` if nothing is captured, so that no pod has to wait.
fn entry(settings: &Settings) -> Option<Value> {
    let never = settings.mesh.as_ref()?.never_captured();
    let mut entry = json!({
        "type": PLUGIN,
        "socket": settings.listen.socket(),
        "excludeNamespaces": never.namespaces,
    });
    if let Some(only) = never.all_except {
        entry["onlyNamespaces"] = json!(only);
    }
    Some(entry)
}

/// The running thread.
#[derive(Debug)]
pub(crate) struct Installer {
    wake: Sender<Wake>,
    thread: JoinHandle<Option<()>>,
}

#[derive(Debug)]
enum Wake {
    /// The directory has changed.
    Look,
    Stop,
}

impl Installer {
    /// Starts the thread, if the settings ask for the plug-in.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(crate) fn start(
        settings: &Settings,
        state: &Arc<State>,
        events: &Sender<Event>,
    ) -> io::Result<Option<Self>> {
        let Some(cni) = &settings.cni else {
            return Ok(None);
        };
        let (wake, woken) = mpsc::channel();
        let mut worker = Worker {
            directories: Directories::of(cni),
            entry: entry(settings),
            state: Arc::clone(state),
            installed: None,
            problem: None,
            changes: wake.clone(),
            watcher: None,
        };
        if worker.entry.is_some() {
            // Until the first look has ended well.
            state.cni_problem(Some("the plug-in is not in a network configuration yet"));
        }
        let thread = threads::start("cni", deaths(events), move || worker.run(&woken))?;
        Ok(Some(Self { wake, thread }))
    }

    /// Ends the thread. The entry stays: pods wait for the next agent.
    pub(crate) fn stop(self) {
        // It may have died, and then there is no receiver.
        let _ = self.wake.send(Wake::Stop);
        let _ = self.thread.join();
    }
}

struct Worker {
    directories: Directories,
    entry: Option<Value>,
    state: Arc<State>,
    /// The program that this agent has installed.
    installed: Option<Installed>,
    problem: Option<String>,
    changes: Sender<Wake>,
    /// `None` if the kernel gives no notifications.
    watcher: Option<RecommendedWatcher>,
}

impl Worker {
    fn run(&mut self, woken: &Receiver<Wake>) {
        loop {
            // Before the look, so that no change is missed in between.
            if self.watcher.is_none() {
                self.watcher = self.watch().ok();
            }
            self.look();
            may_panic("cni");
            let is_well = self.problem.is_none() && self.watcher.is_some();
            let mut next = woken.recv_timeout(if is_well { LOOK } else { LOOK_SOON });
            if let Ok(Wake::Look) = next {
                thread::sleep(QUIET);
                while let Ok(more) = woken.try_recv() {
                    next = Ok(more);
                    if matches!(next, Ok(Wake::Stop)) {
                        break;
                    }
                }
            }
            if matches!(next, Ok(Wake::Stop) | Err(RecvTimeoutError::Disconnected)) {
                return;
            }
        }
    }

    fn watch(&self) -> notify::Result<RecommendedWatcher> {
        let changes = self.changes.clone();
        let mut watcher =
            notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
                // A look reads the files, too.
                if event.is_ok_and(|event| event.kind.is_access()) {
                    return;
                }
                // Fails only if the thread has ended.
                let _ = changes.send(Wake::Look);
            })?;
        watcher.watch(&self.directories.conf, RecursiveMode::NonRecursive)?;
        Ok(watcher)
    }

    fn look(&mut self) {
        let changed = match &self.entry {
            None => leave(&self.directories.conf),
            // The program first, before a configuration names it.
            Some(entry) => self
                .directories
                .install(&mut self.installed)
                .and_then(|()| self.directories.join(entry)),
        };
        match changed {
            Ok(files) => {
                for file in files {
                    info!(file = %file.display(), joined = self.entry.is_some(), "CNI plug-in: changed");
                }
                self.tell(None);
            }
            Err(why) => self.tell(Some(why)),
        }
    }

    fn tell(&mut self, problem: Option<String>) {
        if let Some(why) = &problem
            && problem != self.problem
        {
            warn!("CNI plug-in: {why}");
        }
        self.state.cni_problem(problem.as_deref());
        self.problem = problem;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entry_says_whose_pods_are_never_captured() {
        let said = |mesh: &str| {
            let settings = Settings {
                mesh: Some(serde_saphyr::from_str(mesh).unwrap()),
                ..Settings::default()
            };
            let entry = entry(&settings).unwrap();
            ["excludeNamespaces", "onlyNamespaces"].map(|key| entry.get(key).cloned())
        };
        assert_eq!(said("{}"), [Some(json!(["kube-system"])), None]);
        let only =
            "{enforced: {captured: false}, namespaces: [{name: shop, enforced: {captured: true}}]}";
        assert_eq!(said(only)[1], Some(json!(["shop"])));
    }
}
