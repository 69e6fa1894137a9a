//! The rules that kube-proxy 1.37 writes for a [`Snapshot`], in each of its modes. The benchmarks compare the dataplane
//! with these rules, and the scenarios take them as the expected behaviour.
//!
//! Shapes, names and hashes equal those of the real kube-proxy. The tests here compare line by line with the rules that
//! kube-proxy 1.36 wrote (`tests/data/kube-proxy-1.36`), and apply the changes of version 1.37
//! (`tests/data/kube-proxy-1.37`). This crate leaves out the `nfacct` matches. kube-proxy also leaves them out if the
//! kernel has no such counters. Only invalid packets and node ports on loopback reach them.

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
    /// All modes.
    pub const ALL: [Self; 3] = [Self::IptablesLegacy, Self::IptablesNft, Self::Nftables];

    /// Returns the name of the mode in the benchmark's rows.
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
    /// Both families.
    pub const BOTH: [Self; 2] = [Self::V4, Self::V6];

    /// Returns whether an address is of this family.
    pub fn has(self, addr: IpAddr) -> bool {
        addr.is_ipv4() == (self == Self::V4)
    }

    /// Returns whether a network is of this family.
    pub fn has_net(self, net: &IpNet) -> bool {
        self.has(net.addr())
    }
}

/// How kube-proxy recognizes traffic of the cluster's own pods (`detectLocalMode`). kube-proxy does not masquerade this
/// traffic when it goes to a cluster IP.
#[derive(Clone, Debug, Default)]
pub enum LocalDetector {
    /// kube-proxy does not recognize it.
    #[default]
    None,
    /// `ClusterCIDR`, `NodeCIDR`: by the source address.
    Networks(Vec<IpNet>),
    /// `BridgeInterface`: by the interface that it arrives at.
    Interface(String),
    /// `InterfaceNamePrefix`: by the beginning of the name of the interface that it arrives at.
    InterfacePrefix(String),
}

/// kube-proxy's settings for the cluster.
#[derive(Clone, Debug, Default)]
pub struct Cluster {
    /// Recognizes the traffic to cluster IPs that is not masqueraded.
    pub local: LocalDetector,
    /// `masqueradeAll`: kube-proxy masquerades all traffic to cluster IPs.
    pub masquerade_all: bool,
    /// `nodePortAddresses`, resolved to addresses of the node. If empty, each mode uses its default.
    pub node_ports_on: Vec<IpAddr>,
    /// The cluster's `ServiceCIDR`s: in mode nftables, kube-proxy drops traffic to unused addresses in them.
    pub service_networks: Vec<IpNet>,
}

/// A program, with its input, that loads rules into the network namespace that it runs in.
#[derive(Clone, Debug)]
pub struct Load {
    /// The program, from the distribution's iptables or nftables package.
    pub program: &'static str,
    /// Its arguments.
    pub args: &'static [&'static str],
    /// The program's standard input.
    pub input: String,
}

impl Load {
    /// Runs the program. `command` makes a command that will run in the right network namespace.
    ///
    /// # Errors
    ///
    /// Fails if the program is missing, or if it rejects the rules.
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
        // A program that stops early closes the pipe. Its own message is the better error.
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

/// Returns the programs, with input, that load kube-proxy's rules for `snapshot`.
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
