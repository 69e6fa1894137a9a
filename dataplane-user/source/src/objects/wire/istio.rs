//! Istio's objects.

use std::collections::BTreeMap;

use serde::{Deserialize, de::IgnoredAny};

use super::{Metadata, PodCondition, or_default, words};

/// `networking.istio.io` ServiceEntry: v1, v1beta1 and v1alpha3 have the same fields.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ServiceEntry {
    #[serde(deserialize_with = "or_default")]
    pub metadata: Metadata,
    pub spec: Option<ServiceEntrySpec>,
    pub status: Option<ServiceEntryStatus>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServiceEntrySpec {
    pub hosts: Option<Vec<String>>,
    pub addresses: Option<Vec<String>>,
    pub ports: Option<Vec<ServiceEntryPort>>,
    pub location: Option<String>,
    pub resolution: Option<String>,
    pub endpoints: Option<Vec<WorkloadEntrySpec>>,
    pub workload_selector: Option<WorkloadSelector>,
    pub export_to: Option<Vec<String>>,
    pub subject_alt_names: Option<Vec<String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServiceEntryPort {
    #[serde(deserialize_with = "or_default")]
    pub number: i64,
    pub protocol: Option<String>,
    pub name: Option<String>,
    pub target_port: Option<i64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct WorkloadSelector {
    #[serde(deserialize_with = "words")]
    pub labels: BTreeMap<String, String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ServiceEntryStatus {
    pub addresses: Option<Vec<ServiceEntryAddress>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ServiceEntryAddress {
    #[serde(deserialize_with = "or_default")]
    pub value: String,
    #[serde(deserialize_with = "or_default")]
    pub host: String,
}

/// `networking.istio.io` WorkloadEntry: v1, v1beta1 and v1alpha3 have the same fields.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct WorkloadEntry {
    #[serde(deserialize_with = "or_default")]
    pub metadata: Metadata,
    pub spec: Option<WorkloadEntrySpec>,
    pub status: Option<WorkloadEntryStatus>,
}

/// The status of a WorkloadEntry whose proxy checks its health.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct WorkloadEntryStatus {
    pub conditions: Option<Vec<PodCondition>>,
}

/// The spec of a WorkloadEntry, and an endpoint of a ServiceEntry.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct WorkloadEntrySpec {
    #[serde(deserialize_with = "or_default")]
    pub address: String,
    pub ports: Option<BTreeMap<String, i64>>,
    #[serde(deserialize_with = "words")]
    pub labels: BTreeMap<String, String>,
    pub weight: Option<i64>,
    #[serde(deserialize_with = "or_default")]
    pub locality: String,
    #[serde(deserialize_with = "or_default")]
    pub network: String,
}

/// A policy of `security.istio.io`: the fields that say which connections it limits. No field makes the others
/// unreadable.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct IstioPolicy {
    #[serde(deserialize_with = "or_default")]
    pub metadata: Metadata,
    pub spec: Option<Readable<IstioPolicySpec>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct IstioPolicySpec {
    pub selector: Option<Readable<PolicySelector>>,
    pub target_ref: Option<Readable<PolicyTarget>>,
    pub target_refs: Option<Readable<Vec<IgnoredAny>>>,
    pub action: Option<Readable<String>>,
    pub rules: Option<Readable<Vec<serde_json::Value>>>,
    pub mtls: Option<Readable<PolicyMode>>,
    pub port_level_mtls: Option<Readable<BTreeMap<String, PolicyMode>>>,
    /// Makes a list unreadable: without such a field, serde also reads the fields from the items of a list.
    #[serde(flatten)]
    _others: IgnoredAny,
}

/// `matchLabels`.
pub type PolicySelector = BTreeMap<String, Option<BTreeMap<String, String>>>;

/// Only whether there is a target matters.
pub type PolicyTarget = BTreeMap<String, Option<IgnoredAny>>;

/// `mode`.
pub type PolicyMode = BTreeMap<String, Option<String>>;

/// A field, whether or not its value is of the expected type.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum Readable<T> {
    Read(T),
    Unread(IgnoredAny),
}
