//! Objects of all sources, on their way into views.
//!
//! A feed gives the [`Store`] each object that it reads, converted by the object's [`Kind`]. The store combines the
//! objects into views.

mod kind;
mod orphans;
mod pods;
mod sight;
mod store;
mod text;
mod wanted;

pub use kind::{Body, Kind, Object};
pub use sight::Perspective;
pub use store::{Message, Store};
pub use text::{Text, plain};
pub use wanted::{Scope, WantedKinds, WantedPolicies};
