//! Rules of capture, and the policy that results from them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use clap::ValueEnum;
use ipnet::IpNet;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::authorization::PlainClients;

/// The port of resolvers.
pub const DNS: u16 = 53;

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

    /// Whether connections go to the proxy; `foreign`: whether that proxy is not the agent's own.
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

/// The inbound connections of a workload that are captured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Inbound {
    /// Connections to ports that are listed as captured.
    #[default]
    Listed,
    /// All connections except to ports that are listed as not captured.
    All,
    /// None.
    None,
}

/// The capture rules of one level: the configuration, a Namespace or a workload. A less specific level supplies each setting that
/// these rules leave out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// Whether connections are captured at all.
    pub captured: Option<bool>,
    /// By what.
    pub captured_by: Option<CapturedBy>,
    /// Whether annotations may say by what. Only the configuration says so.
    pub allow_packets: Option<bool>,
    /// Whether the proxy or the kernel carries connections.
    pub mode: Option<Mode>,
    /// Unknown destinations.
    pub egress: Option<Egress>,
    /// While the proxy does not listen.
    pub without_proxy: Option<WithoutProxy>,
    /// Whether DNS queries are captured, where others' are.
    pub dns: Option<bool>,
    /// Whether inbound connections are captured.
    pub inbound: Option<bool>,
    /// Outbound destination ranges: whether they are captured. A list of included ranges becomes the range 0.0.0.0/0 or
    /// ::/0 with `false`, and the ranges of the list with `true`.
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
    /// Returns these rules, completed by less specific ones. Where both have a value for a range, port or setting,
    /// these win; users, groups and interfaces are excluded, users and groups included, and interfaces virtual, if
    /// either has them so.
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

    /// Returns the resulting policy; `None` if nothing is captured.
    pub fn policy(&self) -> Option<Policy> {
        self.captured.unwrap_or_default().then(|| Policy {
            captured_by: self.captured_by.unwrap_or_default(),
            mode: self.mode.unwrap_or_default(),
            egress: self.egress.unwrap_or_default(),
            without_proxy: self.without_proxy.unwrap_or_default(),
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
            refused: None,
            plain_clients: None,
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

/// The inbound connections that are refused in the kernel, because nothing on the node enforces Istio's policies about them.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RefusedInbound {
    /// Ports: whether they are refused.
    pub ports: BTreeMap<u16, bool>,
    /// Whether all other ports are.
    pub others: bool,
}

impl RefusedInbound {
    /// Returns whether a port is refused.
    pub fn is_any(&self) -> bool {
        self.others || self.ports.values().any(|is_refused| *is_refused)
    }
}

/// The rules of labels and annotations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layers {
    /// The rules of the workload.
    pub own: Rules,
    /// The rules of the workload's Namespace.
    pub namespace: Rules,
}

impl Layers {
    /// Both in one.
    #[must_use]
    pub fn merged(&self) -> Rules {
        self.own.over(&self.namespace)
    }
}

/// The rules by which a workload's connections are captured: the rules for all workloads, for its
/// namespace and for the workload itself, merged.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Policy {
    /// By what connections are captured.
    pub captured_by: CapturedBy,
    /// Whether the proxy or the kernel carries connections.
    pub mode: Mode,
    /// Unknown destinations.
    pub egress: Egress,
    /// While the proxy does not listen.
    pub without_proxy: WithoutProxy,
    /// Whether DNS queries are left alone.
    pub without_dns: bool,
    /// Whether DNS queries are captured and connections are not.
    pub only_queries: bool,
    /// Outbound destination ranges: whether they are captured. The longest prefix decides; an address in none of them
    /// is captured.
    pub outbound_ranges: BTreeMap<IpNet, bool>,
    /// Outbound destination ports: whether they are captured, wherever they are. Decide before
    /// ranges.
    pub outbound_ports: BTreeMap<u16, bool>,
    /// Ranges that are not captured, but that the egress policy still judges.
    pub judged_ranges: BTreeSet<IpNet>,
    /// Ports of that kind.
    pub judged_ports: BTreeSet<u16>,
    /// Inbound ports: whether they are captured.
    pub inbound_ports: BTreeMap<u16, bool>,
    /// The inbound connections that are captured.
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
    /// The inbound connections that `mesh.unsupported: deny` refuses. `None`: it does not hold for the workload.
    pub refused: Option<Box<RefusedInbound>>,
    /// The clients that Istio's policies allow, of a workload whose policies the kernel enforces. `None`: all, or the kernel does
    /// not enforce them.
    pub plain_clients: Option<Arc<PlainClients>>,
}

impl Policy {
    /// Returns the destinations of a family at which connections are captured that come in by virtual interfaces: the
    /// included ranges and those that only the egress policy judges, or the range of all addresses.
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
    use super::*;

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
}
