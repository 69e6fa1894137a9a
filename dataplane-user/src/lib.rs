//! The dataplane agent: what to serve ([`model`]), where that comes from ([`source`]), what the
//! kernel's tables should hold for it ([`plan`]), and those tables ([`kernel`]).
//!
//! Arrows run one way: `model <- {source, plan, relay}`, `plan <- kernel`, `relay <- proxy`, and [`agent`] and [`cli`]
//! above all.

pub mod admin;
pub mod agent;
pub mod cli;
pub mod config;
pub mod kernel;
pub mod model;
pub mod plan;
pub mod proxy;
pub mod relay;
pub mod settings;
pub mod source;
pub mod takeover;
