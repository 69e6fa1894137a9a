//! NetworkPolicies that let clients in to enrolled Pods, and do not let these clients' tunnels in: HBONE carries all connections to
//! a Pod to its port 15008.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{
    api::{
        core::v1::{Namespace, Pod},
        networking::v1::{NetworkPolicy, NetworkPolicyIngressRule, NetworkPolicyPort},
    },
    apimachinery::pkg::{apis::meta::v1::LabelSelector, util::intstr::IntOrString},
};
use kube::core::{Selector, SelectorExt as _};
use model::HBONE;
use serde::Deserialize;
use serde_json::{Value, json};

use super::objects::{LABEL_MODE, SIDECAR};

/// Labels of an object.
type Labels = BTreeMap<String, String>;

/// The clients whose tunnels a policy lets in to a Pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tunnels {
    /// The policy does not apply to connections to the Pod.
    NotLimited,
    /// All clients.
    FromAll,
    /// The clients in `from` of some rules.
    FromSome,
    /// No clients.
    FromNone,
}

/// A policy whose rules let clients in to enrolled Pods, but not their tunnels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocking {
    /// The policy's namespace.
    pub namespace: String,
    /// The policy's name.
    pub name: String,
    /// The names of the Pods, in the policy's namespace.
    pub pods: Vec<String>,
    /// The patch that lets tunnels in to where the policy lets connections in: a JSON patch (RFC 6902).
    pub patch: Value,
}

/// The rules of the agent's configuration for the capture of a Pod, by namespace and name: one that holds also against its labels,
/// and one for a Pod for which no label decides.
pub type Configured<'a> = &'a dyn Fn(&str, &str) -> [Option<bool>; 2];

/// The rules of a policy without the port, by their indices, and the Pods that are affected.
type Affected = (BTreeSet<usize>, Vec<String>);

/// Returns the policies that block tunnels to enrolled Pods. `list`: a list of NetworkPolicies, Pods and Namespaces, as `kubectl
/// get networkpolicies,pods,namespaces -A -o json` prints it. Other objects are ignored.
///
/// # Errors
/// If it is not such a list, or if one of these objects cannot be read.
pub fn blocking(list: &Value, configured: Configured<'_>) -> Result<Vec<Blocking>, String> {
    let items = list["items"].as_array().ok_or(
        "expected a list of objects, as `kubectl get networkpolicies,pods,namespaces -A -o json` prints it",
    )?;
    let policies: Vec<NetworkPolicy> = read(items, "NetworkPolicy")?;
    let pods: Vec<Pod> = read(items, "Pod")?;
    let namespaces: Vec<Namespace> = read(items, "Namespace")?;
    let of_namespace = |name: &str| {
        let mut of_name = namespaces
            .iter()
            .filter(|of| of.metadata.name.as_deref() == Some(name));
        of_name.find_map(|of| enrols(of.metadata.labels.as_ref()))
    };
    let mut found: BTreeMap<(&str, &str), Affected> = BTreeMap::new();
    for pod in &pods {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        if !is_enrolled(pod, of_namespace(namespace), configured) {
            continue;
        }
        let limiting = policies
            .iter()
            .filter(|policy| tunnels(policy, pod) != Tunnels::NotLimited);
        let limiting: Vec<&NetworkPolicy> = limiting.collect();
        for policy in &limiting {
            let rules: Vec<usize> = (0..)
                .zip(rules(policy))
                .filter(|(_, rule)| lets_tcp_in(rule) && !has_tunnels(rule, &limiting, pod))
                .map(|(index, _)| index)
                .collect();
            if rules.is_empty() {
                continue;
            }
            let name = policy.metadata.name.as_deref().unwrap_or_default();
            let (all, pods) = found.entry((namespace, name)).or_default();
            all.extend(rules);
            pods.push(pod.metadata.name.clone().unwrap_or_default());
        }
    }
    let found = found.into_iter();
    let named = found.map(|((namespace, name), (rules, pods))| Blocking {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        pods,
        patch: patch(&rules),
    });
    Ok(named.collect())
}

/// Returns the clients whose tunnels a policy by itself lets in to a Pod.
pub fn tunnels(policy: &NetworkPolicy, pod: &Pod) -> Tunnels {
    if !limits(policy, pod) {
        return Tunnels::NotLimited;
    }
    let mut open = rules(policy)
        .iter()
        .filter(|rule| has_port(rule, pod))
        .peekable();
    if open.peek().is_none() {
        Tunnels::FromNone
    } else if open.any(is_for_all) {
        Tunnels::FromAll
    } else {
        Tunnels::FromSome
    }
}

/// Whether the clients of a rule may reach the Pod's port for tunnels, by this rule or another.
fn has_tunnels(rule: &NetworkPolicyIngressRule, limiting: &[&NetworkPolicy], pod: &Pod) -> bool {
    let mut all = limiting.iter().flat_map(|policy| rules(policy));
    all.any(|other| has_port(other, pod) && (is_for_all(other) || other.from == rule.from))
}

/// Whether a policy is for connections to a Pod.
fn limits(policy: &NetworkPolicy, pod: &Pod) -> bool {
    let Some(spec) = &policy.spec else {
        return false;
    };
    // Without types, every policy is for connections to Pods.
    let types = spec.policy_types.as_deref().unwrap_or_default();
    let none = Labels::new();
    policy.metadata.namespace == pod.metadata.namespace
        && (types.is_empty() || types.iter().any(|of| of == "Ingress"))
        && selects(
            spec.pod_selector.as_ref(),
            pod.metadata.labels.as_ref().unwrap_or(&none),
        )
}

fn rules(policy: &NetworkPolicy) -> &[NetworkPolicyIngressRule] {
    let spec = policy.spec.as_ref();
    spec.and_then(|spec| spec.ingress.as_deref())
        .unwrap_or_default()
}

fn is_for_all(rule: &NetworkPolicyIngressRule) -> bool {
    rule.from.as_ref().is_none_or(Vec::is_empty)
}

/// Whether a rule lets clients in by TCP, which tunnels carry.
fn lets_tcp_in(rule: &NetworkPolicyIngressRule) -> bool {
    let ports = rule.ports.as_deref().unwrap_or_default();
    ports.is_empty() || ports.iter().any(is_tcp)
}

fn is_tcp(port: &NetworkPolicyPort) -> bool {
    port.protocol.as_deref().unwrap_or("TCP") == "TCP"
}

/// Whether a rule has the Pod's port for tunnels. A rule without ports is for all ports.
fn has_port(rule: &NetworkPolicyIngressRule, pod: &Pod) -> bool {
    let ports = rule.ports.as_deref().unwrap_or_default();
    ports.is_empty() || ports.iter().any(|port| is_port(port, pod))
}

fn is_port(given: &NetworkPolicyPort, pod: &Pod) -> bool {
    if !is_tcp(given) {
        return false;
    }
    let wanted = i32::from(HBONE);
    match &given.port {
        None => true,
        Some(IntOrString::Int(first)) => {
            (*first..=given.end_port.unwrap_or(*first)).contains(&wanted)
        }
        // Kubernetes has ranges of numbers only.
        Some(IntOrString::String(name)) => {
            let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
            let mut ports = containers.flat_map(|of| of.ports.iter().flatten());
            ports.any(|port| {
                port.name.as_ref() == Some(name)
                    && port.container_port == wanted
                    && port.protocol.as_deref().unwrap_or("TCP") == "TCP"
            })
        }
    }
}

/// Whether a selector matches labels. An empty selector matches all.
fn selects(selector: Option<&LabelSelector>, labels: &Labels) -> bool {
    // The API server accepts only selectors that can be read. For any other selector, the policy counts as one that selects.
    selector.is_none_or(|selector| {
        Selector::try_from(selector.clone()).map_or(true, |selector| selector.matches(labels))
    })
}

/// Whether labels enrol a Pod; `None` if they do not say.
fn enrols(labels: Option<&Labels>) -> Option<bool> {
    match labels?.get(LABEL_MODE)?.as_str() {
        "ambient" => Some(true),
        "none" => Some(false),
        _ => None,
    }
}

/// Whether labels or the configuration enrol a Pod that runs in a network namespace of its own.
fn is_enrolled(pod: &Pod, by_namespace: Option<bool>, configured: Configured<'_>) -> bool {
    let annotations = pod.metadata.annotations.as_ref();
    let has_sidecar = annotations.is_some_and(|all| all.contains_key(SIDECAR));
    let on_node = pod.spec.as_ref().and_then(|spec| spec.host_network) == Some(true);
    let phase = pod.status.as_ref().and_then(|of| of.phase.as_deref());
    let has_ended = matches!(phase, Some("Succeeded" | "Failed"));
    let metadata = &pod.metadata;
    let [namespace, name] = [&metadata.namespace, &metadata.name];
    let [enforced, without_label] = configured(
        namespace.as_deref().unwrap_or_default(),
        name.as_deref().unwrap_or_default(),
    );
    let by_label = enrols(metadata.labels.as_ref()).or(by_namespace);
    let is_asked = enforced.or(by_label).or(without_label).unwrap_or_default();
    is_asked && !has_sidecar && !on_node && !has_ended
}

/// Adds the port to these rules. They have ports, because a rule without ports has all of them.
fn patch(rules: &BTreeSet<usize>) -> Value {
    let add = |index: &usize| {
        json!({
            "op": "add",
            "path": format!("/spec/ingress/{index}/ports/-"),
            "value": { "protocol": "TCP", "port": HBONE },
        })
    };
    rules.iter().map(add).collect()
}

fn read<'a, T: Deserialize<'a>>(items: &'a [Value], kind: &str) -> Result<Vec<T>, String> {
    let of_kind = items.iter().filter(|item| item["kind"] == kind);
    let read = |item: &'a Value| {
        let metadata = &item["metadata"];
        let name = |key: &str| metadata[key].as_str().unwrap_or_default();
        T::deserialize(item).map_err(|error| {
            let (namespace, name) = (name("namespace"), name("name"));
            format!("cannot read {kind} {namespace}/{name}: {error}")
        })
    };
    of_kind.map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod() -> Value {
        json!({
            "kind": "Pod",
            "metadata": {
                "name": "web-1",
                "namespace": "shop",
                "labels": { "app": "web", "tier": "front" },
            },
            "spec": { "containers": [{ "name": "web", "ports": [
                { "name": "http", "containerPort": 8080 },
                { "name": "tunnel", "containerPort": 15008 },
                { "name": "quic", "containerPort": 15008, "protocol": "UDP" },
            ] }] },
        })
    }

    fn policy(spec: &Value) -> Value {
        json!({
            "kind": "NetworkPolicy",
            "metadata": { "name": "limit", "namespace": "shop" },
            "spec": spec,
        })
    }

    #[test]
    fn a_policys_rules_tell_whose_tunnels_come_in() {
        use Tunnels::{FromAll, FromNone, FromSome, NotLimited};
        let pod = Pod::deserialize(pod()).unwrap();
        let ports = |ports: Value| json!({ "podSelector": {}, "ingress": [{ "ports": ports }] });
        let selects = |selector: Value| json!({ "podSelector": selector });
        let expression = |key: &str, operator: &str, values: &[&str]| {
            let wanted = json!({ "key": key, "operator": operator, "values": values });
            selects(json!({ "matchExpressions": [wanted] }))
        };
        let front = json!([{ "podSelector": { "matchLabels": { "app": "front" } } }]);
        for (spec, wanted) in [
            // Whether it is for connections to the Pod.
            (json!({}), FromNone),
            (json!({ "policyTypes": ["Egress"] }), NotLimited),
            (json!({ "policyTypes": ["Egress", "Ingress"] }), FromNone),
            (json!({ "policyTypes": [] }), FromNone),
            (json!({ "egress": [{}] }), FromNone),
            (
                selects(json!({ "matchLabels": { "app": "web" } })),
                FromNone,
            ),
            (
                selects(json!({ "matchLabels": { "app": "db" } })),
                NotLimited,
            ),
            (
                selects(json!({ "matchLabels": { "app": "web", "tier": "back" } })),
                NotLimited,
            ),
            (expression("app", "In", &["web", "db"]), FromNone),
            (expression("app", "In", &["db"]), NotLimited),
            (expression("app", "NotIn", &["web"]), NotLimited),
            (expression("zone", "NotIn", &["a"]), FromNone),
            (expression("app", "Exists", &[]), FromNone),
            (expression("app", "DoesNotExist", &[]), NotLimited),
            // From where.
            (json!({ "ingress": [] }), FromNone),
            (json!({ "ingress": [{}] }), FromAll),
            (json!({ "ingress": [{ "from": [] }] }), FromAll),
            (json!({ "ingress": [{ "from": front }] }), FromSome),
            (json!({ "ingress": [{ "from": front }, {}] }), FromAll),
            // To which port.
            (ports(json!([])), FromAll),
            (ports(json!([{}])), FromAll),
            (ports(json!([{ "protocol": "UDP" }])), FromNone),
            (ports(json!([{ "port": 8080 }])), FromNone),
            (ports(json!([{ "port": 8080 }, { "port": 15008 }])), FromAll),
            (
                ports(json!([{ "port": 15008, "protocol": "UDP" }])),
                FromNone,
            ),
            (ports(json!([{ "port": 15000, "endPort": 15010 }])), FromAll),
            (
                ports(json!([{ "port": 15000, "endPort": 15007 }])),
                FromNone,
            ),
            (ports(json!([{ "port": 15000 }])), FromNone),
            (ports(json!([{ "port": "http" }])), FromNone),
            (ports(json!([{ "port": "tunnel" }])), FromAll),
            (ports(json!([{ "port": "quic" }])), FromNone),
            (
                ports(json!([{ "port": "quic", "protocol": "UDP" }])),
                FromNone,
            ),
        ] {
            let policy = NetworkPolicy::deserialize(policy(&spec)).unwrap();
            assert_eq!(tunnels(&policy, &pod), wanted, "{spec}");
        }
        let mut elsewhere = policy(&json!({}));
        elsewhere["metadata"]["namespace"] = "other".into();
        let elsewhere = NetworkPolicy::deserialize(elsewhere).unwrap();
        assert_eq!(tunnels(&elsewhere, &pod), NotLimited);
    }

    #[test]
    fn rules_that_let_clients_in_without_their_tunnels_are_patched() {
        let front = json!([{ "podSelector": { "matchLabels": { "app": "front" } } }]);
        let http = json!({ "from": front, "ports": [{ "port": 8080 }] });
        let mut namespace = json!({
            "kind": "Namespace",
            "metadata": { "name": "shop", "labels": { "istio.io/dataplane-mode": "ambient" } },
        });
        let found = |namespace: &Value, pod: &Value, policies: &[Value]| {
            let mut items = vec![namespace.clone(), pod.clone(), json!({ "kind": "Service" })];
            items.extend(policies.iter().enumerate().map(|(number, spec)| {
                let mut policy = policy(spec);
                policy["metadata"]["name"] = format!("p{number}").into();
                policy
            }));
            let found = blocking(&json!({ "items": items }), &|_, _| [None; 2]).unwrap();
            let names = found.iter().map(|of| of.name.clone());
            (names.collect::<Vec<_>>(), found)
        };
        let deny = json!({});
        let rules = json!({ "ingress": [{}, http] });
        for (policies, wanted) in [
            // Lets nobody in, so tunnels change nothing.
            (vec![deny.clone()], vec![]),
            (vec![deny.clone(), json!({ "ingress": [http] })], vec!["p1"]),
            (vec![rules.clone()], vec![]),
            (
                vec![
                    json!({ "ingress": [http] }),
                    json!({ "ingress": [{ "from": front }] }),
                ],
                vec![],
            ),
            (
                vec![
                    json!({ "ingress": [http] }),
                    json!({ "ingress": [{ "ports": [{ "port": 15008 }] }] }),
                ],
                vec![],
            ),
        ] {
            let (names, found) = found(&namespace, &pod(), &policies);
            assert_eq!(names, wanted, "{policies:?}: {found:?}");
        }
        let udp = json!({ "ports": [{ "port": 53, "protocol": "UDP" }] });
        let all = json!({ "ports": [{ "port": 443 }] });
        let (_, both) = found(
            &namespace,
            &pod(),
            &[json!({ "ingress": [http, udp, all] })],
        );
        assert_eq!(both[0].pods, ["web-1"]);
        let value = json!({ "protocol": "TCP", "port": 15008 });
        let wanted = json!([
            { "op": "add", "path": "/spec/ingress/0/ports/-", "value": value },
            { "op": "add", "path": "/spec/ingress/2/ports/-", "value": value },
        ]);
        assert_eq!(both[0].patch, wanted);
        // Pods that are not enrolled.
        let policies = [json!({ "ingress": [http] })];
        for (path, value) in [
            ("/metadata/labels/istio.io~1dataplane-mode", json!("none")),
            ("/metadata/annotations", json!({ SIDECAR: "{}" })),
            ("/spec/hostNetwork", json!(true)),
            ("/status", json!({ "phase": "Succeeded" })),
        ] {
            let mut pod = pod();
            let (parent, key) = path.rsplit_once('/').unwrap();
            pod.pointer_mut(parent).unwrap()[key.replace("~1", "/")] = value;
            assert_eq!(found(&namespace, &pod, &policies).0, [""; 0], "{path}");
        }
        namespace["metadata"]["labels"] = json!({});
        assert_eq!(found(&namespace, &pod(), &policies).0, [""; 0]);
        let mut labelled = pod();
        labelled["metadata"]["labels"][LABEL_MODE] = "ambient".into();
        assert_eq!(found(&namespace, &labelled, &policies).0, ["p0"]);
    }

    #[test]
    fn the_configuration_enrols_pods() {
        let http = json!({ "ingress": [{ "ports": [{ "port": 8080 }] }] });
        for (label, configured, wanted) in [
            (None, [None, None], false),
            (None, [None, Some(true)], true),
            (None, [Some(true), Some(false)], true),
            (Some("none"), [None, Some(true)], false),
            (Some("none"), [Some(true), None], true),
            (Some("ambient"), [None, Some(false)], true),
            (Some("ambient"), [Some(false), Some(true)], false),
        ] {
            let mut pod = pod();
            pod["metadata"]["labels"][LABEL_MODE] = json!(label);
            if label.is_none() {
                pod["metadata"]["labels"] = json!({});
            }
            let list = json!({ "items": [pod, policy(&http)] });
            let is_its = |namespace: &str, name: &str| {
                assert_eq!((namespace, name), ("shop", "web-1"));
                configured
            };
            let found = blocking(&list, &is_its).unwrap();
            assert_eq!(!found.is_empty(), wanted, "{label:?} {configured:?}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let blocking = |list: &Value| blocking(list, &|_, _| [None; 2]);
        assert!(blocking(&json!({})).unwrap_err().contains("kubectl get"));
        let mut wrong = policy(&json!({}));
        wrong["spec"] = json!({ "ingress": 3 });
        let error = blocking(&json!({ "items": [wrong] })).unwrap_err();
        assert!(
            error.starts_with("cannot read NetworkPolicy shop/limit: "),
            "{error}"
        );
    }
}
