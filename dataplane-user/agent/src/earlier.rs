//! The node's interfaces at earlier looks: which are new, and which were uplinks.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use dataplane_common::packet::Iface;
use ipnet::IpNet;
use kernel::{interfaces::Interface, packet::Network};

/// The interfaces as they were at earlier looks, for as long as they exist.
#[derive(Debug, Default)]
pub struct History {
    /// By number. `None` before the first look, which finds no interface new.
    known: Option<BTreeMap<u32, InterfaceRecord>>,
    /// Interfaces that were uplinks at the last look.
    uplinks: BTreeSet<u32>,
}

/// An interface that is up, or was.
#[derive(Clone, Debug)]
struct InterfaceRecord {
    /// The time at which it came up with other addresses than before.
    since: Instant,
    was_up: bool,
    /// Its addresses when it was last up.
    addresses: Vec<IpNet>,
}

/// The part of the history that the packet path depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Earlier {
    /// Interfaces that may still get their first address. A network plug-in sets an interface up first and adds the
    /// address afterwards, or adds none, as many do for pods' sides. Only time tells which. A flow keeps the address that it
    /// began with, so the agent waits before it masquerades to another interface's address. An interface that is down counts as
    /// new, unless it has the addresses that it had when it was up.
    pub new: BTreeSet<u32>,
    /// The time until no up interface is new any more. `None` if no up interface is new.
    pub settled_in: Option<Duration>,
    /// Interfaces that were uplinks and still are: if an interface goes down, for example because the operating
    /// system's network is restarted, it may lose its addresses and its routes, by which the agent recognises an
    /// uplink. It gets them again later, and connections go on in between. An interface that became a port of another
    /// one is no uplink.
    ///
    /// Also bridges of the node's own that lead to machines other than pods, such as virtual machines of libvirt.
    pub uplinks: BTreeSet<u32>,
}

impl History {
    /// The time for which an interface counts as new. It is longer than a plug-in takes to add an address, and shorter
    /// than a pod takes to be ready. A client's TCP retries after this time (`TCP_TIMEOUT_INIT` in
    /// `include/net/tcp.h`).
    const PATIENCE: Duration = Duration::from_secs(1);

    /// Looks at the present interfaces.
    pub fn look(&mut self, interfaces: &[Interface], now: Instant) -> Earlier {
        let before = self.known.take();
        let long_ago = now.checked_sub(Self::PATIENCE).unwrap_or(now);
        let mut known = BTreeMap::new();
        let mut earlier = Earlier::default();
        for interface in interfaces {
            let index = interface.index;
            let past = before.as_ref().and_then(|before| before.get(&index));
            let addresses = interface.addresses.clone();
            // A link that only went down and up has its earlier addresses.
            let same = past.filter(|past| past.addresses == addresses);
            if !interface.up {
                if same.is_none() {
                    earlier.new.insert(index);
                }
                if let Some(past) = past {
                    let was_up = false;
                    known.insert(
                        index,
                        InterfaceRecord {
                            was_up,
                            ..past.clone()
                        },
                    );
                }
                continue;
            }
            let since = match same.or(past.filter(|past| past.was_up)) {
                Some(past) => past.since,
                None if before.is_none() => long_ago,
                None => now,
            };
            let rest = Self::PATIENCE.saturating_sub(now.saturating_duration_since(since));
            if !rest.is_zero() {
                earlier.new.insert(index);
                earlier.settled_in = earlier.settled_in.max(Some(rest));
            }
            let was_up = true;
            known.insert(
                index,
                InterfaceRecord {
                    since,
                    was_up,
                    addresses,
                },
            );
        }
        self.known = Some(known);
        let vrfs = interfaces.iter().filter(|i| i.kind == "vrf");
        let vrfs: BTreeSet<u32> = vrfs.map(|i| i.index).collect();
        let stays = |i: &&Interface| {
            let is_port = i.master.is_some_and(|master| !vrfs.contains(&master));
            self.uplinks.contains(&i.index) && !is_port
        };
        let stay = interfaces.iter().filter(stays);
        let bridges = interfaces
            .iter()
            .filter(|i| leads_to_machines(i, interfaces));
        earlier.uplinks = stay.chain(bridges).map(|i| i.index).collect();
        earlier
    }

    /// Records which interfaces count as uplinks.
    pub fn note(&mut self, network: &Network) {
        let is_uplink = |flags: u16| flags & Iface::ATTACHED != 0 && flags & Iface::LOCAL == 0;
        let uplinks = network
            .interfaces
            .iter()
            .filter(|(_, i)| is_uplink(i.flags));
        self.uplinks = uplinks.map(|(index, _)| *index).collect();
    }
}

/// Whether an interface is a bridge in which the node has an address, and that has a port that is no pod's: a tap of a
/// virtual machine, or hardware. The programs at a pod's port serve packets before they reach the bridge.
fn leads_to_machines(bridge: &Interface, all: &[Interface]) -> bool {
    let of_a_network = |net: &IpNet| net.prefix_len() < net.max_prefix_len();
    bridge.kind == "bridge"
        && bridge.addresses.iter().any(of_a_network)
        && all.iter().any(|port| {
            let is_end_of_pair = matches!(port.kind.as_str(), "veth" | "netkit");
            port.master == Some(bridge.index) && !is_end_of_pair
        })
}

#[cfg(test)]
mod tests {
    use dataplane_common::{Addr, packet::Iface};
    use kernel::packet::AttachOptions;

    use super::*;
    use crate::interfaces::PacketSettings;

    fn interface(index: u32, name: &str, addresses: &[&str]) -> Interface {
        Interface {
            index,
            name: name.to_owned(),
            up: true,
            addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
            ..Interface::default()
        }
    }

    fn pair(index: u32, name: &str, addresses: &[&str]) -> Interface {
        Interface {
            peer: Some(7),
            kind: "veth".to_owned(),
            ..interface(index, name, addresses)
        }
    }

    fn settings() -> PacketSettings {
        PacketSettings {
            attach: Some(AttachOptions::default()),
            ..PacketSettings::default()
        }
    }

    #[test]
    fn a_new_interface_has_no_address_but_its_own() {
        let mut all = vec![
            interface(2, "eth0", &["192.0.2.1/24"]),
            pair(5, "veth5", &[]),
        ];
        let mut history = History::default();
        let start = Instant::now();
        let mut masquerade = |all: &[Interface], seconds: f32, index: u32| {
            let earlier = history.look(all, start + Duration::from_secs_f32(seconds));
            let network = settings().network(all, &earlier, true).unwrap();
            let v4 = network.interfaces[&index].masquerade[0];
            let v4 = v4.map(|addr: Addr| addr.ip().to_string());
            (v4, earlier.settled_in)
        };
        let node = Some("192.0.2.1".to_owned());
        assert_eq!(masquerade(&all, 0.0, 5), (node.clone(), None));
        all.push(pair(6, "veth6", &[]));
        all.push(pair(7, "veth7", &["10.244.1.1/32"]));
        assert_eq!(masquerade(&all, 1.0, 6), (None, Some(History::PATIENCE)));
        assert_eq!(masquerade(&all, 1.5, 5).0, node);
        assert_eq!(masquerade(&all, 1.5, 7).0.as_deref(), Some("10.244.1.1"));
        let rest = Duration::from_millis(250);
        assert_eq!(masquerade(&all, 1.75, 6), (None, Some(rest)));
        assert_eq!(masquerade(&all, 2.0, 6), (node.clone(), None));
        // It has its own address at once; with other addresses than before, it is new.
        all[2].addresses.push("10.244.1.1/32".parse().unwrap());
        assert_eq!(masquerade(&all, 2.5, 6).0.as_deref(), Some("10.244.1.1"));
        all[2].addresses.clear();
        all[2].up = false;
        assert_eq!(masquerade(&all, 3.0, 6), (None, None));
        all[2].up = true;
        assert_eq!(masquerade(&all, 60.0, 6).0, None);
        // A link that was down for a while keeps its earlier address.
        assert_eq!(masquerade(&all, 62.0, 6).0, node);
        all[2].up = false;
        assert_eq!(masquerade(&all, 63.0, 6), (node.clone(), None));
        all[2].up = true;
        assert_eq!(masquerade(&all, 64.0, 6), (node, None));
    }

    #[test]
    fn an_uplink_stays_one_without_addresses_and_routes() {
        let now = Instant::now();
        let bridge = |index| Interface {
            kind: "bridge".to_owned(),
            ..interface(index, "br0", &[])
        };
        let mut all = vec![
            pair(2, "eth0", &["192.0.2.1/24"]),
            Interface {
                default_route: true,
                ..bridge(3)
            },
            bridge(4),
        ];
        let mut history = History::default();
        let mut flags = |all: &[Interface]| {
            let earlier = history.look(all, now);
            let network = settings().network(all, &earlier, true).unwrap();
            history.note(&network);
            [2, 3, 4].map(|index| network.interfaces.get(&index).map(|i| i.flags))
        };
        let before = flags(&all);
        assert_eq!(
            before,
            [Some(Iface::ATTACHED), Some(Iface::ATTACHED), Some(0)]
        );
        for interface in &mut all {
            interface.up = false;
            interface.addresses.clear();
            interface.default_route = false;
        }
        assert_eq!(flags(&all), before);
        // Once it is a port, its packets belong to the bridge.
        all[0].master = Some(4);
        let pods = Iface::ATTACHED | Iface::PEER | Iface::LOCAL;
        let is_pods = |flags: Option<u16>| flags.is_some_and(|flags| flags & pods == pods);
        assert!(is_pods(flags(&all)[0]));
        all[0].master = None;
        assert!(is_pods(flags(&all)[0]), "it is forgotten");
        let gone = all.remove(1);
        flags(&all);
        all.insert(1, gone);
        assert_eq!(flags(&all)[1], Some(0), "another one with its number");
    }

    #[test]
    fn a_bridge_of_machines_is_an_uplink_and_one_of_pods_is_none() {
        let bridge = |index, addresses: &[&str]| Interface {
            kind: "bridge".to_owned(),
            ..interface(index, "br", addresses)
        };
        let port = |index, master, kind: &str| Interface {
            kind: kind.to_owned(),
            master: Some(master),
            ..interface(index, "port", &[])
        };
        let all = [
            bridge(2, &["192.168.122.1/24"]),
            port(3, 2, "tun"),
            bridge(4, &["10.244.1.1/24"]),
            Interface {
                peer: Some(7),
                ..port(5, 4, "veth")
            },
            bridge(6, &[]),
            port(7, 6, "tun"),
        ];
        let earlier = History::default().look(&all, Instant::now());
        assert_eq!(earlier.uplinks, [2].into());
    }
}
