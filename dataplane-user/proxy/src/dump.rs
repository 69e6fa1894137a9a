//! The settings and the state of the proxy, for the admin endpoint.

use std::net::SocketAddr;

use model::{Egress, Protocol};
use relay::{AccessLog, Entry, TunnelView};
use serde::Serialize;

use super::shared::Shared;

/// `/config_dump`.
#[derive(Debug, Serialize)]
pub struct Dump {
    settings: SettingsDump,
    connections: usize,
    /// Bytes held for readers that do not keep up.
    held_bytes: usize,
    workers: Vec<WorkerDump>,
    workloads: Vec<WorkloadDump>,
    services: Vec<ServiceDump>,
}

#[derive(Debug, Serialize)]
struct SettingsDump {
    mark: Option<u32>,
    transparent: bool,
    attempts: usize,
    connect_timeout_ms: u128,
    idle_timeout_ms: Option<u128>,
    keepalive_ms: Option<u128>,
    user_timeout_ms: Option<u128>,
    max_connections: usize,
    max_per_workload: usize,
    max_held_bytes: usize,
    access_log: AccessLog,
}

#[derive(Debug, Serialize)]
struct WorkerDump {
    connections: usize,
    held_bytes: usize,
}

#[derive(Debug, Serialize)]
struct WorkloadDump {
    name: String,
    egress: &'static str,
    own_namespace: bool,
    connections: usize,
    /// Empty once the workload was removed and its connections end.
    listeners: Vec<ListenerDump>,
    /// The established tunnels.
    tunnels: Vec<TunnelDump>,
}

#[derive(Debug, Serialize)]
struct TunnelDump {
    direction: &'static str,
    peer: String,
    address: SocketAddr,
    connections: usize,
}

#[derive(Debug, Serialize)]
struct ListenerDump {
    address: SocketAddr,
    direction: &'static str,
}

#[derive(Debug, Serialize)]
struct ServiceDump {
    name: String,
    ports: Vec<PortDump>,
}

#[derive(Debug, Serialize)]
struct PortDump {
    name: String,
    vips: Vec<SocketAddr>,
    endpoints: Vec<EndpointDump>,
}

#[derive(Debug, Serialize)]
struct EndpointDump {
    address: SocketAddr,
    ready: bool,
}

impl Dump {
    pub(super) fn of(shared: &Shared) -> Self {
        let settings = &shared.settings;
        let relay = &shared.relay;
        let (_, index) = relay.index();
        let workers = shared.loads.iter().map(|load| WorkerDump {
            connections: load.connections(),
            held_bytes: load.held(),
        });
        let (entries, mut tunnels) = (relay.entries(), shared.tunnels());
        let workloads = entries.iter().map(|entry| {
            let tunnels = tunnels.remove(&entry.attached.id);
            WorkloadDump::of(entry, &tunnels.unwrap_or_default())
        });
        let services = index.snapshot().services.values();
        Self {
            settings: SettingsDump {
                mark: settings.mark,
                transparent: settings.transparent,
                attempts: settings.attempts,
                connect_timeout_ms: settings.connect_timeout.as_millis(),
                idle_timeout_ms: settings.idle_timeout.map(|t| t.as_millis()),
                keepalive_ms: settings.patience.keepalive.map(|t| t.as_millis()),
                user_timeout_ms: settings.patience.user_timeout.map(|t| t.as_millis()),
                max_connections: relay.limits.max(),
                max_per_workload: relay.limits.per_workload(),
                max_held_bytes: settings.max_held,
                access_log: settings.access_log,
            },
            connections: relay.limits.open(),
            held_bytes: shared.held(),
            workers: workers.collect(),
            workloads: workloads.collect(),
            services: services.map(|service| ServiceDump::of(service)).collect(),
        }
    }
}

impl WorkloadDump {
    fn of(entry: &Entry, tunnels: &[TunnelView]) -> Self {
        let attached = &entry.attached;
        let listeners = entry
            .listeners
            .iter()
            .flat_map(|listeners| listeners.iter());
        Self {
            name: attached.workload.name.to_string(),
            egress: match attached.egress {
                Egress::Allow => "allow",
                Egress::Deny => "deny",
            },
            own_namespace: attached.namespace.is_some(),
            connections: attached.connections(),
            listeners: listeners
                .map(|listener| ListenerDump {
                    address: listener.address,
                    direction: listener.direction.word(),
                })
                .collect(),
            tunnels: tunnels
                .iter()
                .map(|tunnel| TunnelDump {
                    direction: tunnel.direction.word(),
                    peer: tunnel.peer.to_string(),
                    address: tunnel.address,
                    connections: tunnel.streams,
                })
                .collect(),
        }
    }
}

impl ServiceDump {
    fn of(service: &model::Service) -> Self {
        let vips = || {
            let outside = service
                .external_ips
                .iter()
                .chain(&service.load_balancer_ips);
            service.cluster_ips.iter().chain(outside)
        };
        let ports = service
            .ports
            .iter()
            .filter(|port| port.protocol == Protocol::Tcp);
        Self {
            name: service.name.to_string(),
            ports: ports
                .map(|port| PortDump {
                    name: port.name.to_string(),
                    vips: vips().map(|ip| SocketAddr::new(*ip, port.port)).collect(),
                    endpoints: port
                        .endpoints
                        .iter()
                        .map(|endpoint| EndpointDump {
                            address: SocketAddr::new(endpoint.addr, endpoint.port),
                            ready: endpoint.ready,
                        })
                        .collect(),
                })
                .collect(),
        }
    }
}
