//! The objects of a cluster, and the history of their changes.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use serde_json::{Value, json};
use tokio::sync::watch;

use super::{select::Selector, stored::Object};

/// The kinds of objects that the server knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Resource {
    /// Services.
    Services,
    /// EndpointSlices.
    EndpointSlices,
    /// Nodes.
    Nodes,
    /// Pods.
    Pods,
    /// Namespaces.
    Namespaces,
    /// Istio's ServiceEntries, once they are [installed](Cluster::install_istio).
    ServiceEntries,
    /// Istio's WorkloadEntries, once they are [installed](Cluster::install_istio).
    WorkloadEntries,
    /// Gateway API's TCPRoutes, once they are [installed](Cluster::install_gateway_api).
    TcpRoutes,
    /// Gateway API's HTTPRoutes, once they are [installed](Cluster::install_gateway_api).
    HttpRoutes,
    /// Gateway API's ReferenceGrants, once they are [installed](Cluster::install_gateway_api).
    ReferenceGrants,
    /// Istio's AuthorizationPolicies, once they are [installed](Cluster::install_istio) as `v1`.
    AuthorizationPolicies,
    /// Istio's PeerAuthentications, likewise.
    PeerAuthentications,
}

/// The group of Istio's kinds in paths.
const ISTIO: &str = "/apis/networking.istio.io/";
/// The group of Istio's policies in paths.
const SECURITY: &str = "/apis/security.istio.io/";
/// The group of Gateway API's kinds in paths.
const GATEWAY: &str = "/apis/gateway.networking.k8s.io/";

impl Resource {
    /// By the path of a request.
    pub fn of_path(path: &str) -> Option<Self> {
        match path {
            "/api/v1/services" => Some(Self::Services),
            "/apis/discovery.k8s.io/v1/endpointslices" => Some(Self::EndpointSlices),
            "/api/v1/nodes" => Some(Self::Nodes),
            "/api/v1/pods" => Some(Self::Pods),
            "/api/v1/namespaces" => Some(Self::Namespaces),
            _ => match [ISTIO, SECURITY, GATEWAY]
                .iter()
                .find_map(|group| path.strip_prefix(group))?
                .split_once('/')?
                .1
            {
                "serviceentries" => Some(Self::ServiceEntries),
                "workloadentries" => Some(Self::WorkloadEntries),
                "tcproutes" => Some(Self::TcpRoutes),
                "httproutes" => Some(Self::HttpRoutes),
                "referencegrants" => Some(Self::ReferenceGrants),
                "authorizationpolicies" => Some(Self::AuthorizationPolicies),
                "peerauthentications" => Some(Self::PeerAuthentications),
                _ => None,
            },
        }
    }

    /// By an object's kind.
    fn of_kind(kind: &str) -> Option<Self> {
        match kind {
            "Service" => Some(Self::Services),
            "EndpointSlice" => Some(Self::EndpointSlices),
            "Node" => Some(Self::Nodes),
            "Pod" => Some(Self::Pods),
            "Namespace" => Some(Self::Namespaces),
            "ServiceEntry" => Some(Self::ServiceEntries),
            "WorkloadEntry" => Some(Self::WorkloadEntries),
            "TCPRoute" => Some(Self::TcpRoutes),
            "HTTPRoute" => Some(Self::HttpRoutes),
            "ReferenceGrant" => Some(Self::ReferenceGrants),
            "AuthorizationPolicy" => Some(Self::AuthorizationPolicies),
            "PeerAuthentication" => Some(Self::PeerAuthentications),
            _ => None,
        }
    }

    /// `kind` and `apiVersion` of its objects.
    pub fn types(self) -> (&'static str, &'static str) {
        match self {
            Self::Services => ("Service", "v1"),
            Self::EndpointSlices => ("EndpointSlice", "discovery.k8s.io/v1"),
            Self::Nodes => ("Node", "v1"),
            Self::Pods => ("Pod", "v1"),
            Self::Namespaces => ("Namespace", "v1"),
            Self::ServiceEntries => ("ServiceEntry", "networking.istio.io/v1"),
            Self::WorkloadEntries => ("WorkloadEntry", "networking.istio.io/v1"),
            Self::TcpRoutes => ("TCPRoute", "gateway.networking.k8s.io/v1alpha2"),
            Self::HttpRoutes => ("HTTPRoute", "gateway.networking.k8s.io/v1"),
            Self::ReferenceGrants => ("ReferenceGrant", "gateway.networking.k8s.io/v1beta1"),
            Self::AuthorizationPolicies => ("AuthorizationPolicy", "security.istio.io/v1"),
            Self::PeerAuthentications => ("PeerAuthentication", "security.istio.io/v1"),
        }
    }
}

/// A change of an object.
#[derive(Debug)]
pub struct Change {
    pub version: u64,
    pub resource: Resource,
    pub before: Option<Arc<Object>>,
    /// The object now; if it is gone, its last state, with the version at which it went.
    pub after: Arc<Object>,
    pub gone: bool,
}

type Objects = imbl::OrdMap<(Resource, String, String), Arc<Object>>;

#[derive(Debug)]
struct State {
    version: u64,
    objects: Objects,
    history: VecDeque<Arc<Change>>,
    /// Up to here, history is forgotten.
    compacted: u64,
    /// The objects of lists that clients are paging through.
    pages: HashMap<u64, Objects>,
    /// The version in which there are Istio's kinds; none: there are none.
    istio: Option<&'static str>,
    /// The versions in which there are kinds of Gateway API.
    gateway: &'static [&'static str],
}

/// The objects of a cluster. A handle: clones are of the same cluster.
#[derive(Clone, Debug)]
pub struct Cluster {
    state: Arc<Mutex<State>>,
    version: watch::Sender<u64>,
}

impl Default for Cluster {
    fn default() -> Self {
        // Versions do not begin at 1 in any cluster that has services.
        let version = 1_000;
        Self {
            state: Arc::new(Mutex::new(State {
                version,
                objects: Objects::new(),
                history: VecDeque::new(),
                compacted: version,
                pages: HashMap::new(),
                istio: None,
                gateway: &[],
            })),
            version: watch::Sender::new(version),
        }
    }
}

impl Cluster {
    /// Writes an object; returns its version.
    ///
    /// # Panics
    ///
    /// If it is of a kind that the server does not know, or has no name.
    pub fn apply(&self, object: Value) -> u64 {
        let version = self.put(object);
        self.version.send_replace(version);
        version
    }

    /// Returns the present object, with its kind; `None` if it is not there.
    pub fn get(&self, resource: Resource, namespace: &str, name: &str) -> Option<Value> {
        let key = (resource, namespace.to_owned(), name.to_owned());
        let object = Arc::clone(self.lock().objects.get(&key)?);
        let mut object: Value = serde_json::from_str(&object.text).ok()?;
        let (kind, version) = resource.types();
        (object["kind"], object["apiVersion"]) = (kind.into(), version.into());
        Some(object)
    }

    /// Makes the cluster know Istio's kinds in a version of their API, such as `v1`; or no longer know them.
    pub fn install_istio(&self, version: Option<&'static str>) {
        self.lock().istio = version;
    }

    /// Makes the cluster know kinds of Gateway API, such as `v1/httproutes`, and no others of them.
    pub fn install_gateway_api(&self, kinds: &'static [&'static str]) {
        self.lock().gateway = kinds;
    }

    /// Whether the cluster has the kind of a path.
    pub(super) fn knows(&self, path: &str) -> bool {
        if let Some(kind) = path.strip_prefix(GATEWAY) {
            return self.lock().gateway.contains(&kind);
        }
        let of_istio = [ISTIO, SECURITY];
        let mut of_istio = of_istio.iter().filter_map(|group| path.strip_prefix(group));
        of_istio.next().is_none_or(|rest| {
            let version = rest.split_once('/').map(|(version, _)| version);
            version.is_some() && version == self.lock().istio
        })
    }

    /// Several at once: watchers see nothing before the last is there.
    pub fn apply_all(&self, objects: impl IntoIterator<Item = Value>) -> u64 {
        let version = objects.into_iter().map(|object| self.put(object)).last();
        let version = version.unwrap_or_else(|| self.version());
        self.version.send_replace(version);
        version
    }

    fn put(&self, mut object: Value) -> u64 {
        let kind = object["kind"].as_str().unwrap_or_default();
        let resource = Resource::of_kind(kind).unwrap_or_else(|| panic!("unknown kind: {object}"));
        let mut state = self.lock();
        state.version += 1;
        let version = state.version;
        let fields = object.as_object_mut().expect("an object is a mapping");
        fields.remove("kind");
        fields.remove("apiVersion");
        let metadata = &mut object["metadata"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let name = text(&metadata["name"]);
        assert!(!name.is_empty(), "an object has a name");
        let namespace = match resource {
            Resource::Nodes | Resource::Namespaces => String::new(),
            _ if metadata["namespace"].is_null() => {
                metadata["namespace"] = json!("default");
                "default".to_owned()
            }
            _ => text(&metadata["namespace"]),
        };
        let labels = metadata["labels"].as_object().into_iter().flatten();
        let labels = labels
            .map(|(key, value)| (key.clone(), text(value)))
            .collect();
        metadata["resourceVersion"] = json!(version.to_string());
        if metadata["creationTimestamp"].is_null() {
            metadata["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
        }
        let node = text(&object["spec"]["nodeName"]);
        let object = Arc::new(Object {
            node,
            namespace: namespace.clone(),
            name: name.clone(),
            labels,
            text: object.to_string(),
        });
        let before = state
            .objects
            .insert((resource, namespace, name), Arc::clone(&object));
        state.history.push_back(Arc::new(Change {
            version,
            resource,
            before,
            after: object,
            gone: false,
        }));
        version
    }

    /// Removes an object; its last version, if it was there.
    pub fn delete(&self, resource: Resource, namespace: &str, name: &str) -> Option<u64> {
        let mut state = self.lock();
        let key = (resource, namespace.to_owned(), name.to_owned());
        let before = state.objects.remove(&key)?;
        state.version += 1;
        let version = state.version;
        let mut last: Value = serde_json::from_str(&before.text).expect("it was written here");
        last["metadata"]["resourceVersion"] = json!(version.to_string());
        let after = Arc::new(Object {
            namespace: before.namespace.clone(),
            name: before.name.clone(),
            labels: before.labels.clone(),
            node: before.node.clone(),
            text: last.to_string(),
        });
        state.history.push_back(Arc::new(Change {
            version,
            resource,
            before: Some(before),
            after,
            gone: true,
        }));
        drop(state);
        self.version.send_replace(version);
        Some(version)
    }

    /// Everything, as a manifest (`kind: List`).
    pub fn manifest(&self) -> String {
        let state = self.lock();
        let items = state.objects.iter().map(|((resource, ..), object)| {
            let (kind, version) = resource.types();
            let fields = &object.text[1..];
            format!(r#"{{"kind":"{kind}","apiVersion":"{version}",{fields}"#)
        });
        let items = items.collect::<Vec<_>>().join(",\n");
        format!(r#"{{"kind":"List","apiVersion":"v1","items":[{items}]}}"#)
    }

    /// The version of the last change.
    pub fn version(&self) -> u64 {
        self.lock().version
    }

    /// Forgets history: watches cannot begin before now, and lists that are being paged through
    /// cannot go on.
    pub fn compact(&self) {
        let mut state = self.lock();
        state.compacted = state.version;
        state.history.clear();
        state.pages.clear();
    }

    /// Returns to another state, like a cluster that is restored from a backup.
    pub fn restore(&self, backup: &Self) {
        let backup = backup.lock();
        let mut state = self.lock();
        state.version = backup.version;
        state.objects = backup.objects.clone();
        state.history.clone_from(&backup.history);
        state.compacted = backup.compacted;
        state.pages.clear();
        self.version.send_replace(state.version);
    }

    /// Another cluster in the same state.
    #[must_use]
    pub fn backup(&self) -> Self {
        let backup = Self::default();
        backup.restore(self);
        backup
    }

    /// Notifies of new versions.
    pub(super) fn subscribe(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Changes after a version, at most `limit`; none if they are forgotten.
    pub(super) fn changes(&self, after: u64, limit: usize) -> Option<Vec<Arc<Change>>> {
        let state = self.lock();
        if after < state.compacted {
            return None;
        }
        let start = state.history.partition_point(|c| c.version <= after);
        Some(state.history.range(start..).take(limit).cloned().collect())
    }

    /// The objects of a resource after a key, at a version that a list is being read at, or now, and
    /// no more than `limit` if that is not 0; and the version. None if that version is forgotten.
    pub(super) fn objects(
        &self,
        resource: Resource,
        at: Option<u64>,
        after: Option<&str>,
        selector: &Selector,
        limit: usize,
    ) -> Option<(u64, Vec<Arc<Object>>)> {
        let mut state = self.lock();
        let (version, objects) = match at {
            None => (state.version, state.objects.clone()),
            Some(version) => (version, state.pages.get(&version)?.clone()),
        };
        if limit > 0 {
            state.pages.insert(version, objects.clone());
        }
        drop(state);
        let (namespace, name) = after
            .and_then(|key| key.split_once('/'))
            .unwrap_or_default();
        let from = (resource, namespace.to_owned(), name.to_owned());
        let found = objects
            .range(from.clone()..)
            .take_while(|((of, ..), _)| *of == resource)
            .filter(|(key, _)| after.is_none() || **key != from)
            .map(|(_, object)| object)
            .filter(|object| selector.has(object))
            .take(if limit > 0 { limit } else { usize::MAX })
            .cloned()
            .collect();
        Some((version, found))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
