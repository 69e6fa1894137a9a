//! DNS on the node: names of services from the model, everything else from resolvers and a cache.
//!
//! [`answer`](answer::answer) decides, purely, what becomes of a query.

pub mod answer;
mod client;
mod compose;
mod name;
mod wire;
mod zone;

pub use client::{Client, ResolvConf};
pub use name::LowerName;
pub use wire::{Stored, Transport, question};
pub use zone::{Meaning, Zone};
