//! The lab: nodes, pods and outside clients as network namespaces on one Linux machine.
//!
//! A [`Lab`] is a small cluster with no route to the outside. Every member is a named network namespace (`ip netns`
//! sees it) with a cgroup of its own below its node's, because programs attached to a node's cgroup must see only the
//! node's pods. A lab is a value: dropping it (also by a panic) ends its processes and removes its namespaces, cgroups
//! and pins. The next lab that is built sweeps the leftovers of killed creators.
//!
//! ```no_run
//! use dataplane_tests::Lab;
//!
//! let lab = Lab::builder()
//!     .node("node1")
//!     .node("node2")
//!     .pod("node2", "sleep", "10.244.2.8")
//!     .build()?;
//! let output = lab.pod("sleep").command("ip").args(["route"]).output()?;
//! # Ok::<(), dataplane_tests::Error>(())
//! ```
//!
//! The scenarios of `tests/tests`, `cargo xtask run`'s practice node and the benchmarks use it.

mod agent;
#[cfg(feature = "api")]
pub mod api;
mod builder;
#[cfg(feature = "chart")]
pub mod chart;
mod command;
mod error;
mod identity;
mod lab;
mod netns;
mod network;
pub mod openmetrics;
pub mod pages;
mod patience;
mod programs;
pub mod report;
mod requirements;
#[cfg(feature = "api")]
pub mod ztunnel;

pub use agent::{Agent, AgentBuilder, PANICS, without_packets};
pub use builder::LabBuilder;
pub use command::{Command, Process};
pub use error::{Error, Result};
pub use identity::{CreatorState, LabId, sweep};
pub use lab::{Host, Lab, Role};
pub use patience::{emulated, is_long, patience};
pub use programs::Programs;
pub use requirements::{Requirement, cgroup2_mount, missing, whole_machine};
