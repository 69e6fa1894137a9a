//! What rules capture, and why they do not become a configuration.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
};

use ipnet::IpNet;

/// What a sidecar's rules capture.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capture {
    /// Whose rules they are.
    pub owner: &'static str,
    /// The proxy's port for outbound connections.
    pub outbound: u16,
    /// The proxy's port for inbound connections.
    pub inbound: u16,
    /// The only ranges to which outbound connections are captured; none: all.
    pub include_ranges: BTreeSet<IpNet>,
    /// Ranges to which no outbound connection is captured.
    pub exclude_ranges: BTreeSet<IpNet>,
    /// Ports to which outbound connections are captured at every address.
    pub include_ports: BTreeSet<u16>,
    /// Ports to which no outbound connection is captured.
    pub exclude_ports: BTreeSet<u16>,
    /// Whether inbound connections are captured.
    pub takes_inbound: bool,
    /// Whether the rules capture them by TPROXY.
    pub by_tproxy: bool,
    /// The only ports to which inbound connections are captured; none: all.
    pub include_inbound: BTreeSet<u16>,
    /// Ports to which no inbound connection is captured.
    pub exclude_inbound: BTreeSet<u16>,
    /// Interfaces at which no inbound connection is captured.
    pub exclude_interfaces: BTreeSet<String>,
    /// Interfaces by which connections come in that are captured as outbound ones.
    pub virtual_interfaces: BTreeSet<String>,
    /// Interfaces at which no outbound connection is captured, and whether of IPv4, with the place and the text of the rule.
    pub at_interfaces: BTreeMap<(String, bool), (String, String)>,
    /// Interfaces of which the excluded ranges say it.
    pub reached_by: BTreeSet<String>,
    /// The only users whose connections are captured, besides the groups; of neither any: all.
    pub include_uids: BTreeSet<u32>,
    /// The only groups.
    pub include_gids: BTreeSet<u32>,
    /// Users whose connections are not captured.
    pub uids: BTreeSet<u32>,
    /// Groups whose connections are not captured.
    pub gids: BTreeSet<u32>,
    /// How DNS queries are captured, if they are.
    pub dns: Option<Dns>,
    /// The resolvers to which queries are captured, if not to any address.
    pub resolvers: BTreeSet<IpAddr>,
    /// Ports of the sidecar itself that the rules leave alone.
    pub own_ports: BTreeSet<u16>,
    /// Sources of probes, which ambient mode does not capture.
    pub probes: BTreeSet<IpAddr>,
    /// Whether the rules drop packets that conntrack calls invalid.
    pub drops_invalid: bool,
    /// The family that has no rules, if one has none.
    pub missing: Option<&'static str>,
}

/// How DNS queries are captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dns {
    /// The port of the server that answers.
    pub port: u16,
    /// Whether queries to any address are captured, and not only those to the pod's resolvers.
    pub any: bool,
}

/// Why rules do not become a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The text's origin, with the line's number if the fault is that of a line.
    pub place: String,
    /// The fault.
    pub what: String,
    /// The line.
    pub text: String,
}

impl Capture {
    /// Whether the rules capture anything.
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
