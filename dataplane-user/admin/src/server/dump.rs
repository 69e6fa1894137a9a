//! The settings and the state of the agent's proxy; or the objects that the agent serves, in the form of ztunnel's dump.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Query, State as Shared},
    response::Response,
};
use serde::Deserialize;

use super::{
    super::ztunnel,
    Context, answer,
    events::{MOST, Since},
};

const NO_PROXY: &str = "the agent has no proxy; set `mesh` in its configuration\n";

/// Answers with the connections that the proxy has refused since the last time.
pub async fn refusals(
    Shared(context): Shared<Arc<Context>>,
    Query(Since { from }): Query<Since>,
) -> Response {
    answer(move || {
        let proxy = context.state.proxy.get().ok_or(NO_PROXY)?;
        Ok(Json(proxy.refusals(from, MOST)))
    })
    .await
}

/// The form of a dump.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// As ztunnel's, for `istioctl ztunnel-config`.
    Ztunnel,
}

/// The parameters of a request.
#[derive(Debug, Deserialize)]
pub struct Asked {
    format: Option<Form>,
}

/// Answers with the proxy's dump, or with the agent's objects in another form.
pub async fn get(
    Shared(context): Shared<Arc<Context>>,
    Query(Asked { format }): Query<Asked>,
) -> Response {
    match format {
        None => {
            answer(move || {
                let proxy = context.state.proxy.get().ok_or(NO_PROXY)?;
                Ok(Json(proxy.dump()))
            })
            .await
        }
        Some(Form::Ztunnel) => {
            answer(move || {
                let certificates = context.state.certificates.get();
                let certificates = certificates.map(|of| of.list().certificates);
                let snapshot = context.state.served().snapshot;
                let dump = ztunnel::dump(&snapshot, &certificates.unwrap_or_default());
                Ok(Json(dump))
            })
            .await
        }
    }
}
