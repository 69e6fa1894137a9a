//! Opens a source as a feed.

use std::{path::PathBuf, sync::Arc};

use model::Node;

use super::{Feed, Notice, OpenError, kubernetes, manifests};

/// A source and its place.
#[derive(Clone, Debug)]
pub enum Source {
    /// Files and directories.
    Manifests(Vec<PathBuf>),
    /// The Kubernetes API.
    Kubernetes(kubernetes::Settings),
}

impl Source {
    /// Begins to read for this node. Reads manifests before it returns. Does not wait for an API server that is down:
    /// the feed keeps trying.
    ///
    /// # Errors
    ///
    /// If the settings or the manifests cannot be used, or no thread can be started.
    pub fn open(
        &self,
        node: &Arc<Node>,
        notify: impl Fn(Notice) + Clone + Send + Sync + 'static,
    ) -> Result<Box<dyn Feed>, OpenError> {
        Ok(match self {
            Self::Manifests(paths) => Box::new(manifests::Files::open(paths, node, notify)?),
            Self::Kubernetes(settings) => {
                Box::new(kubernetes::Api::open(settings.clone(), node, notify)?)
            }
        })
    }
}
