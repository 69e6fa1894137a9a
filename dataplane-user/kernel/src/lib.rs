//! The kernel: loading, attaching, pinning and adopting our programs and tables, and writing the
//! tables. The only room that names aya, and the only one in user space with `unsafe`.

pub mod boot;
mod boot_guard;
pub mod capture;
mod cgroup;
mod change_news;
pub mod cleanup;
pub mod conntrack;
mod direct;
mod error;
mod fields;
pub mod interfaces;
mod layouts;
mod limits;
pub mod listening;
mod log;
mod map;
mod monitor;
pub mod namespaces;
pub mod netfilter;
mod netlink;
pub mod nf_conntrack;
mod object;
mod open;
pub mod opener;
pub mod packet;
mod pins;
pub mod pods;
pub mod probe;
pub mod process;
mod programs;
mod protected;
#[cfg(feature = "testing")]
pub mod rig;
pub mod routing;
mod rtnetlink;
mod services;
pub mod sockets;
mod sources;
mod sys;
pub mod sysctl;
pub mod tables;
pub mod tc;
#[cfg(feature = "testing")]
pub mod trial;
#[cfg(feature = "testing")]
pub mod verifier;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    net::SocketAddr,
    ops::Deref,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use aya::Ebpf;
pub use change_news::ChangeNews;
pub use direct::DirectFlows;
pub use error::Error;
pub use monitor::Monitor;
use nix::fcntl::Flock;
pub use open::Loading;
use plan::{Captured, Contents, Demand, Write, ipsec::Policy};
pub use programs::Attachment;
pub use services::ServiceTables;

use self::{
    capture::{Capture, Namespace},
    cgroup::cgroup2_root,
    cleanup::{CleanupItem, cleanup},
    log::ProgramLog,
    packet::{Network, PacketPath},
    pins::Pins,
    tables::{Growth, Tables},
    tc::Hook,
};

/// The directories of one node's programs and tables.
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
    /// If the kernel refuses.
    pub fn grace(&mut self) -> Result<(), Error> {
        self.services.grace()
    }

    /// Sets the packet path's interfaces and networks, attaches its programs to the interfaces that need them, and
    /// detaches them from all others. Returns the errors on single interfaces; such an error does not stop the rest of
    /// the work.
    ///
    /// # Errors
    /// If the kernel refuses an operation that does not concern a single interface.
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

    /// Changes the IPsec policies of the packet path. Returns the problems that do not stop the change.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set_ipsec_policies(&mut self, policies: &[Policy]) -> Result<Vec<String>, Error> {
        self.packet.set_policies(&mut self.services, policies)
    }

    /// A walk over all flows that began at this moment has found none on the path through the stack: the programs look for such
    /// flows no longer, if none can have begun since.
    pub fn none_through_stack(&mut self, since: Instant) {
        self.packet.none_through_stack(since);
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
            // Before anything is looked up by it, and after.
            failed = self.capture.attach_all(&self.pins, namespaces);
        }
        let mesh = self.capture.apply(wanted, levels, guard)?;
        if let Some(mesh) = mesh {
            self.services.read().set_mesh(mesh);
        }
        self.capture.detach_others(&self.pins, |cookie| {
            let entry = wanted.namespaces.get(&cookie);
            entry.is_some_and(capture::keeps_program)
        })?;
        Ok(failed)
    }

    /// Leaves the connections of processes in these cgroups to workloads alone, and of no others: the kubelet's. Call it
    /// before [`Kernel::set_captured`].
    ///
    /// # Errors
    /// The kernel's refusal. Connections of the cgroups that this call did not reach are treated as before.
    pub fn set_probers(&self, cgroups: &[PathBuf]) -> Result<(), Error> {
        if self.waits() {
            return Ok(());
        }
        self.capture.attach_probes(&self.pins, cgroups)
    }

    /// Ends the guard of `dataplane guard`. The next [`Kernel::set_captured`] decides whether connections are refused.
    ///
    /// # Errors
    /// If the sign of the guard cannot be removed. The next agent then guards again.
    pub fn end_boot_guard(&mut self) -> Result<(), Error> {
        self.capture.boot_guard = false;
        boot_guard::lower(self.pins.root())
    }

    /// Attaches capture's program to these interfaces of workloads, and detaches it from all others. Call it before
    /// [`Kernel::set_captured`], which assigns the interfaces to workloads. Returns the failures on interfaces, with
    /// the reasons.
    ///
    /// # Errors
    /// If the kernel cannot list the present attachments.
    pub fn attach_capture(
        &self,
        interfaces: &BTreeSet<u32>,
    ) -> Result<BTreeMap<u32, String>, Error> {
        if self.waits() {
            return Ok(BTreeMap::new());
        }
        self.capture.attach_interfaces(&self.pins, interfaces)
    }

    /// Returns how the packet path's programs are attached to interfaces; `None` if they are not.
    pub fn hook(&self) -> Option<Hook> {
        self.packet.hook()
    }

    /// Writes the programs' log since the last call to the agent's log. Each line reports a bug of ours, as an error of
    /// target `dataplane_ebpf`.
    pub fn pass_on_log(&mut self) {
        if let Some(log) = &mut self.log {
            log.pass_on();
        }
    }

    /// Makes the programs serve in place of those of another layout, once the tables have their entries: the agent
    /// replaces the programs in its links by ours, so that each packet and each call meets exactly one of the two. The
    /// agent then removes the remaining pins of that layout. Call [`Kernel::set_network`] after it, and update capture:
    /// until then, interfaces and network namespaces have the other layout's programs.
    ///
    /// # Errors
    /// If a link cannot be taken over, or a pin cannot be removed. The objects that this call did not reach continue to
    /// serve; the next agent continues with them.
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

    /// Ends the connections that arrived at a workload directly, without its proxy, if `is_forbidden` says so of the client and of the
    /// workload's own address and port. `workload`: its number in the tables. Returns how many connections ended.
    ///
    /// # Errors
    /// If the tables or the network namespace's sockets cannot be read, or if the kernel cannot destroy sockets.
    pub fn end_arrived(
        &self,
        namespace: &Namespace,
        workload: u32,
        is_forbidden: impl Fn(SocketAddr, SocketAddr) -> bool + Send,
    ) -> Result<usize, Error> {
        let namespace = namespace.file.as_fd();
        sockets::destroy_arrived(&self.pins, namespace, workload, is_forbidden)
    }

    /// Detaches the programs and removes all our pins. The node is then as before the agent.
    ///
    /// # Errors
    /// If a pin cannot be removed.
    pub fn detach(self) -> Result<Vec<CleanupItem>, Error> {
        let root = self.pins.root().to_path_buf();
        drop(self);
        cleanup(&root, false)
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
