//! The objects of a kind that this node reads.

use std::sync::Arc;

use kube::core::params::{ListParams, WatchParams};
use model::Node;

use super::Kind;

/// The label selector that kube-proxy uses, too: without services of other proxies, and without headless services.
const OURS: &str = "!service.kubernetes.io/headless,!service.kubernetes.io/service-proxy-name";
/// Number of objects in one page of a list. The text of a whole page is in memory while it is read.
const PAGE: u32 = 500;
/// The same for Istio's policies, whose rules may be long. Their first list comes in pages, too.
const PAGE_OF_POLICIES: u32 = 50;

/// The part of a [`Perspective`](super::Perspective) that concerns one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KindPerspective {
    /// This node. For slices, with the facts of its object.
    pub node: Arc<Node>,
    /// Whether the pods of all nodes are read.
    pub everywhere: bool,
    /// See [`WantedKinds::names`](super::WantedKinds::names).
    pub names: bool,
}

impl KindPerspective {
    /// Returns the parameters of a list.
    pub fn list(&self, kind: Kind) -> ListParams {
        let page = if kind.is_policy() {
            PAGE_OF_POLICIES
        } else {
            PAGE
        };
        ListParams {
            label_selector: self.labels(kind).map(str::to_owned),
            field_selector: self.fields(kind),
            ..ListParams::default().limit(page)
        }
    }

    /// Returns the parameters of a watch.
    pub fn watch(&self, kind: Kind) -> WatchParams {
        WatchParams {
            label_selector: self.labels(kind).map(str::to_owned),
            field_selector: self.fields(kind),
            ..WatchParams::default()
        }
    }

    /// Returns the label selector of the objects to read. `None`: all objects. Names do not depend on the proxy, so
    /// with names no service is left out.
    fn labels(&self, kind: Kind) -> Option<&'static str> {
        (matches!(kind, Kind::Service | Kind::Slice) && !self.names).then_some(OURS)
    }

    /// Returns the field selector of the objects to read. `None`: all objects. It selects the objects of this node,
    /// because a cluster has many others.
    fn fields(&self, kind: Kind) -> Option<String> {
        let field = match kind {
            Kind::Pod if !self.everywhere => "spec.nodeName",
            Kind::Node => "metadata.name",
            _ => return None,
        };
        Some(format!("{field}={}", self.node.name))
    }
}
