//! Pods of this node to which the node's routes lead by uplinks.
//!
//! The packet path treats the packets of such a pod as forged, if the pod has an interface here: with some network
//! plug-ins, the operator has to know this first. A pod whose interface is gone looks alike, because its address then
//! follows the default route: from its end until the API server reports the end. So a route counts only if it led to an
//! uplink at every look so far.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use dataplane_common::packet::Iface;
use kernel::interfaces::Interface;

use super::{interfaces::PacketSettings, roles::Role, source_checks::Segments};

/// The routes that the last looks found.
#[derive(Debug, Default)]
pub struct Astray {
    pods: BTreeMap<IpAddr, RouteEnd>,
}

/// Where the route to a pod leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RouteEnd {
    /// To an uplink, at every look.
    Uplink,
    /// To another interface, at least once.
    Elsewhere,
}

impl Astray {
    /// Returns a message if the node's routes lead to pods of its own by uplinks, as they did at the last look,
    /// although pods have interfaces here at which sources are checked. `leaves_by` returns the interface by which an
    /// address is reached.
    pub fn look(
        &mut self,
        settings: &PacketSettings,
        interfaces: &[Interface],
        pods: &BTreeSet<IpAddr>,
        leaves_by: impl Fn(IpAddr) -> Option<u32>,
    ) -> Option<String> {
        let segments = Segments::new(interfaces);
        let checked = interfaces
            .iter()
            .filter(|i| i.up && settings.role(i) == Role::Pod);
        let checked = checked.filter(|i| segments.asked(i, &settings.unchecked) == Iface::STRICT);
        let with_pods: BTreeSet<u32> = checked.map(|i| segments.segment(i)).collect();
        let uplink = |index| {
            let uplink = interfaces.iter().find(|i| i.index == index)?;
            let segment = segments.segment(uplink);
            let has_pods = segment != 0 && with_pods.contains(&segment);
            (settings.role(uplink) == Role::Uplink && !has_pods).then_some(&uplink.name)
        };
        let before = std::mem::take(&mut self.pods);
        let mut led = Vec::new();
        for pod in pods {
            let known = before.get(pod).copied();
            let by = leaves_by(*pod).and_then(uplink);
            match by {
                Some(by) if known == Some(RouteEnd::Uplink) => led.push((pod, by)),
                _ => {}
            }
            let seen = match by {
                Some(_) => known.unwrap_or(RouteEnd::Uplink),
                None => RouteEnd::Elsewhere,
            };
            self.pods.insert(*pod, seen);
        }
        if settings.attach.is_none() || with_pods.is_empty() {
            return None;
        }
        let (pod, uplink) = led.first()?;
        let others = match led.len() - 1 {
            0 => String::new(),
            others => format!(" (and {others} other pods of this node by uplinks)"),
        };
        Some(format!(
            "the node's route to its own pod {pod} leads to the uplink {uplink}{others}: if such a pod has an interface \
             on this node, its packets to services are dropped (source-forged). Correct the route; or, if the network \
             plug-in means it so, do not check that interface: packets.noSourceCheck: [\"veth*\"]"
        ))
    }
}

#[cfg(test)]
mod tests {
    use kernel::packet::AttachOptions;
    use settings::Patterns;

    use super::*;

    fn settings(unchecked: &[&str]) -> PacketSettings {
        let patterns = unchecked.iter().map(|of| of.parse().unwrap());
        PacketSettings {
            attach: Some(AttachOptions::default()),
            unchecked: Patterns::new(patterns.collect()),
            ..PacketSettings::default()
        }
    }

    fn uplink(kind: &str) -> Interface {
        Interface {
            index: 2,
            name: "eth0".to_owned(),
            kind: kind.to_owned(),
            up: true,
            addresses: vec!["192.0.2.1/24".parse().unwrap()],
            default_route: true,
            ..Interface::default()
        }
    }

    fn pod(master: Option<u32>) -> Interface {
        Interface {
            index: 5,
            name: "veth5".to_owned(),
            kind: "veth".to_owned(),
            up: true,
            peer: Some(7),
            master,
            ..Interface::default()
        }
    }

    fn pods() -> BTreeSet<IpAddr> {
        ["10.244.1.5", "10.244.1.6"]
            .map(|a| a.parse().unwrap())
            .into()
    }

    #[test]
    fn pods_that_are_routed_elsewhere_are_named() {
        // Returns the message of the second look.
        let named = |settings: &PacketSettings, all: &[Interface], by: Option<u32>| {
            let mut astray = Astray::default();
            assert_eq!(astray.look(settings, all, &pods(), |_| by), None);
            astray.look(settings, all, &pods(), |_| by)
        };
        let all = [uplink(""), pod(None)];
        let text = named(&settings(&[]), &all, Some(2)).unwrap();
        assert!(text.contains("10.244.1.5 leads to the uplink eth0 (and 1 other"));
        assert_eq!(named(&settings(&[]), &all, Some(5)), None);
        assert_eq!(named(&settings(&[]), &all, None), None);
        assert_eq!(
            named(&settings(&[]), &[uplink("")], Some(2)),
            None,
            "no such pod"
        );
        assert_eq!(named(&settings(&["veth*"]), &all, Some(2)), None);
        let flat = [uplink("bridge"), pod(Some(2))];
        assert_eq!(named(&settings(&[]), &flat, Some(2)), None);
    }

    #[test]
    fn a_pod_whose_interface_is_gone_is_not_named() {
        let all = [uplink(""), pod(None)];
        let mut astray = Astray::default();
        let mut look = |by| astray.look(&settings(&[]), &all, &pods(), |_| Some(by));
        assert_eq!(look(5), None);
        // The API server is away, and the pods stay known for long.
        assert_eq!([look(2), look(2), look(2)], [None, None, None]);
        // The pod was forgotten, and is back, with a route that always led to an uplink.
        assert_eq!(
            astray.look(&settings(&[]), &all, &BTreeSet::new(), |_| None),
            None
        );
        let mut look = |by| astray.look(&settings(&[]), &all, &pods(), |_| Some(by));
        assert_eq!(look(2), None);
        assert!(look(2).is_some());
        assert_eq!(look(5), None);
    }
}
