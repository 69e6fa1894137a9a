//! Namespaces: the rules and the waypoint of their objects.

use std::sync::Arc;

use model::{Label, Preference, Rules, UseWaypoint};

use super::{
    Findings, check_name, istio::waypoint, pod::rules, selection::preference, wire::Metadata,
};

/// The rules of a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceRules {
    /// Its name.
    pub name: Arc<str>,
    /// The rules for its pods.
    pub rules: Rules,
    /// The traffic distribution of its services and entries, unless they have their own.
    pub preference: Option<Preference>,
    /// The waypoint of its objects, unless they name another.
    pub waypoint: Option<UseWaypoint>,
    /// Its labels, without the one that has its name.
    pub labels: Box<[Label]>,
}

/// Converts a Namespace.
pub fn namespace(metadata: &Metadata, findings: &mut Findings) -> NamespaceRules {
    check_name(metadata, findings);
    let name = metadata.name.as_deref().unwrap_or_default();
    let labels = metadata.labels.iter();
    NamespaceRules {
        rules: rules(metadata, false, findings),
        preference: preference(metadata, findings),
        waypoint: waypoint(&metadata.labels, name),
        labels: labels
            .filter(|(key, _)| *key != "kubernetes.io/metadata.name")
            .map(|(key, value)| (key.as_str().into(), value.as_str().into()))
            .collect(),
        name: name.into(),
    }
}
