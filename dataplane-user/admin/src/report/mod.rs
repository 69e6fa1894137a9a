//! Health at this moment: every fact that the kernel can return is read each time.

mod collect;
mod judge;
mod listeners;
mod mesh;
mod others;
mod queries;
mod room;
mod tables;

use std::{collections::BTreeMap, fmt};

pub use collect::{examine, packet_path};
pub use mesh::Workload;
use serde::{Deserialize, Serialize};

use super::api::AgentStatus;

/// `GET /status`, and the data that `dataplane status` prints.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// Whether there is no [`Finding`] that is an error, except those of objects.
    pub healthy: bool,
    /// Problems and remarks; the worst first.
    pub findings: Vec<Finding>,
    /// The agent's status; `None` if it does not answer.
    pub agent: Option<AgentStatus>,
    /// The programs, and whether the kernel runs them.
    pub programs: Vec<Program>,
    /// The interfaces that the packet path's programs belong on; empty if it is off.
    pub interfaces: Vec<Interface>,
    /// The path of packets of services: `fast` or `stack`; `None` if the packet path is off.
    pub packet_path: Option<String>,
    /// Whether packets that belong to no service bypass the stack, too.
    #[serde(default)]
    pub bypass: bool,
    /// Pods' network namespaces that are served by packets only.
    pub by_packets: Vec<ByPackets>,
    /// Workloads whose connections are captured; empty if there is no mesh.
    pub mesh: Vec<Workload>,
    /// How full the tables are.
    pub tables: Vec<Table>,
    /// Verdicts since the tables were made, by reason.
    pub verdicts: BTreeMap<String, u64>,
    /// Whether the nftables table of `dataplane keep-nat` exists; `None` if the kernel does not return it.
    pub keep_nat: Option<bool>,
    /// The versions in use.
    pub versions: Versions,
}

/// The severity of a [`Finding`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Something is not served as it should be, or will not be soon.
    Error,
    /// Worth a look.
    Warning,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Error => "error",
            Self::Warning => "warning",
        })
    }
}

/// A problem or a remark.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Finding {
    /// Its severity.
    pub severity: Severity,
    /// The problem, and what to do.
    pub text: String,
    /// The object, if the fault is the object's own: its author has to act, and the node is healthy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
}

impl Finding {
    fn new(severity: Severity, text: String) -> Self {
        Self {
            severity,
            text,
            object: None,
        }
    }

    fn error(text: String) -> Self {
        Self::new(Severity::Error, text)
    }

    fn warning(text: String) -> Self {
        Self::new(Severity::Warning, text)
    }
}

/// A program at its hook.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Program {
    /// Its name, which is also its hook's.
    pub name: String,
    /// Whether the kernel reports it attached where it should be.
    pub attached: bool,
    /// The kernel's number of its link (`bpftool link show id`).
    pub link_id: Option<u32>,
    /// The kernel's number of the program (`bpftool prog show id`).
    pub program_id: Option<u32>,
    /// Its problem.
    pub problem: Option<String>,
}

/// An interface with the packet path's programs on it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Interface {
    /// The kernel's number of it.
    pub ifindex: u32,
    /// Its name.
    pub name: String,
    /// Its role: `uplink` or `pod`.
    pub role: String,
    /// The addresses to which flows that leave by it are masqueraded.
    pub masquerade: Vec<String>,
    /// How packets for it are delivered: to the `peer`, that is into the pod at once, or by its `egress`.
    pub delivery: String,
    /// Programs and rules of others on a pod's interface's way out, which are the reason for delivery by its egress.
    pub egress_of_others: Vec<String>,
    /// The program for arriving packets.
    pub ingress: OnInterface,
    /// The program for leaving packets.
    pub egress: OnInterface,
}

/// A network namespace whose sockets are left alone, so that the packet path serves its packets.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ByPackets {
    /// The network namespace, by its cookie.
    pub netns_cookie: u64,
    /// The pod's interface on the node.
    pub interface: String,
    /// The reason.
    pub reason: String,
}

/// A program on an interface.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OnInterface {
    /// Whether the kernel reports that it runs.
    pub attached: bool,
    /// How: `tcx` or `clsact`.
    pub hook: Option<String>,
    /// The kernel's number of the program.
    pub program_id: Option<u32>,
    /// Its problem.
    pub problem: Option<String>,
}

/// A table in the kernel.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Table {
    /// Its name.
    pub name: String,
    /// How many entries are in use.
    pub used: u64,
    /// How many it has room for now; the agent makes it larger when this is not enough.
    pub capacity: u64,
    /// The most entries that it may grow to.
    pub limit: u64,
    /// The memory that it takes.
    pub bytes: u64,
}

/// The versions in use.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Versions {
    /// The running agent.
    pub agent: Option<String>,
    /// This command.
    pub command: String,
    /// The layout that this command reads.
    pub layout: u32,
    /// The kernel.
    pub kernel: String,
}
