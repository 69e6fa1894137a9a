//! This process: its memory, its capabilities, and its child processes.

mod children;
mod memory;
pub(crate) mod privileges;

pub use self::{
    children::ends_with_us,
    memory::{give_back_freed_memory, return_large_allocations},
    privileges::keep_network_only,
};
