//! AuthorizationPolicies and PeerAuthentications, connections, and the decisions of Istio's documentation:
//! <https://istio.io/latest/docs/reference/config/security/authorization-policy/>, `conditions/` and
//! `peer_authentication/` beside it, and <https://istio.io/latest/docs/ambient/usage/l4-policy/>.
//!
//! The tables have blocks of policies and of connections:
//!
//! * `NAMESPACE/NAME ACTION [LABELS] | RULE | RULE`: a policy. `from`, `to` and `when` begin an entry of a rule, `!` stands
//!   for `not…`. `NAMESPACE/NAME MODE [LABELS] PORT=MODE @AGE`: a PeerAuthentication.
//! * `> CLIENT :PORT s=SOURCE d=DESTINATION @NAMESPACE/LABELS = yes|no POLICY RULE ~ RESULTS OF DRY RUNS`: a connection. The
//!   client is a service account, with its trust domain before `:`, or `-` for plaintext. After `@` is the workload.

mod istiod;

use std::{collections::BTreeMap, net::IpAddr};

use dataplane_source::objects::{Findings, IstioObjects, istio_policy, object_name, wire};
use model::{
    Identity, Istio, Label,
    authorization::{Connection, PolicyName, Reason},
};
use serde_json::{Map, Value, json};

const MODES: [&str; 5] = ["STRICT", "PERMISSIVE", "DISABLE", "UNSET", "SOMETIMES"];

fn labels(text: &str) -> BTreeMap<&str, &str> {
    let labels = text.split(',').filter(|label| !label.is_empty());
    labels.map(|label| label.split_once('=').unwrap()).collect()
}

/// Returns a rule from its entries, such as `from namespaces=a,b !principals=* to ports=80 when source.ip=10.0.0.1`.
fn rule(text: &str) -> Value {
    let mut rule = json!({});
    let mut list = "";
    for word in text.split_whitespace().filter(|word| *word != "{}") {
        let Some((key, values)) = word.split_once('=') else {
            list = word;
            let entries = rule.as_object_mut().unwrap().entry(list);
            let entries = entries.or_insert_with(|| json!([]));
            entries.as_array_mut().unwrap().push(json!({}));
            continue;
        };
        let values: Vec<&str> = values.split(',').collect();
        let (not, key) = key
            .strip_prefix('!')
            .map_or((false, key), |key| (true, key));
        let entry = rule[list].as_array_mut().unwrap().last_mut().unwrap();
        match (list, not) {
            ("when", _) => {
                entry["key"] = key.into();
                entry[if not { "notValues" } else { "values" }] = json!(values);
            }
            (_, false) => entry[object(list)][key] = json!(values),
            (_, true) => {
                let (first, rest) = key.split_at(1);
                let key = format!("not{}{rest}", first.to_uppercase());
                entry[object(list)][key] = json!(values);
            }
        }
    }
    rule
}

fn object(list: &str) -> &str {
    if list == "to" { "operation" } else { "source" }
}

/// Adds the policy of a line.
fn put(line: &str, objects: &mut IstioObjects) {
    let mut words_and_rules = line.split('|');
    let words: Vec<&str> = words_and_rules.next().unwrap().split_whitespace().collect();
    let (namespace, name) = words[0].split_once('/').unwrap();
    let mut metadata = json!({ "namespace": namespace, "name": name });
    let is_of_peers = MODES.contains(&words[1]);
    let rules: Vec<Value> = words_and_rules.map(rule).collect();
    let mut spec = if is_of_peers {
        json!({ "mtls": { "mode": words[1] } })
    } else {
        json!({ "action": words[1], "rules": rules })
    };
    let mut ports = Map::new();
    for word in &words[2..] {
        if let Some(selector) = word.strip_prefix('[') {
            let labels = labels(selector.strip_suffix(']').unwrap());
            spec["selector"] = json!({ "matchLabels": labels });
        } else if let Some(age) = word.strip_prefix('@') {
            metadata["creationTimestamp"] = format!("2026-01-01T00:00:0{age}Z").into();
        } else if let Some((port, mode)) = word.split_once('=') {
            ports.insert(port.to_owned(), json!({ "mode": mode }));
        } else if *word == "dry-run" {
            metadata["annotations"] = json!({ "istio.io/dry-run": "true" });
        } else {
            assert_eq!(*word, "target", "{line}");
            spec["targetRefs"] = json!([{ "kind": "Gateway", "name": "waypoint" }]);
        }
    }
    if !ports.is_empty() {
        spec["portLevelMtls"] = Value::Object(ports);
    }
    let kind = if is_of_peers {
        "PeerAuthentication"
    } else {
        "AuthorizationPolicy"
    };
    store(
        json!({ "kind": kind, "metadata": metadata, "spec": spec }),
        objects,
    );
}

/// Reads a policy, and adds it.
fn store(object: Value, objects: &mut IstioObjects) {
    let kind = object["kind"].as_str().unwrap().to_owned();
    let text = object.to_string();
    let object: wire::IstioPolicy = serde_json::from_value(object).unwrap();
    let mut findings = Findings::default();
    let policy = istio_policy(&kind, &object, &mut findings);
    assert!(findings.faults.is_empty(), "{text}: {findings:?}");
    objects.put(&kind, &object_name(&object.metadata), policy);
}

fn told(reason: &Reason<'_>) -> String {
    let name = |of: &PolicyName| of.object.split(' ').nth(1).unwrap_or_default().to_owned();
    match reason {
        Reason::NoPolicy => "yes".to_owned(),
        Reason::NotAllowed => "no".to_owned(),
        Reason::Allowed(of, rule) => format!("yes {} {}", name(of), rule + 1),
        Reason::Denied(of, rule) => format!("no {} {}", name(of), rule + 1),
        Reason::Plaintext(of) => format!("no {} plaintext", name(of)),
        Reason::Missing(_) | Reason::Unread => unreachable!("all policies are known"),
    }
}

/// Decides about the connection of a line.
fn decided(line: &str, istio: &Istio) -> String {
    let mut peer = None;
    let (mut source, mut destination, mut port) = ("10.0.0.1", "10.9.0.1", 80);
    let mut workload = "shop/app=web,version=v1";
    for word in line.split_whitespace() {
        if let Some(given) = word.strip_prefix(':') {
            port = given.parse().unwrap();
        } else if let Some(given) = word.strip_prefix('@') {
            workload = given;
        } else if let Some(given) = word.strip_prefix("s=") {
            source = given;
        } else if let Some(given) = word.strip_prefix("d=") {
            destination = given;
        } else if word != "-" {
            let (domain, account) = word.split_once(':').unwrap_or(("cluster.local", word));
            let (namespace, account) = account.split_once('/').unwrap();
            peer = Some(Identity::new(domain, namespace, account).unwrap());
        }
    }
    let (namespace, own) = workload.split_once('/').unwrap();
    let own = labels(own).into_iter();
    let own: Vec<Label> = own.map(|(key, value)| (key.into(), value.into())).collect();
    let policies = istio.policies_of(namespace, &own);
    let destination: IpAddr = destination.parse().unwrap();
    let connection = Connection::new(
        peer.as_ref(),
        source.parse().unwrap(),
        (destination, port).into(),
    );
    let decision = policies.decide(&connection);
    let explained = policies.explain(&connection);
    assert_eq!(explained.last(), Some(&decision.reason.to_string()));
    let dry_run: Vec<String> = decision.dry_run.iter().map(told).collect();
    let reason = told(&decision.reason);
    assert_eq!(decision.is_allowed(), reason.starts_with("yes"));
    match dry_run.as_slice() {
        [] => reason,
        some => format!("{reason} ~ {}", some.join(", ")),
    }
}

#[test]
fn decisions_are_those_of_istios_documentation() {
    let (mut rows, mut wrong) = (0, Vec::new());
    for table in [
        include_str!("policies.txt"),
        include_str!("rules.txt"),
        include_str!("plaintext.txt"),
    ] {
        for block in table.split("\n\n") {
            let lines = block.lines().filter(|line| !line.starts_with('#'));
            let mut objects = IstioObjects::new(true);
            for line in lines {
                let Some(row) = line.strip_prefix("> ") else {
                    put(line, &mut objects);
                    continue;
                };
                rows += 1;
                let istio = Istio {
                    namespaces: objects.namespaces(),
                    root: "istio-system".into(),
                    ..Istio::default()
                };
                let (connection, wanted) = row.split_once(" = ").unwrap();
                let found = decided(connection, &istio);
                if found != wanted {
                    wrong.push(format!("{block}\nfound {connection} = {found}\n"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(rows >= 300, "{rows}");
}
