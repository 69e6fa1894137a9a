//! The CNI plug-in.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::is_default;

/// The CNI plug-in: the agent puts it into the container runtime's network configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Cni {
    /// Directory of the network configurations. Default: /etc/cni/net.d.
    #[serde(skip_serializing_if = "is_default")]
    pub conf_dir: Option<PathBuf>,
    /// Directory of the plug-ins. Default: /opt/cni/bin.
    #[serde(skip_serializing_if = "is_default")]
    pub bin_dir: Option<PathBuf>,
}

impl Cni {
    /// Returns the directory of the network configurations.
    pub fn conf_dir(&self) -> PathBuf {
        self.conf_dir
            .clone()
            .unwrap_or_else(|| "/etc/cni/net.d".into())
    }

    /// Returns the directory of the plug-ins.
    pub fn bin_dir(&self) -> PathBuf {
        self.bin_dir
            .clone()
            .unwrap_or_else(|| "/opt/cni/bin".into())
    }

    /// Returns the keys with faults: container runtimes and the agent have different working directories. `socket`: the agent's.
    pub(super) fn faults(&self, socket: &Path) -> Vec<(String, String)> {
        let paths = [
            ("cni.confDir", self.conf_dir.as_deref()),
            ("cni.binDir", self.bin_dir.as_deref()),
            ("listen.socket", Some(socket)),
        ];
        let relative = paths.into_iter().filter_map(|(key, path)| {
            let path = path.filter(|path| !path.is_absolute())?;
            let text = format!(
                "{} is relative; expected an absolute path, because container runtimes use it, too",
                path.display()
            );
            Some((key.to_owned(), text))
        });
        relative.collect()
    }
}
