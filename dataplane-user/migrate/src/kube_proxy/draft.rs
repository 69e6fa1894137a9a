//! Collects facts about services while rules are read, and builds the services at the end.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use imbl::OrdMap;
use ipnet::IpNet;
use model::{
    Endpoint, Protocol, Records, Service, ServiceName, ServicePort, ServiceType, TrafficPolicy,
};
use smallvec::SmallVec;

use super::{Error, Facts, Imported, facts::family, leftover::Leftovers};

/// Maximum number of ports of a service that are searched without an index.
const FEW: usize = 8;

/// The collected services.
#[derive(Debug, Default)]
pub struct Draft {
    /// Boxed, because a third of a map's slots are empty.
    services: BTreeMap<ServiceName, Box<ServiceDraft>>,
    /// Facts about the node.
    pub facts: Facts,
    /// Lines that were not understood, and services that were left out.
    pub leftovers: Leftovers,
    /// The origin of the text with kube-proxy's rules for IPv4, and for IPv6.
    origins: [Option<String>; 2],
    /// Whether the present rules are for IPv4.
    pub v4: bool,
    /// Number of chains that no packet reaches.
    pub stale: usize,
    /// Chains of services that no rule jumps to, each with whether its family is IPv4.
    unhooked: Vec<(bool, Error)>,
}

/// The collected facts of a service.
#[derive(Debug, Default)]
pub struct ServiceDraft {
    /// In the order of the rules; an address may occur more than once.
    cluster_ips: SmallVec<[IpAddr; 1]>,
    /// `None` for most services.
    outside: Option<Box<Outside>>,
    pub affinity: Option<Affinity>,
    pub internal_policy: Option<TrafficPolicy>,
    pub external_policy: Option<TrafficPolicy>,
    pub health_check_node_port: Option<u16>,
    ports: SmallVec<[PortDraft; 1]>,
    /// The index of `ports`, for a service with many ports.
    places: Option<Box<Places>>,
    left_out: bool,
}

/// A service's addresses for clients outside the cluster.
#[derive(Debug, Default)]
pub struct Outside {
    pub external_ips: BTreeSet<IpAddr>,
    pub load_balancer_ips: BTreeSet<IpAddr>,
    /// By family: IPv4, IPv6. The clients that may use the load balancer's addresses.
    pub source_ranges: [Option<Vec<IpNet>>; 2],
}

/// An index of ports by name and protocol.
type Places = HashMap<(Box<str>, Protocol), usize>;

/// Session affinity: the time for which a client stays with an endpoint; `None` if clients are not remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Affinity(pub Option<Duration>);

/// The collected facts of a port.
#[derive(Debug)]
pub struct PortDraft {
    name: Box<str>,
    protocol: Protocol,
    pub port: Option<u16>,
    pub node_port: Option<u16>,
    /// The node port of a rule that counts connections to loopback.
    pub at_loopback: Option<u16>,
    endpoints: Vec<Endpoint>,
    /// By family: IPv4, IPv6.
    rules: [FamilyRules; 2],
}

/// Facts about a port in the rules of one family.
#[derive(Clone, Copy, Debug, Default)]
struct FamilyRules {
    /// Whether any rule concerns the port.
    any: bool,
    /// Whether a rule serves or refuses the port at a cluster IP.
    internal: bool,
    /// Whether a rule refuses the port because the service has no endpoint anywhere.
    refused: bool,
}

/// The name of a service's port in rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PortName<'a> {
    pub namespace: &'a str,
    pub name: &'a str,
    /// Empty if the service's only port has no name.
    pub port: &'a str,
    pub protocol: Protocol,
}

/// The maximum length of an element's comment, in bytes: kube-proxy truncates longer comments since 1.37.
const COMMENT: usize = 128;

impl<'a> PortName<'a> {
    /// Reads `namespace/name:port`, the form in comments.
    pub fn of_comment(text: &'a str, protocol: Protocol) -> Option<Self> {
        let (namespace, rest) = text.split_once('/')?;
        let (name, port) = match rest.split_once(':') {
            // The comment of a port without a name has no colon, unless the comment was truncated.
            Some((_, "")) if text.len() < COMMENT => return None,
            Some((name, port)) => (name, port),
            None => (rest, ""),
        };
        Self::checked(namespace, name, port, protocol)
    }

    /// Reads `namespace/name/protocol/port`, the form in names of nf_tables' chains. Returns `None` for an unsupported
    /// protocol.
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

    /// Returns the service's name.
    pub fn service(&self) -> ServiceName {
        ServiceName::new(self.namespace, self.name)
    }
}

/// Reads a protocol. Returns `None` if the dataplane does not serve it.
pub fn protocol(word: &str) -> Option<Protocol> {
    [Protocol::Tcp, Protocol::Udp]
        .into_iter()
        .find(|protocol| protocol.word() == word)
}

/// Records a value. Returns false if another value was recorded before.
pub fn agree<T: PartialEq>(known: &mut Option<T>, new: T) -> bool {
    if let Some(known) = known {
        return *known == new;
    }
    *known = Some(new);
    true
}

impl Draft {
    /// Starts kube-proxy's rules of one family.
    ///
    /// # Errors
    ///
    /// If another text has rules of this family, because one of the texts is out of date.
    pub fn begin(&mut self, v4: bool, origin: &str) -> Result<(), Error> {
        let known = &mut self.origins[usize::from(!v4)];
        if let Some(first) = known {
            return Err(Error::Twice {
                first: first.clone(),
                second: origin.to_owned(),
                family: family(v4),
            });
        }
        *known = Some(origin.to_owned());
        self.v4 = v4;
        Ok(())
    }

    /// Notes a chain of services that no rule jumps to. Such a chain is an error, except if another text has reachable
    /// rules of the family.
    pub fn unhooked(&mut self, v4: bool, error: Error) {
        self.unhooked.push((v4, error));
    }

    /// Returns true if no rule concerned a service.
    pub fn is_empty(&self) -> bool {
        self.services.is_empty()
    }

    /// Checks that packets reach the chains of services in each family. If another text has reachable rules of the
    /// family, lists the unreachable chains.
    ///
    /// # Errors
    ///
    /// If no packet reaches the chains, and no other text has rules of the family.
    pub fn check_hooks(&mut self) -> Result<(), Error> {
        for (v4, error) in std::mem::take(&mut self.unhooked) {
            if self.origins[usize::from(!v4)].is_none() {
                return Err(error);
            }
            self.leftovers.add(0, "", error.to_string());
        }
        Ok(())
    }

    /// Returns true if a service is left out.
    pub fn is_left_out(&self, name: &ServiceName) -> bool {
        self.services.get(name).is_some_and(|known| known.left_out)
    }

    /// Returns a service. Creates it if it is unknown.
    pub fn service(&mut self, name: &ServiceName) -> &mut ServiceDraft {
        if !self.services.contains_key(name) {
            self.services.insert(name.clone(), Box::default());
        }
        self.services.entry(name.clone()).or_default()
    }

    /// Returns a service and the index of one of its ports. Creates them if they are unknown.
    pub fn port(&mut self, name: &PortName<'_>) -> (&mut ServiceDraft, usize) {
        let v4 = self.v4;
        let service = self.service(&name.service());
        let index = service.port(name);
        service.ports[index].rules[usize::from(!v4)].any = true;
        (service, index)
    }

    /// Notes that a port refuses connections at an address, or at its node port. `policy`: the traffic policy for which
    /// the service has no endpoints; `None` if it has no endpoints anywhere. Returns false if another rule contradicts.
    pub fn refuse(
        &mut self,
        name: &PortName<'_>,
        ip: Option<IpAddr>,
        is_cluster_ip: bool,
        number: u16,
        policy: Option<TrafficPolicy>,
    ) -> bool {
        let v4 = self.v4;
        let (service, port) = self.port(name);
        match ip {
            Some(ip) if is_cluster_ip => {
                service.at_cluster_ip(port, ip);
            }
            // If the service has endpoints anywhere, other rules give the port's addresses and their kind. Without
            // endpoints, the kind makes no difference.
            Some(ip) if !service.is_load_balancers(ip) => {
                service.outside().external_ips.insert(ip);
            }
            _ => {}
        }
        let port = service.at(port);
        let known = if ip.is_some() {
            &mut port.port
        } else {
            &mut port.node_port
        };
        let mut agrees = agree(known, number);
        match policy {
            None => port.rules[usize::from(!v4)].refused = true,
            Some(policy) if is_cluster_ip => agrees &= agree(&mut service.internal_policy, policy),
            Some(policy) => agrees &= agree(&mut service.external_policy, policy),
        }
        agrees
    }

    /// Adds endpoints of a port. Returns false if the service's ports differ in session affinity.
    pub fn serve(
        &mut self,
        name: &PortName<'_>,
        endpoints: Vec<Endpoint>,
        affinity: Option<Affinity>,
    ) -> bool {
        let (service, port) = self.port(name);
        service.at(port).serve(endpoints);
        affinity.is_none_or(|affinity| agree(&mut service.affinity, affinity))
    }

    /// Lists a line that concerns a service, and leaves the service out. `at` is the line's number.
    pub fn leave_out(&mut self, name: &ServiceName, at: usize, text: &str, why: &str) {
        self.service(name).left_out = true;
        self.leftovers
            .add(at, text, format!("{why}, so service {name} is left out"));
    }

    /// Returns the services, the facts about the node, and the lines that were not understood.
    pub fn finish(mut self) -> Imported {
        let mut services = OrdMap::new();
        for (name, draft) in self.services {
            if draft.left_out {
                continue;
            }
            if let Some(why) = draft.ports.iter().find_map(PortDraft::fault) {
                let why = format!("{why}, so service {name} is left out");
                self.leftovers.add(0, "", why);
                continue;
            }
            services.insert(name.clone(), Arc::new(draft.finish(name)));
        }
        let (leftovers, more) = self.leftovers.finish();
        Imported {
            services,
            facts: self.facts,
            leftovers,
            more,
            stale: self.stale,
        }
    }
}

impl ServiceDraft {
    /// Returns the service's addresses for clients outside the cluster. Creates the field if it is empty.
    pub fn outside(&mut self) -> &mut Outside {
        self.outside.get_or_insert_default()
    }

    /// Returns true if an address is known to be a load balancer's.
    pub fn is_load_balancers(&self, ip: IpAddr) -> bool {
        let outside = self.outside.as_ref();
        outside.is_some_and(|outside| outside.load_balancer_ips.contains(&ip))
    }

    /// Returns true if rules of a family restrict the clients of the load balancer's addresses.
    pub fn has_source_ranges(&self, v4: bool) -> bool {
        let outside = self.outside.as_ref();
        outside.is_some_and(|outside| outside.source_ranges[usize::from(!v4)].is_some())
    }

    /// Returns the index of a port. Creates the port if it is unknown.
    fn port(&mut self, name: &PortName<'_>) -> usize {
        let key = |port: &PortDraft| (port.name.clone(), port.protocol);
        let is = |port: &PortDraft| (&*port.name, port.protocol) == (name.port, name.protocol);
        let known = match &self.places {
            Some(places) => places.get(&(name.port.into(), name.protocol)).copied(),
            None => self.ports.iter().position(is),
        };
        if let Some(known) = known {
            return known;
        }
        let index = self.ports.len();
        self.ports.push(PortDraft {
            name: name.port.into(),
            protocol: name.protocol,
            port: None,
            node_port: None,
            at_loopback: None,
            endpoints: Vec::new(),
            rules: Default::default(),
        });
        if let Some(places) = &mut self.places {
            places.insert(key(&self.ports[index]), index);
        } else if self.ports.len() > FEW {
            let all = self.ports.iter().map(key).zip(0..);
            self.places = Some(Box::new(all.collect()));
        }
        index
    }

    /// Notes a rule that serves or refuses a port at a cluster IP.
    pub fn at_cluster_ip(&mut self, index: usize, ip: IpAddr) -> &mut PortDraft {
        if self.cluster_ips.last() != Some(&ip) {
            self.cluster_ips.push(ip);
        }
        let port = &mut self.ports[index];
        port.rules[usize::from(!ip.is_ipv4())].internal = true;
        port
    }

    /// Returns the port at an index that [`Draft::port`] returned.
    pub fn at(&mut self, index: usize) -> &mut PortDraft {
        &mut self.ports[index]
    }

    fn finish(mut self, name: ServiceName) -> Service {
        self.cluster_ips.sort_unstable();
        self.cluster_ips.dedup();
        let outside = self.outside.map(|outside| *outside).unwrap_or_default();
        let ranges = outside.source_ranges.into_iter().flatten().flatten();
        let ports: SmallVec<[ServicePort; 1]> =
            self.ports.into_iter().map(PortDraft::finish).collect();
        let kind = if !outside.load_balancer_ips.is_empty() {
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
            external_ips: outside.external_ips.into_iter().collect(),
            load_balancer_ips: outside.load_balancer_ips.into_iter().collect(),
            source_ranges: ranges.collect(),
            affinity: self.affinity.and_then(|Affinity(timeout)| timeout),
            internal_policy: self.internal_policy.unwrap_or_default(),
            external_policy: self.external_policy.unwrap_or_default(),
            health_check_node_port: self.health_check_node_port,
            aside: Vec::new(),
            identities: Box::default(),
            records: Records::ClusterIps,
            ports,
        }
    }
}

impl PortDraft {
    /// Adds the endpoints of one family. Endpoints are the most numerous objects, so their list gets no spare capacity.
    fn serve(&mut self, endpoints: Vec<Endpoint>) {
        self.endpoints.reserve_exact(endpoints.len());
        self.endpoints.extend(endpoints);
    }

    /// Returns the first gap or contradiction in the port's rules.
    fn fault(&self) -> Option<String> {
        let name = &*self.name;
        if self.at_loopback.is_some() && self.at_loopback != self.node_port {
            return Some(format!(
                "only a rule for loopback gives port {name:?} its node port"
            ));
        }
        for (said, v4) in self.rules.iter().zip([true, false]) {
            let family = family(v4);
            // kube-proxy serves a service at a cluster IP in each of the service's families.
            if said.any && !said.internal {
                return Some(format!(
                    "no rule of {family} serves or refuses port {name:?} at a cluster IP"
                ));
            }
            let mut endpoints = self.endpoints.iter();
            if said.refused && endpoints.any(|of| of.addr.is_ipv4() == v4) {
                return Some(format!(
                    "rules of {family} serve port {name:?}, and refuse it because it has no endpoint"
                ));
            }
        }
        let unknown = self.port.is_none();
        unknown.then(|| format!("no rule says the number of port {name:?}"))
    }

    fn finish(mut self) -> ServicePort {
        self.endpoints
            .sort_unstable_by_key(|endpoint| (endpoint.addr, endpoint.port));
        ServicePort {
            name: self.name,
            // `Draft::finish` leaves out ports without a number.
            node_port: self.node_port,
            endpoints: self.endpoints,
            ..ServicePort::new(self.port.unwrap_or_default(), self.protocol)
        }
    }
}
