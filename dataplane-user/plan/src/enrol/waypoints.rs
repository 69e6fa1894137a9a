//! Waypoints, as far as captured workloads of this node concern them.

use model::Istio;

use super::{
    Member,
    istio::{NAMED, is_carried},
};

/// Returns a text that names waypoints through which no connection can go, so that the proxy refuses the connections.
/// `foreign`: whether the proxy is not the agent's.
pub fn unusable_waypoints(istio: &Istio, members: &[Member], foreign: bool) -> Option<String> {
    let mut members = members.iter();
    let is_any = members
        .any(|of| is_carried(&of.workload, &of.policy, foreign) && of.is_sent_to_waypoints());
    let mut lines = istio.unusable_waypoints().into_iter().filter(|_| is_any);
    let named: Vec<_> = lines.by_ref().take(NAMED[0]).collect();
    let others = lines.next().map_or("", |_| "; and others");
    (!named.is_empty()).then(|| {
        let named = named.join("; ");
        format!(
            "the proxy refuses connections to what has a waypoint (istio.io/use-waypoint) that cannot be used: {named}{others}"
        )
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use model::{
        IstioNamespace, Layers, Mode, Place, Rules, ServiceName, Snapshot, UseWaypoint, Workload,
        WorkloadName,
    };

    use super::{
        super::{MeshStatements, limited, members},
        *,
    };

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
            let unusable = unusable_waypoints(istio, &members, false);
            let found = [
                !members[0].ineffective.is_empty(),
                !limited(istio, &members, false).is_empty(),
                unusable.is_some(),
            ];
            assert_eq!(found, wanted, "{mode:?} {tunnels} {account} {unusable:?}");
        }
    }
}
