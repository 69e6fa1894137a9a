//! Pods and namespaces: who is captured, and what they ask for.
//!
//! The names are those that people already have: Istio's and Open Service Mesh's.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use ipnet::IpNet;
use smallvec::SmallVec;

use super::{
    Findings, check_name, label, object_name,
    resolution::resolution,
    wire::{self as api, Metadata},
};
use crate::model::{
    Acceleration, CapturedBy, Egress, Exempt, Layers, Mode, Node, Place, Protocol, Rules,
    Telemetry, Uid, VIRTUAL_INTERFACES, WithoutProxy, Workload, WorkloadName, is_reserved,
    is_virtual_interface,
};

/// A label: `ambient` captures, `none` does not. Of a namespace for all its pods, or of a pod.
const LABEL_MODE: &str = "istio.io/dataplane-mode";
/// A label of pods: the network that their addresses are of.
const LABEL_NETWORK: &str = "topology.istio.io/network";
/// An annotation of pods with a mesh's proxy in them: whoever put it there, or asked for it.
const SIDECAR: &str = "sidecar.istio.io/status";
/// What ours begin with.
const OURS: &str = "dataplane.io/";
const ISTIO: &str = "traffic.sidecar.istio.io/";
/// Istio's annotation of DNS capture.
const DNS_CAPTURE: &str = "ambient.istio.io/dns-capture";
const OSM: &str = "openservicemesh.io/";

/// What a namespace says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceRules {
    /// Its name.
    pub name: Arc<str>,
    /// What it asks for, for its pods.
    pub rules: Rules,
}

/// Turns a Namespace into what is needed of it.
pub fn namespace(metadata: &Metadata, findings: &mut Findings) -> NamespaceRules {
    check_name(metadata, findings);
    NamespaceRules {
        name: metadata.name.as_deref().unwrap_or_default().into(),
        rules: rules(metadata, findings),
    }
}

/// Turns a Pod into a workload; none if it is no more, or has no address of its own and does not ask to be
/// captured.
pub fn pod(object: &api::Pod, node: &Node, findings: &mut Findings) -> Option<Workload> {
    check_name(&object.metadata, findings);
    let rules = rules(&object.metadata, findings);
    let spec = object.spec.as_ref()?;
    let status = object.status.as_ref();
    let phase = status.and_then(|status| status.phase.as_deref());
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return None;
    }
    let mut place = match spec.node_name.as_deref() {
        Some(there) if !there.is_empty() && there != &*node.name => Place::Elsewhere,
        _ if has_sidecar(&object.metadata) => Place::Exempt(Exempt::Sidecar),
        _ => Place::Address,
    };
    let mut addresses = addresses(status, findings);
    if spec.host_network == Some(true) {
        // Only for who asked for what it cannot have.
        if rules.captured != Some(true) || place == Place::Elsewhere {
            return None;
        }
        place = Place::Exempt(Exempt::HostNetwork);
        // They are the node's.
        addresses.clear();
    }
    let name = object_name(&object.metadata);
    let name = WorkloadName::new(name.namespace(), name.name());
    let labels = &object.metadata.labels;
    Some(Workload {
        addresses,
        ports: declared(spec),
        uid: object.metadata.uid.as_deref().and_then(Uid::parse),
        node: spec.node_name.as_deref().unwrap_or_default().into(),
        network: label(labels, LABEL_NETWORK).unwrap_or_default().into(),
        service_account: spec
            .service_account_name
            .as_deref()
            .unwrap_or_default()
            .into(),
        telemetry: Telemetry::new(&owner(&object.metadata), Some(labels)),
        resolution: resolution(spec, findings),
        by_packets: by_packets(&object.metadata, findings),
        rules: Arc::new(Layers {
            own: rules,
            ..Layers::default()
        }),
        ..Workload::new(name, place)
    })
}

/// The addresses of a Pod and of its node, each once. A Pod with the node's network has those of the node.
pub fn pod_addresses(object: &api::Pod) -> SmallVec<[IpAddr; 4]> {
    let mut found = SmallVec::new();
    let Some(status) = &object.status else {
        return found;
    };
    // The addresses of a Pod that has ended may be another's.
    let is_over = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
    let own = status.pod_ips.iter().flatten().map(|ip| &ip.ip);
    let own = own.chain(&status.pod_ip).filter(|_| !is_over);
    let node = status.host_ips.iter().flatten().map(|ip| &ip.ip);
    for text in own.chain(node).chain(&status.host_ip) {
        if let Ok(address) = text.parse()
            && !found.contains(&address)
        {
            found.push(address);
        }
    }
    found
}

/// The ports that its containers declare; nonsense is left out.
fn declared(spec: &api::PodSpec) -> Box<[(Protocol, u16)]> {
    let declared = super::host_ports::ports(spec).filter_map(|(_, port)| {
        let protocol = match port.protocol.as_deref() {
            None | Some("" | "TCP") => Protocol::Tcp,
            Some("UDP") => Protocol::Udp,
            Some(_) => return None,
        };
        let number = u16::try_from(port.container_port).ok();
        Some((protocol, number.filter(|number| *number != 0)?))
    });
    declared.collect()
}

fn has_sidecar(metadata: &Metadata) -> bool {
    metadata.annotations.contains_key(SIDECAR)
}

fn addresses(status: Option<&api::PodStatus>, findings: &mut Findings) -> SmallVec<[IpAddr; 2]> {
    let Some(status) = status else {
        return SmallVec::new();
    };
    let all = status.pod_ips.iter().flatten().map(|ip| &ip.ip);
    let mut found = SmallVec::<[IpAddr; 2]>::new();
    for text in all.chain(&status.pod_ip).filter(|text| !text.is_empty()) {
        match text.parse() {
            Ok(addr) if found.contains(&addr) => {}
            Ok(addr) => found.push(addr),
            Err(_) => findings.fault(
                "status.podIPs",
                format!("{text:?} is not an address; expected one like 10.0.0.1 or fd00::1"),
            ),
        }
    }
    found
}

/// The name of what made a pod: of a Deployment's, not its `ReplicaSet`'s.
fn owner(metadata: &Metadata) -> String {
    let own = metadata.name.clone().unwrap_or_default();
    let owners = metadata.owner_references.iter().flatten();
    let Some(owner) = owners.into_iter().find(|o| o.controller == Some(true)) else {
        return own;
    };
    let hash = label(&metadata.labels, "pod-template-hash");
    hash.filter(|_| owner.kind == "ReplicaSet")
        .and_then(|hash| owner.name.strip_suffix(hash)?.strip_suffix('-'))
        .unwrap_or(&owner.name)
        .to_owned()
}

/// Whether a pod is to be served by packets only.
fn by_packets(metadata: &Metadata, findings: &mut Findings) -> Option<bool> {
    let mut asked = Asked {
        annotations: &metadata.annotations,
        findings,
    };
    asked.word("packets-only", &[("true", true), ("false", false)])
}

/// What labels and annotations ask for.
fn rules(metadata: &Metadata, findings: &mut Findings) -> Rules {
    let mut rules = Rules::default();
    if let Some(mode) = label(&metadata.labels, LABEL_MODE) {
        match mode {
            "ambient" => rules.captured = Some(true),
            "none" => rules.captured = Some(false),
            other => findings.fault(
                format!("metadata.labels[\"{LABEL_MODE}\"]"),
                format!("{other:?}; expected ambient or none"),
            ),
        }
    }
    let mut asked = Asked {
        annotations: &metadata.annotations,
        findings,
    };
    asked.all(&mut rules);
    rules
}

/// Reads annotations.
struct Asked<'a> {
    annotations: &'a BTreeMap<String, String>,
    findings: &'a mut Findings,
}

impl Asked<'_> {
    fn all(&mut self, rules: &mut Rules) {
        let names = |a: &str, b: &str| [format!("{ISTIO}{a}"), format!("{OSM}{b}")];
        for name in names(
            "includeOutboundIPRanges",
            "outbound-ip-range-inclusion-list",
        ) {
            if let Some(items) = self.list(&name) {
                if items == ["*"] {
                    rules.include_ranges([]);
                    rules
                        .outbound_ranges
                        .values_mut()
                        .for_each(|said| *said = true);
                } else {
                    let ranges = self.parsed(&name, &items, range);
                    rules.include_ranges(ranges);
                }
            }
        }
        for name in names(
            "excludeOutboundIPRanges",
            "outbound-ip-range-exclusion-list",
        ) {
            for range in self.parsed_list(&name, range) {
                rules.outbound_ranges.insert(range, false);
            }
        }
        for port in self.parsed_list(&format!("{ISTIO}includeOutboundPorts"), port) {
            rules.outbound_ports.insert(port, true);
        }
        for name in names("excludeOutboundPorts", "outbound-port-exclusion-list") {
            for port in self.parsed_list(&name, port) {
                rules.outbound_ports.insert(port, false);
            }
        }
        let name = format!("{ISTIO}includeInboundPorts");
        if let Some(items) = self.list(&name) {
            rules.inbound_others = Some(items == ["*"]);
            if items != ["*"] {
                for port in self.parsed(&name, &items, port) {
                    rules.inbound_ports.insert(port, true);
                }
            }
        }
        for name in names("excludeInboundPorts", "inbound-port-exclusion-list") {
            for port in self.parsed_list(&name, port) {
                rules.inbound_ports.insert(port, false);
            }
        }
        let interfaces = self.list(&format!("{ISTIO}excludeInterfaces"));
        rules
            .excluded_interfaces
            .extend(interfaces.into_iter().flatten().map(Into::into));
        for name in [
            "istio.io/reroute-virtual-interfaces".to_owned(),
            format!("{ISTIO}kubevirtInterfaces"),
        ] {
            for interface in self.parsed_list(&name, virtual_interface) {
                if rules.virtual_interfaces.len() == VIRTUAL_INTERFACES {
                    let text =
                        format!("too many interfaces; expected at most {VIRTUAL_INTERFACES}");
                    self.fault(&name, text);
                    break;
                }
                rules.virtual_interfaces.insert(interface);
            }
        }
        rules.mode = self.word(
            "mode",
            &[
                ("auto", Mode::Auto),
                ("proxy", Mode::Proxy),
                ("kernel", Mode::Kernel),
            ],
        );
        rules.captured_by = self.word(
            "captured-by",
            &[
                ("sockets", CapturedBy::Sockets),
                ("packets", CapturedBy::Packets),
            ],
        );
        rules.egress = self.word(
            "egress",
            &[("allow", Egress::Allow), ("deny", Egress::Deny)],
        );
        rules.without_proxy = self.word(
            "without-proxy",
            &[
                ("refuse", WithoutProxy::Refuse),
                ("pass", WithoutProxy::Pass),
            ],
        );
        rules.acceleration = self.word(
            "acceleration",
            &[
                ("off", Acceleration::Off),
                ("sockmap", Acceleration::Sockmap),
            ],
        );
        rules.dns = self.dns();
    }

    /// Whether DNS queries are captured, in Istio's annotation.
    fn dns(&mut self) -> Option<bool> {
        let said = self.annotations.get(DNS_CAPTURE)?;
        match said.as_str() {
            "true" => Some(true),
            "false" => Some(false),
            other => {
                self.fault(DNS_CAPTURE, format!("{other:?}; expected true or false"));
                None
            }
        }
    }

    /// A list with commas; `None` if it is not there.
    fn list(&self, name: &str) -> Option<Vec<String>> {
        let text = self.annotations.get(name)?;
        let items = text.split(',').map(str::trim);
        Some(
            items
                .filter(|item| !item.is_empty())
                .map(Into::into)
                .collect(),
        )
    }

    fn parsed_list<T>(&mut self, name: &str, read: fn(&str) -> Result<T, String>) -> Vec<T> {
        let items = self.list(name).unwrap_or_default();
        self.parsed(name, &items, read)
    }

    fn parsed<T>(
        &mut self,
        name: &str,
        items: &[String],
        read: fn(&str) -> Result<T, String>,
    ) -> Vec<T> {
        let mut found = Vec::new();
        for item in items {
            match read(item) {
                Ok(item) => found.push(item),
                Err(text) => self.fault(name, text),
            }
        }
        found
    }

    /// One of some words, in an annotation of ours.
    fn word<T: Copy>(&mut self, name: &str, words: &[(&str, T)]) -> Option<T> {
        let name = format!("{OURS}{name}");
        let said = self.annotations.get(&name)?;
        let found = words.iter().find(|(word, _)| word == said);
        if found.is_none() {
            let words: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
            self.fault(&name, format!("{said:?}; expected {}", words.join(" or ")));
        }
        found.map(|(_, value)| *value)
    }

    fn fault(&mut self, name: &str, text: String) {
        self.findings
            .fault(format!("metadata.annotations[\"{name}\"]"), text);
    }
}

fn range(text: &str) -> Result<IpNet, String> {
    text.parse()
        .or_else(|_| text.parse::<IpAddr>().map(IpNet::from))
        .map(|range: IpNet| range.trunc())
        .map_err(|_| format!("{text:?} is not a range of addresses; expected one like 10.0.0.0/8"))
}

fn virtual_interface(name: &str) -> Result<Box<str>, String> {
    if is_virtual_interface(name) {
        return Ok(name.into());
    }
    Err(format!(
        "{name:?} cannot be a virtual interface; expected the name of an interface other than lo"
    ))
}

fn port(text: &str) -> Result<u16, String> {
    let port = text
        .parse()
        .ok()
        .filter(|&port| port != 0)
        .ok_or_else(|| format!("{text:?} is not a port; expected a number from 1 to 65535"))?;
    if is_reserved(port) {
        return Err(format!(
            "{port} is reserved for the mesh's proxies; expected another port"
        ));
    }
    Ok(port)
}
