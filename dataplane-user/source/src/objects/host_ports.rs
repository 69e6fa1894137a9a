//! `hostPort`: ports of this node that lead to a pod on it.
//!
//! This does the work of the CNI plug-in `portmap`: a port of the node leads to the container's port, and the pod sees
//! the client's address. The port is at all addresses of the node, at those of one family (`hostIP` is `0.0.0.0` or
//! `::`), or at one address (`hostIP`). In the model this is a service of its own, with the pod as its only endpoint: a
//! node port, or an external IP, with `externalTrafficPolicy: Local`. A `hostIP` on loopback belongs to the node: only
//! sockets of its network namespace reach the pod there.

use std::{
    collections::{BTreeMap, HashSet},
    net::IpAddr,
};

use model::{Endpoint, Node, Service, ServiceName, ServicePort, ServiceType, TrafficPolicy};
use smallvec::SmallVec;

use super::{Findings, address, object_name, wire as api};

/// Prefix of the names of such services. Names of objects have no colon.
const PREFIX: &str = "hostport:";

/// Returns whether a service stands for host ports of a pod.
pub fn is_of_host_ports(service: &ServiceName) -> bool {
    service.name().starts_with(PREFIX)
}

/// Returns the host ports of a pod on this node as services. Empty if the pod has ended, has no address yet, or is on
/// another node. Also empty for a pod in the host's network, which has its ports itself.
pub fn host_ports(object: &api::Pod, node: &Node, findings: &mut Findings) -> Vec<Service> {
    let Some(spec) = &object.spec else {
        return Vec::new();
    };
    let status = object.status.as_ref();
    let phase = status.and_then(|status| status.phase.as_deref());
    if spec.node_name.as_deref() != Some(&*node.name)
        || spec.host_network == Some(true)
        || matches!(phase, Some("Succeeded" | "Failed"))
    {
        return Vec::new();
    }
    let mut pod_ips = None;
    let mut known = HashSet::new();
    let mut by_address = BTreeMap::<Option<IpAddr>, SmallVec<[ServicePort; 1]>>::new();
    for (path, port) in ports(spec) {
        let Some(host_port) = port.host_port.filter(|port| *port != 0) else {
            continue;
        };
        let host_port = super::port(host_port)
            .map_err(|wrong| findings.fault(format!("{path}.hostPort"), wrong));
        let container_port = super::port(port.container_port)
            .map_err(|wrong| findings.fault(format!("{path}.containerPort"), wrong));
        let protocol = super::protocol(port.protocol.as_deref())
            .map_err(|wrong| findings.fault(format!("{path}.protocol"), wrong));
        let host_ip = host_ip(port.host_ip.as_deref().unwrap_or_default())
            .map_err(|wrong| findings.fault(format!("{path}.hostIP"), wrong));
        let (Ok(host_port), Ok(container_port), Ok(protocol), Ok(host_ip)) =
            (host_port, container_port, protocol, host_ip)
        else {
            continue;
        };
        let Some(protocol) = protocol.served() else {
            findings.note(path, "SCTP is not served: only TCP and UDP are");
            continue;
        };
        let pod_ips = pod_ips.get_or_insert_with(|| self::pod_ips(status, findings));
        let of_family = |addr: &&IpAddr| {
            !at_all(host_ip) || host_ip.is_none_or(|ip| ip.is_ipv4() == addr.is_ipv4())
        };
        let endpoints: Vec<Endpoint> = pod_ips
            .iter()
            .filter(of_family)
            .map(|addr| Endpoint {
                local: true,
                ..Endpoint::new(*addr, container_port)
            })
            .collect();
        if endpoints.is_empty() {
            continue;
        }
        let ports = by_address.entry(host_ip).or_default();
        if !known.insert((host_ip, host_port, protocol)) {
            findings.note(
                path,
                format!("{host_port}/{} is given twice", protocol.word()),
            );
            continue;
        }
        ports.push(ServicePort {
            name: port.name.as_deref().unwrap_or_default().into(),
            node_port: at_all(host_ip).then_some(host_port),
            endpoints,
            ..ServicePort::new(host_port, protocol)
        });
    }
    let name = object_name(&object.metadata);
    let created = object.metadata.creation_timestamp.as_ref();
    let service = |(host_ip, ports): (Option<IpAddr>, _)| Service {
        created: created.map(|time| time.0.as_second()),
        external_ips: host_ip
            .filter(|ip| !ip.is_unspecified())
            .into_iter()
            .collect(),
        external_policy: TrafficPolicy::Local,
        ports,
        ..Service::new(service_name(&name, host_ip), ServiceType::HostPort)
    };
    by_address.into_iter().map(service).collect()
}

/// Returns the ports of all containers that run at the same time, with their field paths.
pub fn ports(spec: &api::PodSpec) -> impl Iterator<Item = (String, &api::ContainerPort)> {
    let sidecars = spec.init_containers.iter().flatten().enumerate();
    let sidecars = sidecars
        .filter(|(_, container)| container.restart_policy.as_deref() == Some("Always"))
        .map(|of| ("initContainers", of));
    let containers = spec.containers.iter().enumerate();
    let all = containers.map(|of| ("containers", of)).chain(sidecars);
    all.flat_map(|(list, (index, container))| {
        let ports = container.ports.iter().flatten().enumerate();
        ports.map(move |(at, port)| (format!("spec.{list}[{index}].ports[{at}]"), port))
    })
}

/// Parses `hostIP`. `None` stands for all of the node's addresses, and an unspecified address for all of its family.
fn host_ip(text: &str) -> Result<Option<IpAddr>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    address::address(text).map(Some)
}

/// Returns whether a port is at all addresses of the node, or at all of one family.
fn at_all(host_ip: Option<IpAddr>) -> bool {
    host_ip.is_none_or(|ip| ip.is_unspecified())
}

fn pod_ips(status: Option<&api::PodStatus>, findings: &mut Findings) -> SmallVec<[IpAddr; 2]> {
    let mut found = SmallVec::<[IpAddr; 2]>::new();
    let Some(status) = status else {
        return found;
    };
    let all = status.pod_ips.iter().flatten().map(|ip| &ip.ip);
    for text in all.chain(&status.pod_ip).filter(|text| !text.is_empty()) {
        match address::endpoint_address(text) {
            Ok(addr) if found.contains(&addr) => {}
            Ok(addr) => found.push(addr),
            Err(wrong) => findings.fault("status.podIPs", wrong),
        }
    }
    found.sort_unstable();
    found
}

fn service_name(pod: &ServiceName, host_ip: Option<IpAddr>) -> ServiceName {
    let name = match host_ip {
        None => format!("{PREFIX}{}", pod.name()),
        Some(ip) => format!("{PREFIX}{}@{ip}", pod.name()),
    };
    ServiceName::new(pod.namespace(), &name)
}

#[cfg(test)]
mod tests {
    use model::Protocol;
    use serde_json::json;

    use super::*;

    fn read(spec: &serde_json::Value, phase: &str) -> (Vec<Service>, Findings) {
        let pod = json!({
            "metadata": { "name": "web-0", "namespace": "shop" },
            "spec": spec,
            "status": { "phase": phase, "podIPs": [{ "ip": "fd00::5" }, { "ip": "10.244.0.5" }] },
        });
        let node = Node {
            name: "here".into(),
            ..Node::default()
        };
        let mut findings = Findings::default();
        let pod = serde_json::from_value(pod).unwrap();
        let services = host_ports(&pod, &node, &mut findings);
        (services, findings)
    }

    fn spec() -> serde_json::Value {
        json!({
            "nodeName": "here",
            "containers": [{ "name": "a", "ports": [
                { "containerPort": 80, "hostPort": 8080, "name": "http" },
                { "containerPort": 53, "hostPort": 53, "protocol": "UDP", "hostIP": "192.0.2.1" },
                { "containerPort": 9090 },
            ]}],
        })
    }

    #[test]
    fn host_ports_are_node_ports_and_external_ips() {
        let (services, findings) = read(&spec(), "Running");
        assert_eq!(findings, Findings::default());
        let [all, one] = services.as_slice() else {
            panic!("{services:?}")
        };
        assert_eq!(all.name, ServiceName::new("shop", "hostport:web-0"));
        assert_eq!(all.external_policy, TrafficPolicy::Local);
        let [port] = all.ports.as_slice() else {
            panic!("{all:?}")
        };
        assert_eq!(
            (port.node_port, port.port, port.protocol),
            (Some(8080), 8080, Protocol::Tcp)
        );
        let ends: Vec<_> = port.endpoints.iter().map(|e| (e.addr, e.port)).collect();
        let expected = ["10.244.0.5", "fd00::5"].map(|addr| (addr.parse().unwrap(), 80));
        assert_eq!(ends, expected);
        assert_eq!(
            one.name,
            ServiceName::new("shop", "hostport:web-0@192.0.2.1")
        );
        assert_eq!(
            one.external_ips.as_slice(),
            ["192.0.2.1".parse::<IpAddr>().unwrap()]
        );
        assert_eq!((one.ports[0].node_port, one.ports[0].port), (None, 53));
    }

    #[test]
    fn an_unspecified_host_ip_is_for_its_family() {
        for (ip, endpoint) in [("0.0.0.0", "10.244.0.5"), ("::", "fd00::5")] {
            let mut of_family = spec();
            of_family["containers"][0]["ports"][0]["hostIP"] = json!(ip);
            let (services, findings) = read(&of_family, "Running");
            assert_eq!(findings, Findings::default());
            let name = ServiceName::new("shop", &format!("hostport:web-0@{ip}"));
            let service = services.iter().find(|service| service.name == name);
            let service = service.expect("a service of this family");
            let [port] = service.ports.as_slice() else {
                panic!("{service:?}")
            };
            let ends: Vec<_> = port.endpoints.iter().map(|e| e.addr.to_string()).collect();
            assert_eq!(
                (ends, port.node_port),
                (vec![endpoint.to_owned()], Some(8080))
            );
            assert!(service.external_ips.is_empty());
        }
    }

    #[test]
    fn loopback_is_an_external_ip_of_host_ports() {
        let mut loopback = spec();
        loopback["containers"][0]["ports"][1]["hostIP"] = json!("::1");
        loopback["containers"][0]["ports"][0]["hostIP"] = json!("127.0.0.1");
        let (services, findings) = read(&loopback, "Running");
        assert_eq!(findings, Findings::default());
        let said: Vec<_> = services
            .iter()
            .map(|s| (s.kind, s.external_ips[0].to_string(), s.ports[0].node_port))
            .collect();
        let expected = ["127.0.0.1", "::1"].map(|ip| (ServiceType::HostPort, ip.to_owned(), None));
        assert_eq!(said, expected);
    }

    #[test]
    fn pods_elsewhere_of_the_host_and_those_that_ended_have_none() {
        assert_eq!(read(&spec(), "Succeeded").0, []);
        for (key, value) in [("nodeName", json!("there")), ("hostNetwork", json!(true))] {
            let mut other = spec();
            other[key] = value;
            assert_eq!(read(&other, "Running").0, [], "{key}");
        }
    }

    #[test]
    fn what_is_wrong_is_said_by_its_field() {
        let mut wrong = spec();
        wrong["containers"][0]["ports"][0]["hostPort"] = json!(70_000);
        wrong["containers"][0]["ports"][1]["hostIP"] = json!("nowhere");
        let (services, findings) = read(&wrong, "Running");
        assert_eq!(services, []);
        let fields: Vec<_> = findings.faults.iter().map(|(field, _)| &**field).collect();
        assert_eq!(
            fields,
            [
                "spec.containers[0].ports[0].hostPort",
                "spec.containers[0].ports[1].hostIP"
            ]
        );
    }
}
