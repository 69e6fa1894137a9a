//! The program that notes the kubelet's connections to workloads. It is attached to the kubelet's cgroups and to no other,
//! so no other socket of the node pays for it.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
};

use aya::Ebpf;
use dataplane_common::capture::{PROBE_BEGINS, Tuple};

use super::{
    inbound::{detach, links},
    lease::now,
};
use crate::{
    cgroup::cgroup_id,
    error::{Doing, Error},
    map::Hash,
    pins::{Pins, spec},
    programs::{self, PROBE_EVENTS},
    sys::{self, LinkTarget},
};

/// The loaded program, and its table.
#[derive(Debug)]
pub struct Probes {
    program: OwnedFd,
    id: u32,
    noted: Hash<Tuple, u64>,
}

impl Probes {
    /// Takes the loaded program. Its table is pinned.
    pub fn new(ebpf: &Ebpf, pins: &Pins) -> Result<Self, Error> {
        let doing = || format!("cannot prepare program {}", PROBE_EVENTS.name);
        let program = programs::kept_program(ebpf, &PROBE_EVENTS)?;
        let id = sys::prog_info(program.as_fd()).doing(doing)?.id;
        let table = pins.open_map(spec("PROBES"))?;
        let missing = || io::Error::other("table PROBES is not pinned");
        let (table, info) = table.ok_or_else(missing).doing(doing)?;
        Ok(Self {
            program,
            id,
            noted: Hash::from_fd(table, info.max_entries),
        })
    }

    /// Attaches the program to these cgroups, and detaches it from all others. A cgroup that is gone is left out. Removes
    /// the entries that no longer have an effect: those of sockets whose end no program has reported.
    pub fn attach(&self, pins: &Pins, cgroups: &[PathBuf]) -> Result<(), Error> {
        let mut wanted = BTreeSet::new();
        for path in cgroups {
            let doing = || format!("cannot open the cgroup {}", path.display());
            let directory = match File::open(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                result => result.doing(doing)?,
            };
            let id = cgroup_id(&directory, path)?;
            if wanted.insert(id) {
                self.attach_to(pins, &directory, id)?;
            }
        }
        for (path, id) in links(pins, PROBE_EVENTS.name) {
            if !wanted.contains(&id) {
                detach(&path)?;
            }
        }
        let what = || "cannot clear table PROBES".to_owned();
        for (tuple, began) in self.noted.entries().doing(what)? {
            if now().as_nanos() > u128::from(began.saturating_add(PROBE_BEGINS)) {
                self.noted.remove(&tuple).doing(what)?;
            }
        }
        Ok(())
    }

    fn attach_to(&self, pins: &Pins, directory: &File, id: u64) -> Result<(), Error> {
        let doing = || format!("cannot attach program {} to a cgroup", PROBE_EVENTS.name);
        let path = pins.link(&format!("{}-{id}", PROBE_EVENTS.name));
        if let Ok(link) = sys::obj_get(&path) {
            let there = sys::link_info(link.as_fd()).doing(doing)?;
            if there.target == LinkTarget::Cgroup(id) {
                if there.program != self.id {
                    sys::link_update(link.as_fd(), self.program.as_fd()).doing(doing)?;
                }
                return Ok(());
            }
            fs::remove_file(&path).doing(|| format!("cannot remove {}", path.display()))?;
        }
        programs::create(&PROBE_EVENTS, self.program.as_fd(), directory, &path, false)
    }
}
