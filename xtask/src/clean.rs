//! `cargo xtask clean`: removes files and labs that the other chores leave.

use std::{fs, io::ErrorKind, path::Path, process::ExitCode};

use anyhow::{Context, Result};

use crate::{progress::note, setup, workspace};

/// Remove the compiled kernel programs and dead labs; with --cache also the tools that all clones share
///
/// `cargo clean` removes the rest of target/.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Also remove the tools that set-up has built for this user, in $XDG_CACHE_HOME/dataplane
    #[arg(long)]
    cache: bool,
}

pub fn main(arguments: &Arguments) -> Result<ExitCode> {
    let target = workspace::target();
    remove(&target.join("bpf"))?;
    remove(&target.join("bpf-build"))?;
    // Only root has labs, and can see them.
    for lab in dataplane_tests::sweep() {
        note(&format!("removed the remains of lab {lab}"));
    }
    if arguments.cache {
        remove(&setup::cache()?)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn remove(directory: &Path) -> Result<()> {
    match fs::remove_dir_all(directory) {
        Ok(()) => note(&format!("removed {}", directory.display())),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => {
            return Err(error).with_context(|| format!("cannot remove {}", directory.display()));
        }
    }
    Ok(())
}
