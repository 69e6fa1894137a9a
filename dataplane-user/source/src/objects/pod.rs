//! Pods: those that are captured, and their rules.
//!
//! Labels and annotations are those of Istio and of Open Service Mesh.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use ipnet::IpNet;
use model::{
    CapturedBy, Egress, Exempt, HBONE, Layers, Mode, Node, Place, Protocol, Rules, Telemetry, Uid,
    VIRTUAL_INTERFACES, WithoutProxy, Workload, WorkloadName, is_reserved, is_virtual_interface,
};
use smallvec::SmallVec;

use super::{
    Findings, check_name,
    istio::waypoint,
    label,
    node::LABEL_NETWORK,
    object_name,
    resolution::resolution,
    wire::{self as api, Metadata},
};

/// A label of a namespace, for all its pods, or of a pod: `ambient` captures, `none` does not.
pub const LABEL_MODE: &str = "istio.io/dataplane-mode";
/// A label of pods: the name of their workload in metrics.
const LABEL_WORKLOAD: &str = "service.istio.io/workload-name";
/// A label of pods: `http` if the pod itself accepts HBONE connections, at [`HBONE`].
const LABEL_TUNNEL: &str = "networking.istio.io/tunnel";
/// Istio's annotation of pods whose connections are captured: `enabled` if HBONE connections to the pod are accepted on
/// its node.
pub const REDIRECTION: &str = "ambient.istio.io/redirection";
/// An annotation of pods that contain a mesh's proxy, injected or configured.
pub const SIDECAR: &str = "sidecar.istio.io/status";
/// Prefix of this project's annotations.
const OURS: &str = "dataplane.io/";
const ISTIO: &str = "traffic.sidecar.istio.io/";
/// Istio's annotation of pods whose inbound connections are not captured, such as ingress gateways.
const BYPASS_INBOUND: &str = "ambient.istio.io/bypass-inbound-capture";
/// Istio's annotation of DNS capture.
const DNS_CAPTURE: &str = "ambient.istio.io/dns-capture";
const OSM: &str = "openservicemesh.io/";

/// Converts a Pod into a workload. `None` if it has ended, or if it has no address of its own and does not ask to be
/// captured.
pub fn pod(object: &api::Pod, node: &Node, findings: &mut Findings) -> Option<Workload> {
    check_name(&object.metadata, findings);
    let tunnels = label(&object.metadata.labels, LABEL_TUNNEL) == Some("http");
    let mut rules = rules(&object.metadata, tunnels, findings);
    if tunnels {
        rules.inbound_ports.entry(HBONE).or_insert(false);
    }
    let mut asked = Asked {
        annotations: &object.metadata.annotations,
        tunnels,
        findings,
    };
    // Istio reads this annotation at Pods only.
    if asked.truth(BYPASS_INBOUND) == Some(true) {
        rules.inbound = Some(false);
    }
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
        // Such a pod is a workload only to report that it cannot be captured.
        if rules.captured != Some(true) || place == Place::Elsewhere {
            return None;
        }
        place = Place::Exempt(Exempt::HostNetwork);
        // The addresses are the node's.
        addresses.clear();
    }
    let name = object_name(&object.metadata);
    let name = WorkloadName::new(name.namespace(), name.name());
    let labels = &object.metadata.labels;
    let is_redirected = label(&object.metadata.annotations, REDIRECTION) == Some("enabled");
    let speaks_hbone = tunnels || is_redirected;
    Some(Workload {
        addresses,
        ports: declared(spec),
        uid: object.metadata.uid.as_deref().and_then(Uid::parse),
        node: spec.node_name.as_deref().unwrap_or_default().into(),
        network: label(labels, LABEL_NETWORK).unwrap_or_default().into(),
        account: spec.account().into(),
        speaks_hbone,
        announces_hbone: speaks_hbone,
        waypoint: waypoint(labels, name.namespace()),
        telemetry: Telemetry::new(workload_name(&object.metadata), Some(labels)),
        labels: match place {
            Place::Elsewhere => Box::default(),
            _ => labels
                .iter()
                .map(|(key, value)| (key.as_str().into(), value.as_str().into()))
                .collect(),
        },
        resolution: resolution(spec, findings),
        by_packets: by_packets(&object.metadata, findings),
        rules: Arc::new(Layers {
            own: rules,
            ..Layers::default()
        }),
        ..Workload::new(name, place)
    })
}

/// Returns the addresses of a Pod and of its node, each once. A Pod in the node's network has the addresses of the
/// node.
pub fn pod_addresses(object: &api::Pod) -> SmallVec<[IpAddr; 4]> {
    let mut found = SmallVec::new();
    let Some(status) = &object.status else {
        return found;
    };
    // The addresses of a Pod that has ended may already belong to another Pod.
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

/// Returns the ports that the pod's containers declare, without invalid ones.
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
            Err(_) => findings.note(
                "status.podIPs",
                format!("{text:?} is not an address; expected one like 10.0.0.1 or fd00::1"),
            ),
        }
    }
    found
}

/// Returns the name of a pod's workload, by Istio's rules: that of the object that the author wrote, such as a
/// Deployment or CronJob, and not of the `ReplicaSet` or Job in between. A pod without a controller, such as a static
/// pod, which its Node owns, has its own name.
fn workload_name(metadata: &Metadata) -> &str {
    if let Some(name) = label(&metadata.labels, LABEL_WORKLOAD).filter(|name| !name.is_empty()) {
        return name;
    }
    let own = metadata.name.as_deref().unwrap_or_default();
    let owners = metadata.owner_references.iter().flatten();
    let Some(owner) = owners
        .into_iter()
        .find(|owner| owner.controller == Some(true) && owner.kind != "Node")
    else {
        return own;
    };
    let stem = match &*owner.kind {
        // The ReplicaSet of a Deployment, or of an Argo Rollout.
        "ReplicaSet" => ["pod-template-hash", "rollouts-pod-template-hash"]
            .iter()
            .filter_map(|key| label(&metadata.labels, key))
            .find_map(|hash| owner.name.strip_suffix(hash)?.strip_suffix('-')),
        "ReplicationController" => label(&metadata.labels, "deploymentconfig"),
        "Job" => of_cron_job(&owner.name),
        _ => None,
    };
    stem.filter(|stem| !stem.is_empty()).unwrap_or(&owner.name)
}

/// Returns whether a pod asks to be served by packets only.
fn by_packets(metadata: &Metadata, findings: &mut Findings) -> Option<bool> {
    let mut asked = Asked {
        annotations: &metadata.annotations,
        tunnels: false,
        findings,
    };
    asked.word("packets-only", &[("true", true), ("false", false)], None)
}

/// Returns the name of the CronJob that created a Job of this name. `None` if the Job has no such name. The controller
/// appends the minute of the run, formerly the second.
fn of_cron_job(job: &str) -> Option<&str> {
    let (name, time) = job.rsplit_once('-')?;
    let is_time = (8..=10).contains(&time.len()) && time.bytes().all(|byte| byte.is_ascii_digit());
    is_time.then_some(name)
}

/// Reads the rules in labels and annotations. An invalid value is reported. It counts as the strictest value, or has no
/// effect, and does not affect other settings or objects. `tunnels`: as [`Asked::tunnels`].
pub(super) fn rules(metadata: &Metadata, tunnels: bool, findings: &mut Findings) -> Rules {
    let mut rules = Rules::default();
    if let Some(mode) = label(&metadata.labels, LABEL_MODE) {
        match mode {
            "ambient" => rules.captured = Some(true),
            "none" => rules.captured = Some(false),
            other => findings.note(
                format!("metadata.labels[\"{LABEL_MODE}\"]"),
                format!("{other:?} has no effect; expected ambient or none"),
            ),
        }
    }
    let mut asked = Asked {
        annotations: &metadata.annotations,
        tunnels,
        findings,
    };
    asked.all(&mut rules);
    rules
}

/// Reads annotations.
struct Asked<'a> {
    annotations: &'a BTreeMap<String, String>,
    /// Whether they may name [`HBONE`], which is otherwise the mesh's.
    tunnels: bool,
    findings: &'a mut Findings,
}

impl Asked<'_> {
    fn all(&mut self, rules: &mut Rules) {
        let port: fn(&str) -> Result<u16, String> =
            if self.tunnels { port_or_tunnel } else { port };
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
                } else if let Some(ranges) = self.whole(&name, &items, range) {
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
            if items == ["*"] {
                rules.inbound_others = Some(true);
            } else if let Some(ports) = self.whole(&name, &items, port) {
                rules.inbound_others = Some(false);
                let ports = ports.into_iter().map(|port| (port, true));
                rules.inbound_ports.extend(ports);
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
                    let text = format!(
                        "too many interfaces, of which the first {VIRTUAL_INTERFACES} count; expected at most as many"
                    );
                    self.note(&name, text);
                    break;
                }
                rules.virtual_interfaces.insert(interface);
            }
        }
        let modes = [
            ("auto", Mode::Auto),
            ("proxy", Mode::Proxy),
            ("kernel", Mode::Kernel),
        ];
        rules.mode = self.word("mode", &modes, None);
        let by = [
            ("sockets", CapturedBy::Sockets),
            ("packets", CapturedBy::Packets),
        ];
        rules.captured_by = self.word("captured-by", &by, None);
        let policies = [("allow", Egress::Allow), ("deny", Egress::Deny)];
        rules.egress = self.word("egress", &policies, Some("deny"));
        let without = [
            ("refuse", WithoutProxy::Refuse),
            ("pass", WithoutProxy::Pass),
        ];
        rules.without_proxy = self.word("without-proxy", &without, Some("refuse"));
        rules.dns = self.truth(DNS_CAPTURE);
    }

    /// Returns the value of a boolean annotation of Istio's.
    fn truth(&mut self, name: &str) -> Option<bool> {
        let said = self.annotations.get(name)?;
        let found = truth(said);
        if found.is_none() {
            let text = format!("{said:?} has no effect; expected true or false");
            self.note(name, text);
        }
        found
    }

    /// Returns a list with commas. `None` if the annotation is missing.
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
                Err(text) => self.note(name, format!("{text}; it is left out")),
            }
        }
        found
    }

    /// Parses a list of everything that is captured. If an element is invalid, the list is incomplete, so the whole
    /// list has no effect.
    fn whole<T>(
        &mut self,
        name: &str,
        items: &[String],
        read: fn(&str) -> Result<T, String>,
    ) -> Option<Vec<T>> {
        let found: Result<Vec<T>, String> = items.iter().map(|item| read(item)).collect();
        found
            .map_err(|text| self.note(name, format!("{text}; the annotation has no effect")))
            .ok()
    }

    /// Reads one of several words in an annotation of this project. `else_`: the word that any other value counts as.
    fn word<T: Copy>(&mut self, name: &str, words: &[(&str, T)], else_: Option<&str>) -> Option<T> {
        let name = format!("{OURS}{name}");
        let said = self.annotations.get(&name)?;
        let named = |said: &str| words.iter().find(|(word, _)| *word == said);
        let found = named(said).or_else(|| {
            let words: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
            let effect = else_.map_or_else(
                || "has no effect".to_owned(),
                |word| format!("counts as {word}"),
            );
            let text = format!("{said:?} {effect}; expected {}", words.join(" or "));
            self.note(&name, text);
            named(else_?)
        });
        found.map(|(_, value)| *value)
    }

    fn note(&mut self, name: &str, text: String) {
        self.findings
            .note(format!("metadata.annotations[\"{name}\"]"), text);
    }
}

/// Parses a boolean as Go does (`strconv.ParseBool`), because Istio reads its annotations this way.
fn truth(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Some(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Some(false),
        _ => None,
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
    match port_or_tunnel(text)? {
        HBONE => Err(reserved(HBONE)),
        port => Ok(port),
    }
}

fn port_or_tunnel(text: &str) -> Result<u16, String> {
    let port = text
        .parse()
        .ok()
        .filter(|&port| port != 0)
        .ok_or_else(|| format!("{text:?} is not a port; expected a number from 1 to 65535"))?;
    if is_reserved(port) && port != HBONE {
        return Err(reserved(port));
    }
    Ok(port)
}

fn reserved(port: u16) -> String {
    format!("{port} is reserved for the mesh's proxies; expected another port")
}
