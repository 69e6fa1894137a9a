//! Builds the endpoints of a port in one family from the two lists that kube-proxy writes: one for traffic policy
//! Cluster, and one for policy Local.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use model::{Endpoint, Hints, Node};

/// An endpoint with its weight in one list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The endpoint.
    pub addr: SocketAddr,
    /// Its weight.
    pub weight: u32,
    /// Whether other rules show that the endpoint is on this node.
    pub local: bool,
}

/// Returns endpoints for which [`ServicePort::usable`](model::ServicePort::usable) returns these lists. `by_policy`:
/// whether one of the service's policies is Local, so that the second list has all endpoints on this node.
///
/// An endpoint that is only on the second list is not for policy Cluster: kube-proxy leaves it out of the first list
/// because of topology hints, or because it terminates. If such endpoints exist, they get a hint for another zone, and
/// all other endpoints get a hint for this zone.
///
/// Returns `None` if the lists have contradicting weights.
pub fn of_lists(
    cluster: &[Share],
    local: &[Share],
    by_policy: bool,
) -> Option<Vec<(Endpoint, u32)>> {
    let here: BTreeMap<SocketAddr, u32> = summed(local);
    let mut all = summed(cluster);
    let said: BTreeSet<SocketAddr> = cluster.iter().filter(|e| e.local).map(|e| e.addr).collect();
    let weighted = all.values().chain(here.values()).any(|weight| *weight != 1);
    let only_here = here.keys().filter(|addr| !all.contains_key(*addr)).count();
    if weighted && !all.is_empty() && !here.is_empty() {
        // Checks that one list is a part of the other, with proportional weights.
        let pairs = here.iter().map(|(addr, weight)| (all.get(addr), *weight));
        let pairs: Option<Vec<(u32, u32)>> = pairs
            .map(|(of_all, weight)| of_all.map(|of_all| (*of_all, weight)))
            .collect();
        let pairs = pairs?;
        let product = |a: u32, b: u32| u64::from(a) * u64::from(b);
        let proportional = pairs
            .windows(2)
            .all(|two| product(two[0].0, two[1].1) == product(two[1].0, two[0].1));
        if !proportional {
            return None;
        }
    }
    let zone = Node {
        zone: "this".into(),
        ..Node::default()
    };
    let [near, far] = if only_here > 0 && !all.is_empty() {
        ["this", "other"].map(|name| Hints::new(&zone, [name], []))
    } else {
        [Hints::default(); 2]
    };
    let endpoint = |addr: SocketAddr, hints| Endpoint {
        addr: addr.ip(),
        port: addr.port(),
        local: if by_policy {
            here.contains_key(&addr)
        } else {
            said.contains(&addr)
        },
        ready: true,
        serving: true,
        terminating: false,
        hints,
    };
    let mut endpoints: Vec<(Endpoint, u32)> = all
        .iter()
        .map(|(addr, weight)| (endpoint(*addr, near), *weight))
        .collect();
    for (addr, weight) in &here {
        if all.insert(*addr, *weight).is_none() {
            endpoints.push((endpoint(*addr, far), *weight));
        }
    }
    Some(endpoints)
}

/// Returns the list with each endpoint once, with the sum of its weights.
fn summed(list: &[Share]) -> BTreeMap<SocketAddr, u32> {
    let mut all = BTreeMap::new();
    for share in list {
        let weight: &mut u32 = all.entry(share.addr).or_default();
        *weight = weight.saturating_add(share.weight);
    }
    all
}

#[cfg(test)]
mod tests {
    use model::{Protocol, ServicePort, TrafficPolicy, Weights};

    use super::*;

    fn list(text: &str) -> Vec<Share> {
        let shares = text.split_whitespace().map(|word| {
            let (last, weight) = word.split_once('*').unwrap_or((word, "1"));
            Share {
                addr: format!("10.0.0.{last}:80").parse().unwrap(),
                weight: weight.parse().unwrap(),
                local: false,
            }
        });
        shares.collect()
    }

    /// The function returns endpoints that give both lists back.
    #[test]
    fn the_lists_come_back() {
        for (cluster, local) in [
            ("1 2 3", ""),
            ("1 2 3", "1"),
            ("1 2 3", "1 2 3"),
            ("", "1 2"),
            ("2 3", "1"),
            ("1 2", "1 3 4"),
            ("1*3 2*2 3", "1*3 2*2"),
            ("1*3 2", ""),
        ] {
            let endpoints = of_lists(&list(cluster), &list(local), true).unwrap();
            let (endpoints, weights): (Vec<_>, Vec<_>) = endpoints.into_iter().unzip();
            let port = ServicePort {
                name: "".into(),
                port: 80,
                protocol: Protocol::Tcp,
                node_port: None,
                endpoints,
                weights: Weights::of(weights),
                split: None,
            };
            let usable = |policy| -> Vec<(SocketAddr, u32)> {
                let all = port.weighted(true, policy);
                all.map(|(e, weight)| (SocketAddr::new(e.addr, e.port), weight))
                    .collect()
            };
            let wanted = |text: &str| -> Vec<(SocketAddr, u32)> {
                list(text).iter().map(|e| (e.addr, e.weight)).collect()
            };
            if !cluster.is_empty() {
                assert_eq!(
                    usable(TrafficPolicy::Cluster),
                    wanted(cluster),
                    "{cluster} / {local}"
                );
            }
            assert_eq!(
                usable(TrafficPolicy::Local),
                wanted(local),
                "{cluster} / {local}"
            );
        }
    }

    #[test]
    fn contradicting_weights_have_no_endpoints() {
        for (cluster, local) in [("1*3 2", "1 2"), ("1*3 2", "1 3")] {
            assert_eq!(of_lists(&list(cluster), &list(local), true), None);
        }
    }
}
