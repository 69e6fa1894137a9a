//! Endpoints of entries at addresses of DNS names.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use model::{
    At, Backend, EndpointName, Entry, EntryName, EntryResolution, Resolved, ServiceName, lcm,
    narrowed,
};

use super::cluster::{self, Services};

/// Maximum number of names of one entry whose problems are listed.
const TOLD: usize = 4;

/// DNS names of entries' endpoints, and their addresses.
#[derive(Debug, Default)]
pub(super) struct Names {
    known: HashMap<EndpointName, Resolved>,
    /// The needed names, each with the entries that need it.
    wanted: BTreeMap<EndpointName, BTreeSet<EntryName>>,
    /// Whether the set of names has changed.
    others: bool,
    /// Whether the names are looked up.
    are_resolved: bool,
    /// The cluster's domain. Names below it are not looked up, because the services are known.
    domain: Arc<str>,
    /// The entries that have the name of a Service as an endpoint.
    of_services: BTreeMap<ServiceName, BTreeSet<EntryName>>,
}

impl Names {
    /// Makes the agent look up names. `known`: their last known addresses.
    pub fn resolved(known: HashMap<EndpointName, Resolved>) -> Self {
        Self {
            known,
            are_resolved: true,
            ..Self::default()
        }
    }

    /// Sets the cluster's domain, before any entry is added.
    pub fn set_domain(&mut self, domain: &Arc<str>) {
        self.domain = Arc::clone(domain);
    }

    /// Returns the entries that have the name of a Service as an endpoint.
    pub fn of_service(&self, service: &ServiceName) -> impl Iterator<Item = &EntryName> {
        self.of_services.get(service).into_iter().flatten()
    }

    /// Returns the Service that the name of an endpoint stands for.
    fn service(&self, entry: &Entry, name: &str) -> Option<ServiceName> {
        let is_endpoint = entry.resolution != EntryResolution::Hosts;
        cluster::service(name, &self.domain).filter(|_| is_endpoint)
    }

    /// Adds the names of an entry, or removes them.
    pub fn note(&mut self, entry: &Entry, is_there: bool) {
        for name in entry.endpoint_names() {
            if let Some(service) = self.service(entry, &name.name) {
                let of = self.of_services.entry(service.clone()).or_default();
                if is_there {
                    of.insert(entry.name.clone());
                } else {
                    of.remove(&entry.name);
                    if of.is_empty() {
                        self.of_services.remove(&service);
                    }
                }
            } else if is_there {
                let wanting = self.wanted.entry(name).or_default();
                self.others |= wanting.is_empty();
                wanting.insert(entry.name.clone());
            } else if let Some(wanting) = self.wanted.get_mut(&name) {
                wanting.remove(&entry.name);
                if wanting.is_empty() {
                    self.wanted.remove(&name);
                    self.others = true;
                }
            }
        }
    }

    /// Returns the needed names, if they have changed since the last call.
    pub fn take_wanted(&mut self) -> Option<Vec<EndpointName>> {
        if !std::mem::take(&mut self.others) {
            return None;
        }
        // Addresses of other names would be old when an entry needs the names again.
        let wanted = &self.wanted;
        self.known.retain(|name, _| wanted.contains_key(name));
        Some(self.wanted.keys().cloned().collect())
    }

    /// Returns the addresses of names, including names that no entry has needed yet.
    pub const fn known(&self) -> &HashMap<EndpointName, Resolved> {
        &self.known
    }

    /// Records the addresses of a name. Returns the entries that they change.
    pub fn learn(&mut self, name: EndpointName, resolved: Resolved) -> Vec<EntryName> {
        let Some(concerned) = self.wanted.get(&name) else {
            return Vec::new();
        };
        if self.known.get(&name) == Some(&resolved) {
            return Vec::new();
        }
        self.known.insert(name, resolved);
        concerned.iter().cloned().collect()
    }

    /// Replaces the names in an entry by their addresses, or the names of Services by the Services' endpoints. Returns
    /// the names' problems.
    pub fn fill(&self, entry: &mut Entry, services: &Services) -> Vec<String> {
        let mut problems: BTreeSet<String> = BTreeSet::new();
        let namespace: Arc<str> = entry.name.namespace().into();
        let mut look = |field: &str, name: &Arc<str>| {
            let name = EndpointName {
                namespace: Arc::clone(&namespace),
                name: Arc::clone(name),
            };
            let known = self.known.get(&name);
            let problem = known.and_then(|known| known.problem.as_deref());
            if !self.are_resolved {
                problems.insert(format!(
                    "{field}: {name} has no endpoints here, because only the agent resolves names"
                ));
            } else if let Some(problem) = problem {
                problems.insert(format!("{field}: {name}: {problem}"));
            }
            known.map(|known| Arc::clone(&known.addresses))
        };
        if entry.resolution == EntryResolution::Hosts {
            for host in &mut entry.hosts {
                let found = look("spec.hosts", &host.name);
                host.endpoints = found
                    .iter()
                    .flat_map(|found| found.iter().copied())
                    .collect();
            }
        }
        let is_name = |backend: &Backend| matches!(backend.at, At::Name(_));
        if entry.backends.iter().any(is_name) {
            let mut of_services = Vec::new();
            let found = entry.backends.iter().map(|backend| match &backend.at {
                At::Address(_) => vec![backend.clone()],
                At::Name(name) => {
                    if let Some(service) = self.service(entry, name) {
                        let found = cluster::endpoints(&service, services, backend, &entry.ports);
                        let problem =
                            |why| of_services.push(format!("spec.endpoints: {name}: {why}"));
                        return found.map_err(problem).unwrap_or_default();
                    }
                    let found = look("spec.endpoints", name);
                    let found = found.iter().flat_map(|found| found.iter());
                    let found = found.map(|address| Backend {
                        at: At::Address(*address),
                        ..backend.clone()
                    });
                    found.collect()
                }
            });
            // A name without addresses is like an endpoint that is not ready.
            let found = found
                .filter(|endpoints| !endpoints.is_empty())
                .collect::<Vec<_>>();
            // The addresses of a name share its part of the connections.
            let common = found
                .iter()
                .fold(1, |common, endpoints| lcm(common, endpoints.len() as u128));
            let weights: Vec<u128> = found
                .iter()
                .flat_map(|endpoints| {
                    let share = common / endpoints.len() as u128;
                    let endpoints = endpoints.iter();
                    endpoints.map(move |endpoint| u128::from(endpoint.weight) * share)
                })
                .collect();
            let weights = narrowed(&weights, weights.len());
            let all = found.into_iter().flatten().zip(weights);
            let mut filled: Vec<Backend> = all
                .map(|(endpoint, weight)| Backend { weight, ..endpoint })
                .collect();
            problems.extend(of_services);
            filled.sort_unstable();
            entry.backends = filled;
        }
        let more = problems.len().saturating_sub(TOLD);
        let mut problems: Vec<String> = problems.into_iter().take(TOLD).collect();
        if more > 0 {
            problems.push(format!("and {more} more names of endpoints"));
        }
        problems
    }
}
