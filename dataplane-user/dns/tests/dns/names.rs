//! The index of names follows the snapshot.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use dataplane_dns::{
    LowerName, Transport, Zone,
    answer::{Decision, answer},
    question,
};
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::RecordType,
};
use model::{
    Named, NamedProtocol, Names, Place, Published, PublishedPort, Records, Service, ServiceName,
    ServiceType, Snapshot, Workload, WorkloadName,
};
use proptest::prelude::*;

use crate::{TTLS, nobody};

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
        cluster_ips: addrs
            .iter()
            .filter(|_| !headless)
            .map(|last| addr(*last))
            .collect(),
        records: if headless {
            Records::Object(Box::new(Named {
                headless,
                endpoints: addrs.iter().map(endpoint).collect(),
                ..Named::default()
            }))
        } else {
            Records::ClusterIps
        },
        ..Service::new(
            ServiceName::new("shop", &format!("web-{number}")),
            ServiceType::ClusterIp,
        )
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
                // If two pods have one address for a moment, the answer may be either.
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

/// A message has a cost only for the records that fit into it: here a tenant's service has ten million pairs of an
/// endpoint and a port.
#[test]
fn a_large_service_has_answers_that_fit() {
    let port = |number: u16| PublishedPort {
        name: format!("p{number}").into(),
        protocol: NamedProtocol::Tcp,
        number,
    };
    let ports: Arc<[_]> = (1..=1000).map(port).collect();
    let published = |addr: IpAddr| Published {
        addr,
        hostname: "".into(),
        ports: Arc::clone(&ports),
    };
    let v4 = (0..10_000_u32).map(|n| Ipv4Addr::from_bits(0x0a00_0000 + n).into());
    let v6 = (0..10_000_u128).map(|n| Ipv6Addr::from_bits(0xfd << 120 | n).into());
    let mut large = service(0, &BTreeSet::new(), true);
    large.records = Records::Object(Box::new(Named {
        headless: true,
        endpoints: v4.chain(v6).map(published).collect(),
        ..Named::default()
    }));
    let services = [(large.name.clone(), Arc::new(large))];
    let snapshot = Snapshot {
        services: services.into_iter().collect(),
        whole: true,
        ..Snapshot::default()
    };
    let zone = Zone::new(Names::of(&snapshot), TTLS);
    let asked = |of_type: RecordType| -> BTreeSet<String> {
        let name = LowerName::parse("web-0.shop.svc.cluster.local.").unwrap();
        let query = question(7, &name, of_type.into(), 1, true);
        let (mut out, client) = (Vec::new(), nobody());
        let decision = answer(
            &zone,
            &query,
            Transport::Tcp,
            || client,
            &mut rand::rng(),
            &mut out,
        );
        assert!(matches!(decision, Decision::Answered(_)), "{of_type}");
        let message = Message::from_vec(&out).unwrap();
        assert_eq!(message.metadata.response_code, ResponseCode::NoError);
        let answers = message.answers.iter().map(|of| of.data.to_string());
        answers.collect()
    };
    let srv = asked(RecordType::SRV).len();
    assert!((300..1600).contains(&srv), "{srv} of type SRV");
    for of_type in [RecordType::A, RecordType::AAAA] {
        let mut all = asked(of_type);
        assert!(
            (1000..=4096).contains(&all.len()),
            "{} of type {of_type}",
            all.len()
        );
        // Each endpoint is in some answer.
        for _ in 0..100 {
            all.extend(asked(of_type));
        }
        assert!(all.len() > 9_900, "{} of type {of_type}", all.len());
    }
}
