//! Istio's objects that limit connections.

use std::time::{Duration, Instant};

use model::{
    CapturedBy, Effect, Exempt, IstioNamespace, IstioPolicy, Label, Layers, Mode, Rules,
    ServiceName, WorkloadName,
    authorization::{Action, PeerAuthentication, Rule},
};

use super::{
    super::{MeshStatements, members, plain::is_judged_by_kernel},
    *,
};

fn labels(text: &str) -> Box<[Label]> {
    let labels = text.split(',').filter_map(|label| label.split_once('='));
    let labels = labels.map(|(key, value)| (key.into(), value.into()));
    labels.collect()
}

/// Reads policies such as `shop/a@5 app=web STRICT 80=OFF; shop/b * deny`. The number after `@` is the age, `?` is a
/// selector that cannot be read.
fn istio(text: &str) -> Istio {
    let mut istio = Istio {
        root: "root".into(),
        ..Istio::default()
    };
    for policy in text.split(';').filter(|policy| !policy.trim().is_empty()) {
        let words: Vec<&str> = policy.split_whitespace().collect();
        let (namespace, name) = words[0].split_once('/').unwrap();
        let is_strict = |word: &str| match word {
            "STRICT" => Some(true),
            "OFF" => Some(false),
            _ => None,
        };
        let port = |port: &&str| {
            let (port, mode) = port.split_once('=').unwrap();
            (port.parse().unwrap(), is_strict(mode).unwrap())
        };
        let authorization = |action, rules| {
            let (dry_run, rules) = (false, [rules].into());
            Effect::Authorization(Arc::new(Authorization {
                action,
                dry_run,
                rules,
            }))
        };
        let effect = match words[2] {
            "all" => authorization(Action::Allow, Rule::default()),
            "allow" => authorization(Action::Allow, Rule::never()),
            "deny" => authorization(Action::Deny, Rule::default()),
            "custom" => Effect::Custom,
            mode => Effect::Plaintext(Arc::new(PeerAuthentication {
                created: name.split_once('@').map(|(_, at)| at.parse().unwrap()),
                strict: is_strict(mode),
                ports: words[3..].iter().map(port).collect(),
            })),
        };
        let selector = (words[1] != "?").then(|| labels(words[1]));
        let policy = IstioPolicy { selector, effect };
        let of = istio.namespaces.entry(namespace.into()).or_default();
        let policies = &mut Arc::make_mut(of).policies;
        policies.insert(name.into(), Arc::new(policy));
    }
    istio
}

fn pod(own: &str) -> Workload {
    let rules = Rules {
        captured: Some(true),
        ..Rules::default()
    };
    Workload {
        rules: Arc::new(Layers {
            own: rules,
            ..Layers::default()
        }),
        labels: labels(own),
        ..Workload::new(WorkloadName::new("shop", "web"), Place::Address)
    }
}

fn told(refused: &RefusedInbound) -> String {
    let ports = refused.ports.iter();
    let ports = ports.map(|(port, is)| format!("{}{port}", if *is { "" } else { "!" }));
    let others = refused.others.then(|| "*".to_owned()).into_iter();
    others.chain(ports).collect::<Vec<_>>().join(" ")
}

/// <https://istio.io/latest/docs/concepts/security/#implicit-enablement> and
/// <https://istio.io/latest/docs/reference/config/security/peer_authentication/>. Each line has policies, the ports that
/// are refused (`*`: all others, `!`: not), and the policies that are named. Policies with ALLOW are alternatives; of
/// PeerAuthentications, the most specific one decides, then the oldest.
#[test]
fn policies_limit_what_they_limit_in_istio() {
    let cases = "
        =>
        shop/a * deny => * | a
        shop/a app=web deny => * | a
        shop/a app=web,b=2 deny => * | a
        shop/a * custom => * | a
        shop/a app=db deny; shop/b app=web,x=1 deny; other/c * deny =>
        shop/a ? deny => * | a
        shop/a ? all => * | a
        root/a ? all => * | a
        root/a app=web deny => * | a
        root/a ? deny => * | a
        shop/a * allow => * | a
        shop/a * allow; shop/b app=web all =>
        shop/a * allow; root/b * all =>
        shop/a * allow; shop/b app=db all => * | a
        shop/a * deny; shop/b * all => * | a
        shop/a * all =>
        shop/a * STRICT => * | a
        shop/a * STRICT; shop/b app=web OFF =>
        shop/a * STRICT; shop/b app=web - => * | a
        root/a * STRICT => * | a
        root/a * STRICT; shop/b * OFF =>
        root/a * STRICT; shop/b * -; shop/c app=web - => * | a
        root/a app=web STRICT =>
        root/a ? STRICT =>
        shop/a ? STRICT => * | a
        shop/a ? OFF => * | a
        shop/a@2 * STRICT; shop/b@1 * OFF =>
        shop/a@1 * STRICT; shop/b@2 * OFF => * | a@1
        shop/a * STRICT; shop/b@2 * OFF =>
        shop/a * STRICT; shop/b * OFF => * | a
        shop/a app=web STRICT 80=OFF => * !80 | a
        shop/a app=web OFF 80=STRICT => 80 | a
        shop/a app=web - 80=OFF; shop/b * STRICT => * !80 | b
        shop/a app=web STRICT 80=OFF; shop/b * deny => * | b a";
    for case in cases.lines().skip(1) {
        let (policies, wanted) = case.split_once("=>").unwrap();
        let (istio, pod) = (istio(policies), pod("app=web,b=2"));
        let (objects, refused) = limits(&istio, &pod, false);
        let is_limited = !wanted.trim().is_empty() && !policies.contains("custom");
        let is_judged = is_limited || policies.contains(" all");
        assert_eq!(may_be_refused(&istio, &pod), is_judged, "{case}");
        let names: Vec<&str> = objects.iter().map(|(_, name)| &**name).collect();
        let mut found = told(&refused);
        if !names.is_empty() {
            found = format!("{found} | {}", names.join(" "));
        }
        assert_eq!(found, wanted.trim(), "{case}");
    }
}

fn member(istio: &Istio, said: &MeshStatements) -> Member {
    let pod = pod("app=web");
    let snapshot = Snapshot {
        workloads: [(pod.name.clone(), Arc::new(pod))].into_iter().collect(),
        istio: istio.clone(),
        ..Snapshot::default()
    };
    members(said, &snapshot).pop().unwrap()
}

/// Each line has policies, the circumstances, what the Pod's policy refuses, and the number of its problems.
#[test]
fn only_with_deny_and_at_the_sockets_of_captured_workloads_is_anything_refused() {
    let cases = "
        shop/a * deny | => none 0
        shop/a * deny | deny =>  0
        shop/a app=web OFF 80=STRICT | deny =>  0
        shop/a * custom | deny => * 0
        | deny =>  0
        | deny unread =>  0
        | deny unread packets => * 1
        | unread => none 0
        shop/a * deny; shop/b * STRICT | deny proxy =>  0
        | deny unread proxy =>  0
        shop/a * custom | deny proxy => * 0
        shop/a * deny | deny packets => * 1
        shop/a * deny | deny packets proxy => * 1
        shop/a * deny | deny foreign => none 0";
    for case in cases.lines().skip(1) {
        let (given, wanted) = case.split_once(" => ").unwrap();
        let (policies, words) = given.split_once('|').unwrap();
        let has = |word| words.split_whitespace().any(|given| given == word);
        let all = Rules {
            captured_by: has("packets").then_some(CapturedBy::Packets),
            mode: (has("foreign") || has("proxy")).then_some(Mode::Proxy),
            ..Rules::default()
        };
        let said = MeshStatements {
            all: vec![("mesh.rules".to_owned(), all)],
            sidecars: has("foreign"),
            ..MeshStatements::default()
        };
        let mut istio = istio(policies);
        (istio.denies, istio.unread) = (has("deny"), has("unread"));
        let member = member(&istio, &said);
        let refused = member.policy.refused.as_deref();
        let refused = refused.map_or_else(|| "none".to_owned(), told);
        let found = format!("{refused} {}", member.ineffective.len());
        assert_eq!(found, wanted, "{case}");
    }
}

/// Each line has a change to a captured Pod in mode `proxy` and in mode `kernel`, and who enforces its policies: nobody (`-`) if
/// the agent does not carry its connections. With another proxy, that one may enforce them.
#[test]
fn the_policies_of_a_workload_are_enforced_by_who_carries_its_connections() {
    type Change = fn(&mut Policy, &mut Workload);
    let cases: [(Change, [&str; 2], [bool; 2]); 7] = [
        (|_, _| {}, ["proxy", "kernel"], [false, true]),
        (|of, _| of.mode = Mode::Auto, ["kernel"; 2], [false; 2]),
        (
            |of, _| of.captured_by = CapturedBy::Packets,
            [""; 2],
            [false, true],
        ),
        (|of, _| of.inbound = Inbound::None, [""; 2], [false, true]),
        (
            |_, of| of.place = Place::Cgroup("web".into()),
            [""; 2],
            [false, true],
        ),
        (
            |_, of| of.place = Place::Exempt(Exempt::Sidecar),
            ["-"; 2],
            [false; 2],
        ),
        (|of, _| of.only_queries = true, ["-"; 2], [false; 2]),
    ];
    for (number, (change, wanted, beside_another)) in cases.iter().enumerate() {
        let found = [Mode::Proxy, Mode::Kernel].map(|mode| {
            let mut pod = pod("");
            let mut policy = Policy {
                mode,
                inbound: Inbound::All,
                ..Policy::default()
            };
            change(&mut policy, &mut pod);
            let by_proxy = is_judged_by_proxy(&pod, &policy);
            let by_kernel = is_judged_by_kernel(&pod, &policy);
            assert!(!(by_proxy && by_kernel));
            let by = if !is_carried(&pod, &policy, false) {
                "-"
            } else if by_proxy {
                "proxy"
            } else if by_kernel {
                "kernel"
            } else {
                ""
            };
            (by, is_carried(&pod, &policy, true))
        });
        assert_eq!(found.map(|(by, _)| by), *wanted, "case {number}");
        assert_eq!(
            found.map(|(_, carried)| carried),
            *beside_another,
            "case {number}"
        );
    }
}

/// A namespace with more policies than are named.
#[test]
fn of_many_policies_some_are_named_and_others_are_mentioned() {
    let many = |effect: &str, count: usize| -> String {
        let all = (0..count).map(|n| format!("shop/{effect}{n} * {effect};"));
        all.collect::<Vec<_>>().concat()
    };
    for (policies, wanted) in [
        (many("deny", 5), "deny0, deny1, deny2, deny3, deny4"),
        (many("deny", 6), "deny0, deny1, deny2, deny3, deny4, others"),
        (
            many("deny", 30),
            "deny0, deny1, deny10, deny11, deny12, others",
        ),
        (
            many("allow", 30),
            "allow0, allow1, allow10, allow11, allow12, others",
        ),
        (
            many("custom", 9),
            "custom0, custom1, custom2, custom3, custom4, others",
        ),
        (
            many("deny", 2) + &many("allow", 2) + &many("custom", 2),
            "allow0, allow1, custom0, custom1, deny0, others",
        ),
    ] {
        let mut istio = istio(&policies);
        // The agent enforces all others.
        let said = MeshStatements {
            all: vec![(
                "mesh.rules".to_owned(),
                Rules {
                    captured_by: Some(CapturedBy::Packets),
                    ..Rules::default()
                },
            )],
            ..MeshStatements::default()
        };
        let member = member(&istio, &said);
        assert!(member.limited_by.len() <= 3 * (NAMED[0] + 1));
        let texts = limited(&istio, &[member], false);
        assert!(texts["shop"].ends_with(&format!(": {wanted}")), "{texts:?}");
        let open = consequence(&istio);
        istio.denies = true;
        assert!(open.contains(" pass ") && consequence(&istio).contains(" refuses "));
    }
}

#[test]
fn policies_that_the_proxy_or_the_kernel_enforces_are_not_named() {
    let mut istio = istio("shop/a * deny; shop/b * custom; shop/c * STRICT");
    istio.unread = true;
    for (mode, inbound, wanted, is_unread) in [
        (Mode::Proxy, true, "b", true),
        (Mode::Proxy, false, "b a c", false),
        (Mode::Kernel, true, "b", true),
        (Mode::Kernel, false, "b a c", false),
    ] {
        let all = Rules {
            mode: Some(mode),
            inbound: Some(inbound),
            ..Rules::default()
        };
        let said = MeshStatements {
            all: vec![("mesh.rules".to_owned(), all)],
            ..MeshStatements::default()
        };
        let member = member(&istio, &said);
        let names: Vec<&str> = member.limited_by.iter().map(|(_, of)| &**of).collect();
        assert_eq!(names.join(" "), wanted, "{mode:?} {inbound}");
        let unread = unread(&istio, &[member], false);
        assert_eq!(unread.is_some(), is_unread, "{mode:?} {inbound}");
    }
}

#[test]
fn each_namespace_is_named_once_and_those_with_captured_workloads_first() {
    let mut istio = istio("root/PA * custom; shop/AP * custom; other/AP * custom");
    let gate = || UseWaypoint::Gateway(ServiceName::new("shop", "gate"));
    for n in 0..200 {
        let used = || if n == 7 { UseWaypoint::None } else { gate() };
        let objects = ["Service web", "ServiceEntry out"].map(|of| (Arc::from(of), used()));
        let many = (0..6).map(|of| (Arc::from(format!("Service s{of}")), gate()));
        let of = IstioNamespace {
            waypoint: (n == 0).then(gate),
            labels: match n {
                2 => many.collect(),
                _ => objects.into_iter().collect(),
            },
            ..IstioNamespace::default()
        };
        istio
            .namespaces
            .insert(format!("a{n:03}").into(), Arc::new(of));
    }
    let member = member(&istio, &MeshStatements::default());
    let texts = limited(&istio, &[member], false);
    assert_eq!(texts.len(), NAMED[1]);
    for (namespace, wanted) in [
        ("root", "PA"),
        ("shop", "AP"),
        ("a000", "Namespace a000, Service web, ServiceEntry out"),
        ("a001", "Service web, ServiceEntry out"),
        (
            "a002",
            "Service s0, Service s1, Service s2, Service s3, Service s4, others",
        ),
    ] {
        assert!(
            texts[namespace].ends_with(&format!(": {wanted}")),
            "{namespace}"
        );
    }
    assert!(
        ["a007", "other", "a199"]
            .iter()
            .all(|name| !texts.contains_key(*name))
    );
    assert!(limited(&istio, &[], false).is_empty());
}

/// Each line has policies, the cluster's namespaces (`?`: unknown), and whether there is a warning.
#[test]
fn a_root_namespace_that_is_not_there_is_named_where_policies_are() {
    for (policies, namespaces, is_named) in [
        ("shop/a * deny", "shop", true),
        ("shop/a * deny", "shop root", false),
        ("shop/a * deny; root/b * deny", "shop", false),
        ("", "shop", false),
        ("shop/a * deny", "", false),
        ("shop/a * deny", "?", false),
    ] {
        let all = namespaces.split_whitespace().map(Arc::from).collect();
        let snapshot = Snapshot {
            istio: istio(policies),
            namespaces: (namespaces != "?").then_some(all),
            ..Snapshot::default()
        };
        let text = without_root(&snapshot);
        let own = member(&snapshot.istio, &MeshStatements::default());
        assert_eq!(missing_root(&snapshot, &[own], false), text);
        assert_eq!(missing_root(&snapshot, &[], false), None);
        assert_eq!(
            text.is_some(),
            is_named,
            "{policies}, {namespaces}: {text:?}"
        );
    }
}

/// A tenant who writes as much as the source takes costs no more than milliseconds a Pod.
#[test]
fn many_policies_cost_what_one_author_wrote() {
    let all = |n: u32| {
        (0..n)
            .map(|n| format!("k{n:04}=v"))
            .collect::<Vec<_>>()
            .join(",")
    };
    let policies = (0..1000).map(|n| format!("shop/p{n} {},x=1 deny;", all(60)));
    let istio = istio(&policies.collect::<String>());
    let pod = pod(&all(4000));
    let start = Instant::now();
    assert!((0..10).all(|_| limits(&istio, &pod, false).0.is_empty()));
    assert!(
        start.elapsed() < Duration::from_secs(5),
        "{:?}",
        start.elapsed()
    );
}
