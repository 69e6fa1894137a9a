//! The rules that kube-proxy 1.37 writes for a [`Snapshot`], in each of its modes: what the
//! benchmarks are measured against and what the scenarios take as the truth.
//!
//! Shapes, names and hashes are those of the real one: the tests here compare with the rules that
//! it wrote for `tests/data/kube-proxy-1.36`, line by line, but for what 1.37 changed (`tests/data/kube-proxy-1.37`). Only the `nfacct` matches are left out: kube-proxy
//! leaves them out too where the kernel has no such counters, and they are reached by invalid packets
//! and by node ports on loopback only.

mod iptables;
mod names;
mod nftables;
mod port;

#[cfg(test)]
mod import;
#[cfg(test)]
mod tests;

use std::{
    fmt,
    io::Write as _,
    net::IpAddr,
    process::{Command, Stdio},
};

use anyhow::{Context as _, bail};
use ipnet::IpNet;
use model::Snapshot;

/// How kube-proxy programs the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mode {
    /// Mode `iptables`, where `iptables` is the legacy binary.
    IptablesLegacy,
    /// Mode `iptables`, where `iptables` translates to nf_tables, as on most distributions.
    IptablesNft,
    /// Mode `nftables`.
    Nftables,
}

impl Mode {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::IptablesLegacy, Self::IptablesNft, Self::Nftables];

    /// As the benchmark's rows have it.
    pub const fn word(self) -> &'static str {
        match self {
            Self::IptablesLegacy => "iptables-legacy",
            Self::IptablesNft => "iptables-nft",
            Self::Nftables => "nftables",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

/// An IP family. kube-proxy runs once for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::V4, Self::V6];

    /// Whether an address is of this family.
    pub fn has(self, addr: IpAddr) -> bool {
        addr.is_ipv4() == (self == Self::V4)
    }

    /// Whether a network is of this family.
    pub fn has_net(self, net: &IpNet) -> bool {
        self.has(net.addr())
    }
}

/// By what kube-proxy knows traffic of the cluster's own pods (`detectLocalMode`), which it does not
/// masquerade on its way to a cluster IP.
#[derive(Clone, Debug, Default)]
pub enum LocalDetector {
    /// By nothing.
    #[default]
    None,
    /// `ClusterCIDR`, `NodeCIDR`: by the source address.
    Networks(Vec<IpNet>),
    /// `BridgeInterface`: by the interface that it arrives at.
    Interface(String),
    /// `InterfaceNamePrefix`: likewise, by the beginning of the interface's name.
    InterfacePrefix(String),
}

/// What kube-proxy is told of the cluster.
#[derive(Clone, Debug, Default)]
pub struct Cluster {
    /// Whose traffic to cluster IPs is not masqueraded.
    pub local: LocalDetector,
    /// `masqueradeAll`: all traffic to cluster IPs is.
    pub masquerade_all: bool,
    /// `nodePortAddresses`, as the addresses of the node that they came to; empty: each mode's
    /// default.
    pub node_ports_on: Vec<IpAddr>,
    /// The cluster's `ServiceCIDR`s: in mode nftables, traffic to their unused addresses is dropped.
    pub service_networks: Vec<IpNet>,
}

/// A program that loads rules into the network namespace that it runs in, with its input.
#[derive(Clone, Debug)]
pub struct Load {
    /// The program, from the distribution's iptables or nftables package.
    pub program: &'static str,
    /// Its arguments.
    pub args: &'static [&'static str],
    /// What it reads from stdin.
    pub input: String,
}

impl Load {
    /// Runs it. `command` makes a command that will run in the right network namespace.
    ///
    /// # Errors
    ///
    /// If the program is missing, or does not take the rules.
    pub fn run(&self, command: impl FnOnce(&str) -> Command) -> anyhow::Result<()> {
        let program = self.program;
        let mut child = command(program)
            .args(self.args)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| {
                format!("{program}: cannot run it; apt-get install iptables nftables")
            })?;
        let mut stdin = child.stdin.take().context("no stdin")?;
        // A program that gives up early closes the pipe; what it then says is the better error.
        let written = stdin.write_all(self.input.as_bytes());
        drop(stdin);
        let output = child.wait_with_output()?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let head: Vec<_> = stderr.lines().take(5).collect();
            bail!(
                "{program} did not take the rules ({}): {}",
                output.status,
                head.join("\n")
            );
        }
        written.with_context(|| format!("{program}: stdin"))
    }
}

/// What loads kube-proxy's rules for `snapshot`.
pub fn rules(mode: Mode, snapshot: &Snapshot, cluster: &Cluster) -> Vec<Load> {
    let restore = |program, family| Load {
        program,
        args: &["-w", "60", "--noflush", "--counters"],
        input: iptables::rules(snapshot, cluster, family),
    };
    match mode {
        Mode::IptablesLegacy => vec![
            restore("iptables-legacy-restore", Family::V4),
            restore("ip6tables-legacy-restore", Family::V6),
        ],
        Mode::IptablesNft => vec![
            restore("iptables-nft-restore", Family::V4),
            restore("ip6tables-nft-restore", Family::V6),
        ],
        Mode::Nftables => Family::BOTH
            .map(|family| Load {
                program: "nft",
                args: &["-f", "-"],
                input: nftables::rules(snapshot, cluster, family),
            })
            .into(),
    }
}
