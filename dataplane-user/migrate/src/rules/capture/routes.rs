//! Replaces interfaces at which no outbound connection is captured by the ranges that are routed to them, because a
//! socket does not know its interface when it connects.
//!
//! Istio writes such a rule for each interface in the annotation `traffic.sidecar.istio.io/excludeInterfaces`
//! (`shortCircuitExcludeInterfaces` in `tools/istio-iptables/pkg/capture/run.go`): for pods with a second network.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use kernel::routing::Way;

use super::said::{Capture, Fault};

impl Capture {
    /// Replaces the interfaces whose outbound connections are not captured by the ranges that are routed to these
    /// interfaces. `ways`: the routes of table `main`; `None` if they are not known, or if other routing tables are
    /// used too.
    ///
    /// # Errors
    ///
    /// If the ranges are not known, or the configuration cannot express their combination with the other rules.
    pub fn by_routes(mut self, ways: Option<&[Way]>) -> Result<Self, Fault> {
        let Some((_, (place, text))) = self.at_interfaces.first_key_value() else {
            return Ok(self);
        };
        let fault = |what: &str| Fault {
            place: place.clone(),
            what: what.to_owned(),
            text: text.clone(),
        };
        let Some(ways) = ways else {
            return Err(fault(
                "outbound connections by this interface are left alone, and a socket does not know its interface when it connects. \
                 Name the pod's network namespace by --netns, so that its routes tell the ranges; if it has routing rules of its \
                 own, replace the rule by the ranges",
            ));
        };
        let is_meant = |name: &str, v4| self.at_interfaces.contains_key(&(name.to_owned(), v4));
        let Some(mut left) = left_alone(ways, is_meant) else {
            return Err(fault(
                "outbound connections by this interface are left alone, and a route has several interfaces, of which this is one",
            ));
        };
        if !self.include_ports.is_empty() && !left.is_empty() {
            return Err(fault(
                "by this interface, ports that are captured are not; mesh.rules.includeOutboundPorts captures them at every address",
            ));
        }
        if self.virtual_interfaces.is_empty() {
            self.include_without(&left);
        } else {
            // Connections that enter by virtual interfaces are captured in all included ranges; excluded ranges do not
            // apply to them. So the ranges to exclude are split into longer prefixes, which never replace an included
            // range.
            let halved = left.iter().flat_map(|net| self.longer(*net)).collect();
            left = halved;
            if !left.is_disjoint(&self.include_ranges) {
                return Err(fault(
                    "by this interface, an address is left alone that virtual interfaces include; mesh.rules cannot say both",
                ));
            }
        }
        self.exclude_ranges.extend(&left);
        let interfaces = std::mem::take(&mut self.at_interfaces).into_keys();
        self.reached_by = interfaces.map(|(name, _)| name).collect();
        Ok(self)
    }

    /// Removes the excluded ranges `left` from the included ranges. If no range remains, excludes all addresses.
    fn include_without(&mut self, left: &BTreeSet<IpNet>) {
        if self.include_ranges.is_empty() {
            return;
        }
        let before = std::mem::take(&mut self.include_ranges);
        for net in &before {
            self.include_ranges.extend(without(*net, left));
        }
        if self.include_ranges.is_empty() {
            let all = before.iter().map(|net| match net {
                IpNet::V4(_) => IpNet::V4(ipnet::Ipv4Net::default()),
                IpNet::V6(_) => IpNet::V6(ipnet::Ipv6Net::default()),
            });
            self.exclude_ranges.extend(all);
        }
    }

    /// Splits a range to exclude into ranges that do not contain an included range and do not cover all addresses,
    /// because the longest prefix decides.
    fn longer(&self, net: IpNet) -> Vec<IpNet> {
        let contains_one = self.include_ranges.iter().any(|one| net.contains(one));
        let halves = net.subnets(net.prefix_len() + 1);
        match halves {
            Ok(halves) if contains_one || net.prefix_len() == 0 => {
                halves.flat_map(|half| self.longer(half)).collect()
            }
            // A single address cannot be split.
            _ => vec![net],
        }
    }
}

/// Returns the ranges that are routed to the interfaces of `is_meant`. Returns `None` if a route uses both such an
/// interface and others.
fn left_alone(ways: &[Way], is_meant: impl Fn(&str, bool) -> bool) -> Option<BTreeSet<IpNet>> {
    let mut routes: BTreeMap<(u8, IpNet), &Way> = BTreeMap::new();
    for way in ways {
        // Each interface has such a route to its own link.
        if matches!(way.to, IpNet::V6(net) if net.addr().is_unicast_link_local() || net.addr().is_multicast())
        {
            continue;
        }
        let known = routes
            .entry((way.to.prefix_len(), way.to.trunc()))
            .or_insert(way);
        if way.metric < known.metric {
            *known = way;
        }
    }
    let mut left = BTreeSet::new();
    // The map sorts longer prefixes last, so they override shorter ones.
    for ((_, net), way) in routes {
        let by: BTreeSet<bool> = {
            let v4 = net.addr().is_ipv4();
            way.by.iter().map(|name| is_meant(name, v4)).collect()
        };
        if by.len() > 1 {
            return None;
        }
        if by.contains(&true) {
            left.insert(net);
        } else {
            let hole = BTreeSet::from([net]);
            left = left
                .into_iter()
                .flat_map(|outer| without(outer, &hole))
                .collect();
        }
    }
    Some(
        IpNet::aggregate(&left.into_iter().collect())
            .into_iter()
            .collect(),
    )
}

/// Returns a range without the ranges in `holes`, as a list of ranges.
fn without(net: IpNet, holes: &BTreeSet<IpNet>) -> Vec<IpNet> {
    if holes.iter().any(|hole| hole.contains(&net)) {
        return Vec::new();
    }
    let inside: BTreeSet<IpNet> = (holes.iter().copied())
        .filter(|hole| net.contains(hole))
        .collect();
    if inside.is_empty() {
        return vec![net];
    }
    let halves = net.subnets(net.prefix_len() + 1).into_iter().flatten();
    halves.flat_map(|half| without(half, &inside)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn way(to: &str, metric: u32, by: &[&str]) -> Way {
        Way {
            to: to.parse().unwrap(),
            metric,
            by: by.iter().map(|&name| name.to_owned()).collect(),
        }
    }

    fn nets(texts: &[&str]) -> BTreeSet<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn the_longest_prefix_decides_by_which_interface_packets_leave() {
        let ways = [
            way("0.0.0.0/0", 0, &["eth0"]),
            way("10.0.0.0/8", 0, &["net1"]),
            way("10.128.0.0/9", 0, &[]),
            way("10.64.0.0/10", 0, &["eth0"]),
            way("10.64.7.0/24", 0, &["net1"]),
            // Of two routes, the one with the lower metric counts.
            way("192.0.2.0/24", 200, &["eth0"]),
            way("192.0.2.0/24", 100, &["net1"]),
            way("198.51.100.0/24", 100, &["eth0"]),
            way("198.51.100.0/24", 200, &["net1"]),
            way("fe80::/64", 256, &["net1"]),
            way("2001:db8::/32", 256, &["net1"]),
        ];
        let left = left_alone(&ways, |name, _| name == "net1").unwrap();
        let wanted = [
            "10.0.0.0/10",
            "10.64.7.0/24",
            "192.0.2.0/24",
            "2001:db8::/32",
        ];
        assert_eq!(left, nets(&wanted));
        assert_eq!(left_alone(&ways, |name, _| name == "net2"), Some(nets(&[])));
        let left = left_alone(&ways, |name, v4| name == "net1" && !v4);
        assert_eq!(left, Some(nets(&["2001:db8::/32"])));
    }

    #[test]
    fn the_default_route_leaves_all_but_the_others() {
        let ways = [
            way("0.0.0.0/0", 0, &["net1"]),
            way("128.0.0.0/2", 0, &["eth0"]),
        ];
        let left = left_alone(&ways, |name, _| name == "net1").unwrap();
        assert_eq!(left, nets(&["0.0.0.0/1", "192.0.0.0/2"]));
    }

    #[test]
    fn a_route_by_several_interfaces_tells_nothing() {
        let both = [way("10.0.0.0/8", 0, &["eth0", "net1"])];
        assert_eq!(left_alone(&both, |name, _| name == "net1"), None);
        assert_eq!(left_alone(&both, |_, _| true), Some(nets(&["10.0.0.0/8"])));
    }

    #[test]
    fn included_ranges_lose_what_is_left_alone() {
        let at = (
            String::from("saved:3"),
            String::from("-A OUTPUT -o net1 -j RETURN"),
        );
        let capture = Capture {
            include_ranges: nets(&["10.0.0.0/8", "192.0.2.0/24"]),
            at_interfaces: [(("net1".to_owned(), true), at)].into(),
            ..Capture::default()
        };
        let ways = [
            way("10.128.0.0/9", 0, &["net1"]),
            way("192.0.2.0/24", 0, &["net1"]),
        ];
        let found = capture.clone().by_routes(Some(&ways)).unwrap();
        assert_eq!(found.include_ranges, nets(&["10.0.0.0/9"]));
        assert_eq!(
            found.exclude_ranges,
            nets(&["10.128.0.0/9", "192.0.2.0/24"])
        );
        // These routes do not apply to virtual interfaces, so the ranges included for them stay.
        let machines = Capture {
            virtual_interfaces: ["virt0".to_owned()].into(),
            ..capture.clone()
        };
        let found = machines.clone().by_routes(Some(&ways)).unwrap();
        assert_eq!(found.include_ranges, capture.include_ranges);
        assert_eq!(
            found.exclude_ranges,
            nets(&["10.128.0.0/9", "192.0.2.0/25", "192.0.2.128/25"])
        );
        let one = Capture {
            include_ranges: nets(&["192.0.2.1/32"]),
            ..machines
        };
        assert!(one.by_routes(Some(&ways)).is_err());
        let fault = capture.clone().by_routes(None).unwrap_err();
        assert_eq!(fault.place, "saved:3");
        let ports = Capture {
            include_ports: [443].into(),
            ..capture.clone()
        };
        assert!(ports.by_routes(Some(&ways)).is_err());
        // All ranges are excluded.
        let all = [way("0.0.0.0/0", 0, &["net1"])];
        let found = capture.by_routes(Some(&all)).unwrap();
        assert_eq!(found.include_ranges, nets(&[]));
        assert_eq!(found.exclude_ranges, nets(&["0.0.0.0/0"]));
    }
}
