//! The dataplane agent: what to serve ([`model`]), where that comes from ([`source`]), what the
//! kernel's tables should hold for it ([`plan`]), and those tables ([`kernel`]).
//!
//! These rooms import from each other one way only: docs/architecture.md has the table, and `cargo xtask lint` holds
//! the code against it.

pub mod admin;
pub mod agent;
pub mod cli;
pub mod config;
pub mod dns;
pub mod iptables;
pub mod kernel;
pub mod model;
pub mod plan;
pub mod proxy;
pub mod relay;
pub mod settings;
pub mod source;
pub mod takeover;
pub mod threads;
