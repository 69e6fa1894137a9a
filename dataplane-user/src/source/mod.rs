//! Where the model comes from: a [`Source`] is opened, and the [`Feed`] yields what it says.

mod combined;
mod feed;
pub mod kubernetes;
pub mod manifests;
pub mod objects;

pub use combined::{Combined, Part};
pub use feed::{Feed, Health, Notice, OpenError, Source, View};
