//! A client's search list: the server answers at once the names that the client's own resolver would ask for next.

use std::net::SocketAddr;

use dataplane_dns::{Client, LowerName, ResolvConf, Zone};
use hickory_proto::rr::RecordType::{A, AAAA, CNAME};
use model::{Names, Snapshot, WorkloadName};

use super::{TTLS, ask, cluster, zone};

/// The node's file, which the kubelet appends.
const NODE: &str = "nameserver 192.0.2.1\nsearch corp.example\n";

fn pod(zone: &Zone, name: &str) -> Client {
    let workload = zone.names.workload(&WorkloadName::new("shop", name));
    let dns: SocketAddr = "10.96.0.10:53".parse().unwrap();
    let node = ResolvConf::parse(NODE);
    Client::of_workload(workload.unwrap(), &zone.domain, &[dns], &node)
}

#[test]
fn what_a_pod_would_ask_next_is_answered_at_once() {
    let zone = zone();
    let cart = pod(&zone, "cart");
    for (name, of_type, wanted) in [
        // A service of the client's own namespace, by the first entry of the list: unchanged.
        ("web.shop.svc.cluster.local.", A, "NoError; A 10.3.0.20"),
        // A service of another namespace, by the second entry.
        (
            "plain.default.shop.svc.cluster.local.",
            A,
            "NoError; CNAME plain.default.svc.cluster.local.; plain.default.svc.cluster.local. A 10.3.0.7",
        ),
        // It exists, in the other family.
        (
            "plain.default.shop.svc.cluster.local.",
            AAAA,
            "NoError; CNAME plain.default.svc.cluster.local.",
        ),
        // By the third entry.
        (
            "plain.default.svc.shop.svc.cluster.local.",
            A,
            "NoError; CNAME plain.default.svc.cluster.local.; plain.default.svc.cluster.local. A 10.3.0.7",
        ),
        // The whole name, which has fewer dots than ndots.
        (
            "plain.default.svc.cluster.local.shop.svc.cluster.local.",
            A,
            "ask plain.default.svc.cluster.local.cluster.local. plain.default.svc.cluster.local.corp.example. \
             else NoError",
        ),
        // A service that stands for another.
        (
            "inner.default.shop.svc.cluster.local.",
            A,
            "NoError; CNAME inner.default.svc.cluster.local.; \
             inner.default.svc.cluster.local. CNAME kubernetes.default.svc.cluster.local.; \
             kubernetes.default.svc.cluster.local. A 10.3.0.1",
        ),
        // The alias of an alias itself.
        (
            "foo.default.shop.svc.cluster.local.",
            CNAME,
            "NoError; CNAME foo.default.svc.cluster.local.; \
             foo.default.svc.cluster.local. CNAME www.example.com.",
        ),
        // A foreign name: the server leaves out names that the cluster does not have, and asks resolvers for the rest
        // in order.
        (
            "www.example.com.shop.svc.cluster.local.",
            A,
            "ask www.example.com.cluster.local. www.example.com.corp.example. www.example.com. \
             else NXDomain",
        ),
        // With at least ndots dots, the client's own resolver has already asked for the name unchanged.
        (
            "a.b.c.d.e.f.shop.svc.cluster.local.",
            A,
            "ask a.b.c.d.e.f.cluster.local. a.b.c.d.e.f.corp.example. else NXDomain",
        ),
        // Not by the first entry: the client's own resolver continues.
        ("www.example.com.svc.cluster.local.", A, "NXDomain"),
        ("nothing.other.svc.cluster.local.", A, "NXDomain"),
        // The first entry itself.
        ("shop.svc.cluster.local.", A, "NoError"),
        // Whole names of strangers.
        ("www.example.com.", A, "ask www.example.com."),
    ] {
        assert_eq!(
            ask(&zone, &cart, name, of_type).text(name),
            wanted,
            "{name} {of_type}"
        );
    }
}

#[test]
fn a_pod_without_the_clusters_list_gets_what_it_asks_for() {
    let zone = zone();
    let other = pod(&zone, "other");
    for (name, wanted) in [
        // Its first entry is of the cluster, and ndots is 2.
        ("web.shop.svc.cluster.local.", "NoError; A 10.3.0.20"),
        (
            "nothing.shop.svc.cluster.local.",
            "ask nothing.shop.corp.example. nothing.shop. else NXDomain",
        ),
        (
            "www.example.com.svc.cluster.local.",
            "ask www.example.com.corp.example. else NXDomain",
        ),
        // Its second entry is not of the cluster, so only resolvers know whether the name exists.
        ("web.corp.example.", "ask web.corp.example."),
    ] {
        assert_eq!(ask(&zone, &other, name, A).text(name), wanted, "{name}");
    }
}

/// A client's resolver does not append the list to the list's first entry.
#[test]
fn the_first_entry_itself_is_no_name_of_the_list() {
    let zone = zone();
    let client = Client {
        search: ["gone.svc.cluster.local", "svc.cluster.local"]
            .map(|end| LowerName::parse(end).unwrap())
            .into(),
        ndots: 5,
        ..Client::unknown(Vec::new())
    };
    let name = "gone.svc.cluster.local.";
    assert_eq!(ask(&zone, &client, name, A).text(name), "NXDomain");
}

/// Below the cluster's domain, but not where services are: only resolvers know whether such a name exists.
#[test]
fn a_list_that_begins_where_resolvers_answer_leaves_out_no_name() {
    let zone = zone();
    let parse = |text| LowerName::parse(text).unwrap();
    let client = Client {
        search: vec![parse("corp.cluster.local"), parse("corp.example")],
        ndots: 5,
        ..Client::unknown(Vec::new())
    };
    let name = "www.example.com.corp.cluster.local.";
    assert_eq!(
        ask(&zone, &client, name, A).text(name),
        "ask www.example.com.corp.cluster.local. www.example.com.corp.example. www.example.com. else NXDomain"
    );
}

/// From a source that does not read everything, a missing service may be one that another proxy serves.
#[test]
fn what_may_exist_is_asked_for() {
    let snapshot = Snapshot {
        whole: false,
        ..cluster()
    };
    let zone = Zone::new(Names::of(&snapshot), TTLS);
    let cart = pod(&zone, "cart");
    for (name, wanted) in [
        ("web.shop.svc.cluster.local.", "NoError; A 10.3.0.20"),
        // There may be slices that are not read.
        (
            "headless.default.svc.cluster.local.",
            "ask headless.default.svc.cluster.local.?",
        ),
        (
            "my-pet.headless.default.svc.cluster.local.",
            "ask my-pet.headless.default.svc.cluster.local.?",
        ),
        (
            "nothing.shop.svc.cluster.local.",
            "ask nothing.shop.svc.cluster.local. nothing.svc.cluster.local. nothing.cluster.local. \
             nothing.corp.example. nothing. else NXDomain",
        ),
        // Known further on: the last resort.
        (
            "plain.default.shop.svc.cluster.local.",
            "ask plain.default.shop.svc.cluster.local. else NoError",
        ),
    ] {
        assert_eq!(ask(&zone, &cart, name, A).text(name), wanted, "{name}");
    }
}

/// A list of many domains is the client's own resolver's work: one query must not become as many.
#[test]
fn one_query_does_not_become_many() {
    let zone = zone();
    let parse = |text: &str| LowerName::parse(text).unwrap();
    let with = |count: usize| {
        let more = (0..count).map(|number| parse(&format!("n{number}.example")));
        let own = ["shop.svc.cluster.local", "svc.cluster.local"].map(parse);
        Client {
            search: own.into_iter().chain(more).collect(),
            ndots: 5,
            ..Client::unknown(Vec::new())
        }
    };
    let name = "www.example.com.shop.svc.cluster.local.";
    let asked = ask(&zone, &with(7), name, A).text(name);
    assert_eq!(asked.matches("www.example.com.").count(), 8, "{asked}");
    assert_eq!(ask(&zone, &with(30), name, A).text(name), "NXDomain");
}

/// `dataplane dns query` and `explain` show the server's answer to the client.
#[test]
fn explanations_are_the_servers_answers() {
    let (zone, zone_in_doubt) = (zone(), {
        let snapshot = Snapshot {
            whole: false,
            ..cluster()
        };
        Zone::new(Names::of(&snapshot), TTLS)
    });
    for zone in [zone, zone_in_doubt] {
        let cart = pod(&zone, "cart");
        for text in [
            "web",
            "plain.default",
            "headless.default.svc",
            "nothing",
            "www.example.com",
            "kubernetes.default.svc.cluster.local.",
            "www.example.com.",
        ] {
            for of_type in [A, AAAA] {
                let steps = dataplane_dns::steps(&zone, &cart, text, of_type, |_, _| None).unwrap();
                let step = &steps[0];
                let told = ask(&zone, &cart, &step.name, of_type);
                match told {
                    super::Reply::Answer(message) => {
                        let code = message.metadata.response_code.to_str();
                        assert_eq!(step.code.as_deref(), Some(code), "{text} {of_type}");
                    }
                    super::Reply::Asked(names, _) => {
                        let names = names
                            .iter()
                            .map(|name| name.trim_end_matches('?').to_owned());
                        let asked = step.ask.as_ref().unwrap();
                        assert_eq!(asked.names, names.collect::<Vec<_>>(), "{text} {of_type}");
                    }
                }
            }
        }
    }
}

/// The steps of the client's own resolver: the names in its order, until one exists or resolvers are asked.
#[test]
fn an_explanation_has_the_names_in_their_order_and_their_objects() {
    let zone = zone();
    let cart = pod(&zone, "cart");
    let said = |client: &Client, text: &str, of_type| {
        let steps = dataplane_dns::steps(&zone, client, text, of_type, |_, _| None).unwrap();
        let step = |step: &dataplane_dns::Step| {
            let object = step.object.as_deref().unwrap_or("-");
            let code = step.code.as_deref().unwrap_or("asks");
            let addresses: Vec<_> = step.addresses.iter().map(ToString::to_string).collect();
            format!(
                "{} {} {object} {code} {}",
                step.name,
                step.rule,
                addresses.join(" ")
            )
        };
        steps.iter().map(step).collect::<Vec<_>>()
    };
    let short = Client {
        search: vec![LowerName::parse("shop.svc.cluster.local").unwrap()],
        ndots: 2,
        ..cart.clone()
    };
    for (client, text, of_type, wanted) in [
        (
            &cart,
            "web",
            A,
            &["web.shop.svc.cluster.local. service Service shop/web No Error 10.3.0.20"][..],
        ),
        (
            &cart,
            "kubernetes.default",
            AAAA,
            &[
                "kubernetes.default.shop.svc.cluster.local. search Service default/kubernetes No Error 2001:db8::1",
            ],
        ),
        (
            &cart,
            "foo.default.svc.cluster.local.",
            A,
            &["foo.default.svc.cluster.local. alias Service default/foo asks "],
        ),
        // Five dots, and four.
        (&cart, "a.b.c.d.e.f", A, &["a.b.c.d.e.f. forward - asks "]),
        (
            &cart,
            "a.b.c.d.e",
            A,
            &["a.b.c.d.e.shop.svc.cluster.local. search - asks "],
        ),
        (&short, "a.b.", A, &["a.b. forward - asks "]),
        (
            &short,
            "x.nothing.svc.cluster.local",
            A,
            &[
                "x.nothing.svc.cluster.local. missing - Non-Existent Domain ",
                "x.nothing.svc.cluster.local.shop.svc.cluster.local. missing - Non-Existent Domain ",
            ],
        ),
    ] {
        assert_eq!(said(client, text, of_type), wanted, "{text}");
    }
    assert!(dataplane_dns::steps(&zone, &cart, "a..b", A, |_, _| None).is_err());
    // An answer of the cache, if it says that the name is missing.
    let missing = |name: &LowerName, _: &_| {
        let mut answer = dataplane_dns::question(0, name, A.into(), 1, false);
        (answer[2], answer[3]) = (0x81, 0x83);
        Some(answer)
    };
    let steps = dataplane_dns::steps(&zone, &short, "a.b.c", A, missing).unwrap();
    // As clients of the agent get it.
    let said = serde_json::to_value(steps).unwrap();
    assert_eq!(
        (&said[0]["name"], &said[0]["cached"]),
        (&"a.b.c.".into(), &true.into())
    );
    let second = &said[1];
    assert_eq!(second["name"], "a.b.c.shop.svc.cluster.local.");
    assert!(second.get("cached").is_none(), "{second}");
}
