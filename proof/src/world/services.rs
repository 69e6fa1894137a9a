//! The services of the node: their definitions, and the kernel's tables.

use anyhow::Result;
use dataplane_common::{
    Addr, Port, Protocol, decide,
    packet::SourceKey,
    tables::{self, Block, Endpoint, Frontend, FrontendKey, Kind},
};
use kernel::rig::Rig;
use plan::Write;

use super::{Pool, World, addr};

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

impl World {
    /// Defines the services, in both families.
    pub(super) fn serve(&mut self) {
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
    pub(super) fn fill(&self, rig: &mut Rig) -> Result<()> {
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
}
