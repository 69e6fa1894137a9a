//! The packet path: its programs on interfaces, and the tables that tell them what interfaces,
//! addresses and networks are.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::OwnedFd,
    path::Path,
    sync::atomic::Ordering,
};

use aya::Ebpf;

use dataplane_common::{
    Addr,
    packet::{DEFAULT_FLOWS, Iface, NODE_ADDRS, PacketConfig, SourceKey},
};

use super::{
    error::{Doing, Error},
    map::{Hash, Mapped},
    pins::{Pins, spec},
    programs,
    protected::{Change, Protected},
    sources::Sources,
    tables::Tables,
    tc::{self, Direction, Hook, InterfaceAttachment, Order, PacketPrograms},
};
use crate::plan::ipsec::Policy;

/// How to run the packet path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketOptions {
    /// How many flows conntrack has room for, if its tables are created.
    pub flows: u32,
    /// How to put the programs on interfaces; `None`: not at all.
    pub attach: Option<AttachOptions>,
}

impl Default for PacketOptions {
    fn default() -> Self {
        Self {
            flows: DEFAULT_FLOWS,
            attach: None,
        }
    }
}

/// How to put programs on interfaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttachOptions {
    /// By which means; `None`: the best that the kernel has.
    pub hook: Option<Hook>,
    /// Where among other people's programs, on an interface where ours are not yet.
    pub order: Order,
}

/// What the packet path is to take interfaces and networks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Network {
    /// The interfaces, by number.
    pub interfaces: BTreeMap<u32, NetworkInterface>,
    /// The networks that pods' addresses are in ([`SourceKey::PODS`]).
    pub pods: BTreeSet<SourceKey>,
    /// The node's own addresses ([`SourceKey::HOST`]).
    pub host: BTreeSet<SourceKey>,
    /// The IPsec policies of the node.
    pub policies: Vec<Policy>,
    /// The rest, but for [`PacketConfig::cells`] and [`PacketConfig::policies`]: those are what the tables are.
    pub config: PacketConfig,
}

/// What the packet path is to take an interface for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetworkInterface {
    /// Flags of [`Iface`]; programs are on those with [`Iface::ATTACHED`].
    pub flags: u16,
    /// Which address flows that leave by it are masqueraded to, IPv4 and IPv6.
    pub masquerade: [Option<Addr>; 2],
}

/// The filter in front of `FRONTENDS`, which has to let the addresses through that flows are masqueraded to.
pub trait Filter {
    /// Before an address is masqueraded to.
    fn let_through(&mut self, addr: Addr);
    /// After an address was masqueraded to for the last time.
    fn let_through_no_more(&mut self, addr: Addr);
    /// Waits until no program that runs now can still see what was in use before.
    fn wait_for_programs(&mut self) -> Result<(), Error>;
}

impl Filter for Tables {
    fn let_through(&mut self, addr: Addr) {
        Self::let_through(self, addr);
    }

    fn let_through_no_more(&mut self, addr: Addr) {
        Self::let_through_no_more(self, addr);
    }

    fn wait_for_programs(&mut self) -> Result<(), Error> {
        self.grace()
    }
}

/// The packet path of a node, for its one writer.
#[derive(Debug)]
pub struct PacketPath {
    tables: PacketTables,
    programs: Option<PacketPrograms>,
    node_addrs: NodeAddrs,
    protected: Protected,
    /// [`PacketConfig::cells`], as the tables of flows are: those that are there keep their size.
    cells: u32,
}

impl PacketPath {
    pub fn open(pins: &Pins, ebpf: &Ebpf, options: PacketOptions) -> Result<Self, Error> {
        let tables = PacketTables::open_pins(pins, true)?;
        let programs = match options.attach {
            None => None,
            Some(AttachOptions { hook, order }) => Some(PacketPrograms::new(
                programs::packet_program(ebpf, Direction::Ingress)?,
                programs::packet_program(ebpf, Direction::Egress)?,
                hook,
                order,
            )?),
        };
        // Without the packet path there are none.
        let cells = pins.open_map(spec("CONNTRACK"))?;
        let cells = cells.map_or(0, |(_, info)| info.max_entries.saturating_sub(1));
        Ok(Self {
            node_addrs: NodeAddrs::adopt(|index| tables.node_addr(index)),
            protected: Protected::adopt(tables.config()),
            tables,
            programs,
            cells,
        })
    }

    pub fn tables(&self) -> &PacketTables {
        &self.tables
    }

    /// How the programs are put on interfaces; none if they are not.
    pub fn hook(&self) -> Option<Hook> {
        self.programs.as_ref().map(PacketPrograms::hook)
    }

    /// Every address that flows may be masqueraded to.
    pub fn masquerade(&self) -> Vec<Addr> {
        self.node_addrs.slots.iter().flatten().copied().collect()
    }

    /// Brings tables and, if `to_attach`, programs in line with `network`. What programs rely
    /// on is there before they are, and goes after them.
    pub fn set(
        &mut self,
        pins: &Pins,
        filter: &mut impl Filter,
        network: &Network,
        to_attach: bool,
    ) -> Result<Vec<String>, Error> {
        let mut problems = Vec::new();
        let sources = self.tables.sources();
        let change = self
            .protected
            .write(sources, &network.policies, &mut problems)?;
        let config = PacketConfig {
            cells: self.cells,
            policies: self.protected.first(),
            ..network.config
        };
        if self.tables.config() != config {
            self.tables.set_config(config);
        }
        if matches!(change, Change::Made) {
            filter.wait_for_programs()?;
            self.protected.remove_old(self.tables.sources())?;
        }
        let sources = self.tables.sources();
        let wanted: BTreeSet<SourceKey> = network.pods.union(&network.host).copied().collect();
        let networks = sources.of_node()?;
        for key in wanted.difference(&networks) {
            sources.add(key)?;
        }
        for key in networks.difference(&wanted) {
            sources.remove(key)?;
        }

        let wanted = network.interfaces.values().flat_map(|i| i.masquerade);
        let wanted: BTreeSet<Addr> = wanted.flatten().collect();
        for change in self.node_addrs.want(&wanted) {
            filter.let_through(change.addr);
            self.tables.set_node_addr(change.index, change.addr);
            if let Some(before) = change.before {
                filter.let_through_no_more(before);
            }
        }
        let index = |addr: Option<Addr>| addr.map_or(Some(0), |addr| self.node_addrs.index(addr));
        let before: BTreeMap<u32, Iface> = self.tables.ifaces()?.into_iter().collect();
        let mut attach = BTreeSet::new();
        for (&ifindex, interface) in &network.interfaces {
            let [v4, v6] = interface.masquerade.map(index);
            if v4.is_none() || v6.is_none() {
                problems.push(format!(
                    "{}: flows that leave by it cannot be masqueraded: the node has had more than \
                     {} addresses lately",
                    tc::name(ifindex),
                    NODE_ADDRS - 1,
                ));
            }
            let iface = Iface {
                flags: interface.flags,
                masquerade_v4: v4.unwrap_or_default(),
                masquerade_v6: v6.unwrap_or_default(),
            };
            if before.get(&ifindex) != Some(&iface)
                && let Err(error) = self.tables.set_iface(ifindex, iface)
            {
                problems.push(error.to_string());
                continue;
            }
            if iface.flags & Iface::ATTACHED != 0 {
                attach.insert(ifindex);
            }
        }
        problems.extend(match &self.programs {
            Some(programs) if to_attach => programs.attach(pins, &attach)?,
            Some(_) => Vec::new(),
            None => tc::keep_none(pins)?,
        });
        for ifindex in before.keys() {
            if !network.interfaces.contains_key(ifindex) {
                self.tables.remove_iface(*ifindex)?;
            }
        }
        Ok(problems)
    }
}

/// Asks the kernel whether the packet path's programs run where they belong.
///
/// # Errors
/// If there are no tables, or the kernel cannot be asked.
pub fn interface_attachments(bpffs: &Path) -> Result<Vec<InterfaceAttachment>, Error> {
    let pins = Pins::new(bpffs);
    let wanted: Vec<u32> = PacketTables::open_pins(&pins, false)?
        .ifaces()?
        .into_iter()
        .filter(|(_, iface)| iface.flags & Iface::ATTACHED != 0)
        .map(|(ifindex, _)| ifindex)
        .collect();
    tc::attachments(&pins, &wanted)
}

/// Which of the node's addresses has which index in `NODE_ADDRS`. Flows refer to an index for as
/// long as they live: so an address keeps its index when it goes, until the index that was idle
/// for longest is needed for another.
#[derive(Debug)]
struct NodeAddrs {
    /// By index; the first is never used.
    slots: Vec<Option<Addr>>,
    /// When each was last wanted, in calls of [`NodeAddrs::want`].
    wanted_at: Vec<u64>,
    now: u64,
}

/// An index that gets an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NewAddr {
    index: u8,
    addr: Addr,
    /// Which it had.
    before: Option<Addr>,
}

impl NodeAddrs {
    fn adopt(get: impl Fn(u8) -> Option<Addr>) -> Self {
        let slots: Vec<_> = (0..=u8::MAX).map(get).collect();
        Self {
            wanted_at: vec![0; slots.len()],
            slots,
            now: 0,
        }
    }

    fn index(&self, addr: Addr) -> Option<u8> {
        let index = self.slots.iter().position(|slot| *slot == Some(addr))?;
        u8::try_from(index).ok()
    }

    /// Gives every address an index, if it has none and there is one for it.
    fn want(&mut self, addrs: &BTreeSet<Addr>) -> Vec<NewAddr> {
        self.now += 1;
        let mut changes = Vec::new();
        for addr in addrs {
            if let Some(index) = self.index(*addr) {
                self.wanted_at[usize::from(index)] = self.now;
            }
        }
        for addr in addrs {
            if self.index(*addr).is_some() {
                continue;
            }
            let free = (1..=u8::MAX).find(|i| self.slots[usize::from(*i)].is_none());
            let idle = || {
                (1..=u8::MAX)
                    .filter(|i| self.wanted_at[usize::from(*i)] < self.now)
                    .min_by_key(|i| self.wanted_at[usize::from(*i)])
            };
            if let Some(index) = free.or_else(idle) {
                let at = usize::from(index);
                let before = self.slots[at].replace(*addr);
                self.wanted_at[at] = self.now;
                changes.push(NewAddr {
                    index,
                    addr: *addr,
                    before,
                });
            }
        }
        changes
    }
}

/// What the programs know of interfaces and of who may use what.
#[derive(Debug)]
pub struct PacketTables {
    ifaces: Hash<u32, Iface>,
    sources: Sources,
    node_addrs: Mapped<Addr>,
    config: Mapped<PacketConfig>,
}

impl PacketTables {
    /// Opens the pinned tables for reading.
    ///
    /// # Errors
    /// If they are not there, or not ours.
    pub fn open(bpffs: &Path) -> Result<Self, Error> {
        Self::open_pins(&Pins::new(bpffs), false)
    }

    fn open_pins(pins: &Pins, writable: bool) -> Result<Self, Error> {
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
        })
    }

    /// What the programs take each interface for.
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

    /// What the programs take an interface for.
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

    /// What the programs are told.
    pub fn config(&self) -> PacketConfig {
        self.config.get(0).unwrap_or_default()
    }

    pub(super) fn set_config(&self, config: PacketConfig) {
        let words: [u64; 5] = zerocopy::transmute!(config);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn addr(n: u16) -> Addr {
        let [high, low] = n.to_be_bytes();
        Addr::from_v4([192, 0, high, low])
    }

    #[test]
    fn an_address_keeps_its_index_while_there_are_others() {
        let mut addrs = NodeAddrs::adopt(|index| (index == 7).then(|| addr(1000)));
        assert_eq!(addrs.want(&[addr(1000)].into()), [], "adopted");
        assert_eq!(addrs.index(addr(1000)), Some(7));
        let one = addrs.want(&[addr(1)].into());
        assert_eq!((one[0].index, one[0].before), (1, None));
        assert_eq!(addrs.want(&[addr(2)].into())[0].index, 2);
        assert_eq!(addrs.want(&[addr(1)].into()), [], "it came back");

        // 3 to 255 without 7: then the longest idle, which is the adopted one, then 2.
        let many: BTreeSet<Addr> = (100..352).map(addr).collect();
        assert_eq!(many.len(), 252);
        assert_eq!(addrs.want(&many).len(), 252);
        let more = many
            .iter()
            .copied()
            .chain([addr(3), addr(4), addr(5), addr(6)])
            .collect();
        let changes = addrs.want(&more);
        let given: Vec<_> = changes.iter().map(|c| (c.index, c.before)).collect();
        assert_eq!(
            given,
            [
                (7, Some(addr(1000))),
                (2, Some(addr(2))),
                (1, Some(addr(1)))
            ]
        );
        assert_eq!(addrs.index(addr(6)), None, "no more room");
    }
}
