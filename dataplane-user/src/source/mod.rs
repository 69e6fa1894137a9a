//! Where the model comes from. Each source yields [`Snapshot`](crate::model::Snapshot)s.

pub mod kubernetes;
pub mod manifests;
pub mod objects;
