//! Converts Istio's ServiceEntry into the model.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;
use model::{
    At, Backend, Entry, EntryName, EntryPort, EntryResolution, ExportTo, Host, Location, Node,
    Protocol, UseWaypoint,
};
use smallvec::SmallVec;

use super::{
    Findings, address, check_name,
    identities::identities,
    istio::waypoint,
    label, object_name,
    selection::preference,
    wire::{self as api, ServiceEntrySpec, WorkloadEntrySpec},
    workload_entry::backend,
};

/// Label that keeps a control plane, and this node, from assigning addresses to an entry's hosts.
const LABEL_AUTOALLOCATE: &str = "networking.istio.io/enable-autoallocate-ip";
/// Maximum size of a range in `spec.addresses`, because each of its addresses is an entry of the tables.
const RANGE_MAX: u128 = 256;
/// A ServiceEntry in the model's terms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceEntry {
    /// The entry, with the endpoints that it names itself.
    pub entry: Entry,
    /// The ranges of `spec.addresses`. [`Entries`](super::Entries) expands them into addresses.
    pub ranges: Vec<IpNet>,
    /// `spec.workloadSelector`: pods and WorkloadEntries of its namespace with these labels are its endpoints.
    pub selector: Option<BTreeMap<String, String>>,
    /// The waypoint that its labels name. `None`: those of the namespace count.
    pub waypoint: Option<UseWaypoint>,
}

/// Converts a ServiceEntry. The result is valid only if `findings` has no faults.
pub fn service_entry(
    object: api::ServiceEntry,
    node: &Node,
    findings: &mut Findings,
) -> ServiceEntry {
    check_name(&object.metadata, findings);
    let name = object_name(&object.metadata);
    let name = EntryName::new(name.namespace(), name.name());
    let spec = object.spec.unwrap_or_default();
    let mut resolution = resolution(&spec, findings);
    let ports = ports(&spec, findings);
    let selector = selector(&spec, resolution, findings);
    let backends = backends(&spec, resolution, &ports, node, findings);
    let mut hosts = hosts(&spec, name.namespace(), findings);
    let names_endpoints = spec.endpoints.iter().flatten().next().is_some();
    if resolution == EntryResolution::Dns && !names_endpoints && selector.is_none() {
        resolution = EntryResolution::Hosts;
        for (index, host) in hosts.iter().enumerate() {
            if host.wildcard().is_some() {
                findings.fault(
                    format!("spec.hosts[{index}]"),
                    format!(
                        "{:?} cannot be resolved; expected a whole name, or spec.endpoints to resolve in its place",
                        &*host.name
                    ),
                );
            }
        }
    }
    let (mut addresses, mut ranges) = addresses(&spec, resolution, findings);
    let has_addresses = spec.addresses.iter().flatten().next().is_some();
    let export_to = export_to(&spec, name.namespace());
    let is_translated =
        resolution != EntryResolution::None && !(addresses.is_empty() && ranges.is_empty());
    if resolution == EntryResolution::Hosts && hosts.len() > 1 && is_translated {
        findings.note(
            "spec.addresses",
            "lead to the endpoints of the first host only; with resolution DNS and without spec.endpoints, each host is its \
             own endpoint: write an entry for each host, or leave spec.addresses out: then each host gets addresses of its \
             own",
        );
    }
    if export_to != ExportTo::All && is_translated {
        // A node has one set of tables for all its clients.
        findings.note(
            "spec.addresses",
            "not served, because spec.exportTo names namespaces, and a node would translate connections to these \
             addresses for all namespaces; export the entry to \"*\", or leave spec.addresses out: then the hosts get \
             addresses of their own",
        );
        addresses.clear();
        ranges.clear();
    }
    let forbidden = label(&object.metadata.labels, LABEL_AUTOALLOCATE)
        .is_some_and(|value| value.eq_ignore_ascii_case("false"));
    let wants_vips = !has_addresses && !forbidden && resolution != EntryResolution::None;
    // An entry that no longer wants addresses may still have some in its `status`. The control plane does not remove
    // them, and may have assigned them to another host since.
    if wants_vips {
        let status = object.status.and_then(|status| status.addresses);
        assign(&mut hosts, &status.unwrap_or_default(), findings);
    }
    let created = object.metadata.creation_timestamp.as_ref();
    let waypoint = waypoint(&object.metadata.labels, name.namespace());
    ServiceEntry {
        entry: Entry {
            created: created.map(|time| time.0.as_second()),
            wants_vips,
            location: location(&spec, findings),
            name,
            hosts,
            addresses,
            ranges: SmallVec::new(),
            resolution,
            export_to,
            identities: identities(spec.subject_alt_names.as_deref(), findings),
            ports,
            backends,
            preference: [preference(&object.metadata, findings), None],
        },
        ranges,
        selector,
        waypoint,
    }
}

fn resolution(spec: &ServiceEntrySpec, findings: &mut Findings) -> EntryResolution {
    match spec.resolution.as_deref() {
        None | Some("" | "NONE") => EntryResolution::None,
        Some("STATIC") => EntryResolution::Static,
        Some("DNS" | "DNS_ROUND_ROBIN") => EntryResolution::Dns,
        Some("DYNAMIC_DNS") => {
            findings.fault(
                "spec.resolution",
                "DYNAMIC_DNS is not served: it needs a proxy that reads the host's name from each connection; use DNS \
                 with whole names",
            );
            EntryResolution::Static
        }
        Some(other) => {
            findings.fault(
                "spec.resolution",
                format!(
                    "unknown resolution {other:?}; expected NONE, STATIC, DNS or DNS_ROUND_ROBIN"
                ),
            );
            EntryResolution::Static
        }
    }
}

fn location(spec: &ServiceEntrySpec, findings: &mut Findings) -> Location {
    match spec.location.as_deref() {
        None | Some("" | "MESH_EXTERNAL") => Location::External,
        Some("MESH_INTERNAL") => Location::Internal,
        Some(other) => {
            findings.fault(
                "spec.location",
                format!("unknown location {other:?}; expected MESH_EXTERNAL or MESH_INTERNAL"),
            );
            Location::External
        }
    }
}

/// Parses `spec.exportTo`, in which `.` is the entry's own namespace and `~` no namespace.
fn export_to(spec: &ServiceEntrySpec, own: &str) -> ExportTo {
    let given = spec.export_to.as_deref().unwrap_or_default();
    if given.is_empty() || given.iter().any(|namespace| namespace == "*") {
        return ExportTo::All;
    }
    let named = given.iter().filter(|namespace| *namespace != "~");
    let named = named.map(|namespace| if namespace == "." { own } else { namespace });
    ExportTo::Namespaces(named.map(Box::from).collect::<BTreeSet<_>>())
}

fn hosts(spec: &ServiceEntrySpec, own: &str, findings: &mut Findings) -> SmallVec<[Host; 1]> {
    let given = spec.hosts.as_deref().unwrap_or_default();
    if given.is_empty() {
        findings.fault("spec.hosts", "missing or empty; expected at least one host");
    }
    let mut seen = HashSet::new();
    let mut hosts = SmallVec::new();
    let mut refused = Vec::new();
    for (index, text) in given.iter().enumerate() {
        let path = format!("spec.hosts[{index}]");
        match host(text) {
            Ok(name) => match anothers(&name, own) {
                Some(why) => refused.push((path, format!("{text:?} is not served: {why}"))),
                None if seen.insert(Arc::clone(&name)) => hosts.push(Host::new(name)),
                None => {}
            },
            Err(wrong) => findings.fault(path, wrong),
        }
    }
    for (path, text) in refused {
        if hosts.is_empty() {
            findings.fault(path, text);
        } else {
            findings.note(path, text);
        }
    }
    hosts
}

/// Returns the reason why clients of other namespaces may mean another host by this name, for an entry in namespace
/// `own`: they ask for names without a search list's domain, too. [`Names::host`](model::Names::host) knows the
/// namespaces and Services.
fn anothers(host: &str, own: &str) -> Option<&'static str> {
    let mut labels = host.strip_prefix("*.").unwrap_or(host).rsplit('.');
    let (last, before) = (labels.next(), labels.next());
    match (last?, before) {
        ("localhost" | "invalid", _) => Some(
            "resolvers answer names below localhost and invalid themselves (RFC 6761, 6.3 and 6.4)",
        ),
        ("svc", of) if of != Some(own) => Some(
            "it is a Service's name, and an entry decides only about those of its own namespace",
        ),
        (_, None) if !host.starts_with("*.") => Some(
            "to clients, a name of one label is a Service of their own namespace; expected a name with a domain",
        ),
        _ => None,
    }
}

/// Parses a DNS name, with or without `*.` before it.
fn host(text: &str) -> Result<Arc<str>, String> {
    let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
    let whole = name.strip_prefix("*.").unwrap_or(&name);
    if address::is_dns_name(whole) && whole.parse::<IpAddr>().is_err() {
        return Ok(name.into());
    }
    Err(format!(
        "{text:?} is not a host; expected a DNS name, or `*.` and a DNS name"
    ))
}

fn ports(spec: &ServiceEntrySpec, findings: &mut Findings) -> SmallVec<[EntryPort; 1]> {
    let mut ports = SmallVec::<[EntryPort; 1]>::new();
    let (mut numbers, mut names) = (HashSet::new(), HashSet::new());
    for (index, given) in spec.ports.iter().flatten().enumerate() {
        let path = |field: &str| format!("spec.ports[{index}].{field}");
        let number =
            super::port(given.number).map_err(|wrong| findings.fault(path("number"), wrong));
        let target = given
            .target_port
            .filter(|target| *target != 0)
            .map(super::port);
        let target = target
            .transpose()
            .map_err(|wrong| findings.fault(path("targetPort"), wrong));
        let protocol = protocol(given.protocol.as_deref())
            .map_err(|wrong| findings.fault(path("protocol"), wrong));
        let (Ok(port), Ok(target), Ok(protocol)) = (number, target, protocol) else {
            continue;
        };
        let name = given.name.as_deref().unwrap_or_default();
        if !numbers.insert((port, protocol)) {
            let word = protocol.word();
            findings.fault(path("number"), format!("{port}/{word} is given twice"));
        } else if !names.insert(name) {
            findings.fault(
                path("name"),
                format!("{name:?} names another port, too; expected a name for each port"),
            );
        } else {
            ports.push(EntryPort {
                name: name.into(),
                port,
                protocol,
                target,
            });
        }
    }
    ports
}

/// Returns the transport protocol of one of Istio's protocols.
fn protocol(value: Option<&str>) -> Result<Protocol, String> {
    let value = value.unwrap_or_default();
    match value.to_ascii_uppercase().as_str() {
        "" | "TCP" | "HTTP" | "HTTP2" | "HTTPS" | "HTTP_PROXY" | "GRPC" | "GRPC-WEB" | "TLS"
        | "MONGO" | "MYSQL" | "REDIS" | "HBONE" | "DOUBLE_HBONE" => Ok(Protocol::Tcp),
        "UDP" => Ok(Protocol::Udp),
        _ => Err(format!(
            "unknown protocol {value:?}; expected HTTP, HTTPS, HTTP2, GRPC, MONGO, TCP, TLS or UDP"
        )),
    }
}

fn selector(
    spec: &ServiceEntrySpec,
    resolution: EntryResolution,
    findings: &mut Findings,
) -> Option<BTreeMap<String, String>> {
    let selector = spec.workload_selector.as_ref()?;
    if spec.endpoints.iter().flatten().next().is_some() {
        findings.fault(
            "spec.workloadSelector",
            "there are spec.endpoints, too; expected one of the two",
        );
    }
    if selector.labels.is_empty() {
        findings.fault(
            "spec.workloadSelector.labels",
            "missing or empty; expected at least one label",
        );
    }
    if resolution == EntryResolution::None {
        findings.note(
            "spec.workloadSelector",
            "has no effect with resolution NONE; use STATIC",
        );
        return None;
    }
    Some(selector.labels.clone())
}

fn backends(
    spec: &ServiceEntrySpec,
    resolution: EntryResolution,
    ports: &[EntryPort],
    node: &Node,
    findings: &mut Findings,
) -> Vec<Backend> {
    let endpoint = |(index, given): (usize, &WorkloadEntrySpec)| {
        let path = format!("spec.endpoints[{index}]");
        let mut named = given.ports.iter().flatten().map(|(name, _)| name);
        if let Some(name) = named.find(|name| ports.iter().all(|port| *port.name != ***name)) {
            return Err((
                format!("{path}.ports.{}", name.escape_debug()),
                format!("spec.ports has no port of the name {name:?}"),
            ));
        }
        let backend = backend(given, &path, node)?;
        match (&backend.at, resolution) {
            (At::Name(name), EntryResolution::Static) => Err((
                format!("{path}.address"),
                format!("{name:?} is a name; expected an IP address with resolution STATIC"),
            )),
            _ => Ok(backend),
        }
    };
    let given = spec.endpoints.iter().flatten().enumerate();
    let (mut backends, mut wrong) = (Vec::new(), Vec::new());
    for endpoint in given.map(endpoint) {
        match endpoint {
            Ok(backend) => backends.push(backend),
            Err(of) => wrong.push(of),
        }
    }
    if resolution == EntryResolution::None && !backends.is_empty() {
        findings.fault(
            "spec.endpoints",
            "resolution NONE has no endpoints; use STATIC or DNS",
        );
    }
    // An invalid endpoint does not remove the valid ones.
    for (path, text) in wrong {
        if backends.is_empty() {
            findings.fault(path, text);
        } else {
            findings.note(path, format!("{text}; the endpoint is left out"));
        }
    }
    backends.sort_unstable();
    backends.dedup();
    backends
}

/// Parses `spec.addresses` into single addresses and small ranges.
fn addresses(
    spec: &ServiceEntrySpec,
    resolution: EntryResolution,
    findings: &mut Findings,
) -> (SmallVec<[IpAddr; 1]>, Vec<IpNet>) {
    let (mut single, mut ranges) = (Vec::new(), Vec::new());
    for (index, text) in spec.addresses.iter().flatten().enumerate() {
        let path = || format!("spec.addresses[{index}]");
        let range = if text.contains('/') {
            address::range(text)
        } else {
            address::address(text).map(IpNet::from)
        };
        let range = match range {
            Ok(range) => range,
            Err(wrong) => {
                findings.fault(path(), wrong);
                continue;
            }
        };
        let bits = range.max_prefix_len() - range.prefix_len();
        if bits > 8 {
            // Without endpoints, connections to a range are left alone.
            if resolution != EntryResolution::None {
                findings.note(
                    path(),
                    format!(
                        "{range} is not served: the tables have an entry for each address, and a range of an entry may \
                         have {RANGE_MAX}; use a smaller range or the addresses that clients use"
                    ),
                );
            }
            continue;
        }
        // In so small a range, only the first two addresses and the last can differ from the others in validity.
        let mut some = addresses_of(&range).take(2).chain([range.broadcast()]);
        match some.find_map(|ip| servable(ip).err()) {
            Some(wrong) => findings.fault(path(), wrong),
            None if bits == 0 => single.push(range.addr()),
            None => ranges.push(range),
        }
    }
    let mut seen = HashSet::new();
    single.retain(|ip| seen.insert(*ip));
    (single.into(), ranges)
}

/// Returns all addresses of a small range.
pub(super) fn addresses_of(range: &IpNet) -> impl Iterator<Item = IpAddr> + use<> {
    let (first, last) = match range {
        IpNet::V4(range) => (
            range.network().to_bits().into(),
            range.broadcast().to_bits().into(),
        ),
        IpNet::V6(range) => (range.network().to_bits(), range.broadcast().to_bits()),
    };
    let v4 = matches!(range, IpNet::V4(_));
    (first..=last).map(move |bits: u128| {
        if v4 {
            let bits = u32::try_from(bits).unwrap_or_default();
            IpAddr::V4(bits.into())
        } else {
            IpAddr::V6(bits.into())
        }
    })
}

/// Checks that an entry may have an address, by the rules for external IPs of Services.
fn servable(ip: IpAddr) -> Result<(), String> {
    let ip = address::virtual_address(&ip.to_string())?;
    if address::is_link_local(ip) {
        return Err(format!(
            "{ip} is a link-local address, which cannot be an entry's"
        ));
    }
    Ok(())
}

/// Stores the addresses that a control plane assigned to hosts. An address without a host is not valid for all hosts.
fn assign(hosts: &mut [Host], given: &[api::ServiceEntryAddress], findings: &mut Findings) {
    let index_of: HashMap<Arc<str>, usize> = hosts
        .iter()
        .enumerate()
        .map(|(index, host)| (Arc::clone(&host.name), index))
        .collect();
    for (index, given) in given.iter().enumerate() {
        let path = format!("status.addresses[{index}]");
        let ip = address::address(&given.value).and_then(|ip| servable(ip).map(|()| ip));
        let ip = match ip {
            Ok(ip) => ip,
            Err(wrong) => {
                findings.note(format!("{path}.value"), wrong);
                continue;
            }
        };
        let name = given.host.to_ascii_lowercase();
        let host = index_of.get(&*name).and_then(|index| hosts.get_mut(*index));
        let fits = |host: &&mut Host| {
            let mut others = host.assigned.iter();
            host.wildcard().is_none() && others.all(|other| other.is_ipv4() != ip.is_ipv4())
        };
        if let Some(host) = host.filter(fits) {
            host.assigned.push(ip);
        }
    }
}
