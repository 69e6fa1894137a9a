//! What is known of a service's port before its chains are read.

use super::tables::Line;
use crate::model::TrafficPolicy;

/// The chains of a service's port.
#[derive(Debug, Default)]
pub struct Chains<'a> {
    /// That of the cluster IPs, its policy, and the rule that leads there.
    pub internal: Option<(&'a str, TrafficPolicy, Line<'a>)>,
    /// That of all other addresses, and the first rule that leads there.
    pub external: Option<(&'a str, Line<'a>)>,
}
