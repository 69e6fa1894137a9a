//! The settings of the packet path, and what they make of the node's interfaces.

use std::{collections::BTreeSet, io};

use dataplane_common::{
    Addr,
    packet::{Iface, PacketConfig, SourceKey},
    states::Timeouts,
};
use ipnet::IpNet;
use kernel::{
    conntrack::room,
    interfaces::{Interface, Link},
    packet::{AttachOptions, Network, NetworkInterface, PacketOptions},
    tc::Hook,
};
use plan::source_key;
use settings::{PacketPath, Packets, Patterns, TcHook};

use super::{
    earlier::Earlier,
    node,
    roles::{Role, is_pair},
    source_checks::Segments,
};

/// Settings of the packet path on this node.
#[derive(Clone, Debug, Default)]
pub struct PacketSettings {
    /// How programs are attached to interfaces; `None` turns the packet path off.
    pub attach: Option<AttachOptions>,
    /// How packets go through the node.
    pub path: PacketPath,
    /// Whether connections that belong to no service bypass the stack on the fast path.
    pub bypass: bool,
    /// Number of flows that conntrack has room for.
    pub flows: u32,
    /// Names of the uplinks; if empty, [`Role::of`] decides.
    pub uplinks: Patterns,
    /// Names of the pods' sides; if empty, [`Role::of`] decides.
    pub pods: Patterns,
    /// Names of the pods' sides at which sources are not checked.
    pub unchecked: Patterns,
    /// Names of the pods' interfaces whose pods' sockets are left alone; if empty, the agent finds those that need it.
    pub by_packets: Patterns,
    /// How pods are recognized.
    pub detector: Detector,
    /// Masquerade every connection to a cluster IP.
    pub masquerade_all: bool,
    /// The timeouts of flows.
    pub timeouts: Timeouts,
}

/// How the programs recognize a client as a pod of this cluster. Pods are not masqueraded on the way to a cluster IP;
/// other clients are. If neither sign is set, no client is masqueraded there, as with kube-proxy without
/// `--cluster-cidr`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Detector {
    /// A client with an address in one of these networks is a pod.
    pub networks: Vec<IpNet>,
    /// A client whose packets arrive at a pod's side is a pod.
    pub interface: bool,
}

impl PacketSettings {
    /// Returns the settings for this machine.
    pub fn new(packets: &Packets) -> Self {
        let path = packets.path.unwrap_or_default();
        let attach = AttachOptions {
            hook: match packets.hook.unwrap_or_default() {
                TcHook::Auto => None,
                TcHook::Tcx => Some(Hook::Tcx),
                TcHook::Clsact => Some(Hook::Clsact),
            },
            order: packets.order.unwrap_or_default(),
        };
        Self {
            attach: (path != PacketPath::Off).then_some(attach),
            path,
            bypass: packets.bypass.unwrap_or(true),
            flows: packets
                .conntrack_flows
                .unwrap_or_else(room::of_this_machine),
            uplinks: Patterns::new(packets.uplinks.clone()),
            pods: Patterns::new(packets.pod_interfaces.clone()),
            unchecked: Patterns::new(packets.no_source_check.clone()),
            by_packets: Patterns::new(packets.packets_only.clone()),
            detector: Detector {
                networks: packets.pod_cidrs.iter().map(|range| range.0).collect(),
                interface: packets.pods_by_interface,
            },
            masquerade_all: packets.masquerade_all,
            timeouts: packets.timeouts.timeouts(),
        }
    }

    /// Returns the options that the kernel room needs to start.
    pub fn options(&self) -> PacketOptions {
        PacketOptions {
            flows: self.flows,
            attach: self.attach,
        }
    }

    /// Returns the roles, flags and masquerade addresses of these interfaces for the packet path. `by_address` is the
    /// result of [`ways_by_address`](kernel::interfaces::ways_by_address), `earlier` that of
    /// `History::look` in `earlier.rs`.
    ///
    /// Interfaces that are down have programs, too, so that their packets are served from the moment at which they come up.
    ///
    /// # Errors
    /// If the sysctl with the kernel's ephemeral ports cannot be read.
    pub fn network(
        &self,
        interfaces: &[Interface],
        earlier: &Earlier,
        by_address: bool,
    ) -> io::Result<Network> {
        let mut network = Network::default();
        if self.attach.is_none() {
            return Ok(network);
        }
        (network.config, network.pods) =
            self.config(node::ephemeral_ports()?.range().unwrap_or_default());
        if by_address {
            network.config.flags |= PacketConfig::WAYS_BY_ADDRESS;
        }
        let segments = Segments::new(interfaces);
        for interface in interfaces.iter().filter(|i| !i.loopback) {
            let role = self.role_after(interface, earlier);
            let mut flags = match role {
                Role::Other => 0,
                Role::Uplink => Iface::ATTACHED,
                Role::Pod => {
                    let pod = interface.peer.map_or(0, Iface::of_pod);
                    let asked = segments.asked(interface, &self.unchecked);
                    Iface::ATTACHED | Iface::LOCAL | asked | pod
                }
            };
            if role == Role::Pod && is_pair(interface) {
                flags |= Iface::PEER;
            }
            if interface.link == Link::Bare {
                flags |= Iface::BARE;
                network.config.flags |= PacketConfig::bare(interface.index);
            }
            for v4 in [true, false] {
                let addresses = interface.addresses.iter().map(IpNet::addr);
                let others = addresses.filter(|addr| addr.is_ipv4() == v4).skip(1);
                network.others.extend(others.map(Addr::from));
            }
            let is_new = earlier.new.contains(&interface.index);
            let masquerade = [true, false].map(|v4| source(interface, interfaces, v4, is_new));
            let segment = segments.segment(interface);
            let known = NetworkInterface {
                flags,
                masquerade,
                segment,
            };
            network.interfaces.insert(interface.index, known);
        }
        let is_uplink = |known: &&NetworkInterface| {
            known.flags & (Iface::ATTACHED | Iface::LOCAL) == Iface::ATTACHED
        };
        let uplinks = network.interfaces.values().filter(is_uplink);
        if uplinks.count() > 1 {
            network.config.flags |= PacketConfig::SEVERAL_UPLINKS;
        }
        if !network.others.is_empty() {
            network.config.flags |= PacketConfig::SEVERAL_NETWORKS;
        }
        Ok(network)
    }

    fn config(&self, (first, last): (u16, u16)) -> (PacketConfig, BTreeSet<SourceKey>) {
        let mut flags = 0;
        let mut pods = BTreeSet::new();
        let networks = &self.detector.networks;
        if !networks.is_empty() {
            flags |= PacketConfig::DETECT_BY_ADDRESS;
            pods.extend(networks.iter().map(|n| source_key(SourceKey::PODS, n)));
        }
        if self.detector.interface {
            flags |= PacketConfig::DETECT_BY_INTERFACE;
        }
        if self.masquerade_all {
            flags |= PacketConfig::MASQUERADE_ALL;
        }
        let config = PacketConfig {
            flags,
            ephemeral_first: first,
            ephemeral_last: last,
            timeouts: self.timeouts,
            ..PacketConfig::default()
        };
        (config, pods)
    }

    /// Returns the role of an interface.
    pub fn role(&self, interface: &Interface) -> Role {
        self.role_after(interface, &Earlier::default())
    }

    /// As [`PacketSettings::role`], for an interface that may have been an uplink.
    pub fn role_after(&self, interface: &Interface, earlier: &Earlier) -> Role {
        match interface.link {
            Link::Other(_) => Role::Other,
            Link::Ethernet | Link::Bare => {
                let was_uplink = earlier.uplinks.contains(&interface.index);
                self.chosen(interface, was_uplink)
            }
        }
    }

    /// Returns a message for each interface that should have programs, but whose packets the programs cannot read.
    pub fn left_out(&self, interfaces: &[Interface]) -> Vec<String> {
        let all = interfaces.iter().filter(|i| i.up && !i.loopback);
        let unreadable = all.filter_map(|interface| match interface.link {
            Link::Other(kind) if self.chosen(interface, false) != Role::Other => {
                let name = &interface.name;
                Some(format!(
                    "interface {name}: services are not served for its packets, because the packet path cannot read \
                     their link-layer header (hardware type {kind}). If no client of a service is behind this \
                     interface, exclude it: packets.uplinks: [\"!{name}\"]"
                ))
            }
            _ => None,
        });
        unreadable.collect()
    }

    /// Returns a message for each switch whose pods' sources are checked less strictly.
    pub fn loosely_checked(&self, interfaces: &[Interface]) -> Vec<String> {
        let pods = interfaces.iter().filter(|i| {
            let is_unchecked = self.unchecked.select(&i.name, false);
            i.up && self.role(i) == Role::Pod && !is_unchecked
        });
        Segments::new(interfaces).loose(pods)
    }

    /// Returns the role of an interface by the patterns, and by default if no pattern matches.
    fn chosen(&self, interface: &Interface, was_uplink: bool) -> Role {
        let by_default = if was_uplink {
            Role::Uplink
        } else {
            Role::of(interface)
        };
        let Interface { name, .. } = interface;
        if self.pods.select(name, by_default == Role::Pod) {
            Role::Pod
        } else if self.uplinks.select(name, by_default == Role::Uplink) {
            Role::Uplink
        } else {
            Role::Other
        }
    }
}

/// Returns the source address that the kernel's `MASQUERADE` would choose for packets that leave by an interface: the
/// interface's first address, otherwise the first address of another interface (`inet_select_addr` in
/// `net/ipv4/devinet.c`). Returns `None` if the interface has no address but may still get one: it is new, or its
/// address is tentative. The programs then refuse flows that would be masqueraded.
fn source(interface: &Interface, all: &[Interface], v4: bool, is_new: bool) -> Option<Addr> {
    let first = |interface: &Interface| {
        let mut addresses = interface.addresses.iter().map(IpNet::addr);
        addresses.find(|addr| addr.is_ipv4() == v4)
    };
    let others = || all.iter().filter(|other| other.up).find_map(first);
    let own = first(interface);
    if own.is_none() && (is_new || (!v4 && interface.tentative)) {
        return None;
    }
    own.or_else(others).map(Addr::from)
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use settings::Pattern;

    use super::*;

    fn interface(index: u32, name: &str, kind: &str, addresses: &[&str]) -> Interface {
        Interface {
            index,
            name: name.to_owned(),
            kind: kind.to_owned(),
            up: true,
            addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
            ..Interface::default()
        }
    }

    fn pair(index: u32, name: &str, addresses: &[&str]) -> Interface {
        Interface {
            peer: Some(7),
            ..interface(index, name, "veth", addresses)
        }
    }

    fn settings() -> PacketSettings {
        PacketSettings {
            attach: Some(AttachOptions::default()),
            ..PacketSettings::default()
        }
    }

    #[test]
    fn roles() {
        let of = |interface: Interface| settings().role(&interface);
        assert_eq!(
            of(interface(2, "eth0", "", &["192.0.2.1/24"])),
            Role::Uplink
        );
        assert_eq!(
            of(interface(2, "bond0.7", "vlan", &["192.0.2.1/24"])),
            Role::Uplink
        );
        assert_eq!(
            of(interface(3, "flannel.1", "vxlan", &["10.244.0.0/32"])),
            Role::Uplink
        );
        assert_eq!(
            of(interface(2, "ens3", "", &[])),
            Role::Other,
            "a bond's part"
        );
        // Pods' sides: of Calico and Cilium, of the ptp plug-in, of a bridge.
        assert_eq!(of(pair(9, "cali12ab", &[])), Role::Pod);
        assert_eq!(of(pair(9, "veth3", &["10.244.0.1/32"])), Role::Pod);
        // A node that is itself a container (kind, this project's lab).
        assert_eq!(
            of(pair(2, "eth0", &["172.18.0.2/16", "fc00::2/64"])),
            Role::Uplink
        );
        // A pair with both ends here is not the packet path's concern.
        assert_eq!(of(interface(9, "veth9", "veth", &[])), Role::Other);
        assert_eq!(
            of(interface(9, "cilium_host", "veth", &["10.244.0.7/32"])),
            Role::Other
        );
        assert_eq!(
            of(interface(9, "storage0", "veth", &["192.0.2.1/24"])),
            Role::Uplink,
            "its other end is in a bridge, with hardware"
        );
        assert_eq!(
            of(interface(4, "cni0", "bridge", &["10.244.0.1/24"])),
            Role::Other
        );
        assert_eq!(
            of(interface(5, "kube-ipvs0", "dummy", &["10.96.0.1/32"])),
            Role::Other
        );
        let bridge = Interface {
            default_route: true,
            ..interface(4, "br0", "bridge", &["192.0.2.1/24"])
        };
        assert_eq!(of(bridge), Role::Uplink, "hardware is its port");
    }

    #[test]
    fn headers_before_ip() {
        let of = |link| Interface {
            link,
            ..interface(18, "tun0", "tun", &["10.8.0.1/24"])
        };
        let network = settings()
            .network(&[of(Link::Bare)], &Earlier::default(), false)
            .unwrap();
        assert_eq!(network.interfaces[&18].flags, Iface::ATTACHED | Iface::BARE);
        assert_eq!(network.config.flags, PacketConfig::bare(18));
        let ppp = of(Link::Other(512));
        let network = settings()
            .network(std::slice::from_ref(&ppp), &Earlier::default(), true)
            .unwrap();
        assert_eq!(network.interfaces[&18].flags, 0);
        assert_eq!(network.config.flags, PacketConfig::WAYS_BY_ADDRESS);
        assert_eq!(settings().left_out(std::slice::from_ref(&ppp)).len(), 1);
        let settings = PacketSettings {
            uplinks: Patterns::new(vec!["!tun0".parse().unwrap()]),
            ..settings()
        };
        assert_eq!(settings.left_out(&[ppp]), Vec::<String>::new());
    }

    #[test]
    fn patterns_include_and_exclude() {
        let patterns = |all: &[&str]| {
            Patterns::new(all.iter().map(|p| p.parse::<Pattern>().unwrap()).collect())
        };
        assert!(patterns(&[]).select("eth0", true));
        assert!(!patterns(&[]).select("eth0", false));
        let only = patterns(&["eth*", "!eth9"]);
        assert!(only.select("eth1", false));
        assert!(!only.select("eth9", true));
        assert!(!only.select("wlan0", true));
        let without = patterns(&["!docker*"]);
        assert!(without.select("eth0", true));
        assert!(!without.select("docker0", true));
        assert!("!".parse::<Pattern>().is_err());
        assert!("eth[".parse::<Pattern>().is_err());
    }

    #[test]
    fn flows_are_masqueraded_to_what_the_kernel_would_choose() {
        let all = [
            interface(
                2,
                "eth0",
                "",
                &["192.0.2.1/24", "192.0.2.9/24", "2001:db8::1/64"],
            ),
            pair(5, "veth5", &[]),
            pair(6, "veth6", &["10.244.1.1/32"]),
        ];
        let network = settings().network(&all, &Earlier::default(), true).unwrap();
        let addr = |text: &str| Some(Addr::from(text.parse::<IpAddr>().unwrap()));
        let of = |index| network.interfaces[&index].masquerade;
        assert_eq!(of(2), [addr("192.0.2.1"), addr("2001:db8::1")]);
        assert_eq!(of(5), [addr("192.0.2.1"), addr("2001:db8::1")], "another's");
        assert_eq!(of(6), [addr("10.244.1.1"), addr("2001:db8::1")]);
        assert_eq!(
            network.interfaces[&5].flags,
            Iface::ATTACHED | Iface::PEER | Iface::LOCAL | Iface::STRICT | Iface::of_pod(7)
        );
        assert_eq!(network.interfaces[&2].flags, Iface::ATTACHED);
        assert_eq!(
            network.others,
            [addr("192.0.2.9")].into_iter().flatten().collect()
        );
        assert_ne!(network.config.flags & PacketConfig::SEVERAL_NETWORKS, 0);
    }

    #[test]
    fn a_tentative_address_is_waited_for() {
        let mut all = [
            interface(2, "eth0", "", &["192.0.2.1/24", "2001:db8::1/64"]),
            pair(6, "veth6", &[]),
        ];
        let v6 = |all: &[Interface]| {
            let network = settings().network(all, &Earlier::default(), true).unwrap();
            network.interfaces[&6].masquerade.map(|addr| addr.is_some())
        };
        assert_eq!(v6(&all), [true, true]);
        all[1].tentative = true;
        assert_eq!(v6(&all), [true, false]);
    }

    #[test]
    fn networks_are_keys_of_sixteen_bytes() {
        let key = |net: &str| source_key(7, &net.parse().unwrap());
        let v4 = key("10.244.1.9/16");
        assert_eq!((v4.set, v4.prefix), (7, 32 + 96 + 16));
        assert_eq!(v4.addr, Addr::from_v4([10, 244, 0, 0]));
        assert_eq!(key("fd00::/8").prefix, 32 + 8);
        assert_eq!(key("0.0.0.0/0").prefix, 32 + 96);
    }

    #[test]
    fn detectors() {
        let config = |detector, masquerade_all| {
            let settings = PacketSettings {
                detector,
                masquerade_all,
                ..settings()
            };
            settings.config((32768, 60999))
        };
        let (off, pods) = config(Detector::default(), false);
        assert_eq!(
            (off.flags, off.ephemeral_first, off.ephemeral_last),
            (0, 32768, 60999)
        );
        assert!(pods.is_empty());
        let (by_address, pods) = config(
            Detector {
                networks: vec!["10.244.0.0/16".parse().unwrap()],
                interface: false,
            },
            true,
        );
        let both = PacketConfig::DETECT_BY_ADDRESS | PacketConfig::MASQUERADE_ALL;
        assert_eq!((by_address.flags, pods.len()), (both, 1));
        let (by_interface, _) = config(
            Detector {
                interface: true,
                ..Detector::default()
            },
            false,
        );
        assert_eq!(by_interface.flags, PacketConfig::DETECT_BY_INTERFACE);
    }
}
