//! The meaning of a name within the cluster's domain.
//!
//! The names are those of Kubernetes' specification of DNS-based service discovery, schema 1.1.0.

use std::{net::IpAddr, sync::Arc};

use model::{Entry, Host, NamedProtocol, Names, Published, Records, Service};

use super::name::{LowerName, MAX};

/// The version of the schema.
pub const SCHEMA: &str = "1.1.0";

/// The Service that Kubernetes' distributions have for the cluster's DNS: namespace and name.
pub const CLUSTER_DNS: (&str, &str) = ("kube-system", "kube-dns");

/// The meaning of a name.
#[derive(Clone, Debug)]
pub enum Meaning<'a> {
    /// The name is in no zone of ours: resolvers know it.
    Foreign,
    /// It may be a service that is not read: resolvers know.
    Unsure,
    /// The name has this meaning by the objects that were read. A newer object may be unread: resolvers know.
    Doubtful(Box<Meaning<'a>>),
    /// It does not exist.
    Missing,
    /// It exists, and has no records.
    Empty,
    /// The cluster's domain itself, with the service of the cluster's DNS.
    Apex(Option<&'a Arc<Service>>),
    /// The version of the schema.
    Schema,
    /// A service with cluster IPs.
    Service(&'a Arc<Service>),
    /// A headless service.
    Headless(&'a Arc<Service>),
    /// The endpoints of a service that have a label.
    Endpoints(&'a Arc<Service>, Vec<&'a Published>),
    /// A port of a service: its name and protocol.
    Port(&'a Arc<Service>, String, NamedProtocol),
    /// An alias for another name.
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

    /// Finds the host of an entry that matches a name, for clients of a namespace, if the name belongs to nothing in
    /// the cluster.
    ///
    /// Within the cluster's domain, the only hosts are names in the form of a Service's name in the entry's own
    /// namespace, without wildcards. So the author of an entry cannot claim a Service of another namespace, and cannot
    /// claim the names that clients' search lists produce from other names.
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
            (None, 0) => Meaning::Apex(self.server()),
            (Some("svc" | "pod"), 1) => Meaning::Empty,
            (Some("svc"), _) => self.below_svc(name, count),
            (Some("dns-version"), 1) => Meaning::Schema,
            (Some("dns"), 2) if label(2) == Some("ns") => {
                self.server().map_or(Meaning::Foreign, Meaning::Service)
            }
            (Some("pod"), 2 | 3)
                if label(2).and_then(|of| self.has_namespace(of)) == Some(false) =>
            {
                Meaning::Missing
            }
            (Some("pod"), 2) => Meaning::Empty,
            (Some("pod"), 3) => label(3)
                .and_then(dashed)
                .map_or(Meaning::Missing, Meaning::Pod),
            (Some("pod"), _) => Meaning::Missing,
            _ => Meaning::Foreign,
        }
    }

    /// The service of the cluster's DNS.
    fn server(&self) -> Option<&Arc<Service>> {
        let found = self.names.service(CLUSTER_DNS.0, CLUSTER_DNS.1)?;
        (!found.named_ips().is_empty()).then_some(found)
    }

    /// Whether a namespace exists; none if that is not known.
    fn has_namespace(&self, namespace: &str) -> Option<bool> {
        self.names.has_namespace(namespace)
    }

    /// Returns the meaning of a name with labels before `svc`; `count` labels are before the domain.
    fn below_svc(&self, name: &LowerName, count: usize) -> Meaning<'_> {
        let label = |from_end: usize| {
            let at = count.checked_sub(from_end)?;
            str::from_utf8(name.label(at)).ok()
        };
        let Some(namespace) = label(2) else {
            return Meaning::Missing;
        };
        let is_sure = self.names.is_whole_in(namespace);
        let missing = || {
            if is_sure {
                Meaning::Missing
            } else {
                Meaning::Unsure
            }
        };
        if count == 2 {
            return match self.has_namespace(namespace) {
                Some(true) => Meaning::Empty,
                Some(false) => Meaning::Missing,
                None => missing(),
            };
        }
        let service = label(3).and_then(|service| self.names.service(namespace, service));
        let Some(service) = service else {
            return missing();
        };
        let more = [label(4), label(5)];
        match (&service.records, count) {
            (Records::Alias(to), 3) => Meaning::Alias(service, to),
            (Records::Alias(_), _) => Meaning::Missing,
            // Without cluster IP although it should have one: the cluster will give it one.
            (records, 3) if !records.is_headless() => Meaning::Service(service),
            _ => match of_slices(service, count, more) {
                meaning if is_sure => meaning,
                Meaning::Missing => Meaning::Unsure,
                // There may be slices that are not read.
                meaning => Meaning::Doubtful(Box::new(meaning)),
            },
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

    /// The name of an endpoint of a service.
    pub fn of_endpoint(&self, service: &Service, endpoint: &Published) -> Option<LowerName> {
        let own = endpoint.label();
        let service = self.of_service(service)?;
        LowerName::of_labels([own.as_bytes()].into_iter().chain(service.labels())).ok()
    }
}

/// The meaning of a headless service's name, or of a name below a service. `more`: the labels before the service's.
fn of_slices<'a>(service: &'a Arc<Service>, count: usize, more: [Option<&str>; 2]) -> Meaning<'a> {
    match (count, more) {
        (3, _) if service.records.published().is_empty() => Meaning::Missing,
        (3, _) => Meaning::Headless(service),
        (4, [Some(label), _]) => match protocol(label) {
            Some(of) if has_port(service, None, of) => Meaning::Empty,
            _ => match endpoints(service, label) {
                found if found.is_empty() => Meaning::Missing,
                found => Meaning::Endpoints(service, found),
            },
        },
        (5, [Some(of), Some(port)]) => match (port.strip_prefix('_'), protocol(of)) {
            (Some(port), Some(of)) if has_port(service, Some(port), of) => {
                Meaning::Port(service, port.to_owned(), of)
            }
            _ => Meaning::Missing,
        },
        _ => Meaning::Missing,
    }
}

/// The protocol of a label such as `_tcp`.
fn protocol(label: &str) -> Option<NamedProtocol> {
    match label {
        "_tcp" => Some(NamedProtocol::Tcp),
        "_udp" => Some(NamedProtocol::Udp),
        "_sctp" => Some(NamedProtocol::Sctp),
        _ => None,
    }
}

/// Whether a service has a named port of a protocol: of this name, or any.
fn has_port(service: &Service, name: Option<&str>, protocol: NamedProtocol) -> bool {
    let fits = |of: &str, has: NamedProtocol| {
        has == protocol && !of.is_empty() && name.is_none_or(|name| name.eq_ignore_ascii_case(of))
    };
    if service.records.is_headless() {
        let endpoints = service.records.published().iter();
        let mut ports = endpoints.flat_map(|e| e.ports.iter());
        ports.any(|port| fits(&port.name, port.protocol))
    } else {
        let mut ports = service.named_ports();
        ports.any(|(name, protocol, _)| fits(name, protocol))
    }
}

/// The endpoints of a service with this label.
fn endpoints<'a>(service: &'a Service, label: &str) -> Vec<&'a Published> {
    let addr = dashed(label);
    let published = service.records.published().iter();
    let fits = |endpoint: &&Published| {
        if endpoint.hostname.is_empty() {
            Some(endpoint.addr) == addr
        } else {
            *endpoint.hostname == *label
        }
    };
    published.filter(fits).collect()
}

/// The address of a label that is an address with dashes in it, in any of its forms.
fn dashed(label: &str) -> Option<IpAddr> {
    if label.contains(['.', ':']) {
        return None;
    }
    let v4 = label.replace('-', ".").parse();
    let v4 = v4.ok().map(IpAddr::V4);
    v4.or_else(|| Some(IpAddr::V6(label.replace('-', ":").parse().ok()?).to_canonical()))
}
