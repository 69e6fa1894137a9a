//! Services and their slices.

use std::{collections::HashMap, net::IpAddr, sync::Arc};

use super::Slice;
use crate::model::{Endpoint, NamedProtocol, Preference, Published, Records, Service, Weights};

/// Gives each port of a service the endpoints that its slices have for it: by name and protocol. `names`: whether its
/// endpoints get names in DNS.
///
/// An endpoint may be in two slices for a moment, while the controller moves it between them. Then
/// it is one endpoint, and the better conditions hold: ready before not, as for kube-proxy.
///
/// The slices of a headless service, and of one that is left to another proxy, have endpoints in DNS only.
///
/// `selected`: the WorkloadEntries that it selects. Only clients of its VIPs know them: the cluster's DNS does not have them.
/// `preference`: what its clients prefer, if a control plane does not say it by hints.
pub fn join(
    service: &mut Service,
    slices: &[Slice],
    selected: &[Slice],
    names: bool,
    preference: Preference,
) {
    if let Records::Object(named) = &mut service.records {
        named.endpoints = if names {
            published(slices)
        } else {
            Box::default()
        };
    }
    for port in &mut service.ports {
        let matching = || {
            let slices = slices.iter().chain(selected);
            let slices = slices.filter(|slice| !slice.names_only);
            slices.flat_map(|slice| {
                let numbers = slice.ports.iter().filter(|of| {
                    of.name == port.name && of.protocol == NamedProtocol::from(port.protocol)
                });
                numbers.map(move |of| (slice, of.number))
            })
        };
        let mut endpoints =
            Vec::with_capacity(matching().map(|(slice, _)| slice.endpoints.len()).sum());
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
            // Of an endpoint that is here by one slice and nowhere by another, the first is true.
            kept.local |= same && next.local;
            same
        });
        endpoints.shrink_to_fit();
        let weighted = matching().filter(|(slice, _)| slice.weight > 1);
        let weighted: HashMap<(IpAddr, u16), u32> = weighted
            .flat_map(|(slice, number)| {
                let endpoints = slice.endpoints.iter();
                endpoints.map(move |e| ((e.addr, number), slice.weight))
            })
            .collect();
        let weight = |e: &Endpoint| weighted.get(&(e.addr, e.port)).copied().unwrap_or(1);
        port.weights = (!weighted.is_empty())
            .then(|| Weights::of(endpoints.iter().map(weight).collect()))
            .flatten();
        port.endpoints = endpoints;
    }
}

/// The ready endpoints of all slices. Endpoints of one address are several if their hostnames or ports differ: pods of the
/// host's network.
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
