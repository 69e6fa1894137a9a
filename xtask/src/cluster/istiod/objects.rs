//! The objects that istiod and the dataplane read. They cover each way in which a kind can name endpoints.

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

/// Objects, one a line: kind, namespace or `-`, name, and fields in JSON, which are added to [`defaults`].
const LINES: &str = include_str!("objects.txt");

/// Returns all objects, in the order in which they are made.
pub fn all() -> Result<Vec<Value>> {
    LINES.lines().map(object).collect()
}

fn object(line: &str) -> Result<Value> {
    let words: Vec<&str> = line.splitn(4, ' ').collect();
    let [kind, namespace, name, fields] = *words.as_slice() else {
        anyhow::bail!("a word is missing: {line}");
    };
    let version = match kind {
        "EndpointSlice" => "discovery.k8s.io/v1",
        "ServiceEntry" | "WorkloadEntry" => "networking.istio.io/v1",
        "AuthorizationPolicy" | "PeerAuthentication" => "security.istio.io/v1",
        "Gateway" => "gateway.networking.k8s.io/v1",
        _ => "v1",
    };
    let mut object = defaults(kind, name);
    merge(
        &mut object,
        json!({ "apiVersion": version, "kind": kind, "metadata": { "name": name } }),
    );
    if namespace != "-" {
        object["metadata"]["namespace"] = namespace.into();
    }
    merge(
        &mut object,
        serde_json::from_str(fields).with_context(|| line.to_owned())?,
    );
    Ok(object)
}

/// Returns the fields of an object that its line does not set.
fn defaults(kind: &str, name: &str) -> Value {
    let ready = json!([{ "type": "Ready", "status": "True" }]);
    match kind {
        "Node" => json!({ "status": { "conditions": ready } }),
        "Pod" => json!({
            "spec": { "containers": [
                { "name": "main", "image": "none", "ports": [
                    { "name": "http", "containerPort": 8080 },
                    { "name": "dns", "containerPort": 5353, "protocol": "UDP" },
                ] },
                { "name": "side", "image": "none", "ports": [
                    { "name": "metrics", "containerPort": 9090 },
                    { "name": "http", "containerPort": 9999 },
                ] },
            ] },
            "status": { "phase": "Running", "conditions": ready },
        }),
        "Service" => json!({ "spec": {
            "ports": [{ "name": "http", "port": 80, "targetPort": 8080 }],
        } }),
        "ServiceEntry" => json!({ "spec": {
            "hosts": [format!("{name}.example.com")],
            "resolution": "STATIC",
            "ports": [{ "number": 443, "name": "tls", "protocol": "TLS" }],
        } }),
        _ => json!({}),
    }
}

/// Adds fields to an object, and to the objects in it.
fn merge(into: &mut Value, more: Value) {
    match more {
        Value::Object(fields) if into.is_object() || into.is_null() => {
            for (name, value) in fields {
                merge(&mut into[name], value);
            }
        }
        value => *into = value,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn there_are_enough_objects_and_each_has_a_name_of_its_own() {
        let all = all().unwrap();
        let name = |object: &Value| format!("{} {}", object["kind"], object["metadata"]);
        let names: BTreeSet<_> = all.iter().map(name).collect();
        assert_eq!(names.len(), all.len());
        assert!(all.len() >= 150, "{}", all.len());
    }
}
