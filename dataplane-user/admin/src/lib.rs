//! The agent's view of itself: metrics, health, and JSON for the command line.

#![forbid(unsafe_code)]

mod access;
pub mod api;
mod beats;
mod certificates;
pub mod client;
mod clock;
pub mod cni;
mod counters;
mod direct;
mod flows;
mod limits;
mod load_balancers;
mod lock;
mod mesh;
mod metrics;
mod places;
mod policies;
mod pulse;
mod rendering;
pub mod report;
mod server;
mod state;
mod tunnels;
mod view;
mod ztunnel;

pub use certificates::Certificates;
pub use clock::now;
pub use lock::lock;
pub use server::{Error as ListenError, Listeners, serve, who_answers};
pub use state::{Learnt, State};
pub use tunnels::WorkloadTunnels;
