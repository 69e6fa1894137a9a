//! The packet path: its programs on interfaces, and the tables with the interfaces, addresses and networks that they
//! need.

mod node_addrs;
mod tables;
mod ways;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    time::Instant,
};

use aya::Ebpf;
use dataplane_common::{
    Addr,
    packet::{DEFAULT_FLOWS, Iface, NODE_ADDRS, PacketConfig, SourceKey},
};
use plan::ipsec::Policy;

use self::node_addrs::NodeAddrs;
pub use self::{tables::PacketTables, ways::PacketWays};
pub use super::limits::error_limits;
use super::{
    error::Error,
    pins::{Pins, spec},
    programs,
    protected::{Change, Protected},
    tables::Tables,
    tc::{self, Direction, Hook, InterfaceAttachment, PacketPrograms},
};

/// Options of the packet path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketOptions {
    /// How many flows conntrack has room for, if its tables are created.
    pub flows: u32,
    /// How to attach the programs to interfaces; `None`: not at all.
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

/// How to attach programs to interfaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttachOptions {
    /// The kind of attachment; `None`: the best that the kernel has.
    pub hook: Option<Hook>,
    /// The place among programs of other owners, on an interface that does not have ours yet.
    pub order: model::Order,
}

/// The interfaces and networks of the packet path, and their roles.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Network {
    /// The interfaces, by number.
    pub interfaces: BTreeMap<u32, NetworkInterface>,
    /// Further addresses of interfaces that have several, of which the kernel may choose one to masquerade to.
    pub others: BTreeSet<Addr>,
    /// The networks that pods' addresses are in ([`SourceKey::PODS`]).
    pub pods: BTreeSet<SourceKey>,
    /// The node's own addresses ([`SourceKey::HOST`]).
    pub host: BTreeSet<SourceKey>,
    /// The IPsec policies of the node.
    pub policies: Vec<Policy>,
    /// The rest, except [`PacketConfig::cells`], [`PacketConfig::secret`] and [`PacketConfig::policies`]: those depend
    /// on the tables.
    pub config: PacketConfig,
}

/// The role of an interface for the packet path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetworkInterface {
    /// Flags of [`Iface`]; programs are on those with [`Iface::ATTACHED`].
    pub flags: u16,
    /// The addresses that outgoing flows are masqueraded to, IPv4 and IPv6.
    pub masquerade: [Option<Addr>; 2],
    /// The layer-2 segment of the interface ([`Iface::segment`]).
    pub segment: u32,
}

/// The filter in front of `FRONTENDS`, which has to let the addresses through that flows are masqueraded to.
pub(crate) trait Filter {
    /// Before an address is masqueraded to.
    fn let_through(&mut self, addr: Addr);
    /// After an address was masqueraded to for the last time.
    fn let_through_no_more(&mut self, addr: Addr);
    /// Waits until no program that runs now can still see entries that were in use before.
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
pub(crate) struct PacketPath {
    pub(super) tables: PacketTables,
    programs: Option<PacketPrograms>,
    node_addrs: NodeAddrs,
    protected: Protected,
    /// [`PacketConfig::cells`] of the tables of flows. Existing tables keep their size.
    cells: u32,
    /// [`PacketConfig::secret`], of the same tables.
    secret: u64,
    /// Since when no program begins a flow on the path through the stack; `None`: programs do, or there is no such flow.
    fast_since: Option<Instant>,
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
            secret: pins.flow_secret()?,
            fast_since: None,
        })
    }

    /// Takes over the flags of the path through the stack from an older layout, whose programs serve and whose flows are taken
    /// over. If they cannot be read, there may be flows on this path.
    pub fn take_path(&self, pins: &Pins) {
        let flags = pins.newest_older().map_or(0, |older| {
            let tables = PacketTables::open_pins(&older, false);
            tables.map_or(PacketConfig::STACK_OUT, |tables| {
                tables.config().flags & PacketConfig::STACK
            })
        });
        self.tables.set_config(PacketConfig {
            flags,
            ..self.tables.config()
        });
    }

    /// Returns how the programs are attached to interfaces; `None` if they are not.
    pub fn hook(&self) -> Option<Hook> {
        self.programs.as_ref().map(PacketPrograms::hook)
    }

    /// Whether programs are to be put elsewhere in time ([`PacketPath::replace_provisional_programs`]).
    pub fn has_provisional_programs(&self) -> bool {
        let programs = self.programs.as_ref();
        programs.is_some_and(PacketPrograms::has_provisional)
    }

    /// Puts the programs of one interface where they stay.
    pub fn replace_provisional_programs(&mut self, pins: &Pins) -> Result<(), Error> {
        match &mut self.programs {
            Some(programs) => programs.replace_one_provisional(pins),
            None => Ok(()),
        }
    }

    /// Every address that flows may be masqueraded to.
    pub fn masquerade(&self) -> Vec<Addr> {
        self.node_addrs.all()
    }

    /// Makes the programs refuse the traffic that these policies protect, and changes nothing else. Returns the
    /// problems.
    pub fn set_policies(
        &mut self,
        filter: &mut impl Filter,
        policies: &[Policy],
    ) -> Result<Vec<String>, Error> {
        let mut problems = Vec::new();
        let config = self.tables.config();
        self.protect(filter, policies, config, &mut problems)?;
        Ok(problems)
    }

    fn protect(
        &mut self,
        filter: &mut impl Filter,
        policies: &[Policy],
        config: PacketConfig,
        problems: &mut Vec<String>,
    ) -> Result<(), Error> {
        let sources = self.tables.sources();
        let change = self.protected.write(sources, policies, problems)?;
        let config = PacketConfig {
            cells: self.cells,
            secret: self.secret,
            policies: self.protected.first(),
            ..config
        };
        let before = self.tables.config();
        // Flows stay on the path on which they began, also after a restart of the agent.
        let stays = if config.flags & PacketConfig::BYPASS_STAYS == 0 {
            PacketConfig::STACK_OUT
        } else {
            PacketConfig::STACK_OUT | PacketConfig::BYPASS
        };
        let mut flags = config.flags | before.flags & stays;
        // If an IPsec policy protects packets, the stack has to encrypt the flows that belong to no service.
        if config.policies != 0 {
            flags &= !(PacketConfig::BYPASS | PacketConfig::BYPASS_NEW);
        }
        if flags & PacketConfig::BYPASS & !before.flags != 0 {
            // Without the flag, the programs do not remove what they have forgotten.
            self.tables.forget_bypass()?;
        }
        let config = PacketConfig { flags, ..config };
        self.write(filter, config)?;
        if matches!(change, Change::Made) {
            filter.wait_for_programs()?;
            self.protected.remove_old(self.tables.sources())?;
        }
        Ok(())
    }

    /// Writes the configuration. If no program begins flows on the path through the stack any more, waits for those that do.
    fn write(&mut self, filter: &mut impl Filter, config: PacketConfig) -> Result<(), Error> {
        if self.tables.config() != config {
            self.tables.set_config(config);
        }
        if config.flags & PacketConfig::STACK != PacketConfig::STACK_OUT {
            self.fast_since = None;
        } else if self.fast_since.is_none() {
            filter.wait_for_programs()?;
            self.fast_since = Some(Instant::now());
        }
        Ok(())
    }

    /// Makes the programs look no longer for flows on the path through the stack, if none can have begun since a walk over all
    /// flows began that found none.
    pub fn none_through_stack(&mut self, since: Instant) {
        if self.fast_since.take_if(|fast| *fast < since).is_some() {
            let config = self.tables.config();
            let flags = config.flags & !PacketConfig::STACK_OUT;
            self.tables.set_config(PacketConfig { flags, ..config });
        }
    }

    /// Whether interfaces may have programs of an earlier agent.
    fn has_earlier_programs(&self, to_attach: bool, before: &BTreeMap<u32, Iface>) -> bool {
        let is_attached = |iface: &Iface| iface.flags & Iface::ATTACHED != 0;
        self.programs.as_ref().is_some_and(|programs| {
            !to_attach || !programs.has_begun() && before.values().any(is_attached)
        })
    }

    fn set_networks(&self, network: &Network) -> Result<(), Error> {
        let sources = self.tables.sources();
        let wanted: BTreeSet<SourceKey> = network.pods.union(&network.host).copied().collect();
        let networks = sources.of_node()?;
        for key in wanted.difference(&networks) {
            sources.add(key)?;
        }
        for key in networks.difference(&wanted) {
            sources.remove(key)?;
        }
        Ok(())
    }

    /// Updates the tables and, if `to_attach`, the programs to match `network`. Entries that programs rely on are added
    /// before the programs are attached, and removed after they are detached.
    pub fn set(
        &mut self,
        pins: &Pins,
        filter: &mut impl Filter,
        network: &Network,
        to_attach: bool,
    ) -> Result<Vec<String>, Error> {
        let mut problems = Vec::new();
        let before: BTreeMap<u32, Iface> = self.tables.ifaces()?.into_iter().collect();
        let has_earlier = self.has_earlier_programs(to_attach, &before);
        let late = late(
            network.config.flags,
            self.tables.config().flags,
            has_earlier,
        );
        let mut config = network.config;
        config.flags &= !late;
        self.protect(filter, &network.policies, config, &mut problems)?;
        self.set_networks(network)?;

        let wanted = network.interfaces.values().flat_map(|i| i.masquerade);
        let mut wanted: BTreeSet<Addr> = wanted.flatten().collect();
        // If there is not room for all addresses, the masquerade addresses of interfaces come first.
        let mut changes = self.node_addrs.want(&wanted);
        wanted.extend(&network.others);
        changes.extend(self.node_addrs.want(&wanted));
        for change in changes {
            filter.let_through(change.addr);
            self.tables.set_node_addr(change.index, change.addr);
            if let Some(before) = change.before {
                filter.let_through_no_more(before);
            }
        }
        let index = |addr: Option<Addr>| addr.map_or(Some(0), |addr| self.node_addrs.index(addr));
        let to_attach = to_attach && self.programs.is_some();
        let mut attach = BTreeMap::new();
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
                segment: interface.segment,
            };
            let known = before.get(&ifindex);
            let is_new = known.is_none_or(|known| known.flags & Iface::ATTACHED == 0);
            let mut now = Some(iface);
            if iface.flags & Iface::ATTACHED != 0 {
                attach.insert(ifindex, iface);
                if is_new && to_attach {
                    // The programs send packets to an interface only when they are attached there, so that they see the
                    // answers.
                    let flags = iface.flags & !Iface::ATTACHED;
                    now = (flags & Iface::LOCAL != 0).then_some(Iface { flags, ..iface });
                }
            }
            if let Some(now) = now
                && known != Some(&now)
                && let Err(error) = self.tables.set_iface(ifindex, now)
            {
                problems.push(error.to_string());
                attach.remove(&ifindex);
            }
        }
        problems.extend(match &mut self.programs {
            Some(programs) if to_attach => {
                let wanted = attach.keys().copied().collect();
                // Also after failures: `status` names the missing programs.
                let tables = &self.tables;
                programs.attach(pins, &wanted, |ifindex| match attach.get(&ifindex) {
                    Some(iface) if before.get(&ifindex) != Some(iface) => {
                        tables.set_iface(ifindex, *iface)
                    }
                    _ => Ok(()),
                })?
            }
            Some(_) => Vec::new(),
            None => tc::keep_none(pins)?,
        });
        if late != 0 && to_attach {
            let config = self.tables.config();
            let flags = config.flags | late;
            self.write(filter, PacketConfig { flags, ..config })?;
        }
        for ifindex in before.keys() {
            if !network.interfaces.contains_key(ifindex) {
                self.tables.remove_iface(*ifindex)?;
            }
        }
        Ok(problems)
    }
}

/// Returns the flags that are written after all interfaces have our programs. An earlier agent's programs may not know the path
/// through the stack: they would let packets leave that our program on the way in has translated in part only. If their agent
/// has chosen this path, they know it.
fn late(wanted: u32, before: u32, has_earlier: bool) -> u32 {
    if has_earlier {
        wanted & PacketConfig::STACK & !before
    } else {
        0
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

#[cfg(test)]
mod tests;
