//! Routes, grants and Gateways of Gateway API.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde::Deserialize;

use super::{Metadata, or_default};

/// A route of any kind of `gateway.networking.k8s.io`. Fields that a kind does not have are empty.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Route {
    #[serde(deserialize_with = "or_default")]
    pub metadata: Metadata,
    pub spec: Option<RouteSpec>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct RouteSpec {
    pub parent_refs: Option<Vec<ParentRef>>,
    pub hostnames: Option<Vec<serde_json::Value>>,
    pub rules: Option<Vec<RouteRule>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ParentRef {
    pub group: Option<String>,
    pub kind: Option<String>,
    pub namespace: Option<String>,
    #[serde(deserialize_with = "or_default")]
    pub name: String,
    pub section_name: Option<String>,
    pub port: Option<i64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct RouteRule {
    pub name: Option<String>,
    pub matches: Option<Vec<RouteMatch>>,
    pub backend_refs: Option<Vec<BackendRef>>,
    #[serde(flatten)]
    others: BTreeMap<String, serde_json::Value>,
}

impl RouteRule {
    /// Returns a field that asks for more than backends. `None` if there is no such field.
    pub fn other_field(&self) -> Option<&str> {
        given(&self.others)
    }
}

/// A match of an HTTPRoute or GRPCRoute.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct RouteMatch {
    path: Option<PathMatch>,
    #[serde(flatten)]
    others: BTreeMap<String, serde_json::Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PathMatch {
    #[serde(rename = "type")]
    kind: Option<String>,
    value: Option<String>,
}

impl RouteMatch {
    /// Returns whether it matches each request. Gateway API's default is the prefix `/`.
    pub fn matches_all(&self) -> bool {
        let is_all = |path: &PathMatch| {
            path.kind.as_deref().unwrap_or("PathPrefix") == "PathPrefix"
                && path.value.as_deref().unwrap_or("/") == "/"
        };
        self.path.as_ref().is_none_or(is_all) && given(&self.others).is_none()
    }
}

/// Returns the name of the first field with a value that is not empty.
fn given(fields: &BTreeMap<String, serde_json::Value>) -> Option<&str> {
    let is_empty = |value: &serde_json::Value| match value {
        serde_json::Value::Null => true,
        serde_json::Value::Array(all) => all.is_empty(),
        _ => false,
    };
    let mut all = fields.iter();
    all.find_map(|(field, value)| (!is_empty(value)).then_some(field.as_str()))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct BackendRef {
    pub group: Option<String>,
    pub kind: Option<String>,
    pub namespace: Option<String>,
    #[serde(deserialize_with = "or_default")]
    pub name: String,
    pub port: Option<i64>,
    pub weight: Option<i64>,
    #[serde(flatten)]
    others: BTreeMap<String, serde_json::Value>,
}

impl BackendRef {
    /// Returns a field that asks for more than a backend, as [`RouteRule::other_field`] does.
    pub fn other_field(&self) -> Option<&str> {
        given(&self.others)
    }
}

/// `gateway.networking.k8s.io` ReferenceGrant.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ReferenceGrant {
    #[serde(deserialize_with = "or_default")]
    pub metadata: Metadata,
    pub spec: Option<ReferenceGrantSpec>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ReferenceGrantSpec {
    pub from: Option<Vec<ReferenceGrantFrom>>,
    pub to: Option<Vec<ReferenceGrantTo>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ReferenceGrantFrom {
    #[serde(deserialize_with = "or_default")]
    pub group: String,
    #[serde(deserialize_with = "or_default")]
    pub kind: String,
    #[serde(deserialize_with = "or_default")]
    pub namespace: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ReferenceGrantTo {
    #[serde(deserialize_with = "or_default")]
    pub group: String,
    #[serde(deserialize_with = "or_default")]
    pub kind: String,
    pub name: Option<String>,
}

/// `gateway.networking.k8s.io` Gateway, as far as a waypoint needs it.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Gateway {
    #[serde(deserialize_with = "or_default")]
    pub metadata: Metadata,
    pub spec: Option<GatewaySpec>,
    pub status: Option<GatewayStatus>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct GatewaySpec {
    #[serde(deserialize_with = "or_default")]
    pub gateway_class_name: String,
    pub listeners: Option<Vec<GatewayListener>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct GatewayListener {
    #[serde(deserialize_with = "or_default")]
    pub protocol: String,
    pub port: Option<i64>,
    pub allowed_routes: Option<AllowedRoutes>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct AllowedRoutes {
    pub namespaces: Option<RouteNamespaces>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct RouteNamespaces {
    pub from: Option<String>,
    pub selector: Option<LabelSelector>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct GatewayStatus {
    pub addresses: Option<Vec<GatewayStatusAddress>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct GatewayStatusAddress {
    #[serde(rename = "type")]
    pub type_: Option<String>,
    #[serde(deserialize_with = "or_default")]
    pub value: String,
}
