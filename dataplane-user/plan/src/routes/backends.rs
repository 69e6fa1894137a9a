//! Backends of routes: Services, as far as grants permit, and hosts of ServiceEntries.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use imbl::OrdMap;
use model::{
    BackendRef, BackendTo, Entry, EntryName, ExportTo, Grant, Protocol, RouteKind, RouteName,
    Service, ServiceName, ServicePort, ServiceType,
};

use super::super::{entries, vips::Age};

/// A Service, and the index of its port.
pub type Backend = (Arc<Service>, usize);
/// The reason why a route cannot lead to a backend: Gateway API's name for it, and a sentence.
pub type Refusal = (&'static str, String);

const NOT_FOUND: &str = "BackendNotFound";
const NOT_PERMITTED: &str = "RefNotPermitted";
const UNSUPPORTED: &str = "UnsupportedValue";

/// All possible backends. The cost of a lookup does not grow with their number.
#[derive(Debug, Default)]
pub struct Backends {
    /// The services before routes split them.
    pub services: OrdMap<ServiceName, Arc<Service>>,
    pub entries: OrdMap<EntryName, Arc<Entry>>,
    /// Number of grants for each permission.
    permits: HashMap<Permit, u32>,
    hosts: HashMap<Arc<str>, Named>,
    /// The services of entries that routes lead to.
    made: HashMap<EntryName, Vec<Arc<Service>>>,
    /// The entry that each host resolved to for each namespace, since the last change.
    found: HashMap<(Arc<str>, Box<str>), Option<EntryName>>,
}

/// A permission from a grant.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Permit {
    to: Box<str>,
    from: Box<str>,
    kind: RouteKind,
    /// The Service; `None`: every Service of the namespace.
    service: Option<Box<str>>,
}

/// The entries that name a host.
#[derive(Debug, Default)]
struct Named {
    /// By their own namespace, if they are visible there.
    own: BTreeSet<(Box<str>, Age)>,
    /// Entries that all namespaces see.
    public: BTreeSet<Age>,
    /// Entries that only some namespaces see.
    limited: BTreeSet<Age>,
}

impl Backends {
    /// Adds a grant, or removes it.
    pub fn note_grant(&mut self, grant: &Grant, is_there: bool) {
        for (kind, from) in &grant.from {
            let permit = |service: Option<&Box<str>>| Permit {
                to: grant.name.namespace().into(),
                from: from.clone(),
                kind: *kind,
                service: service.cloned(),
            };
            let permits: Vec<Permit> = match &grant.to {
                None => vec![permit(None)],
                Some(names) => names.iter().map(|name| permit(Some(name))).collect(),
            };
            for permit in permits {
                count(&mut self.permits, permit, is_there);
            }
        }
    }

    /// Adds an entry, or removes it.
    pub fn note_entry(&mut self, entry: &Entry, is_there: bool) {
        self.found.clear();
        self.made.remove(&entry.name);
        let own = entry.name.namespace();
        for host in &entry.hosts {
            let age = Age::of(entry.name.clone(), entry.created);
            let named = self.hosts.entry(Arc::clone(&host.name)).or_default();
            if entry.is_visible_in(own) {
                put(&mut named.own, (own.into(), age.clone()), is_there);
            }
            let others = match entry.export_to {
                ExportTo::All => &mut named.public,
                ExportTo::Namespaces(_) => &mut named.limited,
            };
            put(others, age, is_there);
            if named.public.is_empty() && named.limited.is_empty() {
                self.hosts.remove(&host.name);
            }
        }
    }

    /// Returns whether grants permit routes of a kind and a namespace to lead to a Service.
    pub fn permits(&self, from: &str, kind: RouteKind, service: &ServiceName) -> bool {
        let permit = |service: Option<&str>, to: &str| Permit {
            to: to.into(),
            from: from.into(),
            kind,
            service: service.map(Box::from),
        };
        let to = service.namespace();
        from == to
            || self.permits.contains_key(&permit(None, to))
            || self.permits.contains_key(&permit(Some(service.name()), to))
    }

    /// Returns the backend of a route's reference. `parent`: the Service that the route is attached to.
    pub fn of(
        &mut self,
        parent: &Service,
        route: &RouteName,
        backend: &BackendRef,
    ) -> Result<Backend, Refusal> {
        let service = match &backend.to {
            BackendTo::Invalid(reason, text) => return Err((reason, text.to_string())),
            BackendTo::Service(name) => self.service(parent, route, name)?,
            BackendTo::Host(host) => self.host(host, &route.namespace)?,
        };
        let Some(number) = backend.port else {
            return Err((
                UNSUPPORTED,
                "port is missing; expected a port of the backend".to_owned(),
            ));
        };
        let is_meant = |port: &ServicePort| port.port == number && port.protocol == Protocol::Tcp;
        if let Some(index) = service.ports.iter().position(is_meant) {
            return Ok((service, index));
        }
        let of = match &backend.to {
            BackendTo::Host(host) => format!("the ServiceEntry of host {host}"),
            _ => format!("Service {}", service.name),
        };
        Err((NOT_FOUND, format!("{of} has no TCP port {number}")))
    }

    fn service(
        &self,
        parent: &Service,
        route: &RouteName,
        name: &ServiceName,
    ) -> Result<Arc<Service>, Refusal> {
        if is_exposed(parent) && !self.permits(&route.namespace, route.kind, name) {
            let text = format!(
                "Service {} has node ports or external addresses, and no ReferenceGrant of namespace {} lets {}s of \
                 namespace {} lead to Service {}",
                parent.name,
                name.namespace(),
                route.kind.word(),
                route.namespace,
                name.name()
            );
            return Err((NOT_PERMITTED, text));
        }
        match self.services.get(name).map(|known| (known, known.kind)) {
            None | Some((_, ServiceType::HostPort | ServiceType::Entry)) => {
                Err((NOT_FOUND, format!("there is no Service {name}")))
            }
            Some((_, ServiceType::ExternalName)) => {
                let text =
                    format!("Service {name} is of type ExternalName, which has no endpoints");
                Err((NOT_FOUND, text))
            }
            Some((known, _)) => Ok(Arc::clone(known)),
        }
    }

    fn host(&mut self, host: &Arc<str>, namespace: &str) -> Result<Arc<Service>, Refusal> {
        let Some(entry) = self.entry(host, namespace) else {
            let text =
                format!("no ServiceEntry that namespace {namespace} sees has the host {host}");
            return Err((NOT_FOUND, text));
        };
        if !entries::is_served(&entry) {
            let text = format!(
                "ServiceEntry {}, which has the host {host}, has no ports, or resolution NONE, and so no endpoints",
                entry.name
            );
            return Err((NOT_FOUND, text));
        }
        let at = entry.hosts.iter().position(|of| of.name == *host);
        let made = self.made.entry(entry.name.clone());
        let made = made.or_insert_with(|| entries::services(&entry).map(Arc::new).collect());
        let own = at.and_then(|at| made.get(at)).or(made.first());
        own.map(Arc::clone)
            .ok_or_else(|| (NOT_FOUND, format!("there is no host {host}")))
    }

    /// Returns the entry for a host: an entry of the namespace itself, then the oldest, then the first by name.
    fn entry(&mut self, host: &Arc<str>, namespace: &str) -> Option<Arc<Entry>> {
        let named = self.hosts.get(host)?;
        let entries = &self.entries;
        let known = self.found.entry((Arc::clone(host), namespace.into()));
        let name = known.or_insert_with(|| {
            let own = named.own.range((namespace.into(), Age::first())..);
            let mut own = own.take_while(|(of, _)| **of == *namespace);
            let limited = || {
                let mut limited = named.limited.iter();
                limited.find(|age| {
                    let entry = entries.get(age.entry());
                    entry.is_some_and(|entry| entry.is_visible_in(namespace))
                })
            };
            let first = own.next().map(|(_, age)| age);
            let first = first.or_else(|| named.public.first().into_iter().chain(limited()).min());
            first.map(|age| age.entry().clone())
        });
        entries.get(name.as_ref()?).cloned()
    }
}

/// Returns whether clients outside of the cluster reach a Service. A route would give them access to backends that
/// another namespace may offer to the cluster only. Clients inside reach the backends' Service anyway.
fn is_exposed(service: &Service) -> bool {
    let addresses = service.external_ips.len() + service.load_balancer_ips.len();
    addresses > 0 || service.ports.iter().any(|port| port.node_port.is_some())
}

fn put<T: Ord>(set: &mut BTreeSet<T>, element: T, is_there: bool) {
    if is_there {
        set.insert(element);
    } else {
        set.remove(&element);
    }
}

fn count(permits: &mut HashMap<Permit, u32>, permit: Permit, is_there: bool) {
    if is_there {
        *permits.entry(permit).or_default() += 1;
    } else if let Some(count) = permits.get_mut(&permit) {
        *count -= 1;
        if *count == 0 {
            permits.remove(&permit);
        }
    }
}
