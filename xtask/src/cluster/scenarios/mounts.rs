//! Checks which files of the node the agent's container can write to.

use std::{collections::BTreeSet, fs};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::agents;
use crate::cluster::{
    Cluster,
    agent::{self, Wanted},
    node,
};

/// The writable mounts of the DaemonSet with a mesh.
const WRITABLE: [&str; 3] = [
    "/host/proc/sys/net",
    "/host/sys/fs/bpf/dataplane",
    "/run/dataplane",
];
/// The read-only mount; mounts below it are read-only too.
const CGROUPS: &str = "/host/sys/fs/cgroup";

pub fn read_only(cluster: &Cluster) -> Result<String> {
    let mesh = Wanted {
        config: json!({ "mesh": { "rules": { "mode": "proxy" } } }),
        ..Wanted::default()
    };
    agent::deploy(cluster, &mesh)?;
    let outcome = writable_places(cluster);
    agent::deploy(cluster, &Wanted::default())?;
    outcome
}

fn writable_places(cluster: &Cluster) -> Result<String> {
    let node = cluster.nodes[0];
    let path = format!("/proc/{}/mountinfo", agents::process(node)?);
    let mounts = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let (writable, read_only): (Vec<Mount>, Vec<Mount>) = mounts
        .lines()
        .filter_map(Mount::of_line)
        .filter(Mount::is_of_the_node)
        .partition(|mount| mount.writable);
    let is_cgroup = |mount: &&Mount| mount.place.starts_with(CGROUPS);
    let found: BTreeSet<&str> = writable
        .iter()
        .filter(|mount| !is_cgroup(mount))
        .map(|mount| mount.place.as_str())
        .collect();
    ensure!(
        found == BTreeSet::from(WRITABLE),
        "the agent's container can write to {found:?} of the node"
    );
    ensure!(
        read_only.iter().any(|mount| mount.place == CGROUPS),
        "{CGROUPS} is not mounted read-only: {mounts}"
    );
    let below: Vec<&str> = writable
        .iter()
        .filter(is_cgroup)
        .map(|mount| mount.place.as_str())
        .collect();
    let object = cluster.kubectl.get(&["node", &node.name()])?;
    let runtime = &object["status"]["nodeInfo"]["containerRuntimeVersion"];
    let handlers = object["status"]["runtimeHandlers"].as_array();
    let recursive = handlers
        .into_iter()
        .flatten()
        .any(|handler| handler["features"]["recursiveReadOnlyMounts"] == true);
    if !recursive {
        return Ok(format!(
            "writable are {}; {runtime} makes no mounts read-only with those below, so {below:?} are writable, too",
            WRITABLE.join(", ")
        ));
    }
    ensure!(
        below.is_empty(),
        "writable in the agent's container with {runtime}: {below:?}"
    );
    let submounts = read_only.iter().filter(is_cgroup).count() - 1;
    ensure!(
        submounts > 0 || !node::hybrid()?,
        "the agent's container has no mount below {CGROUPS}"
    );
    Ok(format!(
        "writable are {}; {CGROUPS} and {submounts} mounts below it are read-only with {runtime}",
        WRITABLE.join(", ")
    ))
}

/// A mount in a container.
struct Mount {
    place: String,
    kind: String,
    writable: bool,
}

impl Mount {
    /// Reads a line of mountinfo: the fifth field is the mount point, the sixth its options. The file-system type comes
    /// after a hyphen.
    fn of_line(line: &str) -> Option<Self> {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(4);
        let (place, options) = (fields.next()?, fields.next()?);
        Some(Self {
            place: place.to_owned(),
            kind: file_system.split(' ').next()?.to_owned(),
            writable: options.split(',').any(|option| option == "rw"),
        })
    }

    /// Returns whether the mount has files of the node, not only the container's own.
    fn is_of_the_node(&self) -> bool {
        let own = [
            "/dev",
            "/etc/hosts",
            "/etc/hostname",
            "/etc/resolv.conf",
            "/proc",
        ];
        let own = own.iter().any(|place| {
            let rest = self.place.strip_prefix(place);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        });
        // On a hybrid hierarchy, the runtime mounts the container's own cgroups in a tmpfs.
        let own_cgroups = self.place == "/sys/fs/cgroup" && self.kind == "tmpfs";
        !own && !own_cgroups && self.kind != "overlay"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_mountinfo() {
        let line = "36 35 98:0 / /host/sys/fs/bpf rw,noatime master:1 - bpf bpf rw";
        let mount = Mount::of_line(line).unwrap();
        assert_eq!(mount.place, "/host/sys/fs/bpf");
        assert!(mount.writable && mount.is_of_the_node());
        let line = "37 35 0:27 / /host/sys/fs/cgroup/unified ro,relatime - cgroup2 cgroup2 rw";
        assert!(!Mount::of_line(line).unwrap().writable);
        for own in [
            "38 35 0:5 / /dev/shm rw - tmpfs shm rw",
            "39 35 0:6 / /sys/fs/cgroup rw,nosuid - tmpfs tmpfs rw,mode=755",
        ] {
            assert!(!Mount::of_line(own).unwrap().is_of_the_node());
        }
    }
}
