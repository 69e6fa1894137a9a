//! A lab that exists, and its hosts.

use std::{
    ffi::OsStr,
    fs::{self, File},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    thread::{self, JoinHandle},
};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, setns},
};

use crate::{
    command::{Command, Process},
    error::{Doing, Error, Result},
    identity::{LabId, create_dir},
    netns::NETNS_DIR,
    programs::Programs,
};

/// A small cluster of network namespaces. Dropping it removes it.
#[derive(Debug)]
pub struct Lab {
    id: LabId,
    programs: Programs,
    hosts: Vec<Host>,
    /// Whether the lab's BPF file system is mounted.
    bpffs_mounted: Mutex<bool>,
}

/// A host to be.
#[derive(Debug)]
pub(crate) struct Planned {
    pub name: String,
    pub role: Role,
    /// The number of the node (its own, or the pod's), or that of the outside client.
    pub number: u8,
    /// A pod's node.
    pub node: Option<String>,
    pub ipv4: Ipv4Addr,
    /// Whether its processes are outside of its node's cgroup.
    pub apart: bool,
}

/// The role of a host of a lab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A Kubernetes node.
    Node,
    /// A pod on a node.
    Pod,
    /// A client outside of the cluster.
    External,
    /// The switch between nodes and outside clients; no host of its own.
    Fabric,
}

impl Role {
    /// The switch's name.
    pub(crate) const FABRIC_NAME: &str = "fabric";
}

/// A node, a pod or an outside client: where programs run. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Host(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    name: String,
    role: Role,
    number: u8,
    node: Option<String>,
    ipv4: Ipv4Addr,
    ipv6: Ipv6Addr,
    netns: String,
    cgroup: PathBuf,
    /// Path of the lab's own program.
    probe: PathBuf,
}

impl Lab {
    pub(crate) fn new(id: LabId, programs: Programs, hosts: Vec<Host>) -> Self {
        Self {
            id,
            programs,
            hosts,
            bpffs_mounted: Mutex::new(false),
        }
    }

    /// The programs that it runs.
    pub fn programs(&self) -> &Programs {
        &self.programs
    }

    /// The lab's name on this machine.
    pub fn id(&self) -> &LabId {
        &self.id
    }

    /// Nodes, pods and outside clients, in the order of the description.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// The node with this name.
    ///
    /// # Panics
    /// When the lab has no such node.
    pub fn node(&self, name: &str) -> &Host {
        self.host(name, Role::Node)
    }

    /// The pod with this name.
    ///
    /// # Panics
    /// When the lab has no such pod.
    pub fn pod(&self, name: &str) -> &Host {
        self.host(name, Role::Pod)
    }

    /// The outside client with this name.
    ///
    /// # Panics
    /// When the lab has no such client.
    pub fn external(&self, name: &str) -> &Host {
        self.host(name, Role::External)
    }

    fn host(&self, name: &str, role: Role) -> &Host {
        self.hosts
            .iter()
            .find(|host| host.name() == name && host.role() == role)
            .unwrap_or_else(|| panic!("this lab has no {role:?} named {name}"))
    }

    /// Returns the cgroup of a node, which holds those of its pods and of its own processes: a dataplane attaches its
    /// programs there.
    ///
    /// # Panics
    /// When the lab has no such node.
    pub fn node_cgroup(&self, node: &str) -> PathBuf {
        let own = self.node(node).cgroup();
        own.parent()
            .expect("a node's processes are in a child of its cgroup")
            .to_owned()
    }

    /// Returns a directory for pins on a BPF file system that belongs to this lab alone, mounted at the first call.
    /// Unmounting it, at the lab's end, releases everything pinned in it.
    ///
    /// # Errors
    /// When the kernel has no BPF file system, or it cannot be mounted.
    pub fn bpffs(&self) -> Result<PathBuf> {
        let mut mounted = self
            .bpffs_mounted
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let path = self.id.bpffs();
        if !*mounted {
            create_dir(&path)?;
            mount(
                Some("bpf"),
                &path,
                Some("bpf"),
                MsFlags::empty(),
                None::<&str>,
            )
            .doing(|| format!("mount a BPF file system at {}", path.display()))?;
            *mounted = true;
        }
        Ok(path)
    }

    /// Checks that nothing in the lab can reach the machine or the world: nodes and outside
    /// clients have no default route, no host's routes leave the lab's networks, and every link
    /// ends in a namespace of this lab.
    ///
    /// # Errors
    /// Names the first way out.
    pub fn check_isolation(&self) -> Result<()> {
        let prefix = self.id.netns("");
        let fabric = self.id.netns(Role::FABRIC_NAME);
        let members = self.hosts.iter().map(|h| (h.netns(), h.role()));
        for (netns, role) in members.chain([(fabric.as_str(), Role::Fabric)]) {
            // The namespaces in which this one's links end, by their numbers in it.
            let peers = ip_json(netns, &["netns", "list-id"])?;
            let in_lab = |number: &serde_json::Value| {
                let peer = peers.iter().find(|peer| peer["nsid"] == *number);
                peer.and_then(|p| p["name"].as_str())
                    .is_some_and(|name| name.starts_with(&prefix))
            };
            for link in ip_json(netns, &["-details", "link", "show"])? {
                let name = link["ifname"].as_str().unwrap_or_default();
                let kind = link["linkinfo"]["info_kind"].as_str().unwrap_or_default();
                match kind {
                    "" if name == "lo" => {}
                    "bridge" if role == Role::Fabric => {}
                    "veth" if in_lab(&link["link_netnsid"]) => {}
                    // Devices that some kernels put into every new namespace; they are down.
                    "ipip" | "sit" | "gre" | "gretap" | "erspan" | "vti" | "ip6tnl" | "vti6"
                    | "ip6gre"
                        if link["operstate"] == "DOWN" => {}
                    _ => return Err(way_out(netns, &format!("link {name} of kind {kind:?}"))),
                }
            }
            if role == Role::Pod {
                // A pod's default route ends at its node, which has none.
                continue;
            }
            for family in ["-4", "-6"] {
                for route in ip_json(netns, &[family, "route", "show"])? {
                    let to = route["dst"].as_str().unwrap_or_default();
                    if !["10.244.", "192.168.77.", "fd00:10:244:", "fd77:", "fe80:"]
                        .iter()
                        .any(|inside| to.starts_with(inside))
                    {
                        return Err(way_out(netns, &format!("route to {to}")));
                    }
                }
            }
        }
        Ok(())
    }
}

fn way_out(netns: &str, what: &str) -> Error {
    Error::Description(format!("{netns} has a way out of the lab: {what}"))
}

fn ip_json(netns: &str, arguments: &[&str]) -> Result<Vec<serde_json::Value>> {
    let output = std::process::Command::new("ip")
        .args(["-netns", netns, "-json"])
        .args(arguments)
        .output()
        .doing(|| "run `ip`".into())?;
    let program = format!("ip {} in {netns}", arguments.join(" "));
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(Error::Failed {
            program,
            status: output.status,
            stderr,
        });
    }
    let answer = String::from_utf8_lossy(&output.stdout);
    if answer.trim().is_empty() {
        return Ok(Vec::new());
    }
    serde_json::from_str(&answer).map_err(|error| Error::Answer {
        program,
        reason: error.to_string(),
        answer: answer.chars().take(200).collect(),
    })
}

impl Drop for Lab {
    fn drop(&mut self) {
        if let Err(error) = self.id.remove() {
            anstream::eprintln!("lab {}: {error}", self.id);
        }
    }
}

impl Host {
    pub(crate) fn new(planned: Planned, id: &LabId, lab_cgroup: &Path, probe: &Path) -> Self {
        let Planned {
            name,
            role,
            number,
            node,
            ipv4,
            apart,
        } = planned;
        let last = reads_like(ipv4.octets()[3]);
        let ipv6 = match role {
            Role::Pod => Ipv6Addr::new(0xfd00, 0x10, 0x244, reads_like(number), 0, 0, 0, last),
            Role::Node | Role::External | Role::Fabric => {
                Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, last)
            }
        };
        // A node's own processes are beside its pods, below the cgroup that a dataplane attaches
        // to.
        let cgroup = match (role, &node) {
            (Role::Node, _) => lab_cgroup.join(&name).join("host"),
            (_, Some(node)) if !apart => lab_cgroup.join(node).join(&name),
            _ => lab_cgroup.join(&name),
        };
        let netns = id.netns(&name);
        let probe = probe.to_owned();
        Self(Arc::new(Inner {
            name,
            role,
            number,
            node,
            ipv4,
            ipv6,
            netns,
            cgroup,
            probe,
        }))
    }

    /// Its name in the lab.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its role.
    pub fn role(&self) -> Role {
        self.0.role
    }

    /// The node of a pod.
    pub fn node(&self) -> Option<&str> {
        self.0.node.as_deref()
    }

    /// Its IPv4 address: a pod's own, a node's or an outside client's on the switch.
    pub fn ipv4(&self) -> Ipv4Addr {
        self.0.ipv4
    }

    /// Its IPv6 address: a pod's own, a node's or an outside client's on the switch.
    pub fn ipv6(&self) -> Ipv6Addr {
        self.0.ipv6
    }

    /// Both addresses.
    pub fn addresses(&self) -> [IpAddr; 2] {
        [self.ipv4().into(), self.ipv6().into()]
    }

    /// Its network namespace's name, as `ip netns` shows it.
    pub fn netns(&self) -> &str {
        &self.0.netns
    }

    /// The cgroup of its processes.
    pub fn cgroup(&self) -> &Path {
        &self.0.cgroup
    }

    /// The address of the pod's node towards the pod (the pod's gateway). An endpoint sees this source when a
    /// process of its own node connects.
    pub fn gateway4(&self) -> Ipv4Addr {
        Ipv4Addr::new(10, 244, self.0.number, 1)
    }

    /// As [`Host::gateway4`], for IPv6.
    pub fn gateway6(&self) -> Ipv6Addr {
        Ipv6Addr::new(0xfd00, 0x10, 0x244, reads_like(self.0.number), 0, 0, 0, 1)
    }

    pub(crate) fn pod_network4(&self) -> String {
        format!("10.244.{}.0/24", self.0.number)
    }

    pub(crate) fn pod_network6(&self) -> String {
        format!("fd00:10:244:{}::/64", self.0.number)
    }

    /// A socket that listens on this host, for a server in this process.
    ///
    /// # Errors
    /// When the port is taken, or the address is none of the host's.
    ///
    /// # Panics
    /// Never: the thread that enters the namespace does not.
    pub fn listen(&self, address: impl Into<SocketAddr>) -> std::io::Result<TcpListener> {
        let address = address.into();
        // The socket stays in the namespace that it was made in; this thread in its own.
        self.inside(move || TcpListener::bind(address))
            .join()
            .expect("a thread that does not panic")
    }

    /// Runs a function on a new thread in the host's network namespace.
    pub fn inside<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
    ) -> JoinHandle<std::io::Result<T>> {
        let namespace = Path::new(NETNS_DIR).join(self.netns());
        thread::spawn(move || {
            setns(File::open(namespace)?, CloneFlags::CLONE_NEWNET)?;
            work()
        })
    }

    /// A program to be run on this host: in its network namespace and its cgroup.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        Command::new(
            &self.0.probe,
            self.netns(),
            self.cgroup(),
            Some(program.as_ref()),
        )
    }

    /// The lab's own program `probe` (its reports are in [`report`](crate::report)), to be run on this host.
    pub fn probe(&self, subcommand: &str) -> Command {
        Command::new(&self.0.probe, self.netns(), self.cgroup(), None).arg(subcommand)
    }

    /// Starts a server on this host that answers with the host's name and the client's address, and waits until it
    /// listens. `arguments` are those of `probe serve`, such as `--http 10.244.2.8:80`.
    ///
    /// # Errors
    /// When it cannot be started or cannot listen.
    pub fn serve(&self, arguments: &[&str]) -> Result<Process> {
        self.serve_as(self.name(), arguments)
    }

    /// As [`Host::serve`], under another name: for several servers on one host.
    ///
    /// # Errors
    /// When it cannot be started or cannot listen.
    pub fn serve_as(&self, name: &str, arguments: &[&str]) -> Result<Process> {
        let probe = self.probe("serve").args(["--name", name]).args(arguments);
        let mut server = probe.stdout_piped().spawn()?;
        server.wait_for_line()?;
        Ok(server)
    }

    /// Starts clients on this host that connect all the time, and waits until they do. End them with
    /// [`Process::wait_json`], which returns a [`LoadReport`](crate::report::LoadReport). A connection that takes 15 s
    /// has failed: on a busy machine, a shorter limit would count slow connections as lost. `arguments` are those of
    /// `probe load`, such as `--to 10.96.0.1:80 --threads 2`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn load(&self, arguments: &[&str]) -> Result<Process> {
        let probe = self
            .probe("load")
            .args(["--until-stdin-closes", "--timeout-ms", "15000"])
            .args(arguments);
        let mut load = probe.stdin_piped().stdout_piped().spawn()?;
        load.wait_for_line()?;
        Ok(load)
    }

    /// Makes a connection that lives until the process's input is closed; it fails if the connection
    /// broke before.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn hold(&self, to: &str) -> Result<Process> {
        let probe = self.probe("hold").args(["--to", to]);
        let mut held = probe.stdin_piped().stdout_piped().spawn()?;
        held.wait_for_line()?;
        Ok(held)
    }

    /// Runs `ip` on this host: `host.ip("route add 10.96.0.0/12 via 192.168.77.1")`.
    ///
    /// # Errors
    /// When it fails.
    pub fn ip(&self, arguments: &str) -> Result<()> {
        self.command("ip")
            .args(arguments.split_whitespace())
            .run()
            .map(drop)
    }

    /// Writes a setting below `/proc/sys/net` of this host, such as `ipv4/tcp_syncookies`.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn sysctl(&self, key: &str, value: &str) -> Result<()> {
        let path = format!("/proc/sys/net/{key}");
        let script = "printf %s \"$2\" > \"$1\"";
        self.command("sh")
            .args(["-c", script, "sh", &path, value])
            .run()
            .map(drop)
    }

    /// The processes that run on this host now.
    pub fn processes(&self) -> Vec<u32> {
        let text = fs::read_to_string(self.cgroup().join("cgroup.procs")).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }
}

/// Returns the hexadecimal number with the digits of this decimal one.
fn reads_like(decimal: u8) -> u16 {
    let decimal = u16::from(decimal);
    (decimal / 100) << 8 | (decimal / 10 % 10) << 4 | (decimal % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_v6_address_reads_like_the_v4_one() {
        let id = LabId::new().unwrap();
        let host = |role, number, ipv4: [u8; 4]| {
            let planned = Planned {
                name: "x".into(),
                role,
                number,
                node: None,
                ipv4: ipv4.into(),
                apart: false,
            };
            Host::new(planned, &id, Path::new("/"), Path::new("/probe"))
        };
        let pod = host(Role::Pod, 12, [10, 244, 12, 254]);
        assert_eq!(pod.ipv6().to_string(), "fd00:10:244:12::254");
        assert_eq!(pod.gateway6().to_string(), "fd00:10:244:12::1");
        assert_eq!(pod.pod_network6(), "fd00:10:244:12::/64");
        assert_eq!(
            host(Role::Node, 2, [192, 168, 77, 2]).ipv6().to_string(),
            "fd77::2"
        );
        let outside = host(Role::External, 201, [192, 168, 77, 201]);
        assert_eq!(outside.ipv6().to_string(), "fd77::201");
    }
}
