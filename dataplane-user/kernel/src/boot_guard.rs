//! The guard of `dataplane guard`: from boot until an agent has taken over, the programs refuse connections from all
//! network namespaces except the node's own.
//!
//! The guard consists of the agent's own programs with empty tables, and of a flag in the programs' configuration. A
//! directory beside the pins tells agents of every layout that the guard stands.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use dataplane_common::{
    Port,
    capture::{MESH_DENIES, MESH_GUARD, MESH_NAMESPACES, MESH_PORT},
};

use super::{
    CaptureOptions, Error, Kernel, Limits, PacketOptions, Paths, Tables, cgroup,
    error::Doing,
    object,
    open::nothing,
    pins::Pins,
    programs::{self, CAPTURE_PROGRAMS},
    tc,
};

/// Returns the directory that says that the guard stands.
pub(super) fn sign(bpffs: &Path) -> PathBuf {
    bpffs.join("guard")
}

/// Whether the guard stands below `bpffs`: `dataplane guard` has raised it, and no agent has taken over yet.
///
/// # Errors
/// If the directory cannot be looked at.
pub fn stands(bpffs: &Path) -> Result<bool, Error> {
    let sign = sign(bpffs);
    sign.try_exists()
        .doing(|| format!("cannot look at {}", sign.display()))
}

/// Whether the guard stands, and the programs refuse connections by it.
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
        let sign = sign(&paths.bpffs);
        fs::create_dir(&sign).doing(|| format!("cannot create {}", sign.display()))?;
    }
    if is_whole {
        let tables = Tables::open_pins(&pins, true)?;
        refuse_unknown(&tables, options);
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
                lower(&paths.bpffs)?;
            }
            Err(error)
        }
    }
}

/// Removes the sign. The programs refuse until the agent changes their configuration.
pub(super) fn lower(bpffs: &Path) -> Result<(), Error> {
    let sign = sign(bpffs);
    match fs::remove_dir(&sign) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).doing(|| format!("cannot remove {}", sign.display()))
        }
        _ => Ok(()),
    }
}

/// Makes the programs refuse connections from network namespaces that are not in the tables.
pub(super) fn refuse_unknown(tables: &Tables, options: CaptureOptions) {
    tables.set_mesh(refusing(tables.mesh(), options.outbound));
}

/// The programs' flags for the guard: they judge connections and, by the last flag, datagrams.
pub(super) const FLAGS: u64 = MESH_GUARD | MESH_NAMESPACES | MESH_DENIES;

/// Returns the programs' flags with those of the guard. `outbound`: the proxy's port, if the flags name none.
fn refusing(before: u64, outbound: u16) -> u64 {
    let port = match before {
        0 => u64::from(Port::new(outbound).be()) << MESH_PORT,
        _ => 0,
    };
    before | port | FLAGS
}

/// Whether all programs, also those of capture, are attached to this cgroup.
fn is_whole(pins: &Pins, paths: &Paths) -> Result<bool, Error> {
    if !pins.link(CAPTURE_PROGRAMS[0].name).exists() {
        return Ok(false);
    }
    let all = programs::attachments(pins, &paths.cgroup)?;
    Ok(all.iter().all(|program| program.problem.is_none()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guard_changes_no_other_flag() {
        let port = |mesh: u64| mesh >> MESH_PORT & 0xffff;
        let fresh = refusing(0, 15001);
        assert_eq!(port(fresh), u64::from(Port::new(15001).be()));
        assert_eq!(fresh & FLAGS, FLAGS);
        // An earlier agent's port stays, and so does all else; a second time changes nothing.
        let before = refusing(0, 25001) & !MESH_GUARD;
        assert_eq!(refusing(before, 15001), before | FLAGS);
        assert_eq!(refusing(fresh, 15001), fresh);
    }

    #[test]
    fn a_sign_is_there_until_it_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        assert!(!stands(directory.path()).unwrap());
        fs::create_dir(sign(directory.path())).unwrap();
        assert!(stands(directory.path()).unwrap());
        lower(directory.path()).unwrap();
        assert!(!stands(directory.path()).unwrap());
        // Removed by another process: this is no error.
        lower(directory.path()).unwrap();
        // What cannot be looked at is not absent.
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(stands(&file).is_err());
    }
}
