//! Manifests: files with Kubernetes' objects, as `kubectl get services,endpointslices -A -o yaml`
//! (or json) prints them.
//!
//! [`load`] reads them all and either yields a [`Snapshot`] or every fault that it found, with
//! file, line and field: never half of what is written. What can be left out without harm is
//! reported with the snapshot ([`Snapshot::problems`]).
//!
//! See `docs/manifests.md` for what is accepted.

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

/// What manifests came to.
#[derive(Clone, Debug, Default)]
pub struct Loaded {
    /// What to serve.
    pub snapshot: Snapshot,
    /// What this node's own object tells, if there is one.
    pub facts: Option<NodeFacts>,
    /// How many objects there were of each kind that is not served here.
    pub ignored: BTreeMap<String, usize>,
    /// How many services and slices were left to others, as their labels ask.
    pub left_alone: usize,
    /// How many files were read.
    pub files: usize,
}

impl Loaded {
    /// A line for the log on the objects that were ignored, if there were any.
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
/// Everything that is wrong with them, if anything is.
pub fn load(paths: &[PathBuf], node: &Node) -> Result<Loaded, Errors> {
    load_reusing(&Snapshot::default(), paths, node)
}

/// Like [`load`], but shares with `previous` what did not change, so that the difference between
/// the two is found at the cost of what did ([`imbl::OrdMap::diff`]).
///
/// `node` is what is known without the manifests: if its own Node object is among them, the
/// snapshot's node has what that adds.
///
/// # Errors
/// As for [`load`].
pub fn load_reusing(previous: &Snapshot, paths: &[PathBuf], node: &Node) -> Result<Loaded, Errors> {
    // Hints are read with the eyes of the node's zone, which may be told by the last object of the
    // last file. It is hardly ever another one than it was.
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
    // Should it be yet another one by now: that is a change on disk, which will be read.
    let known = Node {
        zone,
        region,
        ..told
    };
    stage.finish(previous, &known)
}

/// Reads all files with the eyes of `assumed`; and what the manifests make of `node`.
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
