//! Services as far as rules have told of them, and what becomes of them in the end.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc, time::Duration};

use imbl::OrdMap;
use ipnet::IpNet;
use smallvec::SmallVec;

use super::{
    Error, Facts,
    leftover::{At, Leftovers},
};
use crate::model::{
    Endpoint, Protocol, Records, Service, ServiceName, ServicePort, ServiceType, TrafficPolicy,
    Weights,
};

/// The services so far.
#[derive(Debug, Default)]
pub struct Draft {
    services: BTreeMap<ServiceName, ServiceDraft>,
    /// Facts about the node.
    pub facts: Facts,
    /// The text that has kube-proxy's rules for IPv4, and that for IPv6.
    origins: [Option<String>; 2],
}

/// A service so far.
#[derive(Debug, Default)]
pub struct ServiceDraft {
    pub cluster_ips: SmallVec<[IpAddr; 1]>,
    pub external_ips: SmallVec<[IpAddr; 0]>,
    pub load_balancer_ips: SmallVec<[IpAddr; 0]>,
    /// By family: IPv4, IPv6.
    pub source_ranges: [Option<Vec<IpNet>>; 2],
    pub affinity: Option<Affinity>,
    pub internal_policy: Option<TrafficPolicy>,
    pub external_policy: Option<TrafficPolicy>,
    pub health_check_node_port: Option<u16>,
    ports: SmallVec<[PortDraft; 1]>,
    left_out: bool,
}

/// Session affinity: how long clients are remembered, if they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Affinity(pub Option<Duration>);

/// A service's port so far.
#[derive(Debug)]
pub struct PortDraft {
    name: Box<str>,
    protocol: Protocol,
    pub port: Option<u16>,
    pub node_port: Option<u16>,
    /// With their weights.
    pub endpoints: Vec<(Endpoint, u32)>,
}

/// A service's port by its name, as rules have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PortName<'a> {
    pub namespace: &'a str,
    pub name: &'a str,
    /// Empty if the only port has none.
    pub port: &'a str,
    pub protocol: Protocol,
}

impl<'a> PortName<'a> {
    /// Reads `namespace/name:port`, the form in comments.
    pub fn of_comment(text: &'a str, protocol: Protocol) -> Option<Self> {
        let (namespace, rest) = text.split_once('/')?;
        let (name, port) = match rest.split_once(':') {
            // Without a port's name there is no colon.
            Some((_, "")) => return None,
            Some((name, port)) => (name, port),
            None => (rest, ""),
        };
        Self::checked(namespace, name, port, protocol)
    }

    /// Reads `namespace/name/protocol/port`, the form in names of nf_tables' chains. `None`: another protocol.
    pub fn of_chain(text: &'a str) -> Option<Self> {
        let mut parts = text.split('/');
        let (namespace, name) = (parts.next()?, parts.next()?);
        let protocol = protocol(parts.next()?)?;
        let port = parts.next()?;
        if parts.next().is_some() {
            return None;
        }
        Self::checked(namespace, name, port, protocol)
    }

    fn checked(
        namespace: &'a str,
        name: &'a str,
        port: &'a str,
        protocol: Protocol,
    ) -> Option<Self> {
        let good = |text: &str| {
            text.bytes()
                .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_'))
        };
        let named = !namespace.is_empty() && !name.is_empty();
        (named && good(namespace) && good(name) && good(port)).then_some(Self {
            namespace,
            name,
            port,
            protocol,
        })
    }

    /// The service's name.
    pub fn service(&self) -> ServiceName {
        ServiceName::new(self.namespace, self.name)
    }
}

/// A protocol that is served.
pub fn protocol(word: &str) -> Option<Protocol> {
    [Protocol::Tcp, Protocol::Udp]
        .into_iter()
        .find(|protocol| protocol.word() == word)
}

/// Says something for the first time, or the same again. False: it was something else before.
pub fn agree<T: PartialEq>(known: &mut Option<T>, new: T) -> bool {
    if let Some(known) = known {
        return *known == new;
    }
    *known = Some(new);
    true
}

/// Adds an address that may be there.
pub fn add<const N: usize>(to: &mut SmallVec<[IpAddr; N]>, ip: IpAddr)
where
    [IpAddr; N]: smallvec::Array<Item = IpAddr>,
{
    if !to.contains(&ip) {
        to.push(ip);
    }
}

impl Draft {
    /// Begins kube-proxy's rules of one family.
    ///
    /// # Errors
    ///
    /// Fails if another text has rules of the same family, because one of the texts is out of date.
    pub fn begin(&mut self, v4: bool, origin: &str) -> Result<(), Error> {
        let known = &mut self.origins[usize::from(!v4)];
        if let Some(first) = known {
            return Err(Error::Twice {
                first: first.clone(),
                second: origin.to_owned(),
                family: if v4 { "IPv4" } else { "IPv6" },
            });
        }
        *known = Some(origin.to_owned());
        Ok(())
    }

    /// A service, which is new if it was not known.
    pub fn service(&mut self, name: &ServiceName) -> &mut ServiceDraft {
        if !self.services.contains_key(name) {
            self.services.insert(name.clone(), ServiceDraft::default());
        }
        self.services.entry(name.clone()).or_default()
    }

    /// A service and one of its ports.
    pub fn port(&mut self, name: &PortName<'_>) -> (&mut ServiceDraft, usize) {
        let service = self.service(&name.service());
        let index = service.port(name);
        (service, index)
    }

    /// Lists a line that concerns a service, and leaves the service out.
    pub fn leave_out(
        &mut self,
        name: &ServiceName,
        at: At,
        text: &str,
        why: &str,
        leftovers: &mut Leftovers,
    ) {
        self.service(name).left_out = true;
        leftovers.add(at, text, format!("{why}, so service {name} is left out"));
    }

    /// The services, and what is said of the node.
    pub fn finish(
        self,
        previous: &OrdMap<ServiceName, Arc<Service>>,
        leftovers: &mut Leftovers,
    ) -> (OrdMap<ServiceName, Arc<Service>>, Facts) {
        let mut services = OrdMap::new();
        for (name, draft) in self.services {
            if draft.left_out {
                continue;
            }
            if let Some(port) = draft.ports.iter().find(|port| port.port.is_none()) {
                let why = format!(
                    "no rule says the number of port {:?} of service {name}, so the service is left out",
                    &*port.name
                );
                leftovers.add(At::Nowhere, "", why);
                continue;
            }
            let service = draft.finish(name.clone());
            let known = previous.get(&name).filter(|known| ***known == service);
            let service = known.map_or_else(|| Arc::new(service), Arc::clone);
            services.insert(name, service);
        }
        (services, self.facts)
    }
}

impl ServiceDraft {
    /// The index of a port, which is new if it was not known.
    fn port(&mut self, name: &PortName<'_>) -> usize {
        let is = |port: &PortDraft| (&*port.name, port.protocol) == (name.port, name.protocol);
        self.ports.iter().position(is).unwrap_or_else(|| {
            self.ports.push(PortDraft {
                name: name.port.into(),
                protocol: name.protocol,
                port: None,
                node_port: None,
                endpoints: Vec::new(),
            });
            self.ports.len() - 1
        })
    }

    /// The port at an index that [`Draft::port`] told.
    pub fn at(&mut self, index: usize) -> &mut PortDraft {
        &mut self.ports[index]
    }

    fn finish(self, name: ServiceName) -> Service {
        let ranges = self.source_ranges.into_iter().flatten().flatten();
        let ports: SmallVec<[ServicePort; 1]> =
            self.ports.into_iter().map(PortDraft::finish).collect();
        let kind = if !self.load_balancer_ips.is_empty() {
            ServiceType::LoadBalancer
        } else if ports.iter().any(|port| port.node_port.is_some()) {
            ServiceType::NodePort
        } else {
            ServiceType::ClusterIp
        };
        Service {
            name,
            kind,
            created: None,
            cluster_ips: self.cluster_ips,
            external_ips: self.external_ips,
            load_balancer_ips: self.load_balancer_ips,
            source_ranges: ranges.collect(),
            affinity: self.affinity.and_then(|Affinity(timeout)| timeout),
            internal_policy: self.internal_policy.unwrap_or_default(),
            external_policy: self.external_policy.unwrap_or_default(),
            health_check_node_port: self.health_check_node_port,
            records: Records::ClusterIps,
            ports,
        }
    }
}

impl PortDraft {
    fn finish(mut self) -> ServicePort {
        self.endpoints
            .sort_unstable_by_key(|(endpoint, _)| (endpoint.addr, endpoint.port));
        let (endpoints, weights): (Vec<_>, Vec<_>) = self.endpoints.into_iter().unzip();
        ServicePort {
            name: self.name,
            // `Draft::finish` leaves out ports without a number.
            port: self.port.unwrap_or_default(),
            protocol: self.protocol,
            node_port: self.node_port,
            endpoints,
            weights: Weights::of(weights),
            split: None,
        }
    }
}
