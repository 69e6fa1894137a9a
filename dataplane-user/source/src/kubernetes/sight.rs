//! The conditions on which this node's view of objects depends.

use std::sync::Arc;

use model::Node;

/// The conditions on which the view of all objects depends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Perspective {
    /// This node with the facts of its object. `None`: the object is not known yet.
    pub node: Option<Arc<Node>>,
    /// Whether the pods of all nodes are read, instead of those of this node.
    pub everywhere: bool,
}

/// The part of a [`Perspective`] that concerns one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KindPerspective {
    /// This node. For slices, with the facts of its object.
    pub node: Arc<Node>,
    /// Whether the pods of all nodes are read.
    pub everywhere: bool,
    /// See [`WantedKinds::names`](super::WantedKinds::names).
    pub names: bool,
}
