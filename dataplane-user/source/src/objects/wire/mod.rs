//! The fields of Kubernetes' objects that are read, in the form of the API and of manifests.
//!
//! All other fields are skipped, with any value. The API server accepts values that its published types do not allow,
//! such as a condition with `lastTransitionTime: null`: an unused field must not make an object unreadable. As for
//! Kubernetes, `null` equals a missing field.

#![expect(
    missing_docs,
    reason = "Kubernetes' API reference describes its fields"
)]

mod gateway;
mod istio;

pub use gateway::{
    AllowedRoutes, BackendRef, Gateway, GatewayListener, GatewaySpec, GatewayStatus,
    GatewayStatusAddress, ParentRef, ReferenceGrant, ReferenceGrantFrom, ReferenceGrantSpec,
    ReferenceGrantTo, Route, RouteMatch, RouteNamespaces, RouteRule, RouteSpec,
};
pub use istio::{
    IstioPolicy, IstioPolicySpec, PolicyMode, PolicySelector, PolicyTarget, Readable, ServiceEntry,
    ServiceEntryAddress, ServiceEntryPort, ServiceEntrySpec, ServiceEntryStatus, WorkloadEntry,
    WorkloadEntrySpec, WorkloadEntryStatus, WorkloadSelector,
};

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::{Deserialize, Deserializer, de::IgnoredAny};

/// `metadata` of every kind.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Metadata {
    pub name: Option<String>,
    pub namespace: Option<String>,
    pub uid: Option<String>,
    pub resource_version: Option<String>,
    pub creation_timestamp: Option<Time>,
    /// Only its presence matters.
    pub deletion_timestamp: Option<IgnoredAny>,
    #[serde(deserialize_with = "words")]
    pub labels: BTreeMap<String, String>,
    #[serde(deserialize_with = "words")]
    pub annotations: BTreeMap<String, String>,
    pub owner_references: Option<Vec<OwnerReference>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct OwnerReference {
    #[serde(deserialize_with = "or_default")]
    pub kind: String,
    #[serde(deserialize_with = "or_default")]
    pub name: String,
    pub controller: Option<bool>,
}

/// The part of an object that is read if the rest cannot be read. Each field is read by itself.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Named {
    pub metadata: Name,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Name {
    pub name: serde_json::Value,
    pub namespace: serde_json::Value,
    pub resource_version: serde_json::Value,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Service {
    #[serde(deserialize_with = "or_default")]
    pub metadata: Metadata,
    pub spec: Option<ServiceSpec>,
    pub status: Option<ServiceStatus>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServiceSpec {
    #[serde(rename = "type")]
    pub type_: Option<String>,
    #[serde(rename = "clusterIP")]
    pub cluster_ip: Option<String>,
    #[serde(rename = "clusterIPs")]
    pub cluster_ips: Option<Vec<String>>,
    #[serde(rename = "externalIPs")]
    pub external_ips: Option<Vec<String>>,
    pub ip_families: Option<Vec<String>>,
    pub load_balancer_source_ranges: Option<Vec<String>>,
    pub session_affinity: Option<String>,
    pub session_affinity_config: Option<SessionAffinityConfig>,
    pub internal_traffic_policy: Option<String>,
    pub external_traffic_policy: Option<String>,
    pub health_check_node_port: Option<i32>,
    pub external_name: Option<String>,
    pub publish_not_ready_addresses: Option<bool>,
    #[serde(deserialize_with = "words")]
    pub selector: BTreeMap<String, String>,
    pub traffic_distribution: Option<String>,
    pub ports: Option<Vec<ServicePort>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SessionAffinityConfig {
    #[serde(rename = "clientIP")]
    pub client_ip: Option<ClientIpConfig>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ClientIpConfig {
    pub timeout_seconds: Option<i32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServicePort {
    pub name: Option<String>,
    pub protocol: Option<String>,
    #[serde(deserialize_with = "or_default")]
    pub port: i32,
    pub node_port: Option<i32>,
    pub target_port: Option<TargetPort>,
}

/// A port by its number or by its name.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum TargetPort {
    Number(i64),
    Name(String),
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServiceStatus {
    pub load_balancer: Option<LoadBalancerStatus>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct LoadBalancerStatus {
    pub ingress: Option<Vec<LoadBalancerIngress>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct LoadBalancerIngress {
    pub ip: Option<String>,
    pub ip_mode: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct EndpointSlice {
    #[serde(deserialize_with = "or_default")]
    pub metadata: Metadata,
    #[serde(deserialize_with = "or_default")]
    pub address_type: String,
    pub endpoints: Option<Vec<Endpoint>>,
    pub ports: Option<Vec<EndpointPort>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Endpoint {
    #[serde(deserialize_with = "or_default")]
    pub addresses: Vec<String>,
    pub conditions: Option<EndpointConditions>,
    pub hints: Option<EndpointHints>,
    pub hostname: Option<String>,
    pub node_name: Option<String>,
    pub zone: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct EndpointConditions {
    pub ready: Option<bool>,
    pub serving: Option<bool>,
    pub terminating: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct EndpointHints {
    pub for_zones: Option<Vec<Hint>>,
    pub for_nodes: Option<Vec<Hint>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Hint {
    #[serde(deserialize_with = "or_default")]
    pub name: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct EndpointPort {
    pub name: Option<String>,
    pub protocol: Option<String>,
    pub port: Option<i32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Node {
    #[serde(deserialize_with = "or_default")]
    pub metadata: Metadata,
    pub spec: Option<NodeSpec>,
    pub status: Option<NodeStatus>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct NodeSpec {
    pub taints: Option<Vec<Taint>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Taint {
    #[serde(deserialize_with = "or_default")]
    pub key: String,
}

/// Without the images on the node and its conditions, which change every few seconds.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct NodeStatus {
    pub addresses: Option<Vec<NodeAddress>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct NodeAddress {
    #[serde(rename = "type", deserialize_with = "or_default")]
    pub type_: String,
    #[serde(deserialize_with = "or_default")]
    pub address: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Namespace {
    #[serde(deserialize_with = "or_default")]
    pub metadata: Metadata,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Pod {
    #[serde(deserialize_with = "or_default")]
    pub metadata: Metadata,
    pub spec: Option<PodSpec>,
    pub status: Option<PodStatus>,
}

/// Without volumes, environments and other settings of containers.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodSpec {
    pub node_name: Option<String>,
    pub host_network: Option<bool>,
    pub service_account_name: Option<String>,
    pub dns_policy: Option<String>,
    pub dns_config: Option<PodDnsConfig>,
    #[serde(deserialize_with = "or_default")]
    pub containers: Vec<Container>,
    pub init_containers: Option<Vec<Container>>,
}

impl PodSpec {
    /// Returns the service account: `default` if the Pod names none.
    pub fn account(&self) -> &str {
        let account = self.service_account_name.as_deref().unwrap_or_default();
        if account.is_empty() {
            "default"
        } else {
            account
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct PodDnsConfig {
    pub nameservers: Option<Vec<String>>,
    pub searches: Option<Vec<String>>,
    pub options: Option<Vec<PodDnsConfigOption>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct PodDnsConfigOption {
    pub name: Option<String>,
    pub value: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Container {
    pub ports: Option<Vec<ContainerPort>>,
    pub restart_policy: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ContainerPort {
    pub name: Option<String>,
    pub protocol: Option<String>,
    #[serde(deserialize_with = "or_default")]
    pub container_port: i32,
    pub host_port: Option<i32>,
    #[serde(rename = "hostIP")]
    pub host_ip: Option<String>,
}

/// Without the states of its containers, which change most often.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodStatus {
    pub phase: Option<String>,
    #[serde(rename = "podIP")]
    pub pod_ip: Option<String>,
    #[serde(rename = "podIPs")]
    pub pod_ips: Option<Vec<PodIp>>,
    #[serde(rename = "hostIP")]
    pub host_ip: Option<String>,
    #[serde(rename = "hostIPs")]
    pub host_ips: Option<Vec<PodIp>>,
    pub conditions: Option<Vec<PodCondition>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct PodCondition {
    #[serde(rename = "type", deserialize_with = "or_default")]
    pub type_: String,
    #[serde(deserialize_with = "or_default")]
    pub status: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct PodIp {
    #[serde(deserialize_with = "or_default")]
    pub ip: String,
}

/// Reads `null` as the field's default.
fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// Reads labels or annotations. A value of `null` becomes an empty text.
fn words<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, String>, D::Error> {
    let given: Option<BTreeMap<String, Option<String>>> = Option::deserialize(deserializer)?;
    let words = given.into_iter().flatten();
    Ok(words
        .map(|(key, value)| (key, value.unwrap_or_default()))
        .collect())
}
