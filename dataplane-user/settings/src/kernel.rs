//! Paths in the kernel's file systems, and limits of tables.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::is_default;

/// Directory of the pins, unless the configuration names another.
pub const DEFAULT_BPFFS: &str = "/sys/fs/bpf/dataplane";

/// Paths in the kernel's file systems.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Kernel {
    /// Directory of the pinned programs and tables, on a BPF file system. Default:
    /// /sys/fs/bpf/dataplane.
    #[serde(skip_serializing_if = "is_default")]
    pub bpffs: Option<PathBuf>,
    /// Directory of the cgroup v2 whose processes the agent serves. Default: the root of cgroup v2.
    #[serde(skip_serializing_if = "is_default")]
    pub cgroup: Option<PathBuf>,
}

impl Kernel {
    /// Returns the directory for pins.
    pub fn bpffs(&self) -> PathBuf {
        let bpffs = self.bpffs.clone();
        bpffs.unwrap_or_else(|| DEFAULT_BPFFS.into())
    }
}

/// Maximum sizes of tables.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Limits {
    /// Maximum number of VIP ports, cluster IPs and node ports together. Default: 2097152.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(range(min = 1))]
    pub frontends: Option<u32>,
    /// Maximum number of endpoint slots. Default: 4194304.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(range(min = 1))]
    pub endpoints: Option<u32>,
    /// Maximum number of clients of services with session affinity whose endpoints are kept. Default: 131072.
    ///
    /// Each takes 16 bytes of kernel memory as soon as a service has affinity, and each present client 128
    /// bytes more.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(range(min = 1024, max = 16_777_216))]
    pub affinity_clients: Option<u32>,
}
