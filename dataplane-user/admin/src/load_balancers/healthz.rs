//! `/healthz` and `/livez`, as kube-proxy 1.36 answers them. Cloud load balancers ask `/healthz` to find out whether a
//! node may serve services with `externalTrafficPolicy: Cluster`, and probes ask `/livez`.

use std::{sync::Arc, time::Instant};

use axum::{
    Router,
    extract::State as Shared,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::any,
};
use jiff::Timestamp;
use serde::Serialize;

use super::HEADERS;
use crate::State;

/// kube-proxy's answer. kube-proxy has a proxier for each family; here one does the work of both.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Health {
    /// As with older kube-proxies, the time of the request while all is well.
    last_updated: String,
    current_time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_eligible: Option<bool>,
    healthy: bool,
    status: Status,
}

#[derive(Serialize)]
struct Status {
    #[serde(rename = "IPv4")]
    v4: Family,
    #[serde(rename = "IPv6")]
    v6: Family,
}

#[derive(Clone, Serialize)]
#[serde(rename_all = "camelCase")]
struct Family {
    last_updated: String,
    healthy: bool,
}

pub(super) fn routes(state: &Arc<State>) -> Router {
    Router::new()
        .route("/healthz", any(healthz))
        .route("/livez", any(livez))
        .with_state(Arc::clone(state))
}

async fn healthz(Shared(state): Shared<Arc<State>>) -> Response {
    answer(&state, Some(state.leaving().is_none()))
}

/// A node that is about to go needs no new connections, and no restart either.
async fn livez(Shared(state): Shared<Arc<State>>) -> Response {
    answer(&state, None)
}

fn answer(state: &State, node_eligible: Option<bool>) -> Response {
    let healthy = state.pulse.late(Instant::now()).is_none();
    let good = healthy && node_eligible.unwrap_or(true);
    let now = Timestamp::now();
    let synced = state
        .last_sync()
        .and_then(|at| Timestamp::from_second(at.try_into().ok()?).ok());
    // "Never" is Go's zero time.
    let last_updated = synced.map_or("0001-01-01T00:00:00Z".to_owned(), |t| t.to_string());
    let family = Family {
        last_updated: last_updated.clone(),
        healthy,
    };
    let health = Health {
        last_updated: if good { now.to_string() } else { last_updated },
        current_time: now.to_string(),
        node_eligible,
        healthy,
        status: Status {
            v4: family.clone(),
            v6: family,
        },
    };
    let code = if good {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    match serde_json::to_string(&health) {
        Ok(body) => (code, HEADERS, body).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use axum::body::to_bytes;
    use model::{Leaving, Node, Snapshot};
    use plan::Served;
    use serde_json::Value;
    use tokio::sync::watch;

    use super::*;
    use crate::Learnt;

    fn state(leaving: bool) -> State {
        let node = Node {
            leaving: leaving.then_some(Leaving::Deleted),
            ..Node::default()
        };
        let snapshot = Snapshot {
            node: Arc::new(node),
            ..Snapshot::default()
        };
        State::new(
            kernel::Paths {
                bpffs: "/nowhere".into(),
                cgroup: "/nowhere".into(),
            },
            kernel::tables::Limits::default(),
            watch::channel(Served::before_first_plan(snapshot)).1,
            false,
            source::Health::default(),
            Learnt::default(),
        )
    }

    async fn ask(state: State) -> [(u16, Value); 2] {
        let state = Arc::new(state);
        let mut answers = Vec::new();
        for answer in [
            healthz(Shared(Arc::clone(&state))).await,
            livez(Shared(state)).await,
        ] {
            let code = answer.status().as_u16();
            let body = to_bytes(answer.into_body(), 4096).await.unwrap();
            answers.push((code, serde_json::from_slice(&body).unwrap()));
        }
        answers.try_into().unwrap()
    }

    #[tokio::test]
    async fn while_it_starts_it_is_well_as_kube_proxy_is() {
        let [(healthz, body), (livez, _)] = ask(state(false)).await;
        assert_eq!((healthz, livez), (200, 200));
        assert_eq!(body["lastUpdated"], body["currentTime"]);
        assert_eq!(
            body["status"]["IPv6"]["lastUpdated"],
            "0001-01-01T00:00:00Z"
        );
    }

    #[tokio::test]
    async fn a_node_that_is_about_to_go_lives() {
        let [(healthz, body), (livez, alive)] = ask(state(true)).await;
        assert_eq!((healthz, livez), (503, 200));
        assert_eq!(
            (&body["nodeEligible"], &body["healthy"]),
            (&false.into(), &true.into())
        );
        assert_eq!(alive["nodeEligible"], Value::Null);
    }

    #[tokio::test]
    async fn an_agent_that_does_not_keep_up_is_ill() {
        let state = state(false);
        state.pulse.make_late();
        for (code, body) in ask(state).await {
            assert_eq!((code, &body["healthy"]), (503, &false.into()));
            assert_eq!(body["status"]["IPv4"]["healthy"], false);
            assert_eq!(body["lastUpdated"], "0001-01-01T00:00:00Z");
        }
    }
}
