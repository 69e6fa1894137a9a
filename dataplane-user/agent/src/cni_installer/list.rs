//! A network configuration of CNI, with the plug-in and without. All other entries stay as they are, byte by byte.

use std::collections::BTreeMap;

use admin::cni::{PLUGIN, VERSIONS};
use serde::Deserialize;
use serde_json::{Value, value::RawValue};

/// Why the plug-in cannot be put into a file.
#[derive(Debug, PartialEq, Eq)]
pub enum Fault {
    /// This is no network configuration: runtimes skip the file.
    NotOne(String),
    /// Runtimes may use the file, and the plug-in would fail in it.
    Unsupported(String),
}

type Object = BTreeMap<String, Box<RawValue>>;

/// Returns a list of plug-ins with the entry at its end; `None` if it is there already.
///
/// # Errors
/// If the text is no list, or one in which the plug-in would fail.
pub fn with(text: &str, entry: &Value) -> Result<Option<String>, Fault> {
    let (mut list, plugins) = parts(text)?;
    supported(&list)?;
    let is_there = plugins.last().and_then(|last| value(last)) == Some(entry.clone());
    let (ours, mut others): (Vec<_>, Vec<_>) = plugins.into_iter().partition(|p| is_ours(p));
    if is_there && ours.len() == 1 {
        return Ok(None);
    }
    others.push(raw(entry));
    list.insert("plugins".to_owned(), raw(&others));
    Ok(Some(pretty(&list)))
}

/// Returns a list of plug-ins without the entry; `None` if it is not there.
///
/// # Errors
/// If the text is no list.
pub fn without(text: &str) -> Result<Option<String>, Fault> {
    let (mut list, plugins) = parts(text)?;
    let before = plugins.len();
    let others: Vec<_> = plugins.into_iter().filter(|p| !is_ours(p)).collect();
    if others.len() == before {
        return Ok(None);
    }
    list.insert("plugins".to_owned(), raw(&others));
    Ok(Some(pretty(&list)))
}

/// Returns the list of a configuration that is a single plug-in, with the entry behind that plug-in.
///
/// # Errors
/// If the text is no such configuration, or one in which the plug-in would fail.
pub fn of_one(text: &str, entry: &Value) -> Result<String, Fault> {
    let mut one: Object = serde_json::from_str(text).map_err(|e| not_one(&e))?;
    if !one.contains_key("type") {
        return Err(Fault::NotOne("it has no `type`".to_owned()));
    }
    supported(&one)?;
    let mut list = Object::new();
    for key in ["cniVersion", "name"] {
        list.extend(one.remove(key).map(|value| (key.to_owned(), value)));
    }
    list.insert("plugins".to_owned(), raw(&[raw(&one), raw(entry)]));
    Ok(pretty(&list))
}

fn parts(text: &str) -> Result<(Object, Vec<Box<RawValue>>), Fault> {
    let list: Object = serde_json::from_str(text).map_err(|e| not_one(&e))?;
    let plugins = list.get("plugins").map_or("[]", |plugins| plugins.get());
    let plugins: Vec<Box<RawValue>> = serde_json::from_str(plugins).map_err(|e| not_one(&e))?;
    if plugins.iter().all(|plugin| is_ours(plugin)) {
        return Err(Fault::NotOne("it has no plug-ins".to_owned()));
    }
    Ok((list, plugins))
}

fn not_one(error: &serde_json::Error) -> Fault {
    Fault::NotOne(error.to_string())
}

/// With another version, the plug-in would refuse each pod.
fn supported(config: &Object) -> Result<(), Fault> {
    let given = config.get("cniVersion").and_then(|version| value(version));
    let given = given.as_ref().and_then(Value::as_str).unwrap_or("0.1.0");
    if VERSIONS.contains(&given) {
        return Ok(());
    }
    Err(Fault::Unsupported(format!(
        "its cniVersion is {given}; the plug-in needs one of {}",
        VERSIONS.join(", ")
    )))
}

fn is_ours(plugin: &RawValue) -> bool {
    #[derive(Deserialize)]
    struct Named {
        r#type: String,
    }
    let named = serde_json::from_str::<Named>(plugin.get());
    named.is_ok_and(|named| named.r#type == PLUGIN)
}

fn value(text: &RawValue) -> Option<Value> {
    serde_json::from_str(text.get()).ok()
}

fn raw<T: serde::Serialize + ?Sized>(value: &T) -> Box<RawValue> {
    serde_json::value::to_raw_value(value).expect("values of JSON are JSON")
}

fn pretty(list: &Object) -> String {
    let mut text = serde_json::to_string_pretty(list).expect("values of JSON are JSON");
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn entry(socket: &str) -> Value {
        json!({ "type": PLUGIN, "socket": socket })
    }

    /// The types of the plug-ins, in their order.
    fn types(text: &str) -> Vec<String> {
        let list: Value = serde_json::from_str(text).unwrap();
        let plugins = list["plugins"].as_array().unwrap().iter();
        plugins
            .map(|p| p["type"].as_str().unwrap().to_owned())
            .collect()
    }

    #[test]
    fn the_entry_comes_last_and_the_others_stay_byte_by_byte() {
        let bridge = r#"{ "type":"bridge",  "mtu": 1450.0, "b": 1, "a": 18446744073709551615 }"#;
        let list = format!(
            r#"{{"cniVersion":"1.0.0","name":"net","disableCheck":true,"plugins":[{bridge},{{"type":"portmap"}}]}}"#
        );
        let joined = with(&list, &entry("/a")).unwrap().unwrap();
        assert_eq!(types(&joined), ["bridge", "portmap", PLUGIN]);
        assert!(joined.contains(bridge), "{joined}");
        assert_eq!(with(&joined, &entry("/a")), Ok(None), "it is there");
        let changed = with(&joined, &entry("/b")).unwrap().unwrap();
        assert_eq!(types(&changed), ["bridge", "portmap", PLUGIN]);
        assert!(
            changed.contains("/b") && !changed.contains("/a"),
            "{changed}"
        );
        // Behind the plug-in that another program has added since.
        let mut value: Value = serde_json::from_str(&joined).unwrap();
        value["plugins"]
            .as_array_mut()
            .unwrap()
            .push(json!({ "type": "tuning" }));
        let moved = with(&value.to_string(), &entry("/a")).unwrap().unwrap();
        assert_eq!(types(&moved), ["bridge", "portmap", "tuning", PLUGIN]);
        let left = without(&joined).unwrap().unwrap();
        let values = [&left, &list].map(|text| serde_json::from_str::<Value>(text).unwrap());
        assert_eq!(values[0], values[1]);
        assert!(left.contains(bridge), "{left}");
        assert_eq!(without(&left), Ok(None));
    }

    #[test]
    fn a_single_plugin_becomes_a_list() {
        let one =
            r#"{"cniVersion":"0.3.1","name":"net","type":"ptp","ipam":{"type":"host-local"}}"#;
        let list: Value = serde_json::from_str(&of_one(one, &entry("/a")).unwrap()).unwrap();
        let wanted = json!({
            "cniVersion": "0.3.1",
            "name": "net",
            "plugins": [{ "type": "ptp", "ipam": { "type": "host-local" } }, entry("/a")],
        });
        assert_eq!(list, wanted);
    }

    #[test]
    fn the_plugin_is_not_put_where_it_would_fail() {
        let unsupported = |result: Result<(), Fault>| matches!(result, Err(Fault::Unsupported(_)));
        for version in [r#""cniVersion":"0.2.0","#, "", r#""cniVersion":3,"#] {
            let list = format!(r#"{{{version}"plugins":[{{"type":"ptp"}}]}}"#);
            assert!(unsupported(with(&list, &entry("/a")).map(drop)), "{list}");
            let one = format!(r#"{{{version}"type":"ptp"}}"#);
            assert!(unsupported(of_one(&one, &entry("/a")).map(drop)), "{one}");
        }
        for text in [
            "",
            "{",
            "[]",
            "{}",
            r#"{"plugins":[]}"#,
            r#"{"plugins":{}}"#,
        ] {
            let joined = with(text, &entry("/a"));
            assert!(
                matches!(joined, Err(Fault::NotOne(_))),
                "{text}: {joined:?}"
            );
            assert!(
                matches!(of_one(text, &entry("/a")), Err(Fault::NotOne(_))),
                "{text}"
            );
        }
    }
}
