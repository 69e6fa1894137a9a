//! The proof of the packet path: its programs, as the kernel has loaded them, are run packet by
//! packet ([`kernel::rig`]) and compared with a small model of what they ought to do.
//!
//! * [`wire`]: packets as bytes.
//! * [`world`]: the node that they are thrown at.
//! * `model`: what ought to happen.
//! * `generate`: packets of all kinds, from a seed.
//! * [`campaign`]: many of them, compared; what was found, made short.
//! * [`cost`]: how long the programs take.

pub mod campaign;
mod compare;
pub mod cost;
mod generate;
mod model;
mod tally;
pub mod wire;
pub mod world;

pub use generate::{Kind, Sort};
pub use model::{Input, Output, Verdict, sequences::Numbers};
pub use tally::{Outcome, Tally};
