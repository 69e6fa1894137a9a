//! Workloads: whose connections are captured, and by which rules.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
    path::PathBuf,
    sync::Arc,
};

use clap::ValueEnum;
use ipnet::IpNet;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::{Cluster, Identity, Protocol, Resolution, WorkloadName};

/// Ports that a mesh's proxies have: no rule of a configuration can name them.
pub const RESERVED: [u16; 12] = [
    15000, 15001, 15003, 15006, 15008, 15010, 15020, 15021, 15053, 15901, 15902, 15903,
];

/// The port of resolvers.
pub const DNS: u16 = 53;

/// Whether a port is one that a mesh's proxies have.
pub fn is_reserved(port: u16) -> bool {
    RESERVED.contains(&port)
}

/// The most virtual interfaces that the rules of a workload may name.
pub const VIRTUAL_INTERFACES: usize = 16;

/// Whether an interface may be a virtual one: `lo` has the workload's own connections. Longer names, and such characters, the
/// kernel does not take (`dev_valid_name`, `net/core/dev.c`).
pub fn is_virtual_interface(name: &str) -> bool {
    let is_wrong = |c: char| c == '/' || c == ':' || c.is_whitespace();
    (1..16).contains(&name.len()) && !name.contains(is_wrong) && !matches!(name, "lo" | "." | "..")
}

/// Somebody who makes and takes connections: a pod, or processes of a plain Linux node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Its name.
    pub name: WorkloadName,
    /// Its addresses, at most one of each family; none if it shares the node's.
    pub addresses: SmallVec<[IpAddr; 2]>,
    /// The ports that its containers declare, by which others may connect to it without a service.
    pub ports: Box<[(Protocol, u16)]>,
    /// How the processes are found on this node.
    pub place: Place,
    /// What tells it from others of its name, before and after it; none if the source does not say.
    pub uid: Option<Uid>,
    /// The node that it is on; empty if it is not known.
    pub node: Arc<str>,
    /// The network whose addresses it has (label `topology.istio.io/network`); empty: the cluster's own.
    pub network: Arc<str>,
    /// Its service account; empty if it is not known.
    pub service_account: Arc<str>,
    /// What metrics and logs call it.
    pub telemetry: Telemetry,
    /// How it looks up names; none: as a pod that says nothing of it.
    pub resolution: Option<Box<Resolution>>,
    /// What it and its namespace ask for.
    pub rules: Arc<Layers>,
    /// By which rules its connections are captured; `None`: they are not.
    pub capture: Option<Arc<Policy>>,
}

impl Workload {
    /// A workload of which nothing is known but its name and place.
    pub fn new(name: WorkloadName, place: Place) -> Self {
        let nothing: Arc<str> = "".into();
        Self {
            addresses: SmallVec::new(),
            ports: Box::default(),
            place,
            uid: None,
            node: Arc::clone(&nothing),
            network: Arc::clone(&nothing),
            service_account: nothing,
            telemetry: Telemetry::new(name.name(), None),
            resolution: None,
            rules: Arc::default(),
            capture: None,
            name,
        }
    }

    /// The identity that the workload can prove; none without a service account.
    pub fn identity(&self, cluster: &Cluster) -> Option<Identity> {
        Identity::new(
            Arc::clone(&cluster.trust_domain),
            self.name.namespace().into(),
            Arc::clone(&self.service_account),
        )
        .ok()
    }

    /// Has `share` put an equal text of its own in place of each text that many workloads have.
    pub fn share_texts(&mut self, mut share: impl FnMut(&mut Arc<str>)) {
        let Telemetry {
            workload,
            canonical_service,
            canonical_revision,
            app,
            version,
        } = &mut self.telemetry;
        for text in [
            &mut self.node,
            &mut self.network,
            &mut self.service_account,
            workload,
            canonical_service,
            canonical_revision,
            app,
            version,
        ] {
            share(text);
        }
    }
}

/// A pod's UID (`metadata.uid`): a UUID, as every object of the API has.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Uid([u8; 16]);

impl Uid {
    /// From its usual form, such as `8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b60`; none if the text is something else.
    pub fn parse(text: &str) -> Option<Self> {
        let groups = text.split('-').map(str::len);
        if !groups.eq([8, 4, 4, 4, 12]) {
            return None;
        }
        let mut digits = text.bytes().filter(|byte| *byte != b'-');
        let mut digit = || u8::try_from(char::from(digits.next()?).to_digit(16)?).ok();
        let mut bytes = [0; 16];
        for byte in &mut bytes {
            *byte = digit()? << 4 | digit()?;
        }
        Some(Self(bytes))
    }
}

impl fmt::Display for Uid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, byte) in self.0.iter().enumerate() {
            let dash = if [4, 6, 8, 10].contains(&at) { "-" } else { "" };
            write!(f, "{dash}{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// How a workload's processes are found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the network namespace on this node that has one of its addresses.
    Address,
    /// In this directory of the cgroup v2 hierarchy, relative to the cgroup that the agent serves, and
    /// below it; they are in the node's network namespace.
    Cgroup(PathBuf),
    /// On another node: nothing of it is captured here.
    Elsewhere,
    /// On this node, and never captured, whatever rules say.
    Exempt(Exempt),
}

/// Why a workload is never captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exempt {
    /// It has a mesh's proxy beside it already.
    Sidecar,
    /// It has the node's network namespace.
    HostNetwork,
}

impl Exempt {
    /// For people.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Sidecar => {
                "is not captured: its annotation sidecar.istio.io/status says that it has a proxy of its own"
            }
            Self::HostNetwork => {
                "is not captured: it has the node's network namespace (hostNetwork: true); name its cgroup in mesh.workloads to capture its processes"
            }
        }
    }
}

/// What metrics and access logs call a workload: Istio's names, and its rules to find them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Telemetry {
    /// The Deployment, `StatefulSet`, … that made it (`source_workload`, `destination_workload`);
    /// without one, its own name.
    pub workload: Arc<str>,
    /// Label `service.istio.io/canonical-name`, else `app.kubernetes.io/name`, else `app`, else
    /// [`Telemetry::workload`].
    pub canonical_service: Arc<str>,
    /// Label `service.istio.io/canonical-revision`, else `app.kubernetes.io/version`, else
    /// `version`, else `latest`.
    pub canonical_revision: Arc<str>,
    /// Label `app`; empty if it has none.
    pub app: Arc<str>,
    /// Label `version`; empty if it has none.
    pub version: Arc<str>,
}

impl Telemetry {
    /// From a pod's labels and the name of what made it.
    pub fn new(workload: &str, labels: Option<&BTreeMap<String, String>>) -> Self {
        let first = |keys: &[&str]| {
            keys.iter()
                .find_map(|key| labels?.get(*key))
                .filter(|value| !value.is_empty())
                .map(String::as_str)
        };
        Self {
            workload: workload.into(),
            canonical_service: first(&[
                "service.istio.io/canonical-name",
                "app.kubernetes.io/name",
                "app",
            ])
            .unwrap_or(workload)
            .into(),
            canonical_revision: first(&[
                "service.istio.io/canonical-revision",
                "app.kubernetes.io/version",
                "version",
            ])
            .unwrap_or("latest")
            .into(),
            app: first(&["app"]).unwrap_or_default().into(),
            version: first(&["version"]).unwrap_or_default().into(),
        }
    }
}

/// Policy for connections to destinations that the sources do not know.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
    ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum Egress {
    /// Connect directly.
    #[default]
    Allow,
    /// Refuse with ECONNREFUSED.
    Deny,
}

impl Egress {
    /// As in configurations.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
        }
    }
}

/// Whether a proxy or the kernel carries captured connections.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The kernel, if a proxy would add nothing; otherwise the proxy.
    #[default]
    Auto,
    /// The proxy.
    Proxy,
    /// The kernel: the connection goes directly. The programs decide and count when it is made.
    Kernel,
}

impl Mode {
    /// As in configurations.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Proxy => "proxy",
            Self::Kernel => "kernel",
        }
    }

    /// Whether connections go to the proxy; `foreign`: whether that is another one than the agent's.
    pub const fn is_proxied(self, foreign: bool) -> bool {
        match self {
            Self::Auto => foreign,
            Self::Proxy => true,
            Self::Kernel => false,
        }
    }
}

/// Policy for captured connections while no proxy listens.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum WithoutProxy {
    /// Refuse with `ECONNREFUSED`.
    #[default]
    Refuse,
    /// Connect directly, as if the workload were not captured.
    Pass,
}

impl WithoutProxy {
    /// As in configurations.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Refuse => "refuse",
            Self::Pass => "pass",
        }
    }
}

/// Whether bytes from a workload to its proxy bypass the TCP stack.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
    ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum Acceleration {
    /// Bytes go through the TCP stack.
    #[default]
    Off,
    /// Bytes go from socket to socket, by a sockmap.
    Sockmap,
}

impl Acceleration {
    /// As in configurations.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Sockmap => "sockmap",
        }
    }
}

/// Where a workload's outbound connections are captured.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum CapturedBy {
    /// At the sockets of the workload's processes on this node, when they connect.
    #[default]
    Sockets,
    /// By the packets that the workload sends: for virtual machines.
    Packets,
}

impl CapturedBy {
    /// As in configurations.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Sockets => "sockets",
            Self::Packets => "packets",
        }
    }
}

/// Which inbound connections of a workload are captured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Inbound {
    /// Those to ports that are listed as captured.
    #[default]
    Listed,
    /// All but those to ports that are listed as not captured.
    All,
    /// None.
    None,
}

/// What the configuration, a namespace or a workload says of capture: what it does not say is said
/// by whoever is less specific.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// Whether connections are captured at all.
    pub captured: Option<bool>,
    /// By what.
    pub captured_by: Option<CapturedBy>,
    /// Whether annotations may say by what. Only the configuration says so.
    pub allow_packets: Option<bool>,
    /// Who relays.
    pub mode: Option<Mode>,
    /// Unknown destinations.
    pub egress: Option<Egress>,
    /// While the proxy does not listen.
    pub without_proxy: Option<WithoutProxy>,
    /// Between the workload and the agent's proxy.
    pub acceleration: Option<Acceleration>,
    /// Whether DNS queries are captured, where others' are.
    pub dns: Option<bool>,
    /// Whether inbound connections are captured.
    pub inbound: Option<bool>,
    /// Outbound destination ranges: whether they are captured. A list of what is included is the
    /// range 0.0.0.0/0 or ::/0 that is not, and the ranges of the list that are.
    pub outbound_ranges: BTreeMap<IpNet, bool>,
    /// Outbound destination ports: whether they are captured.
    pub outbound_ports: BTreeMap<u16, bool>,
    /// Inbound ports: whether they are captured.
    pub inbound_ports: BTreeMap<u16, bool>,
    /// Whether inbound ports are captured that are not listed.
    pub inbound_others: Option<bool>,
    /// The only users whose connections are captured, besides the groups; of neither any: all.
    pub included_uids: BTreeSet<u32>,
    /// The only groups.
    pub included_gids: BTreeSet<u32>,
    /// Users whose connections are not captured.
    pub excluded_uids: BTreeSet<u32>,
    /// Groups whose connections are not captured.
    pub excluded_gids: BTreeSet<u32>,
    /// Interfaces by which nothing is captured that comes in.
    pub excluded_interfaces: BTreeSet<Box<str>>,
    /// Interfaces by which connections come in that are captured as outbound ones.
    pub virtual_interfaces: BTreeSet<Box<str>>,
}

impl Rules {
    /// These, and where they say nothing, what is said by less specific ones. Of two that say
    /// something of the same range, port or setting, these win; users, groups and interfaces are
    /// excluded, users and groups included, and interfaces virtual, if either says so.
    #[must_use]
    pub fn over(&self, general: &Self) -> Self {
        fn maps<K: Ord + Clone>(
            specific: &BTreeMap<K, bool>,
            general: &BTreeMap<K, bool>,
        ) -> BTreeMap<K, bool> {
            let mut all = general.clone();
            all.extend(specific.iter().map(|(key, said)| (key.clone(), *said)));
            all
        }
        fn sets<K: Ord + Clone>(a: &BTreeSet<K>, b: &BTreeSet<K>) -> BTreeSet<K> {
            a.union(b).cloned().collect()
        }
        Self {
            captured: self.captured.or(general.captured),
            captured_by: self.captured_by.or(general.captured_by),
            allow_packets: self.allow_packets.or(general.allow_packets),
            mode: self.mode.or(general.mode),
            egress: self.egress.or(general.egress),
            without_proxy: self.without_proxy.or(general.without_proxy),
            acceleration: self.acceleration.or(general.acceleration),
            dns: self.dns.or(general.dns),
            inbound: self.inbound.or(general.inbound),
            outbound_ranges: maps(&self.outbound_ranges, &general.outbound_ranges),
            outbound_ports: maps(&self.outbound_ports, &general.outbound_ports),
            inbound_ports: maps(&self.inbound_ports, &general.inbound_ports),
            inbound_others: self.inbound_others.or(general.inbound_others),
            included_uids: sets(&self.included_uids, &general.included_uids),
            included_gids: sets(&self.included_gids, &general.included_gids),
            excluded_uids: sets(&self.excluded_uids, &general.excluded_uids),
            excluded_gids: sets(&self.excluded_gids, &general.excluded_gids),
            excluded_interfaces: sets(&self.excluded_interfaces, &general.excluded_interfaces),
            virtual_interfaces: sets(&self.virtual_interfaces, &general.virtual_interfaces),
        }
    }

    /// What they come to; `None` if nothing is captured.
    pub fn policy(&self) -> Option<Policy> {
        self.captured.unwrap_or_default().then(|| Policy {
            captured_by: self.captured_by.unwrap_or_default(),
            mode: self.mode.unwrap_or_default(),
            egress: self.egress.unwrap_or_default(),
            without_proxy: self.without_proxy.unwrap_or_default(),
            acceleration: self.acceleration.unwrap_or_default(),
            without_dns: self.dns == Some(false),
            only_queries: false,
            outbound_ranges: self.outbound_ranges.clone(),
            outbound_ports: self.outbound_ports.clone(),
            judged_ranges: BTreeSet::new(),
            judged_ports: BTreeSet::new(),
            inbound_ports: self.inbound_ports.clone(),
            inbound: match (self.inbound, self.inbound_others) {
                (Some(false), _) => Inbound::None,
                (_, Some(false)) => Inbound::Listed,
                _ => Inbound::All,
            },
            included_uids: self.included_uids.clone(),
            included_gids: self.included_gids.clone(),
            excluded_uids: self.excluded_uids.clone(),
            excluded_gids: self.excluded_gids.clone(),
            excluded_interfaces: self.excluded_interfaces.clone(),
            virtual_interfaces: self.virtual_interfaces.clone(),
        })
    }

    /// Returns the policy of a workload of which only the DNS queries are captured; `None` if its rules exclude them.
    pub fn policy_of_queries(&self) -> Option<Policy> {
        (self.dns != Some(false)).then(|| Policy {
            only_queries: true,
            outbound_ranges: self.outbound_ranges.clone(),
            outbound_ports: self.outbound_ports.clone(),
            included_uids: self.included_uids.clone(),
            included_gids: self.included_gids.clone(),
            excluded_uids: self.excluded_uids.clone(),
            excluded_gids: self.excluded_gids.clone(),
            ..Policy::default()
        })
    }

    /// Includes destination ranges only: all others are excluded, unless something more specific
    /// says otherwise.
    pub fn include_ranges(&mut self, ranges: impl IntoIterator<Item = IpNet>) {
        for all in [
            IpNet::V4(ipnet::Ipv4Net::default()),
            IpNet::V6(ipnet::Ipv6Net::default()),
        ] {
            self.outbound_ranges.entry(all).or_insert(false);
        }
        let included = ranges.into_iter().map(|range| (range.trunc(), true));
        self.outbound_ranges.extend(included);
    }
}

/// What labels and annotations ask for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layers {
    /// Those of the workload.
    pub own: Rules,
    /// Those of its Namespace.
    pub namespace: Rules,
}

impl Layers {
    /// Both in one.
    #[must_use]
    pub fn merged(&self) -> Rules {
        self.own.over(&self.namespace)
    }
}

/// By which rules a workload's connections are captured: what the configuration says for all, for
/// its namespace and for it, in one.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Policy {
    /// By what connections are captured.
    pub captured_by: CapturedBy,
    /// Who relays.
    pub mode: Mode,
    /// Unknown destinations.
    pub egress: Egress,
    /// While the proxy does not listen.
    pub without_proxy: WithoutProxy,
    /// Between the workload and the agent's proxy.
    pub acceleration: Acceleration,
    /// Whether DNS queries are left alone.
    pub without_dns: bool,
    /// Whether DNS queries are captured and connections are not.
    pub only_queries: bool,
    /// Outbound destination ranges: whether they are captured. The longest prefix decides; what is
    /// in none is captured.
    pub outbound_ranges: BTreeMap<IpNet, bool>,
    /// Outbound destination ports: whether they are captured, wherever they are. Decide before
    /// ranges.
    pub outbound_ports: BTreeMap<u16, bool>,
    /// Ranges that are not captured, and that the egress policy is about all the same.
    pub judged_ranges: BTreeSet<IpNet>,
    /// Ports of that kind.
    pub judged_ports: BTreeSet<u16>,
    /// Inbound ports: whether they are captured.
    pub inbound_ports: BTreeMap<u16, bool>,
    /// Which inbound connections are captured.
    pub inbound: Inbound,
    /// The only users whose connections are captured, besides the groups; of neither any: all.
    pub included_uids: BTreeSet<u32>,
    /// The only groups.
    pub included_gids: BTreeSet<u32>,
    /// Users whose connections are not captured.
    pub excluded_uids: BTreeSet<u32>,
    /// Groups whose connections are not captured.
    pub excluded_gids: BTreeSet<u32>,
    /// Interfaces of the workload by which nothing is captured that comes in.
    pub excluded_interfaces: BTreeSet<Box<str>>,
    /// Interfaces of the workload by which connections come in that are captured as outbound ones: those of virtual machines
    /// and of containers in the workload's network namespace. Of ranges, those count that are included.
    pub virtual_interfaces: BTreeSet<Box<str>>,
}

impl Policy {
    /// Returns the destinations of a family at which connections are captured that come in by virtual interfaces: the included
    /// ranges and those that the egress policy is about all the same, or the range of all addresses.
    pub fn ranges_of_interfaces(&self, v4: bool) -> Vec<IpNet> {
        let all = if v4 {
            IpNet::V4(ipnet::Ipv4Net::default())
        } else {
            IpNet::V6(ipnet::Ipv6Net::default())
        };
        let comes_here = |range| {
            let is_captured = self.outbound_ranges.get(range);
            is_captured != Some(&false) || self.judged_ranges.contains(range)
        };
        if comes_here(&all) {
            return vec![all];
        }
        let ranges = self.outbound_ranges.keys();
        let of_family = ranges.filter(|range| range.addr().is_ipv4() == v4);
        of_family
            .filter(|range| comes_here(range))
            .copied()
            .collect()
    }

    /// Whether queries to a resolver are captured. Users decide when a query is sent.
    pub fn captures_dns(&self, resolver: IpAddr) -> bool {
        let port = self.outbound_ports.get(&DNS);
        let ranges = self.outbound_ranges.iter();
        let containing = ranges.filter(|(range, _)| range.contains(&resolver));
        let range = containing.max_by_key(|(range, _)| range.prefix_len());
        let of_range = range.is_none_or(|(_, is_captured)| *is_captured);
        !self.without_dns && port.copied().unwrap_or(of_range)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_a_uuid_is_a_uid() {
        for text in [
            "",
            "8e3b0c9a6b0f4f619d1c2f5d3c8a7b60",
            "8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b6",
            "8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b600",
            "8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b6-",
            "8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b6g",
            "8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7bé",
        ] {
            assert_eq!(Uid::parse(text), None, "{text}");
        }
    }

    #[test]
    fn queries_are_captured_but_for_what_is_excluded() {
        let captures = |edit: &dyn Fn(&mut Rules)| {
            let mut rules = Rules {
                captured: Some(true),
                ..Rules::default()
            };
            edit(&mut rules);
            let policy = rules.policy().unwrap();
            policy.captures_dns([10, 96, 0, 10].into())
        };
        let range = |text: &str| text.parse::<IpNet>().unwrap();
        assert!(captures(&|_| {}));
        assert!(!captures(&|rules| rules.dns = Some(false)));
        assert!(!captures(
            &|rules| _ = rules.outbound_ports.insert(53, false)
        ));
        assert!(captures(&|rules| _ = rules.outbound_ports.insert(54, false)));
        let excludes =
            |rules: &mut Rules| _ = rules.outbound_ranges.insert(range("10.96.0.0/12"), false);
        assert!(!captures(&excludes));
        assert!(captures(&|rules| {
            excludes(rules);
            rules.outbound_ranges.insert(range("10.96.0.10/32"), true);
        }));
        assert!(captures(&|rules| {
            excludes(rules);
            rules.outbound_ports.insert(53, true);
        }));
    }

    proptest! {
        #[test]
        fn a_uid_is_displayed_as_it_was_written(text in "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}") {
            prop_assert_eq!(Uid::parse(&text).map(|uid| uid.to_string()), Some(text));
        }
    }
}
