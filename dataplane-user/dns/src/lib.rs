//! DNS on the node: names of services from the model, all other names from resolvers and a cache.
//!
//! [`answer`](answer::answer) decides about a query, as a pure function. [`Server`] has the sockets.

#![forbid(unsafe_code)]

pub mod answer;
mod basis;
mod batch;
mod beats;
mod busy_poll;
mod cache;
mod client;
mod compose;
mod counts;
mod exchange;
mod explain;
mod join;
mod log;
mod lookups;
mod metrics;
mod name;
mod observer;
mod query_socket;
mod resolve;
mod rule;
mod server;
mod shared;
mod sockets;
mod upstream;
mod wire;
mod worker;
mod zone;

pub use basis::Basis;
pub use beats::AWAY;
pub use client::{Client, ResolvConf};
pub use explain::{ExplainError, Questions, Step, steps};
pub use log::Answered;
pub use lookups::Lookups;
pub use name::LowerName;
pub use observer::Observer;
pub use rule::Rule;
pub use server::{Captured, Server, Zones};
pub use shared::{Room, Settings};
pub use sockets::Listener;
pub use wire::{Stored, Transport, question};
pub use zone::{Meaning, Ttls, Zone};
