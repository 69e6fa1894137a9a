//! A test rig for the packet path's programs. The rig loads them with tables of their own, attaches them to no
//! interface, and runs them packet by packet (`BPF_PROG_TEST_RUN`). The caller sees their return values, the changed
//! packets and the tables. Only for tests; a node does not use the rig.
//!
//! Routes and neighbours are those of the network namespace of the calling thread: a redirected packet is not sent, but
//! the programs look up its route.

use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use aya::{Ebpf, maps::Map};
use dataplane_common::{
    Addr, Reason,
    cells::{Cell, Slots},
    packet::{Fragment, FragmentKey},
    tables::{Affinity, AffinityKey, PoolStats},
    tcp::Sequences,
};
use plan::Write;
use zerocopy::IntoBytes as _;

pub use super::{
    conntrack::Table,
    map::{Hash, Plain},
    sys::SkbContext,
};
use super::{
    direct::DirectFlows,
    error::{Doing, Error},
    map::Mapped,
    packet::{Network, PacketOptions, PacketPath},
    pins::{Pins, slots_for, spec},
    programs::{self, CAPTURE_PROGRAMS},
    services::write,
    sys,
    tables::Tables,
    tc::Direction,
};

/// The programs, and every table that they keep.
#[derive(Debug)]
pub struct Rig {
    pins: Pins,
    ingress: OwnedFd,
    egress: OwnedFd,
    tables: Tables,
    packet: PacketPath,
    freed: bool,
    ways: OwnedFd,
    found: OwnedFd,
    scratch: OwnedFd,
    /// Connections to endpoints themselves.
    pub direct: DirectFlows,
    /// The flows.
    pub conntrack: Table,
    /// The ports of first fragments.
    pub fragments: Hash<FragmentKey, Fragment>,
}

/// The result of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ran {
    /// The program's return value: a `TC_ACT_…`, or -1 (`TCX_NEXT`).
    pub verdict: i32,
    /// How long the frame is afterwards.
    pub len: usize,
    /// How long it took, in nanoseconds, the kernel's look at the clock included.
    pub ns: u32,
}

impl Rig {
    /// Loads the programs with empty tables, pinned below `bpffs`, which no agent may use. `cells`: number of cells for
    /// flows, a power of two.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn new(bpffs: &Path, cells: u32) -> Result<Self, Error> {
        let pins = Pins::new(bpffs);
        pins.create_directories()?;
        pins.make_flow_secret()?;
        for (name, shape, elements) in [
            ("CONNTRACK", Mapped::<Cell>::shape(false), cells),
            ("ANSWERS", Mapped::<Slots>::shape(false), slots_for(cells)),
            ("SEQUENCES", Mapped::<Sequences>::shape(false), cells),
            ("CAME_BY", Mapped::<[u32; 2]>::shape(false), cells / 2),
        ] {
            let doing = || format!("cannot make table {name}");
            let map = sys::map_create(name, &shape, elements).doing(doing)?;
            sys::obj_pin(map.as_fd(), &pins.map(name)).doing(doing)?;
        }
        Tables::create(&pins)?;
        // The tables of flows already exist.
        let flows = cells / 2;
        let ebpf = programs::load(&pins, flows, true, false)?;
        let options = PacketOptions {
            flows,
            attach: None,
        };
        Ok(Self {
            ingress: programs::packet_program(&ebpf, Direction::Ingress)?,
            egress: programs::packet_program(&ebpf, Direction::Egress)?,
            tables: Tables::open_pins(&pins, true)?,
            packet: PacketPath::open(&pins, &ebpf, options)?,
            freed: false,
            ways: unpinned(&ebpf, "WAYS")?,
            found: unpinned(&ebpf, "FOUND")?,
            scratch: unpinned(&ebpf, "SCRATCH")?,
            direct: DirectFlows::unset(&ebpf)?,
            conntrack: Table::open(&pins)?.ok_or_else(|| absent(&pins, "CONNTRACK"))?,
            fragments: hash(&pins, "FRAGMENTS")?,
            pins,
        })
    }

    /// Writes to the tables of services.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn apply(&mut self, writes: &[Write]) -> Result<(), Error> {
        write(&mut self.tables, &mut self.freed, writes)
    }

    /// Sets the interfaces, addresses and networks for the programs.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set_network(&mut self, network: &Network) -> Result<Vec<String>, Error> {
        self.packet.set(&self.pins, &mut self.tables, network, true)
    }

    /// The index of an address that flows are masqueraded to.
    pub fn node_addr(&self, addr: Addr) -> Option<u8> {
        (1..=u8::MAX).find(|index| self.packet.tables.node_addr(*index) == Some(addr))
    }

    /// Verdicts so far, by reason.
    ///
    /// # Errors
    /// If the kernel does not let them be read.
    pub fn reasons(&self) -> Result<[u64; Reason::SLOTS as usize], Error> {
        self.tables.reasons()
    }

    /// Returns a pool's counters so far.
    pub fn pool_stats(&self, pool: u32) -> PoolStats {
        self.tables.pool_stats(pool)
    }

    /// The table of the endpoint that each client used last.
    pub fn affinity(&self) -> &Hash<AffinityKey, Affinity> {
        self.tables.affinity_table()
    }

    /// Forgets the ways that the programs keep for a moment: a change of the routes shows in the next packet.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn forget_ways(&self) -> io::Result<()> {
        for map in [&self.ways, &self.found] {
            let info = sys::map_info(map.as_fd())?;
            let nothing = vec![0; info.value_size as usize * self.tables.cpus()];
            (0..info.max_entries)
                .try_for_each(|at| sys::map_update(map.as_fd(), at.as_bytes(), &nothing, 0))?;
        }
        Ok(())
    }

    /// Takes the first places of every CPU's, as programs that were preempted in their middle have them, and gives the
    /// others back.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn take_scratch(&self, places: u32) -> io::Result<()> {
        let info = sys::map_info(self.scratch.as_fd())?;
        let size = info.value_size.next_multiple_of(8) as usize;
        let mut all = vec![0; size * self.tables.cpus()];
        for at in 0..info.max_entries {
            for place in all.chunks_mut(size) {
                place[..8].copy_from_slice(&u64::from(at < places).to_ne_bytes());
            }
            sys::map_update(self.scratch.as_fd(), at.as_bytes(), &all, 0)?;
        }
        Ok(())
    }

    /// How many of all CPUs' places are taken.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn scratch_taken(&self) -> io::Result<usize> {
        let info = sys::map_info(self.scratch.as_fd())?;
        let size = info.value_size.next_multiple_of(8) as usize;
        let mut all = vec![0; size * self.tables.cpus()];
        let mut taken = 0;
        for at in 0..info.max_entries {
            sys::map_lookup(self.scratch.as_fd(), at.as_bytes(), &mut all)?;
            taken += all
                .chunks(size)
                .filter(|place| place[..8] != [0; 8])
                .count();
        }
        Ok(taken)
    }

    /// Runs a program on a frame, and writes the resulting frame into `out`, which must have room for it. The calling
    /// thread must be in the network namespace of `context.ifindex`.
    ///
    /// # Errors
    /// If the kernel refuses: the frame is shorter than 15 or longer than some 3 500 bytes, or the interface does not
    /// exist.
    pub fn run(
        &self,
        direction: Direction,
        context: &SkbContext,
        frame: &[u8],
        out: &mut [u8],
    ) -> io::Result<Ran> {
        let program = match direction {
            Direction::Ingress | Direction::Capture => &self.ingress,
            Direction::Egress => &self.egress,
        };
        let (verdict, len, ns) = sys::prog_test_run_packet(program.as_fd(), context, frame, out)?;
        Ok(Ran {
            verdict: verdict.cast_signed(),
            len,
            ns,
        })
    }
}

/// A map of the object's that is pinned nowhere.
fn unpinned(ebpf: &Ebpf, name: &str) -> Result<OwnedFd, Error> {
    let Some(Map::PerCpuArray(map)) = ebpf.map(name) else {
        let what = format!("the object has no per-CPU array {name}");
        let source = io::ErrorKind::NotFound.into();
        return Err(Error::Io { what, source });
    };
    let doing = || format!("cannot keep table {name}");
    map.fd().as_fd().try_clone_to_owned().doing(doing)
}

fn hash<K: Plain, V: Plain>(pins: &Pins, name: &str) -> Result<Hash<K, V>, Error> {
    let found = pins.open_map(spec(name))?;
    let (fd, info) = found.ok_or_else(|| absent(pins, name))?;
    Ok(Hash::from_fd(fd, info.max_entries))
}

fn absent(pins: &Pins, name: &str) -> Error {
    Error::Io {
        what: format!("{} is not there", pins.map(name).display()),
        source: io::ErrorKind::NotFound.into(),
    }
}

/// The programs of an agent's mesh that trace all of the machine's sockets. For benchmarks, which measure other
/// programs without them.
#[derive(Debug)]
pub struct Traced(Vec<(PathBuf, OwnedFd)>);

impl Traced {
    /// Finds the programs that are pinned below `bpffs` and attached.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn of(bpffs: &Path) -> Result<Self, Error> {
        let pins = Pins::new(bpffs);
        let mut found = Vec::new();
        for spec in CAPTURE_PROGRAMS.iter().filter(|spec| spec.is_traced()) {
            let link = pins.open_link(spec)?.map(|(_, link)| link.program);
            let program = link.map(sys::prog_by_id).transpose();
            if let Some(program) = program.doing(|| format!("cannot keep program {}", spec.name))? {
                found.push((pins.link(spec.name), program));
            }
        }
        Ok(Self(found))
    }

    /// Detaches them.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn detach(&self) -> Result<(), Error> {
        for (path, _) in &self.0 {
            fs::remove_file(path).doing(|| format!("cannot remove {}", path.display()))?;
        }
        Ok(())
    }

    /// Attaches them again.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn attach(&self) -> Result<(), Error> {
        for (path, program) in &self.0 {
            let link = sys::link_create_traced(program.as_fd());
            link.and_then(|link| sys::obj_pin(link.as_fd(), path))
                .doing(|| format!("cannot attach {}", path.display()))?;
        }
        Ok(())
    }
}
