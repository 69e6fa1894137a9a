//! Table `BY_PACKETS`: network namespaces whose sockets the socket programs leave alone, so that the packet path serves
//! their packets.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::atomic::Ordering,
};

use dataplane_common::{
    capture::{Enrolled, WORKLOADS},
    tables::{BY_PACKETS, Config},
};

use crate::{
    error::{Doing, Error},
    map::{Hash, Mapped},
    pins::{Pins, spec},
};

/// The place of `by_packets` among the words of [`Config`].
const WORD: usize = 4;

/// The table, for its one writer and for readers that show it.
#[derive(Debug)]
pub struct ByPackets {
    table: Hash<u64, u64>,
    namespaces: Hash<u64, Enrolled>,
    config: Mapped<Config>,
}

impl ByPackets {
    /// Opens the pinned tables.
    ///
    /// # Errors
    /// If they are not there, or not ours.
    pub fn open(bpffs: &Path, writable: bool) -> Result<Self, Error> {
        let pins = Pins::new(bpffs);
        let open = |name: &str| {
            let found = pins.open_map(spec(name))?;
            found.ok_or_else(|| Error::Io {
                what: format!("{} is not there", pins.map(name).display()),
                source: std::io::ErrorKind::NotFound.into(),
            })
        };
        let (table, _) = open("BY_PACKETS")?;
        let (namespaces, _) = open("NAMESPACES")?;
        let (config, _) = open("CONFIG")?;
        Ok(Self {
            table: Hash::from_fd(table, BY_PACKETS),
            namespaces: Hash::from_fd(namespaces, WORKLOADS),
            config: Mapped::map(config, 1, writable).doing(|| "cannot map a table".to_owned())?,
        })
    }

    /// Returns the namespaces by their cookies, with the entry of each ([`dataplane_common::tables::by_packets`]).
    ///
    /// # Errors
    /// If the kernel does not let it be read.
    pub fn all(&self) -> Result<BTreeMap<u64, u64>, Error> {
        let entries = self.table.entries();
        let entries = entries.doing(|| "cannot read table BY_PACKETS".to_owned())?;
        Ok(entries.into_iter().collect())
    }

    /// The namespaces whose connections a mesh captures, by their cookies.
    ///
    /// # Errors
    /// If the kernel does not let it be read.
    pub fn captured(&self) -> Result<BTreeSet<u64>, Error> {
        let entries = self.namespaces.entries();
        let entries = entries.doing(|| "cannot read table NAMESPACES".to_owned())?;
        let captured = entries
            .into_iter()
            .filter(|(_, enrolled)| enrolled.flags & Enrolled::CAPTURED != 0);
        Ok(captured.map(|(cookie, _)| cookie).collect())
    }

    /// Makes the table contain exactly these namespaces.
    ///
    /// # Errors
    /// If the kernel refuses, for example because there are too many.
    pub fn set(&self, wanted: &BTreeMap<u64, u64>) -> Result<(), Error> {
        let before = self.all()?;
        for (cookie, value) in wanted {
            if before.get(cookie) != Some(value) {
                self.table.set(cookie, value).doing(|| {
                    format!("cannot add to table BY_PACKETS, which has room for {BY_PACKETS} network namespaces")
                })?;
            }
        }
        let count = |count: usize| {
            if let Some(word) = self.config.word(0, WORD) {
                word.store(count as u64, Ordering::Release);
            }
        };
        if !wanted.is_empty() {
            count(wanted.len());
        }
        for cookie in before.keys().filter(|cookie| !wanted.contains_key(cookie)) {
            let removed = self.table.remove(cookie);
            removed.doing(|| "cannot remove from table BY_PACKETS".to_owned())?;
        }
        count(wanted.len());
        Ok(())
    }
}
