//! The Helm chart, rendered.

use dataplane_tests::chart;

use super::*;

/// Renders the chart, with `values` over the chart's own. As Helm, refuses values that do not follow the schema.
pub fn render(namespace: &str, values: &Value) -> Objects {
    assert_eq!(values::faults(values), [""; 0], "{values}");
    let documents = chart::render(namespace, values).unwrap_or_else(|error| panic!("{error}"));
    objects(documents.iter().map(String::as_str))
}

/// Renders the chart for a version of Kubernetes, with `values` over the chart's own.
pub fn render_for(version: &str, namespace: &str, values: &Value) -> Objects {
    let documents = chart::render_for(version, namespace, values);
    let documents = documents.unwrap_or_else(|error| panic!("{error}"));
    objects(documents.iter().map(String::as_str))
}
