//! Endpoints of entries that are names of Services. The Service's endpoints answer for the name, without a second
//! translation at the Service's own address.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use imbl::OrdMap;
use model::{
    ADDRESSES_MAX, At, Backend, EntryPort, Service, ServiceName, ServicePort, ServiceType,
};

/// The Services of the cluster.
pub(super) type Services = OrdMap<ServiceName, Arc<Service>>;

/// Returns the Service that a DNS name stands for: `SERVICE.NAMESPACE.svc`, with or without the cluster's domain.
pub(super) fn service(name: &str, domain: &str) -> Option<ServiceName> {
    let below = name.strip_suffix(domain).filter(|_| !domain.is_empty());
    let below = below.and_then(|below| below.strip_suffix('.'));
    let below = below.unwrap_or(name).strip_suffix(".svc")?;
    let (service, namespace) = below.split_once('.')?;
    (!namespace.contains('.')).then(|| ServiceName::new(namespace, service))
}

/// Returns the ready endpoints of a Service for the ports of an entry. `backend` is the entry's own endpoint, which has
/// the Service's name.
///
/// # Errors
///
/// The reason why the Service has no endpoint for the entry, as a clause.
pub(super) fn endpoints(
    name: &ServiceName,
    services: &Services,
    backend: &Backend,
    ports: &[EntryPort],
) -> Result<Vec<Backend>, String> {
    let service = services.get(name).filter(|service| {
        !matches!(
            service.kind,
            ServiceType::HostPort | ServiceType::Entry | ServiceType::ExternalName
        )
    });
    let Some(service) = service else {
        return Err(format!("there is no Service {name} with endpoints"));
    };
    if service.records.is_headless() {
        // A client connects to the addresses of a headless Service at any port.
        let published = service.records.published().iter().map(|of| of.addr);
        // Pods in the host's network share one address.
        let addresses: BTreeSet<IpAddr> = published.collect();
        let backends = addresses.into_iter().take(ADDRESSES_MAX);
        let backends = backends.map(|address| Backend {
            at: At::Address(address),
            ..backend.clone()
        });
        return Ok(backends.collect());
    }
    let meant = ports.iter().map(|port| {
        let number = backend.port_of(port);
        let mut of_service = service.ports.iter();
        of_service.find(|of| of.port == number && of.protocol == port.protocol)
    });
    let meant: Vec<Option<&ServicePort>> = meant.collect();
    let ready = |port: &&'_ ServicePort| {
        let endpoints = port.endpoints.iter().filter(|endpoint| endpoint.ready);
        endpoints.copied().collect::<Vec<_>>()
    };
    let mut known: BTreeMap<IpAddr, bool> = BTreeMap::new();
    for endpoint in meant.iter().flatten().flat_map(ready) {
        *known.entry(endpoint.addr).or_default() |= endpoint.local;
    }
    let number = |of: Option<&ServicePort>, address: IpAddr| {
        let endpoints = of.iter().flat_map(ready);
        let mut endpoints = endpoints.filter(|endpoint| endpoint.addr == address);
        endpoints
            .next()
            .map_or(Backend::NO_PORT, |endpoint| endpoint.port)
    };
    let known = known.into_iter().take(ADDRESSES_MAX);
    let endpoints = known.map(|(address, local)| Backend {
        at: At::Address(address),
        ports: ports
            .iter()
            .zip(&meant)
            .map(|(port, of)| (port.name.clone(), number(*of, address)))
            .collect(),
        weight: backend.weight,
        local,
        hints: backend.hints,
    });
    Ok(endpoints.collect())
}

#[cfg(test)]
mod tests {
    use model::{Endpoint, EntryPort, Named, Protocol, Published, Records};

    use super::*;

    /// An endpoint of two ports is on this node if it is so at one of them.
    #[test]
    fn a_ready_endpoint_of_a_service_has_a_number_at_each_port_that_it_has() {
        let endpoint = |host, port, local, ready| Endpoint {
            local,
            ready,
            ..Endpoint::new([10, 0, 0, host].into(), port)
        };
        let port = |number, endpoints: &[Endpoint]| ServicePort {
            endpoints: endpoints.to_vec(),
            ..ServicePort::new(number, Protocol::Tcp)
        };
        let name = ServiceName::new("shop", "db");
        let service = Service {
            ports: [
                port(
                    80,
                    &[
                        endpoint(1, 8080, false, true),
                        endpoint(2, 8080, true, true),
                        endpoint(3, 8080, true, false),
                    ],
                ),
                port(
                    81,
                    &[
                        endpoint(1, 8081, false, true),
                        endpoint(2, 8081, false, true),
                    ],
                ),
                port(82, &[endpoint(4, 8082, true, true)]),
            ]
            .into_iter()
            .collect(),
            ..Service::new(name.clone(), ServiceType::ClusterIp)
        };
        let services = [(name.clone(), Arc::new(service))].into_iter().collect();
        let ports = ["80", "81"].map(|name| EntryPort {
            name: name.into(),
            port: name.parse().unwrap(),
            protocol: Protocol::Tcp,
            target: None,
        });
        let backend = Backend::at([192, 0, 2, 1].into());
        let found = endpoints(&name, &services, &backend, &ports).unwrap();
        let found = found.iter().map(|of| {
            let numbers = ports.each_ref().map(|port| of.port_of(port));
            (of.at.clone(), numbers, of.local)
        });
        let at = |host| At::Address([10, 0, 0, host].into());
        let wanted = [(at(1), [8080, 8081], false), (at(2), [8080, 8081], true)];
        assert_eq!(found.collect::<Vec<_>>(), wanted);
    }

    #[test]
    fn a_headless_service_has_each_address_once() {
        let name = ServiceName::new("shop", "db");
        let published = |host| Published {
            addr: [10, 0, 0, host].into(),
            hostname: "".into(),
            ports: Arc::default(),
        };
        let named = Named {
            headless: true,
            endpoints: [1, 1, 2].map(published).into(),
            ..Named::default()
        };
        let service = Service {
            records: Records::Object(named.into()),
            ..Service::new(name.clone(), ServiceType::ClusterIp)
        };
        let services = [(name.clone(), Arc::new(service))].into_iter().collect();
        let backend = Backend::at([192, 0, 2, 1].into());
        let found = endpoints(&name, &services, &backend, &[]).unwrap();
        let found: Vec<_> = found.into_iter().map(|of| of.at).collect();
        assert_eq!(
            found,
            [1, 2].map(|host| At::Address([10, 0, 0, host].into()))
        );
    }
}
