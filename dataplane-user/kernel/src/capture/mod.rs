//! Mesh capture: its one writer, and its programs in workloads' network namespaces and on their interfaces.

mod differences;
mod inbound;
mod instances;
pub(super) mod interface_rules;
pub(super) mod lease;
mod listeners;
pub(super) mod machine_marks;
mod namespace;
mod pairs;
mod probes;
pub(super) mod routing;
pub use routing::TABLE as OUR_TABLE;
mod tables;
mod wanted;

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use aya::Ebpf;
use dataplane_common::{
    Port,
    capture::{
        CaptureConfig, EXCLUDED, Enrolled, FROM_CLIENT, JUDGED, ListenerKey, Local, MESH_CGROUPS,
        MESH_DENIES, MESH_DNS, MESH_GUARD, MESH_NAMESPACES, MESH_PACKETS, MESH_PORT, RuleKey,
        TrafficKey,
    },
};
use plan::Captured;
use zerocopy::{FromBytes, IntoBytes};

pub(crate) use self::wanted::keeps_program;
use self::wanted::{denies, has_proxy};
use self::{
    differences::{add, any, make_room, remove},
    inbound::{Inbound, detach, links},
    instances::MOST,
    probes::Probes,
};
pub use self::{
    interface_rules::{InterfaceRule, Machines, Unrouted, route_interfaces, unroute_interfaces},
    lease::QueryLease,
    listeners::{
        Listeners, QuerySockets, open_listeners, open_query_sockets, open_resolver_sockets,
        open_transparent_listeners, open_tunnel_listeners, sockets_of_listeners,
    },
    machine_marks::Marks,
    namespace::{Namespace, addresses, indices, is_linked, is_the_nodes, this_namespace},
    pairs::Pairs,
    routing::{route_answers, route_answers_no_more, route_to_sockets},
    tables::CaptureTables,
};
use super::{
    boot_guard,
    error::{Doing, Error},
    pins::Pins,
    programs::{self, INBOUND, PROBE_EVENTS, TCP_EVENTS},
    sys,
    tables::Tables,
    tc::{self, CaptureProgram, Hook},
};

/// The options that all captured workloads have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaptureOptions {
    /// The proxy's port for outbound connections, at loopback in the workload's namespace.
    pub outbound: u16,
    /// The proxy's port for inbound connections.
    pub inbound: u16,
    /// The mark of the agent's proxy's sockets.
    pub mark: u32,
    /// Whether the proxy is not the agent's.
    pub foreign: bool,
    /// Whether the configuration denies egress to any workload, so that datagrams are judged from the start.
    pub denies: bool,
    /// The port of the agent's DNS server; `None`: no queries are captured.
    pub dns: Option<u16>,
}

/// The tables of capture, and the programs for namespaces. The programs are absent if there is no mesh.
#[derive(Debug)]
pub struct Capture {
    tables: CaptureTables,
    /// The tables' contents.
    held: Captured,
    options: Option<CaptureOptions>,
    inbound: Option<Inbound>,
    /// For connections to a proxy.
    events: Option<OwnedFd>,
    /// For the kubelet's connections.
    probes: Option<Probes>,
    /// For the interfaces of workloads that are captured by their packets.
    packets: Option<CaptureProgram>,
    lease: QueryLease,
    /// Whether the guard of `dataplane guard` stands.
    pub(super) boot_guard: bool,
}

/// The cgroup of an agent of another layout, as its CAPTURE tells; 0 if there is none.
fn cgroup_of_another_layout(pins: &Pins) -> u64 {
    let read = |layout: &PathBuf| {
        let map = sys::obj_get(&layout.join("maps").join("CAPTURE")).ok()?;
        let info = sys::map_info(map.as_fd()).ok()?;
        let mut value = vec![0; info.value_size as usize];
        let there = sys::map_lookup(map.as_fd(), 0u32.as_bytes(), &mut value).ok()?;
        let (cgroup, _) = u64::read_from_prefix(&value).ok()?;
        there.then_some(cgroup)
    };
    let layouts = pins.other_layouts();
    layouts.iter().rev().find_map(read).unwrap_or_default()
}

impl Capture {
    /// Opens the tables, and adopts an earlier agent's: the workloads that it captured stay captured until
    /// [`Capture::apply`] says otherwise. Without `options`, nothing is captured from here on.
    ///
    /// Nothing can be attached before [`Capture::set_programs`].
    pub(super) fn open(
        pins: &Pins,
        tables: &Tables,
        options: Option<CaptureOptions>,
        agent_cgroup: u64,
    ) -> Result<Self, Error> {
        let own = CaptureTables::open_pins(pins, true)?;
        let mut capture = Self {
            held: own.contents()?,
            tables: own,
            options,
            inbound: None,
            events: None,
            probes: None,
            packets: None,
            lease: QueryLease::open(pins)?,
            boot_guard: boot_guard::stands(pins.root())?,
        };
        if let Some(options) = options {
            if capture.boot_guard {
                tables.set_mesh(boot_guard::refusing(tables.mesh(), options.outbound));
            }
            let earlier = capture.tables.config();
            let before = match earlier.agent_cgroup {
                0 => cgroup_of_another_layout(pins),
                own if own == agent_cgroup => earlier.before_cgroup,
                other => other,
            };
            let cgroups = [agent_cgroup, before];
            capture.set_config(options, cgroups, earlier.levels, &capture.held);
            // Only the earlier agent knew the workloads of these counters.
            for (key, _) in capture.tables.traffic()? {
                let _ = capture.tables.traffic.hash.remove(&key);
            }
        } else {
            tables.set_mesh(0);
            boot_guard::lower(pins.root())?;
            // Without the programs, packets that these rules bring to sockets here would find none.
            let entries = capture.held.namespaces.iter();
            let routed = entries.filter(|(_, entry)| entry.flags & Enrolled::VIRTUAL != 0);
            interface_rules::unroute(&routed.map(|(cookie, _)| *cookie).collect())
                .doing(|| "cannot remove the routing rules for virtual interfaces".to_owned())?;
            capture.write(&Captured::default())?;
            // `cleanup` lists the programs that cannot be detached; without tables they do nothing.
            let _ = tc::keep_no_capture(pins)?;
            let mark = capture.tables.config().mark;
            if mark != 0 {
                // If there is no such rule, there is nothing to remove.
                let _ = route_answers_no_more(mark | FROM_CLIENT);
            }
            let of_cgroups = links(pins, PROBE_EVENTS.name);
            for (path, _) in links(pins, INBOUND).into_iter().chain(of_cgroups) {
                detach(&path)?;
            }
        }
        Ok(capture)
    }

    /// Takes the loaded programs, if something is captured.
    pub(super) fn set_programs(
        &mut self,
        ebpf: &Ebpf,
        pins: &Pins,
        hook: Option<Hook>,
    ) -> Result<(), Error> {
        if self.options.is_some() {
            self.inbound = Some(Inbound::prepare(pins)?);
            self.events = Some(programs::kept_program(ebpf, &TCP_EVENTS)?);
            self.probes = Some(Probes::new(ebpf, pins)?);
            let on_interfaces = programs::packet_program(ebpf, tc::Direction::Capture)?;
            self.packets = Some(CaptureProgram::new(on_interfaces, hook)?);
        }
        Ok(())
    }

    /// Writes the configuration. The cgroups are this agent's and its predecessor's. `captured`: the present or next
    /// contents of the tables.
    fn set_config(
        &self,
        options: CaptureOptions,
        [agent_cgroup, before_cgroup]: [u64; 2],
        levels: u32,
        captured: &Captured,
    ) {
        let mut flags = 0;
        if options.foreign {
            flags |= CaptureConfig::FOREIGN;
        }
        if captured.locals.values().any(Local::is_measured) {
            flags |= CaptureConfig::ARRIVALS;
        }
        self.tables.config.set(
            0,
            CaptureConfig {
                agent_cgroup,
                before_cgroup,
                mark: options.mark,
                levels,
                outbound: Port::new(options.outbound),
                inbound: Port::new(options.inbound),
                flags,
            },
        );
    }

    /// Returns the tables' contents.
    pub fn held(&self) -> &Captured {
        &self.held
    }

    /// Whether the guard of `dataplane guard` stands.
    pub fn has_boot_guard(&self) -> bool {
        self.boot_guard
    }

    /// The tables, for reading.
    pub fn tables(&self) -> &CaptureTables {
        &self.tables
    }

    /// Attaches the program that follows connections to a proxy if `wanted` has a proxy, or if any process may be one:
    /// before the first of these connections is made.
    pub(super) fn attach_events(
        &self,
        pins: &Pins,
        cgroup: &Path,
        wanted: &Captured,
    ) -> Result<(), Error> {
        let (Some(options), Some(program)) = (self.options, &self.events) else {
            return Ok(());
        };
        if options.foreign || has_proxy(wanted) {
            programs::attach_events(program.as_fd(), pins, cgroup)?;
        }
        Ok(())
    }

    /// Attaches the program that notes the kubelet's connections to these cgroups, and detaches it from all others.
    pub(super) fn attach_probes(&self, pins: &Pins, cgroups: &[PathBuf]) -> Result<(), Error> {
        match &self.probes {
            Some(probes) => probes.attach(pins, cgroups),
            None => Ok(()),
        }
    }

    /// The lease of the agent's DNS server.
    pub fn query_lease(&self) -> QueryLease {
        self.lease.clone()
    }

    /// Brings the tables in line with `wanted`: new rules first, then the workloads that refer to them, each in one
    /// write, then the rules that no workload refers to any more go. `levels`: the levels of the hierarchy that have
    /// cgroups; `guard`: whether connections are refused from network namespaces that are not in `wanted`. Returns the
    /// word that the programs then need ([`Tables::set_mesh`]).
    pub(super) fn apply(
        &mut self,
        wanted: &Captured,
        levels: u32,
        guard: bool,
    ) -> Result<Option<u64>, Error> {
        let Some(options) = self.options else {
            return Ok(None);
        };
        let config = self.tables.config();
        let cgroups = [config.agent_cgroup, config.before_cgroup];
        // Levels only ever say where to look: more of them before, fewer after.
        let before = config.levels | levels;
        self.set_config(options, cgroups, before, wanted);
        self.write(wanted)?;
        self.set_config(options, cgroups, levels, wanted);
        let mut mesh = 0;
        if !wanted.namespaces.is_empty() {
            mesh |= MESH_NAMESPACES;
        }
        if !wanted.cgroups.is_empty() {
            mesh |= MESH_CGROUPS;
        }
        if guard {
            mesh |= MESH_GUARD | MESH_NAMESPACES;
            if self.boot_guard {
                mesh |= boot_guard::FLAGS;
            }
        }
        if wanted.locals.values().any(Local::is_by_packets) {
            mesh |= MESH_PACKETS;
        }
        if options.denies || denies(wanted) {
            mesh |= MESH_DENIES;
        }
        if mesh != 0 {
            mesh |= u64::from(Port::new(options.outbound).be()) << MESH_PORT;
        }
        let mut entries = wanted.namespaces.values();
        if let Some(port) = options.dns
            && entries.any(|entry| entry.resolvers != 0)
        {
            mesh |= u64::from(Port::new(port).be()) << MESH_DNS;
        }
        Ok(Some(mesh))
    }

    fn write(&mut self, wanted: &Captured) -> Result<(), Error> {
        let held = &mut self.held;
        let CaptureTables {
            namespaces,
            cgroups,
            locals,
            rules,
            ranges,
            known,
            ..
        } = &self.tables;
        let of_range = |_: &_, said: &u32| is_exclusion(None, *said);
        let of_rule = |key: &RuleKey, said: &u32| is_exclusion(Some(key.kind), *said);
        make_room(rules, &mut held.rules, &wanted.rules, of_rule)?;
        make_room(ranges, &mut held.ranges, &wanted.ranges, of_range)?;
        make_room(known, &mut held.known, &wanted.known, any)?;
        make_room(locals, &mut held.locals, &wanted.locals, any)?;
        let in_namespaces = &mut held.namespaces;
        make_room(namespaces, in_namespaces, &wanted.namespaces, any)?;
        add(rules, &mut held.rules, &wanted.rules)?;
        add(ranges, &mut held.ranges, &wanted.ranges)?;
        add(known, &mut held.known, &wanted.known)?;
        add(locals, &mut held.locals, &wanted.locals)?;
        add(namespaces, in_namespaces, &wanted.namespaces)?;
        add(cgroups, &mut held.cgroups, &wanted.cgroups)?;
        remove(namespaces, in_namespaces, &wanted.namespaces)?;
        remove(cgroups, &mut held.cgroups, &wanted.cgroups)?;
        remove(locals, &mut held.locals, &wanted.locals)?;
        remove(known, &mut held.known, &wanted.known)?;
        remove(rules, &mut held.rules, &wanted.rules)?;
        remove(ranges, &mut held.ranges, &wanted.ranges)
    }

    /// Removes the counters of connections of departed workloads, which makes room for others.
    pub fn forget_traffic(&self, keys: &[TrafficKey]) {
        for key in keys {
            // If it is not there, it is as it should be.
            let _ = self.tables.traffic.hash.remove(key);
        }
    }

    /// Attaches our program to namespaces, for inbound connections, or replaces the attached program in place. Returns the
    /// failures, by the namespaces' cookies.
    pub(super) fn attach_all(
        &mut self,
        pins: &Pins,
        namespaces: &[&Namespace],
    ) -> BTreeMap<u64, Error> {
        match &mut self.inbound {
            Some(inbound) => inbound.attach_all(pins, namespaces),
            None => BTreeMap::new(),
        }
    }

    /// Detaches our program from all namespaces but those of `wanted`. Its instances then serve others.
    pub(super) fn detach_others(
        &mut self,
        pins: &Pins,
        wanted: impl Fn(u64) -> bool,
    ) -> Result<(), Error> {
        let mut retired = Vec::new();
        for (path, cookie) in links(pins, INBOUND) {
            if !wanted(cookie) {
                // With the link goes the last reference to the program.
                let inbound = self.inbound.as_ref().filter(|_| retired.len() < MOST);
                retired.extend(inbound.and_then(|inbound| inbound.instance_of(cookie)));
                detach(&path)?;
            }
        }
        if let Some(inbound) = &mut self.inbound {
            inbound.keep(wanted, retired);
        }
        Ok(())
    }

    /// Attaches our program to these interfaces of captured workloads, and detaches it from all others. Returns the
    /// failures on interfaces, with the reasons.
    ///
    /// # Errors
    /// If the kernel cannot list the present attachments.
    pub(super) fn attach_interfaces(
        &self,
        pins: &Pins,
        wanted: &BTreeSet<u32>,
    ) -> Result<BTreeMap<u32, String>, Error> {
        match &self.packets {
            Some(program) => program.attach(pins, wanted),
            None => Ok(BTreeMap::new()),
        }
    }

    /// Says where connections go: inbound ones of a namespace, or those of a workload that is captured
    /// by its packets.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn listen(&self, key: ListenerKey, socket: BorrowedFd<'_>) -> Result<(), Error> {
        sys::map_update(
            self.tables.listeners.as_fd(),
            key.as_bytes(),
            &socket.as_raw_fd().to_ne_bytes(),
            0,
        )
        .doing(|| "cannot hand a listening socket to the kernel".to_owned())
    }

    /// The inverse of [`Capture::listen`].
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn listen_no_more(&self, key: ListenerKey) -> Result<(), Error> {
        sys::map_delete(self.tables.listeners.as_fd(), key.as_bytes())
            .doing(|| "cannot take a listening socket back from the kernel".to_owned())
            .map(|_| ())
    }
}

/// Whether an old rule or range may go before the new ones are there: a connection that an exclusion does not pass any longer is
/// captured, and nothing is open that was not. `kind`: that of a rule. The value of [`RuleKey::SOURCES`] is a number.
fn is_exclusion(kind: Option<u32>, said: u32) -> bool {
    kind != Some(RuleKey::SOURCES) && [EXCLUDED, JUDGED].contains(&said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_a_set_is_no_exclusion() {
        for (kind, said, wanted) in [
            (None, EXCLUDED, true),
            (None, JUDGED, true),
            (None, 1, false),
            (Some(RuleKey::INBOUND_PORT), EXCLUDED, true),
            (Some(RuleKey::SOURCES), EXCLUDED, false),
            (Some(RuleKey::SOURCES), JUDGED, false),
        ] {
            assert_eq!(is_exclusion(kind, said), wanted, "{kind:?} {said}");
        }
    }
}
