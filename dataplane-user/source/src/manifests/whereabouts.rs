//! Checks whether manifests know this node.

use std::collections::BTreeSet;

use model::{Gravity, Node, Problem};

use crate::objects::Slice;

/// Maximum number of names that are shown as examples.
const SHOWN: usize = 3;

/// The nodes that manifests name.
#[derive(Default)]
pub struct Whereabouts {
    /// Whether an endpoint or a pod is on this node.
    pub here: bool,
    /// The first names of other nodes with an object, and the number of such nodes.
    nodes: (BTreeSet<String>, usize),
    /// Another node that an endpoint is on.
    elsewhere: Option<String>,
}

impl Whereabouts {
    /// Records the object of another node.
    pub fn node(&mut self, name: &str) {
        let (names, count) = &mut self.nodes;
        *count += 1;
        names.insert(name.to_owned());
        if names.len() > SHOWN {
            names.pop_last();
        }
    }

    /// Records a slice, and another node that one of its endpoints is on.
    pub fn slice(&mut self, slice: &Slice, elsewhere: Option<&str>) {
        self.here |= slice.endpoints.iter().any(|endpoint| endpoint.local);
        if self.elsewhere.is_none() {
            self.elsewhere = elsewhere.map(str::to_owned);
        }
    }

    /// Returns a problem if no object mentions this node, because the node may have another name. A name from the
    /// operator is trusted if the manifests have no Nodes.
    pub fn problem(&self, node: &Node) -> Option<Problem> {
        let (names, count) = &self.nodes;
        let example = if self.here {
            return None;
        } else if *count > 0 {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let more = if *count > names.len() { ", …" } else { "" };
            format!("their Nodes are {}{more}", names.join(", "))
        } else if node.name_given {
            return None;
        } else {
            let other = self.elsewhere.as_ref()?;
            format!("an endpoint is on {}, for one", other.escape_debug())
        };
        let whose = if node.name_given {
            "the name that --node-name gives"
        } else {
            "the machine's host name"
        };
        Some(Problem {
            gravity: Gravity::Place,
            place: format!("Node {}", node.name),
            text: format!(
                "nothing in the manifests is on a node of this name, which is {whose}, so no endpoint \
                 counts as local ({example}): give the Node's name with --node-name"
            ),
        })
    }
}
