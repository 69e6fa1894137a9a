//! The certificates of workloads.

use std::sync::Arc;

use axum::{Json, extract::State as Shared, response::Response};

use super::{Context, answer};

const NO_CERTIFICATES: &str =
    "connections are not encrypted; set mesh.identity in the agent's configuration\n";

/// Answers with the certificates.
pub async fn get(Shared(context): Shared<Arc<Context>>) -> Response {
    answer(move || {
        let certificates = context.state.certificates.get().ok_or(NO_CERTIFICATES)?;
        Ok(Json(certificates.list()))
    })
    .await
}
