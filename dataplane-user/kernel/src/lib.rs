//! The kernel: loading, attaching, pinning and adopting our programs and tables, and writing the
//! tables. The only room that names aya, and the only one in user space with `unsafe`.

mod by_packets;
mod capture;
mod cgroup;
mod children;
mod cleanup;
pub mod conntrack;
mod direct;
mod error;
mod fields;
pub mod guard;
mod host_networks;
mod interfaces;
mod ip_sets;
pub mod keep_nat;
mod layouts;
mod limits;
mod listening;
mod log;
mod map;
mod mark_rules;
mod memory;
mod monitor;
pub mod namespaces;
pub mod netfilter;
mod netlink;
pub mod nf_conntrack;
mod nft_requests;
mod object;
pub mod opener;
mod packet;
mod pins;
mod pod_namespaces;
mod privileges;
pub mod probe;
mod programs;
mod protected;
mod reverse_path;
#[cfg(feature = "testing")]
pub mod rig;
mod rtnetlink;
mod services;
pub mod sockets;
mod sources;
mod sys;
pub mod sysctl;
mod tables;
mod tc;
#[cfg(feature = "testing")]
pub mod trial;
#[cfg(feature = "testing")]
pub mod verifier;
mod ways_out;
mod xfrm;

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fs::File,
    ops::Deref,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use aya::Ebpf;
pub use by_packets::ByPackets;
pub use capture::{
    Capture, CaptureOptions, CaptureTables, InterfaceRule, Listeners, Machines, Marks, Namespace,
    OUR_TABLE, Pairs, QueryLease, QuerySockets, Unrouted, addresses, indices, is_the_nodes,
    open_listeners, open_query_sockets, open_resolver_sockets, open_transparent_listeners,
    route_answers, route_answers_no_more, route_interfaces, route_to_sockets, this_namespace,
    unroute_interfaces,
};
pub use cgroup::cgroup2_root;
pub use children::ends_with_us;
pub use cleanup::{CleanupItem, cleanup, retire};
use dataplane_common::{Addr, capture::Enrolled};
pub use direct::DirectFlows;
pub use error::Error;
pub use host_networks::host_networks;
pub use interfaces::{Interface, Link, News, interfaces, leaves_by, way_to, ways_by_address};
pub use ip_sets::make_ip_sets;
pub use limits::error_limits;
pub use listening::{Listener, Listening, listeners, listening};
pub use mark_rules::{MarkRule, mark_rules, remove_mark_rules};
pub use memory::give_back_freed_memory;
pub use monitor::Monitor;
use nix::fcntl::Flock;
pub use packet::{
    AttachOptions, Network, NetworkInterface, PacketOptions, PacketTables, interface_attachments,
};
use plan::{Captured, Contents, Demand, Write, ipsec::Policy};
pub use pod_namespaces::{KnownPods, Own, PodNamespace, pod_namespaces};
pub use privileges::keep_network_only;
pub use programs::Attachment;
pub use reverse_path::{reverse_path, reverse_paths, shows_reverse_paths};
pub use services::ServiceTables;
pub use tables::{Growth, Limits, Tables, Usage};
pub use tc::{Direction, Hook, InterfaceAttachment, egress_of_others, name as interface_name};
use tracing::info;
pub use ways_out::{Way, ways_out};
pub use xfrm::{PolicyNews, policies as ipsec_policies};

use self::{
    conntrack::Conntrack,
    error::Doing,
    log::ProgramLog,
    packet::PacketPath,
    pins::{FLOW_MAPS, MAPS, Pins},
};

/// Where one node's programs and tables are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    /// Our directory on a bpffs, for example `/sys/fs/bpf/dataplane`.
    pub bpffs: PathBuf,
    /// The cgroup v2 directory whose processes are served.
    pub cgroup: PathBuf,
}

impl Paths {
    /// Returns the paths. `cgroup`: `None` for the root of cgroup v2.
    ///
    /// # Errors
    /// If there is no cgroup v2, and none is named.
    pub fn find(bpffs: PathBuf, cgroup: Option<PathBuf>) -> Result<Self, Error> {
        let cgroup = cgroup.map_or_else(cgroup2_root, Ok)?;
        Ok(Self { bpffs, cgroup })
    }

    /// Returns the paths as [`Self::find`] does, for commands that only read: without a cgroup v2, its usual path.
    pub fn find_or_guess(bpffs: PathBuf, cgroup: Option<PathBuf>) -> Self {
        let cgroup = cgroup.or_else(|| cgroup2_root().ok());
        let cgroup = cgroup.unwrap_or_else(|| "/sys/fs/cgroup".into());
        Self { bpffs, cgroup }
    }
}

/// The tables' one writer. Dropping it changes nothing: programs and tables stay pinned.
#[derive(Debug)]
pub struct Kernel {
    pins: Pins,
    cgroup: PathBuf,
    services: ServiceTables,
    packet: PacketPath,
    direct: Arc<DirectFlows>,
    capture: Capture,
    adopted: bool,
    /// The programs' log; `None` if the kernel does not let us read it.
    log: Option<ProgramLog>,
    /// The programs, until they are attached: those of another layout serve.
    waiting: Option<Waiting>,
    _lock: Flock<File>,
}

/// The inputs for attaching the programs.
#[derive(Debug)]
struct Waiting {
    ebpf: Ebpf,
    capture: bool,
}

impl Kernel {
    /// [`Kernel::open_with`], without the packet path and without capture.
    ///
    /// # Errors
    /// As there.
    pub fn open(paths: &Paths, limits: Limits) -> Result<Self, Error> {
        Self::open_with(paths, limits, PacketOptions::default(), None, nothing)
    }

    /// Takes over the node: adopts what an earlier agent pinned, or creates it; loads the programs,
    /// and attaches them or swaps them in place.
    ///
    /// `meanwhile` is done while the programs are loaded, which takes most of the time, if those of an earlier agent
    /// serve, by the same tables, and something is captured. It is to end soon after they are.
    ///
    /// Programs attached to empty tables leave everything alone, so nothing is served before the
    /// first [`Kernel::apply`], and nothing is refused. Where another layout's programs serve, they go
    /// on until [`Kernel::replace_other_layouts`].
    ///
    /// # Errors
    /// [`Error::Busy`] if another agent runs; [`Error::Foreign`] and [`Error::Damaged`] for pins
    /// that cannot be adopted, which are left as they are; otherwise the kernel's refusal.
    pub fn open_with(
        paths: &Paths,
        limits: Limits,
        packet: PacketOptions,
        capture: Option<CaptureOptions>,
        meanwhile: impl FnOnce(&Capture, &Loading<'_>),
    ) -> Result<Self, Error> {
        object::programs()?;
        cgroup::check_cgroup(&paths.cgroup)?;
        let pins = Pins::new(&paths.bpffs);
        pins.create_directories()?;
        let lock = pins.lock()?;
        let adopted = prepare(&pins)?;
        if adopted {
            prepare_flows(&pins, packet.attach.is_some())?;
        }
        let waits = !adopted && pins.is_another_attached();
        if waits {
            let tables = pins.take_connections(packet.attach.is_some())?;
            info!(
                ?tables,
                "another version's programs serve until the tables are filled; these are taken over"
            );
        }
        if !adopted {
            Tables::create(&pins)?;
        }
        if packet.attach.is_some() {
            pins.make_flow_secret()?;
        }
        let has_capture = capture.is_some();
        let agent = cgroup::own_cgroup().unwrap_or_default();
        let load = || programs::load(&pins, packet.flows, packet.attach.is_some(), has_capture);
        let (mut ebpf, early) = if adopted && has_capture {
            let tables = Tables::open_pins(&pins, true)?;
            let early = Capture::open(&pins, &tables, capture, agent)?;
            (
                load_while(load, |loading| meanwhile(&early, loading))?,
                Some(early),
            )
        } else {
            (load()?, None)
        };
        let mut tables = Tables::open_pins(&pins, true)?;
        let direct = Arc::new(DirectFlows::of(&ebpf)?);
        let hook = packet.attach.and_then(|attach| attach.hook);
        let packet = PacketPath::open(&pins, &ebpf, packet)?;
        tables.rebuild_filter(&packet.masquerade(), flow_vips(&pins)?.as_ref())?;
        let netns = sys::netns_cookie()
            .doing(|| "cannot ask for this network namespace's cookie".to_owned())?;
        tables.set_config(netns);
        let mut capture = match early {
            Some(early) => early,
            None => Capture::open(&pins, &tables, capture, agent)?,
        };
        capture.set_programs(&ebpf, &pins, hook)?;
        let log = ProgramLog::new(&mut ebpf);
        let mut waiting = None;
        if waits {
            waiting = Some(Waiting {
                ebpf,
                capture: has_capture,
            });
        } else {
            if programs::attach(&ebpf, &pins, &paths.cgroup, has_capture)? {
                direct.sockets_are_new();
            }
            capture.attach_events(&pins, &paths.cgroup, capture.held())?;
        }
        Ok(Self {
            pins,
            cgroup: paths.cgroup.clone(),
            services: ServiceTables::new(tables, limits, packet.masquerade()),
            packet,
            direct,
            capture,
            adopted,
            log,
            waiting,
            _lock: lock,
        })
    }

    /// Whether tables of an earlier agent were adopted.
    pub fn adopted(&self) -> bool {
        self.adopted
    }

    /// Whether another layout's programs serve, until [`Kernel::replace_other_layouts`].
    pub fn waits(&self) -> bool {
        self.waiting.is_some()
    }

    /// The tables of services, for a writer that waits for nothing else that is done here.
    pub fn services(&self) -> ServiceTables {
        self.services.clone()
    }

    /// The tables, for reading. Their writer waits meanwhile.
    pub fn tables(&self) -> impl Deref<Target = Tables> {
        self.services.read()
    }

    /// Returns the tables' contents.
    ///
    /// # Errors
    /// If the kernel does not let it be read.
    pub fn contents(&self) -> Result<Contents, Error> {
        self.services.contents()
    }

    /// Makes the tables large enough for a plan, while the programs run.
    ///
    /// # Errors
    /// [`Error::TableFull`] or [`Error::Grow`]; nothing that is served has changed.
    pub fn reserve(&mut self, demand: &Demand) -> Result<Vec<Growth>, Error> {
        self.services.reserve(demand)
    }

    /// Carries out a plan's writes, in their order, after [`Kernel::reserve`].
    ///
    /// # Errors
    /// The kernel's refusal of a write; those before it are done, and the planner must be made
    /// anew from [`Kernel::contents`].
    pub fn apply(&mut self, writes: &[Write]) -> Result<(), Error> {
        self.services.apply(writes)
    }

    /// Waits until no program that runs now can still see removed entries.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn grace(&mut self) -> Result<(), Error> {
        self.services.grace()
    }

    /// Tells the packet path what it is to take interfaces and networks for, and lets its programs
    /// be on the interfaces where they should be and on no others. Answers what did not work on
    /// one interface, which keeps nothing else from being done.
    ///
    /// # Errors
    /// The kernel's refusal of something that is no interface's.
    pub fn set_network(&mut self, network: &Network) -> Result<Vec<String>, Error> {
        let attach = self.waiting.is_none();
        self.packet
            .set(&self.pins, &mut self.services, network, attach)
    }

    /// Whether the packet path's programs are on some interfaces for now by a means that takes less time.
    pub fn has_provisional_programs(&self) -> bool {
        self.packet.has_provisional_programs()
    }

    /// Puts the programs of one such interface where they stay.
    ///
    /// # Errors
    /// The kernel's refusal. The next [`Kernel::set_network`] tries again.
    pub fn replace_provisional_programs(&mut self) -> Result<(), Error> {
        self.packet.replace_provisional_programs(&self.pins)
    }

    /// Tells the packet path of IPsec policies, and of nothing else. Answers what did not work.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn set_ipsec_policies(&mut self, policies: &[Policy]) -> Result<Vec<String>, Error> {
        self.packet.set_policies(&mut self.services, policies)
    }

    /// Whether the programs look for flows that do not belong to a service.
    pub fn direct_flows(&self) -> Arc<DirectFlows> {
        Arc::clone(&self.direct)
    }

    /// Mesh capture, for reading and for handing over listening sockets.
    pub fn capture(&self) -> &Capture {
        &self.capture
    }

    /// Brings the tables of capture in line with `wanted`, and leads inbound connections to `namespaces`, and to no
    /// others, through our program. `levels`: the levels of the hierarchy that have cgroups.
    ///
    /// # Errors
    /// The kernel's refusal; earlier writes of this call are in force.
    pub fn set_captured(
        &mut self,
        wanted: &Captured,
        levels: u32,
        namespaces: &[&Namespace],
        guard: bool,
    ) -> Result<BTreeMap<u64, Error>, Error> {
        let mut failed = BTreeMap::new();
        if self.waiting.is_none() {
            self.capture
                .attach_events(&self.pins, &self.cgroup, wanted)?;
        }
        // Before anything is looked up by it, and after.
        for namespace in namespaces.iter().filter(|_| self.waiting.is_none()) {
            if let Err(error) = self.capture.attach(&self.pins, namespace) {
                failed.insert(namespace.cookie, error);
            }
        }
        let mesh = self.capture.apply(wanted, levels, guard)?;
        if let Some(mesh) = mesh {
            self.services.read().set_mesh(mesh);
        }
        self.capture.detach_others(&self.pins, |cookie| {
            let entry = wanted.namespaces.get(&cookie);
            entry.is_some_and(|entry| entry.flags & Enrolled::LOOKED_UP != 0)
        })?;
        Ok(failed)
    }

    /// Has the packets of workloads on these interfaces go by capture's program, and on no others:
    /// before [`Kernel::set_captured`] says whose they are. Answers where that is not possible, and
    /// why.
    ///
    /// # Errors
    /// If the kernel cannot be asked what there is.
    pub fn attach_capture(
        &self,
        interfaces: &BTreeSet<u32>,
    ) -> Result<BTreeMap<u32, String>, Error> {
        if self.waits() {
            return Ok(BTreeMap::new());
        }
        self.capture.attach_interfaces(&self.pins, interfaces)
    }

    /// How the packet path's programs are put on interfaces; none if they are not.
    pub fn hook(&self) -> Option<Hook> {
        self.packet.hook()
    }

    /// Passes on what the programs have logged since the last call: faults of ours, one line each,
    /// as an error of target `dataplane_ebpf`.
    pub fn pass_on_log(&mut self) {
        if let Some(log) = &mut self.log {
            log.pass_on();
        }
    }

    /// Makes the programs serve in place of those of another layout, once the tables have their entries: the agent
    /// swaps the programs in its links for ours, so that no packet and no call finds both or none. The agent then
    /// removes the remaining pins of that layout. Call [`Kernel::set_network`] after it, and bring capture in line: until
    /// then, interfaces and network namespaces have the other layout's programs.
    ///
    /// # Errors
    /// If a link cannot be taken over or a pin not be removed. The objects that this call did not reach serve as
    /// before; the next agent goes on from there.
    pub fn replace_other_layouts(&mut self) -> Result<Vec<CleanupItem>, Error> {
        if let Some(waiting) = &self.waiting {
            let Waiting { ebpf, capture } = waiting;
            self.pins
                .take_links(|name| programs::is_link(name, *capture))?;
            if programs::attach(ebpf, &self.pins, &self.cgroup, *capture)? {
                self.direct.sockets_are_new();
            }
            self.capture
                .attach_events(&self.pins, &self.cgroup, self.capture.held())?;
            self.waiting = None;
        }
        let mut removed = Vec::new();
        for layout in self.pins.other_layouts() {
            removed.extend(cleanup::remove_layout(&layout, false)?);
        }
        Ok(removed)
    }

    /// Detaches the programs and removes every pin of ours: the node is as it was.
    ///
    /// # Errors
    /// If a pin cannot be removed.
    pub fn detach(self) -> Result<Vec<CleanupItem>, Error> {
        let root = self.pins.root().to_path_buf();
        drop(self);
        cleanup(&root, false)
    }
}

/// The services' addresses that flows go to; `None` without a packet path.
fn flow_vips(pins: &Pins) -> Result<Option<HashSet<Addr>>, Error> {
    let conntrack = Conntrack::open(pins.root())?;
    Ok(conntrack.map(|conntrack| conntrack.vips()))
}

/// Whether programs are still being loaded.
pub type Loading<'a> = dyn Fn() -> bool + 'a;

/// For [`Kernel::open_with`], where there is nothing to do meanwhile.
fn nothing(_: &Capture, _: &Loading<'_>) {}

/// Loads on a thread of its own, and does something else meanwhile.
fn load_while(
    load: impl FnOnce() -> Result<Ebpf, Error> + Send,
    meanwhile: impl FnOnce(&Loading<'_>),
) -> Result<Ebpf, Error> {
    thread::scope(|scope| {
        let loading = thread::Builder::new()
            .name("loading".to_owned())
            .spawn_scoped(scope, load)
            .doing(|| "cannot start a thread that loads the programs".to_owned())?;
        meanwhile(&|| !loading.is_finished());
        loading.join().unwrap_or_else(|_| {
            Err(Error::Io {
                what: "cannot load the programs".to_owned(),
                source: std::io::Error::other("the thread that loads them panicked"),
            })
        })
    })
}

/// Whether there is something to adopt. Incomplete pins without an attached program serve nothing and are removed: an
/// agent that died while it made them left them.
fn prepare(pins: &Pins) -> Result<bool, Error> {
    let attached = pins.any_link()?;
    let mut there = 0;
    let mut absent = None;
    for map in MAPS.iter().filter(|map| !map.is_of_flows()) {
        match pins.open_map(map)? {
            Some(_) => there += 1,
            None => absent = Some(map.name),
        }
    }
    match (absent, attached) {
        (Some(name), true) => Err(Error::Damaged {
            path: pins.map(name),
            what: "it is not there".into(),
        }),
        (None, true) => Ok(true),
        (_, false) => {
            if there > 0 || FLOW_MAPS.iter().any(|name| pins.map(name).exists()) {
                cleanup::remove_layout(&pins.layout(), false)?;
                pins.create_directories()?;
            }
            Ok(false)
        }
    }
}

/// Flows' tables are there as long as the packet path is on. If it is off, they go; if it is new, the remains of an
/// agent that died while it made them go.
fn prepare_flows(pins: &Pins, on: bool) -> Result<(), Error> {
    if !on {
        // The agent tries again, with every change of interfaces, to detach programs that cannot be detached now, and
        // reports them.
        let _ = tc::keep_none(pins)?;
        return pins.remove_flow_maps();
    }
    let mut absent = None;
    for map in MAPS.iter().filter(|map| map.is_of_flows()) {
        if pins.open_map(map)?.is_none() {
            absent = Some(map.name);
        }
    }
    match absent {
        None => Ok(()),
        Some(name) if tc::any(pins)? => Err(Error::Damaged {
            path: pins.map(name),
            what: "it is not there".into(),
        }),
        Some(_) => pins.remove_flow_maps(),
    }
}

/// Returns the process that writes the tables below `bpffs` now, if there is one.
pub fn writer(bpffs: &Path) -> Option<u32> {
    Pins::new(bpffs).writer()
}

/// Asks the kernel how our programs are attached.
///
/// # Errors
/// If the cgroup cannot be opened.
pub fn attachments(paths: &Paths) -> Result<Vec<Attachment>, Error> {
    programs::attachments(&Pins::new(&paths.bpffs), &paths.cgroup)
}

/// The cookie of the network namespace that this thread is in.
///
/// # Errors
/// If the kernel is older than 5.14.
pub fn netns_cookie() -> Result<u64, Error> {
    sys::netns_cookie().doing(|| "cannot ask for this network namespace's cookie".to_owned())
}
