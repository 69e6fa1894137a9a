//! Builds the endpoints of a port in one family from the two lists that kube-proxy writes: one for traffic policy
//! Cluster, and one for policy Local.

use std::{collections::BTreeSet, net::SocketAddr};

use model::{Endpoint, Hints, Node};

/// An endpoint in one list. All endpoints of a list get equal shares of the connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The endpoint.
    pub addr: SocketAddr,
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
/// Returns `None` if an endpoint is twice on a list: its share is then larger.
pub fn of_lists(cluster: &[Share], local: &[Share], by_policy: bool) -> Option<Vec<Endpoint>> {
    let addresses = |list: &[Share]| {
        let all: BTreeSet<SocketAddr> = list.iter().map(|share| share.addr).collect();
        (all.len() == list.len()).then_some(all)
    };
    let (all, here) = (addresses(cluster)?, addresses(local)?);
    let said: BTreeSet<SocketAddr> = cluster.iter().filter(|e| e.local).map(|e| e.addr).collect();
    let zone = Node {
        zone: "this".into(),
        ..Node::default()
    };
    let [near, far] = if here.is_subset(&all) || all.is_empty() {
        [Hints::default(); 2]
    } else {
        ["this", "other"].map(|name| Hints::new(&zone, [name], []))
    };
    let endpoint = |addr: SocketAddr, hints| Endpoint {
        local: if by_policy {
            here.contains(&addr)
        } else {
            said.contains(&addr)
        },
        hints,
        ..Endpoint::new(addr.ip(), addr.port())
    };
    let only_here = here.difference(&all).map(|addr| endpoint(*addr, far));
    let endpoints = all.iter().map(|addr| endpoint(*addr, near));
    Some(endpoints.chain(only_here).collect())
}

#[cfg(test)]
mod tests {
    use model::{Protocol, ServicePort, TrafficPolicy};

    use super::*;

    fn list(text: &str) -> Vec<Share> {
        let shares = text.split_whitespace().map(|last| Share {
            addr: format!("10.0.0.{last}:80").parse().unwrap(),
            local: false,
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
        ] {
            let port = ServicePort {
                endpoints: of_lists(&list(cluster), &list(local), true).unwrap(),
                ..ServicePort::new(80, Protocol::Tcp)
            };
            let usable = |policy| -> Vec<SocketAddr> {
                let all = port.weighted(true, policy);
                all.map(|(e, _)| SocketAddr::new(e.addr, e.port)).collect()
            };
            let wanted = |text: &str| -> Vec<SocketAddr> {
                list(text).iter().map(|share| share.addr).collect()
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
    fn an_endpoint_with_a_larger_share_is_a_fault() {
        for (cluster, local) in [("1 1 2", ""), ("1 2", "1 1")] {
            assert_eq!(of_lists(&list(cluster), &list(local), true), None);
        }
    }
}
