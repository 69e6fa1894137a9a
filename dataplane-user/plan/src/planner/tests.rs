//! When a service waits for room, and what stays of it.

use std::net::IpAddr;

use dataplane_common::tables::Block;
use model::{Place, Protocol, ServicePort, ServiceType, TrafficPolicy, Workload, WorkloadName};

use super::{super::mirror::Slot, *};

/// A service with a cluster IP, an external IP (0: none) and so many endpoints.
fn web(cluster_ip: u8, external_ip: u8, endpoints: u8) -> Service {
    let endpoint = |n| model::Endpoint::new([10, 0, 0, n].into(), 8080);
    let port = ServicePort {
        endpoints: (1..=endpoints).map(endpoint).collect(),
        ..ServicePort::new(80, Protocol::Tcp)
    };
    let external_ips = [external_ip].into_iter().filter(|ip| *ip != 0);
    Service {
        cluster_ips: [[10, 96, 0, cluster_ip].into()].into_iter().collect(),
        external_ips: external_ips.map(|ip| [192, 0, 2, ip].into()).collect(),
        ports: [port].into(),
        ..Service::new(ServiceName::new("shop", "web"), ServiceType::LoadBalancer)
    }
}

fn snapshot(service: &Service) -> Snapshot {
    let services = [(service.name.clone(), Arc::new(service.clone()))];
    Snapshot {
        reachable: Some(Arc::default()),
        services: services.into_iter().collect(),
        ..Snapshot::default()
    }
}

/// Live and retired slots, pools and retired pools, and whether a grace period is worthwhile.
#[test]
fn an_eighth_of_a_table_may_be_retired() {
    for (live, slots, pools, retired, wanted) in [
        (0, 1024, 1, 1024, false),
        (0, 1025, 1, 0, true),
        (0, 0, 1, 1025, true),
        (16_384, 2048, 16_384, 2048, false),
        (16_384, 2049, 16_384, 0, true),
        (16_384, 0, 16_384, 2049, true),
    ] {
        let mut planner = Planner::new();
        planner.mirror.live_slots = live;
        planner.mirror.retired_slots = slots;
        planner.mirror.pools = vec![Slot::default(); pools];
        planner.mirror.retired_pools = vec![0; retired];
        assert_eq!(
            planner.wants_room(),
            wanted,
            "{live} {slots} {pools} {retired}"
        );
    }
}

/// Whether a service is served already, room for keys and slots, what is left out, and whether there is room: the service has
/// two keys, and 17 endpoints, which take 32 slots.
#[test]
fn a_service_without_room_waits_unless_the_tables_have_it() {
    for (is_served, keys, slots, left, wanted) in [
        (false, 2, 64, None, true),
        (false, 1, 64, None, false),
        (false, 2, 16, None, false),
        (false, 2, 16, Some(LeftOut::Endpoints), true),
        (true, 2, 64, None, true),
        (true, 2, 32, None, false),
    ] {
        let service = web(1, 0, 17);
        let mut planner = Planner::new();
        if is_served {
            planner.plan(&snapshot(&service));
        }
        planner.budgets = Budgets::of(Room {
            frontends: keys,
            endpoints: slots,
            ..Room::default()
        });
        let mut wanted_keys = Vec::new();
        wanted::keys(&service, &mut wanted_keys);
        let dirty = Dirty {
            name: service.name.clone(),
            old: None,
            cost: wanted::cost(&service, &wanted_keys),
            new: Some(Arc::new(service)),
        };
        let before = planner.services.remove(&dirty.name).unwrap_or_default();
        let held = planner.mirror.keys.len();
        let writes = Writes::default();
        let found = planner.has_room(&dirty, left, held, &before, &wanted_keys, &writes);
        assert_eq!(found, wanted, "{is_served} {keys} {slots} {left:?}");
    }
}

/// Policies inside and for clients from outside, the cluster IP and external IP that the service is to have instead of 1 and 1,
/// and whether the pools of all endpoints and of the local ones stay until it has them, with their flags.
#[test]
fn a_service_that_waits_keeps_the_pools_to_which_its_keys_lead() {
    use TrafficPolicy::{Cluster, Local};
    for (inside, outside, cluster_ip, external_ip, wanted) in [
        (Cluster, Cluster, 1, 1, [true, false]),
        (Cluster, Cluster, 2, 2, [false, false]),
        (Cluster, Local, 1, 1, [true, true]),
        (Cluster, Local, 2, 2, [false, false]),
        (Local, Cluster, 1, 1, [true, true]),
        (Local, Cluster, 1, 2, [true, true]),
        (Local, Cluster, 2, 1, [true, false]),
    ] {
        let mut service = web(1, 1, 2);
        service.internal_policy = inside;
        service.external_policy = outside;
        let mut planner = Planner::new();
        let mut now = snapshot(&service);
        planner.plan(&now);
        // Meanwhile an endpoint speaks HBONE, and the service has a waypoint.
        let pod = Workload {
            addresses: [IpAddr::from([10, 0, 0, 1])].into_iter().collect(),
            speaks_hbone: true,
            ..Workload::new(WorkloadName::new("shop", "web-1"), Place::Elsewhere)
        };
        now.workloads.insert(pod.name.clone(), Arc::new(pod));
        planner.reach.update(&planner.last, &now);
        let flags = Block::HBONE | Block::WAYPOINT;
        let after = Service {
            cluster_ips: web(cluster_ip, external_ip, 2).cluster_ips,
            external_ips: web(cluster_ip, external_ip, 2).external_ips,
            ..service
        };
        let mut keys = Vec::new();
        wanted::keys(&after, &mut keys);
        let before = planner.services.remove(&after.name).unwrap();
        let mut writes = Writes::default();
        planner.wait(&after, flags, &keys, before, &mut writes);
        assert!(planner.is_waiting());
        let kept = planner.services.remove(&after.name).unwrap_or_default();
        let case = format!("{inside:?} {outside:?} {cluster_ip} {external_ip}");
        assert_eq!(kept.address != 0, cluster_ip == 1, "{case}");
        let pools = kept.ports.iter().map(|(.., [v4, _])| *v4).next();
        let pools = pools.unwrap_or_default();
        assert_eq!(
            [pools.cluster, pools.local].map(|of| of != 0),
            wanted,
            "{case}"
        );
        for index in kept.indices() {
            let (pool, _) = planner.pool(index).expect("it stays");
            assert_eq!(pool.block.flags() & flags, flags, "{case}");
        }
    }
}
