//! The model and the plan, as the agent's endpoints show them.

use std::net::IpAddr;

use super::{
    api,
    counters::{self, Counters, PortKey},
};
use crate::{
    model::{
        self, Acceleration, CapturedBy, Egress, Gravity, Mode, Problem, Rules, ServiceType,
        TrafficPolicy, WithoutProxy,
    },
    plan,
    source::Health,
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

/// For `GET /mesh`. `layers`: who says what, the most specific first.
pub fn mesh_rules(layers: &[(String, Rules)]) -> Vec<api::MeshRule> {
    let mut all: Vec<api::MeshRule> = Vec::new();
    for (by, rules) in layers {
        for (about, of, says) in statements(rules) {
            if all.iter().any(|rule| rule.about == about && rule.of == of) {
                continue;
            }
            all.push(api::MeshRule {
                about: about.to_owned(),
                of,
                says: says.to_owned(),
                by: by.clone(),
            });
        }
    }
    all
}

/// What rules say: about what, of which, and what.
fn statements(rules: &Rules) -> Vec<(&'static str, String, &'static str)> {
    const EXCLUDED: &str = "excluded";
    let word = |captured: bool| if captured { "captured" } else { EXCLUDED };
    let mut said = Vec::new();
    let ranges = rules.outbound_ranges.iter();
    said.extend(ranges.map(|(range, is)| ("outbound-range", range.to_string(), word(*is))));
    let ports = rules.outbound_ports.iter();
    said.extend(ports.map(|(port, is)| ("outbound-port", port.to_string(), word(*is))));
    let ports = rules.inbound_ports.iter();
    said.extend(ports.map(|(port, is)| ("inbound-port", port.to_string(), word(*is))));
    let users = rules.excluded_uids.iter();
    said.extend(users.map(|uid| ("user", uid.to_string(), EXCLUDED)));
    let groups = rules.excluded_gids.iter();
    said.extend(groups.map(|gid| ("group", gid.to_string(), EXCLUDED)));
    let interfaces = rules.excluded_interfaces.iter();
    said.extend(interfaces.map(|name| ("interface", name.to_string(), EXCLUDED)));
    let settings = [
        ("inbound-others", rules.inbound_others.map(word)),
        ("captured-by", rules.captured_by.map(CapturedBy::word)),
        ("mode", rules.mode.map(Mode::word)),
        ("egress", rules.egress.map(Egress::word)),
        ("without-proxy", rules.without_proxy.map(WithoutProxy::word)),
        ("acceleration", rules.acceleration.map(Acceleration::word)),
    ];
    let given = settings
        .into_iter()
        .filter_map(|(about, says)| Some((about, String::new(), says?)));
    said.extend(given);
    said
}

fn policy(policy: TrafficPolicy) -> String {
    match policy {
        TrafficPolicy::Cluster => "Cluster",
        TrafficPolicy::Local => "Local",
    }
    .to_owned()
}

/// For `GET /services`. `conflicts`: all there are.
pub fn service(
    service: &model::Service,
    counters: &Counters,
    conflicts: &[plan::Conflict],
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
        conflicts: conflicts
            .iter()
            .filter(|c| c.losers.contains(&service.name))
            .map(conflict)
            .collect(),
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

/// How reading a source goes.
pub fn source(health: &Health) -> api::Source {
    let (kind, parts) = match health {
        Health::Manifests(_) => (api::SourceKind::Manifests, Vec::new()),
        Health::Kubernetes { .. } => (api::SourceKind::Kubernetes, Vec::new()),
        Health::Combined(parts) => (
            api::SourceKind::Combined,
            parts.iter().map(source).collect(),
        ),
    };
    api::Source {
        kind,
        paths: health.places(),
        read: health.heard(),
        error: health.failure().map(|(at, text)| api::Failure { at, text }),
        parts,
    }
}
