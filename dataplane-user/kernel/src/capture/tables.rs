//! The tables of mesh capture, for reading.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use dataplane_common::{
    Addr,
    capture::{
        CaptureConfig, Enrolled, ListenerKey, Local, RangeKey, RuleKey, Traffic, TrafficKey,
    },
    tables::FrontendKey,
};
use plan::Captured;
use zerocopy::{FromBytes, IntoBytes};

use super::differences::Named;
use crate::{
    error::{Doing, Error},
    map::{Hash, Mapped, Plain},
    pins::{Pins, spec},
    sys,
};

/// The tables, for reading.
#[derive(Debug)]
pub struct CaptureTables {
    pub(super) config: Mapped<CaptureConfig>,
    pub(super) namespaces: Named<u64, Enrolled>,
    pub(super) cgroups: Named<u64, Enrolled>,
    pub(super) locals: Named<Addr, Local>,
    pub(super) rules: Named<RuleKey, u32>,
    pub(super) ranges: Named<RangeKey, u32>,
    pub(super) known: Named<FrontendKey, u32>,
    pub(super) listeners: OwnedFd,
    pub(super) traffic: Named<TrafficKey, Traffic>,
}

impl CaptureTables {
    /// Opens the pinned tables for reading.
    ///
    /// # Errors
    /// If they are not there, or not ours.
    pub fn open(bpffs: &Path) -> Result<Self, Error> {
        Self::open_pins(&Pins::new(bpffs), false)
    }

    pub(super) fn open_pins(pins: &Pins, writable: bool) -> Result<Self, Error> {
        let open = |name| -> Result<(OwnedFd, u32), Error> {
            let (fd, info) = pins.open_map(spec(name))?.ok_or_else(|| Error::Io {
                what: format!("{} is not there", pins.map(name).display()),
                source: io::ErrorKind::NotFound.into(),
            })?;
            Ok((fd, info.max_entries))
        };
        Ok(Self {
            config: Mapped::map(open("CAPTURE")?.0, 1, writable)
                .doing(|| "cannot map table CAPTURE".to_owned())?,
            namespaces: named("NAMESPACES", open("NAMESPACES")?),
            cgroups: named("CGROUPS", open("CGROUPS")?),
            locals: named("LOCALS", open("LOCALS")?),
            rules: named("RULES", open("RULES")?),
            ranges: named("RANGES", open("RANGES")?),
            known: named("KNOWN", open("KNOWN")?),
            listeners: open("LISTENERS")?.0,
            traffic: named("TRAFFIC", open("TRAFFIC")?),
        })
    }

    /// Returns the tables' contents.
    ///
    /// # Errors
    /// If the kernel does not let it be read.
    pub fn contents(&self) -> Result<Captured, Error> {
        Ok(Captured {
            namespaces: all(&self.namespaces)?,
            cgroups: all(&self.cgroups)?,
            locals: all(&self.locals)?,
            rules: all(&self.rules)?,
            ranges: all(&self.ranges)?,
            known: all(&self.known)?,
        })
    }

    /// Returns the entry of a network namespace, by its cookie, as the kernel has it now; `None` if there is none.
    ///
    /// # Errors
    /// If the kernel does not let it be read.
    pub fn enrolled(&self, cookie: u64) -> Result<Option<Enrolled>, Error> {
        let entry = self.namespaces.hash.get(&cookie);
        entry.doing(|| "cannot read table NAMESPACES".to_owned())
    }

    /// Returns the entry of a workload's address, as the kernel has it now; `None` if there is none.
    ///
    /// # Errors
    /// If the kernel does not let it be read.
    pub fn local(&self, addr: Addr) -> Result<Option<Local>, Error> {
        let entry = self.locals.hash.get(&addr);
        entry.doing(|| "cannot read table LOCALS".to_owned())
    }

    /// Returns the configuration that all captured workloads have in common.
    pub fn config(&self) -> CaptureConfig {
        self.config.get(0).unwrap_or_default()
    }

    /// Returns the traffic of connections that went direct.
    ///
    /// # Errors
    /// If the kernel does not let it be read.
    pub fn traffic(&self) -> Result<Vec<(TrafficKey, Traffic)>, Error> {
        let entries = self.traffic.hash.entries();
        entries.doing(|| "cannot read table TRAFFIC".to_owned())
    }

    /// Returns the keys under which a proxy listens: of a family, to a network namespace or from a workload that is
    /// captured by its packets.
    ///
    /// # Errors
    /// If the kernel does not let it be read.
    pub fn listeners(&self) -> Result<BTreeSet<ListenerKey>, Error> {
        // The kernel removes closed sockets from the table by itself. It lists the keys, but not the sockets.
        let mut found = BTreeSet::new();
        let mut before: Option<ListenerKey> = None;
        let mut bytes = [0; size_of::<ListenerKey>()];
        loop {
            let from = before.as_ref().map(IntoBytes::as_bytes);
            let more = sys::map_next_key(self.listeners.as_fd(), from, &mut bytes)
                .doing(|| "cannot read table LISTENERS".to_owned())?;
            let Some(key) = more
                .then(|| ListenerKey::read_from_bytes(&bytes).ok())
                .flatten()
            else {
                return Ok(found);
            };
            found.insert(key);
            before = Some(key);
        }
    }
}

fn named<K: Plain, V: Plain>(name: &'static str, (fd, room): (OwnedFd, u32)) -> Named<K, V> {
    let hash = Hash::from_fd(fd, room);
    Named { name, hash }
}

/// Everything in a table, key by key: tries know no batches everywhere.
fn all<K: Plain + Ord, V: Plain>(table: &Named<K, V>) -> Result<BTreeMap<K, V>, Error> {
    let Named { name, hash } = table;
    let doing = || format!("cannot read table {name}");
    let mut entries = BTreeMap::new();
    let mut before: Option<K> = None;
    let mut bytes = vec![0; size_of::<K>()];
    loop {
        let from = before.as_ref().map(IntoBytes::as_bytes);
        let more = sys::map_next_key(hash.fd().as_fd(), from, &mut bytes).doing(doing)?;
        let Some(key) = more.then(|| K::read_from_bytes(&bytes).ok()).flatten() else {
            return Ok(entries);
        };
        if let Some(value) = hash.get(&key).doing(doing)? {
            entries.insert(key, value);
        }
        before = Some(key);
    }
}
