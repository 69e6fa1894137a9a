//! Who is captured on this node, and by which rules.

use std::{collections::BTreeMap, sync::Arc};

use model::{Egress, Exempt, Layers, Mode, Place, Rules, Snapshot, Workload, WorkloadName};

use super::{
    Member,
    bounds::Bounds,
    budgets::{ROOM, over_budget, without_lists},
    statements::statements,
};

/// What the node's configuration says of capture. Each layer has the name that people know it by.
#[derive(Clone, Debug, Default)]
pub struct MeshStatements {
    /// Workloads by their names; whether they are among the source's or not.
    pub workloads: Vec<(String, Rules, Workload)>,
    /// Rules of namespaces, by their names.
    pub namespaces: BTreeMap<String, (String, Rules)>,
    /// Rules of namespaces that labels and annotations do not change.
    pub enforced_in: BTreeMap<String, (String, Rules)>,
    /// Such rules for everybody.
    pub enforced: (String, Rules),
    /// Rules for everybody, the most specific first.
    pub all: Vec<(String, Rules)>,
    /// Whether the proxy is each workload's own, beside it: a workload that says so can be captured.
    pub sidecars: bool,
    /// Whether only queries are captured, because no mesh is configured.
    pub without_mesh: bool,
    /// Whether the queries of workloads are captured whose connections are not.
    pub all_queries: bool,
}

/// Everybody on this node who is to be captured, with all rules that there are for them.
pub fn members(said: &MeshStatements, snapshot: &Snapshot) -> Vec<Member> {
    members_within(said, snapshot, ROOM)
}

/// The same, with so much room in `RULES` and `RANGES`.
pub(super) fn members_within(
    said: &MeshStatements,
    snapshot: &Snapshot,
    room: [u64; 2],
) -> Vec<Member> {
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
        let Layered {
            layers,
            ineffective,
            bounds,
            by_sidecar,
        } = layers(said, &workload, over_budget);
        let general = layers.iter().rev();
        let rules = general.fold(Rules::default(), |general, (_, rules)| rules.over(&general));
        let policy = rules.policy().filter(|_| !said.without_mesh);
        let Some(mut policy) = policy else {
            // Only a pod with a network namespace of its own has a resolv.conf that is known.
            let is_asked = said.all_queries && workload.place == Place::Address;
            return is_asked
                .then(|| rules.policy_of_queries())
                .flatten()
                .map(|policy| Member {
                    policy,
                    rules: Vec::new(),
                    workload,
                    over_budget,
                    ineffective: Vec::new(),
                    denied_by_operator: false,
                });
        };
        let denied_by_operator = bounds.stated.egress == Some(Egress::Deny);
        bounds.judge(&mut policy);
        Some(Member {
            policy,
            rules: statements(&layers),
            workload: judged(&workload, &bounds, by_sidecar),
            over_budget,
            ineffective,
            denied_by_operator,
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

/// What is said of a workload.
struct Layered {
    /// Who says what, the most specific first.
    layers: Vec<(String, Rules)>,
    /// Why something has no effect that labels and annotations say.
    ineffective: Vec<String>,
    bounds: Bounds,
    /// Whether the configuration has its own sidecar be its proxy.
    by_sidecar: bool,
}

/// `over_budget`: without the lists of those who are not the configuration.
fn layers(said: &MeshStatements, workload: &Workload, over_budget: bool) -> Layered {
    let name = &workload.name;
    let mut above = Vec::new();
    let mut named = said.workloads.iter();
    let named = named.find(|(_, _, known)| known.name == *name);
    if let Some((by, rules, _)) = named {
        let mut rules = rules.clone();
        // To be named is to be captured.
        rules.captured = rules.captured.or(Some(true));
        above.push((by.clone(), rules));
    }
    above.extend(said.enforced_in.get(name.namespace()).cloned());
    above.push(said.enforced.clone());
    let mut below = Vec::new();
    below.extend(said.namespaces.get(name.namespace()).cloned());
    below.extend(said.all.iter().cloned());
    let all = |layers: &[(String, Rules)], general: &Rules| {
        let layers = layers.iter().rev();
        layers.fold(general.clone(), |general, (_, rules)| rules.over(&general))
    };
    let bounds = Bounds {
        stated: all(&above, &all(&below, &Rules::default())),
        enforced: all(&above, &Rules::default()),
    };
    let mut ineffective = Vec::new();
    let Layers { own, namespace } = &*workload.rules;
    let of_namespace = Rules {
        captured: namespace.captured.filter(|_| own.captured.is_none()),
        ..namespace.clone()
    };
    let of_exempt = Rules {
        mode: Some(Mode::Kernel),
        ..Rules::default()
    };
    let waypoint = own.waypoint.as_ref().map(|waypoint| ("Pod", waypoint));
    let waypoint = waypoint.or(namespace.waypoint.as_ref().map(|of| ("Namespace", of)));
    if let Some((by, waypoint)) = waypoint.filter(|(_, waypoint)| ***waypoint != *"none") {
        ineffective.push(format!(
            "label istio.io/use-waypoint: {} of the {by} has no effect: connections go past the waypoint, and no rule of it              holds",
            waypoint.escape_debug()
        ));
    }
    let mut layers = above;
    let by_sidecar = said.sidecars && named.is_some();
    if workload.place == Place::Exempt(Exempt::Sidecar) && !by_sidecar {
        layers.push(("sidecar.istio.io/status".to_owned(), of_exempt));
    }
    for (by, rules) in [
        (format!("Pod {name}"), own),
        (format!("Namespace {}", name.namespace()), &of_namespace),
    ] {
        let (rules, texts) = bounds.bind(&by, rules);
        ineffective.extend(texts);
        let rules = if over_budget {
            without_lists(&rules)
        } else {
            rules
        };
        layers.push((by, rules));
    }
    layers.extend(below);
    Layered {
        layers,
        ineffective,
        bounds,
        by_sidecar,
    }
}

/// The workload, as it is captured. One that says that it has a proxy of its own is not captured, unless the
/// configuration names it and has that proxy be its proxy, or denies it egress: then its connections go directly, as that
/// policy lets them.
fn judged(workload: &Arc<Workload>, bounds: &Bounds, by_sidecar: bool) -> Arc<Workload> {
    let is_captured = bounds.stated.captured == Some(true) && (bounds.denies() || by_sidecar);
    if workload.place != Place::Exempt(Exempt::Sidecar) || !is_captured {
        return Arc::clone(workload);
    }
    Arc::new(Workload {
        place: Place::Address,
        ..(**workload).clone()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pod that says that it has a sidecar: whether that is its proxy, and in which mode.
    #[test]
    fn a_sidecar_is_the_proxy_of_a_workload_that_the_configuration_names() {
        let name = WorkloadName::new("shop", "web");
        let pod = Workload::new(name.clone(), Place::Exempt(Exempt::Sidecar));
        let mut snapshot = Snapshot::default();
        snapshot.workloads.insert(name.clone(), Arc::new(pod));
        let by = |sidecars, is_named: bool| {
            let named = Workload::new(name.clone(), Place::Address);
            let named = ("mesh.workloads".to_owned(), Rules::default(), named);
            let all = Rules {
                captured: Some(true),
                ..Rules::default()
            };
            let said = MeshStatements {
                workloads: is_named.then_some(named).into_iter().collect(),
                all: vec![("mesh.rules".to_owned(), all)],
                sidecars,
                ..MeshStatements::default()
            };
            let found = members(&said, &snapshot);
            (found[0].workload.place.clone(), found[0].policy.mode)
        };
        assert_eq!(by(true, true), (Place::Address, Mode::Auto));
        let exempt = (Place::Exempt(Exempt::Sidecar), Mode::Kernel);
        for (sidecars, is_named) in [(true, false), (false, true), (false, false)] {
            assert_eq!(by(sidecars, is_named), exempt, "{sidecars} {is_named}");
        }
    }

    /// Which pods are members, and whether only their queries are captured.
    fn told(said: &MeshStatements) -> Vec<(String, bool)> {
        let pod = |name: &str, place: Place, own: Rules| {
            let workload = Workload {
                rules: Arc::new(Layers {
                    own,
                    ..Layers::default()
                }),
                ..Workload::new(WorkloadName::new("shop", name), place)
            };
            (workload.name.clone(), Arc::new(workload))
        };
        let captured = |captured| Rules {
            captured,
            ..Rules::default()
        };
        let without_dns = Rules {
            dns: Some(false),
            ..Rules::default()
        };
        let snapshot = Snapshot {
            workloads: [
                pod("ambient", Place::Address, captured(Some(true))),
                pod("denied", Place::Address, captured(Some(false))),
                pod("plain", Place::Address, captured(None)),
                pod("without-dns", Place::Address, without_dns),
                pod("sidecar", Place::Exempt(Exempt::Sidecar), captured(None)),
                pod("elsewhere", Place::Elsewhere, captured(Some(true))),
            ]
            .into_iter()
            .collect(),
            ..Snapshot::default()
        };
        let members = members(said, &snapshot).into_iter();
        let members = members.map(|member| {
            let name = member.workload.name.name().to_owned();
            (name, member.policy.only_queries)
        });
        members.collect()
    }

    #[test]
    fn all_pods_with_a_namespace_of_their_own_are_asked_for_their_queries() {
        let is = |said: &MeshStatements, wanted: &[(&str, bool)]| {
            let wanted = wanted
                .iter()
                .map(|(name, only)| ((*name).to_owned(), *only));
            assert_eq!(told(said), wanted.collect::<Vec<_>>(), "{said:?}");
        };
        is(&MeshStatements::default(), &[("ambient", false)]);
        let all = MeshStatements {
            all_queries: true,
            ..MeshStatements::default()
        };
        let others = [("denied", true), ("plain", true)];
        is(&all, &[&[("ambient", false)][..], &others].concat());
        let alone = MeshStatements {
            without_mesh: true,
            ..all
        };
        is(&alone, &[&[("ambient", true)][..], &others].concat());
    }
}
