//! Finds the cgroup v2 hierarchy, and identifies cgroups.

use std::{
    fs::{self, File},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

use super::error::{Doing, Error};

/// A cgroup's id, which links tell: its directory's inode number (`cgroup_id` in
/// `include/linux/cgroup.h`, with 64-bit inode numbers).
pub fn cgroup_id(directory: &File, path: &Path) -> Result<u64, Error> {
    directory
        .metadata()
        .map(|m| m.ino())
        .doing(|| format!("cannot look at {}", path.display()))
}

/// Returns the mount point of the cgroup v2 hierarchy: `/sys/fs/cgroup`, or another directory on machines with both
/// versions (`proc_pid_mountinfo(5)`).
///
/// # Errors
/// [`Error::NoCgroup2`] if the hierarchy is not mounted.
pub fn cgroup2_root() -> Result<PathBuf, Error> {
    cgroup2_mounts()?.into_iter().next().ok_or_else(|| {
        // Without privilege this file cannot be read, and the message then leaves it out.
        let of_init = fs::read_to_string("/proc/1/mountinfo").unwrap_or_default();
        Error::NoCgroup2 {
            hidden: of_init.lines().find_map(cgroup2_mount),
        }
    })
}

/// Returns the mount points of the cgroup v2 hierarchy, or of a part of it, that this process sees.
pub fn cgroup2_mounts() -> Result<Vec<PathBuf>, Error> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")
        .doing(|| "cannot read /proc/self/mountinfo".into())?;
    Ok(mounts.lines().filter_map(cgroup2_mount).collect())
}

/// Refuses a path that is no directory of a cgroup v2 file system: the kernel would only say `EBADF`.
///
/// # Errors
/// [`Error::NotCgroup2`]; or the directory cannot be opened.
pub fn check_cgroup(path: &Path) -> Result<(), Error> {
    let found = statfs(path).doing(|| format!("cannot open the cgroup {}", path.display()))?;
    if found.filesystem_type() == CGROUP2_SUPER_MAGIC {
        return Ok(());
    }
    Err(Error::NotCgroup2 {
        path: path.to_owned(),
        root: cgroup2_root().ok(),
    })
}

fn cgroup2_mount(line: &str) -> Option<PathBuf> {
    let (before, after) = line.split_once(" - ")?;
    if after.split(' ').next()? != "cgroup2" {
        return None;
    }
    // The kernel writes spaces in paths as \040.
    Some(before.split(' ').nth(4)?.replace("\\040", " ").into())
}

/// The id of the cgroup that this process is in; `None` if that is not to be found out.
pub fn own_cgroup() -> Option<u64> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let directory = cgroup2_root().ok()?.join(path);
    fs::metadata(directory).ok().map(|found| found.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_cgroup2_wherever_it_is_mounted() {
        let hybrid =
            "40 32 0:36 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw";
        assert_eq!(cgroup2_mount(hybrid), Some("/sys/fs/cgroup/unified".into()));
        let spaced = "40 32 0:36 / /mnt/a\\040b rw - cgroup2 none rw";
        assert_eq!(cgroup2_mount(spaced), Some("/mnt/a b".into()));
        let v1 = "33 32 0:29 / /sys/fs/cgroup/cpu rw,relatime shared:10 - cgroup cgroup rw,cpu";
        assert_eq!(cgroup2_mount(v1), None);
    }
}
