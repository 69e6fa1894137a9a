//! How a route splits the connections to a service's port among the endpoints of its backends.

use std::sync::Arc;

use super::{Endpoint, Service, TrafficPolicy};
use crate::weights;

/// How a port's connections are split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// The route, as people name it.
    pub by: Arc<str>,
    /// The Service as it is without the route.
    pub own: Arc<Service>,
    /// The backends that get a part.
    pub parts: Vec<Part>,
}

/// A backend's part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its part of the connections, of the sum of all; at least 1.
    pub weight: u32,
    /// The backend, and which of its ports; none: there is no such backend, and its part is refused.
    pub backend: Option<(Arc<Service>, usize)>,
}

/// The endpoints among which a port's connections are drawn, with their weights, and the weight of refused connections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shares<'a> {
    /// The endpoints. One that several backends have is there once for each.
    pub endpoints: Vec<(&'a Endpoint, u32)>,
    /// The weight of the backends that have no endpoint to use; 0: none.
    pub refused: u32,
}

impl Split {
    /// The endpoints of one family that may be used. Each backend's part is shared out among its own.
    pub fn shares(&self, v4: bool, policy: TrafficPolicy) -> Shares<'_> {
        let mut found: Vec<(u64, Vec<(&Endpoint, u32)>)> = Vec::new();
        for part in &self.parts {
            let port = part.backend.as_ref();
            let port = port.and_then(|(service, port)| service.ports.get(*port));
            let endpoints = port.map(|port| port.weighted(v4, policy).collect());
            found.push((u64::from(part.weight), endpoints.unwrap_or_default()));
        }
        let sum = |endpoints: &[(&Endpoint, u32)]| -> u64 {
            endpoints.iter().map(|(_, weight)| u64::from(*weight)).sum()
        };
        // Over the least common multiple of the backends' sums, all parts are whole numbers.
        let sums = found.iter().map(|(_, endpoints)| sum(endpoints).max(1));
        let common = sums.fold(1, |all, of| weights::lcm(all, u128::from(of)));
        let mut exact: Vec<u128> = Vec::new();
        let mut refused = 0;
        for (weight, endpoints) in &found {
            let part = u128::from(*weight) * common;
            if endpoints.is_empty() {
                refused += part;
            }
            let of = u128::from(sum(endpoints).max(1));
            exact.extend(
                endpoints
                    .iter()
                    .map(|(_, weight)| part / of * u128::from(*weight)),
            );
        }
        exact.push(refused);
        // An endpoint that several backends have gets the sum of its parts.
        let mut exact = weights::narrowed(&exact, self.parts.len());
        let refused = exact.pop().unwrap_or_default();
        let endpoints = found.into_iter().flat_map(|(_, endpoints)| endpoints);
        Shares {
            endpoints: endpoints
                .zip(exact)
                .map(|((endpoint, _), weight)| (endpoint, weight))
                .collect(),
            refused,
        }
    }

    /// Returns the most slots that the endpoints of one family take, for any selection of ready endpoints. A budget
    /// counts this number.
    pub fn most_places(&self, v4: bool) -> usize {
        let mut weights: Vec<u32> = Vec::new();
        let (mut endpoints, mut common) = (0, Some(1_u128));
        for part in &self.parts {
            weights.push(part.weight);
            let port = part.backend.as_ref();
            let Some(port) = port.and_then(|(service, port)| service.ports.get(*port)) else {
                continue;
            };
            let of_family = port
                .endpoints
                .iter()
                .filter(|e| e.addr.is_ipv4() == v4)
                .count();
            endpoints += of_family;
            // Of so many that are alike, any number may be ready.
            common = common.filter(|_| port.weights.is_none());
            for ready in 2..=of_family as u128 {
                common = common
                    .map(|all| weights::lcm(all, ready))
                    .filter(|all| *all <= u128::from(u16::MAX));
                if common.is_none() {
                    break;
                }
            }
        }
        if endpoints == 0 {
            return 0;
        }
        weights::most_places_of(&weights, endpoints + 1, common)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use proptest::prelude::*;

    use super::*;
    use crate::{Protocol, ServiceName, ServicePort, ServiceType, Weights};

    fn backend(number: u32, ready: &[(bool, u32)], is_weighted: bool) -> Arc<Service> {
        let endpoint = |(n, (ready, _)): (u32, &(bool, u32))| Endpoint {
            ready: *ready,
            serving: *ready,
            ..Endpoint::new(
                Ipv4Addr::from_bits(0x0a00_0000 + number * 256 + n).into(),
                80,
            )
        };
        let weights = ready.iter().map(|(_, weight)| *weight).collect();
        let port = ServicePort {
            endpoints: (0..).zip(ready).map(endpoint).collect(),
            weights: Weights::of(weights).filter(|_| is_weighted),
            ..ServicePort::new(80, Protocol::Tcp)
        };
        Arc::new(Service {
            ports: smallvec::smallvec![port],
            ..Service::new(ServiceName::new("test", "s"), ServiceType::ClusterIp)
        })
    }

    /// The product of four backends' sums of weights has more than 128 bits. Authors of ServiceEntries may write such
    /// weights.
    #[test]
    fn weights_whose_sums_have_a_huge_common_multiple_leave_each_backend_its_part() {
        let sums = [
            [4_294_967_290, 1],
            [4_294_967_278, 1],
            [4_294_967_230, 1],
            [u32::MAX, u32::MAX - 3],
        ];
        let mut parts: Vec<Part> = (0..)
            .zip(sums)
            .map(|(number, weights)| Part {
                weight: 1,
                backend: Some((
                    backend(number, &weights.map(|weight| (true, weight)), true),
                    0,
                )),
            })
            .collect();
        parts.push(Part {
            weight: 1,
            backend: None,
        });
        let split = Split {
            by: "TCPRoute test/r".into(),
            own: backend(0, &[], false),
            parts,
        };
        let shares = split.shares(true, TrafficPolicy::Cluster);
        let of_backends = shares.endpoints.chunks(2);
        let of_backends = of_backends.map(|two| f64::from(two[0].1) + f64::from(two[1].1));
        let all: Vec<f64> = of_backends.chain([f64::from(shares.refused)]).collect();
        let sum: f64 = all.iter().sum();
        for part in &all {
            assert!((part / sum - 0.2).abs() <= 0.001, "{all:?}");
        }
    }

    #[test]
    fn the_parts_of_an_endpoint_that_several_backends_have_can_be_added() {
        let part = |backend: &Arc<Service>| Part {
            weight: 1,
            backend: Some((Arc::clone(backend), 0)),
        };
        let twice = backend(1, &[(true, 1)], false);
        // Its sum is a large prime number.
        let other = backend(2, &[(true, 4_294_967_290), (true, 1)], true);
        let split = Split {
            by: "TCPRoute test/r".into(),
            own: backend(0, &[], false),
            parts: vec![part(&twice), part(&twice), part(&other)],
        };
        let shares = split.shares(true, TrafficPolicy::Cluster);
        let weights: Vec<u32> = shares.endpoints.iter().map(|(_, weight)| *weight).collect();
        let both = weights[0].checked_add(weights[1]).unwrap();
        assert!(
            (f64::from(both) / f64::from(weights[2]) - 2.0).abs() < 0.001,
            "{weights:?}"
        );
    }

    proptest! {
        /// Each backend gets its part, exact to a hundredth, for any number of endpoints. The slots that a budget
        /// counts suffice for any selection of ready endpoints.
        #[test]
        fn parts_are_those_of_backends_and_within_the_budget(
            parts in prop::collection::vec(
                (
                    prop_oneof![1..4u32, 1..101u32, 1..1_000_001u32],
                    prop::collection::vec((any::<bool>(), prop_oneof![1..4u32, 1..5000u32]), 0..12),
                    prop::bool::weighted(0.3),
                ),
                1..8,
            ),
        ) {
            let split = Split {
                by: "TCPRoute test/r".into(),
                own: backend(0, &[], false),
                parts: (0..).zip(&parts).map(|(number, (weight, ready, is_weighted))| Part {
                    weight: *weight,
                    backend: (!ready.is_empty()).then(|| (backend(number, ready, *is_weighted), 0)),
                }).collect(),
            };
            let shares = split.shares(true, TrafficPolicy::Cluster);
            let of = |endpoint: &Endpoint| match endpoint.addr {
                std::net::IpAddr::V4(addr) => Some(addr.octets()[2]),
                std::net::IpAddr::V6(_) => None,
            };
            let mut all: Vec<_> = shares.endpoints.iter().map(|(endpoint, weight)| (of(endpoint), *weight)).collect();
            prop_assume!(!all.is_empty());
            all.extend((shares.refused > 0).then_some((None, shares.refused)));
            let places: Vec<_> = Weights::repeated(&all).collect();
            prop_assert!(places.len() <= split.most_places(true), "{} of {}", places.len(), split.most_places(true));
            let sum: f64 = parts.iter().map(|(weight, ..)| f64::from(*weight)).sum();
            let share = |of: Option<u8>| {
                let count = places.iter().filter(|place| **place == of).count();
                f64::from(u32::try_from(count).unwrap()) / f64::from(u32::try_from(places.len()).unwrap())
            };
            let mut refused = 0.0;
            for (number, (weight, ready, _)) in (0..).zip(&parts) {
                let wanted = f64::from(*weight) / sum;
                if ready.iter().any(|(ready, _)| *ready) {
                    prop_assert!((share(Some(number)) - wanted).abs() <= 0.01, "{} {wanted}", share(Some(number)));
                } else {
                    refused += wanted;
                }
            }
            prop_assert!((share(None) - refused).abs() <= 0.01, "{} {refused}", share(None));
        }
    }
}
