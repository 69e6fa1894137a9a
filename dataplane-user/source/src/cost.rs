//! The cost of a change of an object, roughly in keys, endpoints and addresses.

use model::{ADDRESSES_MAX, At, Entry, EntryResolution, Records, Service};

/// Returns the cost to add or remove a service: its keys, and its endpoints once for each port.
pub fn of_service(service: &Service) -> u64 {
    let own = service.cluster_ips.len() + service.external_ips.len();
    let addresses = own + service.load_balancer_ips.len() + 1;
    let ports = service.ports.iter();
    let cost: usize = ports.map(|port| addresses + port.endpoints.len()).sum();
    let named = match &service.records {
        Records::Object(named) => named.endpoints.len(),
        Records::ClusterIps | Records::Alias(_) => 0,
    };
    (cost + named + service.source_ranges.len()) as u64
}

/// Returns the cost to add or remove an entry.
pub fn of_entry(entry: &Entry) -> u64 {
    let addresses = entry.addresses.len() + entry.ranges.len() + 2 * entry.hosts.len();
    let at = entry.backends.iter().map(|backend| match backend.at {
        At::Address(_) => 1,
        At::Name(_) => ADDRESSES_MAX,
    });
    let of_hosts = match entry.resolution {
        EntryResolution::Hosts => entry.hosts.len() * ADDRESSES_MAX,
        _ => 0,
    };
    let endpoints = at.sum::<usize>() + of_hosts;
    (entry.ports.len().max(1) * (addresses + endpoints)) as u64
}
