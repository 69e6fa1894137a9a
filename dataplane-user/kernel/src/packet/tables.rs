//! The tables of the packet path with interfaces, addresses and networks.

use std::{io, os::fd::OwnedFd, path::Path, sync::atomic::Ordering};

use dataplane_common::{
    Addr,
    packet::{Bypass, FlowKey, Iface, NODE_ADDRS, PacketConfig},
};

use crate::{
    error::{Doing, Error},
    map::{Hash, Mapped},
    pins::{BYPASS_MAP, Pins, spec},
    sources::Sources,
    tc,
};

/// The programs' tables of interfaces, and of the networks that may use each service.
#[derive(Debug)]
pub struct PacketTables {
    ifaces: Hash<u32, Iface>,
    sources: Sources,
    node_addrs: Mapped<Addr>,
    config: Mapped<PacketConfig>,
    /// Not there without the packet path.
    bypass: Option<Hash<FlowKey, Bypass>>,
}

impl PacketTables {
    /// Opens the pinned tables for reading.
    ///
    /// # Errors
    /// If they are not there, or not ours.
    pub fn open(bpffs: &Path) -> Result<Self, Error> {
        Self::open_pins(&Pins::new(bpffs), false)
    }

    /// Creates tables that are not pinned.
    #[cfg(test)]
    pub(super) fn unpinned() -> io::Result<Self> {
        use aya_obj::generated::bpf_map_type::BPF_MAP_TYPE_LPM_TRIE;
        use dataplane_common::packet::SourceKey;

        let sources = crate::sys::Shape {
            kind: BPF_MAP_TYPE_LPM_TRIE,
            ..Hash::<SourceKey, u32>::on_demand()
        };
        Ok(Self {
            ifaces: Hash::create("IFACES", Hash::<u32, Iface>::on_demand(), 16)?,
            sources: Sources::new(crate::sys::map_create("SOURCES", &sources, 16)?),
            node_addrs: Mapped::create("NODE_ADDRS", NODE_ADDRS)?,
            config: Mapped::create("PACKET_CONFIG", 1)?,
            bypass: None,
        })
    }

    pub(super) fn open_pins(pins: &Pins, writable: bool) -> Result<Self, Error> {
        let open = |name: &str| -> Result<(OwnedFd, u32), Error> {
            let found = pins.open_map(spec(name))?;
            let (fd, info) = found.ok_or_else(|| Error::Io {
                what: format!("{} is not there", pins.map(name).display()),
                source: io::ErrorKind::NotFound.into(),
            })?;
            Ok((fd, info.max_entries))
        };
        let mapped = || "cannot map a table".to_owned();
        let (ifaces, capacity) = open("IFACES")?;
        Ok(Self {
            ifaces: Hash::from_fd(ifaces, capacity),
            sources: Sources::new(open("SOURCES")?.0),
            node_addrs: Mapped::map(open("NODE_ADDRS")?.0, NODE_ADDRS, writable).doing(mapped)?,
            config: Mapped::map(open("PACKET_CONFIG")?.0, 1, writable).doing(mapped)?,
            bypass: pins
                .open_map(spec(BYPASS_MAP))?
                .map(|(fd, info)| Hash::from_fd(fd, info.max_entries)),
        })
    }

    /// Returns the entry of each interface.
    ///
    /// # Errors
    /// If the kernel does not let it be read.
    pub fn ifaces(&self) -> Result<Vec<(u32, Iface)>, Error> {
        let mut all = self
            .ifaces
            .entries()
            .doing(|| "cannot read table IFACES".to_owned())?;
        all.sort_unstable_by_key(|(index, _)| *index);
        Ok(all)
    }

    /// Returns the entry of an interface.
    ///
    /// # Errors
    /// If the kernel does not let it be read.
    pub fn iface(&self, index: u32) -> Result<Option<Iface>, Error> {
        self.ifaces
            .get(&index)
            .doing(|| "cannot read table IFACES".to_owned())
    }

    pub(super) fn set_iface(&self, index: u32, iface: Iface) -> Result<(), Error> {
        self.ifaces.set(&index, &iface).doing(|| {
            format!(
                "cannot add {} to IFACES, which has room for {} interfaces",
                tc::name(index),
                self.ifaces.capacity()
            )
        })
    }

    pub(super) fn remove_iface(&self, index: u32) -> Result<(), Error> {
        self.ifaces
            .remove(&index)
            .doing(|| format!("cannot remove interface {index} from IFACES"))
            .map(|_| ())
    }

    /// The address with an index that flows and interfaces refer to; none has index 0.
    pub fn node_addr(&self, index: u8) -> Option<Addr> {
        self.node_addrs
            .get(index.into())
            .filter(|addr| index != 0 && *addr != Addr::UNSPECIFIED)
    }

    pub(super) fn set_node_addr(&self, index: u8, addr: Addr) {
        self.node_addrs.set(index.into(), addr);
    }

    /// Returns the programs' configuration.
    pub fn config(&self) -> PacketConfig {
        self.config.get(0).unwrap_or_default()
    }

    /// Whether packets of services go through the stack.
    pub fn is_through_stack(&self) -> bool {
        self.config().flags & PacketConfig::STACK_IN != 0
    }

    /// Whether new flows that belong to no service bypass the stack.
    pub fn is_bypassed(&self) -> bool {
        self.config().flags & PacketConfig::BYPASS_NEW != 0
    }

    /// Forgets all flows that bypass the stack.
    pub(super) fn forget_bypass(&self) -> Result<(), Error> {
        let Some(bypass) = &self.bypass else {
            return Ok(());
        };
        let forget = || -> io::Result<()> {
            for (key, _) in bypass.entries()? {
                bypass.remove(&key)?;
            }
            Ok(())
        };
        forget().doing(|| format!("cannot empty {BYPASS_MAP}"))
    }

    pub(super) fn set_config(&self, config: PacketConfig) {
        let words: [u64; 12] = zerocopy::transmute!(config);
        for (index, now) in words.into_iter().enumerate() {
            if let Some(word) = self.config.word(0, index) {
                word.store(now, Ordering::Relaxed);
            }
        }
    }

    /// The networks of source ranges and of pods.
    pub fn sources(&self) -> &Sources {
        &self.sources
    }
}
