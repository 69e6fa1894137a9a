//! Entries: hosts that are no services of the cluster, and what answers for them (Istio's ServiceEntry).

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use smallvec::SmallVec;

use super::{EndpointName, EntryName, Hints, Identity, Preference, Protocol};

/// A ServiceEntry with its endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: EntryName,
    /// `metadata.creationTimestamp` in seconds since the epoch; an entry without it is the youngest.
    pub created: Option<i64>,
    /// `spec.hosts`, without duplicates.
    pub hosts: SmallVec<[Host; 1]>,
    /// `spec.addresses`: those that are single addresses, which DNS answers.
    pub addresses: SmallVec<[IpAddr; 1]>,
    /// All other addresses of its small ranges: no name leads to them.
    pub ranges: SmallVec<[IpAddr; 0]>,
    /// Whether a host without an address gets one from the node: not if the entry has addresses, with
    /// [`EntryResolution::None`], or if a label forbids it.
    pub wants_vips: bool,
    /// `spec.resolution`.
    pub resolution: EntryResolution,
    /// `spec.location`.
    pub location: Location,
    /// `spec.exportTo`.
    pub export_to: ExportTo,
    /// The identities in `spec.subjectAltNames`.
    pub identities: Box<[Identity]>,
    /// `spec.ports`.
    pub ports: SmallVec<[EntryPort; 1]>,
    /// `spec.endpoints`, or those that `spec.workloadSelector` selects; none with [`EntryResolution::Hosts`].
    pub backends: Vec<Backend>,
    /// The endpoints that clients prefer: by the entry's own annotation, and by its namespace's annotation, which
    /// counts only if the entry has none.
    pub preference: [Option<Preference>; 2],
}

/// A host of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Its DNS name in lower case, without a dot at its end. A name that begins with `*.` stands for all names that end
    /// with the rest.
    pub name: Arc<str>,
    /// The addresses that a control plane has allocated to it (`status.addresses`), at most one of each family.
    pub assigned: SmallVec<[IpAddr; 2]>,
    /// The addresses of DNS answers: those that the node's tables serve for it, or, with [`EntryResolution::None`],
    /// those of the entry. Empty until the plan has seen the entry, and if nothing answers at this node: then the name
    /// is for the resolver that the client asked.
    pub vips: SmallVec<[IpAddr; 2]>,
    /// The addresses that this node has allocated to it: those of DNS answers, and those that clients may still know.
    pub given: SmallVec<[IpAddr; 2]>,
    /// The addresses that a control plane gave to it before, and that clients may still know.
    pub former: SmallVec<[IpAddr; 0]>,
    /// With [`EntryResolution::Hosts`], the addresses of its name, as far as they are known: its endpoints.
    pub endpoints: SmallVec<[IpAddr; 0]>,
}

/// A port of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryPort {
    /// `name`.
    pub name: Box<str>,
    /// `number`, on the VIPs.
    pub port: u16,
    /// The protocol below `protocol`: TCP or UDP.
    pub protocol: Protocol,
    /// `targetPort`, on endpoints that do not name their own.
    pub target: Option<u16>,
}

/// A workload or address that answers for an entry.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Backend {
    /// Where it is.
    pub at: At,
    /// Its ports by the names of the entry's ports.
    pub ports: SmallVec<[(Box<str>, u16); 0]>,
    /// Its part of the connections, of the sum of all; at least 1.
    pub weight: u32,
    /// Whether it is on this node.
    pub local: bool,
    /// Where it is, as seen from this node.
    pub hints: Hints,
}

/// Where a backend is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum At {
    /// At an address.
    Address(IpAddr),
    /// At the addresses of a DNS name, which is in lower case.
    Name(Arc<str>),
}

/// `spec.resolution`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryResolution {
    /// Clients connect to an address that they already know: nothing is translated.
    None,
    /// Endpoints are addresses.
    Static,
    /// Endpoints are DNS names (`DNS` and `DNS_ROUND_ROBIN`), or addresses.
    Dns,
    /// DNS names without endpoints in the entry: each host is its own endpoint.
    Hosts,
}

/// `spec.location`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    /// Outside of the mesh.
    External,
    /// In the mesh.
    Internal,
}

/// `spec.exportTo`: which namespaces see an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExportTo {
    /// All.
    All,
    /// These; `.` has become the entry's own.
    Namespaces(BTreeSet<Box<str>>),
}

impl Entry {
    /// Whether clients in `namespace` see the entry.
    pub fn is_visible_in(&self, namespace: &str) -> bool {
        match &self.export_to {
            ExportTo::All => true,
            ExportTo::Namespaces(namespaces) => namespaces.contains(namespace),
        }
    }

    /// The addresses that the entry has from others than this node: from its author, or from a control plane.
    pub fn named_addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        let assigned = self.hosts.iter().flat_map(|host| &host.assigned);
        let own = self.addresses.iter().chain(&self.ranges);
        own.chain(assigned).copied()
    }

    /// The names at whose addresses it has endpoints.
    pub fn endpoint_names(&self) -> impl Iterator<Item = EndpointName> + '_ {
        let namespace: Arc<str> = self.name.namespace().into();
        let hosts = self.hosts.iter().map(|host| &host.name);
        let hosts = hosts.filter(|_| self.resolution == EntryResolution::Hosts);
        let backends = self
            .backends
            .iter()
            .filter_map(|backend| match &backend.at {
                At::Name(name) => Some(name),
                At::Address(_) => None,
            });
        hosts.chain(backends).map(move |name| EndpointName {
            namespace: Arc::clone(&namespace),
            name: Arc::clone(name),
        })
    }
}

impl Backend {
    /// In place of a port's number: the endpoint does not have the port.
    pub const NO_PORT: u16 = 0;

    /// Its number of a port of the entry: by the port's name, otherwise `targetPort`, otherwise the same number.
    pub fn port_of(&self, port: &EntryPort) -> u16 {
        let own = self.ports.iter().find(|(name, _)| *name == port.name);
        own.map_or(port.target.unwrap_or(port.port), |(_, number)| *number)
    }

    /// An endpoint that is nothing but an address.
    pub fn at(address: IpAddr) -> Self {
        Self {
            at: At::Address(address),
            ports: SmallVec::new(),
            weight: 1,
            local: false,
            hints: Hints::default(),
        }
    }
}

impl Host {
    /// A host without addresses.
    pub fn new(name: Arc<str>) -> Self {
        Self {
            name,
            assigned: SmallVec::new(),
            vips: SmallVec::new(),
            given: SmallVec::new(),
            former: SmallVec::new(),
            endpoints: SmallVec::new(),
        }
    }

    /// The end of the names that a wildcard stands for, such as `.example.com`.
    pub fn wildcard(&self) -> Option<&str> {
        self.name.strip_prefix('*')
    }
}
