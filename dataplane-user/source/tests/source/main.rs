//! What manifests become in the model: what is read, what is refused, and in which words.

mod bad_manifests;
mod by_istio;
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
