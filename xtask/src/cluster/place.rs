//! A cluster's place on this machine: names, addresses, directories, cgroups.
//!
//! There is at most one cluster on a machine. So its names are fixed, and `down` finds everything
//! that a killed `up` left.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use super::cgroups::{self, CGROUP};

/// The directory with all files of the cluster.
const DIRECTORY: &str = "/var/tmp/dataplane-cluster";
/// Namespaces of the cluster are `dpcluster-NAME`.
pub const NETNS_PREFIX: &str = "dpcluster-";
/// Name of the control plane's namespace, which is also the nodes' router and the outside client.
pub const CONTROL: &str = "cp";
/// Name of the switch's namespace.
pub const SWITCH: &str = "sw";
/// The cgroup below a node's cgroup for the node's own processes. cgroup v2 allows processes in
/// leaves only.
pub const SYSTEM: &str = "system";

pub const CONTROL_V4: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
pub const CONTROL_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 9, 0, 0, 0, 0, 0, 1);
/// Ranges of the pods' addresses on all nodes.
pub const POD_RANGES: [&str; 2] = ["10.244.0.0/16", "fd00:10:244::/48"];
/// Ranges of cluster IPs.
pub const SERVICE_RANGES: [&str; 2] = ["10.96.0.0/16", "fd00:10:96::/112"];
/// The first address of [`SERVICE_RANGES`], which Kubernetes assigns to the service `kubernetes`.
pub const FIRST_SERVICE: &str = "10.96.0.1";
/// The cluster IP of DNS.
pub const DNS_SERVICE: &str = "10.96.0.10";

/// Returns the cluster's directory.
pub fn directory() -> &'static Path {
    Path::new(DIRECTORY)
}

/// Returns the directory with certificates, kubeconfigs, logs and data of the control plane.
pub fn control_directory() -> PathBuf {
    directory().join(CONTROL)
}

/// Returns the path of the administrator's kubeconfig.
pub fn admin_config() -> PathBuf {
    control_directory().join("admin.conf")
}

/// Returns the URL of the API server. Clients reach it without a service proxy.
pub fn api_server() -> String {
    format!("https://{CONTROL_V4}:6443")
}

/// Returns the file of a network namespace of the cluster.
pub fn netns(member: &str) -> PathBuf {
    Path::new("/run/netns").join(format!("{NETNS_PREFIX}{member}"))
}

/// Returns a command that enters a member's network namespace, but no other namespace of it.
pub fn in_netns(member: &str, program: impl AsRef<Path>) -> Command {
    let mut command = Command::new("nsenter");
    command
        .arg(format!("--net={}", netns(member).display()))
        .arg(program.as_ref());
    command
}

/// A node by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Node(u8);

impl Node {
    /// Maximum number of nodes in a cluster.
    pub const MOST: u8 = 6;

    /// Returns the first `count` nodes.
    pub fn all(count: u8) -> Vec<Self> {
        (1..=count).map(Self).collect()
    }

    /// Returns the node with this name.
    ///
    /// # Errors
    /// Fails if no node has this name.
    pub fn named(name: &str) -> Result<Self> {
        let number = name
            .strip_prefix('n')
            .and_then(|number| number.parse().ok());
        match number {
            Some(number @ 1..=Self::MOST) => Ok(Self(number)),
            _ => bail!("{name} is no node: nodes are n1 to n{}", Self::MOST),
        }
    }

    pub fn name(self) -> String {
        format!("n{}", self.0)
    }

    /// Returns the node's zone. There are three zones, so six nodes are two in each.
    pub fn zone(self) -> String {
        format!("z{}", (self.0 - 1) % 3 + 1)
    }

    pub fn ipv4(self) -> Ipv4Addr {
        Ipv4Addr::new(10, 9, 0, 10 + self.0)
    }

    pub fn ipv6(self) -> Ipv6Addr {
        // The address looks like the IPv4 address: n1 is fd00:9::11.
        Ipv6Addr::new(0xfd00, 9, 0, 0, 0, 0, 0, 0x10 + u16::from(self.0))
    }

    pub fn addresses(self) -> [IpAddr; 2] {
        [self.ipv4().into(), self.ipv6().into()]
    }

    /// Returns the address ranges of its pods, IPv4 and IPv6.
    pub fn pod_ranges(self) -> [String; 2] {
        [
            format!("10.244.{}.0/24", self.0),
            format!("fd00:10:244:{}::/64", self.0),
        ]
    }

    /// Returns the directory with the node's files.
    pub fn directory(self) -> PathBuf {
        directory().join(self.name())
    }

    /// Returns the file with the process id of the node's first process, as this machine sees it.
    fn pid_file(self) -> PathBuf {
        self.directory().join("init.pid")
    }

    /// Returns the process id of the node's first process.
    ///
    /// # Errors
    /// Fails if the node does not run.
    pub fn init(self) -> Result<String> {
        let path = self.pid_file();
        let pid = fs::read_to_string(path);
        pid.with_context(|| format!("node {} does not run", self.name()))
    }

    /// Writes the process id of the node's first process to its file.
    pub fn note_init(self, pid: u32) -> Result<()> {
        let path = self.pid_file();
        fs::write(&path, pid.to_string())
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// Returns a command on the node: in its cgroup and all of its namespaces.
    ///
    /// # Errors
    /// Fails if the node does not run.
    pub fn command(self, program: impl AsRef<Path>) -> Result<Command> {
        let mut command = cgroups::joining(&self.cgroup(SYSTEM))?;
        command
            .args(["nsenter", "--target", &self.init()?])
            .args(["--mount", "--pid", "--net", "--uts", "--cgroup", "--"])
            .arg(program.as_ref());
        Ok(command)
    }

    /// Returns a cgroup of the node, relative to each hierarchy's root.
    pub fn cgroup(self, below: &str) -> PathBuf {
        Path::new(CGROUP).join(self.name()).join(below)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_of_nodes_belong_together() {
        for node in Node::all(Node::MOST) {
            assert_eq!(Node::named(&node.name()).unwrap(), node);
        }
        for name in ["n0", "n7", "cp", "n", "1"] {
            assert!(Node::named(name).is_err(), "{name}");
        }
        let zones = Node::all(6).into_iter().map(Node::zone);
        let zones: Vec<String> = zones.collect();
        assert_eq!(zones, ["z1", "z2", "z3", "z1", "z2", "z3"]);
        assert_eq!(Node(2).ipv4().to_string(), "10.9.0.12");
        assert_eq!(Node(2).ipv6().to_string(), "fd00:9::12");
    }
}
