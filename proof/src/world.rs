//! The node that receives the packets: its interfaces, routes and services. It exists twice: in the kernel (the
//! namespace of a lab, and the tables), and in the model.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt::Write as _,
    net::IpAddr,
    ops::RangeInclusive,
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::{
    Addr, Port, Protocol, decide,
    packet::{Iface, PacketConfig, SourceKey},
    tables::{self, Block, Endpoint, Frontend, FrontendKey, Kind},
};
use dataplane_tests::{Host, Lab};
use kernel::{Network, NetworkInterface, rig::Rig};
use plan::{Write, ipsec::Policy};

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
    /// The flags, of [`Block`].
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

/// A second node port of service 13, besides 30013.
pub const NODE_PORT_ELSEWHERE: u16 = 20013;
/// A port of service 13 at an external IP: the node's address on the pods' side.
pub const EXTERNAL_PORT: u16 = 8013;

/// Service 16's endpoints, at port 8080 on another node.
pub const MANY: [[&str; 2]; 12] = [
    ["10.244.2.20", "fd00:10:244:2::20"],
    ["10.244.2.21", "fd00:10:244:2::21"],
    ["10.244.2.22", "fd00:10:244:2::22"],
    ["10.244.2.23", "fd00:10:244:2::23"],
    ["10.244.2.24", "fd00:10:244:2::24"],
    ["10.244.2.25", "fd00:10:244:2::25"],
    ["10.244.2.26", "fd00:10:244:2::26"],
    ["10.244.2.27", "fd00:10:244:2::27"],
    ["10.244.2.28", "fd00:10:244:2::28"],
    ["10.244.2.29", "fd00:10:244:2::29"],
    ["10.244.2.30", "fd00:10:244:2::30"],
    ["10.244.2.31", "fd00:10:244:2::31"],
];

/// Offset from the index of an IPv4 pool to the index of the IPv6 pool of the same service.
const V6: u32 = 64;
/// An index that no pool has.
const NO_POOL: u32 = 70_000;

fn addr(text: &str) -> Addr {
    Addr::from(text.parse::<IpAddr>().expect("an address of this file"))
}

/// Builds the lab: a node with four pods and a default route. One pod's link has a small MTU, and one pod is silent.
///
/// # Errors
/// If the lab cannot be built.
pub fn lab() -> Result<Lab> {
    let lab = Lab::builder()
        .node("node1")
        .pod("node1", "near", "10.244.1.10")
        .pod("node1", "near2", "10.244.1.11")
        .pod("node1", "small", "10.244.1.12")
        .pod("node1", "quiet", "10.244.1.13")
        .build()?;
    let node = lab.node("node1");
    let mut script = String::from(
        "link set veth-small mtu 1400
         route add default via 192.168.77.254
         -6 route add default via fd77::254
         route add blackhole 10.9.0.0/16
         -6 route add blackhole fd09::/16
         route add prohibit 10.10.0.0/16
         -6 route add prohibit fd10::/16
         route add unreachable 10.11.0.0/16
         -6 route add unreachable fd11::/16
         route add throw 10.12.0.0/16
         -6 route add throw fd12::/16
         route add local 10.13.0.0/16 dev lo
         -6 route add local fd13::/16 dev lo
         neigh replace 192.168.77.254 lladdr 02:00:00:00:fe:fe dev eth0 nud permanent
         -6 neigh replace fd77::254 lladdr 02:00:00:00:fe:fe dev eth0 nud permanent\n",
    );
    for interface in [
        "eth0",
        "veth-near",
        "veth-near2",
        "veth-small",
        "veth-quiet",
    ] {
        // The model has no routes to link-local addresses.
        let _ = writeln!(script, "-6 addr flush dev {interface} scope link");
    }
    for (number, name) in [(10, "near"), (11, "near2"), (12, "small")] {
        for address in [
            format!("10.244.1.{number}"),
            format!("fd00:10:244:1::{number}"),
        ] {
            let mac = format!("02:00:00:00:01:{number}");
            let neigh =
                format!("neigh replace {address} lladdr {mac} dev veth-{name} nud permanent");
            let _ = writeln!(script, "{neigh}");
        }
    }
    for line in script.lines() {
        node.ip(line)?;
    }
    Ok(lab)
}

/// Reads the node's interfaces from `ip`: name, index, address, MTU.
fn interfaces(node: &Host) -> Result<BTreeMap<u32, Interface>> {
    let links: Vec<serde_json::Value> = node.command("ip").args(["-json", "link"]).json()?;
    let mut all = BTreeMap::new();
    for link in links {
        let name = link["ifname"].as_str().unwrap_or_default().to_owned();
        if name != "eth0" && !name.starts_with("veth-") {
            continue;
        }
        let number = |key: &str| link[key].as_u64().context("a number");
        let mut mac = [0; 6];
        let text = link["address"].as_str().unwrap_or_default();
        for (byte, digits) in mac.iter_mut().zip(text.split(':')) {
            *byte = u8::from_str_radix(digits, 16)?;
        }
        let pod = name != "eth0";
        let masquerade_to = match name.as_str() {
            "eth0" => [Some(addr("192.168.77.1")), Some(addr("fd77::1"))],
            "veth-quiet" => [None; 2],
            _ => [Some(addr("10.244.1.1")), Some(addr("fd00:10:244:1::1"))],
        };
        let interface = Interface {
            name,
            mac,
            pod,
            asked: if pod { Iface::STRICT } else { 0 },
            segment: 0,
            masquerade: [0; 2],
            masquerade_to,
            mtu: number("mtu")?.try_into()?,
        };
        all.insert(number("ifindex")?.try_into()?, interface);
    }
    ensure!(all.len() == 5, "not the interfaces of the lab: {all:?}");
    Ok(all)
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
        let pods = self
            .sources
            .iter()
            .filter(|(set, ..)| *set == SourceKey::PODS);
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

    /// Defines the services, in both families.
    fn serve(&mut self) {
        for v4 in [true, false] {
            self.define_pools(v4);
            self.define_services(v4);
            self.define_clients(v4);
        }
    }

    /// Defines one family's pools, and the source ranges of load balancers.
    fn define_pools(&mut self, v4: bool) {
        let shift = if v4 { 0 } else { V6 };
        let at = |v4_text: &str, v6_text: &str| addr(if v4 { v4_text } else { v6_text });
        let endpoint = |address: Addr, port: u16| Endpoint::new(address, Port::new(port));
        let near = endpoint(at("10.244.1.10", "fd00:10:244:1::10"), 8080);
        let near2 = endpoint(at("10.244.1.11", "fd00:10:244:1::11"), 8081);
        let small = endpoint(at("10.244.1.12", "fd00:10:244:1::12"), 80);
        let quiet = endpoint(at("10.244.1.13", "fd00:10:244:1::13"), 8080);
        let far = endpoint(at("10.244.2.10", "fd00:10:244:2::10"), 8080);
        let host = endpoint(at("192.168.77.1", "fd77::1"), 9090);
        let lost = endpoint(at("10.9.0.1", "fd09::1"), 8080);
        let forbidden = endpoint(at("10.10.0.1", "fd10::1"), 8080);
        let unreached = endpoint(at("10.11.0.1", "fd11::1"), 8080);
        let thrown = endpoint(at("10.12.0.1", "fd12::1"), 8080);
        let anycast = endpoint(at("10.13.0.1", "fd13::1"), 9090);
        let several = MANY.map(|[v4, v6]| endpoint(at(v4, v6), 8080));
        let pools: [(u32, &[Endpoint], u16); 16] = [
            (1, &[near, near2, small, quiet, far, host, anycast], 0),
            (2, &[near, far], 0),
            (3, &[near], 0),
            (4, &[far], 0),
            (5, &[], Block::NO_LOCAL),
            (6, &[], 0),
            (7, &[near, near2, far], 0),
            (8, &[host], 0),
            (9, &[lost, forbidden, unreached, thrown], 0),
            (10, &[lost, near], 0),
            (11, &[], Block::NO_SUCH_PORT),
            (12, &[], Block::NO_LOCAL),
            (13, &[small], 0),
            (14, &[near, far, lost], 0),
            (15, &[near], 0),
            (16, &several, 0),
        ];
        for (index, endpoints, flags) in pools {
            let mut endpoints = endpoints.to_vec();
            endpoints.sort_by(decide::order);
            let external = match index {
                2 => 3,
                4 => 5,
                14 => 15,
                _ => 0,
            };
            let affine = matches!(index, 7 | 14 | 15);
            let pool = Pool {
                endpoints,
                flags,
                affinity_seconds: if affine { 60 } else { 0 },
                affinity_group: shift + if index == 15 { 14 } else { index },
                external: if external == 0 { 0 } else { shift + external },
                ranged: matches!(index, 1 | 2),
            };
            self.pools.insert(shift + index, pool);
        }
        // The load balancers of pools 1 and 2 have source ranges.
        for (set, v4_text, v6_text, length) in [
            (1, "192.168.77.0", "fd77::", 24),
            (1, "10.244.1.10", "fd00:10:244:1::10", 32),
            (2, "198.51.100.128", "fd98::8000:0:0:0", 25),
        ] {
            let length = match (v4, length) {
                (true, length) => 96 + length,
                (false, 24) => 64,
                (false, 25) => 65,
                (false, _) => 128,
            };
            self.sources
                .push((shift + set, at(v4_text, v6_text), length));
        }
    }

    /// Defines one family's frontends.
    fn define_services(&mut self, v4: bool) {
        let shift = if v4 { 0 } else { V6 };
        let at = |v4_text: &str, v6_text: &str| addr(if v4 { v4_text } else { v6_text });
        for service in [1, 2, 4, 6, 7, 8, 9, 10, 12, 13, 14, 16] {
            let text = |v4_prefix: &str, v6_prefix: &str| {
                at(
                    &format!("{v4_prefix}{service}"),
                    &format!("{v6_prefix}{service}"),
                )
            };
            for (vip, kind) in [
                (text("10.96.0.", "fd00:96::"), Kind::CLUSTER_IP),
                (text("203.0.113.", "fd99::"), Kind::LOAD_BALANCER),
                (text("203.0.114.", "fd97::"), Kind::EXTERNAL_IP),
            ] {
                for protocol in [Protocol::TCP, Protocol::UDP] {
                    let key = FrontendKey::new(vip, Port::new(80), protocol);
                    self.frontends.insert(key, (shift + service, kind));
                }
                self.vips.push((vip, 80));
                if kind == Kind::CLUSTER_IP {
                    let key = FrontendKey::address(vip);
                    let value = (shift + 11, Kind::CLUSTER_ADDRESS);
                    self.frontends.insert(key, value);
                    let key = FrontendKey::new(vip, Port::new(99), Protocol::TCP);
                    self.frontends.insert(key, (NO_POOL, Kind::CLUSTER_IP));
                }
            }
            let port = 30000 + u16::try_from(service).unwrap_or_default();
            for protocol in [Protocol::TCP, Protocol::UDP] {
                let key = FrontendKey::node_port(v4, Port::new(port), protocol);
                self.frontends
                    .insert(key, (shift + service, Kind::NODE_PORT));
            }
            self.vips.push((at("192.168.77.1", "fd77::1"), port));
        }
        // A node port outside Kubernetes' default range, and an external IP that is also the address that
        // masqueraded flows to pods come from.
        let node = at("192.168.77.1", "fd77::1");
        let external = at("10.244.1.1", "fd00:10:244:1::1");
        for protocol in [Protocol::TCP, Protocol::UDP] {
            let key = FrontendKey::node_port(v4, Port::new(NODE_PORT_ELSEWHERE), protocol);
            self.frontends.insert(key, (shift + 13, Kind::NODE_PORT));
            let key = FrontendKey::new(external, Port::new(EXTERNAL_PORT), protocol);
            self.frontends.insert(key, (shift + 13, Kind::EXTERNAL_IP));
        }
        self.vips.push((node, NODE_PORT_ELSEWHERE));
        self.vips.push((external, EXTERNAL_PORT));
        let node = FrontendKey::address(node);
        self.frontends.insert(node, (0, Kind::NODE_ADDRESS));
    }

    /// Defines one family's addresses of clients.
    fn define_clients(&mut self, v4: bool) {
        for (v4_text, v6_text) in [
            ("192.168.77.201", "fd77::201"),
            ("198.51.100.9", "fd98::9"),
            ("198.51.100.200", "fd98::8000:0:0:1"),
            ("10.244.1.10", "fd00:10:244:1::10"),
            ("10.244.1.13", "fd00:10:244:1::13"),
            ("10.244.2.10", "fd00:10:244:2::10"),
            ("10.244.1.12", "fd00:10:244:1::12"),
            ("192.168.77.1", "fd77::1"),
            ("127.0.0.1", "::1"),
            ("10.9.0.1", "fd09::1"),
        ] {
            self.clients.push(addr(if v4 { v4_text } else { v6_text }));
        }
    }

    /// Writes the services into the kernel's tables.
    fn fill(&self, rig: &mut Rig) -> Result<()> {
        let mut writes = Vec::new();
        let mut base = 0;
        for (index, pool) in &self.pools {
            let len = u16::try_from(pool.endpoints.len())?;
            let block = Block::new(base, len, pool.flags);
            writes.push(Write::Endpoints {
                base,
                endpoints: pool.endpoints.clone(),
            });
            base += u32::from(len);
            let pool = tables::Pool {
                block,
                affinity_seconds: pool.affinity_seconds,
                affinity_group: pool.affinity_group,
                external: pool.external,
                ranged: pool.ranged.into(),
            };
            writes.push(Write::Pool {
                index: *index,
                pool,
                fresh: true,
            });
        }
        for (set, addr, length) in &self.sources {
            if *set != SourceKey::PODS {
                let key = SourceKey::network(*set, *addr, *length);
                writes.push(Write::AddSource { key });
            }
        }
        for (key, (pool, kind)) in &self.frontends {
            writes.push(Write::Insert {
                key: *key,
                frontend: Frontend::new(*pool, *kind),
            });
        }
        rig.apply(&writes)?;
        Ok(())
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

    /// Adds the default routes to the node of [`lab`], or removes them.
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn route(&self, lab: &Lab, routed: bool) -> Result<()> {
        if self.routed.swap(routed, Ordering::Relaxed) != routed {
            let verb = if routed { "add" } else { "del" };
            let node = lab.node("node1");
            node.ip(&format!("route {verb} default via 192.168.77.254"))?;
            node.ip(&format!("-6 route {verb} default via fd77::254"))?;
        }
        Ok(())
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
