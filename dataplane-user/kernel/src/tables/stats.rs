//! The counters of pools, by CPU.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{OnceLock, atomic::Ordering},
};

use dataplane_common::tables::{PoolStats, StatsHeader};
use zerocopy::IntoBytes;

use super::super::{map::Mapped, sys};

/// The counters. Mapped only while a caller reads them: a mapping counts as this process's memory in full, which on a
/// node with many CPUs would be most of it.
#[derive(Debug)]
pub struct Stats {
    fd: OwnedFd,
    capacity: u32,
    cpus: u32,
    /// Elements per CPU.
    stride: u32,
    /// Pools below this may have counted before.
    used: u32,
    mapped: OnceLock<Option<Mapped<PoolStats>>>,
}

impl Stats {
    /// Counters for pools below `pools`, all zero.
    pub fn create(pools: u32, cpus: u32) -> io::Result<Self> {
        let capacity = pools.saturating_mul(cpus);
        let fd = sys::map_create("stats", &Mapped::<PoolStats>::shape(true), capacity)?;
        let header = StatsHeader {
            stride: pools.into(),
            reserved: [0; 3],
        };
        sys::map_update(fd.as_fd(), 0u32.as_bytes(), header.as_bytes(), 0)?;
        Ok(Self {
            fd,
            capacity,
            cpus,
            stride: pools,
            used: 0,
            mapped: OnceLock::new(),
        })
    }

    /// Opens existing counters. Only pools below `used` may have counted.
    pub fn open(fd: OwnedFd, capacity: u32, cpus: u32, used: u32) -> io::Result<Self> {
        let mut header = StatsHeader::default();
        sys::map_lookup(fd.as_fd(), 0u32.as_bytes(), header.as_mut_bytes())?;
        let stride = u32::try_from(header.stride).unwrap_or(0);
        Ok(Self {
            fd,
            capacity,
            cpus,
            stride,
            used,
            mapped: OnceLock::new(),
        })
    }

    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Elements, of all CPUs together.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    fn map(&self, writable: bool) -> io::Result<Mapped<PoolStats>> {
        Mapped::map(self.fd.try_clone()?, self.capacity, writable)
    }

    /// Returns a pool's counters, summed over all CPUs.
    pub fn pool(&self, pool: u32) -> PoolStats {
        let Some(mapped) = self.mapped.get_or_init(|| self.map(false).ok()) else {
            return PoolStats::default();
        };
        if pool == 0 || pool >= self.stride {
            return PoolStats::default();
        }
        let per_cpu = (0..self.cpus).filter_map(|cpu| mapped.get(cpu * self.stride + pool));
        per_cpu.fold(PoolStats::default(), |sum, one| PoolStats {
            translated: sum.translated + one.translated,
            no_endpoints: sum.no_endpoints + one.no_endpoints,
            no_local: sum.no_local + one.no_local,
            no_such_port: sum.no_such_port + one.no_such_port,
        })
    }

    /// Starts a pool from zero, before a program can see it.
    pub fn reset(&mut self, pool: u32) -> io::Result<()> {
        if pool >= self.used {
            // The kernel made the array zero, and no program has counted here.
            self.used = pool + 1;
            return Ok(());
        }
        for cpu in 0..self.cpus {
            let index = cpu * self.stride + pool;
            let zero = PoolStats::default();
            sys::map_update(self.fd.as_fd(), index.as_bytes(), zero.as_bytes(), 0)?;
        }
        Ok(())
    }

    /// Returns a larger copy, which `put` puts in place.
    ///
    /// The programs continue to count while the copy is made. The counts that they add to the old table, until no
    /// program uses it any longer, are added to the copy afterwards.
    pub fn grow(
        &self,
        pools: u32,
        put: impl FnOnce(&OwnedFd) -> io::Result<()>,
    ) -> io::Result<Self> {
        let new = Self {
            used: self.used,
            ..Self::create(pools, self.cpus)?
        };
        let (from, to) = (self.map(false)?, new.map(true)?);
        let used = self.used.min(self.stride);
        let all = || (0..self.cpus).flat_map(|cpu| (1..used).map(move |pool| (cpu, pool)));
        let place = |stats: &Self, cpu: u32, pool: u32| cpu * stats.stride + pool;
        let mut copied = Vec::with_capacity((self.cpus * used) as usize);
        for (cpu, pool) in all() {
            let value = from.get(place(self, cpu, pool)).unwrap_or_default();
            to.set(place(&new, cpu, pool), value);
            copied.push(value);
        }
        put(&new.fd)?;
        for ((cpu, pool), before) in all().zip(copied) {
            let before: [u64; 4] = zerocopy::transmute!(before);
            for (word, before) in before.into_iter().enumerate() {
                let after = from.word(place(self, cpu, pool), word);
                let after = after.map_or(before, |word| word.load(Ordering::Relaxed));
                to.add(place(&new, cpu, pool), word, after.wrapping_sub(before));
            }
        }
        Ok(new)
    }
}
