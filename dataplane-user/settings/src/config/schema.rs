//! The schema of configuration files, and its keys.

use serde_json::Value;

use crate::Settings;

/// The JSON schema of a configuration file.
pub fn schema() -> Value {
    // Definitions with references help generators of code. Readers, and the checks here, need each schema in its place.
    let settings = schemars::generate::SchemaSettings::draft2020_12()
        .with(|settings| settings.inline_subschemas = true);
    settings
        .into_generator()
        .into_root_schema_for::<Settings>()
        .to_value()
}

/// The keys that an object of a schema may have.
pub(super) fn properties(schema: &Value) -> Option<&serde_json::Map<String, Value>> {
    // An optional object may also be null.
    schema["properties"].as_object().or_else(|| {
        let alternatives = schema["anyOf"].as_array()?;
        alternatives.iter().find_map(properties)
    })
}

/// Returns the path of every key.
pub(super) fn paths(schema: &Value) -> Vec<String> {
    let mut all = Vec::new();
    for (key, inner) in properties(schema).into_iter().flatten() {
        all.push(key.clone());
        all.extend(
            paths(inner)
                .into_iter()
                .map(|below| format!("{key}.{below}")),
        );
    }
    all
}
