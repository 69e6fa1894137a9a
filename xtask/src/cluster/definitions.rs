//! Definitions of custom resources from `$KUBERNETES_BIN/crds`, if the directory exists.

use std::time::Duration;

use anyhow::{Context as _, Result};

use super::{Cluster, kubectl::eventually};

/// Time limit for the API server to serve a kind.
const SHORT: Duration = Duration::from_secs(20);

/// Definitions that are installed in the cluster until they are removed.
#[must_use]
pub struct Definitions {
    directory: String,
}

impl Definitions {
    /// Installs all definitions. Returns `None` if they do not define all of these kinds.
    pub fn install(cluster: &Cluster, kinds: &[&str]) -> Result<Option<Self>> {
        let Some(directory) = cluster.programs.definitions() else {
            return Ok(None);
        };
        let directory = directory.to_str().context("a path in UTF-8")?.to_owned();
        let definitions = Self { directory };
        let apply = ["apply", "--server-side", "--force-conflicts", "-f"];
        let apply = [&apply[..], &[&definitions.directory]].concat();
        let installed = cluster.kubectl.run(&apply).and_then(|_| {
            let defined = cluster.kubectl.list(&["customresourcedefinitions"])?;
            let has = |kind: &&&str| defined.iter().any(|of| of["metadata"]["name"] == **kind);
            if kinds.iter().filter(has).count() < kinds.len() {
                return Ok(false);
            }
            eventually(SHORT, || {
                cluster.kubectl.run(&["get", &kinds.join(","), "-A"])
            })?;
            Ok(true)
        });
        if matches!(installed, Ok(true)) {
            return Ok(Some(definitions));
        }
        definitions.remove(cluster)?;
        installed.map(|_| None)
    }

    /// Removes the definitions, with all of their objects.
    pub fn remove(self, cluster: &Cluster) -> Result<()> {
        let delete = ["delete", "--ignore-not-found", "-f", &self.directory];
        cluster.kubectl.run(&delete).map(drop)
    }
}
