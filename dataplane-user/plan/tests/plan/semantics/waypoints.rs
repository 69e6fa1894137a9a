//! Services with a waypoint.

use super::*;

/// Returns the addresses whose port 80 captured workloads may not connect to.
fn refused(node: &Node1) -> String {
    let keys = node.planner.frontends().into_iter();
    let refused = keys.filter(|(_, frontend)| decide::is_refused(&node.sim, *frontend));
    let addresses = refused.map(|(key, _)| key.addr.ip().to_string());
    addresses.collect::<Vec<_>>().join(" ")
}

/// Each change of a label is planned, as by an agent that starts then or that adopts the tables, and nothing but the
/// frontends that the Service has won is refused.
#[test]
fn services_with_a_waypoint_are_refused_at_the_keys_that_they_have_won() {
    let other = |name: &str, cluster_ip: &str, external_ip: &str| {
        let mut service = service(name, &[cluster_ip], &["10.0.0.1"]);
        service.name = ServiceName::new("other", name);
        service.external_ips = ips(&[external_ip]);
        service
    };
    let mut entry = service("serviceentry:web:a.example", &[], &["10.0.0.9"]);
    (entry.kind, entry.external_ips) = (ServiceType::Entry, ips(&["198.51.100.9"]));
    let mut of_host = service("web:host", &[], &["10.0.0.9"]);
    (of_host.kind, of_host.external_ips) = (ServiceType::HostPort, ips(&["192.0.2.9"]));
    let mut last = snapshot([
        service("web", &["10.96.0.1"], &["10.0.0.1", "10.0.0.2 local"]),
        service("web-2", &["10.96.0.2"], &["10.0.0.2"]),
        other("taker", "10.96.0.7", "10.96.0.1"),
        other("free", "10.96.0.8", "203.0.113.8"),
        entry,
        of_host,
    ]);
    let mut node = Node1::default();
    // Each line has labels of objects of namespace `test`, or of a Namespace, and the addresses that are refused. Another
    // tenant claims the cluster IP of `web`; host ports never have a waypoint.
    let cases = "
        =>
        Service web=gate => 10.96.0.1
        test=gate, Service web=none => 10.96.0.2 198.51.100.9
        test=gate, Service web=none, ServiceEntry web=none => 10.96.0.2
        test=gate, ServiceEntry web=none => 10.96.0.1 10.96.0.2
        Service web=none =>
        other=gate => 10.96.0.7 10.96.0.8 203.0.113.8
        =>
        ServiceEntry web=gate => 198.51.100.9
        warn, test=gate, other=gate =>
        Service web=gate => 10.96.0.1";
    for case in cases.lines().skip(1) {
        let (labels, wanted) = case.split_once("=>").unwrap();
        last.istio.namespaces.clear();
        for (label, value) in labels.split(',').filter_map(|label| label.split_once('=')) {
            let label = label.trim();
            let gate = UseWaypoint::Gateway(ServiceName::new("test", "gate"));
            let used = (value.trim() == "gate").then_some(gate);
            let namespace = if label == "other" { label } else { "test" };
            let of = last.istio.namespaces.entry(namespace.into()).or_default();
            let of = Arc::make_mut(of);
            match label {
                "test" | "other" => of.waypoint = used,
                _ => {
                    let used = used.unwrap_or(UseWaypoint::None);
                    of.labels.insert(label.into(), used);
                }
            }
        }
        let denies = !labels.contains("warn");
        let restarts = last.istio.denies != denies;
        last.istio.denies = denies;
        if restarts {
            node.planner = Planner::adopt(node.sim.contents()).unwrap();
        }
        node.plan(&last);
        let mut fresh = Node1::default();
        fresh.plan(&last);
        for node in [&node, &fresh] {
            assert_eq!(refused(node), wanted.trim(), "{case}");
        }
    }
}

/// Each line has what the namespace's waypoint is for, and the addresses whose connections go to the proxy because of it.
/// Each change is planned, as by an agent that starts then or that adopts the tables.
#[test]
fn services_with_a_waypoint_are_reached_through_the_proxy() {
    let of = IstioNamespace {
        waypoint: Some(UseWaypoint::Gateway(ServiceName::new("other", "gate"))),
        labels: [(Arc::from("Service free"), UseWaypoint::None)]
            .into_iter()
            .collect(),
        ..IstioNamespace::default()
    };
    // Keys of both kinds of policies.
    let web = Service {
        internal_policy: TrafficPolicy::Local,
        external_ips: ips(&["192.0.2.1"]),
        ..service("web", &["10.96.0.1"], &["10.0.0.1 local"])
    };
    let mut last = snapshot([web, service("free", &["10.96.0.2"], &["10.0.0.2"])]);
    last.istio.namespaces.insert("test".into(), Arc::new(of));
    // The endpoint of the service is a Pod that speaks HBONE itself.
    let pod = Workload {
        addresses: ips(&["10.0.0.1"]),
        speaks_hbone: true,
        ..Workload::new(WorkloadName::new("test", "web-1"), Place::Elsewhere)
    };
    last.reachable = Some(Arc::default());
    last.workloads.insert(pod.name.clone(), Arc::new(pod));
    let mut node = Node1::default();
    for (on, traffic, wanted) in [
        (false, "", ""),
        (true, "", "10.96.0.1 192.0.2.1"),
        (true, "workload", ""),
        (true, "service", "10.96.0.1 192.0.2.1"),
        (true, "none", ""),
        (true, "all", "10.96.0.1 192.0.2.1"),
        (false, "all", ""),
    ] {
        let name = ServiceName::new("other", "gate");
        let restarts = last.istio.waypoints != on;
        last.istio.waypoints = on;
        last.istio.gateways.clear();
        if !traffic.is_empty() {
            let gateway = Gateway {
                for_services: ["service", "all"].contains(&traffic),
                for_workloads: ["workload", "all"].contains(&traffic),
                addresses: Box::default(),
                ..Gateway::default()
            };
            last.istio.gateways.insert(name, Arc::new(gateway));
        }
        if restarts {
            node.planner = Planner::adopt(node.sim.contents()).unwrap();
        }
        node.plan(&last);
        let mut fresh = Node1::default();
        fresh.plan(&last);
        for node in [&node, &fresh] {
            let flags = |frontend: &Frontend| {
                let pool = node.sim.pool(frontend.pool()).unwrap();
                pool.block.flags() & (Block::HBONE | Block::WAYPOINT)
            };
            let keys = node.planner.frontends().into_iter();
            let found = keys.filter(|(key, _)| key.port == Port::new(80));
            let found = found.filter(|(_, of)| flags(of) == Block::HBONE | Block::WAYPOINT);
            let found: Vec<_> = found.map(|(key, _)| key.addr.ip().to_string()).collect();
            assert_eq!(found.join(" "), wanted, "{on} {traffic}");
        }
    }
}
