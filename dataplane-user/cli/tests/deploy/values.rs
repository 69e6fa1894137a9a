//! The schema of the chart's values, by which Helm refuses unknown values and values of a wrong type.

use super::*;

/// Where the schema is written.
const SCHEMA: &str = "deploy/helm/dataplane/values.schema.json";

/// Returns the schema of the chart's values. The schema of `config` is the schema of configuration files.
fn schema() -> Value {
    let mut config = config::schema();
    plain(&mut config);
    let text = json!({ "type": "string" });
    let switch = json!({ "type": "boolean" });
    // Kubernetes checks the fields of its own objects.
    let object = json!({ "type": "object" });
    let objects = json!({ "type": "array", "items": object });
    let texts = json!({ "type": "object", "additionalProperties": { "type": ["string", "null"] } });
    let count = json!({ "type": ["integer", "string", "null"] });
    let mut rolling = closed(&json!({ "maxSurge": count, "maxUnavailable": count }));
    rolling["type"] = json!(["object", "null"]);
    let mut schema = closed(&json!({
        "affinity": object,
        "cleanup": closed(&json!({ "nodes": { "type": "array", "items": text } })),
        "cni": closed(&json!({ "binDir": text, "confDir": text })),
        "config": config,
        "foreignProxy": switch,
        // Helm gives it to charts that are part of another chart.
        "global": object,
        "image": closed(&json!({
            "pullPolicy": { "enum": ["", "Always", "IfNotPresent", "Never"] },
            "repository": text,
            "tag": text,
        })),
        "imagePullSecrets": objects,
        "machineDns": switch,
        "monitoring": closed(&json!({
            "enabled": switch,
            "interval": text,
            "labels": texts,
            "runbooks": text,
        })),
        "nodeSelector": texts,
        "priorityClassName": text,
        "resources": object,
        "seLinuxOptions": object,
        "surge": switch,
        "terminationGracePeriodSeconds": { "type": "integer", "minimum": 0 },
        "tolerations": objects,
        "updateStrategy": closed(&json!({
            "rollingUpdate": rolling,
            "type": { "enum": ["RollingUpdate", "OnDelete"] },
        })),
    }));
    // Every version of Helm knows this draft.
    schema["$schema"] = "http://json-schema.org/draft-07/schema#".into();
    schema
}

/// Returns the schema of an object with these keys and no others.
fn closed(properties: &Value) -> Value {
    json!({ "type": "object", "additionalProperties": false, "properties": properties })
}

/// Removes the texts of a schema, and formats that only generators of code know. Helm keeps the schema in the Secret of
/// each release, and the texts are in docs/configuration.md.
fn plain(schema: &mut Value) {
    match schema {
        Value::Object(keywords) => {
            for keyword in ["$schema", "default", "description", "format", "title"] {
                keywords.remove(keyword);
            }
            for (keyword, inner) in keywords {
                if keyword == "properties" {
                    let properties = inner.as_object_mut().into_iter();
                    properties.flat_map(|all| all.values_mut()).for_each(plain);
                } else {
                    plain(inner);
                }
            }
        }
        Value::Array(all) => all.iter_mut().for_each(plain),
        _ => {}
    }
}

/// Returns the places at which values do not follow the schema. Helm removes keys with the value null.
pub fn faults(values: &Value) -> Vec<String> {
    let mut values = values.clone();
    without_nulls(&mut values);
    let mut faults = Vec::new();
    check(&schema(), &values, "values", &mut faults);
    faults
}

fn without_nulls(value: &mut Value) {
    if let Value::Object(fields) = value {
        fields.retain(|_, value| !value.is_null());
        fields.values_mut().for_each(without_nulls);
    }
}

/// Checks a value by a schema. Supports only the keywords in use here.
fn check(schema: &Value, value: &Value, at: &str, faults: &mut Vec<String>) {
    let known = schema["properties"].as_object();
    for (keyword, wanted) in schema.as_object().into_iter().flatten() {
        let is_valid = match &**keyword {
            "$schema" => true,
            "type" => match wanted {
                Value::Array(all) => all.iter().any(|name| is(value, name)),
                name => is(value, name),
            },
            "const" => value == wanted,
            "enum" => wanted.as_array().unwrap().contains(value),
            "minimum" => value.as_f64() >= wanted.as_f64() || !value.is_number(),
            "maximum" => value.as_f64() <= wanted.as_f64() || !value.is_number(),
            "items" => {
                let items = value.as_array().into_iter().flatten();
                for (number, item) in items.enumerate() {
                    check(wanted, item, &format!("{at}[{number}]"), faults);
                }
                true
            }
            "properties" => {
                for (key, wanted) in known.into_iter().flatten() {
                    if let Some(inner) = value.get(key) {
                        check(wanted, inner, &format!("{at}.{key}"), faults);
                    }
                }
                true
            }
            "additionalProperties" => {
                let fields = value.as_object().into_iter().flatten();
                let is_known = |key: &String| known.is_some_and(|known| known.contains_key(key));
                for (key, inner) in fields.filter(|(key, _)| !is_known(key)) {
                    match wanted {
                        Value::Bool(false) => faults.push(format!("{at}.{key}: unknown")),
                        wanted => check(wanted, inner, &format!("{at}.{key}"), faults),
                    }
                }
                true
            }
            "anyOf" | "oneOf" => {
                let fits = |schema: &&Value| {
                    let mut faults = Vec::new();
                    check(schema, value, at, &mut faults);
                    faults.is_empty()
                };
                let fitting = wanted.as_array().unwrap().iter().filter(fits).count();
                fitting == 1 || (fitting > 1 && keyword == "anyOf")
            }
            other => panic!("{at}: the keyword {other} is not supported here"),
        };
        if !is_valid {
            faults.push(format!("{at}: {value} does not follow {keyword}: {wanted}"));
        }
    }
}

/// Tells if a value has a type of JSON schema.
fn is(value: &Value, name: &Value) -> bool {
    match name.as_str().unwrap() {
        "array" => value.is_array(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "null" => value.is_null(),
        "object" => value.is_object(),
        "string" => value.is_string(),
        other => panic!("the type {other} is not supported here"),
    }
}

#[test]
fn the_schema_of_values_has_the_schema_of_the_configuration() {
    let wanted = schema();
    let text = serde_json::to_string_pretty(&wanted).unwrap() + "\n";
    write_if_asked(SCHEMA, &text);
    let found: Value = serde_json::from_str(&read(SCHEMA)).unwrap();
    assert!(
        found == wanted,
        "{SCHEMA} is not what the settings make of it: {WRITE}"
    );
}

/// Collects the keys of a schema that values do not have.
fn missing_keys(schema: &Value, own: &Value, at: &str, missing: &mut Vec<String>) {
    for (key, schema) in schema["properties"].as_object().into_iter().flatten() {
        // Helm's own, and the configuration's, which has defaults.
        if at.is_empty() && ["config", "global"].contains(&&**key) {
            continue;
        }
        let at = format!("{at}.{key}");
        match own.get(key) {
            Some(own) => missing_keys(schema, own, &at, missing),
            // Without a default.
            None if at == ".updateStrategy.rollingUpdate.maxSurge" => {}
            None => missing.push(at),
        }
    }
}

/// The chart's own values follow the schema, and have all its keys.
#[test]
fn the_schema_has_the_charts_values() {
    let own = yaml(&read("deploy/helm/dataplane/values.yaml"));
    assert_eq!(faults(&own), [""; 0]);
    let mut missing = Vec::new();
    missing_keys(&schema(), &own, "", &mut missing);
    assert_eq!(missing, [""; 0], "not in values.yaml");
}

#[test]
fn unknown_values_are_refused() {
    for (values, wanted) in [
        (
            json!({ "config": { "source": { "kubernetes": { "apiserver": "https://192.0.2.1" } } } }),
            "values.config.source.kubernetes.apiserver: unknown",
        ),
        (json!({ "tolleration": [] }), "values.tolleration: unknown"),
        (
            json!({ "image": { "name": "dataplane" } }),
            "values.image.name: unknown",
        ),
        (
            json!({ "config": { "limits": { "affinityClients": 5 } } }),
            "values.config.limits.affinityClients: 5 does not follow minimum: 1024",
        ),
        (
            json!({ "config": { "onExit": "stop" } }),
            "values.config.onExit: \"stop\" does not follow anyOf",
        ),
        // YAML's `off` without quotes.
        (
            json!({ "config": { "listen": { "metrics": false } } }),
            "values.config.listen.metrics: false does not follow type",
        ),
        (
            json!({ "surge": "yes" }),
            "values.surge: \"yes\" does not follow type",
        ),
    ] {
        let found = faults(&values);
        assert!(
            found.len() == 1 && found[0].starts_with(wanted),
            "{values}: {found:?}"
        );
    }
}

/// Every configuration that the agent takes, Helm takes, too.
#[test]
fn the_full_configuration_is_accepted() {
    let all = include_str!("../../../settings/tests/config/all.yaml");
    let all = config::parse(Path::new("all.yaml"), all).unwrap();
    let values = json!({ "config": serde_json::to_value(all).unwrap() });
    assert_eq!(faults(&values), [""; 0]);
    for ips in [json!("none"), json!(["198.51.100.0/24", "none"])] {
        let values = json!({ "config": { "node": { "externalIPs": ips } } });
        assert_eq!(faults(&values), [""; 0]);
    }
}

/// Returns the value at a path such as `config.onExit`.
fn at(path: &str, value: Value) -> Value {
    let keys = path.rsplit('.');
    keys.fold(value, |value, key| json!({ key: value }))
}

/// The values in the pages follow the schema: the arguments of `--set`, and the components' values.
#[test]
fn documented_values_are_accepted() {
    let (guide, readme) = (read("docs/kubernetes.md"), read("README.md"));
    let mut found = Vec::new();
    for page in [&guide, &readme] {
        for rest in page.split("--set ").skip(1) {
            let word = rest.split_whitespace().next().unwrap();
            let word = word.trim_matches(['\'', '`', '.']);
            let (path, value) = word.split_once('=').unwrap_or_else(|| panic!("{word}"));
            let list = value
                .strip_prefix('{')
                .and_then(|list| list.strip_suffix('}'));
            let value = match list {
                Some(list) => list.split(',').map(Value::from).collect::<Value>(),
                None => Value::from(value),
            };
            found.push(at(path, value));
        }
    }
    let (_, table) = guide
        .split_once("| kustomize component | chart value |")
        .unwrap();
    let rows = table.lines().skip(2).take_while(|line| !line.is_empty());
    for cell in rows.filter_map(|row| row.split(" | ").nth(1)) {
        let text = cell
            .strip_prefix('`')
            .and_then(|text| text.strip_suffix('`'));
        let Some((path, value)) = text.and_then(|text| text.split_once(": ")) else {
            assert_eq!(cell, "set by the chart");
            continue;
        };
        found.push(at(path, yaml(value)));
    }
    assert!(found.len() > 8, "{found:?}");
    for values in found {
        assert_eq!(faults(&values), [""; 0], "{values}");
    }
}

#[test]
fn helm_checks_values_and_warns_of_nothing() {
    let template = |more: &[&str]| {
        let mut helm = Command::new("helm");
        helm.args(["template", "dataplane"])
            .arg(deploy().join("helm/dataplane"))
            .args(more);
        helm.output()
    };
    let Ok(good) = template(&[]) else {
        println!("skipped helm_checks_values_and_warns_of_nothing: there is no helm");
        return;
    };
    let said = String::from_utf8_lossy(&good.stderr);
    assert!(
        good.status.success() && !said.contains("symbolic link"),
        "{said}"
    );
    let bad = template(&["--set", "config.source.kubernetes.apiserver=a"]).unwrap();
    let said = String::from_utf8_lossy(&bad.stderr);
    assert!(
        !bad.status.success() && said.contains("apiserver"),
        "{said}"
    );
}
