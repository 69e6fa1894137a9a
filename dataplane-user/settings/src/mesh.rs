//! Mesh capture.

use std::{net::IpAddr, path::PathBuf};

use dataplane_common::capture::FROM_CLIENT;
use ipnet::IpNet;
use model::{
    CapturedBy, Egress, Mode, Reachable, Rules, VIRTUAL_INTERFACES, WithoutProxy, is_reserved,
    is_virtual_interface,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    MeshIdentity, MeshProbes, MeshProxy, Range, WithoutWaypoint, identity::faults_without_identity,
    is_default,
};

/// The workloads whose TCP connections go to a proxy, and their rules.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Mesh {
    /// The proxy.
    #[serde(skip_serializing_if = "is_default")]
    pub proxy: MeshProxy,
    /// The kubelet's probes.
    #[serde(skip_serializing_if = "is_default")]
    pub probes: MeshProbes,
    /// The certificates of workloads, with which connections between them are encrypted. Default: connections are not
    /// encrypted.
    #[serde(skip_serializing_if = "is_default")]
    pub identity: Option<MeshIdentity>,
    /// The way of a connection between two captured workloads of this node whose identities are known. Needs `identity`. Default:
    /// tunnel.
    #[serde(skip_serializing_if = "is_default")]
    pub same_node: Option<SameNode>,
    /// The proxy's treatment of connections whose waypoint cannot be used. Needs `identity`. Default: refuse.
    #[serde(skip_serializing_if = "is_default")]
    pub without_waypoint: Option<WithoutWaypoint>,
    /// Whether connections are refused in network namespaces that the agent does not know.
    /// Default: false.
    #[serde(skip_serializing_if = "is_default")]
    pub guard: bool,
    /// The key of a taint that the agent removes from its Node as soon as it has captured the node's workloads for the first
    /// time. The agent then needs the permission to patch nodes. Default: none.
    #[serde(skip_serializing_if = "is_default")]
    pub startup_taint: Option<String>,
    /// The effect on TCP connections of captured workloads that a waypoint, AuthorizationPolicy or PeerAuthentication of
    /// Istio's limits and that nothing on the node judges. The agent's proxy enforces the policies of workloads in the mode
    /// proxy. Default: warn.
    #[serde(skip_serializing_if = "is_default")]
    pub unsupported: Option<Unsupported>,
    /// The namespace whose AuthorizationPolicies and PeerAuthentications hold in all namespaces, as in Istio's
    /// `meshConfig.rootNamespace`. Default: istio-system.
    #[serde(skip_serializing_if = "is_default")]
    pub root_namespace: Option<String>,
    /// The namespaces whose pods are never captured, whatever labels and rules say. Default: kube-system.
    #[serde(skip_serializing_if = "is_default")]
    pub exclude_namespaces: Option<Vec<String>>,
    /// Whether the agent writes on captured Pods, for Istio's control plane, that they are: the annotation
    /// `ambient.istio.io/redirection`. false withdraws what an earlier agent wrote. Default: writes and reads nothing.
    #[serde(skip_serializing_if = "is_default")]
    pub announce: Option<bool>,
    /// Rules for all workloads.
    #[serde(skip_serializing_if = "is_default")]
    pub rules: MeshRules,
    /// Rules for all workloads that win over labels and annotations.
    #[serde(skip_serializing_if = "is_default")]
    pub enforced: MeshRules,
    /// Ranges that workloads with `egress: deny` may reach, besides Services whose endpoints are Pods.
    #[serde(skip_serializing_if = "is_default")]
    pub reachable: Vec<Range>,
    /// DNS servers that these workloads may ask at port 53, besides those that are Services of Pods.
    #[serde(skip_serializing_if = "is_default")]
    pub resolvers: Vec<IpAddr>,
    /// Rules for the pods of a namespace, besides the labels and annotations of the Namespace.
    #[serde(skip_serializing_if = "is_default")]
    pub namespaces: Vec<MeshNamespace>,
    /// Workloads that are not pods, and rules for single pods besides their labels and annotations.
    #[serde(skip_serializing_if = "is_default")]
    pub workloads: Vec<MeshWorkload>,
}

/// The agent's treatment of connections that Istio's objects limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Unsupported {
    /// They pass. `status` and the log name the objects.
    Warn,
    /// They are refused.
    Deny,
}

/// The way of a connection between two captured workloads of this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SameNode {
    /// Through a tunnel, as to another node.
    Tunnel,
    /// Without a tunnel and without TLS: the proxy knows both workloads by their network namespaces. The network's own policies do
    /// not see the connection.
    Attest,
}

/// Rules. The most specific rule wins: a workload's before a namespace's before the rules for all
/// workloads.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct MeshRules {
    /// Whether connections are captured. Default: if the label `istio.io/dataplane-mode: ambient` is
    /// set.
    #[serde(skip_serializing_if = "is_default")]
    pub captured: Option<bool>,
    /// Where outbound connections are captured: at `sockets`, or by `packets` for virtual machines.
    /// Default: sockets.
    #[serde(skip_serializing_if = "is_default")]
    pub captured_by: Option<CapturedBy>,
    /// Whether the annotation `dataplane.io/captured-by` has an effect. Default: false.
    #[serde(skip_serializing_if = "is_default")]
    pub allow_packets: Option<bool>,
    /// Whether a proxy or the kernel carries captured connections. Default: auto.
    #[serde(skip_serializing_if = "is_default")]
    pub mode: Option<Mode>,
    /// Policy for connections to destinations that the sources do not know. Default: allow.
    #[serde(skip_serializing_if = "is_default")]
    pub egress: Option<Egress>,
    /// Policy for captured connections while no proxy listens. Default: refuse.
    #[serde(skip_serializing_if = "is_default")]
    pub without_proxy: Option<WithoutProxy>,
    /// Whether DNS queries are captured, if `dns.capture` says so. Default: true.
    #[serde(skip_serializing_if = "is_default")]
    pub dns: Option<bool>,
    /// Whether inbound connections are captured. Default: true.
    #[serde(skip_serializing_if = "is_default")]
    pub inbound: Option<bool>,
    /// Capture only connections to these ranges. Default: all.
    #[serde(skip_serializing_if = "is_default")]
    #[serde(rename = "includeOutboundIPRanges")]
    pub include_outbound_ip_ranges: Vec<Range>,
    /// Do not capture connections to these ranges. If a destination is in both lists, the longest
    /// prefix decides.
    #[serde(skip_serializing_if = "is_default")]
    #[serde(rename = "excludeOutboundIPRanges")]
    pub exclude_outbound_ip_ranges: Vec<Range>,
    /// Capture connections to these ports at every address.
    #[serde(skip_serializing_if = "is_default")]
    pub include_outbound_ports: Vec<u16>,
    /// Do not capture connections to these ports.
    #[serde(skip_serializing_if = "is_default")]
    pub exclude_outbound_ports: Vec<u16>,
    /// Capture only inbound connections to these ports. Default: all.
    #[serde(skip_serializing_if = "is_default")]
    pub include_inbound_ports: Vec<u16>,
    /// Do not capture inbound connections to these ports.
    #[serde(skip_serializing_if = "is_default")]
    pub exclude_inbound_ports: Vec<u16>,
    /// Capture only outbound connections of processes of these users, and of the groups in `includeGIDs`.
    /// Default: all.
    #[serde(skip_serializing_if = "is_default")]
    #[serde(rename = "includeUIDs")]
    pub include_uids: Vec<u32>,
    /// Capture only outbound connections of processes of these groups, and of the users in `includeUIDs`.
    /// Default: all.
    #[serde(skip_serializing_if = "is_default")]
    #[serde(rename = "includeGIDs")]
    pub include_gids: Vec<u32>,
    /// Do not capture connections of processes of these users.
    #[serde(skip_serializing_if = "is_default")]
    #[serde(rename = "excludeUIDs")]
    pub exclude_uids: Vec<u32>,
    /// Do not capture connections of processes of these groups.
    #[serde(skip_serializing_if = "is_default")]
    #[serde(rename = "excludeGIDs")]
    pub exclude_gids: Vec<u32>,
    /// Do not capture inbound connections at these interfaces of the workload.
    #[serde(skip_serializing_if = "is_default")]
    pub exclude_interfaces: Vec<String>,
    /// Capture connections that come into the workload by these interfaces as outbound ones: those of virtual machines and
    /// containers inside the workload.
    #[serde(skip_serializing_if = "is_default")]
    pub virtual_interfaces: Vec<String>,
}

/// Rules for the pods of a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct MeshNamespace {
    /// The namespace's name.
    pub name: String,
    /// The rules.
    #[serde(skip_serializing_if = "is_default")]
    pub rules: MeshRules,
    /// Rules that win over labels and annotations.
    #[serde(skip_serializing_if = "is_default")]
    pub enforced: MeshRules,
}

/// A single workload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct MeshWorkload {
    /// The workload's name: NAMESPACE/NAME.
    pub name: String,
    /// The workload's addresses: the workload is in the network namespace that has one of them.
    #[serde(skip_serializing_if = "is_default")]
    pub addresses: Vec<IpAddr>,
    /// The workload's cgroup, relative to `kernel.cgroup`, if the workload is in the node's network
    /// namespace. Only outbound connections are captured.
    #[serde(skip_serializing_if = "is_default")]
    pub cgroup: Option<PathBuf>,
    /// The rules.
    #[serde(skip_serializing_if = "is_default")]
    pub rules: MeshRules,
}

impl MeshRules {
    /// Returns the rules in the model's terms.
    pub fn rules(&self) -> Rules {
        let names = |names: &[String]| names.iter().map(|name| name.as_str().into()).collect();
        let mut rules = Rules {
            captured: self.captured,
            captured_by: self.captured_by,
            allow_packets: self.allow_packets,
            mode: self.mode,
            egress: self.egress,
            without_proxy: self.without_proxy,
            dns: self.dns,
            inbound: self.inbound,
            included_uids: self.include_uids.iter().copied().collect(),
            included_gids: self.include_gids.iter().copied().collect(),
            excluded_uids: self.exclude_uids.iter().copied().collect(),
            excluded_gids: self.exclude_gids.iter().copied().collect(),
            excluded_interfaces: names(&self.exclude_interfaces),
            virtual_interfaces: names(&self.virtual_interfaces),
            ..Rules::default()
        };
        let ranges = |ranges: &[Range]| -> Vec<IpNet> {
            ranges.iter().map(|range| range.0.trunc()).collect()
        };
        if !self.include_outbound_ip_ranges.is_empty() {
            rules.include_ranges(ranges(&self.include_outbound_ip_ranges));
        }
        let excluded = ranges(&self.exclude_outbound_ip_ranges);
        rules
            .outbound_ranges
            .extend(excluded.into_iter().map(|range| (range, false)));
        let ports = |ports: &[u16], said| -> Vec<(u16, bool)> {
            ports.iter().map(|port| (*port, said)).collect()
        };
        rules
            .outbound_ports
            .extend(ports(&self.include_outbound_ports, true));
        rules
            .outbound_ports
            .extend(ports(&self.exclude_outbound_ports, false));
        if !self.include_inbound_ports.is_empty() {
            rules.inbound_others = Some(false);
            rules
                .inbound_ports
                .extend(ports(&self.include_inbound_ports, true));
        }
        rules
            .inbound_ports
            .extend(ports(&self.exclude_inbound_ports, false));
        rules
    }

    /// Returns the keys for inbound connections that are set.
    fn inbound_keys(&self) -> impl Iterator<Item = &'static str> {
        let given = [
            ("inbound", self.inbound.is_none()),
            ("includeInboundPorts", self.include_inbound_ports.is_empty()),
            ("excludeInboundPorts", self.exclude_inbound_ports.is_empty()),
            ("excludeInterfaces", self.exclude_interfaces.is_empty()),
        ];
        given
            .into_iter()
            .filter_map(|(key, empty)| (!empty).then_some(key))
    }

    fn faults(&self, at: &str, faults: &mut Vec<(String, String)>) {
        if self.inbound == Some(false) {
            for key in self.inbound_keys().filter(|key| *key != "inbound") {
                let text = "has no effect: inbound is false".to_owned();
                faults.push((format!("{at}.{key}"), text));
            }
        }
        for (key, ports) in [
            ("includeOutboundPorts", &self.include_outbound_ports),
            ("excludeOutboundPorts", &self.exclude_outbound_ports),
            ("includeInboundPorts", &self.include_inbound_ports),
            ("excludeInboundPorts", &self.exclude_inbound_ports),
        ] {
            for port in ports {
                let text = match port {
                    0 => "0; expected a port from 1 to 65535".to_owned(),
                    port if is_reserved(*port) => {
                        format!("{port} is reserved for the mesh's proxies; expected another port")
                    }
                    _ => continue,
                };
                faults.push((format!("{at}.{key}"), text));
            }
        }
        if self.virtual_interfaces.len() > VIRTUAL_INTERFACES {
            let text = format!("too many interfaces; expected at most {VIRTUAL_INTERFACES}");
            faults.push((format!("{at}.virtualInterfaces"), text));
        }
        let wrong = self.virtual_interfaces.iter();
        for name in wrong.filter(|name| !is_virtual_interface(name)) {
            let text = format!(
                "{name:?} cannot be a virtual interface; expected the name of an interface other than lo"
            );
            faults.push((format!("{at}.virtualInterfaces"), text));
        }
    }
}

impl Mesh {
    /// Returns whether a rule has an egress policy that needs the known destinations.
    pub fn denies(&self) -> bool {
        let namespaces = self.namespaces.iter();
        let namespaces = namespaces.flat_map(|namespace| [&namespace.rules, &namespace.enforced]);
        let workloads = self.workloads.iter().map(|workload| &workload.rules);
        let mut all = [&self.rules, &self.enforced]
            .into_iter()
            .chain(namespaces)
            .chain(workloads);
        all.any(|rules| rules.egress == Some(Egress::Deny))
    }

    /// Returns whether connections are refused that Istio's objects limit.
    pub fn denies_unsupported(&self) -> bool {
        self.unsupported == Some(Unsupported::Deny)
    }

    /// Returns the trust domain of the identities of connections that need no tunnel, because both workloads are on this node.
    pub fn attests(&self) -> Option<&str> {
        let identity = self.identity.as_ref()?;
        (self.same_node == Some(SameNode::Attest)).then(|| identity.trust_domain())
    }

    /// Returns the namespace whose policies hold in all namespaces.
    pub fn root_namespace(&self) -> &str {
        self.root_namespace.as_deref().unwrap_or("istio-system")
    }

    /// Returns the namespaces whose pods are never captured.
    pub fn excluded_namespaces(&self) -> Vec<String> {
        let default = || vec!["kube-system".to_owned()];
        self.exclude_namespaces.clone().unwrap_or_else(default)
    }

    /// Returns the destinations, besides Services of Pods, that workloads with `egress: deny` may reach.
    pub fn reachable(&self) -> Reachable {
        let workloads = self.workloads.iter();
        let addresses = workloads.flat_map(|workload| &workload.addresses);
        let ranges = self.reachable.iter().map(|range| range.0.trunc());
        Reachable {
            ranges: ranges.chain(addresses.copied().map(IpNet::from)).collect(),
            resolvers: self.resolvers.clone(),
        }
    }

    /// Returns keys with their faults: values that the types allow and that cannot work.
    pub fn faults(&self) -> Vec<(String, String)> {
        let mut faults = Vec::new();
        self.probes.faults(&mut faults);
        match &self.identity {
            Some(identity) => identity.faults(self.proxy.uid.is_some(), &mut faults),
            None => faults.extend(faults_without_identity(
                self.same_node == Some(SameNode::Attest),
                self.without_waypoint == Some(WithoutWaypoint::Pass),
            )),
        }
        self.rules.faults("mesh.rules", &mut faults);
        self.enforced.faults("mesh.enforced", &mut faults);
        for (index, name) in self.exclude_namespaces.iter().flatten().enumerate() {
            if name.is_empty() {
                let text = "empty; expected a namespace's name, such as kube-system";
                faults.push((format!("mesh.excludeNamespaces[{index}]"), text.into()));
            }
        }
        for (index, namespace) in self.namespaces.iter().enumerate() {
            let at = format!("mesh.namespaces[{index}]");
            if namespace.name.is_empty() {
                faults.push((at.clone(), "without a name".into()));
            }
            namespace.rules.faults(&format!("{at}.rules"), &mut faults);
            let at = format!("{at}.enforced");
            namespace.enforced.faults(&at, &mut faults);
        }
        for (index, workload) in self.workloads.iter().enumerate() {
            let at = format!("mesh.workloads[{index}]");
            let parts: Vec<&str> = workload.name.split('/').collect();
            if parts.len() != 2 || parts.iter().any(|part| part.is_empty()) {
                let name = &workload.name;
                faults.push((
                    format!("{at}.name"),
                    format!("{name:?} is not a workload's name; expected NAMESPACE/NAME"),
                ));
            }
            if workload.cgroup.is_some() && !workload.addresses.is_empty() {
                faults.push((
                    at.clone(),
                    "both addresses and cgroup; expected one of them".into(),
                ));
            }
            if workload.cgroup.is_some() {
                if !workload.rules.virtual_interfaces.is_empty() {
                    faults.push((
                        format!("{at}.rules.virtualInterfaces"),
                        "has no effect: processes in a cgroup have no interfaces of their own"
                            .into(),
                    ));
                }
                for key in workload.rules.inbound_keys() {
                    faults.push((
                        format!("{at}.rules.{key}"),
                        "has no effect: of processes in a cgroup only outbound connections are \
                         captured, because the kernel looks for the socket of an inbound one by its \
                         address, which is the node's"
                            .into(),
                    ));
                }
            }
            workload.rules.faults(&format!("{at}.rules"), &mut faults);
        }
        self.faults_of_proxy(&mut faults);
        if self.startup_taint.as_ref().is_some_and(String::is_empty) {
            let text = "empty; expected a taint's key, such as dataplane.io/not-ready";
            faults.push(("mesh.startupTaint".into(), text.into()));
        }
        if self.root_namespace().is_empty() {
            let text = "empty; expected a namespace's name, such as istio-system";
            faults.push(("mesh.rootNamespace".into(), text.into()));
        }
        if self.denies_unsupported() && self.proxy.uid.is_some() {
            faults.push((
                "mesh.unsupported".into(),
                "deny has no effect: mesh.proxy.uid names another proxy, which may enforce Istio's objects; remove one of the \
                 two keys"
                    .into(),
            ));
        }
        faults
    }

    fn faults_of_proxy(&self, faults: &mut Vec<(String, String)>) {
        if self.mark() == 0 || self.mark() & FROM_CLIENT != 0 {
            faults.push((
                "mesh.proxy.mark".into(),
                "expected a number from 1 to 2147483647".into(),
            ));
        }
        for (key, max) in [
            ("maxConnections", self.proxy.max_connections),
            (
                "maxConnectionsPerWorkload",
                self.proxy.max_connections_per_workload,
            ),
        ] {
            if max == Some(0) {
                let at = format!("mesh.proxy.{key}");
                faults.push((at, "expected a number from 1".into()));
            }
        }
        if self.outbound() == self.inbound() {
            faults.push((
                "mesh.proxy".into(),
                "outbound and inbound are the same port".into(),
            ));
        }
    }

    /// The proxy's port for outbound connections.
    pub fn outbound(&self) -> u16 {
        self.proxy.outbound.unwrap_or(15001)
    }

    /// The proxy's port for inbound connections.
    pub fn inbound(&self) -> u16 {
        self.proxy.inbound.unwrap_or(15006)
    }

    /// The mark of the agent's proxy's sockets.
    pub fn mark(&self) -> u32 {
        self.proxy.mark.unwrap_or(15006)
    }
}
