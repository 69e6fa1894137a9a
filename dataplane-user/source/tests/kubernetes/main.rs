//! The Kubernetes source, reading a real HTTP(S) API with the semantics of the API server.

mod access;
mod entries;
mod hostile;
mod names;
mod pods;
mod policies;
mod reading;
mod recovery;
mod routes;
mod semantics;
mod site;
