//! Services and their slices.

use super::Slice;
use crate::model::{Endpoint, Service};

/// Gives each port of a service the endpoints that its slices have for it: by name and protocol.
///
/// An endpoint may be in two slices for a moment, while the controller moves it between them. Then
/// it is one endpoint, and the better conditions hold: ready before not, as for kube-proxy.
pub fn join(service: &mut Service, slices: &[Slice]) {
    for port in &mut service.ports {
        let matching = || {
            slices.iter().flat_map(|slice| {
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
