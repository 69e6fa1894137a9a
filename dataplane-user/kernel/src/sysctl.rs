//! Sysctls of a network namespace (`/proc/sys/net`).

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use nix::errno::Errno;

/// The directory of the kernel's network sysctls.
const SYSCTLS: &str = "/proc/sys/net";

/// Opens a sysctl for writing, such as `ipv4/tcp_fwmark_accept`, of the network namespace that this thread is in.
/// Changes nothing.
///
/// In a container that is not privileged, `/proc/sys` is read-only. The function then searches the mounts for the
/// node's directory, which also shows the sysctls of the calling thread's namespace.
///
/// # Errors
/// If the sysctl cannot be opened for writing; [`reason`] explains the remedy.
pub fn open(name: &str) -> io::Result<File> {
    let open = |place: &Path| fs::OpenOptions::new().write(true).open(place.join(name));
    let error = match open(Path::new(SYSCTLS)) {
        Err(error) if is_read_only(&error) => error,
        result => return result,
    };
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let found = elsewhere(&mounts).find_map(|place| open(&place).ok());
    found.ok_or(error)
}

/// Returns the reason why a sysctl cannot be set and, if `/proc/sys` is read-only, the remedies: `component` is the
/// kustomize component that mounts the node's directory, `key` is the configuration key for which the chart mounts it,
/// and `otherwise` is an alternative.
pub fn reason(error: &io::Error, component: &str, key: &str, otherwise: &str) -> String {
    if !is_read_only(error) {
        return error.to_string();
    }
    format!(
        "{error}; mount the node's {SYSCTLS} into the container, writable (kustomize component \
         `{component}`; the chart does if there is a `{key}`), or {otherwise}"
    )
}

fn is_read_only(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::EROFS as i32)
}

/// Finds the other mount points of this directory, in `/proc/self/mountinfo` (`proc_pid_mountinfo(5)`).
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
