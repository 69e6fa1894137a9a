//! The services that an entry becomes.

use std::{
    collections::{BTreeMap, HashSet},
    net::IpAddr,
};

use model::{
    At, Backend, Endpoint, Entry, EntryName, EntryPort, EntryResolution, Hints, Preference,
    Service, ServiceName, ServicePort, ServiceType, Weights,
};
use smallvec::SmallVec;

use super::service_name;

/// Returns the name of the service of a further host of an entry, for entries whose hosts are their own endpoints.
fn host_service_name(entry: &EntryName, host: &str) -> ServiceName {
    let name = format!("serviceentry:{}:{host}", entry.name());
    ServiceName::new(entry.namespace(), &name)
}

/// Returns the services of an entry: one in all, or one for each host if each host is its own endpoint.
pub fn services(entry: &Entry) -> impl Iterator<Item = Service> + '_ {
    let count = match entry.resolution {
        EntryResolution::Hosts => entry.hosts.len().max(1),
        _ => 1,
    };
    (0..count).map(move |index| service(entry, (count > 1).then_some(index)))
}

/// Returns the service of all hosts of an entry, or of the host `only`.
fn service(entry: &Entry, only: Option<usize>) -> Service {
    // Only addresses from this node claim as strongly as cluster IPs, because the author of a `status` can write any
    // address.
    let (mut given, mut others) = (SmallVec::new(), SmallVec::<[IpAddr; 0]>::new());
    let hosts = match only {
        Some(index) => &entry.hosts[index..=index],
        None => &entry.hosts[..],
    };
    let mut seen = HashSet::new();
    for host in hosts {
        for vip in &host.given {
            if seen.insert(*vip) {
                given.push(*vip);
            }
        }
        let assigned = host.vips.iter().filter(|vip| !host.given.contains(vip));
        others.extend(assigned.chain(&host.former).copied());
    }
    let is_first = only.is_none_or(|index| index == 0);
    let own = entry.addresses.iter().chain(&entry.ranges);
    others.extend(own.filter(|_| is_first).copied());
    let name = match hosts.first() {
        Some(host) if !is_first => host_service_name(&entry.name, &host.name),
        _ => service_name(&entry.name),
    };
    // The host's own addresses, or the endpoints of all hosts.
    let own: Vec<Backend>;
    let backends = if entry.resolution == EntryResolution::Hosts {
        let endpoints = hosts.iter().flat_map(|host| &host.endpoints);
        own = endpoints.map(|address| Backend::at(*address)).collect();
        &own
    } else {
        &entry.backends
    };
    others.sort_unstable();
    others.dedup();
    Service {
        created: entry.created,
        cluster_ips: given,
        external_ips: others,
        identities: entry.identities.clone(),
        ports: entry
            .ports
            .iter()
            .map(|port| service_port(entry, backends, port))
            .collect(),
        ..Service::new(name, ServiceType::Entry)
    }
}

fn service_port(entry: &Entry, backends: &[Backend], port: &EntryPort) -> ServicePort {
    let [own, of_namespace] = entry.preference;
    let preference = own.or(of_namespace).unwrap_or(Preference::Any);
    let mut found: BTreeMap<(IpAddr, u16), (u32, bool, Hints)> = BTreeMap::new();
    for backend in backends {
        let number = backend.port_of(port);
        if let At::Address(addr) = backend.at
            && number != Backend::NO_PORT
        {
            let (weight, local, hints) = found.entry((addr, number)).or_default();
            *weight = weight.saturating_add(backend.weight);
            *local |= backend.local;
            *hints = backend.hints.max(*hints);
        }
    }
    let endpoint =
        |(&(addr, port), &(_, local, hints)): (&(IpAddr, u16), &(u32, bool, Hints))| Endpoint {
            local,
            hints: hints.preferring(preference, local),
            ..Endpoint::new(addr, port)
        };
    ServicePort {
        name: port.name.clone(),
        endpoints: found.iter().map(endpoint).collect(),
        weights: Weights::of(found.values().map(|(weight, ..)| *weight).collect()),
        ..ServicePort::new(port.port, port.protocol)
    }
}
