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
mod locate;
mod parse;
mod stage;
mod watch;
mod whereabouts;

use std::{collections::BTreeMap, path::PathBuf};

pub use error::{Errors, FAULTS_LISTED, Fault};
pub use feed::Files;
pub use files::{FILE_SIZE_MAX, read as read_file};
pub use health::Health;
pub use locate::{Position, locate};
use model::{Node, Snapshot};
pub use parse::plain;
pub use watch::{WatchError, Watcher};

use crate::objects::NodeFacts;

/// The result of reading manifests.
#[derive(Clone, Debug, Default)]
pub struct Loaded {
    /// The snapshot to serve.
    pub snapshot: Snapshot,
    /// Facts from this node's own object, if there is one.
    pub facts: Option<NodeFacts>,
    /// Number of objects of each kind that is not served.
    pub ignored: BTreeMap<String, usize>,
    /// Number of services and slices that their labels leave to others.
    pub left_alone: usize,
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
/// # Errors
///
/// All faults.
pub fn load(paths: &[PathBuf], node: &Node) -> Result<Loaded, Errors> {
    load_reusing(&Snapshot::default(), paths, node)
}

/// As [`load`], but shares unchanged objects with `previous`, so that the cost of the difference grows with the changes
/// ([`imbl::OrdMap::diff`]).
///
/// `node` is the node as known without the manifests. If they contain its Node object, the snapshot's node has the
/// facts of that object.
///
/// # Errors
///
/// As for [`load`].
pub fn load_reusing(previous: &Snapshot, paths: &[PathBuf], node: &Node) -> Result<Loaded, Errors> {
    // Hints depend on the node's zone, and the last object of the last file may state the zone. The zone hardly ever
    // changes, so the former one is assumed.
    let mut assumed = node.clone();
    if assumed.zone.is_empty() {
        assumed.zone = previous.node.zone.clone();
    }
    assumed.region = previous.node.region.clone();
    let (stage, told) = read(paths, &assumed, node);
    if (&told.zone, &told.region) == (&assumed.zone, &assumed.region) || stage.has_faults() {
        return stage.finish(previous, &told);
    }
    drop(stage);
    let (zone, region) = (told.zone, told.region);
    (assumed.zone, assumed.region) = (zone.clone(), region.clone());
    let (stage, told) = read(paths, &assumed, node);
    // If the zone differs again, the files have changed and will be read again.
    let known = Node {
        zone,
        region,
        ..told
    };
    stage.finish(previous, &known)
}

/// Reads all files for the node `assumed`. Also returns `node` with the facts of its object.
fn read<'a>(paths: &[PathBuf], assumed: &'a Node, node: &Node) -> (stage::Stage<'a>, Node) {
    let (files, missing) = files::find(paths);
    let mut stage = stage::Stage::new(assumed);
    for (path, text) in missing {
        stage.unreadable(path, text);
    }
    for file in files {
        stage.file(file);
    }
    let told = match stage.node_facts() {
        Some(facts) => facts.applied_to(node),
        None => node.clone(),
    };
    (stage, told)
}
