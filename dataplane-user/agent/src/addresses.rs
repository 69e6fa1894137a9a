//! The node's own addresses, and on which of them the node answers node ports.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::IpAddr,
};

use ipnet::IpNet;
use model::AddressFrom;
use nix::{ifaddrs::getifaddrs, net::if_::InterfaceFlags};

/// An address of an interface that is up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// The interface.
    pub interface: String,
    /// The address.
    pub addr: IpAddr,
    /// Whether the interface is the loopback interface, which can have other addresses too.
    pub on_loopback: bool,
}

/// Every address in this network namespace that is meaningful elsewhere: of interfaces that are up, and neither
/// loopback nor link-local addresses.
///
/// # Errors
///
/// If the kernel does not return them.
pub fn of_interfaces() -> io::Result<Vec<Address>> {
    let mut addresses = Vec::new();
    for interface in getifaddrs()? {
        if !interface.flags.contains(InterfaceFlags::IFF_UP) {
            continue;
        }
        let Some(address) = interface.address else {
            continue;
        };
        let addr = match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
            (Some(v4), _) => IpAddr::V4(v4.ip()),
            (_, Some(v6)) => IpAddr::V6(v6.ip()),
            _ => continue,
        };
        let link_local = match addr {
            IpAddr::V4(v4) => v4.is_link_local(),
            IpAddr::V6(v6) => v6.is_unicast_link_local(),
        };
        if !link_local && !addr.is_loopback() {
            addresses.push(Address {
                interface: interface.interface_name,
                addr,
                on_loopback: interface.flags.contains(InterfaceFlags::IFF_LOOPBACK),
            });
        }
    }
    Ok(addresses)
}

/// The facts that decide on which addresses node ports are answered. They are equal while pods come and go whose interfaces on the
/// node have the same address as those of other pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeAddresses {
    /// Each once, and those of default routes' interfaces last. Only these have the interface's name.
    all: Vec<Address>,
    /// The interface of each family's default route.
    default: [Option<String>; 2],
}

/// Looks at the node's addresses.
///
/// # Errors
///
/// If the kernel does not return them.
pub fn look() -> io::Result<NodeAddresses> {
    // "thread-self": the network namespace of the calling thread, not of the process's first thread.
    let v4 = routes("/proc/thread-self/net/route")?;
    let v6 = routes("/proc/thread-self/net/ipv6_route")?;
    let default = [default_interface_v4(&v4), default_interface_v6(&v6)];
    Ok(NodeAddresses {
        all: distinct(of_interfaces()?, default),
        default: default.map(|interface| interface.map(str::to_owned)),
    })
}

/// As [`NodeAddresses::all`].
fn distinct(all: Vec<Address>, default: [Option<&str>; 2]) -> Vec<Address> {
    let is_default = |address: &Address| default.contains(&Some(&*address.interface));
    let (named, others): (Vec<_>, Vec<_>) = all.into_iter().partition(is_default);
    let others = others.into_iter().map(|a| (a.addr, a.on_loopback));
    let others: BTreeSet<(IpAddr, bool)> = others.collect();
    let others = others.into_iter().map(|(addr, on_loopback)| Address {
        interface: String::new(),
        addr,
        on_loopback,
    });
    others.chain(named).collect()
}

/// A family's routes; empty only if the kernel lacks the family. An empty list by mistake would mean no default route,
/// and node ports would be answered on every address.
fn routes(path: &str) -> io::Result<String> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        read => read,
    }
}

/// The addresses of the node.
#[derive(Debug)]
pub struct OfNode {
    /// The addresses on which node ports are answered, with the source of each.
    pub for_node_ports: BTreeMap<IpAddr, AddressFrom>,
    /// All of them.
    pub own: BTreeSet<IpAddr>,
}

/// The node's addresses. Node ports are answered on the addresses in `wanted`. If `wanted` is empty, they are answered
/// on the node's primary addresses, as in kube-proxy's nftables mode: in each family the address in its Node object
/// (`told`), if the node has this address.
///
/// # Errors
///
/// If the kernel does not return them.
pub fn of_node(wanted: &[IpNet], told: &[IpAddr]) -> io::Result<OfNode> {
    let NodeAddresses { all, default } = look()?;
    let own = all.iter().map(|a| a.addr).collect();
    let for_node_ports = if wanted.is_empty() {
        let [v4, v6] = &default;
        primary(&all, told, [v4.as_deref(), v6.as_deref()])
    } else {
        all.iter()
            .map(|a| a.addr)
            .filter(|a| wanted.iter().any(|net| net.contains(a)))
            .map(|a| (a, AddressFrom::Given))
            .collect()
    };
    Ok(OfNode {
        for_node_ports,
        own,
    })
}

/// In each family: the address in the Node object, if it is here. Otherwise the first address of the interface that has
/// the default route (v4, v6). Without a default route: every address that is not the loopback interface's.
fn primary(
    all: &[Address],
    told: &[IpAddr],
    default: [Option<&str>; 2],
) -> BTreeMap<IpAddr, AddressFrom> {
    let mut chosen = BTreeMap::new();
    for (is_v4, interface) in [(true, default[0]), (false, default[1])] {
        let here = |told: &&IpAddr| all.iter().any(|a| a.addr == **told);
        if let Some(told) = told.iter().filter(|t| t.is_ipv4() == is_v4).find(here) {
            chosen.insert(*told, AddressFrom::NodeObject);
            continue;
        }
        let mut family = all
            .iter()
            .filter(|a| a.addr.is_ipv4() == is_v4 && !a.on_loopback);
        match interface {
            Some(interface) => {
                let first = family.find(|a| a.interface == interface);
                chosen.extend(first.map(|a| (a.addr, AddressFrom::DefaultRoute)));
            }
            None => chosen.extend(family.map(|a| (a.addr, AddressFrom::All))),
        }
    }
    chosen
}

/// The interface of the default route with the lowest metric, from `/proc/net/route`.
fn default_interface_v4(table: &str) -> Option<&str> {
    // Iface Destination Gateway Flags RefCnt Use Metric Mask ...
    table
        .lines()
        .skip(1)
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            match fields[..] {
                [interface, "00000000", _, _, _, _, metric, "00000000", ..] => {
                    Some((metric.parse::<u32>().ok()?, interface))
                }
                _ => None,
            }
        })
        .min_by_key(|(metric, _)| *metric)
        .map(|(_, interface)| interface)
}

/// As [`default_interface_v4`], from `/proc/net/ipv6_route`, which also lists the kernel's reject routes, on `lo`.
fn default_interface_v6(table: &str) -> Option<&str> {
    // destination prefix source prefix gateway metric references uses flags interface
    table
        .lines()
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            match fields[..] {
                [destination, "00", _, _, _, metric, _, _, _, interface]
                    if destination.bytes().all(|b| b == b'0') && interface != "lo" =>
                {
                    Some((u32::from_str_radix(metric, 16).ok()?, interface))
                }
                _ => None,
            }
        })
        .min_by_key(|(metric, _)| *metric)
        .map(|(_, interface)| interface)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTES: &str = "\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
wlan0\t00000000\t0100A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0
eth0\t00000000\t010200C0\t0003\t0\t0\t100\t00000000\t0\t0\t0
eth0\t000200C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0
";
    const ROUTES6: &str = "\
20010db8000000000000000000000000 40 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000001 00000000 00000001     eth1
00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003     eth1
00000000000000000000000000000000 00 00000000000000000000000000000000 00 00000000000000000000000000000000 ffffffff 00000001 00000000 00200200       lo
";

    fn address(interface: &str, addr: &str) -> Address {
        Address {
            interface: interface.to_owned(),
            addr: addr.parse().unwrap(),
            on_loopback: interface == "lo",
        }
    }

    #[test]
    fn what_cannot_be_read_is_not_without_routes() {
        assert_eq!(routes("/proc/thread-self/net/no_such_family").unwrap(), "");
        assert!(routes("/proc/thread-self/net").is_err());
    }

    #[test]
    fn the_default_route_with_the_lowest_metric() {
        assert_eq!(default_interface_v4(ROUTES), Some("eth0"));
        assert_eq!(default_interface_v6(ROUTES6), Some("eth1"));
        assert_eq!(default_interface_v4(""), None);
        assert_eq!(default_interface_v6(""), None);
        assert_eq!(default_interface_v6(ROUTES6.lines().last().unwrap()), None);
    }

    #[test]
    fn a_pod_that_starts_changes_no_address_of_the_node() {
        let node = ["192.0.2.7", "192.0.2.1"].map(|addr| address("eth0", addr));
        let with = |pods: &[&str]| {
            let pods = pods.iter().map(|pod| address(pod, "10.244.1.1"));
            let all = [address("lo", "198.51.100.1")].into_iter().chain(pods);
            distinct(all.chain(node.clone()).collect(), [Some("eth0"), None])
        };
        assert_eq!(with(&["veth1", "veth2"]), with(&["veth2"]));
        assert_ne!(with(&["veth1"]), with(&[]));
        assert_eq!(with(&[])[1..], node, "in the kernel's order");
    }

    #[test]
    fn primary_addresses() {
        let all = [
            address("lo", "198.51.100.1"),
            address("cni0", "10.244.1.1"),
            address("eth0", "192.0.2.1"),
            address("eth0", "192.0.2.7"),
            address("cni0", "fd00::1"),
            address("eth1", "2001:db8::1"),
        ];
        let ips = |map: BTreeMap<IpAddr, AddressFrom>| -> Vec<String> {
            map.keys().map(ToString::to_string).collect()
        };
        assert_eq!(
            ips(primary(&all, &[], [Some("eth0"), Some("eth1")])),
            ["192.0.2.1", "2001:db8::1"]
        );
        // Without a default route no address is preferred.
        assert_eq!(
            ips(primary(&all, &[], [None, Some("eth1")])),
            ["10.244.1.1", "192.0.2.1", "192.0.2.7", "2001:db8::1"]
        );
        // The Node object wins, unless its address belongs to another machine, for example to a NAT in front of this
        // one.
        let told = ["192.0.2.7", "2001:db8::99"].map(|a| a.parse().unwrap());
        let from: Vec<AddressFrom> = primary(&all, &told, [Some("eth0"), Some("eth1")])
            .into_values()
            .collect();
        assert_eq!(from, [AddressFrom::NodeObject, AddressFrom::DefaultRoute]);
        assert_eq!(
            ips(primary(&all, &told, [Some("eth0"), Some("eth1")])),
            ["192.0.2.7", "2001:db8::1"]
        );
    }
}
