//! Manifests as objects of the model: the accepted objects, the refused ones, and the messages.

#![expect(
    clippy::too_many_lines,
    reason = "a table of cases, or the steps of one scenario in their order"
)]

mod authorization;
mod bad_manifests;
mod by_istio;
mod by_locality;
mod manifest_files;
mod manifest_fuzz;
mod manifest_semantics;
mod manifests;
mod manifests_change;
mod plain_words;
mod routes;
mod service_entries;
mod topology;
mod unused_fields;
mod waypoints;
