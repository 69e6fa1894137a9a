//! Waypoints, as far as captured workloads of this node concern them.

use std::collections::BTreeSet;

use model::Snapshot;

use super::{
    Member,
    istio::is_carried,
    named::{NAMED, named},
};

/// Returns a text for each namespace whose labels name waypoints through which no connection can go, so that the proxy refuses the
/// connections, or makes them go past the waypoint: first the namespaces of captured workloads. `foreign`: whether the proxy is not the agent's.
pub fn unusable_waypoints(snapshot: &Snapshot, members: &[Member], foreign: bool) -> Vec<String> {
    let members = members.iter();
    let sent = members
        .filter(|of| is_carried(&of.workload, &of.policy, foreign) && of.is_sent_to_waypoints());
    let own: BTreeSet<&str> = sent.map(|of| of.workload.name.namespace()).collect();
    if own.is_empty() {
        return Vec::new();
    }
    let workloads = snapshot.workloads.values().map(|of| &**of);
    let found = snapshot.istio.unusable_waypoints(workloads, NAMED[0] + 1);
    let effect = if snapshot.istio.passes {
        "mesh.withoutWaypoint is pass, so connections go past waypoints (istio.io/use-waypoint) that cannot be used"
    } else {
        "the proxy refuses connections to what has a waypoint (istio.io/use-waypoint) that cannot be used"
    };
    let texts = named(found, &own, "; ").map(|(_, lines)| format!("{effect}: {lines}"));
    texts.collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use model::{
        Gateway, GatewayAddress, IstioNamespace, Layers, Mode, Place, Rules, ServiceName, Snapshot,
        UseWaypoint, Workload, WorkloadName,
    };

    use super::{
        super::{MeshStatements, limited, members},
        *,
    };

    /// A tenant whose labels name many waypoints leaves others their lines, also those of Pods.
    #[test]
    fn each_namespace_names_a_few_of_its_waypoints() {
        let gate = |namespace: &str, n: u32| {
            UseWaypoint::Gateway(ServiceName::new(namespace, &format!("gate{n:03}")))
        };
        let mut snapshot = Snapshot::default();
        snapshot.istio.waypoints = true;
        let labels = (0..1000).map(|n| (Arc::from(format!("Service s{n}")), gate("aaa", n)));
        let of = IstioNamespace {
            labels: labels.collect(),
            ..IstioNamespace::default()
        };
        let many = Arc::from("aaa");
        snapshot.istio.namespaces.insert(many, Arc::new(of));
        let own = Rules {
            captured: Some(true),
            mode: Some(Mode::Proxy),
            ..Rules::default()
        };
        let pods = (0..200).map(|n| (format!("ns{n:03}"), Some(gate("far", n))));
        let pods = pods.chain([
            ("shop".to_owned(), Some(gate("shop", 0))),
            ("shop".to_owned(), None),
        ]);
        for (n, (namespace, waypoint)) in pods.enumerate() {
            let pod = Workload {
                account: "web".into(),
                waypoint,
                rules: Arc::new(Layers {
                    own: if namespace == "shop" {
                        own.clone()
                    } else {
                        Rules::default()
                    },
                    ..Layers::default()
                }),
                ..Workload::new(
                    WorkloadName::new(&namespace, &format!("pod{n}")),
                    Place::Address,
                )
            };
            snapshot.workloads.insert(pod.name.clone(), Arc::new(pod));
        }
        let said = MeshStatements {
            tunnels: true,
            ..MeshStatements::default()
        };
        let members = members(&said, &snapshot);
        let texts = unusable_waypoints(&snapshot, &members, false);
        assert_eq!(texts.len(), NAMED[1]);
        let missing = "the Gateway does not exist, or cannot be read (WaypointBound=False, WaypointIsNotReady)";
        let first = format!("shop/gate000, which a Pod of namespace shop names: {missing}");
        assert!(texts[0].ends_with(&format!(": {first}")), "{}", texts[0]);
        let lines: Vec<_> = texts[1].split("; ").collect();
        assert_eq!(lines.len(), NAMED[0] + 1, "{}", texts[1]);
        assert!(lines[0].contains("which namespace aaa names") && lines[5] == "others");
        assert!(texts[2].contains("far/gate000, which a Pod of namespace ns000 names"));
        snapshot.istio.passes = true;
        let passed = unusable_waypoints(&snapshot, &members, false);
        let past = "connections go past waypoints (istio.io/use-waypoint) that cannot be used: ";
        assert!(
            passed[0].ends_with(&format!("{past}{first}")),
            "{}",
            passed[0]
        );
        assert!(texts[0].starts_with("the proxy refuses connections"));
        // A usable one is not named.
        let gateway = Gateway {
            for_services: false,
            for_workloads: true,
            addresses: [GatewayAddress::Service(ServiceName::new("shop", "gate"))].into(),
            ..Gateway::default()
        };
        let name = ServiceName::new("shop", "gate000");
        snapshot.istio.gateways.insert(name, Arc::new(gateway));
        let texts = unusable_waypoints(&snapshot, &members, false);
        assert!(texts.iter().all(|text| !text.contains("shop/")));
        assert!(unusable_waypoints(&snapshot, &[], false).is_empty());
    }

    /// Without tunnels, and for what goes past the proxy, the agent says that a waypoint has no effect.
    #[test]
    fn a_waypoint_is_named_if_connections_go_past_it_or_cannot_reach_it() {
        let gate = || Some(UseWaypoint::Gateway(ServiceName::new("shop", "gate")));
        for (mode, tunnels, account, waypoint, wanted) in [
            (Mode::Proxy, false, "web", gate(), [true, true, false]),
            (Mode::Proxy, true, "web", gate(), [false, false, true]),
            (Mode::Auto, true, "web", gate(), [false, false, true]),
            (Mode::Kernel, true, "web", gate(), [false, true, false]),
            (Mode::Proxy, true, "", gate(), [false, true, false]),
            (
                Mode::Proxy,
                true,
                "web",
                Some(UseWaypoint::None),
                [false; 3],
            ),
            (
                Mode::Proxy,
                false,
                "web",
                Some(UseWaypoint::None),
                [false; 3],
            ),
            (Mode::Proxy, false, "web", None, [false; 3]),
        ] {
            let own = Rules {
                captured: Some(true),
                mode: Some(mode),
                ..Rules::default()
            };
            let pod = Workload {
                account: account.into(),
                waypoint: waypoint.clone(),
                rules: Arc::new(Layers {
                    own,
                    ..Layers::default()
                }),
                ..Workload::new(WorkloadName::new("shop", "web"), Place::Address)
            };
            let mut snapshot = Snapshot::default();
            snapshot.workloads.insert(pod.name.clone(), Arc::new(pod));
            snapshot.istio.waypoints = tunnels;
            let of = IstioNamespace {
                waypoint,
                ..IstioNamespace::default()
            };
            snapshot
                .istio
                .namespaces
                .insert("shop".into(), Arc::new(of));
            let said = MeshStatements {
                tunnels,
                ..MeshStatements::default()
            };
            let members = members(&said, &snapshot);
            let istio = &snapshot.istio;
            let unusable = unusable_waypoints(&snapshot, &members, false);
            let found = [
                !members[0].ineffective.is_empty(),
                !limited(istio, &members, false).is_empty(),
                !unusable.is_empty(),
            ];
            assert_eq!(found, wanted, "{mode:?} {tunnels} {account} {unusable:?}");
        }
    }
}
