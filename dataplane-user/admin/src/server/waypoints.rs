//! The waypoint of a connection, or the workloads of this node at which it arrives without a tunnel: `GET /waypoint`.

use std::{net::SocketAddr, sync::Arc};

use axum::{
    Json,
    extract::{Query, State as Shared},
    response::Response,
};
use relay::Neighbour;
use serde::Deserialize;

use super::{Context, answer};
use crate::api::{Decision, Page};

/// A connection of a workload.
#[derive(Debug, Deserialize)]
pub struct Asked {
    workload: String,
    to: SocketAddr,
}

/// The number of endpoints of this node that an answer names.
const NAMED: usize = 5;

/// Answers with the proxy's decision about a connection, if the destination has a waypoint or is on this node and needs no tunnel.
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
        let mut items: Vec<_> = decision.into_iter().collect();
        if let Some(proxy) = proxy.filter(|_| items.is_empty()) {
            let here = proxy.neighbours(&asked.workload, asked.to).into_iter();
            let steps: Vec<_> = here.take(NAMED).map(|(at, of)| attested(at, &of)).collect();
            if !steps.is_empty() {
                let allowed = true;
                items.push(Decision { allowed, steps });
            }
        }
        Ok(Json(Page { items, next: None }))
    })
    .await
}

fn attested(at: SocketAddr, to: &Neighbour) -> String {
    format!(
        "{at} is on this node: mesh.sameNode is attest, so the proxy connects there without a tunnel and without TLS, and the \
         policies of {} decide by the identity {}",
        to.attached.workload.name, to.peer
    )
}
