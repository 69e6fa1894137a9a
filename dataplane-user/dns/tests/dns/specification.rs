//! Kubernetes' specification of DNS-based service discovery, schema 1.1.0: a row for each of its sentences that says
//! something of answers.

use hickory_proto::rr::RecordType::{self, A, AAAA, CNAME, NS, PTR, SOA, SRV, TXT};

use super::{ask, nobody, zone};

/// The section; a name and a type to ask for; the answer.
const TABLE: &[(&str, &str, RecordType, &str)] = &[
    // The hostname of an endpoint is its field, or an identifier that the system gives it.
    (
        "2.1 hostname",
        "my-pet-2.headless.default.svc.cluster.local.",
        A,
        "NoError; A 10.3.0.102",
    ),
    (
        "2.1 hostname",
        "10-3-0-103.headless.default.svc.cluster.local.",
        A,
        "NoError; A 10.3.0.103",
    ),
    // One that has a hostname has no other identifier.
    (
        "2.1 hostname",
        "10-3-0-102.headless.default.svc.cluster.local.",
        A,
        "NXDomain",
    ),
    // Ready, as the slice says: the controller says so of a service with `publishNotReadyAddresses`.
    (
        "2.1 ready",
        "not-ready.headless.default.svc.cluster.local.",
        A,
        "NXDomain",
    ),
    (
        "2.1 ready",
        "tolerated.default.svc.cluster.local.",
        A,
        "NXDomain",
    ),
    (
        "2.1 ready",
        "by-hand.published.default.svc.cluster.local.",
        A,
        "NXDomain",
    ),
    (
        "2.1 ready",
        "published.default.svc.cluster.local.",
        A,
        "NoError; A 10.3.0.120",
    ),
    (
        "2.1 ready",
        "early.published.default.svc.cluster.local.",
        A,
        "NoError; A 10.3.0.120",
    ),
    // All comparisons are case-insensitive.
    (
        "2.1 case",
        "KUBERNETES.Default.SVC.Cluster.LOCAL.",
        A,
        "NoError; A 10.3.0.1",
    ),
    (
        "2.1 case",
        "MY-PET-2.headless.default.svc.cluster.local.",
        A,
        "NoError; A 10.3.0.102",
    ),
    (
        "2.1 case",
        "_HTTPS._TCP.kubernetes.default.svc.cluster.local.",
        SRV,
        "NoError; SRV 0 100 443 kubernetes.default.svc.cluster.local.",
    ),
    // There must be a TXT record with the version of the schema.
    (
        "2.2",
        "dns-version.cluster.local.",
        TXT,
        "NoError; TXT 1.1.0",
    ),
    // A record for each of the cluster IPs' families.
    (
        "2.3.1 A",
        "kubernetes.default.svc.cluster.local.",
        A,
        "NoError; A 10.3.0.1",
    ),
    (
        "2.3.1 AAAA",
        "kubernetes.default.svc.cluster.local.",
        AAAA,
        "NoError; AAAA 2001:db8::1",
    ),
    // For a family without addresses: no records, and no error.
    ("2.3.1", "plain.default.svc.cluster.local.", AAAA, "NoError"),
    // For each port in the Service with a name and a protocol, an SRV record.
    (
        "2.3.2",
        "_https._tcp.kubernetes.default.svc.cluster.local.",
        SRV,
        "NoError; SRV 0 100 443 kubernetes.default.svc.cluster.local.",
    ),
    (
        "2.3.2",
        "_dns._udp.kubernetes.default.svc.cluster.local.",
        SRV,
        "NoError; SRV 0 100 53 kubernetes.default.svc.cluster.local.",
    ),
    (
        "2.3.2",
        "_https._udp.kubernetes.default.svc.cluster.local.",
        SRV,
        "NXDomain",
    ),
    // Unnamed ports do not have an SRV record.
    (
        "2.3.2 unnamed",
        "_._tcp.plain.default.svc.cluster.local.",
        SRV,
        "NXDomain",
    ),
    (
        "2.3.2 unnamed",
        "_tcp.plain.default.svc.cluster.local.",
        SRV,
        "NXDomain",
    ),
    // A PTR record for each cluster IP.
    (
        "2.3.3 v4",
        "1.0.3.10.in-addr.arpa.",
        PTR,
        "NoError; PTR kubernetes.default.svc.cluster.local.",
    ),
    (
        "2.3.3 v6",
        "1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.8.b.d.0.1.0.0.2.ip6.arpa.",
        PTR,
        "NoError; PTR kubernetes.default.svc.cluster.local.",
    ),
    // An A record for each ready endpoint with an IPv4 address.
    (
        "2.4.1 A",
        "headless.default.svc.cluster.local.",
        A,
        "NoError; A 10.3.0.100; A 10.3.0.101; A 10.3.0.102; A 10.3.0.103",
    ),
    // If there are no ready endpoints, the answer should be NXDOMAIN.
    (
        "2.4.1 A",
        "waiting.default.svc.cluster.local.",
        A,
        "NXDomain",
    ),
    // For each ready endpoint with a hostname, one for each of its addresses.
    (
        "2.4.1 A hostname",
        "my-pet.headless.default.svc.cluster.local.",
        A,
        "NoError; A 10.3.0.100; A 10.3.0.101",
    ),
    // An AAAA record for each ready endpoint with an IPv6 address.
    (
        "2.4.1 AAAA",
        "headless.default.svc.cluster.local.",
        AAAA,
        "NoError; AAAA 2001:db8::100; AAAA 2001:db8::103",
    ),
    (
        "2.4.1 AAAA",
        "waiting.default.svc.cluster.local.",
        AAAA,
        "NXDomain",
    ),
    (
        "2.4.1 AAAA hostname",
        "my-pet.headless.default.svc.cluster.local.",
        AAAA,
        "NoError; AAAA 2001:db8::100",
    ),
    (
        "2.4.1 AAAA hostname",
        "2001-db8--103.headless.default.svc.cluster.local.",
        AAAA,
        "NoError; AAAA 2001:db8::103",
    ),
    // For each combination of a ready endpoint and a named port, an SRV record: N endpoints, M ports, N times M.
    (
        "2.4.2",
        "_https._tcp.headless.default.svc.cluster.local.",
        SRV,
        "NoError; SRV 0 100 8443 10-3-0-103.headless.default.svc.cluster.local.; \
         SRV 0 100 8443 2001-db8--103.headless.default.svc.cluster.local.; \
         SRV 0 100 8443 my-pet-2.headless.default.svc.cluster.local.; \
         SRV 0 100 8443 my-pet.headless.default.svc.cluster.local.",
    ),
    (
        "2.4.2",
        "_dns._udp.headless.default.svc.cluster.local.",
        SRV,
        "NoError; SRV 0 100 53 10-3-0-103.headless.default.svc.cluster.local.; \
         SRV 0 100 53 my-pet-2.headless.default.svc.cluster.local.; \
         SRV 0 100 53 my-pet.headless.default.svc.cluster.local.",
    ),
    // Unnamed ports do not have one.
    (
        "2.4.2 unnamed",
        "_._tcp.published.default.svc.cluster.local.",
        SRV,
        "NXDomain",
    ),
    // A PTR record for each ready endpoint.
    (
        "2.4.3 v4",
        "100.0.3.10.in-addr.arpa.",
        PTR,
        "NoError; PTR my-pet.headless.default.svc.cluster.local.",
    ),
    (
        "2.4.3 v6",
        "0.0.1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.8.b.d.0.1.0.0.2.ip6.arpa.",
        PTR,
        "NoError; PTR my-pet.headless.default.svc.cluster.local.",
    ),
    // Not of one that is not ready: resolvers are asked.
    (
        "2.4.3",
        "104.0.3.10.in-addr.arpa.",
        PTR,
        "ask 104.0.3.10.in-addr.arpa.",
    ),
    // A CNAME record for a service with an external name, which is chased for other types.
    (
        "2.5",
        "foo.default.svc.cluster.local.",
        CNAME,
        "NoError; CNAME www.example.com.",
    ),
    (
        "2.5",
        "foo.default.svc.cluster.local.",
        A,
        "ask www.example.com.",
    ),
    (
        "2.5",
        "inner.default.svc.cluster.local.",
        A,
        "NoError; CNAME kubernetes.default.svc.cluster.local.; kubernetes.default.svc.cluster.local. A 10.3.0.1",
    ),
    (
        "2.5",
        "inner.default.svc.cluster.local.",
        AAAA,
        "NoError; CNAME kubernetes.default.svc.cluster.local.; kubernetes.default.svc.cluster.local. AAAA 2001:db8::1",
    ),
    // An A record for any address in a pod's name.
    (
        "2.6",
        "10-244-1-8.default.pod.cluster.local.",
        A,
        "NoError; A 10.244.1.8",
    ),
    (
        "2.6",
        "0-0-0-255.shop.pod.cluster.local.",
        A,
        "NoError; A 0.0.0.255",
    ),
    (
        "2.6",
        "10-244-1-256.default.pod.cluster.local.",
        A,
        "NXDomain",
    ),
];

/// Cases that the specification leaves open, as CoreDNS 1.15 answers: a description, a name and a type to ask for, and the answer.
const DEPLOYED: &[(&str, &str, RecordType, &str)] = &[
    // Peers of a database look for each other at the service's own name.
    (
        "SRV at a headless service",
        "headless.default.svc.cluster.local.",
        SRV,
        "NoError; SRV 0 100 53 10-3-0-103.headless.default.svc.cluster.local.; \
         SRV 0 100 53 my-pet-2.headless.default.svc.cluster.local.; \
         SRV 0 100 53 my-pet.headless.default.svc.cluster.local.; \
         SRV 0 100 8443 10-3-0-103.headless.default.svc.cluster.local.; \
         SRV 0 100 8443 2001-db8--103.headless.default.svc.cluster.local.; \
         SRV 0 100 8443 my-pet-2.headless.default.svc.cluster.local.; \
         SRV 0 100 8443 my-pet.headless.default.svc.cluster.local.",
    ),
    (
        "SRV at a headless service, unnamed port",
        "published.default.svc.cluster.local.",
        SRV,
        "NoError; SRV 0 100 443 early.published.default.svc.cluster.local.",
    ),
    (
        "SRV at an endpoint",
        "my-pet-2.headless.default.svc.cluster.local.",
        SRV,
        "NoError; SRV 0 100 53 my-pet-2.headless.default.svc.cluster.local.; \
         SRV 0 100 8443 my-pet-2.headless.default.svc.cluster.local.",
    ),
    (
        "SRV at a service",
        "plain.default.svc.cluster.local.",
        SRV,
        "NoError; SRV 0 100 80 plain.default.svc.cluster.local.",
    ),
    (
        "one hostname of both families",
        "dual.shop.svc.cluster.local.",
        SRV,
        "NoError; SRV 0 100 5432 db-0.dual.shop.svc.cluster.local.",
    ),
    // Two pods of the host's network.
    (
        "two endpoints of one address",
        "real.shop.svc.cluster.local.",
        SRV,
        "NoError; SRV 0 100 8080 real-0.real.shop.svc.cluster.local.; \
         SRV 0 100 8081 real-1.real.shop.svc.cluster.local.",
    ),
    (
        "two endpoints of one address",
        "_db._tcp.real.shop.svc.cluster.local.",
        SRV,
        "NoError; SRV 0 100 8080 real-0.real.shop.svc.cluster.local.; \
         SRV 0 100 8081 real-1.real.shop.svc.cluster.local.",
    ),
    (
        "two endpoints of one address",
        "real.shop.svc.cluster.local.",
        A,
        "NoError; A 192.0.2.60",
    ),
    (
        "two endpoints of one address",
        "real-0.real.shop.svc.cluster.local.",
        A,
        "NoError; A 192.0.2.60",
    ),
    (
        "two endpoints of one address",
        "real-1.real.shop.svc.cluster.local.",
        A,
        "NoError; A 192.0.2.60",
    ),
    (
        "two endpoints of one address",
        "60.2.0.192.in-addr.arpa.",
        PTR,
        "NoError; PTR real-0.real.shop.svc.cluster.local.; PTR real-1.real.shop.svc.cluster.local.",
    ),
    // Endpoints of a service that is not headless.
    (
        "endpoints of a service",
        "web-0.web.shop.svc.cluster.local.",
        A,
        "NoError; A 10.3.0.141",
    ),
    (
        "endpoints of a service",
        "10-3-0-142.web.shop.svc.cluster.local.",
        A,
        "NoError; A 10.3.0.142",
    ),
    (
        "endpoints of a service",
        "10-3-0-141.web.shop.svc.cluster.local.",
        A,
        "NXDomain",
    ),
    (
        "endpoints of a service",
        "142.0.3.10.in-addr.arpa.",
        PTR,
        "NoError; PTR 10-3-0-142.web.shop.svc.cluster.local.",
    ),
    (
        "endpoints of a service",
        "web-0.web.shop.svc.cluster.local.",
        SRV,
        "NoError; SRV 0 100 3868 web-0.web.shop.svc.cluster.local.; \
         SRV 0 100 8080 web-0.web.shop.svc.cluster.local.",
    ),
    (
        "SCTP",
        "_diameter._sctp.web.shop.svc.cluster.local.",
        SRV,
        "NoError; SRV 0 100 3868 web.shop.svc.cluster.local.",
    ),
    // Services that any proxy serves.
    (
        "another proxy's",
        "theirs.shop.svc.cluster.local.",
        A,
        "NoError; A 10.3.0.30",
    ),
    (
        "another proxy's",
        "_http._tcp.theirs.shop.svc.cluster.local.",
        SRV,
        "NoError; SRV 0 100 80 theirs.shop.svc.cluster.local.",
    ),
    (
        "another proxy's",
        "30.0.3.10.in-addr.arpa.",
        PTR,
        "NoError; PTR theirs.shop.svc.cluster.local.",
    ),
    (
        "another proxy's",
        "peer-0.their-peers.shop.svc.cluster.local.",
        A,
        "NoError; A 10.3.0.160",
    ),
    // Any form of an address is understood.
    (
        "labels of addresses",
        "2001-db8-0-0-0-0-0-103.headless.default.svc.cluster.local.",
        AAAA,
        "NoError; AAAA 2001:db8::103",
    ),
    (
        "labels of addresses",
        "103.0.3.10.in-addr.arpa.",
        PTR,
        "NoError; PTR 10-3-0-103.headless.default.svc.cluster.local.",
    ),
    (
        "the zone itself",
        "cluster.local.",
        SOA,
        "NoError; SOA ns.dns.cluster.local. hostmaster.cluster.local. 1 7200 1800 86400 5",
    ),
    (
        "the zone itself",
        "cluster.local.",
        NS,
        "NoError; NS kube-dns.kube-system.svc.cluster.local.",
    ),
    ("the zone itself", "cluster.local.", A, "NoError"),
    (
        "the zone itself",
        "ns.dns.cluster.local.",
        A,
        "NoError; A 10.3.0.10",
    ),
];

#[test]
fn every_sentence_has_its_answer() {
    let (zone, client) = (zone(), nobody());
    let mut wrong = Vec::new();
    for (section, name, of_type, wanted) in TABLE.iter().chain(DEPLOYED) {
        let told = ask(&zone, &client, name, *of_type).text(name);
        if told != *wanted {
            wrong.push(format!(
                "{section}: {name} {of_type}: {told}\n    wanted: {wanted}"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn srv_records_come_with_their_addresses() {
    let (zone, client) = (zone(), nobody());
    for (name, wanted) in [
        (
            "_https._tcp.kubernetes.default.svc.cluster.local.",
            "10.3.0.1 2001:db8::1",
        ),
        (
            "_dns._udp.headless.default.svc.cluster.local.",
            "10.3.0.100 10.3.0.101 10.3.0.102 10.3.0.103",
        ),
    ] {
        let super::Reply::Answer(message) = ask(&zone, &client, name, SRV) else {
            panic!("{name}");
        };
        let mut found: Vec<_> = message
            .additionals
            .iter()
            .map(|of| of.data.to_string())
            .collect();
        found.sort();
        assert_eq!(found.join(" "), wanted, "{name}");
    }
}

/// A client that gets aliases without an address looks no further for this name (NODATA).
#[test]
fn aliases_that_lead_round_are_no_failure() {
    let (zone, client) = (zone(), nobody());
    let text = ask(&zone, &client, "circle.default.svc.cluster.local.", A).text("");
    assert!(text.starts_with("NoError; circle"), "{text}");
    assert!(!text.contains(" A "), "{text}");
}

/// A strict resolver keeps no negative answer whose SOA record is not above the name (RFC 2308).
#[test]
fn a_negative_answer_has_a_soa_record_of_its_own_zone() {
    let (zone, client) = (zone(), nobody());
    for (name, of_type, owner) in [
        ("1.0.3.10.in-addr.arpa.", A, "in-addr.arpa."),
        (
            "1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.8.b.d.0.1.0.0.2.ip6.arpa.",
            A,
            "ip6.arpa.",
        ),
        ("none.shop.svc.cluster.local.", A, "cluster.local."),
    ] {
        let super::Reply::Answer(message) = ask(&zone, &client, name, of_type) else {
            panic!("{name}");
        };
        let owners = message.authorities.iter().map(|of| of.name.to_string());
        assert_eq!(owners.collect::<Vec<_>>(), [owner], "{name}");
    }
}

#[test]
fn a_label_with_dots_is_no_address() {
    let zone = zone();
    let labels = [&b"10.244.1.8"[..], b"shop", b"pod", b"cluster", b"local"];
    let name = dataplane_dns::LowerName::of_labels(labels.into_iter()).unwrap();
    let meaning = zone.meaning(&name, || "");
    assert!(
        matches!(meaning, dataplane_dns::Meaning::Missing),
        "{meaning:?}"
    );
}
