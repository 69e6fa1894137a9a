//! Problems of the stored objects, of kinds and of this node.

use model::{Gravity, Problem, ServiceName};

use super::{
    super::{Kind, Object},
    PROBLEMS, Store,
};
use crate::objects::NodeFacts;

impl Store {
    /// Records that a kind cannot be read, or can be read again.
    pub(super) fn refuse(&mut self, kind: Kind, why: Option<String>) {
        self.changed = true;
        let key = (kind, no_object());
        let Some(why) = why else {
            self.refused.remove(&kind);
            self.problems.remove(&key);
            return;
        };
        self.refused.insert(kind);
        let without = if self.listed.contains(&kind) && !self.missing.contains(&kind) {
            "the agent serves the state that it read before, without later changes"
        } else {
            kind.without().unwrap_or_default()
        };
        let problem = Problem {
            gravity: Gravity::Warning,
            place: "the Kubernetes API".to_owned(),
            text: format!("{kind} cannot be read, so that {without}: {why}"),
        };
        self.problems.insert(key, vec![problem]);
    }

    /// Records that this node's own object does not exist.
    pub(super) fn missing_node(&mut self) {
        self.facts = NodeFacts::of_no_object();
        let text = if self.node_seen {
            "the Node was deleted from the cluster while the agent runs: services are served on, \
             without its zone, and no new endpoint counts as local"
        } else if self.base.name_given {
            "the cluster has no Node of this name, so its zone is not known and no endpoint counts \
             as local: either the kubelet has not registered it yet, or --node-name is not its name"
        } else {
            "the cluster has no Node of this name, which is the machine's host name, so its zone is \
             not known and no endpoint counts as local: give the Node's name with --node-name, \
             or wait if the kubelet has not registered the Node yet"
        };
        let problem = Problem {
            gravity: Gravity::Place,
            place: format!("Node {}", self.base.name),
            text: text.to_owned(),
        };
        self.note_node(Some(problem));
    }

    /// Replaces the problem of this node's own object.
    pub fn note_node(&mut self, problem: Option<Problem>) {
        let name = ServiceName::new("", &self.base.name);
        self.changed |= self.note((Kind::Node, name), problem.into_iter().collect());
    }

    /// Records the problems of an object. Returns whether they have changed.
    pub(super) fn found(&mut self, object: &Object) -> bool {
        let Object {
            kind,
            name,
            file,
            findings,
            ..
        } = object;
        if *kind == Kind::Node {
            self.problems.retain(|(of, _), _| *of != Kind::Node);
        }
        let problem = |gravity, text| Problem {
            gravity,
            place: place(*kind, name, file.as_deref()),
            text,
        };
        let faults = findings.faults.iter().map(|(field, text)| {
            let text = format!("{field}: {text}; it stays as it was before, if it was ever served");
            problem(Gravity::NotFollowed, text)
        });
        let notes = findings.notes.iter();
        let notes =
            notes.map(|(field, text)| problem(Gravity::Warning, format!("{field}: {text}")));
        let mut problems: Vec<_> = faults.chain(notes).take(PROBLEMS).collect();
        let more = (findings.faults.len() + findings.notes.len()).saturating_sub(PROBLEMS);
        if more > 0 {
            let gravity = if findings.faults.len() > PROBLEMS {
                Gravity::NotFollowed
            } else {
                Gravity::Warning
            };
            problems.push(problem(gravity, format!("and {more} more")));
        }
        self.note((*kind, name.clone()), problems)
    }

    /// Replaces the problems of an object. Returns whether they have changed.
    fn note(&mut self, key: (Kind, ServiceName), problems: Vec<Problem>) -> bool {
        let known = self.problems.get(&key).map(Vec::as_slice);
        if known.unwrap_or_default() == problems {
            return false;
        }
        if problems.is_empty() {
            self.problems.remove(&key);
        } else {
            self.problems.insert(key, problems);
        }
        true
    }
}

/// Returns the place of an object's problem.
pub(super) fn place(kind: Kind, name: &ServiceName, file: Option<&str>) -> String {
    match file {
        None => kind.label(name),
        Some(file) if name.name().is_empty() => file.to_owned(),
        Some(file) => format!("{file}: {}", kind.label(name)),
    }
}

/// Stands for an object's name in problems of a kind.
fn no_object() -> ServiceName {
    ServiceName::new("", "")
}
