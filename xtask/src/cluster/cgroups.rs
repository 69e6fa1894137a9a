//! The cluster's cgroups: a separate tree in every hierarchy that this machine has mounted.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use dataplane_tests::cgroup2_mount;

/// Name of the cluster's cgroup in every hierarchy.
pub const CGROUP: &str = "dataplane-cluster";

/// A mounted hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchy {
    pub mount: PathBuf,
    /// The controllers of cgroup v1, such as `cpu,cpuacct` or `name=systemd`. Empty for cgroup v2.
    pub controllers: String,
}

/// Returns every hierarchy of this machine. Most machines have one, of cgroup v2. A hybrid machine also has some of
/// cgroup v1.
pub fn hierarchies() -> Result<Vec<Hierarchy>> {
    let mounts = fs::read_to_string("/proc/mounts").context("cannot read /proc/mounts")?;
    Ok(parse(&mounts))
}

fn parse(mounts: &str) -> Vec<Hierarchy> {
    const NOT_CONTROLLERS: [&str; 9] = [
        "rw",
        "ro",
        "nosuid",
        "nodev",
        "noexec",
        "relatime",
        "xattr",
        "clone_children",
        "seclabel",
    ];
    let mut found: Vec<Hierarchy> = Vec::new();
    for line in mounts.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let [_, mount, kind, options, ..] = fields.as_slice() else {
            continue;
        };
        let controllers = match *kind {
            "cgroup2" => String::new(),
            "cgroup" => {
                let controllers = options.split(',').filter(|option| {
                    !NOT_CONTROLLERS.contains(option) && !option.starts_with("release_agent=")
                });
                controllers.collect::<Vec<_>>().join(",")
            }
            _ => continue,
        };
        // A hierarchy may be mounted in several places.
        if found.iter().all(|known| known.controllers != controllers) {
            found.push(Hierarchy {
                mount: (*mount).into(),
                controllers,
            });
        }
    }
    found
}

/// Creates a cgroup in every hierarchy, with its parents. Does not yet enable controllers of cgroup v2 for the children
/// of the direct parent: the kernel lets no process into a cgroup whose children have controllers, and a node's first
/// process starts in this parent.
pub fn create(cgroup: &Path) -> Result<()> {
    let parts = cgroup.iter().count();
    for hierarchy in hierarchies()? {
        let mut path = hierarchy.mount;
        for (depth, part) in cgroup.iter().enumerate() {
            if hierarchy.controllers.is_empty() && depth + 1 < parts {
                enable_controllers(&path)?;
            }
            let parent = path.clone();
            path.push(part);
            if !path.is_dir() {
                fs::create_dir(&path)
                    .with_context(|| format!("cannot create the cgroup {}", path.display()))?;
            }
            // A new cgroup of cpuset has no processors and no memory, and accepts no process.
            for file in ["cpuset.cpus", "cpuset.mems"] {
                if hierarchy.controllers.contains("cpuset") {
                    copy_if_empty(&parent.join(file), &path.join(file))?;
                }
            }
        }
    }
    Ok(())
}

/// The controllers that a kubelet needs in cgroup v2. A hybrid machine has them in hierarchies of cgroup v1.
const CONTROLLERS: [&str; 5] = ["cpu", "cpuset", "io", "memory", "pids"];

/// Enables the controllers that a kubelet needs for the children of a cgroup, in cgroup v2.
pub fn enable_controllers(cgroup: &Path) -> Result<()> {
    let read = |name| fs::read_to_string(cgroup.join(name)).unwrap_or_default();
    let enabled = read("cgroup.subtree_control");
    let enabled: Vec<&str> = enabled.split_whitespace().collect();
    for controller in read("cgroup.controllers").split_whitespace() {
        if CONTROLLERS.contains(&controller) && !enabled.contains(&controller) {
            let file = cgroup.join("cgroup.subtree_control");
            fs::write(&file, format!("+{controller}"))
                .with_context(|| format!("cannot write +{controller} to {}", file.display()))?;
        }
    }
    Ok(())
}

fn copy_if_empty(from: &Path, to: &Path) -> Result<()> {
    let is = |path| fs::read_to_string(path).unwrap_or_default();
    if is(to).trim().is_empty() {
        let value = is(from);
        fs::write(to, value.trim()).with_context(|| format!("cannot write {}", to.display()))?;
    }
    Ok(())
}

/// Returns a command that joins a cgroup in every hierarchy and then becomes the program that is its next argument.
pub fn joining(cgroup: &Path) -> Result<Command> {
    let hierarchies = hierarchies()?;
    let mut command = Command::new("sh");
    // `sh` joins instead of this program: if a thread of this program joined, all of its threads would move.
    command.args([
        "-c",
        "while [ \"$1\" != -- ]; do echo 0 > \"$1\" || exit 1; shift; done; shift; exec \"$@\"",
        "sh",
    ]);
    for hierarchy in &hierarchies {
        command.arg(hierarchy.mount.join(cgroup).join("cgroup.procs"));
    }
    command.arg("--");
    Ok(command)
}

/// Kills every process of the cluster and removes the cluster's cgroups.
pub fn remove() -> Result<()> {
    let unified = cgroup2_mount()?.join(CGROUP);
    if unified.is_dir() {
        kill(&unified)?;
    }
    for hierarchy in hierarchies()? {
        remove_tree(&hierarchy.mount.join(CGROUP))?;
    }
    Ok(())
}

fn kill(cgroup: &Path) -> Result<()> {
    let file = cgroup.join("cgroup.kill");
    fs::write(&file, "1").with_context(|| format!("cannot write {}", file.display()))?;
    let limit = Instant::now() + Duration::from_secs(30);
    loop {
        let events = fs::read_to_string(cgroup.join("cgroup.events")).unwrap_or_default();
        if !events.contains("populated 1") {
            return Ok(());
        }
        if Instant::now() > limit {
            bail!("processes in {} do not end", cgroup.display());
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Removes a tree of cgroups. `remove_dir_all` would try to unlink a cgroup's files.
fn remove_tree(cgroup: &Path) -> Result<()> {
    let Ok(entries) = fs::read_dir(cgroup) else {
        return Ok(());
    };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_tree(&entry.path())?;
        }
    }
    // A cgroup stays busy for a moment after its last process has ended.
    let limit = Instant::now() + Duration::from_secs(5);
    loop {
        match fs::remove_dir(cgroup) {
            Ok(()) => return Ok(()),
            Err(_) if Instant::now() < limit => thread::sleep(Duration::from_millis(20)),
            Err(error) => {
                return Err(error)
                    .with_context(|| format!("cannot remove the cgroup {}", cgroup.display()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_hierarchy_is_found_once() {
        let hybrid = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n\
            cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,nosuid,relatime,cpu,cpuacct 0 0\n\
            cgroup /sys/fs/cgroup/systemd cgroup rw,relatime,xattr,name=systemd 0 0\n\
            cgroup2 /sys/fs/cgroup/unified cgroup2 rw,relatime 0 0\n\
            cgroup2 /mnt cgroup2 rw,relatime 0 0\n";
        let found = parse(hybrid);
        let of = |mount: &str, controllers: &str| Hierarchy {
            mount: mount.into(),
            controllers: controllers.into(),
        };
        assert_eq!(
            found,
            [
                of("/sys/fs/cgroup/cpu,cpuacct", "cpu,cpuacct"),
                of("/sys/fs/cgroup/systemd", "name=systemd"),
                of("/sys/fs/cgroup/unified", ""),
            ]
        );
        let unified = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid,memory_recursiveprot 0 0\n";
        assert_eq!(parse(unified), [of("/sys/fs/cgroup", "")]);
    }
}
