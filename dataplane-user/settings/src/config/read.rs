//! Reads a configuration file as a whole, and reports all faults in one error.

use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::Value;
use source::manifests::{Errors, Fault, Position, locate, plain, read_file};

use super::schema::{paths, properties, schema};
use crate::{Dns, Mesh, Settings};

/// Minimum likeness of two names for a suggestion, from 0 to 1.
const ALIKE: f64 = 0.8;

/// Reads a configuration file.
///
/// # Errors
///
/// All faults, with line and key.
pub fn read(path: &Path) -> Result<Settings, Errors> {
    let text = read_file(path).map_err(|text| {
        Errors::of(vec![Fault {
            file: path.to_owned(),
            position: None,
            path: String::new(),
            object: None,
            text,
        }])
    })?;
    parse(path, &text)
}

/// Reads a configuration. `path` is its origin, for messages.
///
/// # Errors
///
/// All faults, with line and key.
pub fn parse(path: &Path, text: &str) -> Result<Settings, Errors> {
    let fault = |position, path_in: String, text| Fault {
        file: path.to_owned(),
        position,
        path: path_in,
        object: None,
        text,
    };
    let mut value = match yaml(text) {
        Ok(Value::Null) => Value::Object(serde_json::Map::new()),
        Ok(value @ Value::Object(_)) => value,
        Ok(_) => {
            let text = "not a configuration; expected keys such as `source:`".into();
            return Err(Errors::of(vec![fault(None, String::new(), text)]));
        }
        Err((position, text)) => {
            return Err(Errors::of(vec![fault(position, String::new(), text)]));
        }
    };
    let schema = schema();
    let mut faults = Vec::new();
    unknown_keys(&mut value, &schema, &schema, "", &mut faults);
    let config = typed(value, &mut faults);
    if let Some(config) = &config {
        faults.extend(crate::faults(config));
    }
    let positions = locate(
        text,
        &faults.iter().map(|(at, _)| &**at).collect::<Vec<_>>(),
    );
    let mut faults: Vec<Fault> = faults
        .into_iter()
        .zip(positions)
        .map(|((at, text), position)| fault(position, at, text))
        .collect();
    faults.sort_by_key(|fault| fault.position);
    match config {
        Some(config) if faults.is_empty() => Ok(config),
        _ => Err(Errors::of(faults)),
    }
}

/// Reads the text below `mesh:` in a file.
///
/// # Errors
///
/// The first fault, with its key.
pub fn mesh(text: &str) -> Result<Mesh, String> {
    part(text, Mesh::faults)
}

/// Reads the text below `dns:` in a file.
///
/// # Errors
///
/// The first fault, with its key.
pub fn dns(text: &str) -> Result<Dns, String> {
    part(text, Dns::faults)
}

/// Reads the text below a key of a file.
fn part<T: DeserializeOwned>(
    text: &str,
    faults: impl FnOnce(&T) -> Vec<(String, String)>,
) -> Result<T, String> {
    let value = yaml(text).map_err(|(_, text)| text)?;
    let part: T = serde_path_to_error::deserialize(value)
        .map_err(|error| format!("{}: {}", error.path(), error.inner()))?;
    match faults(&part).first() {
        Some((key, text)) => Err(format!("{key}: {text}")),
        None => Ok(part),
    }
}

/// A YAML document without types.
pub(super) fn yaml(text: &str) -> Result<Value, (Option<Position>, String)> {
    let options = serde_saphyr::options! {
        // Makes `off` a string and not a boolean.
        strict_booleans: true,
        with_snippet: false,
    };
    serde_saphyr::from_str_with_options(text, options).map_err(|error| {
        let position = error.location().and_then(|location| {
            Some(Position {
                line: location.line().try_into().ok().filter(|&line| line > 0)?,
                column: location.column().try_into().ok()?,
            })
        });
        (position, plain(&error.without_snippet().to_string()))
    })
}

/// Removes the keys that the schema does not have, and reports each with a similar key. A key without a value, such as
/// `node:`, counts as an empty object if the schema has an object there, and as absent otherwise.
fn unknown_keys(
    value: &mut Value,
    schema: &Value,
    root: &Value,
    at: &str,
    faults: &mut Vec<(String, String)>,
) {
    let Some(known) = properties(schema) else {
        return;
    };
    if value.is_null() {
        *value = Value::Object(serde_json::Map::new());
    }
    let Value::Object(given) = value else {
        return;
    };
    given.retain(|key, value| {
        let here = if at.is_empty() {
            key.clone()
        } else {
            format!("{at}.{key}")
        };
        if let Some(inner) = known.get(key) {
            unknown_keys(value, inner, root, &here, faults);
            return !value.is_null();
        }
        let siblings: Vec<&str> = known.keys().map(String::as_str).collect();
        let meant = meant(key, &siblings, root);
        let text = match meant {
            Some(meant) => format!("unknown key; did you mean `{meant}`?"),
            None => format!("unknown key; expected one of {}", siblings.join(", ")),
        };
        faults.push((here, text));
        false
    });
}

/// Returns the key that is most similar to `key`: a sibling, or a key elsewhere in the schema.
fn meant(key: &str, siblings: &[&str], root: &Value) -> Option<String> {
    let likeness = |name: &str| strsim::normalized_damerau_levenshtein(&bare(key), &bare(name));
    let best = |names: &mut dyn Iterator<Item = (String, f64)>| {
        names
            .filter(|(_, alike)| *alike >= ALIKE - f64::EPSILON)
            .max_by(|a, b| a.1.total_cmp(&b.1))
    };
    let beside = best(
        &mut siblings
            .iter()
            .map(|name| ((*name).to_owned(), likeness(name))),
    );
    let all = paths(root);
    let elsewhere = best(&mut all.into_iter().map(|path| {
        let last = path.rsplit('.').next().unwrap_or(&path);
        // A flag such as `node-name` is spelled with the whole path.
        let alike = likeness(last).max(likeness(&path.replace('.', "-")));
        (path, alike)
    }));
    match (beside, elsewhere) {
        (Some(beside), Some(elsewhere)) if elsewhere.1 > beside.1 => Some(elsewhere.0),
        (Some((beside, _)), _) => Some(beside),
        (None, elsewhere) => elsewhere.map(|(path, _)| path),
    }
}

/// Removes the differences between the spellings of a name.
fn bare(name: &str) -> String {
    let name = name.to_ascii_lowercase().replace(['-', '_'], "");
    // Flags such as `metrics-addr` end so.
    name.strip_suffix("addr").unwrap_or(&name).to_owned()
}

/// Deserializes the values. Values of a wrong type are removed one after the other, so that all of them are reported.
fn typed(mut value: Value, faults: &mut Vec<(String, String)>) -> Option<Settings> {
    // The removed items of lists, because later errors count the remaining items.
    let mut taken: Vec<(String, usize)> = Vec::new();
    loop {
        let error = match serde_path_to_error::deserialize::<_, Settings>(&value) {
            Ok(config) => return Some(config),
            Err(error) => error,
        };
        let text = plain(&error.inner().to_string());
        let path = error.path().to_string();
        let place = take_out(&mut value, &path, &mut taken);
        faults.push((place.clone().unwrap_or(path), text));
        place?;
    }
}

/// Removes the value at a path, and returns its place in the file. `None` if the path does not exist.
fn take_out(value: &mut Value, path: &str, taken: &mut Vec<(String, usize)>) -> Option<String> {
    let steps = path.replace('[', ".").replace(']', "").replace('.', "/");
    let pointer = format!("/{steps}");
    let (parent, last) = pointer.rsplit_once('/')?;
    match value.pointer_mut(parent)? {
        Value::Object(fields) => {
            fields.remove(last)?;
            Some(path.to_owned())
        }
        Value::Array(items) => {
            let mut index = last.parse().ok().filter(|&index| index < items.len())?;
            items.remove(index);
            let (whole, _) = path.rsplit_once('[')?;
            taken.sort();
            for (of, gone) in &*taken {
                index += usize::from(of == whole && *gone <= index);
            }
            taken.push((whole.to_owned(), index));
            Some(format!("{whole}[{index}]"))
        }
        _ => None,
    }
}
