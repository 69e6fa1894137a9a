//! Where the services come from.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::is_default;

/// Where the services come from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Source {
    /// Files or directories with Services and EndpointSlices, as `kubectl get
    /// services,endpointslices -A -o yaml` prints them.
    #[serde(skip_serializing_if = "is_default")]
    pub manifests: Vec<PathBuf>,
    /// The Kubernetes API; `{}` is enough in a pod.
    #[serde(skip_serializing_if = "is_default")]
    pub kubernetes: Option<Kubernetes>,
}

impl Source {
    /// Returns the keys of the configured sources.
    pub fn given(&self) -> Vec<&'static str> {
        let sources = [
            ("manifests", !self.manifests.is_empty()),
            ("kubernetes", self.kubernetes.is_some()),
        ];
        sources
            .iter()
            .filter_map(|(key, given)| given.then_some(*key))
            .collect()
    }
}

/// The Kubernetes API.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Kubernetes {
    /// A kubeconfig; the agent uses its current context. Default: the pod's service account.
    #[serde(skip_serializing_if = "is_default")]
    pub kubeconfig: Option<PathBuf>,
    /// The API server's URL, which replaces the URL in the kubeconfig or in the pod's environment.
    /// The pod's environment has a cluster IP, which needs a service proxy. If the dataplane is the
    /// node's only service proxy, give the API server's own address or that of its load balancer.
    #[serde(skip_serializing_if = "is_default")]
    pub api_server: Option<String>,
    /// Read Istio's ServiceEntries and WorkloadEntries, and serve the entries' hosts. A cluster without them is no
    /// error. Without this, the agent needs no permission to read them.
    #[serde(skip_serializing_if = "is_default")]
    pub service_entries: bool,
    /// Read Gateway API's routes and ReferenceGrants, and split the Services to which they are attached. A cluster without
    /// them is no error. Without this, the agent needs no permission to read them.
    #[serde(skip_serializing_if = "is_default")]
    pub routes: bool,
}
