//! The guard of `dataplane guard`, from boot until an agent has taken over.

pub(crate) mod guard;
mod raise;

pub use self::{
    guard::stands,
    raise::{is_in_force, raise},
};
