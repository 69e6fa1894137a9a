//! Addresses that the node had a moment ago. While the operating system's network is restarted, an interface has none.
//! When it has its addresses again, the agent serves them at once, and existing connections through them go on.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    time::{Duration, Instant},
};

use model::{AddressFrom, Node};

/// How long an address is served after it was last seen.
const KEPT: Duration = Duration::from_secs(10);

/// The addresses that are still served.
#[derive(Debug, Default)]
pub struct KeptAddresses {
    /// Until when, and the source of the address if node ports are answered on it.
    left: BTreeMap<IpAddr, (Instant, Option<AddressFrom>)>,
}

impl KeptAddresses {
    /// Adds to a node's addresses those that it had a moment ago. `before`: the node at the last look.
    pub fn keep(&mut self, node: &mut Node, before: &Node, now: Instant) {
        let from: BTreeMap<IpAddr, AddressFrom> = of_node_ports(before);
        for addr in before.own.iter().filter(|addr| !node.own.contains(addr)) {
            let from = from.get(addr).copied();
            self.left.entry(*addr).or_insert((now + KEPT, from));
        }
        self.left
            .retain(|addr, (until, _)| *until > now && !node.own.contains(addr));
        let mut addresses = of_node_ports(node);
        for (addr, (_, from)) in &self.left {
            node.own.push(*addr);
            addresses.extend(from.map(|from| (*addr, from)));
        }
        node.own.sort_unstable();
        (node.addresses, node.addresses_from) = addresses.into_iter().unzip();
    }

    /// When the first of them expires.
    pub fn until(&self) -> Option<Instant> {
        self.left.values().map(|(until, _)| *until).min()
    }
}

fn of_node_ports(node: &Node) -> BTreeMap<IpAddr, AddressFrom> {
    let addresses = node.addresses.iter().copied();
    addresses.zip(node.addresses_from.iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(own: &[&str], addresses: &[&str]) -> Node {
        let parse = |all: &[&str]| all.iter().map(|a| a.parse().unwrap()).collect();
        Node {
            own: parse(own),
            addresses: parse(addresses),
            addresses_from: vec![AddressFrom::DefaultRoute; addresses.len()],
            ..Node::default()
        }
    }

    #[test]
    fn an_address_that_is_gone_is_served_for_a_while() {
        let mut kept = KeptAddresses::default();
        let start = Instant::now();
        let all = node(&["192.0.2.1", "192.0.2.9"], &["192.0.2.1"]);
        let mut look = |before: &Node, own: &[&str], addresses: &[&str], seconds: u64| {
            let mut now = node(own, addresses);
            kept.keep(&mut now, before, start + Duration::from_secs(seconds));
            (now, kept.until())
        };
        assert_eq!(
            look(&all, &["192.0.2.1", "192.0.2.9"], &["192.0.2.1"], 0),
            (all.clone(), None)
        );
        let (without, until) = look(&all, &[], &[], 1);
        assert_eq!(
            (without, until),
            (all.clone(), Some(start + Duration::from_secs(11)))
        );
        // The time counts from the loss of the address, and does not start anew.
        let (without, until) = look(&all, &[], &[], 5);
        assert_eq!(
            (without, until),
            (all.clone(), Some(start + Duration::from_secs(11)))
        );
        // One address is back, the other is not.
        let one = node(&["192.0.2.1"], &["192.0.2.1"]);
        assert_eq!(look(&all, &["192.0.2.1"], &["192.0.2.1"], 12), (one, None));
    }
}
