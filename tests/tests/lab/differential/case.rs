//! The cases, and their results.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, SocketAddr},
};

use dataplane_tests::report::Report;

use crate::manifest::Service;

/// A service of the scenarios: the Nth has addresses that end in N.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Numbered {
    pub name: &'static str,
    pub number: u8,
}

/// The addresses of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum At {
    /// Its cluster IP.
    ClusterIp,
    /// Its port on node1's primary address.
    NodePort,
    /// Its load balancer's.
    LoadBalancer,
    /// Its external IP.
    ExternalIp,
    /// Its node port on loopback.
    Loopback,
}

impl At {
    /// All that others than the node itself can reach.
    pub const ALL: [Self; 4] = [
        Self::ClusterIp,
        Self::NodePort,
        Self::LoadBalancer,
        Self::ExternalIp,
    ];
}

impl Numbered {
    /// Returns the service, with a TCP and a UDP port, at every kind of address.
    pub fn service(self) -> Service {
        let n = self.number;
        let node_port = 30_000 + u16::from(n);
        Service::new(
            self.name,
            &[&format!("10.96.0.{n}"), &format!("fd00:10:96::{n}")],
        )
        .node_port("tcp", 80, crate::cluster::TCP, node_port)
        .node_port("udp", 80, crate::cluster::UDP, node_port)
        .load_balancer(&format!("203.0.113.{n}"))
        .load_balancer(&format!("2001:db8:113::{n}"))
        .set(
            "externalIPs",
            vec![format!("198.51.100.{n}"), format!("2001:db8:100::{n}")],
        )
    }

    /// Returns one of its addresses.
    pub fn at(self, at: At, v4: bool) -> SocketAddr {
        let n = self.number;
        let node_port = 30_000 + u16::from(n);
        let text = match (at, v4) {
            (At::ClusterIp, true) => format!("10.96.0.{n}:80"),
            (At::ClusterIp, false) => format!("[fd00:10:96::{n}]:80"),
            (At::LoadBalancer, true) => format!("203.0.113.{n}:80"),
            (At::LoadBalancer, false) => format!("[2001:db8:113::{n}]:80"),
            (At::ExternalIp, true) => format!("198.51.100.{n}:80"),
            (At::ExternalIp, false) => format!("[2001:db8:100::{n}]:80"),
            (At::NodePort, true) => format!("192.168.77.1:{node_port}"),
            (At::NodePort, false) => format!("[fd77::1]:{node_port}"),
            (At::Loopback, true) => format!("127.0.0.1:{node_port}"),
            (At::Loopback, false) => format!("[::1]:{node_port}"),
        };
        text.parse().expect("an address and a port")
    }
}

/// A client that tries an address.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Case {
    /// The client.
    pub client: String,
    /// The destination, in words.
    pub what: String,
    /// The service and the kind of its address, if it is one.
    pub service: Option<(Numbered, At)>,
    /// Where to.
    pub to: SocketAddr,
    /// By UDP.
    pub udp: bool,
    /// From which port.
    pub from_port: Option<u16>,
}

impl Case {
    /// Every client with every service at every address, in both families and protocols.
    pub fn all(clients: &[&str], services: &[Numbered], ats: &[At]) -> Vec<Self> {
        let mut cases = vec![];
        for client in clients {
            for service in services {
                for at in ats {
                    for (v4, udp) in [(true, false), (true, true), (false, false), (false, true)] {
                        cases.push(Self {
                            client: (*client).into(),
                            what: format!("{} {at:?}", service.name),
                            service: Some((*service, *at)),
                            to: service.at(*at, v4),
                            udp,
                            from_port: None,
                        });
                    }
                }
            }
        }
        cases
    }

    /// Returns the cases of a client with an address that does not belong to a service, by TCP and by UDP.
    pub fn other(client: &str, what: &str, to: &str) -> [Self; 2] {
        [false, true].map(|udp| Self {
            client: client.into(),
            what: what.into(),
            service: None,
            to: to.parse().expect("an address and a port"),
            udp,
            from_port: None,
        })
    }

    /// Whether the destination is this kind of address of a service.
    pub fn is_at(&self, at: At) -> bool {
        self.service.is_some_and(|(_, of)| of == at)
    }

    /// Whether the client's sockets are seen by node1's programs.
    pub fn at_socket(&self) -> bool {
        ["pod", "node1", "e1", "e2"].contains(&self.client.as_str())
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let protocol = if self.udp { "udp" } else { "tcp" };
        let (client, what, to) = (&self.client, &self.what, self.to);
        write!(f, "{client} to {what} {to}/{protocol}")?;
        match self.from_port {
            Some(port) => write!(f, " from port {port}"),
            None => Ok(()),
        }
    }
}

/// The results of a case.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    /// The endpoints that answered, and the client addresses that each endpoint saw.
    pub answers: BTreeMap<String, BTreeSet<IpAddr>>,
    /// Whether each endpoint saw the client's own port most of the time. (A random port may be the client's by chance.)
    pub own_port: BTreeMap<String, bool>,
    /// How others failed: `refused`, `timeout`, or an error's name.
    pub failures: BTreeSet<String>,
}

impl Seen {
    /// From a report with every attempt.
    pub fn of(report: &Report) -> Self {
        let mut seen = Self::default();
        let mut ports: BTreeMap<String, (u32, u32)> = BTreeMap::new();
        for attempt in &report.each {
            if let Some(error) = &attempt.error {
                seen.failures.insert(match error.as_str() {
                    "ECONNREFUSED" => "refused".into(),
                    "TIMEOUT" => "timeout".into(),
                    other => other.into(),
                });
            } else if let (Some(endpoint), Some(source)) = (&attempt.endpoint, attempt.source) {
                let sources = seen.answers.entry(endpoint.clone()).or_default();
                sources.insert(source.ip());
                let (own, all) = ports.entry(endpoint.clone()).or_default();
                *own += u32::from(attempt.local.map(|local| local.port()) == Some(source.port()));
                *all += 1;
            }
        }
        let mostly = |(endpoint, (own, all))| (endpoint, own * 2 > all);
        seen.own_port = ports.into_iter().map(mostly).collect();
        seen
    }

    /// Joins the results of both times; for the port, `other` counts.
    pub fn and(&self, other: &Self) -> Self {
        let mut both = self.clone();
        for (endpoint, sources) in &other.answers {
            both.answers
                .entry(endpoint.clone())
                .or_default()
                .extend(sources);
        }
        both.own_port.extend(other.own_port.clone());
        both.failures.extend(other.failures.iter().cloned());
        both
    }

    /// Nothing but this failure.
    pub fn failed(how: &str) -> Self {
        Self {
            failures: [how.to_owned()].into(),
            ..Self::default()
        }
    }

    /// Every attempt failed so.
    pub fn is(&self, failure: &str) -> bool {
        *self == Self::failed(failure)
    }

    /// Returns the results with the client's own port at each endpoint.
    pub fn with_own_port(mut self) -> Self {
        self.own_port = self
            .answers
            .keys()
            .map(|name| (name.clone(), true))
            .collect();
        self
    }

    /// Whether at least one attempt was answered.
    pub fn answered(&self) -> bool {
        !self.answers.is_empty()
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words = vec![];
        for (endpoint, sources) in &self.answers {
            let sources: Vec<_> = sources.iter().map(ToString::to_string).collect();
            let other = self.own_port.get(endpoint) == Some(&false);
            let port = if other { "(another port)" } else { "" };
            words.push(format!("{endpoint}<-{}{port}", sources.join("|")));
        }
        words.extend(self.failures.iter().cloned());
        f.write_str(&words.join(" "))
    }
}
