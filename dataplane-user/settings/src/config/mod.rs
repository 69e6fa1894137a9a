//! The configuration file: the settings of `dataplane run`, in YAML.
//!
//! Its types are those of [`Settings`]. They are the schema, too: `dataplane config schema` prints it, with their
//! comments.

mod kube_proxy;
mod read;
mod schema;

pub use kube_proxy::{Imported, NotImported, import};
pub use read::{dns, mesh, parse, read};
pub use schema::schema;

use crate::Settings;

/// Returns settings as the text of a configuration file.
pub fn to_yaml(settings: &Settings) -> String {
    // Serialization cannot fail: every key of a map is a string, and there are no bytes.
    serde_saphyr::to_string(settings).unwrap_or_default()
}
