//! Serves one entry: decides which of its addresses it may have, and replaces its services.

use std::{collections::HashSet, iter, net::IpAddr, sync::Arc};

use model::{
    Entry, EntryName, EntryResolution, Gravity, Problem, Service, ServiceName, is_allocated,
};
use smallvec::SmallVec;

use super::{
    super::vips::HostName,
    Entries,
    given::{host_name, may_have_number},
    is_served,
    service::services,
};

impl Entries {
    /// Serves an entry in its present state. Returns the parts that are not served.
    pub(super) fn serve(&mut self, entry: &Entry, now: u64) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut problem = |text: String| {
            problems.push(Problem {
                gravity: Gravity::Warning,
                place: format!("ServiceEntry {}", entry.name),
                text,
            });
        };
        let mut entry = entry.clone();
        for text in self.names.fill(&mut entry, &self.base) {
            problem(text);
        }
        if is_served(&entry) {
            let allowed = |address: &IpAddr| self.allowed(*address);
            let mut refuse = |field: &str, address: &IpAddr| match allowed(address) {
                Ok(()) => true,
                Err(why) => {
                    problem(format!("{field}: {address} is not served: {why}"));
                    false
                }
            };
            entry
                .addresses
                .retain(|address| refuse("spec.addresses", address));
            entry
                .ranges
                .retain(|address| refuse("spec.addresses", address));
            for index in 0..entry.hosts.len() {
                let mut vips = SmallVec::new();
                for address in self.assigned(&entry, &entry.hosts[index]) {
                    match address {
                        Ok(address) => vips.push(address),
                        Err((address, why)) => {
                            problem(format!("status.addresses: {address} is not served: {why}"));
                        }
                    }
                }
                let name = host_name(&entry, &entry.hosts[index]);
                if vips.is_empty() && may_have_number(&entry, &entry.hosts[index]) {
                    match self.vips.number(&name) {
                        Some(number) => {
                            vips = number.addresses().into();
                            entry.hosts[index].given = number.addresses().into();
                        }
                        None if self.vips.is_deferred(&name) => {}
                        None => problem(self.without_number(&name, index)),
                    }
                }
                entry.hosts[index].vips = vips;
            }
            self.note_former(&mut entry, now);
            let services: Vec<Service> = services(&entry).collect();
            for (index, host) in entry.hosts.iter_mut().enumerate() {
                // Each host has a service of its own, or all hosts have the first service.
                let service = services.get(index).unwrap_or(&services[0]);
                if host.vips.is_empty() && (index == 0 || services.len() == 1) {
                    host.vips.extend(entry.addresses.iter().copied());
                }
                let families = families(service);
                if families.contains(&true) {
                    host.vips
                        .retain(|vip| families[usize::from(!vip.is_ipv4())]);
                }
            }
            let has_vips = |service: &Service| {
                !service.cluster_ips.is_empty() || !service.external_ips.is_empty()
            };
            self.put(&entry.name, services.into_iter().filter(has_vips));
        } else {
            self.put(&entry.name, iter::empty());
            if entry.resolution == EntryResolution::None {
                // Clients connect to these addresses directly, without translation.
                for host in &mut entry.hosts {
                    host.vips = entry.addresses.iter().copied().collect();
                }
            }
        }
        let known = self.served.get(&entry.name);
        if known.is_none_or(|known| **known != entry) {
            self.served.insert(entry.name.clone(), Arc::new(entry));
        }
        problems
    }

    /// Checks whether an entry may have an address. The error is the reason.
    pub(super) fn allowed(&self, address: IpAddr) -> Result<(), &'static str> {
        let holders = self.taken.get(&address).copied().unwrap_or_default();
        if self.own.contains(&address) {
            Err("it is an address of this node")
        } else if holders.owners > 0 {
            Err("a Service, a Pod or the API server has it")
        } else if self.pods.has(address) {
            Err("a Pod or a node has it")
        } else if holders.endpoints == 0 || is_allocated(address) {
            Ok(())
        } else if !self.has_stated {
            Err(
                "an endpoint of a Service has it; if it is an external IP, add its range to node.externalIPs",
            )
        } else if !self.pods.everywhere {
            Err(
                "an endpoint of a Service has it, and the endpoint may be a Pod: the agent does not know the Pods of all nodes",
            )
        } else {
            Ok(())
        }
    }

    /// Returns the reason why a host has no address.
    fn without_number(&self, host: &HostName, index: usize) -> String {
        let why = if self.vips.is_over(host) {
            "its namespace has more hosts than it may have of the 65521 addresses that there are; name fewer hosts"
        } else {
            "none of the 65521 addresses is free; it gets one when some time has passed"
        };
        format!("spec.hosts[{index}]: {} has no address: {why}", host.host)
    }

    /// Replaces the services of an entry.
    fn put(&mut self, entry: &EntryName, services: impl Iterator<Item = Service>) {
        let mut names = SmallVec::new();
        for service in services {
            let name = service.name.clone();
            if self
                .services
                .get(&name)
                .is_none_or(|known| **known != service)
            {
                self.services.insert(name.clone(), Arc::new(service));
            }
            names.push(name);
        }
        let now: HashSet<&ServiceName> = names.iter().collect();
        for name in self.made.remove(entry).unwrap_or_default() {
            if !now.contains(&name) {
                self.services.remove(&name);
            }
        }
        if !names.is_empty() {
            self.made.insert(entry.clone(), names);
        }
    }

    /// Removes an entry and its services.
    pub(super) fn forget(&mut self, entry: &EntryName) {
        self.put(entry, iter::empty());
        self.served.remove(entry);
    }
}

/// Returns whether a service has endpoints of IPv4 and of IPv6.
fn families(service: &Service) -> [bool; 2] {
    [true, false].map(|v4| {
        let mut endpoints = service.ports.iter().flat_map(|port| &port.endpoints);
        endpoints.any(|endpoint| endpoint.addr.is_ipv4() == v4)
    })
}
