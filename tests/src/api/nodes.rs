//! One Node object: it can be read, and its taints can be changed by a JSON patch (RFC 6902).

use axum::{
    extract::Request,
    http::{Method, StatusCode, header},
    response::{IntoResponse, Response},
};
use http_body_util::{BodyExt as _, Collected};
use serde_json::Value;

use super::{Cluster, Resource};

/// Answers a request for a Node; `None`: there is no such Node, or the request is for something else.
pub async fn answer(cluster: &Cluster, request: Request) -> Option<Response> {
    let name = request.uri().path().strip_prefix("/api/v1/nodes/")?;
    let mut node = cluster.get(Resource::Nodes, "", name)?;
    if request.method() == Method::PATCH {
        let kind = request.headers().get(header::CONTENT_TYPE);
        if kind.is_none_or(|kind| kind != "application/json-patch+json") {
            return Some(StatusCode::UNSUPPORTED_MEDIA_TYPE.into_response());
        }
        let body = request.into_body().collect().await;
        let body = body.map(Collected::to_bytes).unwrap_or_default();
        if !change(&mut node, &body) {
            return Some(StatusCode::UNPROCESSABLE_ENTITY.into_response());
        }
        cluster.apply(node.clone());
    }
    let kind = [(header::CONTENT_TYPE, "application/json")];
    Some((kind, node.to_string()).into_response())
}

/// Applies a patch; returns whether the node is as the patch requires. Supports only the operations in use here.
fn change(node: &mut Value, patch: &[u8]) -> bool {
    let operations: Vec<Value> = serde_json::from_slice(patch).unwrap_or_default();
    let is_done = operations.iter().all(|operation| {
        let field = operation["path"]
            .as_str()
            .and_then(|at| node.pointer_mut(at));
        let Some(field) = field else { return false };
        let value = &operation["value"];
        match operation["op"].as_str() {
            Some("test") => field == value,
            Some("replace") => {
                field.clone_from(value);
                true
            }
            _ => false,
        }
    });
    is_done && !operations.is_empty()
}
