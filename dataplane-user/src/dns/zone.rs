//! What a name within the cluster's domain means.
//!
//! The names are those of Kubernetes' specification of DNS-based service discovery, schema 1.1.0.

use std::{net::IpAddr, sync::Arc};

use super::name::{LowerName, MAX};
use crate::model::{Entry, Host, Names, Protocol, Published, Records, Service};

/// The version of the schema.
pub const SCHEMA: &str = "1.1.0";

/// What a name means.
#[derive(Clone, Debug)]
pub enum Meaning<'a> {
    /// It is in no zone of ours: resolvers know.
    Foreign,
    /// It may be a service that is not read: resolvers know.
    Unsure,
    /// It does not exist.
    Missing,
    /// It exists, and has no records.
    Empty,
    /// The version of the schema.
    Schema,
    /// A service with cluster IPs.
    Service(&'a Arc<Service>),
    /// A headless service.
    Headless(&'a Arc<Service>),
    /// The endpoints of a headless service that have a label.
    Endpoints(&'a Arc<Service>, Vec<&'a Published>),
    /// A port of a service: its name and protocol.
    Port(&'a Arc<Service>, String, Protocol),
    /// Another name.
    Alias(&'a Arc<Service>, &'a str),
    /// An address that the name itself has: `10-244-1-8.NAMESPACE.pod.DOMAIN`.
    Pod(IpAddr),
    /// The services and endpoints that have an address.
    Pointer(IpAddr),
    /// A host of a ServiceEntry with addresses. Resolvers know its other records.
    Host(&'a Arc<Entry>, &'a Host),
}

/// How long clients may keep answers, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ttls {
    /// From the names of services.
    pub services: u32,
    /// From the hosts of ServiceEntries.
    pub entries: u32,
}

/// The zone of a cluster.
#[derive(Clone, Debug)]
pub struct Zone {
    /// Its names.
    pub names: Names,
    /// Its domain.
    pub domain: LowerName,
    /// How long clients may keep answers from it.
    pub ttls: Ttls,
}

impl Zone {
    /// The zone of names. A domain that is no name has no zone.
    pub fn new(names: Names, ttls: Ttls) -> Self {
        let domain = LowerName::parse(names.domain());
        Self {
            domain: domain.unwrap_or_else(|_| LowerName::root()),
            names,
            ttls,
        }
    }

    /// The meaning of a name for clients of a namespace. A name of the cluster goes before a host of an entry.
    ///
    /// Calls `namespace` only if the meaning may depend on the namespace.
    pub fn meaning<'n>(
        &self,
        name: &LowerName,
        namespace: impl FnOnce() -> &'n str,
    ) -> Meaning<'_> {
        let meaning = self.of_cluster(name);
        let may_be_host = matches!(
            meaning,
            Meaning::Foreign | Meaning::Unsure | Meaning::Missing
        );
        if !may_be_host || !self.names.has_hosts() {
            return meaning;
        }
        match self.host(name, namespace()) {
            Some((entry, host)) if !host.vips.is_empty() => Meaning::Host(entry, host),
            _ => meaning,
        }
    }

    /// The host of an entry that a name is, to clients of a namespace, if the name is nothing of the cluster.
    ///
    /// Within the cluster's domain the only hosts are those that have the form of a Service's name in the entry's own
    /// namespace, and no wildcards. So the author of an entry cannot claim a Service of another namespace, and cannot claim
    /// the names that clients' search lists make of other names.
    pub fn host(&self, name: &LowerName, namespace: &str) -> Option<(&Arc<Entry>, &Host)> {
        let mut buffer = [0; MAX];
        let text = name.text(&mut buffer)?;
        let Some(count) = self.within(name) else {
            return self.names.host(text, namespace, None);
        };
        let label = |from_end: usize| {
            let at = count.checked_sub(from_end)?;
            str::from_utf8(name.label(at)).ok()
        };
        let (Some("svc"), Some(owner), Some(service), 3) = (label(1), label(2), label(3), count)
        else {
            return None;
        };
        if self.names.service(owner, service).is_some() {
            return None;
        }
        let found = self.names.host(text, namespace, Some(owner));
        found.filter(|(_, host)| host.wildcard().is_none())
    }

    /// How many labels are before the domain, if a name is within it.
    fn within(&self, name: &LowerName) -> Option<usize> {
        name.before(&self.domain)
            .filter(|_| self.domain.count() > 0)
    }

    /// For how many seconds clients may keep the records of a name.
    pub fn ttl(&self, meaning: &Meaning) -> u32 {
        match meaning {
            Meaning::Host(..) => self.ttls.entries,
            _ => self.ttls.services,
        }
    }

    fn of_cluster(&self, name: &LowerName) -> Meaning<'_> {
        let Some(count) = self.within(name) else {
            return match name.address() {
                Some(addr) if self.has_names(addr) => Meaning::Pointer(addr),
                _ => Meaning::Foreign,
            };
        };
        // The last label before the domain, and those before it from the right.
        let label = |from_end: usize| {
            let at = count.checked_sub(from_end)?;
            str::from_utf8(name.label(at)).ok()
        };
        match (label(1), count) {
            (Some("svc"), 1) | (Some("pod"), 1 | 2) => Meaning::Empty,
            (Some("svc"), _) => self.below_svc(name, count),
            (Some("dns-version"), 1) => Meaning::Schema,
            (Some("pod"), 3) => label(3)
                .and_then(dashed)
                .map_or(Meaning::Missing, Meaning::Pod),
            (Some("pod"), _) => Meaning::Missing,
            _ => Meaning::Foreign,
        }
    }

    /// What a name with labels before `svc` means; `count` labels are before the domain.
    fn below_svc(&self, name: &LowerName, count: usize) -> Meaning<'_> {
        let label = |from_end: usize| {
            let at = count.checked_sub(from_end)?;
            str::from_utf8(name.label(at)).ok()
        };
        let missing = || {
            if self.names.is_whole() {
                Meaning::Missing
            } else {
                Meaning::Unsure
            }
        };
        let Some(namespace) = label(2) else {
            return Meaning::Missing;
        };
        if count == 2 {
            return if self.names.has_namespace(namespace) {
                Meaning::Empty
            } else {
                missing()
            };
        }
        let service = label(3).and_then(|service| self.names.service(namespace, service));
        let Some(service) = service else {
            return missing();
        };
        // Of a headless service, the slices may not be read.
        if matches!(service.records, Records::Endpoints { .. }) && !self.names.is_whole() {
            return Meaning::Unsure;
        }
        match (&service.records, count) {
            (Records::Alias(to), 3) => Meaning::Alias(service, to),
            (Records::Alias(_), _) => Meaning::Missing,
            // Without cluster IP although it should have one: the cluster will give it one.
            (Records::ClusterIps, 3) => Meaning::Service(service),
            (Records::Endpoints { .. }, 3) => match service.records.published().next() {
                Some(_) => Meaning::Headless(service),
                None => Meaning::Missing,
            },
            (_, 4) => match label(4) {
                Some(label) if protocol(label).is_some_and(|of| has_port(service, None, of)) => {
                    Meaning::Empty
                }
                Some(label) => {
                    let found = endpoints(service, label);
                    if found.is_empty() {
                        Meaning::Missing
                    } else {
                        Meaning::Endpoints(service, found)
                    }
                }
                None => Meaning::Missing,
            },
            (_, 5) => {
                let port = label(5).and_then(|label| label.strip_prefix('_'));
                match (port, label(4).and_then(protocol)) {
                    (Some(port), Some(of)) if has_port(service, Some(port), of) => {
                        Meaning::Port(service, port.to_owned(), of)
                    }
                    _ => Meaning::Missing,
                }
            }
            _ => Meaning::Missing,
        }
    }

    fn has_names(&self, addr: IpAddr) -> bool {
        self.names.of_address(addr).next().is_some()
    }

    /// The name of a service below the domain.
    pub fn of_service(&self, service: &Service) -> Option<LowerName> {
        let labels = [service.name.name(), service.name.namespace(), "svc"];
        let labels = labels.map(str::as_bytes).into_iter();
        LowerName::of_labels(labels.chain(self.domain.labels())).ok()
    }

    /// The name of an endpoint of a headless service.
    pub fn of_endpoint(&self, service: &Service, endpoint: &Published) -> Option<LowerName> {
        let own = endpoint.label();
        let service = self.of_service(service)?;
        LowerName::of_labels([own.as_bytes()].into_iter().chain(service.labels())).ok()
    }
}

/// The protocol of a label such as `_tcp`.
fn protocol(label: &str) -> Option<Protocol> {
    match label {
        "_tcp" => Some(Protocol::Tcp),
        "_udp" => Some(Protocol::Udp),
        _ => None,
    }
}

/// Whether a service has a named port of a protocol: of this name, or any.
fn has_port(service: &Service, name: Option<&str>, protocol: Protocol) -> bool {
    let fits = |(of, has): (&str, Protocol)| {
        has == protocol && !of.is_empty() && name.is_none_or(|name| name.eq_ignore_ascii_case(of))
    };
    match &service.records {
        Records::ClusterIps => {
            let mut ports = service.ports.iter();
            ports.any(|port| fits((&port.name, port.protocol)))
        }
        Records::Endpoints { .. } => {
            let mut ports = service.records.published().flat_map(|e| e.ports.iter());
            ports.any(|(name, protocol, _)| fits((name, *protocol)))
        }
        Records::Alias(_) => false,
    }
}

/// The endpoints of a headless service with this label.
fn endpoints<'a>(service: &'a Service, label: &str) -> Vec<&'a Published> {
    let addr = dashed(label);
    let published = service.records.published();
    let fits = |endpoint: &&Published| {
        if endpoint.hostname.is_empty() {
            Some(endpoint.addr) == addr
        } else {
            *endpoint.hostname == *label
        }
    };
    published.filter(fits).collect()
}

/// The address of a label that is an address with dashes in it.
fn dashed(label: &str) -> Option<IpAddr> {
    let v4 = label.replace('-', ".").parse();
    let v4 = v4.ok().map(IpAddr::V4);
    v4.or_else(|| Some(IpAddr::V6(label.replace('-', ":").parse().ok()?)))
}
