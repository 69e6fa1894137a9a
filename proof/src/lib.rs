//! Proves the packet path: runs its programs, as the kernel has loaded them, packet by packet ([`kernel::rig`]) and
//! compares the results with a small reference model.
//!
//! * [`wire`]: builds packets as bytes.
//! * [`world`]: the node that receives the packets.
//! * `model`: the reference model, which computes the expected results.
//! * `generate`: generates packets of all kinds from a seed.
//! * [`campaign`]: runs many packets, compares the results, and shortens the sequence that shows a difference.
//! * `through`: compares the path through the stack with the fast path.
//! * [`cost`]: measures how long the programs run.

pub mod campaign;
mod compare;
pub mod cost;
mod generate;
mod model;
mod tally;
mod through;
pub mod wire;
pub mod world;

pub use generate::{Kind, Sort};
pub use model::{Input, Output, Verdict, sequences::Numbers};
pub use tally::{Outcome, Tally};
