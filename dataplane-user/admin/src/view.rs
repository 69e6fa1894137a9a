//! The model and the plan, in the form of the agent's endpoints.

use std::net::IpAddr;

use model::{Gravity, Problem, ServiceType, TrafficPolicy};
use plan::enrol::{Enrolment, Statement};
use source::Health;

use super::{
    api,
    counters::{self, Counters, PortKey},
};

/// For `GET /status` and `GET /services`.
pub fn conflict(conflict: &plan::Conflict) -> api::Conflict {
    api::Conflict {
        frontend: plan::key_text(&conflict.key),
        winner: conflict.winner.to_string(),
        losers: conflict.losers.iter().map(ToString::to_string).collect(),
    }
}

/// For `GET /status`. `place_matters`: whether a service's policy depends on which endpoints are on this
/// node; asked only if that is in doubt.
pub fn problem(problem: &Problem, place_matters: impl FnOnce() -> bool) -> api::Problem {
    api::Problem {
        gravity: match problem.gravity {
            Gravity::NotFollowed => api::Gravity::Object,
            Gravity::Place if place_matters() => api::Gravity::Node,
            Gravity::Place | Gravity::Warning => api::Gravity::Warning,
        },
        place: problem.place.clone(),
        text: problem.text.clone(),
    }
}

/// For `GET /mesh`.
pub fn mesh_workload(enrolment: &Enrolment) -> api::MeshWorkload {
    let name = &enrolment.workload.name;
    let problem = enrolment.problem.as_ref();
    api::MeshWorkload {
        number: enrolment.number,
        namespace: name.namespace().to_owned(),
        name: name.name().to_owned(),
        problem: problem.map(|problem| problem.text.clone()),
        problem_of_node: problem.is_some_and(|problem| problem.of_node),
        by_kernel: enrolment.by_kernel,
        closed: enrolment.closed.map(str::to_owned),
        rules: enrolment.rules.iter().map(mesh_rule).collect(),
    }
}

fn mesh_rule(statement: &Statement) -> api::MeshRule {
    api::MeshRule {
        about: statement.about.to_owned(),
        of: statement.of.clone(),
        says: statement.says.to_owned(),
        by: statement.by.clone(),
    }
}

fn policy(policy: TrafficPolicy) -> String {
    match policy {
        TrafficPolicy::Cluster => "Cluster",
        TrafficPolicy::Local => "Local",
    }
    .to_owned()
}

/// For `GET /services`. `conflicts`: those that the service has a part in.
pub fn service(
    service: &model::Service,
    counters: &Counters,
    conflicts: &[&plan::Conflict],
) -> api::Service {
    let texts = |ips: &[IpAddr]| ips.iter().map(ToString::to_string).collect();
    api::Service {
        namespace: service.name.namespace().to_owned(),
        name: service.name.name().to_owned(),
        kind: match service.kind {
            ServiceType::ClusterIp => "ClusterIP",
            ServiceType::NodePort => "NodePort",
            ServiceType::HostPort => "HostPort",
            ServiceType::LoadBalancer => "LoadBalancer",
            ServiceType::ExternalName => "ExternalName",
            ServiceType::Entry => "ServiceEntry",
        }
        .to_owned(),
        cluster_ips: texts(&service.cluster_ips),
        external_ips: texts(&service.external_ips),
        load_balancer_ips: texts(&service.load_balancer_ips),
        internal_traffic_policy: policy(service.internal_policy),
        external_traffic_policy: policy(service.external_policy),
        affinity_seconds: service.affinity.map(|timeout| timeout.as_secs()),
        ports: service
            .ports
            .iter()
            .map(|port| service_port(service, port, counters))
            .collect(),
        conflicts: conflicts.iter().map(|of| conflict(of)).collect(),
    }
}

fn service_port(
    service: &model::Service,
    port: &model::ServicePort,
    counters: &Counters,
) -> api::ServicePort {
    let key = PortKey {
        service: service.name.clone(),
        port: Some((port.port, port.protocol)),
    };
    let stats = counters.get(&key);
    let (v4, v6) = (port.reach(true), port.reach(false));
    api::ServicePort {
        name: port.name.to_string(),
        port: port.port,
        protocol: port.protocol.word().to_owned(),
        node_port: port.node_port,
        ready: port.endpoints.iter().filter(|e| e.ready).count(),
        endpoints: port
            .endpoints
            .iter()
            .map(|e| api::Endpoint {
                address: e.addr.to_string(),
                port: e.port,
                local: e.local,
                ready: e.ready,
                serving: e.serving,
                terminating: e.terminating,
                hinted_away: e.ready && !if e.addr.is_ipv4() { v4 } else { v6 }.includes(e.hints),
            })
            .collect(),
        connections: stats.translated,
        refused: counters::refusals(&stats)
            .into_iter()
            .filter(|(_, count)| *count > 0)
            .map(|(reason, count)| (reason.word().to_owned(), count))
            .collect(),
    }
}

/// The health of a source.
pub fn source(health: &Health) -> api::Source {
    api::Source {
        kind: match health {
            Health::Manifests(_) => api::SourceKind::Manifests,
            Health::Kubernetes { .. } => api::SourceKind::Kubernetes,
        },
        paths: health.places(),
        read: health.heard(),
        error: health.failure().map(|(at, text)| api::Failure { at, text }),
    }
}
