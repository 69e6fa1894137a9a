//! Sources of the model: a [`Source`] is opened as a [`Feed`], which yields views.

#![forbid(unsafe_code)]

mod admitted;
mod clock;
mod cost;
mod error;
mod external_ips;
mod feed;
mod file;
mod health;
mod host_ips;
mod ingest;
pub mod kubernetes;
pub mod manifests;
pub mod network_policies;
pub mod objects;
mod open;
mod own_ports;
mod paced;
mod reserved;
mod task;
mod turns;
mod view;

pub use admitted::Admitted;
pub use error::OpenError;
pub use external_ips::ExternalIps;
pub use feed::{Feed, Notice};
pub use health::Health;
pub use open::Source;
pub use paced::Paced;
pub use view::View;
