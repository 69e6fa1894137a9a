//! `healthCheckNodePort`, as kube-proxy answers it: load balancers ask it to find out whether a node has endpoints of a
//! service with `externalTrafficPolicy: Local`.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use axum::{
    Router,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use imbl::ordmap::DiffItem;
use model::{Service, ServiceName, ServiceType, Snapshot, TrafficPolicy};

use super::HEADERS;
use crate::State;

/// The health check of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Check {
    pub port: u16,
    /// How many endpoints on this node take new connections, in each family that the service has.
    pub v4: Option<usize>,
    pub v6: Option<usize>,
}

/// The checks of all services that have one.
#[derive(Debug, Default)]
pub(super) struct Checks {
    seen: Snapshot,
    pub by_service: BTreeMap<ServiceName, Check>,
}

impl Checks {
    /// Updates the checks, at the cost of the changes.
    pub fn update(&mut self, snapshot: &Snapshot) {
        for change in self.seen.services.diff(&snapshot.services) {
            match change {
                DiffItem::Add(name, service)
                | DiffItem::Update {
                    new: (name, service),
                    ..
                } => match check(service) {
                    Some(check) => _ = self.by_service.insert(name.clone(), check),
                    None => _ = self.by_service.remove(name),
                },
                DiffItem::Remove(name, _) => _ = self.by_service.remove(name),
            }
        }
        self.seen = snapshot.clone();
    }
}

fn check(service: &Service) -> Option<Check> {
    let asked = service.kind == ServiceType::LoadBalancer
        && service.external_policy == TrafficPolicy::Local;
    let port = service.health_check_node_port.filter(|_| asked)?;
    let count = |v4: bool| {
        let mut family = service.cluster_ips.iter().map(IpAddr::is_ipv4);
        family.any(|is_v4| is_v4 == v4).then(|| local(service, v4))
    };
    Some(Check {
        port,
        v4: count(true),
        v6: count(false),
    })
}

/// Counts pods on this node that take new connections: each counts once, for all of its ports. Terminating pods do not
/// count, although they still get connections.
fn local(service: &Service, v4: bool) -> usize {
    let endpoints = service.ports.iter().flat_map(|port| &port.endpoints);
    let here = endpoints.filter(|e| e.addr.is_ipv4() == v4 && e.local && e.ready);
    here.map(|e| e.addr).collect::<BTreeSet<_>>().len()
}

pub(super) fn routes(state: &Arc<State>, name: &ServiceName, count: &Arc<AtomicUsize>) -> Router {
    let (state, name, count) = (Arc::clone(state), name.clone(), Arc::clone(count));
    Router::new().fallback(move || async move {
        let healthy = state.pulse.late(Instant::now()).is_none();
        answer(&name, count.load(Ordering::Relaxed), healthy)
    })
}

fn answer(name: &ServiceName, count: usize, healthy: bool) -> Response {
    let code = if count > 0 && healthy {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    // Some load balancers weigh the nodes by this header.
    let weight = [("X-Load-Balancing-Endpoint-Weight", count.to_string())];
    (code, HEADERS, weight, body(name, count, healthy)).into_response()
}

/// Equal to kube-proxy's answer byte for byte, because a check may look for a part of it. Names have no character that
/// JSON would escape.
fn body(name: &ServiceName, count: usize, healthy: bool) -> String {
    format!(
        "{{\n\t\"service\": {{\n\t\t\"namespace\": \"{}\",\n\t\t\"name\": \"{}\"\n\t}},\n\
         \t\"localEndpoints\": {count},\n\t\"serviceProxyHealthy\": {healthy}\n}}",
        name.namespace(),
        name.name(),
    )
}
