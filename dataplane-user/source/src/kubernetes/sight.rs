//! What decides how objects look to this node.

use std::sync::Arc;

use model::Node;

/// What decides how things look, and which of them are looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Perspective {
    /// This node as its object has it; none: that is not known yet.
    pub node: Option<Arc<Node>>,
    /// Whether the pods of all nodes are wanted, rather than those of this one.
    pub everywhere: bool,
}

/// [`Perspective`], as far as it concerns one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KindPerspective {
    /// This node: for slices, as its object has it.
    pub node: Arc<Node>,
    /// Whether the pods of all nodes are looked at.
    pub everywhere: bool,
    /// As [`WantedKinds::names`](super::WantedKinds::names).
    pub names: bool,
}
