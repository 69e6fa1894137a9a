//! Gives one service the pools and keys that it should have.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use dataplane_common::tables::{Block, Endpoint, Frontend};
use model::{Gravity, Problem, Protocol, Service, ServicePort, TrafficPolicy};
use smallvec::SmallVec;

use super::{
    PoolOwner, PoolRole,
    adopt::{Adopted, PortPools},
    mirror::{self, Mirror, Writes},
    reach::Reach,
    wanted::{self, WantedKey},
};

/// The pools of a service.
#[derive(Debug, Default)]
pub(super) struct ServicePools {
    /// The pool of its cluster addresses; 0: none.
    pub(super) address: u32,
    /// The pools of its ports, by number and protocol, for each family.
    pub(super) ports: SmallVec<[(u16, Protocol, [PortPools; 2]); 1]>,
}

impl ServicePools {
    /// Returns the indices of all pools.
    pub(super) fn indices(&self) -> impl Iterator<Item = u32> {
        let ports = self.ports.iter().flat_map(|(_, _, families)| families);
        let ports = ports.flat_map(|pools| [pools.cluster, pools.local]);
        ports.chain([self.address]).filter(|index| *index != 0)
    }
}

/// The state of one service's update.
pub(super) struct ServiceUpdate<'a> {
    pub(super) mirror: &'a mut Mirror,
    pub(super) reach: &'a Reach,
    pub(super) adopted: Option<&'a Adopted>,
    pub(super) writes: &'a mut Writes,
    /// Buffers.
    pub(super) cluster: &'a mut Vec<Endpoint>,
    pub(super) local: &'a mut Vec<Endpoint>,
    /// Whether the tables have no room for its endpoints.
    pub(super) without_endpoints: bool,
    /// Flags of all its pools with endpoints.
    pub(super) flags: u16,
    pub(super) problems: Vec<Problem>,
}

impl ServiceUpdate<'_> {
    /// Gives `service` the pools that its `keys` need, and the keys their values. `keys` are the keys that it wants and
    /// owns. `before` are its present pools. Returns its new pools.
    pub(super) fn apply(
        &mut self,
        service: &Service,
        keys: &[WantedKey],
        mut before: ServicePools,
    ) -> ServicePools {
        let mut after = ServicePools::default();
        // Nearly every service has few ports. A map serves those with many, because a search for each port would be
        // quadratic.
        let mut many = BTreeMap::new();
        if before.ports.len() > 16 {
            let ports = before.ports.drain(..);
            many.extend(ports.map(|(port, protocol, pools)| ((port, protocol), pools)));
        }
        for keys in keys.chunk_by(|a, b| a.port == b.port) {
            let Some(port) = service.ports.get(usize::from(keys[0].port)) else {
                after.address = self.address(service, keys, std::mem::take(&mut before.address));
                continue;
            };
            let id = (port.port, port.protocol);
            let known = before
                .ports
                .iter()
                .position(|(p, proto, _)| (*p, *proto) == id);
            let mut families = known
                .map(|at| before.ports.swap_remove(at).2)
                .or_else(|| many.remove(&id))
                .unwrap_or_default();
            for (family, v4) in families.iter_mut().zip([true, false]) {
                self.family(service, port, keys, v4, family);
            }
            after.ports.push((port.port, port.protocol, families));
        }
        let gone = many.into_iter();
        let gone = gone.map(|((port, protocol), pools)| (port, protocol, pools));
        before.ports.extend(gone);
        for index in before.indices() {
            self.mirror.retire_pool(index, self.writes);
        }
        self.note_left_out(service);
        after
    }

    /// Returns the pool of the cluster addresses. It is always empty, so a port without a key of its own is refused.
    fn address(&mut self, service: &Service, keys: &[WantedKey], mut index: u32) -> u32 {
        let owner = PoolOwner {
            service: service.name.clone(),
            port: None,
            role: PoolRole::NoSuchPort,
        };
        if index == 0
            && let Some(adopted) = self.adopted
        {
            index = adopted.address_pool(self.mirror, keys).unwrap_or_default();
        }
        let index = self.take(index, owner);
        let contents = mirror::Contents {
            endpoints: &[],
            flags: Block::NO_SUCH_PORT,
            affinity_seconds: 0,
            affinity_group: index,
            external: 0,
            sources: &BTreeSet::new(),
        };
        self.mirror.set_pool(index, contents, self.writes);
        for wanted in keys {
            self.mirror.set_key(
                wanted.key,
                Some(Frontend::new(index, wanted.kind)),
                self.writes,
            );
        }
        index
    }

    /// Updates the pools and keys of one port in one family.
    ///
    /// The pool of all endpoints exists whenever the port has a key: it stands for the port's affinity, which the
    /// cluster IP shares with the node port. The pool of the local endpoints exists if a key is limited to them, or if
    /// clients from outside get them.
    fn family(
        &mut self,
        service: &Service,
        port: &ServicePort,
        keys: &[WantedKey],
        v4: bool,
        pools: &mut PortPools,
    ) {
        let keys = keys.iter().filter(|w| w.key.addr.is_v4() == v4);
        if keys.clone().next().is_none() {
            for index in [pools.cluster, pools.local]
                .into_iter()
                .filter(|index| *index != 0)
            {
                self.mirror.retire_pool(index, self.writes);
            }
            *pools = PortPools::default();
            return;
        }
        let narrowed = keys.clone().any(|w| w.policy == TrafficPolicy::Local);
        // The keys do not matter here: a key that changes owner refers to these pools until the end of the plan.
        let outside_is_local = service.external_policy == TrafficPolicy::Local;
        if pools.cluster == 0
            && let Some(adopted) = self.adopted
        {
            *pools = adopted.pools(self.mirror, keys.clone());
        }
        let owner = |role| PoolOwner {
            service: service.name.clone(),
            port: Some((port.port, port.protocol)),
            role,
        };

        let found = self.endpoints(port, v4, TrafficPolicy::Cluster);
        if found > Block::MAX_LEN {
            let (max, number, protocol) = (Block::MAX_LEN, port.port, port.protocol.word());
            self.problem(
                service,
                format!(
                    "port {number}/{protocol} has {found} endpoints; the first {max} are used, \
                     which is the most that one port can have: split the service"
                ),
            );
        }
        pools.cluster = self.take(pools.cluster, owner(PoolRole::Cluster));
        if narrowed || outside_is_local {
            self.endpoints(port, v4, TrafficPolicy::Local);
            pools.local = self.take(pools.local, owner(PoolRole::Local));
        } else if pools.local != 0 {
            let index = std::mem::take(&mut pools.local);
            self.mirror.retire_pool(index, self.writes);
        }
        self.write_pools(service, v4, *pools);
        for wanted in keys {
            let pool = match wanted.policy {
                TrafficPolicy::Cluster => pools.cluster,
                TrafficPolicy::Local => pools.local,
            };
            self.mirror.set_key(
                wanted.key,
                Some(Frontend::new(pool, wanted.kind)),
                self.writes,
            );
        }
    }

    /// Writes the pools of one port in one family. `local` and `cluster` hold this port's endpoints for each pool that is
    /// not 0; for a pool of 0, an earlier port's.
    fn write_pools(&mut self, service: &Service, v4: bool, pools: PortPools) {
        let affinity_seconds = wanted::affinity_seconds(service);
        let outside_is_local = service.external_policy == TrafficPolicy::Local;
        let wants_local = pools.local != 0;
        let none_here = self.local.is_empty() && !self.cluster.is_empty();
        let local = mirror::Contents {
            endpoints: self.local,
            flags: self.flags
                | if none_here {
                    Block::NO_LOCAL
                } else {
                    self.reach.flags(self.local)
                },
            affinity_seconds,
            affinity_group: pools.cluster,
            external: 0,
            sources: &BTreeSet::new(),
        };
        let sources = wanted::source_ranges(service, v4)
            .map(|range| wanted::source_key(pools.cluster, range))
            .collect();
        let cluster = mirror::Contents {
            endpoints: self.cluster,
            flags: self.flags | self.reach.flags(self.cluster),
            affinity_seconds,
            affinity_group: pools.cluster,
            external: if outside_is_local { pools.local } else { 0 },
            sources: &sources,
        };
        // The pool of the local endpoints is complete before clients from outside are sent there, and changes only
        // after they are no longer sent there.
        let before = self.mirror.pools[pools.cluster as usize].pool;
        let given_up = before.external != 0 && !outside_is_local;
        if wants_local && !given_up {
            self.mirror.set_pool(pools.local, local, self.writes);
        }
        self.mirror.set_pool(pools.cluster, cluster, self.writes);
        if wants_local && given_up {
            self.mirror.set_pool(pools.local, local, self.writes);
        }
    }

    /// Collects the endpoints of a pool of a port. Returns their number before truncation.
    fn endpoints(&mut self, port: &ServicePort, v4: bool, policy: TrafficPolicy) -> usize {
        let endpoints = match policy {
            TrafficPolicy::Cluster => &mut *self.cluster,
            TrafficPolicy::Local => &mut *self.local,
        };
        if self.without_endpoints {
            endpoints.clear();
            return 0;
        }
        wanted::endpoints(port, v4, policy, endpoints)
    }

    /// Returns the pool `index`, or a new pool if `index` is 0, with `owner` as its owner.
    fn take(&mut self, index: u32, owner: PoolOwner) -> u32 {
        if index == 0 {
            return self.mirror.take_pool(owner);
        }
        self.mirror.set_owner(index, Some(owner));
        index
    }

    /// Reports settings of the service that have no effect here.
    fn note_left_out(&mut self, service: &Service) {
        let lists = [
            ("spec.clusterIPs", &service.cluster_ips[..]),
            ("spec.externalIPs", &service.external_ips[..]),
            (
                "status.loadBalancer.ingress",
                &service.load_balancer_ips[..],
            ),
        ];
        for (field, ips) in lists {
            let can_be = |ip: IpAddr| {
                if field == "spec.externalIPs" {
                    wanted::can_be_external_ip(service, ip)
                } else {
                    wanted::can_be_vip(ip)
                }
            };
            for ip in ips.iter().filter(|ip| !can_be(**ip)) {
                self.problem(
                    service,
                    format!(
                        "{field}: {ip} is not served: an unspecified, loopback or multicast \
                         address cannot be a service's"
                    ),
                );
            }
        }
    }

    fn problem(&mut self, service: &Service, text: String) {
        self.problems.push(Problem {
            gravity: Gravity::Warning,
            place: format!("service {}", service.name),
            text,
        });
    }
}
