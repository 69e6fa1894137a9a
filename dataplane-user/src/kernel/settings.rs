//! Settings of a network namespace (`/proc/sys/net`).

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use nix::errno::Errno;

/// Where the kernel shows them.
const SETTINGS: &str = "/proc/sys/net";

/// Opens a setting for writing, such as `ipv4/tcp_fwmark_accept`, of the network namespace that this
/// thread is in. Changes nothing.
///
/// A container that is not privileged has `/proc/sys` read-only. The directory is then looked for
/// among the mounts: where the node's is mounted, it shows the settings of the namespace of the thread
/// that looks, too.
///
/// # Errors
/// If it cannot be written to; the message names the setting and what to do.
pub fn open(name: &str) -> io::Result<File> {
    let open = |place: &Path| fs::OpenOptions::new().write(true).open(place.join(name));
    let error = match open(Path::new(SETTINGS)) {
        Err(error) if error.raw_os_error() == Some(Errno::EROFS as i32) => error,
        result => return result.map_err(|error| named(name, &error, "")),
    };
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let found = elsewhere(&mounts).find_map(|place| open(&place).ok());
    found.ok_or_else(|| {
        let remedy = "; mount the node's /proc/sys/net into the container, writable (kustomize \
                      component `mesh`; the chart does if there is a `mesh`), or set \
                      mesh.proxy.keepSource to false";
        named(name, &error, remedy)
    })
}

/// Sets a setting of the network namespace that this thread is in.
///
/// # Errors
/// As [`open`], and the kernel's refusal.
pub fn set(name: &str, value: &str) -> io::Result<()> {
    let written = open(name)?.write_all(value.as_bytes());
    written.map_err(|error| named(name, &error, ""))
}

fn named(name: &str, error: &io::Error, remedy: &str) -> io::Error {
    let text = format!("cannot set {SETTINGS}/{name}: {error}{remedy}");
    io::Error::new(error.kind(), text)
}

/// Where else this directory is mounted, by `/proc/self/mountinfo` (`proc_pid_mountinfo(5)`).
fn elsewhere(mounts: &str) -> impl Iterator<Item = PathBuf> {
    mounts.lines().filter_map(|line| {
        let (mount, filesystem) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, place) = (fields.next()?, fields.next()?);
        (filesystem.starts_with("proc ") && root == "/sys/net").then(|| place.into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_is_found_where_it_is_mounted() {
        let mounts = "\
36 35 0:21 / /proc rw,nosuid - proc proc rw
37 36 0:21 /sys /proc/sys ro,nosuid - proc proc rw
38 35 0:24 /sys/net /data rw - tmpfs tmpfs rw
39 35 0:21 /sys/net /host/proc/sys/net rw,nosuid shared:7 - proc proc rw
40 broken";
        let found: Vec<PathBuf> = elsewhere(mounts).collect();
        assert_eq!(found, [Path::new("/host/proc/sys/net")]);
    }
}
