//! Manifests: files with Kubernetes' objects, as `kubectl get services,endpointslices -A -o yaml`
//! (or json) prints them.
//!
//! [`load`] reads all files. It returns a [`Snapshot`], or every fault with file, line and field, and never a part of
//! the manifests. Harmless parts that are left out are reported with the snapshot ([`Snapshot::problems`]).
//!
//! `docs/manifests.md` lists the accepted objects.

mod document;
mod error;
mod faults;
mod feed;
mod files;
mod health;
mod json;
mod locate;
mod parse;
mod stage;
mod watch;
mod whereabouts;

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

pub use error::{Errors, FAULTS_LISTED, Fault};
pub use feed::Files;
pub use files::{FILE_SIZE_MAX, read as read_file};
pub use health::Health;
pub use locate::{Position, locate};
use model::{Node, Snapshot};
pub use watch::{WatchError, Watcher};

pub use crate::ingest::plain;
use crate::{
    View,
    ingest::{Store, WantedKinds},
};
use stage::Stage;

/// The result of reading manifests.
#[derive(Clone, Debug, Default)]
pub struct Loaded {
    /// The objects as a view.
    pub view: View,
    /// The objects as a snapshot, with the node.
    pub snapshot: Snapshot,
    /// Number of objects of each kind that is not served.
    pub ignored: BTreeMap<String, usize>,
    /// Number of files.
    pub files: usize,
}

impl Loaded {
    /// Returns a line for the log about ignored objects, if there are any.
    pub fn ignored_line(&self) -> Option<String> {
        let total: usize = self.ignored.values().sum();
        let mut kinds: Vec<_> = self.ignored.iter().collect();
        kinds.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        let kinds: Vec<_> = kinds
            .iter()
            .map(|(kind, count)| format!("{kind} ({count})"))
            .collect();
        (total > 0).then(|| {
            let objects = if total == 1 { "object" } else { "objects" };
            format!(
                "ignored {total} {objects} of kinds that are not served here: {}",
                kinds.join(", ")
            )
        })
    }
}

/// Reads manifests: files, and directories with all `*.yaml`, `*.yml` and `*.json` below them.
///
/// `node` is the node as known without the manifests. If they contain its Node object, the snapshot's node has the
/// facts of that object.
///
/// # Errors
///
/// All faults.
pub fn load(paths: &[PathBuf], node: &Node) -> Result<Loaded, Errors> {
    Manifests::new(node).read(paths)
}

/// Manifests that are read again and again. A snapshot shares unchanged objects with the snapshot before, so that the
/// cost of the difference grows with the changes ([`imbl::OrdMap::diff`]).
#[derive(Debug)]
pub struct Manifests {
    /// This node, without the facts of its object.
    node: Node,
    /// This node with the facts of its object, as far as they were read.
    told: Arc<Node>,
    store: Store,
}

impl Manifests {
    /// Returns manifests for this node that were not read yet.
    pub fn new(node: &Node) -> Self {
        let told = Arc::new(node.clone());
        // A view has all changes, however many, and names a missing Service at once.
        let store = Store::new(Arc::clone(&told), WantedKinds::ALL, None, Duration::ZERO);
        Self {
            node: node.clone(),
            told,
            store,
        }
    }

    /// Reads the manifests, as [`load`] does. With a fault, the objects stay as they were.
    ///
    /// # Errors
    ///
    /// All faults.
    pub fn read(&mut self, paths: &[PathBuf]) -> Result<Loaded, Errors> {
        // Hints depend on where the node is, and the last object of the last file may state it. It hardly ever changes,
        // so the former place is assumed.
        let mut assumed = Arc::clone(&self.told);
        let mut stage = Stage::read(paths, &assumed);
        let mut told = stage.told(&self.node);
        let place =
            |node: &Node| [&node.zone, &node.region, &node.subzone, &node.network].map(Arc::clone);
        if place(&told) != place(&assumed) && !stage.has_faults() {
            drop(stage);
            assumed = Arc::new(told);
            stage = Stage::read(paths, &assumed);
            // If the place differs again, the files have changed and will be read again.
            told = stage.told(&self.node);
        }
        let told = Arc::new(told);
        let loaded = stage.finish(&mut self.store, &told)?;
        self.told = told;
        Ok(loaded)
    }
}
