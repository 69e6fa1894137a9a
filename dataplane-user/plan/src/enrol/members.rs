//! Selects the workloads on this node that are captured, with their rules.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use model::{
    CapturedBy, Egress, Exempt, Layers, Mode, Place, Rules, Snapshot, UseWaypoint, Workload,
    WorkloadName,
};

use super::{
    Auto, Member,
    bounds::Bounds,
    budgets::{ROOM, over_budget, without_lists},
    istio::{is_carried, is_judged_by_proxy, limits, may_be_refused},
    plain::{Judge, is_judged_by_kernel},
    statements::statements,
};

/// The problem of a workload whose inbound connections pass no program that could refuse them.
const NOT_REFUSED: &str = "Istio's policies limit connections to the Pod, and mesh.unsupported: deny does not refuse \
     them, because the Pod is captured by its packets; use NetworkPolicies, or capturedBy: sockets";

/// The node's configuration of capture. Each layer has a name for people.
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a choice of the configuration"
)]
#[derive(Clone, Debug, Default)]
pub struct MeshStatements {
    /// Workloads that the configuration names, whether the source has them or not.
    pub workloads: Vec<(String, Rules, Workload)>,
    /// Rules of namespaces, by their names.
    pub namespaces: BTreeMap<String, (String, Rules)>,
    /// Rules of namespaces that labels and annotations cannot change.
    pub enforced_in: BTreeMap<String, (String, Rules)>,
    /// Namespaces whose pods are never captured.
    pub excluded_namespaces: BTreeSet<String>,
    /// Rules for all workloads that labels and annotations cannot change.
    pub enforced: (String, Rules),
    /// Rules for all workloads, the most specific first.
    pub all: Vec<(String, Rules)>,
    /// Whether each workload has its own proxy beside it. A workload that declares a sidecar can then be captured.
    pub sidecars: bool,
    /// Whether the agent's proxy makes and accepts tunnels.
    pub tunnels: bool,
    /// Whether only queries are captured, because the configuration has no mesh.
    pub without_mesh: bool,
    /// Whether queries of workloads are captured whose connections are not.
    pub all_queries: bool,
}

/// Returns all workloads on this node that are to be captured, with their rules.
pub fn members(said: &MeshStatements, snapshot: &Snapshot) -> Vec<Member> {
    members_again(said, snapshot, &mut Judge::default())
}

/// As [`members`], without repeating the decisions of the last call.
pub fn members_again(said: &MeshStatements, snapshot: &Snapshot, judge: &mut Judge) -> Vec<Member> {
    members_within(said, snapshot, ROOM, judge)
}

/// As [`members_again`], with `room` entries in `RULES` and `RANGES`.
pub(super) fn members_within(
    said: &MeshStatements,
    snapshot: &Snapshot,
    room: [u64; 2],
    judge: &mut Judge,
) -> Vec<Member> {
    judge.turn();
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
    let istio = &snapshot.istio;
    let mut captured = |workload: Arc<Workload>, over_budget| {
        let Layered {
            layers,
            mut ineffective,
            bounds,
            by_sidecar,
        } = layers(said, &workload, over_budget);
        let general = layers.iter().rev();
        let rules = general.fold(Rules::default(), |general, (_, rules)| rules.over(&general));
        let policy = rules.policy().filter(|_| !said.without_mesh);
        let Some(mut policy) = policy else {
            // The agent knows the resolv.conf only of a pod with a network namespace of its own.
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
                    auto: None,
                    limited_by: Vec::new(),
                    by_kernel: false,
                    closed: None,
                });
        };
        let denied_by_operator = bounds.stated.egress == Some(Egress::Deny);
        bounds.judge(&mut policy);
        let has_sidecar = workload.place == Place::Exempt(Exempt::Sidecar);
        let workload = judged(&workload, &bounds, by_sidecar);
        let workload = unless_excluded(said, workload);
        let is_auto = policy.mode == Mode::Auto
            && said.tunnels
            && workload.place == Place::Address
            && !workload.account.is_empty();
        if is_auto {
            policy.mode = Mode::Proxy;
        }
        let (mut limited_by, mut by_kernel, mut closed) = (Vec::new(), false, None);
        if is_carried(&workload, &policy, said.sidecars) {
            let mut refused;
            by_kernel = !has_sidecar && is_judged_by_kernel(&workload, &policy);
            let is_enforced = by_kernel || is_judged_by_proxy(&workload, &policy);
            (limited_by, refused) = limits(istio, &workload, is_enforced);
            if by_kernel {
                closed = judge.judge(istio, &workload, &mut policy, over_budget);
                ineffective.extend(closed.map(str::to_owned));
            }
            if policy.captured_by == CapturedBy::Packets && refused.is_any() && istio.denies {
                ineffective.push(NOT_REFUSED.to_owned());
            }
            if over_budget {
                refused.others = refused.is_any();
                refused.ports.clear();
            }
            policy.refused = istio.denies.then(|| Box::new(refused));
        }
        Some(Member {
            policy,
            rules: statements(&layers),
            over_budget,
            ineffective,
            denied_by_operator,
            auto: is_auto.then(|| Auto {
                plain_to_proxy: may_be_refused(istio, &workload),
            }),
            limited_by,
            by_kernel,
            closed,
            workload,
        })
    };
    let mut members: Vec<Member> = workloads
        .into_values()
        .filter(|workload| workload.is_here())
        .filter_map(|workload| captured(workload, false))
        .collect();
    for index in over_budget(&members, room) {
        let workload = Arc::clone(&members[index].workload);
        members[index] = captured(workload, true).expect("whether it is captured does not change");
    }
    members
}

/// The rules of a workload.
struct Layered {
    /// The layers with their names, the most specific first.
    layers: Vec<(String, Rules)>,
    /// Reasons why labels or annotations have no effect.
    ineffective: Vec<String>,
    bounds: Bounds,
    /// Whether the configuration makes the workload's sidecar its proxy.
    by_sidecar: bool,
}

/// Collects the layers of a workload. `over_budget`: lists of labels and annotations are left out.
fn layers(said: &MeshStatements, workload: &Workload, over_budget: bool) -> Layered {
    let name = &workload.name;
    let mut above = Vec::new();
    let mut named = said.workloads.iter();
    let named = named.find(|(_, _, known)| known.name == *name);
    if let Some((by, rules, _)) = named {
        let mut rules = rules.clone();
        // A workload that the configuration names is captured.
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
    let waypoint = workload.waypoint.as_ref().and_then(UseWaypoint::gateway);
    if let Some(waypoint) = waypoint.filter(|_| !said.tunnels) {
        ineffective.push(format!(
            "label istio.io/use-waypoint: {} of the Pod has no effect: without mesh.identity, connections go past the waypoint, \
             and no rule of it holds",
            waypoint.name().escape_debug()
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

/// Returns the workload as it is captured. A workload that declares a proxy of its own is not captured. There are two
/// exceptions: the configuration names it and makes that proxy its proxy, or the configuration denies it egress. In the
/// second case its connections go directly, as far as that policy allows them.
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

/// Returns a pod as exempt if the configuration excludes its namespace.
fn unless_excluded(said: &MeshStatements, workload: Arc<Workload>) -> Arc<Workload> {
    let may_be_captured = matches!(
        workload.place,
        Place::Address | Place::Exempt(Exempt::Sidecar)
    );
    let namespace = workload.name.namespace();
    if !may_be_captured || !said.excluded_namespaces.contains(namespace) {
        return workload;
    }
    Arc::new(Workload {
        place: Place::Exempt(Exempt::Namespace),
        ..(*workload).clone()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each line has the place of a pod in an excluded namespace, and whether the configuration names the pod or denies it
    /// egress. Nothing captures the pod. A workload in a cgroup is not a pod.
    #[test]
    fn no_rule_captures_a_pod_of_an_excluded_namespace() {
        let excluded = Place::Exempt(Exempt::Namespace);
        let sidecar = Place::Exempt(Exempt::Sidecar);
        let of_host = Place::Exempt(Exempt::HostNetwork);
        let cgroup = Place::Cgroup("kubelet".into());
        for (place, is_named, egress, wanted) in [
            (Place::Address, false, Egress::Allow, &excluded),
            (Place::Address, true, Egress::Deny, &excluded),
            (sidecar.clone(), false, Egress::Allow, &excluded),
            (sidecar, true, Egress::Deny, &excluded),
            (of_host.clone(), false, Egress::Allow, &of_host),
            (cgroup.clone(), true, Egress::Allow, &cgroup),
        ] {
            let pod = |namespace: &str| {
                let name = WorkloadName::new(namespace, "dns");
                Workload::new(name, place.clone())
            };
            let named = ["kube-system", "shop"].map(|namespace| {
                let by = "mesh.workloads".to_owned();
                (by, Rules::default(), pod(namespace))
            });
            let all = Rules {
                captured: Some(true),
                egress: Some(egress),
                ..Rules::default()
            };
            let said = MeshStatements {
                workloads: named.into_iter().filter(|_| is_named).collect(),
                excluded_namespaces: ["kube-system".to_owned()].into(),
                enforced: ("mesh.enforced".to_owned(), all),
                ..MeshStatements::default()
            };
            let pods = ["kube-system", "shop"].map(pod);
            let pods = pods.map(|pod| (pod.name.clone(), Arc::new(pod)));
            let snapshot = Snapshot {
                workloads: pods.into_iter().collect(),
                ..Snapshot::default()
            };
            let found = members(&said, &snapshot);
            let places = [0, 1].map(|of| &found[of].workload.place);
            assert_eq!(places[0], wanted, "{place:?}");
            assert_ne!(places[1], &excluded, "{place:?}");
        }
    }

    /// A pod that declares a sidecar: whether the sidecar is its proxy, and in which mode.
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

    /// Each line has the mode, whether there are tunnels, the service account, how the workload is captured, and then the mode
    /// that results and whether only connections to destinations that speak HBONE go to the proxy.
    #[test]
    fn auto_uses_the_proxy_if_it_makes_tunnels_for_the_workload() {
        let (sockets, packets) = (CapturedBy::Sockets, CapturedBy::Packets);
        for (mode, tunnels, account, by, wanted) in [
            (None, true, "web", sockets, (Mode::Proxy, true)),
            (None, true, "web", packets, (Mode::Proxy, true)),
            (None, true, "", sockets, (Mode::Auto, false)),
            (None, false, "web", sockets, (Mode::Auto, false)),
            (Some(Mode::Auto), true, "web", sockets, (Mode::Proxy, true)),
            (
                Some(Mode::Proxy),
                true,
                "web",
                sockets,
                (Mode::Proxy, false),
            ),
            (
                Some(Mode::Kernel),
                true,
                "web",
                sockets,
                (Mode::Kernel, false),
            ),
        ] {
            let pod = Workload {
                account: account.into(),
                ..Workload::new(WorkloadName::new("shop", "web"), Place::Address)
            };
            let all = Rules {
                captured: Some(true),
                captured_by: Some(by),
                mode,
                ..Rules::default()
            };
            let said = MeshStatements {
                all: vec![("mesh.rules".to_owned(), all)],
                tunnels,
                ..MeshStatements::default()
            };
            let mut snapshot = Snapshot {
                workloads: [(pod.name.clone(), Arc::new(pod))].into_iter().collect(),
                ..Snapshot::default()
            };
            for unread in [false, true] {
                snapshot.istio.unread = unread;
                let found = members(&said, &snapshot).pop().unwrap();
                assert!(found.auto.is_none_or(|auto| auto.plain_to_proxy == unread));
                let found = (found.policy.mode, found.auto.is_some());
                assert_eq!(found, wanted, "{mode:?} {tunnels} {account} {by:?}");
            }
        }
    }

    /// Returns the pods that are members, and whether only their queries are captured.
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
