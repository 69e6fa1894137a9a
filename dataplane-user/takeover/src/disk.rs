//! Writes files so that a crash leaves either the old or the new content, never a part.

use std::{
    fmt::Display,
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use super::may_die;

/// Replaces a file in one step (write, fsync, rename) and syncs the directory. Only root can read the new file.
///
/// # Errors
/// If the file cannot be written. The old content then remains.
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

/// Syncs a directory, so that the files created, renamed or removed in it are on the disk.
///
/// # Errors
/// If the directory cannot be opened, or the disk fails.
pub fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Returns an error whose text starts with the path.
pub fn at(path: &Path, why: &impl Display) -> io::Error {
    io::Error::other(format!("{}: {why}", path.display()))
}
