//! The connections that rules capture, and the reasons why rules cannot become a configuration.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
};

use ipnet::IpNet;

/// The connections that a sidecar's rules capture.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capture {
    /// The owner of the rules.
    pub owner: &'static str,
    /// The proxy's port for outbound connections.
    pub outbound: u16,
    /// The proxy's port for inbound connections.
    pub inbound: u16,
    /// The only ranges to which outbound connections are captured; if empty, all.
    pub include_ranges: BTreeSet<IpNet>,
    /// Ranges to which no outbound connection is captured.
    pub exclude_ranges: BTreeSet<IpNet>,
    /// Ports to which outbound connections are captured at every address.
    pub include_ports: BTreeSet<u16>,
    /// Ports to which no outbound connection is captured.
    pub exclude_ports: BTreeSet<u16>,
    /// Whether inbound connections are captured.
    pub takes_inbound: bool,
    /// Whether the rules capture inbound connections by TPROXY.
    pub by_tproxy: bool,
    /// The only ports to which inbound connections are captured; if empty, all.
    pub include_inbound: BTreeSet<u16>,
    /// Ports to which no inbound connection is captured.
    pub exclude_inbound: BTreeSet<u16>,
    /// Interfaces at which no inbound connection is captured.
    pub exclude_interfaces: BTreeSet<String>,
    /// Interfaces whose incoming connections are captured as outbound ones.
    pub virtual_interfaces: BTreeSet<String>,
    /// Interfaces at which no outbound connection is captured. The key is the interface's name and whether the rule is
    /// for IPv4; the value is the place and the text of the rule.
    pub at_interfaces: BTreeMap<(String, bool), (String, String)>,
    /// Interfaces whose routes gave excluded ranges: outbound connections through these interfaces are not captured.
    pub reached_by: BTreeSet<String>,
    /// If this or `include_gids` is not empty, only connections of these users and groups are captured.
    pub include_uids: BTreeSet<u32>,
    /// See `include_uids`.
    pub include_gids: BTreeSet<u32>,
    /// Users whose connections are not captured.
    pub uids: BTreeSet<u32>,
    /// Groups whose connections are not captured.
    pub gids: BTreeSet<u32>,
    /// The capture of DNS queries; `None` if queries are not captured.
    pub dns: Option<Dns>,
    /// The resolvers to which queries are captured, if queries to other addresses are not.
    pub resolvers: BTreeSet<IpAddr>,
    /// Ports of the sidecar itself, which the rules exclude.
    pub own_ports: BTreeSet<u16>,
    /// Sources of the kubelet's probes, which ambient mode does not capture.
    pub probes: BTreeSet<IpAddr>,
    /// Whether the rules drop packets that conntrack calls invalid.
    pub drops_invalid: bool,
    /// The family that has no rules, if one of them has none.
    pub missing: Option<&'static str>,
}

/// The capture of DNS queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dns {
    /// The port of the DNS server that gets the queries.
    pub port: u16,
    /// Whether queries to any address are captured. If false, only queries to the pod's resolvers are captured.
    pub any: bool,
}

/// A reason why rules cannot become a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The text's origin, with the line's number if one line is at fault.
    pub place: String,
    /// The fault.
    pub what: String,
    /// The line.
    pub text: String,
}

impl Capture {
    /// Returns true if the rules capture any connection.
    pub fn captures_something(&self) -> bool {
        let is_all = |net: &&IpNet| net.prefix_len() == 0;
        self.takes_inbound
            || self.dns.is_some()
            || !self.include_ranges.is_empty()
            || !self.include_ports.is_empty()
            || self.exclude_ranges.iter().filter(is_all).count() < 2
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.what)?;
        match &*self.text {
            "" => Ok(()),
            text => write!(f, ": {text}"),
        }
    }
}
