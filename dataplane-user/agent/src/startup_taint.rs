//! Removes the node's startup taint when capture is in line for the first time, on a thread of its own.

use std::{
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    time::Duration,
};

use settings::Settings;
use source::{Source, kubernetes::StartupTaint};
use threads::Deaths;
use tracing::{info, warn};

/// How long the thread waits before it tries again, at first and at most.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_mins(1)];

/// Starts the thread if the settings name a taint. The thread waits for a message, and ends with the sender.
///
/// # Errors
/// If the thread cannot be started.
pub fn start(
    settings: &Settings,
    source: &Source,
    node: &str,
    deaths: &Deaths,
) -> Result<Option<Sender<()>>, super::Error> {
    let key = settings
        .mesh
        .as_ref()
        .and_then(|mesh| mesh.startup_taint.clone());
    let Some(key) = key else {
        return Ok(None);
    };
    let Source::Kubernetes(api) = source else {
        warn!("mesh.startupTaint has no effect: the source is not the Kubernetes API");
        return Ok(None);
    };
    let (verified, wait) = mpsc::channel();
    let taint = StartupTaint::new(api.target.clone(), node.to_owned(), key.clone());
    threads::start("startup-taint", deaths.clone(), move || {
        if wait.recv().is_ok() {
            remove(&taint, &key, &wait);
        }
    })
    .map_err(super::Error::Thread)?;
    Ok(Some(verified))
}

/// Tries until the taint is gone, or the agent ends.
fn remove(taint: &StartupTaint, key: &str, ends: &Receiver<()>) {
    let [mut pause, longest] = PAUSES;
    loop {
        match taint.remove() {
            Ok(true) => return info!("mesh: removed the startup taint {key} from this node"),
            Ok(false) => return,
            Err(error) => warn!(
                "mesh: cannot remove the startup taint {key} from this node, so Pods without a toleration do not start here; \
                 the agent needs the permissions to get and patch nodes; trying again: {error}"
            ),
        }
        if ends.recv_timeout(pause) == Err(RecvTimeoutError::Disconnected) {
            return;
        }
        pause = (pause * 2).min(longest);
    }
}
