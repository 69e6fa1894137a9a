//! Server-side apply of a Pod's annotations through its status, as the real server does it: it knows which manager applied
//! which annotation, and refuses to change the value of another manager's.

use axum::{
    extract::Request,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use http_body_util::{BodyExt as _, Collected};
use serde_json::{Map, Value, json};

use super::{Cluster, Faults, Resource};

/// A refusal: its code, its reason, and the message.
pub type Refusal = (u16, &'static str, String);

/// Returns the namespace and the name of the Pod whose status has this path.
pub fn pod_of(path: &str) -> Option<(String, String)> {
    let rest = path.strip_prefix("/api/v1/namespaces/")?;
    let (namespace, rest) = rest.split_once("/pods/")?;
    let name = rest.strip_suffix("/status")?;
    Some((namespace.to_owned(), name.to_owned()))
}

/// Answers a request that applies an object.
pub async fn answer(
    (cluster, faults): (&Cluster, &Faults),
    (namespace, name): (String, String),
    manager: &str,
    request: Request,
) -> Result<Response, Refusal> {
    if let Some(code) = faults.refused_writes() {
        return Err((code, "Forbidden", "pods/status: refused on purpose".into()));
    }
    let kind = request.headers().get(header::CONTENT_TYPE);
    let is_apply = kind.is_some_and(|kind| kind == "application/apply-patch+yaml");
    let body = request.into_body().collect().await;
    let body = body.map(Collected::to_bytes).unwrap_or_default();
    let (true, Ok(wanted)) = (is_apply, serde_json::from_slice::<Value>(&body)) else {
        return Err((400, "BadRequest", "the body is no object to apply".into()));
    };
    let Some(mut pod) = cluster.get(Resource::Pods, &namespace, &name) else {
        return Err((404, "NotFound", "the Pod is not there".into()));
    };
    if pod["metadata"]["uid"] != wanted["metadata"]["uid"] {
        return Err((409, "Conflict", "the UID is another Pod's".into()));
    }
    let wanted = wanted["metadata"]["annotations"].as_object().cloned();
    apply(&mut pod["metadata"], &wanted.unwrap_or_default(), manager)
        .map_err(|text| (409, "Conflict", text))?;
    cluster.apply(pod.clone());
    let kind = [(header::CONTENT_TYPE, "application/json")];
    Ok((StatusCode::OK, kind, pod.to_string()).into_response())
}

/// Whether an entry of `managedFields` is that of this manager for what it applies to the status.
fn is_of(entry: &Value, manager: &str) -> bool {
    entry["manager"] == manager && entry["operation"] == "Apply" && entry["subresource"] == "status"
}

/// Whether an entry of `managedFields` has an annotation.
fn has(entry: &Value, annotation: &str) -> bool {
    let fields = &entry["fieldsV1"]["f:metadata"]["f:annotations"];
    fields.get(format!("f:{annotation}")).is_some()
}

/// Applies annotations to the metadata of an object.
fn apply(metadata: &mut Value, wanted: &Map<String, Value>, manager: &str) -> Result<(), String> {
    let entries = metadata["managedFields"].as_array().cloned();
    let (ours, others): (Vec<Value>, Vec<Value>) = entries
        .unwrap_or_default()
        .into_iter()
        .partition(|entry| is_of(entry, manager));
    let of_others = |annotation: &str| others.iter().any(|entry| has(entry, annotation));
    let mut annotations = metadata["annotations"]
        .as_object()
        .cloned()
        .unwrap_or_default();
    for (annotation, value) in wanted {
        if of_others(annotation) && annotations.get(annotation) != Some(value) {
            return Err(format!("conflict with another manager: {annotation}"));
        }
    }
    annotations.retain(|annotation, _| {
        of_others(annotation) || !ours.iter().any(|entry| has(entry, annotation))
    });
    annotations.extend(wanted.clone());
    let mut entries = others;
    if !wanted.is_empty() {
        let fields = wanted
            .keys()
            .map(|annotation| (format!("f:{annotation}"), json!({})));
        entries.push(json!({
            "manager": manager, "operation": "Apply", "apiVersion": "v1", "subresource": "status",
            "time": "2026-01-01T00:00:00Z", "fieldsType": "FieldsV1",
            "fieldsV1": { "f:metadata": { "f:annotations": fields.collect::<Map<_, _>>() } },
        }));
    }
    metadata["annotations"] = annotations.into();
    metadata["managedFields"] = entries.into();
    Ok(())
}
