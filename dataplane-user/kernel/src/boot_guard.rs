//! The guard of `dataplane guard`: from boot until an agent has taken over, the programs refuse connections from all
//! network namespaces except the node's own.
//!
//! [`raise`](super::boot::raise) puts it up.
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

use crate::error::{Doing, Error};

/// Returns the directory that says that the guard stands.
pub(crate) fn sign(bpffs: &Path) -> PathBuf {
    bpffs.join("guard")
}

/// Returns whether the guard stands below `bpffs`: `dataplane guard` has raised it, and no agent has taken over yet.
///
/// # Errors
/// If the directory cannot be looked at.
pub fn stands(bpffs: &Path) -> Result<bool, Error> {
    let sign = sign(bpffs);
    sign.try_exists()
        .doing(|| format!("cannot look at {}", sign.display()))
}

/// Removes the sign. The programs refuse until the agent changes their configuration.
pub(crate) fn lower(bpffs: &Path) -> Result<(), Error> {
    let sign = sign(bpffs);
    match fs::remove_dir(&sign) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).doing(|| format!("cannot remove {}", sign.display()))
        }
        _ => Ok(()),
    }
}

/// The programs' flags for the guard: they judge connections and, by the last flag, datagrams.
pub(crate) const FLAGS: u64 = MESH_GUARD | MESH_NAMESPACES | MESH_DENIES;

/// Returns the programs' flags with those of the guard. `outbound`: the proxy's port, if the flags name none.
pub(crate) fn refusing(before: u64, outbound: u16) -> u64 {
    let port = match before {
        0 => u64::from(Port::new(outbound).be()) << MESH_PORT,
        _ => 0,
    };
    before | port | FLAGS
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
        // A file in place of the directory is an error.
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(stands(&file).is_err());
    }
}
