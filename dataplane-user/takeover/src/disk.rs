//! Files that a crash leaves whole: as they were, or as they are to be.

use std::{
    fmt::Display,
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use super::may_die;

/// Writes a file for root alone, in one step and onto the disk.
///
/// # Errors
/// The file cannot be written. It is then as before.
pub fn replace(path: &Path, text: &str) -> io::Result<()> {
    let new = path.with_extension("new");
    let write = || {
        let mut file = File::options()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .open(&new)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        may_die();
        fs::rename(&new, path)?;
        path.parent().map_or(Ok(()), sync)
    };
    write().map_err(|error| at(path, &error))
}

/// Has what was done in a directory be on the disk.
///
/// # Errors
/// The directory cannot be opened, or the disk fails.
pub fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// An error with the path that it is about.
pub fn at(path: &Path, why: &impl Display) -> io::Error {
    io::Error::other(format!("{}: {why}", path.display()))
}
