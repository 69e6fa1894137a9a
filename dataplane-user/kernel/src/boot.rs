//! Raises the guard of `dataplane guard`.

use std::{fs, path::Path};

use dataplane_common::capture::MESH_GUARD;

use super::boot_guard;
pub use super::boot_guard::stands;
use crate::{
    Kernel, Paths,
    capture::CaptureOptions,
    cgroup,
    error::{Doing, Error},
    object,
    open::nothing,
    packet::PacketOptions,
    pins::Pins,
    programs::{self, CAPTURE_PROGRAMS},
    tables::{Limits, Tables},
    tc,
};

/// Returns whether the guard stands, and the programs refuse connections by it.
///
/// # Errors
/// If the directory or the tables cannot be read.
pub fn is_in_force(bpffs: &Path) -> Result<bool, Error> {
    if !stands(bpffs)? || !Tables::exist(bpffs)? {
        return Ok(false);
    }
    Ok(Tables::open(bpffs)?.mesh() & MESH_GUARD != 0)
}

/// Attaches the programs so that they refuse connections from all network namespaces except the node's own, until an
/// agent has taken over. If programs and tables of an earlier agent serve, the workloads in its tables keep their rules.
/// Returns whether the guard is new.
///
/// # Errors
/// [`Error::Busy`] if an agent runs; [`Error::OthersServe`] if programs serve to which no guard can be added; otherwise the errors of
/// [`Kernel::open_with`].
pub fn raise(paths: &Paths, options: CaptureOptions) -> Result<bool, Error> {
    object::programs()?;
    cgroup::check_cgroup(&paths.cgroup)?;
    let pins = Pins::new(&paths.bpffs);
    pins.create_directories()?;
    let lock = pins.lock()?;
    let is_whole = is_whole(&pins, paths)?;
    if pins.is_another_attached() || !is_whole && tc::any(&pins)? {
        return Err(Error::OthersServe {
            directory: paths.bpffs.clone(),
        });
    }
    let is_new = !stands(&paths.bpffs)?;
    if is_new {
        let sign = boot_guard::sign(&paths.bpffs);
        fs::create_dir(&sign).doing(|| format!("cannot create {}", sign.display()))?;
    }
    if is_whole {
        let tables = Tables::open_pins(&pins, true)?;
        tables.set_mesh(boot_guard::refusing(tables.mesh(), options.outbound));
        return Ok(is_new);
    }
    // An agent that takes the lock from here on finds the sign, and guards in place of this process.
    drop(lock);
    let packet = PacketOptions::default();
    let opened = Kernel::open_with(paths, Limits::default(), packet, Some(options), nothing);
    match opened {
        Ok(_) => Ok(is_new),
        Err(error) => {
            if is_new && !matches!(error, Error::Busy { .. }) {
                boot_guard::lower(&paths.bpffs)?;
            }
            Err(error)
        }
    }
}

/// Returns whether all programs, also those of capture, are attached to this cgroup.
fn is_whole(pins: &Pins, paths: &Paths) -> Result<bool, Error> {
    if !pins.link(CAPTURE_PROGRAMS[0].name).exists() {
        return Ok(false);
    }
    let all = programs::attachments(pins, &paths.cgroup)?;
    Ok(all.iter().all(|program| program.problem.is_none()))
}
