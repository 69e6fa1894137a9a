//! The configuration file: what `dataplane run` is told by flags, in YAML.
//!
//! Its types are those of [`Settings`], which are the schema, too: `dataplane config
//! schema` prints it, with their comments.

mod kube_proxy;
mod read;
mod schema;

pub use kube_proxy::{Imported, NotImported, import};
pub use read::{dns, mesh, parse, read};
pub use schema::schema;

use crate::Settings;

/// Writes settings as a file would have them.
pub fn to_yaml(settings: &Settings) -> String {
    // Nothing in it fails to be written: no maps with keys that are no strings, no bytes.
    serde_saphyr::to_string(settings).unwrap_or_default()
}
