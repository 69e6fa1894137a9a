//! Who is captured on this node, and by which rules.

use std::{collections::BTreeMap, sync::Arc};

use super::{
    Member,
    budgets::{ROOM, over_budget, without_lists},
    statements::statements,
};
use crate::model::{Layers, Place, Rules, Snapshot, Workload, WorkloadName};

/// What the node's configuration says of capture. Each layer has the name that people know it by.
#[derive(Clone, Debug, Default)]
pub struct Said {
    /// Workloads by their names; whether they are among the source's or not.
    pub workloads: Vec<(String, Rules, Workload)>,
    /// Rules of namespaces, by their names.
    pub namespaces: BTreeMap<String, (String, Rules)>,
    /// Rules for everybody, the most specific first.
    pub all: Vec<(String, Rules)>,
}

/// Everybody on this node who is to be captured, with all rules that there are for them.
pub fn members(said: &Said, snapshot: &Snapshot) -> Vec<Member> {
    members_within(said, snapshot, ROOM)
}

/// The same, with so much room in `RULES` and `RANGES`.
pub(super) fn members_within(said: &Said, snapshot: &Snapshot, room: [u64; 2]) -> Vec<Member> {
    let mut workloads: BTreeMap<&WorkloadName, Arc<Workload>> = snapshot
        .workloads
        .iter()
        .map(|(name, workload)| (name, Arc::clone(workload)))
        .collect();
    for (_, _, described) in &said.workloads {
        workloads
            .entry(&described.name)
            .or_insert_with(|| Arc::new(described.clone()));
    }
    let captured = |workload: Arc<Workload>, over_budget| {
        let layers = layers(said, &workload, over_budget);
        let general = layers.iter().rev();
        let rules = general.fold(Rules::default(), |general, (_, rules)| rules.over(&general));
        Some(Member {
            policy: rules.policy()?,
            rules: statements(&layers),
            workload,
            over_budget,
        })
    };
    let mut members: Vec<Member> = workloads
        .into_values()
        .filter(|workload| workload.place != Place::Elsewhere)
        .filter_map(|workload| captured(workload, false))
        .collect();
    for index in over_budget(&members, room) {
        let workload = Arc::clone(&members[index].workload);
        members[index] = captured(workload, true).expect("whether it is captured does not change");
    }
    members
}

/// Who says what of a workload, the most specific first. `over_budget`: without the lists of those who are not the
/// configuration.
fn layers(said: &Said, workload: &Workload, over_budget: bool) -> Vec<(String, Rules)> {
    let name = &workload.name;
    let mut layers = Vec::new();
    let mut named = said.workloads.iter();
    if let Some((by, rules, _)) = named.find(|(_, _, known)| known.name == *name) {
        let mut rules = rules.clone();
        // To be named is to be captured.
        rules.captured = rules.captured.or(Some(true));
        layers.push((by.clone(), rules));
    }
    let of_object = |rules: &Rules| {
        if over_budget {
            without_lists(rules)
        } else {
            rules.clone()
        }
    };
    let Layers { own, namespace } = &*workload.rules;
    layers.push((format!("Pod {name}"), of_object(own)));
    layers.push((
        format!("Namespace {}", name.namespace()),
        of_object(namespace),
    ));
    layers.extend(said.namespaces.get(name.namespace()).cloned());
    layers.extend(said.all.iter().cloned());
    layers
}
