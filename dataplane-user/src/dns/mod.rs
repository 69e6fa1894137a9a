//! DNS on the node: names of services from the model, everything else from resolvers and a cache.
//!
//! [`answer`](answer::answer) decides, purely, what becomes of a query. [`Server`] has the sockets.

pub mod answer;
mod batch;
mod cache;
mod client;
mod compose;
mod metrics;
mod name;
mod resolve;
mod server;
mod upstream;
mod wire;
mod zone;

pub use client::{Client, ResolvConf};
pub use name::LowerName;
pub use server::{Server, Settings};
pub use wire::{Stored, Transport, question};
pub use zone::{Meaning, Zone};
