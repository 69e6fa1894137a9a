//! The check of packets' sources at a pod's interface.
//!
//! The programs look up by which interface the node's routes lead to an address. If pods are ports of a bridge, the
//! routes lead to the bridge, or to an interface that stands on it, and not to the pod's own interface. If the node has
//! no address in the bridge, or the switch is not the kernel's own, the routes lead somewhere else.

use std::collections::{BTreeMap, BTreeSet};

use dataplane_common::packet::Iface;
use kernel::interfaces::Interface;
use settings::Patterns;

/// How many interfaces stand on each other at most, as a VLAN in a VLAN does.
const DEPTH: usize = 8;

/// How many interfaces a message names.
const NAMED: usize = 3;

/// The node's layer-2 segments: bridges, with their ports and the interfaces that stand on them.
pub struct Segments<'a> {
    interfaces: BTreeMap<u32, &'a Interface>,
    /// The segments in which the node has an address.
    joined: BTreeSet<u32>,
}

impl<'a> Segments<'a> {
    /// Returns the segments of these interfaces, which are all of the node's.
    pub fn new(interfaces: &'a [Interface]) -> Self {
        let mut segments = Self {
            interfaces: interfaces.iter().map(|i| (i.index, i)).collect(),
            joined: BTreeSet::new(),
        };
        // A port's own addresses are not reachable.
        let is_port = |i: &Interface| segments.master(i).is_some_and(|m| m.kind == "bridge");
        let joining = interfaces
            .iter()
            .filter(|i| i.up && !i.addresses.is_empty() && !is_port(i));
        segments.joined = joining.map(|i| segments.segment(i)).collect();
        segments
    }

    /// Returns the segment of an interface, as in [`Iface::segment`].
    pub fn segment(&self, interface: &Interface) -> u32 {
        let mut at = interface;
        for _ in 0..DEPTH {
            if at.kind == "bridge" {
                return at.index;
            }
            if !matches!(at.kind.as_str(), "vlan" | "macvlan" | "macvtap" | "ipvlan") {
                break;
            }
            match self.below(at) {
                Some(below) => at = below,
                None => return 0,
            }
        }
        if at.index != interface.index {
            // It stands on an interface of another kind.
            return 0;
        }
        let other_end = self.below(interface).filter(|_| interface.kind == "veth");
        let bridge = |interface: &Interface| {
            let master = self.master(interface);
            master.filter(|master| master.kind == "bridge")
        };
        let found = bridge(interface).or_else(|| bridge(other_end?));
        found.map_or(0, |bridge| bridge.index)
    }

    /// Returns the check of sources at a pod's interface: a flag of [`Iface`], or 0.
    pub fn asked(&self, interface: &Interface, unchecked: &Patterns) -> u16 {
        if unchecked.select(&interface.name, false) {
            0
        } else if self.foreign_switch(interface).is_some() {
            Iface::LOOSE
        } else {
            Iface::STRICT
        }
    }

    /// Returns a message for each switch whose ports the node's routes do not distinguish. `pods`: the pods'
    /// interfaces.
    pub fn loose<'b>(&self, pods: impl Iterator<Item = &'b Interface>) -> Vec<String> {
        let mut by_switch: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for pod in pods {
            if let Some(switch) = self.foreign_switch(pod) {
                by_switch.entry(&switch.name).or_default().push(&pod.name);
            }
        }
        let messages = by_switch.iter().map(|(switch, pods)| {
            let named = pods[..pods.len().min(NAMED)].join(", ");
            let others = match pods.len() - pods.len().min(NAMED) {
                0 => String::new(),
                others => format!(" and {others} others"),
            };
            format!(
                "interfaces {named}{others}: the source addresses of their pods are not checked, except that they must \
                 not be the node's, a cluster IP or those of a pod with an interface of its own: the interfaces are \
                 ports of {switch}, where the node has no address. Through services these pods can speak for each \
                 other and for hosts outside"
            )
        });
        messages.collect()
    }

    /// Returns the switch that an interface is a port of, if the node's routes do not lead to it: Open vSwitch, or a
    /// bridge without an address of the node.
    fn foreign_switch(&self, interface: &Interface) -> Option<&'a Interface> {
        self.master(interface)
            .filter(|master| match master.kind.as_str() {
                "openvswitch" => true,
                "bridge" => !self.joined.contains(&master.index),
                _ => false,
            })
    }

    fn master(&self, interface: &Interface) -> Option<&'a Interface> {
        self.interfaces.get(&interface.master?).copied()
    }

    fn below(&self, interface: &Interface) -> Option<&'a Interface> {
        self.interfaces.get(&interface.below?).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(index: u32, kind: &str) -> Interface {
        Interface {
            index,
            name: format!("if{index}"),
            kind: kind.to_owned(),
            up: true,
            ..Interface::default()
        }
    }

    fn port(index: u32, kind: &str, master: u32) -> Interface {
        Interface {
            master: Some(master),
            ..interface(index, kind)
        }
    }

    fn on(index: u32, kind: &str, below: u32) -> Interface {
        Interface {
            below: Some(below),
            ..interface(index, kind)
        }
    }

    fn pod(index: u32, master: u32) -> Interface {
        Interface {
            peer: Some(7),
            ..port(index, "veth", master)
        }
    }

    fn with_address(interface: Interface) -> Interface {
        Interface {
            addresses: vec!["10.0.0.1/16".parse().unwrap()],
            ..interface
        }
    }

    fn segments_of(all: &[Interface]) -> Vec<u32> {
        let segments = Segments::new(all);
        all.iter().map(|i| segments.segment(i)).collect()
    }

    #[test]
    fn a_bridge_its_ports_and_what_stands_on_it_are_one_segment() {
        let vlan_of_hardware = [port(2, "", 9), on(3, "vlan", 2), interface(9, "bridge")];
        assert_eq!(segments_of(&vlan_of_hardware), [9, 0, 9]);
        let all = [
            port(2, "", 4),
            interface(4, "bridge"),
            pod(5, 4),
            on(6, "vlan", 4),
            on(7, "macvlan", 6),
            // One end is a port of the bridge, the other is the node's.
            port(8, "veth", 4),
            on(9, "veth", 8),
            interface(10, "veth"),
            port(11, "veth", 12),
            interface(12, "vrf"),
            port(13, "bridge", 12),
            on(14, "vlan", 99),
        ];
        assert_eq!(segments_of(&all), [4, 4, 4, 4, 4, 4, 4, 0, 0, 0, 13, 0]);
        let endless = [on(2, "vlan", 3), on(3, "vlan", 2)];
        assert_eq!(segments_of(&endless), [0, 0]);
    }

    #[test]
    fn pods_in_a_switch_without_the_node_are_asked_for_less() {
        let none = Patterns::default();
        let asked = |all: &[Interface]| Segments::new(all).asked(&all[0], &none);
        let bridge = interface(4, "bridge");
        let node_is_there = with_address(bridge.clone());
        assert_eq!(asked(&[pod(5, 4), node_is_there]), Iface::STRICT);
        let vlan = with_address(on(6, "vlan", 4));
        assert_eq!(asked(&[pod(5, 4), bridge.clone(), vlan]), Iface::STRICT);
        let elsewhere = with_address(interface(6, ""));
        let ports = with_address(pod(5, 4));
        assert_eq!(asked(&[ports, bridge, elsewhere]), Iface::LOOSE);
        let ovs = [
            pod(5, 4),
            interface(4, "openvswitch"),
            with_address(interface(6, "openvswitch")),
        ];
        assert_eq!(asked(&ovs), Iface::LOOSE);
        let vrf = [pod(5, 4), interface(4, "vrf")];
        assert_eq!(asked(&vrf), Iface::STRICT);
        let alone = Interface {
            master: None,
            ..pod(5, 4)
        };
        assert_eq!(asked(&[alone]), Iface::STRICT);
        let free = Patterns::new(vec!["if5".parse().unwrap()]);
        assert_eq!(Segments::new(&ovs).asked(&ovs[0], &free), 0);
    }

    #[test]
    fn what_is_asked_for_less_is_said() {
        let mut all = vec![interface(4, "openvswitch"), with_address(interface(3, ""))];
        all.extend((10..15).map(|index| pod(index, 4)));
        let segments = Segments::new(&all);
        let [message] = &segments.loose(all.iter().skip(2))[..] else {
            panic!("one message");
        };
        assert!(message.starts_with("interfaces if10, if11, if12 and 2 others: "));
        assert!(message.contains("ports of if4"));
        assert!(segments.loose(all.iter().take(2)).is_empty());
    }
}
