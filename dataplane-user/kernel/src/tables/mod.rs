//! The live tables: reading them, and replacing one by a larger copy while programs run.

mod affinity;
mod filter;
mod growth;
mod retire;
mod stats;
mod usage;
mod vips;

use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::Path,
    sync::atomic::Ordering,
    time::Duration,
};

use aya_obj::generated::bpf_map_type::BPF_MAP_TYPE_HASH;
use dataplane_common::{
    Reason, VipWords,
    capture::MESH_DNS,
    decide,
    tables::{
        Affinity, AffinityKey, Block, Config, Endpoint, Frontend, FrontendKey, Pool, PoolStats,
    },
};
pub use growth::{Growth, Limits};
use plan::{Contents, Demand};
use stats::Stats;
pub use usage::Usage;
use vips::Vips;
use zerocopy::{FromBytes, IntoBytes};

use super::{
    capture::lease,
    error::{Doing, Error},
    map::{Hash, Mapped},
    pins::{MAPS, MapSpec, Pins, spec},
    sources::Sources,
    sys::{self, Shape},
};

const SMALLEST: Demand = Demand {
    frontends: 256,
    pools: 256,
    endpoints: 512,
    affinity_groups: 0,
    sources: 0,
};
/// Clients that AFFINITY has room for while no service has affinity.
const FEW_CLIENTS: u32 = 1024;
/// The word of a [`Pool`] with its affinity; word 0 is the block.
const AFFINITY_WORD: usize = 1;
/// The word of [`Config`] that says whether anything is captured.
const MESH_WORD: usize = 2;
/// The word with the fields that only the packet path uses.
const PACKET_WORD: usize = 2;

/// The tables of one node.
#[derive(Debug)]
pub struct Tables {
    /// The outer maps, indexed by [`Outer`].
    outer: Vec<OwnedFd>,
    frontends: Hash<FrontendKey, Frontend>,
    pools: Mapped<Pool>,
    endpoints: Mapped<Endpoint>,
    stats: Stats,
    affinity: Hash<AffinityKey, Affinity>,
    reasons: OwnedFd,
    config: Mapped<Config>,
    vips: Vips,
    sources: Sources,
    cpus: u32,
}

#[derive(Clone, Copy)]
enum Outer {
    Frontends = 0,
    Pools = 1,
    Endpoints = 2,
    Stats = 3,
    Affinity = 4,
}

impl Outer {
    const ALL: [Self; 5] = [
        Self::Frontends,
        Self::Pools,
        Self::Endpoints,
        Self::Stats,
        Self::Affinity,
    ];

    const fn spec(self) -> &'static MapSpec {
        &MAPS[self as usize]
    }
}

impl Tables {
    /// Opens the pinned tables for reading: for commands, which work whether an agent runs or not.
    ///
    /// # Errors
    /// If they are not there, or not ours.
    pub fn open(bpffs: &Path) -> Result<Self, Error> {
        Self::open_pins(&Pins::new(bpffs), false)
    }

    /// Whether there are pinned tables at all.
    ///
    /// # Errors
    /// If the pins are not ours.
    pub fn exist(bpffs: &Path) -> Result<bool, Error> {
        Ok(Pins::new(bpffs).open_map(&MAPS[0])?.is_some())
    }

    pub(super) fn open_pins(pins: &Pins, writable: bool) -> Result<Self, Error> {
        let open = |spec: &MapSpec| -> Result<OwnedFd, Error> {
            let (fd, _) = pins.open_map(spec)?.ok_or_else(|| Error::Io {
                what: format!(
                    "{} is not there: no agent has run on it",
                    pins.map(spec.name).display()
                ),
                source: io::ErrorKind::NotFound.into(),
            })?;
            Ok(fd)
        };
        let mut outer = Vec::with_capacity(Outer::ALL.len());
        for table in Outer::ALL {
            outer.push(open(table.spec())?);
        }
        let inner = |table: Outer, shape: Shape| inner(pins, &outer[table as usize], table, shape);
        let hash = BPF_MAP_TYPE_HASH;
        let (frontends, frontends_capacity) =
            inner(Outer::Frontends, Hash::<FrontendKey, Frontend>::shape(hash))?;
        let (pools, pools_capacity) = inner(Outer::Pools, Mapped::<Pool>::shape(true))?;
        let (endpoints, endpoints_capacity) =
            inner(Outer::Endpoints, Mapped::<Endpoint>::shape(true))?;
        let (stats, stats_capacity) = inner(Outer::Stats, Mapped::<PoolStats>::shape(true))?;
        let (affinity, affinity_capacity) =
            inner(Outer::Affinity, Hash::<AffinityKey, Affinity>::on_demand())?;
        let mapped = || "cannot map a table".to_owned();
        let cpus = cpus()?;
        let pools = Mapped::map(pools, pools_capacity, writable).doing(mapped)?;
        let used = used_pools(&pools);
        Ok(Self {
            frontends: Hash::from_fd(frontends, frontends_capacity),
            pools,
            endpoints: Mapped::map(endpoints, endpoints_capacity, writable).doing(mapped)?,
            stats: Stats::open(stats, stats_capacity, cpus, used).doing(mapped)?,
            affinity: Hash::from_fd(affinity, affinity_capacity),
            reasons: open(spec("REASONS"))?,
            config: Mapped::map(open(spec("CONFIG"))?, 1, writable).doing(mapped)?,
            sources: Sources::new(open(spec("SOURCES"))?),
            vips: Vips::open(open(spec("VIPS"))?, writable).doing(mapped)?,
            outer,
            cpus,
        })
    }

    /// Creates and pins the outer maps, with the smallest inner maps in them.
    ///
    /// Not left to the loader, which makes the template of the inner maps with a description of
    /// its types (BTF): before Linux 6.2 a map without one is then taken for another kind
    /// (`timer_off` in `bpf_map_meta_equal`, `kernel/bpf/map_in_map.c`), and ours have none.
    pub(super) fn create(pins: &Pins) -> Result<(), Error> {
        let cpus = cpus()?;
        let doing = || "cannot create a table".to_owned();
        let frontends = new_frontends(SMALLEST.frontends).doing(doing)?;
        let pools = Mapped::<Pool>::create("pools", SMALLEST.pools).doing(doing)?;
        let endpoints = Mapped::<Endpoint>::create("endpoints", SMALLEST.endpoints).doing(doing)?;
        let stats = Stats::create(SMALLEST.pools, cpus).doing(doing)?;
        let affinity = new_affinity(FEW_CLIENTS).doing(doing)?;
        let inner = [
            frontends.fd(),
            pools.fd(),
            endpoints.fd(),
            stats.fd(),
            affinity.fd(),
        ];
        for (table, inner) in Outer::ALL.into_iter().zip(inner) {
            let outer = pins.create_map_of_maps(table.spec(), inner.as_fd())?;
            put(&outer, inner).doing(|| format!("cannot put {} in place", table.spec().name))?;
        }
        Ok(())
    }

    /// Everything that the plan is compared with.
    ///
    /// # Errors
    /// If the kernel does not let it be read.
    pub fn contents(&self) -> Result<Contents, Error> {
        let frontends = self
            .frontends
            .entries()
            .doing(|| "cannot read table FRONTENDS".to_owned())?;
        let pools: Vec<Pool> = (0..used_pools(&self.pools))
            .filter_map(|i| decide::Tables::pool(self, i))
            .collect();
        let slots = pools
            .iter()
            .map(|pool| pool.block.base() + u32::from(pool.block.len()))
            .max()
            .unwrap_or(0);
        let endpoints = (0..slots)
            .filter_map(|slot| self.endpoints.get(slot))
            .collect();
        Ok(Contents {
            frontends,
            pools,
            endpoints,
            sources: self.sources.of_pools()?,
        })
    }

    /// The source ranges of load balancers, and the networks of pods.
    pub fn sources(&self) -> &Sources {
        &self.sources
    }

    /// Returns a pool's counters, summed over all CPUs, since it came into being.
    pub fn pool_stats(&self, pool: u32) -> PoolStats {
        self.stats.pool(pool)
    }

    /// How many values an element of a per-CPU map has.
    pub(super) fn cpus(&self) -> usize {
        self.cpus as usize
    }

    /// Verdicts by reason, on all CPUs, indexed by [`Reason`].
    ///
    /// # Errors
    /// If the kernel does not let them be read.
    pub fn reasons(&self) -> Result<[u64; Reason::SLOTS as usize], Error> {
        let mut sums = [0; Reason::SLOTS as usize];
        for (index, sum) in (0u32..).zip(&mut sums) {
            let mut values = vec![0u8; self.cpus as usize * 8];
            sys::map_lookup(self.reasons.as_fd(), index.as_bytes(), &mut values)
                .doing(|| "cannot read table REASONS".to_owned())?;
            *sum = values
                .chunks_exact(8)
                .filter_map(|v| u64::read_from_bytes(v).ok())
                .sum();
        }
        Ok(sums)
    }

    /// The endpoint that a client used last, if it is remembered.
    ///
    /// # Errors
    /// If the kernel does not let it be read.
    pub fn affinity(&self, key: &AffinityKey) -> Result<Option<Affinity>, Error> {
        self.affinity
            .get(key)
            .doing(|| "cannot read table AFFINITY".to_owned())
    }

    /// The endpoints that clients used last, as a table.
    pub(super) fn affinity_table(&self) -> &Hash<AffinityKey, Affinity> {
        &self.affinity
    }

    /// The node's own network namespace, as the programs know it.
    pub fn host_netns(&self) -> u64 {
        self.config.get(0).map_or(0, |config| config.host_netns)
    }

    /// Returns the flags of the mesh (`MESH_NAMESPACES` and so on); 0: there is no mesh.
    pub fn mesh(&self) -> u64 {
        self.config
            .word(0, MESH_WORD)
            .map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Returns how long ago the agent's DNS server last renewed its lease, if captured queries go to their resolvers
    /// because the lease has expired. [`Duration::MAX`]: it was never renewed.
    pub fn queries_are_bypassed(&self) -> Option<Duration> {
        if self.mesh() >> MESH_DNS == 0 {
            return None;
        }
        let word = self.config.word(0, lease::WORD)?;
        let until = Duration::from_nanos(word.load(Ordering::Relaxed));
        if until.is_zero() {
            return Some(Duration::MAX);
        }
        let over = lease::now().checked_sub(until)?;
        Some(over + lease::QueryLease::LENGTH)
    }

    /// Adds frontends that are not there.
    pub(super) fn insert_frontends(
        &mut self,
        keys: &[FrontendKey],
        frontends: &[Frontend],
    ) -> Result<(), Error> {
        for (key, frontend) in keys.iter().zip(frontends) {
            self.vips.add(key, *frontend);
        }
        self.frontends
            .set_all(keys, frontends)
            .doing(|| format!("cannot add {} entries to FRONTENDS", keys.len()))
    }

    /// Changes an existing frontend.
    pub(super) fn replace_frontend(
        &mut self,
        key: &FrontendKey,
        frontend: Frontend,
    ) -> Result<(), Error> {
        let doing = || format!("cannot change {key:?} in FRONTENDS");
        let before = self.frontends.get(key).doing(doing)?;
        self.vips.add(key, frontend);
        self.frontends.set(key, &frontend).doing(doing)?;
        if let Some(before) = before {
            self.vips.remove(key, before);
        }
        Ok(())
    }

    pub(super) fn set_config(&self, host_netns: u64) {
        if let Some(word) = self.config.word(0, 0) {
            word.store(host_netns, Ordering::Relaxed);
        }
    }

    /// Tells the programs whether anything is captured, and by which port.
    pub(super) fn set_mesh(&self, mesh: u64) {
        if let Some(word) = self.config.word(0, MESH_WORD) {
            word.store(mesh, Ordering::Release);
        }
    }

    /// Fills slots that no pool refers to.
    pub(super) fn set_endpoints(&self, base: u32, endpoints: &[Endpoint]) {
        for (slot, endpoint) in (base..).zip(endpoints) {
            self.endpoints.set(slot, *endpoint);
        }
    }

    /// Sets a pool. The block goes last, in one store, after everything that it makes visible.
    pub(super) fn set_pool(&mut self, index: u32, pool: &Pool, fresh: bool) -> Result<(), Error> {
        if fresh {
            self.stats
                .reset(index)
                .doing(|| format!("cannot reset the counters of pool {index}"))?;
        }
        let pair = |first: u32, second: u32| {
            let mut bytes = [0; 8];
            bytes[..4].copy_from_slice(&first.to_ne_bytes());
            bytes[4..].copy_from_slice(&second.to_ne_bytes());
            u64::from_ne_bytes(bytes)
        };
        let affinity = pair(pool.affinity_seconds, pool.affinity_group);
        let word = |word| {
            self.pools
                .word(index, word)
                .expect("the plan's demand was reserved")
        };
        word(AFFINITY_WORD).store(affinity, Ordering::Release);
        word(PACKET_WORD).store(pair(pool.external, pool.ranged), Ordering::Release);
        word(0).store(pool.block.word(), Ordering::Release);
        Ok(())
    }

    /// Waits until every program that runs now has ended: the kernel does so itself when an outer
    /// map is written, before it answers (`maybe_wait_bpf_programs` in kernel/bpf/syscall.c).
    pub(super) fn grace(&self) -> Result<(), Error> {
        put(&self.outer[Outer::Frontends as usize], self.frontends.fd())
            .doing(|| "cannot wait for the programs that run now".to_owned())
    }
}

/// The same code as in the programs, on the same tables, from user space.
impl decide::Tables for Tables {
    fn vips(&self, index: u32) -> VipWords {
        self.vips.get(index)
    }

    fn frontend(&self, key: &FrontendKey) -> Frontend {
        self.frontends
            .get(key)
            .ok()
            .flatten()
            .unwrap_or(Frontend::NONE)
    }

    fn pool(&self, index: u32) -> Option<Pool> {
        let block = self.pools.word(index, 0)?.load(Ordering::Acquire);
        let pool = self.pools.get(index)?;
        Some(Pool {
            block: Block::from_word(block),
            ..pool
        })
    }

    fn endpoint(&self, slot: u32) -> Option<Endpoint> {
        self.endpoints.get(slot)
    }
}

/// Returns the entry as which the filter counts an address that is masqueraded to.
fn len(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

fn new_frontends(capacity: u32) -> io::Result<Hash<FrontendKey, Frontend>> {
    let shape = Hash::<FrontendKey, Frontend>::shape(BPF_MAP_TYPE_HASH);
    Hash::create("frontends", shape, capacity)
}

fn new_affinity(capacity: u32) -> io::Result<Hash<AffinityKey, Affinity>> {
    Hash::create(
        "affinity",
        Hash::<AffinityKey, Affinity>::on_demand(),
        capacity,
    )
}

/// One more than the highest pool that was ever in use.
fn used_pools(pools: &Mapped<Pool>) -> u32 {
    let used = |index: &u32| {
        pools
            .get(*index)
            .is_some_and(|pool| pool != Pool::default())
    };
    (0..pools.capacity())
        .rev()
        .find(used)
        .map_or(0, |last| last + 1)
}

/// Puts an inner map in place, and waits until no program uses the previous one.
fn put(outer: &OwnedFd, inner: &OwnedFd) -> io::Result<()> {
    sys::map_update(outer.as_fd(), &[0; 4], inner.as_raw_fd().as_bytes(), 0)
}

/// How often to look again for a table that is replaced at just this moment.
const TRIES: u32 = 3;

fn inner(
    pins: &Pins,
    outer: &OwnedFd,
    table: Outer,
    shape: Shape,
) -> Result<(OwnedFd, u32), Error> {
    let path = pins.map(table.spec().name);
    let doing = || format!("cannot open the table in {}", path.display());
    let mut tries = 0..TRIES;
    let fd = loop {
        let mut id = [0u8; 4];
        if !sys::map_lookup(outer.as_fd(), &[0; 4], &mut id).doing(doing)? {
            return Err(Error::Damaged {
                path,
                what: "there is no table in it".into(),
            });
        }
        match sys::map_by_id(u32::from_ne_bytes(id)) {
            // The agent has put another in its place meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound && tries.next().is_some() => {}
            found => break found.doing(doing)?,
        }
    };
    let info = sys::map_info(fd.as_fd()).doing(doing)?;
    let same = info.kind == shape.kind as u32
        && info.key_size == shape.key_size
        && info.value_size == shape.value_size
        && info.flags == shape.flags;
    if !same {
        return Err(Error::Damaged {
            path,
            what: format!("the table in it is not ours: {info:?}"),
        });
    }
    Ok((fd, info.max_entries))
}

fn cpus() -> Result<u32, Error> {
    aya::util::nr_cpus()
        .map(len)
        .map_err(|(what, source)| Error::Io {
            what: format!("cannot read {what}"),
            source,
        })
}
