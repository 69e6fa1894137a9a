//! The waypoint of a connection: `GET /waypoint`.

use std::{net::SocketAddr, sync::Arc};

use axum::{
    Json,
    extract::{Query, State as Shared},
    response::Response,
};
use serde::Deserialize;

use super::{Context, answer};
use crate::api::{Decision, Page};

/// A connection of a workload.
#[derive(Debug, Deserialize)]
pub struct Asked {
    workload: String,
    to: SocketAddr,
}

/// Answers with the proxy's decision about a connection, if the destination has a waypoint.
pub async fn get(Shared(context): Shared<Arc<Context>>, Query(asked): Query<Asked>) -> Response {
    answer(move || {
        let proxy = context.state.proxy.get();
        let way = proxy.and_then(|of| of.waypoint(&asked.workload, asked.to));
        let decision = way.map(|way| {
            let allowed = way.is_ok();
            let step = match way {
                Ok((gateway, at)) => {
                    let name = gateway.as_str().escape_debug();
                    format!(
                        "the waypoint is Gateway {name}, which the proxy reaches at {at} (WaypointBound=True, WaypointAccepted)"
                    )
                }
                Err(why) => format!("the proxy refuses the connection: {why}"),
            };
            let steps = vec![step];
            Decision { allowed, steps }
        });
        let items: Vec<_> = decision.into_iter().collect();
        Ok(Json(Page { items, next: None }))
    })
    .await
}
