//! Istio's objects that limit connections of captured workloads, and that nothing on the node enforces: the agent names the
//! objects, and refuses the connections if the operator asks for it. The agent's proxy enforces the policies of workloads whose
//! inbound connections it carries.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use model::{
    CapturedBy, Inbound, Istio, Place, Policy, RefusedInbound, Snapshot, UseWaypoint, Workload,
    authorization::{Authorization, Extent, Policies, PolicyName},
};

use super::{
    Member,
    named::{NAMED, named},
};

/// Returns whether the agent's programs or its proxy carry the connections of a captured workload. Another proxy may
/// enforce the objects.
pub(super) fn is_carried(workload: &Workload, policy: &Policy, foreign: bool) -> bool {
    let is_foreign = foreign && policy.mode.is_proxied(foreign);
    !policy.only_queries && !is_foreign && !matches!(workload.place, Place::Exempt(_))
}

/// Returns whether the agent's proxy carries the inbound connections of a workload that [`is_carried`], and so enforces its
/// policies.
pub(super) fn is_judged_by_proxy(workload: &Workload, policy: &Policy) -> bool {
    policy.mode.is_proxied(false)
        && policy.captured_by == CapturedBy::Sockets
        && policy.inbound != Inbound::None
        && workload.place == Place::Address
}

/// The namespace of an object, and its kind and name.
type Object = (Arc<str>, Arc<str>);

/// Returns the policies that limit inbound connections of a workload and that nothing enforces, not all if they are many, and
/// the connections. `is_enforced`: the proxy or the kernel enforces all but those that no program on the node evaluates.
pub(super) fn limits(
    istio: &Istio,
    workload: &Workload,
    is_enforced: bool,
) -> (Vec<Object>, RefusedInbound) {
    let mut of = istio.policies_of(workload.name.namespace(), &workload.labels);
    if is_enforced {
        of = Policies {
            custom: of.custom,
            ..Policies::default()
        };
    }
    let object = |name: &PolicyName| (Arc::clone(&name.namespace), Arc::clone(&name.object));
    let (mut limiting, mut allowing, mut allows_all) = (Vec::new(), Vec::new(), false);
    limiting.extend(of.custom.iter().take(NAMED[0] + 1).map(object));
    for (name, of) in &of.authorizations {
        let extent = (of.as_deref()).map_or(Extent::Denies, Authorization::extent);
        match extent {
            Extent::AllowsAll => allows_all = true,
            Extent::AllowsSome if allowing.len() <= NAMED[0] => allowing.push(object(name)),
            Extent::Denies if limiting.len() <= NAMED[0] => limiting.push(object(name)),
            Extent::AllowsSome | Extent::Denies | Extent::Nothing => {}
        }
    }
    if !allows_all {
        limiting.append(&mut allowing);
    }
    let mut refused = RefusedInbound {
        others: !limiting.is_empty() || istio.denies && of.unread,
        ports: BTreeMap::new(),
    };
    if let Some((name, ports)) = of.plaintext.ports() {
        limiting.extend(ports.values().any(|is| *is).then(|| object(name)));
        if !refused.others {
            refused.ports.clone_from(ports);
        }
    }
    if let Some(name) = of.plaintext.refused() {
        refused.others = true;
        limiting.push(object(name));
    }
    (limiting, refused)
}

/// Returns whether policies of a workload may refuse plain connections or report a dry run, or whether policies cannot be read.
pub fn may_be_refused(istio: &Istio, workload: &Workload) -> bool {
    let of = istio.policies_of(workload.name.namespace(), &workload.labels);
    let mut ports = of.plaintext.ports().into_iter();
    let has_strict_port = ports.any(|(_, ports)| ports.values().any(|is_strict| *is_strict));
    let is_strict = has_strict_port || of.plaintext.refused().is_some();
    of.unread || !of.authorizations.is_empty() || is_strict
}

/// Returns a text for each namespace whose objects limit connections of these workloads. `foreign`: whether the proxy is
/// not the agent's.
pub fn limited(istio: &Istio, members: &[Member], foreign: bool) -> BTreeMap<Arc<str>, String> {
    let mut found: BTreeMap<Arc<str>, BTreeSet<String>> = BTreeMap::new();
    let (mut own, mut is_past) = (BTreeSet::new(), false);
    let carried = members.iter();
    for member in carried.filter(|of| is_carried(&of.workload, &of.policy, foreign)) {
        own.insert(member.workload.name.namespace());
        is_past |= !(istio.waypoints && member.is_sent_to_waypoints());
        for (namespace, name) in &member.limited_by {
            own.insert(namespace);
            let found = found.entry(Arc::clone(namespace)).or_default();
            found.insert(name.to_string());
        }
    }
    if own.is_empty() {
        return BTreeMap::new();
    }
    for (namespace, of) in istio.namespaces.iter().filter(|_| is_past) {
        let own = of.waypoint.as_ref().and_then(UseWaypoint::gateway);
        let label = own.map(|_| format!("Namespace {namespace}"));
        let services = of.labels.iter().filter(|(_, of)| of.gateway().is_some());
        let services = services.map(|(name, _)| name.to_string());
        let labelled = label.into_iter().chain(services).take(NAMED[0] + 1);
        for name in labelled {
            let found = found.entry(Arc::clone(namespace)).or_default();
            found.insert(name);
        }
    }
    let texts = named(found, &own, ", ").map(|(namespace, names)| {
        let text = format!(
            "Istio's objects of namespace {namespace} limit connections, and nothing on this node enforces them: {names}"
        );
        (namespace, text)
    });
    texts.collect()
}

/// Returns a warning if the cluster has policies, lacks the root namespace, and workloads of this node are captured: Istio may
/// have another root namespace. `foreign`: see [`limited`].
pub fn missing_root(snapshot: &Snapshot, members: &[Member], foreign: bool) -> Option<String> {
    let mut carried = members.iter();
    let is_any = carried.any(|of| is_carried(&of.workload, &of.policy, foreign));
    is_any.then(|| without_root(snapshot))?
}

fn without_root(snapshot: &Snapshot) -> Option<String> {
    let istio = &snapshot.istio;
    // Manifests need no Namespaces.
    let all = snapshot.namespaces.as_ref().filter(|all| !all.is_empty())?;
    let is_known = all.contains(&istio.root) || istio.namespaces.contains_key(&istio.root);
    let mut namespaces = istio.namespaces.values();
    let is_missing = !is_known && namespaces.any(|of| !of.policies.is_empty());
    is_missing.then(|| {
        format!(
            "the cluster has no namespace {} (mesh.rootNamespace), so no policy of Istio's holds in all namespaces; if Istio's \
             root namespace has another name, set mesh.rootNamespace to this name",
            istio.root
        )
    })
}

/// Returns the consequence for workloads whose policies the proxy or the kernel enforces, if Istio's policies cannot be read.
/// `foreign`: see [`limited`].
pub fn unread(istio: &Istio, members: &[Member], foreign: bool) -> Option<String> {
    let mut members = members.iter();
    let is_any = istio.unread
        && members.any(|of| {
            let is_carried = is_carried(&of.workload, &of.policy, foreign);
            of.by_kernel || is_carried && is_judged_by_proxy(&of.workload, &of.policy)
        });
    is_any.then(|| {
        "Istio's policies cannot be read, so the proxy and the kernel refuse new connections to captured Pods: ALL plain connections \
         and tunnels to the Pods whose policies they enforce are refused until the agent has read the policies"
            .to_owned()
    })
}

/// Returns the consequence of what [`limited`] names.
pub const fn consequence(istio: &Istio) -> &'static str {
    if istio.denies {
        "mesh.unsupported: deny refuses connections that these objects limit"
    } else {
        "connections that these objects limit pass as if the objects did not exist; to refuse the connections, set \
         mesh.unsupported: deny"
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use model::{
        CapturedBy, Effect, IstioNamespace, IstioPolicy, Label, Layers, Mode, Rules, ServiceName,
        WorkloadName,
        authorization::{Action, PeerAuthentication, Rule},
    };

    use super::{
        super::{MeshStatements, members},
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
            let of = IstioNamespace {
                waypoint: (n == 0).then(gate),
                labels: objects.into_iter().collect(),
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
}
