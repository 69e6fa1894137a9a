//! The requirements of a lab on its machine.

use std::{fs, path::PathBuf};

use crate::error::{Error, Result};

/// The purpose of a lab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requirement {
    /// Namespaces, links and cgroups.
    Lab,
    /// A lab, and the dataplane's programs loaded in it.
    Dataplane,
    /// A lab, the dataplane's programs, and the machine itself: programs at the root of its cgroups, for every process
    /// on it. Only on a machine that was made for the tests, see [`whole_machine`].
    Machine,
}

/// Whether this machine was made for the tests and may be taken over as a whole: a guest of `cargo xtask test --vm`,
/// whose `init` sets the variable.
pub fn whole_machine() -> bool {
    std::env::var_os("DATAPLANE_WHOLE_MACHINE").is_some_and(|value| value == "1")
}

/// Returns what this machine lacks, in words for the person who wants to run a lab. `None`: it lacks nothing.
pub fn missing(requirement: Requirement) -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("needs root (namespaces, cgroups, BPF): run it as root".into());
    }
    if let Err(error) = cgroup2_mount() {
        return Some(error.to_string());
    }
    // Root in a container may still lack CAP_SYS_ADMIN; only a try shows it.
    let unshared = std::thread::spawn(|| nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET));
    match unshared.join() {
        Ok(Ok(())) => {}
        Ok(Err(errno)) => {
            return Some(format!(
                "may not create a network namespace ({errno}): needs CAP_SYS_ADMIN, in a container \
                 run it with --privileged"
            ));
        }
        Err(_) => return Some("may not create a network namespace".into()),
    }
    if let Err(error) = std::process::Command::new("ip").arg("-Version").output() {
        return Some(format!("cannot run `ip` ({error}): install iproute2"));
    }
    if requirement != Requirement::Lab {
        let filesystems = fs::read_to_string("/proc/filesystems").unwrap_or_default();
        if !filesystems
            .lines()
            .any(|line| line.split_whitespace().last() == Some("bpf"))
        {
            return Some("this kernel has no BPF file system (CONFIG_BPF_SYSCALL)".into());
        }
    }
    if requirement == Requirement::Machine && !whole_machine() {
        return Some(
            "attaches programs to every process of a machine, so it runs in a guest only: cargo \
             xtask test --vm"
                .into(),
        );
    }
    None
}

/// Returns where cgroup v2 is mounted: `/sys/fs/cgroup`, or `/sys/fs/cgroup/unified` on a hybrid machine.
///
/// # Errors
/// When it is mounted nowhere.
pub fn cgroup2_mount() -> Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    parse_cgroup2_mount(&mounts).ok_or_else(|| {
        Error::Requirement(
            "cgroup v2 is mounted nowhere: mount it with `mount -t cgroup2 none /sys/fs/cgroup`"
                .into(),
        )
    })
}

/// Finds the first mount of the whole cgroup2 tree in the text of `/proc/self/mountinfo`.
fn parse_cgroup2_mount(mountinfo: &str) -> Option<PathBuf> {
    mountinfo.lines().find_map(|line| {
        // `41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw`;
        // the number of fields before the dash varies.
        let (mount, filesystem) = line.split_once(" - ")?;
        if filesystem.split(' ').next()? != "cgroup2" {
            return None;
        }
        mount.split(' ').nth(4).map(PathBuf::from)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_cgroup2_where_it_is_mounted() {
        let hybrid = "29 23 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
                      30 29 0:27 / /sys/fs/cgroup/cpu rw shared:4 - cgroup cgroup rw,cpu\n\
                      41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
        assert_eq!(
            parse_cgroup2_mount(hybrid),
            Some("/sys/fs/cgroup/unified".into())
        );
        let unified = "35 25 0:30 / /sys/fs/cgroup rw,nosuid shared:9 master:3 - cgroup2 none rw\n";
        assert_eq!(parse_cgroup2_mount(unified), Some("/sys/fs/cgroup".into()));
        assert_eq!(
            parse_cgroup2_mount("30 29 0:27 / /x rw - cgroup cgroup rw\n"),
            None
        );
    }
}
