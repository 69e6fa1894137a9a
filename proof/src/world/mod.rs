//! The node that receives the packets: its interfaces, routes and services. It exists twice: in the kernel (the
//! namespace of a lab, and the tables), and in the model.

mod lab;
mod services;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    ops::RangeInclusive,
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::{
    Addr, Port, Protocol,
    packet::{Iface, PacketConfig, SourceKey},
    tables::{Endpoint, FrontendKey, Kind},
};
use dataplane_tests::Lab;
use kernel::{
    packet::{Network, NetworkInterface},
    rig::Rig,
};
use plan::ipsec::Policy;

use self::lab::interfaces;
pub use self::{
    lab::lab,
    services::{EXTERNAL_PORT, MANY, NODE_PORT_ELSEWHERE},
};
use crate::model::read::Headers;

/// An interface of the node.
#[derive(Clone, Debug, Default)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// The link-layer address.
    pub mac: [u8; 6],
    /// Whether a pod is at the other end.
    pub pod: bool,
    /// The check of source addresses on a pod's interface: [`Iface::STRICT`], [`Iface::LOOSE`], or 0.
    pub asked: u16,
    /// The layer-2 segment of the interface; 0: none.
    pub segment: u32,
    /// Indices of the masquerade addresses, IPv4 and IPv6, of flows that leave by the interface; 0: none.
    pub masquerade: [u8; 2],
    masquerade_to: [Option<Addr>; 2],
    mtu: u16,
}

/// A route to a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// Index of the outgoing interface.
    pub ifindex: u32,
    /// Length of the longest packet on the interface.
    pub mtu: u16,
    /// The next hop's link-layer address, if the kernel knows it.
    pub neighbour: Option<[u8; 6]>,
}

/// The result of a route lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum To {
    /// This host itself.
    Here,
    /// No route leads to the destination, or a route refuses it.
    Nowhere,
    /// The destination is behind an interface.
    Onward(Way),
}

/// The endpoints of a service's port.
#[derive(Clone, Debug, Default)]
pub struct Pool {
    /// The endpoints, sorted.
    pub endpoints: Vec<Endpoint>,
    /// The flags, of [`dataplane_common::tables::Block`].
    pub flags: u16,
    /// Session affinity's timeout; 0: none.
    pub affinity_seconds: u32,
    /// The affinity group. Pools of one group share the remembered clients.
    pub affinity_group: u32,
    /// Index of the pool for clients from outside; 0: this pool.
    pub external: u32,
    /// Whether the load balancer has source ranges.
    pub ranged: bool,
}

/// The place of an address: the interface, and the link-layer address if the kernel knows it.
type Place = (u32, Option<[u8; 6]>);

/// The destinations of the node's routes of type `local` (`ip route show table local`), with the prefix length counted
/// for a 16-byte address.
const HOST: [(&str, u32); 8] = [
    ("127.0.0.0", 104),
    ("192.168.77.1", 128),
    ("10.244.1.1", 128),
    ("10.13.0.0", 112),
    ("::1", 128),
    ("fd77::1", 128),
    ("fd00:10:244:1::1", 128),
    ("fd13::", 16),
];

/// The node: its configuration in the model.
#[derive(Debug)]
pub struct World {
    /// The interfaces by index.
    pub interfaces: BTreeMap<u32, Interface>,
    /// The pools by index.
    pub pools: BTreeMap<u32, Pool>,
    frontends: HashMap<FrontendKey, (u32, Kind)>,
    /// Networks: set, address, prefix length counted for a 16-byte address.
    sources: Vec<(u32, Addr, u32)>,
    node_addrs: Vec<Addr>,
    places: HashMap<Addr, Place>,
    /// The interface of the default route.
    uplink: u32,
    /// Whether a default route exists now.
    routed: AtomicBool,
    /// The configuration of the programs.
    pub config: PacketConfig,
    /// The check of IPv4 source addresses on the uplink: [`Iface::STRICT`], [`Iface::LOOSE`], or 0.
    pub reverse_path: u16,
    /// The IPsec policies.
    pub policies: Vec<Policy>,
    /// Addresses of the clients.
    pub clients: Vec<Addr>,
    /// Addresses of the services, each with a port that it serves.
    pub vips: Vec<(Addr, u16)>,
}

/// The range of ephemeral ports of the host's own sockets.
pub const EPHEMERAL: RangeInclusive<u16> = 32768..=60999;
/// A larger range of ephemeral ports, which leaves only five ports (65531–65535) to flows.
pub const NEARLY_ALL: RangeInclusive<u16> = 1024..=65530;

fn addr(text: &str) -> Addr {
    Addr::from(text.parse::<IpAddr>().expect("an address of this file"))
}

impl World {
    /// Reads the lab's interfaces, and writes the services into the rig's tables.
    ///
    /// # Errors
    /// If the kernel refuses a write.
    pub fn new(lab: &Lab, rig: &mut Rig) -> Result<Self> {
        let interfaces = interfaces(lab.node("node1"))?;
        let find = |name: &str| {
            let found = interfaces.iter().find(|(_, i)| i.name == name);
            found.map_or(0, |(ifindex, _)| *ifindex)
        };
        let mut world = Self {
            uplink: find("eth0"),
            routed: AtomicBool::new(true),
            places: HashMap::new(),
            pools: BTreeMap::new(),
            frontends: HashMap::new(),
            sources: vec![
                (SourceKey::PODS, addr("10.244.1.0"), 96 + 24),
                (SourceKey::PODS, addr("fd00:10:244:1::"), 64),
            ],
            node_addrs: Vec::new(),
            config: PacketConfig::default(),
            reverse_path: 0,
            policies: Vec::new(),
            clients: Vec::new(),
            vips: Vec::new(),
            interfaces: BTreeMap::new(),
        };
        let near = |name, number| (find(name), Some([2, 0, 0, 0, 1, number]));
        for (v4, v6, to) in [
            ("10.244.1.10", "fd00:10:244:1::10", near("veth-near", 0x10)),
            ("10.244.1.11", "fd00:10:244:1::11", near("veth-near2", 0x11)),
            ("10.244.1.12", "fd00:10:244:1::12", near("veth-small", 0x12)),
            (
                "10.244.1.13",
                "fd00:10:244:1::13",
                (find("veth-quiet"), None),
            ),
        ] {
            for address in [v4, v6] {
                world.places.insert(addr(address), to);
            }
        }
        world.interfaces = interfaces;
        world.serve();
        world.fill(rig)?;
        rig.set_network(&world.network())?;
        world.node_addrs = vec![Addr::UNSPECIFIED];
        let addresses = world.interfaces.values().flat_map(|i| i.masquerade_to);
        let addresses: BTreeSet<Addr> = addresses.flatten().collect();
        for address in addresses {
            let index = rig.node_addr(address).context("it was given an index")?;
            let at = usize::from(index);
            if world.node_addrs.len() <= at {
                world.node_addrs.resize(at + 1, Addr::UNSPECIFIED);
            }
            world.node_addrs[at] = address;
        }
        for interface in world.interfaces.values_mut() {
            let index = |to: Option<Addr>| to.and_then(|to| rig.node_addr(to)).unwrap_or_default();
            interface.masquerade = interface.masquerade_to.map(index);
        }
        Ok(world)
    }

    /// Returns the network configuration for the programs.
    fn network(&self) -> Network {
        let interfaces = self.interfaces.iter().map(|(ifindex, interface)| {
            let flags = Iface::ATTACHED
                | if interface.pod {
                    Iface::PEER | Iface::LOCAL | interface.asked
                } else {
                    self.reverse_path
                };
            let interface = NetworkInterface {
                flags,
                masquerade: interface.masquerade_to,
                segment: interface.segment,
            };
            (*ifindex, interface)
        });
        let sources = self.sources.iter();
        let pods = sources.filter(|(set, ..)| *set == SourceKey::PODS);
        Network {
            interfaces: interfaces.collect(),
            others: BTreeSet::new(),
            host: HOST
                .map(|(of, bits)| SourceKey::network(SourceKey::HOST, addr(of), bits))
                .into(),
            pods: pods
                .map(|(set, addr, length)| SourceKey::network(*set, *addr, *length))
                .collect(),
            policies: self.policies.clone(),
            config: self.config,
        }
    }

    /// Changes the configuration of the programs, and removes all IPsec policies.
    ///
    /// # Errors
    /// If the kernel refuses a write.
    pub fn configure(&mut self, rig: &mut Rig, config: PacketConfig) -> Result<()> {
        self.configure_with(rig, config, Vec::new())
    }

    /// Changes the configuration of the programs, and sets the IPsec policies.
    ///
    /// # Errors
    /// If the kernel refuses a write.
    pub fn configure_with(
        &mut self,
        rig: &mut Rig,
        config: PacketConfig,
        policies: Vec<Policy>,
    ) -> Result<()> {
        self.config = config;
        self.policies = policies;
        let problems = rig.set_network(&self.network())?;
        ensure!(problems.is_empty(), "{problems:?}");
        Ok(())
    }

    /// Gives other programs the present configuration, with the path through the stack.
    ///
    /// # Errors
    /// If the kernel refuses a write.
    pub fn configure_through_stack(&self, rig: &mut Rig) -> Result<()> {
        let mut network = self.network();
        network.config.flags |= PacketConfig::STACK;
        let problems = rig.set_network(&network)?;
        ensure!(problems.is_empty(), "{problems:?}");
        Ok(())
    }

    /// Whether an IPsec policy protects packets from one address to the other: in any direction, the first policy that
    /// covers the addresses decides.
    pub fn protects(&self, src: Addr, dst: Addr) -> bool {
        (0..3).any(|direction| {
            let covering = self.policies.iter().filter(|policy| {
                policy.kind.0 == direction
                    && policy.src.contains(&src.ip())
                    && policy.dst.contains(&dst.ip())
            });
            let first = covering.min_by_key(|policy| (policy.priority, !policy.protects));
            first.is_some_and(|policy| policy.protects)
        })
    }

    /// Returns an interface's index and link-layer address.
    ///
    /// # Panics
    /// If no interface has this name.
    pub fn interface(&self, name: &str) -> (u32, [u8; 6]) {
        let found = self.interfaces.iter().find(|(_, i)| i.name == name);
        let (ifindex, interface) = found.expect("an interface of the lab");
        (*ifindex, interface.mac)
    }

    /// Returns the masquerade address with this index.
    pub fn node_addr(&self, index: u8) -> Addr {
        let addr = self.node_addrs.get(usize::from(index));
        addr.copied().unwrap_or(Addr::UNSPECIFIED)
    }

    /// Finds the service of a packet: the index of its pool, and the kind of the destination address.
    pub(crate) fn frontend(&self, headers: &Headers) -> Option<(u32, Kind)> {
        let protocol = Protocol::from_number(headers.protocol);
        let (addr, port) = (headers.dst, headers.ports[1]);
        let get = |key| self.frontends.get(&key).copied();
        if let Some(exact) = get(FrontendKey::new(addr, port, protocol)) {
            return Some(exact);
        }
        let address = get(FrontendKey::address(addr))?;
        if address.1 == Kind::NODE_ADDRESS {
            get(FrontendKey::node_port(headers.v4, port, protocol))
        } else {
            Some(address)
        }
    }

    /// Whether any service has the address, also if it is the node's or a masquerade address.
    pub(crate) fn is_vip(&self, addr: Addr) -> bool {
        self.frontends.keys().any(|key| key.addr == addr)
    }

    /// Whether a service has the port, at the address or as a node port.
    pub(crate) fn is_served(&self, addr: Addr, port: Port, protocol: Protocol) -> bool {
        let node_port = FrontendKey::node_port(addr.is_v4(), port, protocol);
        let exact = FrontendKey::new(addr, port, protocol);
        self.frontends.contains_key(&node_port) || self.frontends.contains_key(&exact)
    }

    /// Whether a datagram comes from a service's address and port. Ports that only cluster IPs have do not count: the
    /// programs recognize only the other ports without a lookup.
    pub(crate) fn comes_from_service(&self, headers: &Headers) -> bool {
        let mut back = headers.clone();
        (back.src, back.dst) = (headers.dst, headers.src);
        back.ports.swap(0, 1);
        self.frontend(&back).is_some() && self.is_claimed(headers.ports[0])
    }

    /// Whether a service has this UDP port at an address that may belong to a host.
    pub(crate) fn is_claimed(&self, port: Port) -> bool {
        self.frontends.iter().any(|(key, (_, kind))| {
            let of_cluster = *kind == Kind::CLUSTER_IP || *kind == Kind::CLUSTER_ADDRESS;
            key.port == port && key.protocol == Protocol::UDP && !of_cluster
        })
    }

    /// Returns the endpoints of a family, repeated for each pool that has them.
    pub fn endpoints(&self, v4: bool) -> Vec<Endpoint> {
        let all = self.pools.values().flat_map(|pool| &pool.endpoints);
        all.filter(|endpoint| !endpoint.is_none() && endpoint.addr.is_v4() == v4)
            .copied()
            .collect()
    }

    /// Whether a set of networks contains the address.
    pub fn contains(&self, set: u32, addr: Addr) -> bool {
        let mut sources = self.sources.iter();
        sources.any(|(of, network, length)| *of == set && within(addr, *network, *length))
    }

    /// Whether the configuration has a way to recognize pods.
    pub fn knows_pods(&self) -> bool {
        let ways = PacketConfig::DETECT_BY_ADDRESS | PacketConfig::DETECT_BY_INTERFACE;
        self.config.flags & ways != 0
    }

    /// Whether a packet from this address, on this interface, comes from a pod.
    pub fn is_from_pod(&self, interface: &Interface, src: Addr) -> bool {
        let by = |flag| self.config.flags & flag != 0;
        (by(PacketConfig::DETECT_BY_ADDRESS) && self.contains(SourceKey::PODS, src))
            || (by(PacketConfig::DETECT_BY_INTERFACE) && interface.pod)
    }

    /// Whether all traffic to cluster IPs is masqueraded.
    pub fn masquerade_all(&self) -> bool {
        self.config.flags & PacketConfig::MASQUERADE_ALL != 0
    }

    fn ephemeral(&self) -> RangeInclusive<u16> {
        self.config.ephemeral_first..=self.config.ephemeral_last
    }

    /// Whether a masqueraded flow may keep its port: the port is not privileged, the host's own sockets do not use it
    /// and, for UDP, no service can get it later as a node port.
    pub fn is_nobodys(&self, port: u16, protocol: Protocol) -> bool {
        let node_port = protocol != Protocol::TCP && PacketConfig::NODE_PORTS.contains(&port);
        port >= 1024 && !node_port && !self.ephemeral().contains(&port)
    }

    /// Whether the packet may have its source address. `begins`: whether it begins a flow, which is checked more
    /// strictly.
    pub fn is_right(&self, ifindex: u32, headers: &Headers, begins: bool) -> bool {
        let interface = &self.interfaces[&ifindex];
        let pod = interface.pod && interface.asked != 0;
        let asked = match (pod, headers.v4) {
            (true, _) => interface.asked,
            (false, true) if !interface.pod => self.reverse_path,
            (false, _) => 0,
        };
        let cluster = self.frontends.get(&FrontendKey::address(headers.src));
        if begins && cluster.is_some_and(|(_, kind)| *kind == Kind::CLUSTER_ADDRESS) {
            return false;
        }
        if !pod && (!begins || asked == 0) {
            return !begins || !is_own(headers.src);
        }
        let To::Onward(way) = self.way(headers.dst, headers.src, ifindex).0 else {
            return false;
        };
        let back = &self.interfaces[&way.ifindex];
        let same_segment = pod && back.segment != 0 && back.segment == interface.segment;
        way.ifindex == ifindex || same_segment || (asked == Iface::LOOSE && !(pod && back.pod))
    }

    /// Whether a packet of a known flow is trusted to end the flow, or to store the ports of a first fragment.
    pub fn may_tell(&self, ifindex: u32, headers: &Headers) -> bool {
        let interface = &self.interfaces[&ifindex];
        if interface.pod && interface.asked != 0 {
            return self.is_right(ifindex, headers, false);
        }
        !is_own(headers.src)
    }

    /// Looks up the route to a destination. Returns it with the outgoing interface, or with the packet's own interface
    /// if the destination is this host or unreachable.
    pub fn way(&self, src: Addr, dst: Addr, ifindex: u32) -> (To, u32) {
        if is_own(dst) {
            return (To::Here, ifindex);
        }
        // Link-scope addresses are never forwarded (`rt6_need_strict` in `net/ipv6/route.c`).
        let of_a_link = |addr: Addr| {
            let octets = addr.octets();
            let multicast = octets[0] == 0xff;
            let link_local = octets[0] == 0xfe && octets[1] & 0xc0 == 0x80;
            !addr.is_v4() && (multicast || link_local || addr.is_loopback())
        };
        let refused = [
            ("10.9.0.0", 112),
            ("10.10.0.0", 112),
            ("10.11.0.0", 112),
            ("10.12.0.0", 112),
            ("fd09::", 16),
            ("fd10::", 16),
            ("fd11::", 16),
            ("fd12::", 16),
            // A broadcast address, and the anycast address of a network's routers. (Since Linux 5.14, an IPv4 network's
            // first address is a normal host address.)
            ("192.168.77.255", 128),
            ("fd77::", 128),
        ];
        let refused = refused
            .iter()
            .any(|(of, bits)| within(dst, addr(of), *bits));
        if refused || of_a_link(src) || of_a_link(dst) {
            return (To::Nowhere, ifindex);
        }
        let (ifindex, neighbour) = if let Some(place) = self.places.get(&dst) {
            *place
        } else if within(dst, addr("192.168.77.0"), 120) || within(dst, addr("fd77::"), 64) {
            // The kernel knows the link-layer address of the router, and of no other host in this network.
            let router = dst == addr("192.168.77.254") || dst == addr("fd77::254");
            (self.uplink, router.then_some(ROUTER))
        } else if self.routed.load(Ordering::Relaxed) {
            (self.uplink, Some(ROUTER))
        } else {
            return (To::Nowhere, ifindex);
        };
        let mtu = self.interfaces[&ifindex].mtu;
        let way = Way {
            ifindex,
            mtu,
            neighbour,
        };
        (To::Onward(way), ifindex)
    }
}

/// The router's link-layer address.
const ROUTER: [u8; 6] = [2, 0, 0, 0, 0xfe, 0xfe];

/// Whether the node's routes make the address its own.
pub fn is_own(address: Addr) -> bool {
    HOST.iter()
        .any(|(of, bits)| within(address, addr(of), *bits))
}

/// Whether a network contains an address. `bits`: prefix length, counted for a 16-byte address.
fn within(inner: Addr, network: Addr, bits: u32) -> bool {
    let number = |addr: Addr| u128::from_be_bytes(addr.octets());
    (number(network) ^ number(inner)).leading_zeros() >= bits
}
