//! The index of names follows the snapshot.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use model::{
    Named, Names, Place, Published, Records, Service, ServiceName, ServiceType, Snapshot,
    TrafficPolicy, Workload, WorkloadName,
};
use proptest::prelude::*;
use smallvec::SmallVec;

fn addr(last: u8) -> IpAddr {
    [10, 0, 0, last].into()
}

fn service(number: u8, addrs: &BTreeSet<u8>, headless: bool) -> Service {
    let endpoint = |last: &u8| Published {
        addr: addr(*last),
        hostname: "".into(),
        ports: [].into(),
    };
    Service {
        name: ServiceName::new("shop", &format!("web-{number}")),
        kind: ServiceType::ClusterIp,
        created: None,
        cluster_ips: addrs
            .iter()
            .filter(|_| !headless)
            .map(|last| addr(*last))
            .collect(),
        external_ips: SmallVec::new(),
        load_balancer_ips: SmallVec::new(),
        source_ranges: SmallVec::new(),
        affinity: None,
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Cluster,
        health_check_node_port: None,
        aside: Vec::new(),
        records: if headless {
            Records::Object(Box::new(Named {
                headless,
                endpoints: addrs.iter().map(endpoint).collect(),
                ..Named::default()
            }))
        } else {
            Records::ClusterIps
        },
        ports: SmallVec::new(),
    }
}

fn snapshots() -> impl Strategy<Value = Vec<Snapshot>> {
    let addrs = || proptest::collection::btree_set(0..12_u8, 0..3);
    let services = proptest::collection::btree_map(0..6_u8, (addrs(), any::<bool>()), 0..6);
    let workloads = proptest::collection::btree_map(0..6_u8, 0..12_u8, 0..6);
    let snapshot = (services, workloads).prop_map(|(services, workloads)| {
        let services = services.into_iter();
        let services =
            services.map(|(number, (addrs, headless))| service(number, &addrs, headless));
        let workload = |(number, last): (u8, u8)| {
            let name = WorkloadName::new("shop", &format!("pod-{number}"));
            let mut workload = Workload::new(name.clone(), Place::Address);
            workload.addresses.push(addr(last));
            (name, Arc::new(workload))
        };
        Snapshot {
            services: services.map(|of| (of.name.clone(), Arc::new(of))).collect(),
            workloads: workloads.into_iter().map(workload).collect(),
            ..Snapshot::default()
        }
    });
    proptest::collection::vec(snapshot, 1..8)
}

proptest! {
    #[test]
    fn after_any_changes_it_is_what_a_new_one_would_be(snapshots in snapshots()) {
        let mut names = Names::default();
        for snapshot in &snapshots {
            names.follow(snapshot);
            for last in 0..12 {
                let found: BTreeSet<_> = names.of_address(addr(last)).map(|of| of.name.clone()).collect();
                let has = |of: &Service| {
                    let mut endpoints = of.records.published().iter();
                    of.cluster_ips.contains(&addr(last)) || endpoints.any(|e| e.addr == addr(last))
                };
                let services = snapshot.services.values();
                let wanted = services.filter(|of| has(of)).map(|of| of.name.clone());
                prop_assert_eq!(found, wanted.collect::<BTreeSet<_>>());
                // Of two pods with one address for a moment, either may be meant.
                let has = |of: &&Arc<Workload>| of.addresses.contains(&addr(last));
                let wanted: Vec<_> = snapshot.workloads.values().filter(has).map(|of| &of.name).collect();
                match names.client(addr(last)) {
                    Some(found) => prop_assert!(wanted.contains(&&found.name)),
                    None => prop_assert!(wanted.is_empty()),
                }
            }
        }
    }
}
