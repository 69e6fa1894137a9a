//! A Kubernetes API server for tests: it answers lists and watches like the real one, with or without TLS, and can be
//! made to fail in the same ways.
//!
//! A [`Cluster`] holds objects and the history of their changes, an [`ApiServer`] serves it over
//! HTTP(S) on a port of its own, from threads of this process. The server can go away and come back
//! on the same port, while the cluster goes on changing.
//!
//! Lists are paged and consistent over their pages; watches begin at any version that is not
//! compacted, resume, end after `timeoutSeconds`, and send bookmarks; objects come and go by label
//! as they do there.

mod churn;
mod cluster;
mod faults;
mod life;
mod nodes;
pub mod objects;
mod patch;
mod select;
mod serve;
mod stored;
mod tls;

pub use churn::Churn;
pub use cluster::{Cluster, Resource};
pub use faults::{Asked, Faults};
pub use life::{ApiServer, Options};
