//! What DNS says of a service besides its cluster IPs.

use std::{net::IpAddr, sync::Arc};

use super::Protocol;

/// Where the name of a service leads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Records {
    /// To its cluster IPs.
    #[default]
    ClusterIps,
    /// To its endpoints, because it is headless.
    Endpoints {
        /// `spec.publishNotReadyAddresses`: whether endpoints that are not ready have names, too.
        not_ready: bool,
        /// Sorted by address, without duplicates.
        endpoints: Box<[Published]>,
    },
    /// To another name (`spec.externalName`), without a dot at its end.
    Alias(Box<str>),
}

/// An endpoint of a headless service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// Its address.
    pub addr: IpAddr,
    /// `hostname`, in lower case; empty if it has none.
    pub hostname: Box<str>,
    /// Whether it is ready.
    pub ready: bool,
    /// Its ports; shared by the endpoints of one slice.
    pub ports: Arc<[PublishedPort]>,
}

/// A port of an endpoint: name, protocol, number.
pub type PublishedPort = (Box<str>, Protocol, u16);

impl Published {
    /// The label by which the endpoint is known below its service: its hostname, or its address with dashes.
    pub fn label(&self) -> String {
        if !self.hostname.is_empty() {
            return self.hostname.to_string();
        }
        match self.addr {
            IpAddr::V4(v4) => v4.to_string().replace('.', "-"),
            // Whole groups: `::` would leave a dash at an end of the label.
            IpAddr::V6(v6) => v6.segments().map(|group| format!("{group:x}")).join("-"),
        }
    }
}

impl Records {
    /// The endpoints that have names; none unless the service is headless.
    pub fn published(&self) -> impl Iterator<Item = &Published> {
        let (not_ready, endpoints) = match self {
            Self::Endpoints {
                not_ready,
                endpoints,
            } => (*not_ready, &**endpoints),
            Self::ClusterIps | Self::Alias(_) => (false, &[][..]),
        };
        endpoints.iter().filter(move |e| e.ready || not_ready)
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
            ("fd00::8", "", "fd00-0-0-0-0-0-0-8"),
            ("::1", "", "0-0-0-0-0-0-0-1"),
        ] {
            let published = Published {
                addr: addr.parse().unwrap(),
                hostname: hostname.into(),
                ready: true,
                ports: [].into(),
            };
            assert_eq!(published.label(), label);
        }
    }
}
