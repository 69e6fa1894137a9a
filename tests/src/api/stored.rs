//! An object as the server keeps it.

use std::collections::BTreeMap;

/// An object at a version.
#[derive(Debug)]
pub struct Object {
    pub namespace: String,
    pub name: String,
    pub labels: BTreeMap<String, String>,
    /// `spec.nodeName` of a pod; empty if it has none.
    pub node: String,
    /// As JSON, without `kind` and `apiVersion`: lists leave them out.
    pub text: String,
}
