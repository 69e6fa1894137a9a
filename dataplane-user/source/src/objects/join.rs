//! Joins Services and their slices.

use std::{collections::HashMap, net::IpAddr, sync::Arc};

use model::{
    Endpoint, NamedProtocol, Preference, Problem, Published, Records, Service, ServiceName,
    ServicePort, Weights,
};

use super::{Slice, Sums};

/// Maximum number of endpoints of all Services of one namespace, each counted for each port that has it. Slices name an
/// endpoint once for all their ports, so without a bound some megabytes of slices would become gigabytes of endpoints.
const ENDPOINTS_MAX: usize = 1_000_000;

/// Gives Services their endpoints, as many as their namespace may have.
#[derive(Debug)]
pub struct Joins(Sums);

/// The objects from which a Service gets its endpoints.
#[derive(Clone, Copy, Debug)]
pub struct Sources<'a> {
    /// Its EndpointSlices. Slices of a headless service, and of a service of another proxy, have endpoints only in DNS.
    pub slices: &'a [Slice],
    /// The WorkloadEntries that it selects. Only clients of its VIPs reach them: the cluster's DNS does not have them.
    pub selected: &'a [Slice],
    /// Whether its endpoints get names in DNS.
    pub names: bool,
    /// The preference of its clients, if a control plane does not set hints.
    pub preference: Preference,
}

impl Default for Joins {
    fn default() -> Self {
        Self(Sums::new("Service", ENDPOINTS_MAX))
    }
}

impl Joins {
    /// Gives a service its endpoints, or none if its namespace has too many. DNS has their names in both cases.
    pub fn join(&mut self, service: &mut Service, sources: Sources<'_>) {
        if let Records::Object(named) = &mut service.records {
            named.endpoints = if sources.names {
                published(sources.slices)
            } else {
                Box::default()
            };
        }
        let by_port = ByPort::of(sources);
        let ports = service.ports.iter();
        let size = ports.map(|port| by_port.most_endpoints(port)).sum();
        let most = self.0.most();
        let why = || {
            format!(
                "has none of its endpoints, so connections to it are refused: the Services of its namespace have more than \
                 {most} endpoints together, each counted for each port; it has {size}. Use fewer ports or endpoints"
            )
        };
        if self.0.put(&service.name, size, why) {
            join(service, &by_port, sources.preference);
        } else {
            for port in &mut service.ports {
                (port.endpoints, port.weights) = (Vec::new(), None);
            }
        }
    }

    /// Removes a service.
    pub fn remove(&mut self, name: &ServiceName) {
        self.0.remove(name);
    }

    /// Returns services without endpoints for which there may be room since the last call.
    pub fn take_hopeful(&mut self) -> Vec<ServiceName> {
        self.0.take_hopeful()
    }

    /// Reports services that have none of their endpoints.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.0.problems()
    }
}

/// The slices by name and protocol of their ports, with the number of the port. Sorted, because a comparison of each
/// port of a Service with each port of its slices would take too long for thousands of ports.
struct ByPort<'a>(Vec<(PortName<'a>, &'a Slice, u16)>);

type PortName<'a> = (&'a str, NamedProtocol);

impl<'a> ByPort<'a> {
    fn of(sources: Sources<'a>) -> Self {
        let slices = sources.slices.iter().chain(sources.selected);
        let slices = slices.filter(|slice| !slice.names_only);
        let ports = slices.flat_map(|slice| {
            let ports = slice.ports.iter();
            ports.map(move |of| ((&*of.name, of.protocol), slice, of.number))
        });
        let mut all: Vec<_> = ports.collect();
        // The sort is stable, so the slices of one port stay in order.
        all.sort_by_key(|(port, ..)| *port);
        Self(all)
    }

    /// Returns the slices with endpoints for a port, each with its number for the port.
    fn slices(&self, port: &ServicePort) -> impl Iterator<Item = (&'a Slice, u16)> {
        let wanted: PortName<'_> = (&port.name, port.protocol.into());
        let start = self.0.partition_point(|(of, ..)| *of < wanted);
        let len = self.0[start..].partition_point(|(of, ..)| *of == wanted);
        let slices = self.0[start..start + len].iter();
        slices.map(|(_, slice, number)| (*slice, *number))
    }

    /// Returns the maximum number of endpoints of a port, reached if no endpoint is in two slices.
    fn most_endpoints(&self, port: &ServicePort) -> usize {
        let slices = self.slices(port);
        slices.map(|(slice, _)| slice.endpoints.len()).sum()
    }
}

/// Gives each port of a service the endpoints of its slices, by name and protocol.
///
/// While the controller moves an endpoint, it may be in two slices for a moment. It is then one endpoint with the
/// better conditions, ready before not ready, as for kube-proxy.
fn join(service: &mut Service, by_port: &ByPort<'_>, preference: Preference) {
    for port in &mut service.ports {
        let matching = || by_port.slices(port);
        let mut endpoints = Vec::with_capacity(by_port.most_endpoints(port));
        for (slice, number) in matching() {
            endpoints.extend(slice.endpoints.iter().map(|e| Endpoint {
                port: number,
                hints: e.hints.preferring(preference, e.local),
                ..*e
            }));
        }
        endpoints.sort_unstable_by_key(|e: &Endpoint| {
            (
                e.addr,
                e.port,
                !e.ready,
                !e.serving,
                e.terminating,
                !e.local,
                e.hints,
            )
        });
        endpoints.dedup_by(|next, kept| {
            let same = (next.addr, next.port) == (kept.addr, kept.port);
            // The endpoint is local if any slice says so.
            kept.local |= same && next.local;
            same
        });
        endpoints.shrink_to_fit();
        // As a ServiceEntry's: WorkloadEntries of one address have the sum of their weights.
        let mut weighted = HashMap::<(IpAddr, u16), u32>::new();
        for (slice, number) in matching() {
            let Some(weight) = slice.weight else {
                continue;
            };
            for endpoint in &slice.endpoints {
                let sum = weighted.entry((endpoint.addr, number)).or_default();
                *sum = sum.saturating_add(weight);
            }
        }
        let weight = |e: &Endpoint| weighted.get(&(e.addr, e.port)).copied().unwrap_or(1);
        port.weights = weighted
            .values()
            .any(|weight| *weight > 1)
            .then(|| Weights::of(endpoints.iter().map(weight).collect()))
            .flatten();
        port.endpoints = endpoints;
    }
}

/// Returns the ready endpoints of all slices. Endpoints with one address and different hostnames or ports are
/// different: they are pods in the host's network.
fn published(slices: &[Slice]) -> Box<[Published]> {
    let mut all: Vec<Published> = Vec::new();
    for slice in slices {
        let ports: Arc<[_]> = slice.ports.iter().cloned().collect();
        let names = slice
            .hostnames
            .iter()
            .map(Some)
            .chain(std::iter::repeat(None));
        let ready = slice.endpoints.iter().zip(names).filter(|(of, _)| of.ready);
        all.extend(ready.map(|(endpoint, hostname)| Published {
            addr: endpoint.addr,
            hostname: hostname.cloned().unwrap_or_default(),
            ports: Arc::clone(&ports),
        }));
    }
    all.sort_unstable();
    all.dedup();
    all.into()
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use model::Node;
    use serde_json::json;
    use threads::computed;

    use super::*;
    use crate::objects::{self, Findings, Outcome};

    /// Returns a Service with `ports` ports, and a slice with `endpoints` endpoints for each of them.
    fn service(name: &str, ports: u32, endpoints: u8) -> (Service, Slice) {
        let named = |number: u32| json!({ "name": format!("p{number}"), "port": 1000 + number });
        let ports: Vec<_> = (0..ports).map(named).collect();
        let addresses = (1..=endpoints).map(|n| IpAddr::from(Ipv4Addr::new(10, 1, 0, n)));
        let endpoints: Vec<_> = addresses.map(|ip| json!({ "addresses": [ip] })).collect();
        let slice = json!({
            "metadata": {
                "name": name, "namespace": "shop", "labels": { "kubernetes.io/service-name": name },
            },
            "addressType": "IPv4", "endpoints": endpoints, "ports": ports,
        });
        let service = json!({
            "metadata": { "name": name, "namespace": "shop" },
            "spec": { "clusterIP": "10.96.0.1", "ports": ports },
        });
        let mut findings = Findings::default();
        let service = objects::service(serde_json::from_value(service).unwrap(), &mut findings);
        let slice = serde_json::from_value(slice).unwrap();
        let slice = objects::slice(&slice, &Node::default(), &mut findings);
        let (Outcome::Served(service), Outcome::Served(slice)) = (service, slice) else {
            panic!("{findings:?}");
        };
        (service, slice)
    }

    fn sources(slices: &[Slice]) -> Sources<'_> {
        Sources {
            slices,
            selected: &[],
            names: false,
            preference: Preference::Any,
        }
    }

    #[test]
    fn a_service_with_too_many_endpoints_has_none_until_there_is_room() {
        let mut joins = Joins(Sums::new("Service", 50_000));
        let mut has = |name: &str, times: usize| {
            let (mut service, slice) = service(name, 200, 100);
            joins.join(&mut service, sources(&vec![slice; times]));
            let held = service.ports.iter().map(|port| port.endpoints.capacity());
            held.sum::<usize>()
        };
        assert_eq!(has("a", 1), 20_000);
        assert_eq!(has("b", 1), 20_000);
        assert_eq!(has("c", 1), 0, "nothing is expanded");
        // A service that grows beyond the limit frees its former share.
        assert_eq!(has("a", 3), 0);
        let hopeful = joins.take_hopeful();
        assert_eq!(hopeful.len(), 2, "{hopeful:?}");
        let is_said =
            |problem: &Problem| problem.text.contains("more than 50000 endpoints together");
        assert!(joins.problems().all(is_said));
        let (mut third, slice) = service("c", 200, 100);
        joins.join(&mut third, sources(&[slice]));
        assert_eq!(third.ports[0].endpoints.len(), 100);
    }
    #[test]
    fn ports_of_a_service_cost_what_each_costs() {
        let join = |ports: u32| {
            let (mut service, slice) = service("web", ports, 1);
            let slices = vec![slice; 4];
            let start = computed();
            Joins::default().join(&mut service, sources(&slices));
            let took = computed().saturating_sub(start);
            assert!(service.ports.iter().all(|port| port.endpoints.len() == 1));
            took
        };
        // Takes the shortest run, because other processes may use the CPU.
        let shortest = |ports| (0..3).map(|_| join(ports)).min().unwrap_or_default();
        let (few, many) = (shortest(500), shortest(8000));
        assert!(many < few * 60, "{few:?} for 500, {many:?} for 8000");
    }
}
