//! Istio's objects that limit connections: the label of a waypoint, AuthorizationPolicies and PeerAuthentications. A part
//! that cannot be read limits everything that it may limit.

use std::{collections::BTreeMap, sync::Arc};

use model::{
    Effect, IstioPolicy, Label, ServiceName, UseWaypoint,
    authorization::{Action, Authorization, PeerAuthentication},
};

use super::{
    Findings, authorization, check_name, label, object_name,
    wire::{self as api, IstioPolicySpec, PolicyMode, Readable},
};

/// A label of Services, ServiceEntries, Pods and Namespaces: the waypoint through which connections to them go.
const LABEL_WAYPOINT: &str = "istio.io/use-waypoint";
/// A label beside [`LABEL_WAYPOINT`]: the namespace of the waypoint.
const LABEL_WAYPOINT_NAMESPACE: &str = "istio.io/use-waypoint-namespace";
/// Maximum number of labels of a selector, and of ports of a policy.
const PARTS_MAX: usize = 64;
/// Maximum length of a selector, in bytes.
const SELECTOR_MAX: usize = 4096;

/// Returns the waypoint that labels of an object in a namespace name. `None`: the labels of the Namespace count.
pub fn waypoint(labels: &BTreeMap<String, String>, namespace: &str) -> Option<UseWaypoint> {
    // The Service and the Pods of a waypoint itself have none.
    let manager = label(labels, "gateway.istio.io/managed").unwrap_or_default();
    if ["istio.io-mesh-controller", "istio.io-eastwest-controller"].contains(&manager) {
        return Some(UseWaypoint::None);
    }
    let name = label(labels, LABEL_WAYPOINT).filter(|name| !name.is_empty());
    name.map(|name| {
        if name == "none" {
            return UseWaypoint::None;
        }
        let namespace = label(labels, LABEL_WAYPOINT_NAMESPACE)
            .filter(|of| !of.is_empty())
            .unwrap_or(namespace);
        UseWaypoint::Gateway(ServiceName::new(namespace, name))
    })
}

/// Reads an AuthorizationPolicy (`kind`), or a PeerAuthentication. `None`: it limits no connections to Pods.
pub fn istio_policy(
    kind: &str,
    object: &api::IstioPolicy,
    findings: &mut Findings,
) -> Option<IstioPolicy> {
    check_name(&object.metadata, findings);
    let dry_run = object.metadata.annotations.get("istio.io/dry-run");
    let dry_run =
        dry_run.is_some_and(|is| ["1", "t", "T", "true", "True", "TRUE"].contains(&&**is));
    let closed = || {
        Effect::Authorization(Arc::new(Authorization {
            dry_run,
            ..Authorization::closed()
        }))
    };
    let nothing = IstioPolicySpec::default();
    let spec = match read(object.spec.as_ref(), "spec") {
        Ok(spec) => spec.unwrap_or(&nothing),
        Err(path) => {
            unread(path, findings);
            let effect = closed();
            return Some(IstioPolicy {
                selector: None,
                effect,
            });
        }
    };
    let effect = if kind == "AuthorizationPolicy" {
        authorization(object, spec, dry_run, findings).unwrap_or_else(|path| {
            unread(path, findings);
            Some(closed())
        })?
    } else {
        let (strict, ports) = modes(spec).unwrap_or_else(|path| {
            unread(path, findings);
            (Some(true), BTreeMap::new())
        });
        let created = object.metadata.creation_timestamp.as_ref();
        Effect::Plaintext(Arc::new(PeerAuthentication {
            created: created.map(|time| time.0.as_second()),
            strict,
            ports,
        }))
    };
    let selector = selector(spec).map_err(|path| unread(path, findings)).ok();
    Some(IstioPolicy { selector, effect })
}

fn unread(path: &str, findings: &mut Findings) {
    findings.note(
        path,
        "cannot be read, so the agent treats the policy as one that limits all connections to the Pods that it may select",
    );
}

/// Returns a policy in place of one that cannot be read.
pub fn unreadable_policy() -> IstioPolicy {
    IstioPolicy {
        selector: None,
        effect: Effect::Authorization(Arc::new(Authorization::closed())),
    }
}

/// Returns a field's value, or the field's path if the value cannot be read.
fn read<'a, T>(
    field: Option<&'a Readable<T>>,
    path: &'static str,
) -> Result<Option<&'a T>, &'static str> {
    match field {
        None => Ok(None),
        Some(Readable::Read(value)) => Ok(Some(value)),
        Some(Readable::Unread(_)) => Err(path),
    }
}

/// A policy with ALLOW and without rules limits everything; one with another action and without rules, nothing. Only
/// waypoints enforce a policy with targets.
fn authorization(
    object: &api::IstioPolicy,
    spec: &IstioPolicySpec,
    dry_run: bool,
    findings: &mut Findings,
) -> Result<Option<Effect>, &'static str> {
    let targets = read(spec.target_refs.as_ref(), "spec.targetRefs")?;
    let target = read(spec.target_ref.as_ref(), "spec.targetRef")?;
    let rules = read(spec.rules.as_ref(), "spec.rules")?.map_or(&[][..], Vec::as_slice);
    let word = read(spec.action.as_ref(), "spec.action")?.map_or("", String::as_str);
    if target.is_some() || targets.is_some_and(|targets| !targets.is_empty()) {
        return Ok(None);
    }
    let action = match word {
        "" | "ALLOW" => Action::Allow,
        "DENY" => Action::Deny,
        "AUDIT" | "CUSTOM" => {
            let text = format!(
                "{word} is not evaluated on a node, as by Istio's ztunnel (ZtunnelAccepted=False, UnsupportedValue)"
            );
            findings.note("spec.action", text);
            let is_custom = word == "CUSTOM" && !rules.is_empty() && !dry_run;
            return Ok(is_custom.then_some(Effect::Custom));
        }
        _ => return Err("spec.action"),
    };
    let namespace = object_name(&object.metadata);
    let rules = authorization::rules(action, rules, namespace.namespace(), findings);
    let is_any = action == Action::Allow || !rules.is_empty();
    Ok(is_any.then(|| {
        Effect::Authorization(Arc::new(Authorization {
            action,
            dry_run,
            rules,
        }))
    }))
}

/// Returns whether a PeerAuthentication refuses plaintext, and whether it does at single ports.
fn modes(spec: &IstioPolicySpec) -> Result<(Option<bool>, BTreeMap<u16, bool>), &'static str> {
    let strict = |of: &PolicyMode, path| {
        if of.keys().any(|key| key != "mode") {
            return Err(path);
        }
        let mode = of.get("mode").and_then(Option::as_deref);
        match mode.unwrap_or_default() {
            "" | "UNSET" => Ok(None),
            "STRICT" => Ok(Some(true)),
            "PERMISSIVE" | "DISABLE" => Ok(Some(false)),
            _ => Err(path),
        }
    };
    let of_all = read(spec.mtls.as_ref(), "spec.mtls")?;
    let of_all = of_all.map_or(Ok(None), |of| strict(of, "spec.mtls.mode"))?;
    let path = "spec.portLevelMtls";
    let given = read(spec.port_level_mtls.as_ref(), path)?;
    let mut ports = BTreeMap::new();
    for (port, of) in given.into_iter().flatten() {
        let port = authorization::port(port).map_err(|_| path)?;
        ports.extend(strict(of, path)?.map(|is_strict| (port, is_strict)));
    }
    if ports.len() > PARTS_MAX {
        return Err(path);
    }
    Ok((of_all, ports))
}

/// Returns the labels, sorted.
fn selector(spec: &IstioPolicySpec) -> Result<Box<[Label]>, &'static str> {
    let path = "spec.selector";
    let selector = read(spec.selector.as_ref(), path)?;
    // Istio has no other selectors, and no wildcards in this one.
    let is_known = |key: &String| key == "matchLabels";
    if selector.is_some_and(|selector| !selector.keys().all(is_known)) {
        return Err(path);
    }
    let labels = selector.and_then(|selector| selector.get("matchLabels")?.as_ref());
    let labels = labels.into_iter().flatten();
    let labels: Box<[Label]> = labels
        .map(|(key, value)| (key.as_str().into(), value.as_str().into()))
        .collect();
    let length: usize = labels
        .iter()
        .map(|(key, value)| key.len() + value.len())
        .sum();
    let is_wrong =
        |(key, value): &Label| key.is_empty() || key.contains('*') || value.contains('*');
    if labels.iter().any(is_wrong) || labels.len() > PARTS_MAX || length > SELECTOR_MAX {
        return Err(path);
    }
    Ok(labels)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// Returns the effect, the selector in braces, and the fields that cannot be read.
    fn told(kind: &str, annotations: &Value, spec: &Value) -> String {
        let metadata = json!({ "name": "p", "annotations": annotations });
        let object = json!({ "metadata": metadata, "spec": spec });
        let object: api::IstioPolicy = serde_json::from_value(object).unwrap();
        let mut findings = Findings::default();
        let policy = istio_policy(kind, &object, &mut findings);
        assert!(findings.faults.is_empty());
        let mode = |is_strict| if is_strict { "strict" } else { "off" };
        let mut words = Vec::new();
        match &policy {
            None => words.push("nothing".to_owned()),
            Some(IstioPolicy { selector, effect }) => {
                match effect {
                    Effect::Plaintext(of) => {
                        words.push(of.strict.map_or("unset", mode).to_owned());
                        let ports = of.ports.iter();
                        words.extend(ports.map(|(port, is)| format!("{port}={}", mode(*is))));
                    }
                    Effect::Authorization(of) => words.push(format!("{:?}", of.extent())),
                    Effect::Custom => words.push("Custom".to_owned()),
                }
                words.push(selector.as_ref().map_or("{?}".to_owned(), |labels| {
                    let labels = labels.iter().map(|(key, value)| format!("{key}={value}"));
                    format!("{{{}}}", labels.collect::<Vec<_>>().join(","))
                }));
            }
        }
        words.extend(findings.notes.into_iter().map(|(path, _)| path));
        words.join(" ")
    }

    fn check(kind: &str, cases: &str) {
        for case in cases.lines().skip(1) {
            let (spec, wanted) = case.split_once(" => ").unwrap();
            let spec = serde_json::from_str(spec).unwrap();
            assert_eq!(told(kind, &json!({}), &spec), wanted, "{case}");
        }
    }

    /// <https://istio.io/latest/docs/reference/config/security/authorization-policy/>: a policy without rules never matches,
    /// which "is equivalent to setting a default of deny for the target workloads if the action is ALLOW".
    #[test]
    fn an_authorization_policy_limits_what_it_limits_in_istio() {
        let kind = "AuthorizationPolicy";
        check(
            kind,
            r#"
            {} => AllowsSome {}
            null => AllowsSome {}
            {"rules": [{"from": [], "when": null}]} => AllowsAll {}
            {"rules": [{"from": [], "to": [{"operation": {"ports": ["80"]}}]}]} => AllowsSome {}
            {"action": "ALLOW", "rules": []} => AllowsSome {}
            {"rules": [{"to": []}, {}]} => AllowsAll {}
            {"action": "DENY"} => nothing
            {"action": "DENY", "rules": []} => nothing
            {"action": "DENY", "rules": [{}]} => Denies {}
            {"action": "CUSTOM"} => nothing spec.action
            {"action": "CUSTOM", "rules": [{"to": []}]} => Custom {} spec.action
            {"action": "AUDIT", "rules": [{}]} => nothing spec.action
            {"selector": {"matchLabels": {"b": "2", "a": "1"}}} => AllowsSome {a=1,b=2}
            {"selector": {}} => AllowsSome {}
            {"selector": {"matchLabels": null}} => AllowsSome {}
            {"targetRefs": [{"kind": "Service"}]} => nothing
            {"targetRefs": []} => AllowsSome {}
            {"targetRefs": null} => AllowsSome {}
            {"targetRefs": {}} => Denies {} spec.targetRefs
            {"targetRefs": 5} => Denies {} spec.targetRefs
            {"targetRef": {}} => nothing
            {"targetRef": null} => AllowsSome {}
            {"targetRef": {"kind": "Service", "name": null}} => nothing
            {"targetRef": []} => Denies {} spec.targetRef
            {"targetRef": 5} => Denies {} spec.targetRef
            {"targetRef": "x"} => Denies {} spec.targetRef
            {"later": [], "rules": [{}]} => AllowsAll {}
            "text" => Denies {?} spec
            [] => Denies {?} spec
            {"action": 5} => Denies {} spec.action
            {"action": "LATER"} => Denies {} spec.action
            {"rules": {}} => Denies {} spec.rules
            {"selector": 5} => AllowsSome {?} spec.selector
            {"selector": {"matchLabels": {"app": 5}}} => AllowsSome {?} spec.selector
            {"selector": {"matchLabels": {"app": "*"}}} => AllowsSome {?} spec.selector
            {"selector": {"labels": {"app": "web"}}} => AllowsSome {?} spec.selector"#,
        );
        for (annotation, wanted) in [("true", "Nothing {}"), ("false", "AllowsSome {}")] {
            let annotations = json!({ "istio.io/dry-run": annotation });
            assert_eq!(told(kind, &annotations, &json!({})), wanted);
        }
        let annotations = json!({ "istio.io/dry-run": "true" });
        let found = told(kind, &annotations, &json!({ "rules": 5 }));
        assert_eq!(found, "Nothing {} spec.rules");
    }

    #[test]
    fn a_peer_authentication_has_a_mode_and_modes_of_ports() {
        check(
            "PeerAuthentication",
            r#"
            {} => unset {}
            {"mtls": null} => unset {}
            {"mtls": {"mode": null}} => unset {}
            {"mtls": {"mode": "STRICT"}} => strict {}
            {"mtls": {"mode": "PERMISSIVE"}} => off {}
            {"portLevelMtls": {"80": {"mode": "DISABLE"}, "81": {}, "82": {"mode": "STRICT"}}} => unset 80=off 82=strict {}
            {"mtls": {"mode": "LATER"}} => strict {} spec.mtls.mode
            {"mtls": {"mode": 1}} => strict {} spec.mtls
            {"mtls": 1} => strict {} spec.mtls
            {"mtls": {"mod": "PERMISSIVE"}} => strict {} spec.mtls.mode
            {"portLevelMtls": 5} => strict {} spec.portLevelMtls
            {"portLevelMtls": {"x": {"mode": "DISABLE"}}} => strict {} spec.portLevelMtls
            {"portLevelMtls": {"+80": {"mode": "DISABLE"}}} => strict {} spec.portLevelMtls
            {"mtls": {"mode": "STRICT"}, "selector": 5} => strict {?} spec.selector"#,
        );
        let ports = (1..70).map(|port| (port.to_string(), json!({ "mode": "DISABLE" })));
        let spec = json!({ "portLevelMtls": Value::Object(ports.collect()) });
        let found = told("PeerAuthentication", &json!({}), &spec);
        assert_eq!(found, "strict {} spec.portLevelMtls");
    }

    #[test]
    fn what_exceeds_a_bound_limits_everything_that_it_may_select() {
        for (count, length, is_read) in [
            (64, 1, true),
            (65, 1, false),
            (2, 2000, true),
            (2, 4000, false),
        ] {
            let all = (0..count).map(|n| (format!("k{n}"), json!("v".repeat(length))));
            let spec = json!({ "selector": { "matchLabels": Value::Object(all.collect()) } });
            let found = told("AuthorizationPolicy", &json!({}), &spec);
            assert_eq!(!found.contains('?'), is_read, "{count} {length}");
        }
    }
}
