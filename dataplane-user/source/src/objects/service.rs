//! Converts a Kubernetes Service into the model.

use std::{
    collections::{HashMap, HashSet},
    net::IpAddr,
    time::Duration,
};

use model::{
    Named, NamedProtocol, PublishedPort, Records, Service, ServicePort, ServiceType, TrafficPolicy,
};
use smallvec::SmallVec;

use super::{
    Findings, LABEL_HEADLESS, LABEL_PROXY, Outcome, address, check_name, label, object_name,
    wire::{self as api, LoadBalancerIngress, ServiceSpec},
};

/// Kubernetes' default for `sessionAffinityConfig.clientIP.timeoutSeconds`: three hours.
const AFFINITY_SECONDS: i32 = 10_800;
/// Kubernetes' maximum for it: a day.
const AFFINITY_SECONDS_MAX: i32 = 86_400;
/// Maximum product of ports and addresses of one Service: 16 384 ports at an address of each family. A Service is taken in as
/// a whole, and other namespaces' changes wait meanwhile. Without a bound, a Service of a megabyte could need a thousand
/// million keys.
const KEYS_MAX: usize = 32_768;

/// The ports of a service.
struct Ports {
    served: SmallVec<[ServicePort; 1]>,
    /// Ports that are only in DNS.
    named: Vec<PublishedPort>,
}

/// Converts a Service, without endpoints. A service of another proxy gets only a name. The result is valid only if
/// `findings` has no faults.
pub fn service(object: api::Service, findings: &mut Findings) -> Outcome<Service> {
    let labels = &object.metadata.labels;
    if label(labels, LABEL_PROXY).is_none() && label(labels, LABEL_HEADLESS).is_none() {
        return Outcome::Served(read(object, findings));
    }
    check_name(&object.metadata, findings);
    // The other proxy reports the service's faults.
    let mut ignored = Findings::default();
    let all = read(object, &mut ignored);
    if !ignored.faults.is_empty() {
        return Outcome::LeftAlone;
    }
    Outcome::Served(all.only_named())
}

fn read(object: api::Service, findings: &mut Findings) -> Service {
    check_name(&object.metadata, findings);
    let spec = object.spec.unwrap_or_default();
    let kind = kind(&spec, findings);
    let ingress = object
        .status
        .and_then(|status| status.load_balancer)
        .and_then(|balancer| balancer.ingress)
        .unwrap_or_default();
    let cluster_ips = cluster_ips(&spec, kind, findings);
    let all_ports = ports(&spec, kind, findings);
    let served = |port: &ServicePort| PublishedPort {
        name: port.name.clone(),
        protocol: port.protocol.into(),
        number: port.port,
    };
    let named = all_ports.served.iter().map(served).chain(all_ports.named);
    let external_ips = external_ips(&spec, findings);
    let load_balancer_ips = load_balancer_ips(&ingress, findings);
    let addresses = cluster_ips.len() + external_ips.len() + load_balancer_ips.len();
    let keys = addresses.saturating_mul(all_ports.served.len());
    if keys > KEYS_MAX {
        findings.fault(
            "spec.ports",
            format!(
                "{} ports at {addresses} addresses are {keys} entries of table FRONTENDS; one Service may have {KEYS_MAX}. \
                 Use fewer ports or addresses",
                all_ports.served.len()
            ),
        );
    }
    Service {
        name: object_name(&object.metadata),
        kind,
        created: object
            .metadata
            .creation_timestamp
            .as_ref()
            .map(|time| time.0.as_second()),
        external_ips,
        load_balancer_ips,
        source_ranges: source_ranges(&spec, findings),
        affinity: affinity(&spec, findings),
        internal_policy: policy(
            "spec.internalTrafficPolicy",
            spec.internal_traffic_policy.as_deref(),
            findings,
        ),
        external_policy: policy(
            "spec.externalTrafficPolicy",
            spec.external_traffic_policy.as_deref(),
            findings,
        ),
        health_check_node_port: optional_port(
            "spec.healthCheckNodePort",
            spec.health_check_node_port,
            findings,
        ),
        aside: Vec::new(),
        identities: Box::default(),
        records: match kind {
            ServiceType::ExternalName => alias(&spec, findings),
            _ => Records::Object(Box::new(Named {
                headless: is_headless(&spec),
                elsewhere: false,
                cluster_ips: cluster_ips.clone(),
                ports: named.collect(),
                endpoints: Box::default(),
            })),
        },
        cluster_ips,
        ports: all_ports.served,
    }
}

/// Returns the name that a service of type ExternalName leads to.
fn alias(spec: &ServiceSpec, findings: &mut Findings) -> Records {
    let name = spec.external_name.as_deref().unwrap_or_default();
    let name = name.strip_suffix('.').unwrap_or(name);
    // Services of this type are not served otherwise, so a fault in them must not affect the rest of the node.
    if name.is_empty() || name.len() > 253 || name.split('.').any(|label| !is_label(label)) {
        findings.note(
            "spec.externalName",
            format!("{name:?} is not a name in DNS, so this service has none; expected one like db.example.com"),
        );
        return Records::ClusterIps;
    }
    Records::Alias(name.to_ascii_lowercase().into())
}

/// Returns whether a text can be a label of a name. Underscores occur, for example in names of SRV records.
fn is_label(text: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=63).contains(&text.len()) && text.bytes().all(fits)
}

pub(super) fn is_headless(spec: &ServiceSpec) -> bool {
    spec.cluster_ip.as_deref() == Some("None")
        || spec
            .cluster_ips
            .as_ref()
            .is_some_and(|ips| ips.first().is_some_and(|ip| ip == "None"))
}

pub(super) fn kind(spec: &ServiceSpec, findings: &mut Findings) -> ServiceType {
    match spec.type_.as_deref() {
        None | Some("" | "ClusterIP") => ServiceType::ClusterIp,
        Some("NodePort") => ServiceType::NodePort,
        Some("LoadBalancer") => ServiceType::LoadBalancer,
        Some("ExternalName") => ServiceType::ExternalName,
        Some(other) => {
            findings.fault(
                "spec.type",
                format!(
                    "unknown type {other:?}; expected ClusterIP, NodePort, LoadBalancer or \
                     ExternalName"
                ),
            );
            ServiceType::ClusterIp
        }
    }
}

fn cluster_ips(
    spec: &ServiceSpec,
    kind: ServiceType,
    findings: &mut Findings,
) -> SmallVec<[IpAddr; 1]> {
    let mut ips = SmallVec::<[IpAddr; 1]>::new();
    if kind == ServiceType::ExternalName || is_headless(spec) {
        return ips;
    }
    let many = spec.cluster_ips.as_deref().unwrap_or_default();
    let one = spec.cluster_ip.as_deref().unwrap_or_default();
    if !one.is_empty() && many.first().is_some_and(|first| first != one) {
        findings.fault(
            "spec.clusterIP",
            format!("{one:?} is not the first of spec.clusterIPs, {:?}", many[0]),
        );
    }
    let listed = !many.is_empty();
    let texts: Vec<&str> = if listed {
        many.iter().map(String::as_str).collect()
    } else {
        vec![one]
    };
    for (index, text) in texts.into_iter().enumerate() {
        let path = || {
            if listed {
                format!("spec.clusterIPs[{index}]")
            } else {
                "spec.clusterIP".into()
            }
        };
        if text.is_empty() {
            findings.note(
                path(),
                "no cluster IP has been given to it, so it is not reachable by one; print it with \
                 `kubectl get`, which shows the one that the cluster chose",
            );
            continue;
        }
        match address::virtual_address(text) {
            Err(wrong) => findings.fault(path(), wrong),
            Ok(ip) if ips.iter().any(|other| other.is_ipv4() == ip.is_ipv4()) => findings.fault(
                path(),
                format!(
                    "{ip} is a second {family} address; expected at most one per family",
                    family = address::family(ip)
                ),
            ),
            Ok(ip) => {
                let declared = spec.ip_families.as_deref().unwrap_or_default().get(index);
                if let Some(declared) = declared.filter(|family| *family != address::family(ip)) {
                    findings.fault(
                        path(),
                        format!("{ip} is not of spec.ipFamilies[{index}], {declared:?}"),
                    );
                }
                ips.push(ip);
            }
        }
    }
    ips
}

fn external_ips(spec: &ServiceSpec, findings: &mut Findings) -> SmallVec<[IpAddr; 0]> {
    let (mut ips, mut seen) = (SmallVec::new(), HashSet::new());
    for (index, text) in spec.external_ips.iter().flatten().enumerate() {
        let path = format!("spec.externalIPs[{index}]");
        match address::virtual_address(text) {
            Err(wrong) => findings.fault(path, wrong),
            // The API server refuses these addresses, too. Otherwise an author of services could take the cloud's
            // metadata address.
            Ok(ip) if address::is_link_local(ip) => findings.fault(
                path,
                format!("{ip} is a link-local address, which cannot be an external IP"),
            ),
            Ok(ip) if !seen.insert(ip) => {}
            Ok(ip) => ips.push(ip),
        }
    }
    ips
}

fn load_balancer_ips(
    ingress: &[LoadBalancerIngress],
    findings: &mut Findings,
) -> SmallVec<[IpAddr; 0]> {
    let (mut ips, mut seen) = (SmallVec::new(), HashSet::new());
    for (index, entry) in ingress.iter().enumerate() {
        let path = format!("status.loadBalancer.ingress[{index}]");
        let Some(text) = entry.ip.as_deref().filter(|ip| !ip.is_empty()) else {
            continue;
        };
        match entry.ip_mode.as_deref() {
            None | Some("" | "VIP") => {}
            Some("Proxy") => continue,
            Some(other) => findings.fault(
                format!("{path}.ipMode"),
                format!("unknown mode {other:?}; expected VIP or Proxy"),
            ),
        }
        match address::virtual_address(text) {
            Err(wrong) => findings.fault(format!("{path}.ip"), wrong),
            Ok(ip) if !seen.insert(ip) => {}
            Ok(ip) => ips.push(ip),
        }
    }
    ips
}

fn source_ranges(spec: &ServiceSpec, findings: &mut Findings) -> SmallVec<[ipnet::IpNet; 0]> {
    let mut ranges = SmallVec::new();
    for (index, text) in spec
        .load_balancer_source_ranges
        .iter()
        .flatten()
        .enumerate()
    {
        match address::range(text) {
            Err(wrong) => {
                findings.fault(format!("spec.loadBalancerSourceRanges[{index}]"), wrong);
            }
            Ok(range) => ranges.push(range),
        }
    }
    ranges
}

fn affinity(spec: &ServiceSpec, findings: &mut Findings) -> Option<Duration> {
    match spec.session_affinity.as_deref() {
        None | Some("" | "None") => return None,
        Some("ClientIP") => {}
        Some(other) => {
            findings.fault(
                "spec.sessionAffinity",
                format!("unknown affinity {other:?}; expected None or ClientIP"),
            );
            return None;
        }
    }
    let seconds = spec
        .session_affinity_config
        .as_ref()
        .and_then(|config| config.client_ip.as_ref())
        .and_then(|client| client.timeout_seconds)
        .unwrap_or(AFFINITY_SECONDS);
    if !(1..=AFFINITY_SECONDS_MAX).contains(&seconds) {
        findings.fault(
            "spec.sessionAffinityConfig.clientIP.timeoutSeconds",
            format!("{seconds} is out of range; expected 1 to {AFFINITY_SECONDS_MAX} seconds"),
        );
    }
    Some(Duration::from_secs(
        u64::try_from(seconds).unwrap_or_default(),
    ))
}

fn policy(path: &str, value: Option<&str>, findings: &mut Findings) -> TrafficPolicy {
    match value {
        None | Some("" | "Cluster") => TrafficPolicy::Cluster,
        Some("Local") => TrafficPolicy::Local,
        Some(other) => {
            findings.fault(
                path,
                format!("unknown policy {other:?}; expected Cluster or Local"),
            );
            TrafficPolicy::Cluster
        }
    }
}

fn optional_port(path: &str, value: Option<i32>, findings: &mut Findings) -> Option<u16> {
    match super::port(value?) {
        Ok(port) => Some(port),
        Err(wrong) => {
            findings.fault(path, wrong);
            None
        }
    }
}

fn ports(spec: &ServiceSpec, kind: ServiceType, findings: &mut Findings) -> Ports {
    let mut ports = SmallVec::<[ServicePort; 1]>::new();
    let mut only_named = Vec::new();
    let given = spec.ports.as_deref().unwrap_or_default();
    if given.is_empty() && kind != ServiceType::ExternalName && !is_headless(spec) {
        findings.fault("spec.ports", "missing or empty; expected at least one port");
    }
    // Maps from number and from name to the index of a port, because a service may have every port of each protocol.
    let (mut numbers, mut names) = (HashMap::new(), HashSet::new());
    for (index, given) in given.iter().enumerate() {
        let path = |field: &str| format!("spec.ports[{index}].{field}");
        // Checks all fields of a port before it gives up, so that one run reports every fault.
        let number = super::port(given.port).map_err(|wrong| findings.fault(path("port"), wrong));
        let node_port = optional_port(&path("nodePort"), given.node_port, findings);
        let protocol = super::protocol(given.protocol.as_deref())
            .map_err(|wrong| findings.fault(path("protocol"), wrong));
        if node_port.is_some() && !matches!(kind, ServiceType::NodePort | ServiceType::LoadBalancer)
        {
            findings.fault(
                path("nodePort"),
                "only services of type NodePort and LoadBalancer have node ports",
            );
        }
        let (Ok(number), Ok(protocol)) = (number, protocol) else {
            continue;
        };
        let name = given.name.as_deref().unwrap_or_default();
        let Some(protocol) = protocol.served() else {
            findings.note(
                format!("spec.ports[{index}]"),
                format!("SCTP port {number} is not served: only TCP and UDP are"),
            );
            only_named.push(PublishedPort {
                name: name.into(),
                protocol: NamedProtocol::Sctp,
                number,
            });
            continue;
        };
        if let Some(other) = numbers.get(&(number, protocol)) {
            findings.fault(
                path("port"),
                twice(&format!("{number}/{}", protocol.word()), &ports[*other]),
            );
        } else if !names.insert(name) {
            findings.fault(
                path("name"),
                format!("{name:?} names another port, too; expected a name for each port"),
            );
        } else {
            numbers.insert((number, protocol), ports.len());
            ports.push(ServicePort {
                name: name.into(),
                node_port,
                ..ServicePort::new(number, protocol)
            });
        }
    }
    Ports {
        served: ports,
        named: only_named,
    }
}

fn twice(what: &str, other: &ServicePort) -> String {
    if other.name.is_empty() {
        format!("{what} is given twice")
    } else {
        format!("{what} is given twice, also by port {:?}", other.name)
    }
}

#[cfg(test)]
mod tests {
    use threads::computed;

    use super::*;

    /// Returns the time to read a service with `count` ports of each protocol.
    fn read(count: i32) -> Duration {
        let given = (1..=count).flat_map(|port| {
            ["TCP", "UDP"].map(|protocol| api::ServicePort {
                name: Some(format!("{protocol}-{port}")),
                protocol: Some(protocol.to_owned()),
                port,
                node_port: None,
                target_port: None,
            })
        });
        let spec = ServiceSpec {
            ports: Some(given.collect()),
            ..ServiceSpec::default()
        };
        let mut findings = Findings::default();
        let start = computed();
        let read = ports(&spec, ServiceType::ClusterIp, &mut findings);
        let duration = computed().saturating_sub(start);
        assert_eq!(findings, Findings::default());
        assert_eq!(read.served.len(), 2 * usize::try_from(count).unwrap());
        duration
    }

    #[test]
    fn every_port_there_is_costs_what_each_costs() {
        let few = read(2_000).max(Duration::from_millis(1));
        let all = read(65_535);
        // 33 times as many ports take 33 times as long, or 1000 times if each is compared with all others.
        assert!(all < few * 200, "{all:?} for all, {few:?} for 2000");
    }
}
