//! Names of hosts of ServiceEntries: the deciding entry, the clients that see it, and the answer.

use std::{net::SocketAddr, sync::Arc};

use dataplane_dns::{Client, LowerName, Ttls, Zone};
use hickory_proto::rr::RecordType::{self, A, AAAA, ANY, HTTPS, MX};
use model::{Entry, EntryName, EntryResolution, ExportTo, Host, Location, Names, Snapshot};
use plan::entries::Entries;
use proptest::prelude::*;
use smallvec::SmallVec;

use super::{Reply, TTLS, ask, load};

const NOW: u64 = 1_800_000_000;

fn snapshot() -> Snapshot {
    let mut snapshot = load(&["cluster.yaml", "entries.yaml"]);
    let mut entries = Entries::new([]);
    let taken = entries.take(&snapshot.entries, &snapshot.services, &snapshot, NOW);
    snapshot.services = taken.services;
    snapshot.entries = taken.entries;
    snapshot
}

pub(super) fn zone() -> Zone {
    Zone::new(Names::of(&snapshot()), TTLS)
}

/// A pod of a namespace.
fn client(namespace: &str) -> Client {
    let ends = [
        &*format!("{namespace}.svc.cluster.local"),
        "svc.cluster.local",
        "cluster.local",
        "corp.example",
    ];
    let resolver: SocketAddr = "10.96.0.10:53".parse().unwrap();
    Client {
        search: ends
            .iter()
            .filter_map(|end| LowerName::parse(end).ok())
            .collect(),
        ndots: 5,
        resolvers: vec![resolver],
        workload: None,
        namespace: namespace.into(),
    }
}

fn told(zone: &Zone, namespace: &str, name: &str, of_type: RecordType) -> String {
    ask(zone, &client(namespace), name, of_type).text(name)
}

/// The addresses that the node gave to a host, which are none that can be written here.
fn given(zone: &Zone, namespace: &str, name: &str) -> String {
    let (_, host) = zone.names.host(name, namespace, None).unwrap();
    assert_eq!(host.vips.len(), 1);
    assert!(host.vips[0].to_string().starts_with("240.240."), "{host:?}");
    host.vips[0].to_string()
}

#[test]
fn the_entry_that_the_client_sees_decides() {
    let zone = zone();
    let only = given(&zone, "lab", "only.example.org");
    let of_lab = given(&zone, "lab", "api.example.com");
    assert_ne!(only, of_lab);
    for (namespace, name, wanted) in [
        // Its own before an older one; else the oldest that it sees, and of a range only the addresses that are named.
        ("shop", "api.example.com.", "NoError; A 203.0.113.3"),
        ("default", "api.example.com.", "NoError; A 203.0.113.1"),
        ("third", "api.example.com.", "NoError; A 203.0.113.1"),
        ("", "api.example.com.", "NoError; A 203.0.113.1"),
        ("lab", "api.example.com.", &*format!("NoError; A {of_lab}")),
        ("lab", "only.example.org.", &*format!("NoError; A {only}")),
        ("other", "only.example.org.", "ask only.example.org."),
        // From the most to the least specific.
        ("shop", "www.example.com.", "NoError; A 203.0.113.1"),
        ("shop", "a.b.example.com.", "NoError; A 203.0.113.1"),
        ("shop", "a.deep.example.com.", "NoError; A 203.0.113.2"),
        ("shop", "a.b.deep.example.com.", "NoError; A 203.0.113.2"),
        ("shop", "deep.example.com.", "NoError; A 203.0.113.1"),
        ("shop", "example.com.", "ask example.com."),
        ("shop", "notexample.com.", "ask notexample.com."),
        ("shop", "none.example.com.", "ask none.example.com."),
        // The addresses that clients connect to.
        ("shop", "given.example.net.", "NoError; A 240.240.9.9"),
        ("shop", "plain.example.net.", "NoError; A 203.0.113.4"),
        ("shop", "range.example.net.", "ask range.example.net."),
    ] {
        assert_eq!(
            told(&zone, namespace, name, A),
            wanted,
            "{namespace}: {name}"
        );
    }
}

#[test]
fn a_host_has_addresses_and_resolvers_know_the_rest() {
    let zone = zone();
    let db = given(&zone, "shop", "db.example.net");
    for (name, of_type, wanted) in [
        ("DB.Example.NET.", A, &*format!("NoError; A {db}")),
        // Its endpoints have no addresses of this family, and resolvers are not asked for others.
        ("db.example.net.", AAAA, "NoError"),
        ("x.deep.example.com.", AAAA, "NoError; AAAA 2001:db8:7::2"),
        ("db.example.net.", MX, "ask db.example.net. else NoError"),
        ("db.example.net.", HTTPS, "ask db.example.net. else NoError"),
        ("db.example.net.", ANY, "ask db.example.net. else NoError"),
        // With the search list: the cluster has no db.example.net.cluster.local.
        (
            "db.example.net.shop.svc.cluster.local.",
            A,
            "ask db.example.net.corp.example. else NoError",
        ),
        (
            "db.example.net.shop.svc.cluster.local.",
            MX,
            "ask db.example.net.corp.example. db.example.net. else NoError",
        ),
        // Under a Service's name.
        (
            "ext.shop.svc.cluster.local.",
            A,
            &*format!("NoError; CNAME db.example.net.; db.example.net. A {db}"),
        ),
        (
            "ext.shop.svc.cluster.local.",
            AAAA,
            "NoError; CNAME db.example.net.",
        ),
        (
            "ext.shop.svc.cluster.local.",
            MX,
            "ask db.example.net. else NoError",
        ),
    ] {
        assert_eq!(
            told(&zone, "shop", name, of_type),
            wanted,
            "{name} {of_type}"
        );
    }
    // Without the node's own search list the server needs to ask no resolver.
    let mut cart = client("shop");
    cart.search.truncate(3);
    let name = "db.example.net.shop.svc.cluster.local.";
    assert_eq!(
        ask(&zone, &cart, name, A).text(name),
        format!("NoError; CNAME db.example.net.; db.example.net. A {db}")
    );
    // If a Service may be missing, any name of the cluster may be there.
    let part = Snapshot {
        whole: false,
        ..snapshot()
    };
    assert_eq!(
        ask(&Zone::new(Names::of(&part), TTLS), &cart, name, A).text(name),
        "ask db.example.net.shop.svc.cluster.local. db.example.net.svc.cluster.local. \
         db.example.net.cluster.local. else NoError"
    );
}

#[test]
fn an_explanation_names_the_entry_of_a_host() {
    let zone = zone();
    let said = ["x.example.com.", "range.example.net.", "other.example.net."].map(|name| {
        let steps = dataplane_dns::steps(&zone, &client("shop"), name, A, |_, _| None).unwrap();
        steps[0].object.clone().unwrap_or_default()
    });
    let without = "ServiceEntry shop/range, whose host range.example.net has no address";
    assert_eq!(
        said,
        ["ServiceEntry default/api, host *.example.com", without, ""]
    );
}

#[test]
fn answers_are_authoritative_with_their_own_ttl_and_zone() {
    let zone = Zone {
        ttls: Ttls {
            services: 7,
            entries: 31,
        },
        ..zone()
    };
    let shop = client("shop");
    let message = |name, of_type| match ask(&zone, &shop, name, of_type) {
        Reply::Answer(message) => message,
        other @ Reply::Asked(..) => panic!("{other:?}"),
    };
    let found = message("api.example.com.", A);
    assert!(found.metadata.authoritative);
    assert_eq!(found.answers[0].ttl, 31);
    let none = message("api.example.com.", AAAA);
    assert!(none.metadata.authoritative && none.answers.is_empty());
    let soa = &none.authorities[0];
    assert_eq!(soa.record_type(), RecordType::SOA);
    assert_eq!(soa.name.to_string(), "api.example.com.");
    let service = message("web.shop.svc.cluster.local.", A);
    assert_eq!(service.answers[0].ttl, 7);
    let alias = message("ext.shop.svc.cluster.local.", A);
    let ttls: Vec<u32> = alias.answers.iter().map(|record| record.ttl).collect();
    assert_eq!(ttls, [7, 31]);
    let none = message("ext.shop.svc.cluster.local.", AAAA);
    assert_eq!(none.authorities[0].name.to_string(), "db.example.net.");
}

#[test]
fn no_entry_takes_a_name_of_the_cluster() {
    let mut snapshot = snapshot();
    for whole in [true, false] {
        snapshot.whole = whole;
        let zone = Zone::new(Names::of(&snapshot), TTLS);
        let nobody = Client {
            search: Vec::new(),
            ..client("shop")
        };
        let missing = |name: &str| {
            if whole {
                "NXDomain".to_owned()
            } else {
                format!("ask {name}")
            }
        };
        for (name, wanted) in [
            (
                "vm.shop.svc.cluster.local.",
                "NoError; A 203.0.113.5".to_owned(),
            ),
            (
                "web.shop.svc.cluster.local.",
                "NoError; A 10.3.0.20".to_owned(),
            ),
            (
                "x.web.shop.svc.cluster.local.",
                missing("x.web.shop.svc.cluster.local."),
            ),
            (
                "vm.default.svc.cluster.local.",
                missing("vm.default.svc.cluster.local."),
            ),
            (
                "kubernetes.default.svc.cluster.local.",
                "NoError; A 10.3.0.1".to_owned(),
            ),
            // No wildcard is within the cluster's domain, and no host below a Service's form.
            (
                "x.shop.svc.cluster.local.",
                missing("x.shop.svc.cluster.local."),
            ),
            (
                "x.vm.shop.svc.cluster.local.",
                missing("x.vm.shop.svc.cluster.local."),
            ),
            (
                "x.default.svc.cluster.local.",
                missing("x.default.svc.cluster.local."),
            ),
            (
                "www.example.com.cluster.local.",
                "ask www.example.com.cluster.local.".to_owned(),
            ),
            (
                "10-1-1-1.nothing.pod.cluster.local.",
                "NoError; A 10.1.1.1".to_owned(),
            ),
            ("x.y.pod.cluster.local.", "NXDomain".to_owned()),
            ("printer.local.", "NoError; A 203.0.113.5".to_owned()),
        ] {
            assert_eq!(
                ask(&zone, &nobody, name, A).text(name),
                wanted,
                "{name}, {whole}"
            );
        }
    }
    // Neither a headless Service whose endpoints are not read.
    let zone = Zone::new(Names::of(&snapshot), TTLS);
    let name = "headless.default.svc.cluster.local.";
    let nobody = Client {
        search: Vec::new(),
        ..client("default")
    };
    assert_eq!(
        ask(&zone, &nobody, name, A).text(name),
        format!("ask {name}?")
    );
}

/// Many entries of one namespace cost others no time: only the oldest are looked at, of each namespace.
/// A client that asks for names without a search list's domain, too, may mean those of the cluster.
#[test]
fn no_entry_takes_a_name_of_the_cluster_without_its_domain() {
    let mut snapshot = snapshot();
    let hosts = [
        "web.shop",
        "*.shop",
        "x.web",
        "kubernetes.default",
        "a.headless",
        "kubernetes.default.svc",
        "example.shop.svc",
        "db.elsewhere",
        "db.elsewhere.svc",
    ];
    for (namespace, last) in [("evil", 66), ("shop", 77), ("elsewhere", 88)] {
        let mut made = entry(namespace, "relative", Some(1), &hosts, ExportTo::All);
        for host in &mut made.hosts {
            host.vips.push([203, 0, 113, last].into());
        }
        snapshot.entries.insert(made.name.clone(), made.into());
    }
    let found = |namespace: &str, name: &str| {
        let names = Names::of(&snapshot);
        let found = names.host(name, namespace, None);
        found.map(|(entry, _)| entry.name.namespace().to_owned())
    };
    let only = |of: &str| Some(of.to_owned());
    for client in ["evil", "shop", "default", "elsewhere", ""] {
        // Names in namespaces that exist.
        for name in ["web.shop", "y.shop", "web-0.web.shop", "example.shop.svc"] {
            assert_eq!(found(client, name), only("shop"), "{client} {name}");
        }
        for name in ["kubernetes.default", "kubernetes.default.svc"] {
            assert_eq!(found(client, name), None, "{client} {name}");
        }
        assert_eq!(
            found(client, "db.elsewhere.svc"),
            only("elsewhere"),
            "{client}"
        );
    }
    // Pods of Services of the client's own namespace.
    assert_eq!(found("shop", "x.web"), only("shop"));
    assert_eq!(found("default", "x.web"), only("elsewhere"));
    assert_eq!(found("default", "a.headless"), None);
    assert_eq!(found("shop", "a.headless"), only("shop"));
    // No namespace and no Service.
    assert_eq!(found("default", "db.elsewhere"), only("elsewhere"));
    assert_eq!(found("evil", "db.elsewhere"), only("evil"));
}

#[test]
fn a_namespace_with_many_entries_hides_no_entry_of_another() {
    let mut snapshot = Snapshot::default();
    let mut add = |namespace: &str, number: i64, export_to: ExportTo| {
        let entry = entry(
            namespace,
            &format!("x{number:03}"),
            Some(number),
            &["a.example"],
            export_to,
        );
        snapshot.entries.insert(entry.name.clone(), entry.into());
    };
    for number in 0..100 {
        add("evil", number, ExportTo::Namespaces(["evil".into()].into()));
    }
    add("evil", 100, ExportTo::All);
    add("good", 200, ExportTo::All);
    let names = Names::of(&snapshot);
    let found = |namespace| {
        names
            .host("a.example", namespace, None)
            .unwrap()
            .0
            .name
            .to_string()
    };
    assert_eq!(found("shop"), "good/x200");
    assert_eq!(found("evil"), "evil/x000");
}

/// An author may write any number of entries for one host, the youngest first.
#[test]
fn entries_of_one_host_cost_what_each_costs() {
    let follow = |count: i64| {
        let mut snapshot = Snapshot::default();
        for number in 0..count {
            let created = Some(count - number);
            let name = format!("x{number:06}");
            let entry = entry("evil", &name, created, &["a.example"], ExportTo::All);
            snapshot.entries.insert(entry.name.clone(), entry.into());
        }
        let before = threads::computed();
        let mut names = Names::of(&snapshot);
        names.follow(&Snapshot::default());
        assert!(!names.has_hosts());
        threads::computed().saturating_sub(before)
    };
    // Others may use the processor's caches in between.
    let shortest = |count| (0..3).map(|_| follow(count)).min().unwrap_or_default();
    let (few, many) = (shortest(1000), shortest(16_000));
    assert!(many < few * 60, "{few:?} for 1000, {many:?} for 16 000");
}

fn entry(
    namespace: &str,
    name: &str,
    created: Option<i64>,
    hosts: &[&str],
    export_to: ExportTo,
) -> Entry {
    let host = |name: &&str| Host::new((*name).into());
    Entry {
        preference: [None; 2],
        identities: Box::default(),
        name: EntryName::new(namespace, name),
        created,
        hosts: hosts.iter().map(host).collect(),
        addresses: SmallVec::new(),
        ranges: SmallVec::new(),
        wants_vips: true,
        resolution: EntryResolution::Static,
        location: Location::External,
        export_to,
        ports: SmallVec::new(),
        backends: Vec::new(),
    }
}

const NAMESPACES: [&str; 3] = ["a", "a-b", "b"];
const HOSTS: [&str; 5] = ["x.y.z", "*.y.z", "*.z", "y.z", "z"];

fn entries() -> impl Strategy<Value = Vec<Entry>> {
    let subset =
        |of: &'static [&'static str]| proptest::sample::subsequence(of.to_vec(), 0..=of.len());
    let export_to = proptest::option::of(subset(&NAMESPACES));
    let one = (
        0..3_usize,
        0..3_u8,
        proptest::option::of(0..3_i64),
        subset(&HOSTS),
        export_to,
    );
    let one = one.prop_map(|(namespace, number, created, hosts, export_to)| {
        let export_to = export_to.map_or(ExportTo::All, |to| {
            ExportTo::Namespaces(to.into_iter().map(Into::into).collect())
        });
        entry(
            NAMESPACES[namespace],
            &format!("e{number}"),
            created,
            &hosts,
            export_to,
        )
    });
    proptest::collection::vec(one, 0..8)
}

/// The rule in the form of the documentation.
fn by_the_rule<'a>(
    snapshot: &'a Snapshot,
    name: &str,
    namespace: &str,
) -> Option<(&'a EntryName, &'a str)> {
    let fits = |host: &Host| {
        let end = host.wildcard();
        *host.name == *name || end.is_some_and(|end| name.ends_with(end))
    };
    let of = |entry: &'a Entry| {
        let hosts = entry.hosts.iter().filter(|host| fits(host));
        hosts.map(move |host| (entry, &*host.name))
    };
    let seen = snapshot
        .entries
        .values()
        .filter(|entry| entry.is_visible_in(namespace));
    let key = |(entry, host): &(&Entry, &str)| {
        let specific = (host.starts_with('*'), std::cmp::Reverse(host.len()));
        let age = (entry.created.is_none(), entry.created, entry.name.clone());
        (specific, entry.name.namespace() != namespace, age)
    };
    let first = seen.flat_map(|entry| of(entry)).min_by_key(key)?;
    Some((&first.0.name, first.1))
}

proptest! {
    #[test]
    fn after_any_changes_the_index_follows_the_rule(changes in proptest::collection::vec(entries(), 1..5)) {
        let mut names = Names::default();
        for entries in changes {
            let entries = entries.into_iter().map(|entry| (entry.name.clone(), Arc::new(entry)));
            let snapshot = Snapshot { entries: entries.collect(), ..Snapshot::default() };
            names.follow(&snapshot);
            prop_assert_eq!(names.has_hosts(), snapshot.entries.values().any(|entry| !entry.hosts.is_empty()));
            for namespace in ["a", "a-b", "b", "c", ""] {
                for name in ["x.y.z", "v.y.z", "w.v.y.z", "y.z", "z", "other", "xy.z"] {
                    let found = names.host(name, namespace, None);
                    let found = found.map(|(entry, host)| (&entry.name, &*host.name));
                    prop_assert_eq!(found, by_the_rule(&snapshot, name, namespace), "{} {}", namespace, name);
                }
            }
        }
    }
}
