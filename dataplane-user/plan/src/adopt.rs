//! Adopts tables that an earlier agent wrote.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use dataplane_common::{
    decide,
    tables::{FrontendKey, Kind, Pool},
};
use model::TrafficPolicy;
use thiserror::Error;

use super::{
    Contents,
    blocks::{self, Blocks, Damage},
    mirror::{Mirror, Slot, count, has_group},
    wanted::{WantedKey, key_text},
};

/// The reason why tables cannot be adopted: this program does not write such tables. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum AdoptError {
    /// Two frontends have the same key.
    #[error("table FRONTENDS: {} is there twice", key_text(.0))]
    DuplicateKey(FrontendKey),
    /// A frontend has an unknown kind.
    #[error("table FRONTENDS: {} is of kind {number}, which does not exist", key_text(.key))]
    UnknownKind {
        /// The frontend's key.
        key: FrontendKey,
        /// Its kind as a number ([`Kind::number`]).
        number: u8,
    },
    /// A frontend refers to a pool that does not exist.
    #[error("table FRONTENDS: {} ({kind:?}) refers to pool {pool} of {pools}", key_text(.key))]
    PoolOutOfRange {
        /// The frontend's key.
        key: FrontendKey,
        /// Its kind. A frontend of [`Kind::NODE_ADDRESS`] must refer to pool 0, every other frontend to a pool from 1
        /// on.
        kind: Kind,
        /// The pool it refers to.
        pool: u32,
        /// How many pools there are, with pool 0.
        pools: usize,
    },
    /// The affinity group of a pool is not a pool.
    #[error("table POOLS: the affinity group of pool {pool} is pool {group} of {pools}")]
    GroupOutOfRange {
        /// The index of the pool.
        pool: u32,
        /// Its group.
        group: u32,
        /// How many pools there are, with pool 0.
        pools: usize,
    },
    /// A pool refers to another pool for clients from outside, and that pool does not exist.
    #[error("table POOLS: clients from outside of pool {pool} get pool {external} of {pools}")]
    ExternalOutOfRange {
        /// The index of the pool.
        pool: u32,
        /// The pool for clients from outside.
        external: u32,
        /// How many pools there are, with pool 0.
        pools: usize,
    },
    /// The endpoints of a pool lie beyond the end of the table.
    #[error("table POOLS: pool {pool} has slots {base}+{len} of {slots}")]
    BlockOutOfRange {
        /// The index of the pool.
        pool: u32,
        /// Its first slot.
        base: u32,
        /// Number of its endpoints.
        len: u16,
        /// Number of slots of the table.
        slots: usize,
    },
    /// The block of a pool does not begin at a multiple of its size.
    #[error("table POOLS: the block at slot {base} is not aligned to its size")]
    MisalignedBlock {
        /// Its first slot.
        base: u32,
    },
    /// Two pools share slots.
    #[error("table POOLS: the blocks at slots {first} and {second} overlap")]
    OverlappingBlocks {
        /// First slot of the first pool.
        first: u32,
        /// First slot of the second pool.
        second: u32,
    },
    /// The endpoints of a block are not sorted.
    #[error("table ENDPOINTS: slot {slot}, of pool {pool}, is out of order")]
    UnsortedBlock {
        /// The pool.
        pool: u32,
        /// The slot that is less than the slot before it.
        slot: u32,
    },
}

/// Indices of the pools of a service's port in one family. 0 means that there is no pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PortPools {
    /// The pool of all endpoints, which is also the affinity group of both pools.
    pub(super) cluster: u32,
    /// The pool of the endpoints on this node.
    pub(super) local: u32,
}

/// References to adopted pools, for use until the first plan has found the owners of the pools.
#[derive(Debug, Default)]
pub(super) struct Adopted {
    /// Number of keys that refer to each pool.
    keys: HashMap<u32, u32>,
}

impl Adopted {
    /// Returns the pool for the ports that a service does not have. The service can have this pool only if every key
    /// that refers to the pool is one of `keys`.
    pub(super) fn address_pool(&self, mirror: &Mirror, keys: &[WantedKey]) -> Option<u32> {
        self.candidates(mirror, keys).into_iter().next()
    }

    /// Returns the pools of a service's port in one family. The service can have a pool only if every key that refers
    /// to the pool is one of `keys`: otherwise clients of another service would see endpoints of this service while the
    /// first plan is being written.
    pub(super) fn pools<'a>(
        &self,
        mirror: &Mirror,
        keys: impl IntoIterator<Item = &'a WantedKey>,
    ) -> PortPools {
        let candidates = self.candidates(mirror, keys);
        let group = |index: u32| mirror.pools[index as usize].pool.affinity_group;
        let free = |index: u32| {
            let slot = &mirror.pools[index as usize];
            // A group without keys of its own belongs to this pool only.
            slot.live
                && mirror.owner(index).is_none()
                && group(index) == index
                && (candidates.contains(&index) || !self.keys.contains_key(&index))
        };
        let cluster = candidates
            .iter()
            .copied()
            .map(group)
            .find(|&index| free(index));
        let Some(cluster) = cluster else {
            return PortPools::default();
        };
        let outside = mirror.pools[cluster as usize].pool.external;
        let only_outside = outside != 0
            && group(outside) == cluster
            && mirror.owner(outside).is_none()
            && !self.keys.contains_key(&outside);
        let local = candidates
            .into_iter()
            .find(|&i| i != cluster && group(i) == cluster)
            .or(only_outside.then_some(outside));
        PortPools {
            cluster,
            local: local.unwrap_or_default(),
        }
    }

    /// Returns the pools without an owner that only `keys` refer to, each with the kind and policy that it wants.
    fn candidates<'a>(
        &self,
        mirror: &Mirror,
        keys: impl IntoIterator<Item = &'a WantedKey>,
    ) -> BTreeSet<u32> {
        let mut referring = BTreeMap::<u32, u32>::new();
        for WantedKey {
            key, kind, policy, ..
        } in keys
        {
            if let Some(frontend) = mirror.keys.get(key)
                && frontend.kind() == *kind
                && mirror.is_local(frontend.pool()) == (*policy == TrafficPolicy::Local)
                && mirror.owner(frontend.pool()).is_none()
            {
                *referring.entry(frontend.pool()).or_default() += 1;
            }
        }
        referring.retain(|pool, count| self.keys.get(pool) == Some(count));
        referring.into_keys().collect()
    }
}

/// Checks `contents` and takes them over.
pub(super) fn adopt(contents: Contents) -> Result<(Mirror, Adopted), AdoptError> {
    let mut mirror = Mirror::default();
    let mut adopted = Adopted::default();
    mirror.pools = contents
        .pools
        .into_iter()
        .map(|pool| Slot {
            pool,
            ..Slot::default()
        })
        .collect();
    if mirror.pools.is_empty() {
        mirror.pools.push(Slot::default());
    }
    mirror.owners = mirror.pools.iter().map(|_| None).collect();
    mirror.endpoints = contents.endpoints;

    let pools = mirror.pools.len();
    mirror.keys.reserve(contents.frontends.len());
    for (key, frontend) in contents.frontends {
        let (pool, kind) = (frontend.pool(), frontend.kind());
        let in_range = match kind {
            Kind::NODE_ADDRESS => pool == 0,
            Kind::CLUSTER_IP
            | Kind::EXTERNAL_IP
            | Kind::LOAD_BALANCER
            | Kind::NODE_PORT
            | Kind::CLUSTER_ADDRESS => pool != 0 && (pool as usize) < pools,
            _ => {
                return Err(AdoptError::UnknownKind {
                    key,
                    number: kind.number(),
                });
            }
        };
        if !in_range {
            return Err(AdoptError::PoolOutOfRange {
                key,
                kind,
                pool,
                pools,
            });
        }
        if mirror.keys.insert(key, frontend).is_some() {
            return Err(AdoptError::DuplicateKey(key));
        }
        if kind != Kind::NODE_ADDRESS {
            mirror.pools[pool as usize].live = true;
            *adopted.keys.entry(pool).or_default() += 1;
        }
    }
    for pool in 1..count(pools) {
        if adopted.keys.contains_key(&pool) {
            let group = mirror.pools[pool as usize].pool.affinity_group;
            if group as usize >= pools {
                return Err(AdoptError::GroupOutOfRange { pool, group, pools });
            }
            if group != 0 {
                mirror.pools[group as usize].live = true;
            }
        }
    }
    for pool in 1..count(pools) {
        let external = mirror.pools[pool as usize].pool.external;
        if external != 0 && mirror.pools[pool as usize].live {
            if external as usize >= pools {
                return Err(AdoptError::ExternalOutOfRange {
                    pool,
                    external,
                    pools,
                });
            }
            mirror.pools[external as usize].live = true;
        }
    }
    for key in contents.sources {
        let is_new = mirror.sources.entry(key.set).or_default().insert(key);
        mirror.source_count += usize::from(is_new);
    }
    take_over_blocks(&mut mirror)?;
    Ok((mirror, adopted))
}

fn take_over_blocks(mirror: &mut Mirror) -> Result<(), AdoptError> {
    let mut live = Vec::new();
    for (index, slot) in (0u32..).zip(&mut mirror.pools).skip(1) {
        if !slot.live {
            slot.pool = Pool::default();
            mirror.free_pools.insert(index);
            continue;
        }
        mirror.affinity_groups += u32::from(has_group(index, &slot.pool));
        let (base, len) = (slot.pool.block.base(), slot.pool.block.len());
        if len == 0 {
            continue;
        }
        let slots = mirror.endpoints.len();
        let from = base as usize;
        let Some(endpoints) = mirror.endpoints.get(from..from + usize::from(len)) else {
            return Err(AdoptError::BlockOutOfRange {
                pool: index,
                base,
                len,
                slots,
            });
        };
        let unsorted = endpoints
            .windows(2)
            .position(|pair| decide::order(&pair[0], &pair[1]).is_gt());
        if let Some(at) = unsorted {
            return Err(AdoptError::UnsortedBlock {
                pool: index,
                slot: base + count(at) + 1,
            });
        }
        live.push((base, len));
        mirror.live_slots += blocks::slots(len.into());
    }
    mirror.blocks = Blocks::rebuild(live).map_err(|damage| match damage {
        Damage::Overlap(first, second) => AdoptError::OverlappingBlocks { first, second },
        Damage::Misaligned(base) => AdoptError::MisalignedBlock { base },
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use dataplane_common::{Port, Protocol, tables::Frontend};
    use model::{
        Claim, ServiceName,
        TrafficPolicy::{Cluster, Local},
    };

    use super::{
        super::{PoolOwner, PoolRole},
        *,
    };

    /// Pools from the first on, each with its group and the pool for clients from outside; the pool and policy of the key that a
    /// port wants; a pool to which the key of another port leads, and one whose owner is known (0: none); and the port's pools.
    #[test]
    fn a_port_has_the_pools_to_which_only_its_own_keys_lead() {
        let row = |pools: &[(u32, u32)], key, other, owned, wanted: (u32, u32)| {
            let case = format!("{pools:?} {key:?} {other} {owned}");
            let (pool, policy) = key;
            let addr = |host| IpAddr::from([10, 96, 0, host]).into();
            let at = |host| FrontendKey::new(addr(host), Port::new(80), Protocol::TCP);
            let keys = [(at(1), pool), (at(2), other)].into_iter();
            let keys = keys.filter(|(_, pool)| *pool != 0);
            let pools = pools.iter().map(|(affinity_group, external)| Pool {
                affinity_group: *affinity_group,
                external: *external,
                ..Pool::default()
            });
            let contents = Contents {
                frontends: keys
                    .map(|(key, pool)| (key, Frontend::new(pool, Kind::CLUSTER_IP)))
                    .collect(),
                pools: [Pool::default()].into_iter().chain(pools).collect(),
                ..Contents::default()
            };
            let (mut mirror, adopted) = adopt(contents).unwrap();
            let owner = PoolOwner {
                service: ServiceName::new("shop", "web"),
                port: None,
                role: PoolRole::Cluster,
            };
            mirror.set_owner(owned, (owned != 0).then_some(owner));
            let mut key = WantedKey {
                key: at(1),
                kind: Kind::CLUSTER_IP,
                port: 0,
                policy,
                claim: Claim::ClusterIp,
            };
            let found = adopted.pools(&mirror, [&key]);
            assert_eq!((found.cluster, found.local), wanted, "{case}");
            key.kind = Kind::NODE_PORT;
            assert_eq!(
                adopted.pools(&mirror, [&key]),
                PortPools::default(),
                "{case}"
            );
        };
        row(&[(1, 0)], (1, Cluster), 0, 0, (1, 0));
        row(&[(1, 0)], (1, Local), 0, 0, (0, 0));
        row(&[(1, 0)], (1, Cluster), 1, 0, (0, 0));
        row(&[(1, 0)], (1, Cluster), 0, 1, (0, 0));
        // A key of local endpoints, whose group has no key, no group, an owner, another group, or a key.
        row(&[(2, 0), (2, 0)], (1, Local), 0, 0, (2, 1));
        row(&[(0, 0)], (1, Local), 0, 0, (0, 0));
        row(&[(2, 0), (2, 0)], (1, Local), 0, 2, (0, 0));
        row(&[(2, 0), (3, 0), (3, 0)], (1, Local), 0, 0, (0, 0));
        row(&[(2, 0), (2, 0)], (1, Local), 2, 0, (0, 0));
        // Local endpoints that only clients from outside get: those of the port, all of its own, those of another group, an
        // owner's, and those that have a key.
        row(&[(1, 2), (1, 0)], (1, Cluster), 0, 0, (1, 2));
        row(&[(1, 1)], (1, Cluster), 0, 0, (1, 0));
        row(&[(1, 2), (2, 0)], (1, Cluster), 0, 0, (1, 0));
        row(&[(1, 2), (1, 0)], (1, Cluster), 0, 2, (1, 0));
        row(&[(1, 2), (1, 0)], (1, Cluster), 2, 0, (1, 0));
    }
}
