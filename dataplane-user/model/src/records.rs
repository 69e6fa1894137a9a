//! DNS records of a service. A name does not depend on the proxy that serves the service.

use std::{net::IpAddr, sync::Arc};

use smallvec::SmallVec;

use super::Protocol;

/// Where the name of a service leads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Records {
    /// To the cluster IPs that are served. The source knows nothing more, or the service has no name.
    #[default]
    ClusterIps,
    /// To the addresses and ports in a Service and its EndpointSlices.
    Object(Box<Named>),
    /// To another name (`spec.externalName`), without a dot at its end.
    Alias(Box<str>),
}

/// The names that a Service and its EndpointSlices have in DNS, also if another proxy serves the service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Named {
    /// Whether the service is headless: its name leads to its endpoints.
    pub headless: bool,
    /// Whether another proxy serves it, so that the service has no VIPs and no ports here.
    pub elsewhere: bool,
    /// `spec.clusterIPs`.
    pub cluster_ips: SmallVec<[IpAddr; 1]>,
    /// `spec.ports`.
    pub ports: Box<[PublishedPort]>,
    /// The ready endpoints of all slices: sorted by address, without duplicates. Two endpoints may have one address: pods of
    /// the host's network.
    pub endpoints: Box<[Published]>,
}

/// A ready endpoint of a service.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Published {
    /// Its address.
    pub addr: IpAddr,
    /// `hostname`, in lower case; empty if it has none.
    pub hostname: Box<str>,
    /// Its ports; shared by the endpoints of one slice.
    pub ports: Arc<[PublishedPort]>,
}

/// A port that has a name in DNS.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PublishedPort {
    /// Its name; empty if it has none.
    pub name: Box<str>,
    /// Its protocol.
    pub protocol: NamedProtocol,
    /// Its number.
    pub number: u16,
}

/// A protocol that names of ports have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NamedProtocol {
    /// `_tcp`
    Tcp,
    /// `_udp`
    Udp,
    /// `_sctp`, which is not served.
    Sctp,
}

impl From<Protocol> for NamedProtocol {
    fn from(protocol: Protocol) -> Self {
        match protocol {
            Protocol::Tcp => Self::Tcp,
            Protocol::Udp => Self::Udp,
        }
    }
}

impl NamedProtocol {
    /// The protocol for which services are served; none: they are not.
    pub const fn served(self) -> Option<Protocol> {
        match self {
            Self::Tcp => Some(Protocol::Tcp),
            Self::Udp => Some(Protocol::Udp),
            Self::Sctp => None,
        }
    }
}

impl Published {
    /// The label by which the endpoint is known below its service: its hostname, or its address with dashes.
    pub fn label(&self) -> String {
        if !self.hostname.is_empty() {
            return self.hostname.to_string();
        }
        match self.addr {
            IpAddr::V4(v4) => v4.to_string().replace('.', "-"),
            // As CoreDNS has it: a label does not end with a dash.
            IpAddr::V6(v6) => {
                let text = v6.to_string().replace(':', "-");
                let end = if text.ends_with('-') { "0" } else { "" };
                text + end
            }
        }
    }
}

impl Records {
    /// The endpoints that have names.
    pub fn published(&self) -> &[Published] {
        match self {
            Self::Object(named) => &named.endpoints,
            Self::ClusterIps | Self::Alias(_) => &[],
        }
    }

    /// Whether the name of the service leads to its endpoints.
    pub fn is_headless(&self) -> bool {
        matches!(self, Self::Object(named) if named.headless)
    }

    /// Whether another proxy serves the service.
    pub fn is_elsewhere(&self) -> bool {
        matches!(self, Self::Object(named) if named.elsewhere)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_without_hostname_has_its_address_for_a_label() {
        for (addr, hostname, label) in [
            ("10.244.1.8", "", "10-244-1-8"),
            ("10.244.1.8", "web-0", "web-0"),
            ("fd00::8", "", "fd00--8"),
            ("fd00:10:244:1::", "", "fd00-10-244-1--0"),
            ("1:2:3:4:5:6:7:8", "", "1-2-3-4-5-6-7-8"),
        ] {
            let published = Published {
                addr: addr.parse().unwrap(),
                hostname: hostname.into(),
                ports: [].into(),
            };
            assert_eq!(published.label(), label);
        }
    }
}
