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
