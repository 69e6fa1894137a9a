//! Opens the kernel's side: adopts or makes the tables, loads the programs and attaches them.

use std::{collections::HashSet, sync::Arc, thread};

use aya::Ebpf;
use dataplane_common::Addr;
use tracing::info;

use super::{
    Error, Kernel, Paths, Waiting,
    capture::{Capture, CaptureOptions},
    cgroup, cleanup,
    conntrack::Conntrack,
    direct::DirectFlows,
    error::Doing,
    log::ProgramLog,
    object,
    packet::{PacketOptions, PacketPath},
    pins::{FLOW_MAPS, MAPS, Pins},
    programs,
    services::ServiceTables,
    sys,
    tables::{Limits, Tables},
    tc,
};

impl Kernel {
    /// [`Kernel::open_with`], without the packet path and without capture.
    ///
    /// # Errors
    /// The errors of [`Kernel::open_with`].
    pub fn open(paths: &Paths, limits: Limits) -> Result<Self, Error> {
        Self::open_with(paths, limits, PacketOptions::default(), None, nothing)
    }

    /// Takes over the node: adopts an earlier agent's pins or creates them, loads the programs, and attaches them or
    /// replaces the attached programs in place.
    ///
    /// `meanwhile` runs while the programs are loaded, which takes most of the time. It only runs if an earlier agent's
    /// programs serve with the same tables, and if something is captured. It should end soon after the programs are
    /// loaded.
    ///
    /// Programs with empty tables leave everything alone, so before the first [`Kernel::apply`] nothing is served, and
    /// nothing is refused. If another layout's programs serve, they continue until [`Kernel::replace_other_layouts`].
    ///
    /// # Errors
    /// [`Error::Busy`] if another agent runs; [`Error::Foreign`] and [`Error::Damaged`] for pins that cannot be
    /// adopted, which are left as they are; otherwise the kernel's error.
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
        if waits {
            packet.take_path(&pins);
        }
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
}

/// The services' addresses that flows go to; `None` without a packet path.
fn flow_vips(pins: &Pins) -> Result<Option<HashSet<Addr>>, Error> {
    let conntrack = Conntrack::open(pins.root())?;
    Ok(conntrack.map(|conntrack| conntrack.vips()))
}

/// Whether programs are still being loaded.
pub type Loading<'a> = dyn Fn() -> bool + 'a;

/// Does nothing while the programs are loaded, for [`Kernel::open_with`].
pub(super) fn nothing(_: &Capture, _: &Loading<'_>) {}

/// Loads the programs on a separate thread, and runs `meanwhile` on this thread.
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

/// Prepares the tables of flows. They exist while the packet path is on. If it is off, they are removed. If it is
/// turned on, the function removes remains of an agent that died while it removed the tables.
fn prepare_flows(pins: &Pins, on: bool) -> Result<(), Error> {
    if !on {
        // The agent tries again, with every change of interfaces, to detach programs that cannot be detached now, and
        // reports them.
        let _ = tc::keep_none(pins)?;
        return pins.remove_flow_maps();
    }
    let mut absent = None;
    for map in MAPS.iter().filter(|map| FLOW_MAPS.contains(&map.name)) {
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
