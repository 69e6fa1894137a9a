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

use crate::{TTLS, ask, cluster, nobody, zone};

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

/// Names between those that have records, and types that a name has no records of.
#[test]
fn names_without_records_exist_or_do_not() {
    use RecordType::{A, AAAA, ANY, CNAME, PTR, SOA, SRV, TXT};
    let (zone, nobody) = (zone(), nobody());
    let (empty, missing) = ("NoError", "NXDomain");
    for (name, of_type, wanted) in [
        ("svc.cluster.local.", A, empty),
        ("pod.cluster.local.", A, empty),
        ("default.svc.cluster.local.", A, empty),
        ("default.pod.cluster.local.", A, empty),
        ("nothing.svc.cluster.local.", A, missing),
        ("nothing.pod.cluster.local.", A, empty),
        ("x.10-1-1-1.default.pod.cluster.local.", A, missing),
        (
            "default.other.cluster.local.",
            A,
            "ask default.other.cluster.local.",
        ),
        ("other.cluster.local.", A, "ask other.cluster.local."),
        ("x.dns.cluster.local.", A, "ask x.dns.cluster.local."),
        ("dns.cluster.local.", A, "ask dns.cluster.local."),
        (
            "x.dns-version.cluster.local.",
            TXT,
            "ask x.dns-version.cluster.local.",
        ),
        ("x.foo.default.svc.cluster.local.", A, missing),
        ("_tcp.kubernetes.default.svc.cluster.local.", SRV, empty),
        ("_udp.headless.default.svc.cluster.local.", SRV, empty),
        ("_sctp.headless.default.svc.cluster.local.", SRV, missing),
        ("_sctp.web.shop.svc.cluster.local.", SRV, empty),
        (
            "_https._tcp.kubernetes.default.svc.cluster.local.",
            A,
            empty,
        ),
        (
            "https._tcp.kubernetes.default.svc.cluster.local.",
            SRV,
            missing,
        ),
        (
            "_dns._tcp.kubernetes.default.svc.cluster.local.",
            SRV,
            missing,
        ),
        (
            "_other._tcp.kubernetes.default.svc.cluster.local.",
            SRV,
            missing,
        ),
        (
            "x._https._tcp.kubernetes.default.svc.cluster.local.",
            SRV,
            missing,
        ),
        ("kubernetes.default.svc.cluster.local.", TXT, empty),
        ("kubernetes.default.svc.cluster.local.", CNAME, empty),
        (
            "_second._tcp.two.default.svc.cluster.local.",
            SRV,
            "NoError; SRV 0 100 2 two.default.svc.cluster.local.",
        ),
        (
            "kubernetes.default.svc.cluster.local.",
            ANY,
            "NoError; A 10.3.0.1; AAAA 2001:db8::1",
        ),
        ("dns-version.cluster.local.", A, empty),
        ("dns-version.cluster.local.", ANY, "NoError; TXT 1.1.0"),
        ("cluster.local.", TXT, empty),
        (
            "inner.default.svc.cluster.local.",
            CNAME,
            "NoError; CNAME kubernetes.default.svc.cluster.local.",
        ),
        ("1.0.3.10.in-addr.arpa.", A, empty),
        (
            "1.0.3.10.in-addr.arpa.",
            ANY,
            "NoError; PTR kubernetes.default.svc.cluster.local.",
        ),
        ("9.9.9.10.in-addr.arpa.", PTR, "ask 9.9.9.10.in-addr.arpa."),
        ("10-244-1-8.default.pod.cluster.local.", AAAA, empty),
        (
            "10-244-1-8.default.pod.cluster.local.",
            ANY,
            "NoError; A 10.244.1.8",
        ),
        ("10.244.1.8.default.pod.cluster.local.", A, missing),
        ("kubernetes.default.svc.cluster.local.", SOA, empty),
    ] {
        assert_eq!(
            ask(&zone, &nobody, name, of_type).text(name),
            wanted,
            "{name} {of_type}"
        );
    }
}

#[test]
fn a_namespace_that_does_not_exist_has_no_names() {
    let namespaces = ["default", "empty"].map(Arc::<str>::from);
    let snapshot = Snapshot {
        namespaces: Some(namespaces.into_iter().collect()),
        ..cluster()
    };
    let (zone, nobody) = (Zone::new(Names::of(&snapshot), TTLS), nobody());
    for (name, wanted) in [
        ("default.svc.cluster.local.", "NoError"),
        ("empty.svc.cluster.local.", "NoError"),
        ("nothing.svc.cluster.local.", "NXDomain"),
        ("empty.pod.cluster.local.", "NoError"),
        ("nothing.pod.cluster.local.", "NXDomain"),
        ("10-1-1-1.empty.pod.cluster.local.", "NoError; A 10.1.1.1"),
        ("10-1-1-1.nothing.pod.cluster.local.", "NXDomain"),
    ] {
        assert_eq!(
            ask(&zone, &nobody, name, RecordType::A).text(name),
            wanted,
            "{name}"
        );
    }
}

/// Without the cluster's domain, resolvers are asked for each name.
#[test]
fn no_domain_is_no_zone() {
    let (zone, name) = (Zone::new(Names::default(), TTLS), "web.shop.svc.");
    let told = ask(&zone, &nobody(), name, RecordType::A);
    assert_eq!(told.text(name), "ask web.shop.svc.");
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
