//! The settings and the state of the agent's proxy.

use std::sync::Arc;

use axum::{Json, extract::State as Shared, response::Response};

use super::{Context, answer};

const NO_PROXY: &str = "the agent has no proxy; set `mesh` in its configuration\n";

/// Answers with the proxy's dump.
pub async fn get(Shared(context): Shared<Arc<Context>>) -> Response {
    answer(move || {
        let proxy = context.state.proxy.get().ok_or(NO_PROXY)?;
        Ok(Json(proxy.dump()))
    })
    .await
}
