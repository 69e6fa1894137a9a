//! Starts pods as a container runtime does: a network namespace, its link to the node, the CNI plug-in, and at once the
//! pod's first connections. All is done in this process, except the plug-in: so many pods start per second.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use dataplane_tests::report::StartReport;
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    net::if_::if_nametoindex,
    sched::{CloneFlags, setns, unshare},
};
use serde_json::json;

use crate::{
    client::{Target, name, ns, read_greeting},
    links::Links,
};

/// The network namespace of this thread.
const OWN: &str = "/proc/thread-self/ns/net";

/// The number of loopback in every network namespace.
const LOOPBACK: u32 = 1;

#[derive(Args)]
pub struct Arguments {
    /// The CNI plug-in; without it, pods have none, and make no connections
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,
    /// Call the plug-in for its version only, as often as for a pod; pods make no connections
    #[arg(long)]
    version: bool,
    /// The agent's socket
    #[arg(long, value_name = "FILE")]
    socket: PathBuf,
    /// The node's address towards its pods
    #[arg(long, value_name = "ADDRESS")]
    gateway: Ipv4Addr,
    /// Where each pod connects to first
    #[arg(long, value_name = "ADDRESS:PORT")]
    to: SocketAddr,
    /// Where each pod then tries to connect to, by TCP and by UDP
    #[arg(long, value_name = "ADDRESS:PORT")]
    denied: SocketAddr,
}

/// The node's network namespace.
struct Node {
    netns: File,
    links: Links,
}

struct Pod<'a> {
    name: &'a str,
    /// The name of its network namespace.
    netns: &'a str,
    address: Ipv4Addr,
    uid: &'a str,
    of: &'a Arguments,
}

/// For each line `NAME NETNS ADDRESS UID` on stdin, starts a pod and reports on it; at the next line, ends it.
pub fn run(arguments: &Arguments) -> Result<()> {
    let node = Node {
        netns: File::open(OWN).context("open the node's network namespace")?,
        links: Links::here()?,
    };
    println!("ready");
    let mut lines = io::stdin().lines();
    while let Some(line) = lines.next().transpose()? {
        let words: Vec<&str> = line.split(' ').collect();
        let [name, netns, address, uid] = words[..] else {
            anyhow::bail!("not NAME NETNS ADDRESS UID: {line}");
        };
        let address = address.parse()?;
        let pod = Pod {
            name,
            netns,
            address,
            uid,
            of: arguments,
        };
        let report = pod.start(&node).with_context(|| format!("start {line}"))?;
        println!("{}", serde_json::to_string(&report)?);
        lines.next().transpose()?;
        pod.end(&node).with_context(|| format!("end {line}"))?;
        println!();
    }
    Ok(())
}

impl Pod<'_> {
    fn file(&self) -> PathBuf {
        Path::new("/run/netns").join(self.netns)
    }

    fn start(&self, node: &Node) -> Result<StartReport> {
        const NO: Option<&str> = None;

        let enter = |netns: &File| setns(netns, CloneFlags::CLONE_NEWNET);
        unshare(CloneFlags::CLONE_NEWNET).context("make a network namespace")?;
        File::create(self.file())?;
        mount(Some(OWN), &self.file(), NO, MsFlags::MS_BIND, NO).context("name it")?;
        let own = File::open(OWN)?;
        enter(&node.netns)?;
        self.link(&node.links, &own).context("link it")?;
        enter(&own)?;
        self.configure().context("configure it")?;
        enter(&node.netns)?;
        let started = Instant::now();
        self.plugin("ADD")?;
        let add_ns = ns(started.elapsed());
        if self.of.version || self.of.plugin.is_none() {
            let (first, denied) = Default::default();
            return Ok(StartReport {
                add_ns,
                first,
                denied,
            });
        }
        enter(&own)?;
        let report = self.connect(add_ns);
        enter(&node.netns)?;
        Ok(report)
    }

    /// The node's side of the link.
    fn link(&self, links: &Links, own: &File) -> Result<()> {
        links.add_pair(self.name, "eth0", own)?;
        let (index, gateway) = (if_nametoindex(self.name)?, self.of.gateway);
        links.add_address(index, gateway)?;
        Ok(links.add_route(index, self.address, Some(gateway))?)
    }

    /// The pod's side.
    fn configure(&self) -> Result<()> {
        let (links, gateway) = (Links::here()?, self.of.gateway);
        links.set_up(LOOPBACK)?;
        let index = if_nametoindex("eth0")?;
        links.add_address(index, self.address)?;
        links.set_up(index)?;
        links.add_route(index, gateway, None)?;
        Ok(links.add_default_route(gateway, self.address)?)
    }

    /// The first connections.
    fn connect(&self, add_ns: u64) -> StartReport {
        let connect = |to| Target::one(to, 20_000).connect(to).socket;
        let answer = connect(self.of.to).and_then(|socket| read_greeting(&socket));
        let tcp = connect(self.of.denied).map(drop);
        let udp = UdpSocket::bind("0.0.0.0:0").and_then(|socket| socket.connect(self.of.denied));
        let word = |result: io::Result<()>| result.map_or_else(|e| name(&e), |()| "passed".into());
        StartReport {
            add_ns,
            first: answer.map_or_else(|error| name(&error), |(endpoint, _)| endpoint),
            denied: [word(tcp), word(udp)],
        }
    }

    fn end(&self, node: &Node) -> Result<()> {
        self.plugin("DEL")?;
        // As the plug-in before ours in the chain: the address is free for another pod.
        node.links.remove(if_nametoindex(self.name)?)?;
        umount2(&self.file(), MntFlags::MNT_DETACH).context("unmount the network namespace")?;
        Ok(fs::remove_file(self.file())?)
    }

    /// Calls the plug-in, which must succeed.
    fn plugin(&self, command: &str) -> Result<()> {
        let Some(plugin) = &self.of.plugin else {
            return Ok(());
        };
        let command = if self.of.version { "VERSION" } else { command };
        let input = json!({
            "cniVersion": "1.1.0",
            "name": "net",
            "type": "dataplane-cni",
            "socket": self.of.socket,
            "waitSeconds": 120,
            "prevResult": {
                "cniVersion": "1.1.0",
                "interfaces": [{ "name": self.name }, { "name": "eth0", "sandbox": self.file() }],
                "ips": [{ "address": format!("{}/24", self.address), "interface": 1 }],
            },
        });
        let args = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME={};K8S_POD_UID={}",
            self.name, self.uid
        );
        let mut plugin = Command::new(plugin);
        plugin
            .env("CNI_COMMAND", command)
            .env("CNI_CONTAINERID", self.uid)
            .env("CNI_IFNAME", "eth0")
            .env("CNI_NETNS", self.file())
            .env("CNI_ARGS", args);
        feed(&mut plugin, &input.to_string()).context(command.to_owned())
    }
}

/// Runs a program, which must succeed, with this text as its stdin.
fn feed(command: &mut Command, input: &str) -> Result<()> {
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.stderr(Stdio::piped()).spawn()?;
    let mut stdin = child.stdin.take().expect("stdin is piped");
    // A broken pipe means that the program has ended; its output has the reason.
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    let output = child.wait_with_output()?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    ensure!(output.status.success(), "{}: {said}", output.status);
    Ok(())
}
