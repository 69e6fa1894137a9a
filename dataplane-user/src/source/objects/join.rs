//! Services and their slices.

use std::sync::Arc;

use super::Slice;
use crate::model::{Endpoint, Published, PublishedPort, Records, Service};

/// Gives each port of a service the endpoints that its slices have for it: by name and protocol.
///
/// An endpoint may be in two slices for a moment, while the controller moves it between them. Then
/// it is one endpoint, and the better conditions hold: ready before not, as for kube-proxy.
///
/// The slices of a headless service have endpoints in DNS only.
pub fn join(service: &mut Service, slices: &[Slice]) {
    if let Records::Endpoints { endpoints, .. } = &mut service.records {
        *endpoints = published(slices);
    }
    for port in &mut service.ports {
        let matching = || {
            let slices = slices.iter().filter(|slice| !slice.headless);
            slices.flat_map(|slice| {
                let numbers = slice
                    .ports
                    .iter()
                    .filter(|(name, protocol, _)| *name == port.name && *protocol == port.protocol);
                numbers.map(move |(_, _, number)| (slice, *number))
            })
        };
        let mut endpoints =
            Vec::with_capacity(matching().map(|(slice, _)| slice.endpoints.len()).sum());
        for (slice, number) in matching() {
            endpoints.extend(
                slice
                    .endpoints
                    .iter()
                    .map(|e| Endpoint { port: number, ..*e }),
            );
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
        port.endpoints = endpoints;
    }
}

/// The endpoints of a headless service, by all of its slices. Of an endpoint in two of them, the ready one counts, and
/// the ports of that one.
fn published(slices: &[Slice]) -> Box<[Published]> {
    let mut all: Vec<Published> = Vec::new();
    for slice in slices {
        let ports: Arc<[PublishedPort]> = slice.ports.iter().cloned().collect();
        all.extend(slice.endpoints.iter().map(|endpoint| {
            let named = slice
                .hostnames
                .binary_search_by_key(&endpoint.addr, |(addr, _)| *addr);
            Published {
                addr: endpoint.addr,
                hostname: named
                    .map(|at| slice.hostnames[at].1.clone())
                    .unwrap_or_default(),
                ready: endpoint.ready,
                ports: Arc::clone(&ports),
            }
        }));
    }
    all.sort_by(|a, b| {
        let key = |of: &Published| (of.addr, !of.ready);
        key(a).cmp(&key(b))
    });
    all.dedup_by_key(|published| published.addr);
    all.into()
}
