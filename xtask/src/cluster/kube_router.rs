//! kube-router's firewall: network policies by iptables and ipset, beside the program that serves services.

use std::{
    env,
    io::Write as _,
    path::PathBuf,
    process::{Child, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;

use super::{
    kubectl::eventually,
    node,
    place::{self, Node, SERVICE_RANGES},
};
use crate::{
    command::{on_path, output},
    judges,
};

/// The program's name, and that of its set of judges.
const NAME: &str = "kube-router";
/// Parts of the names of its chains.
const CHAINS: [&str; 3] = ["KUBE-ROUTER-", "KUBE-NWPLCY-", "KUBE-POD-FW-"];

/// Returns what is missing to run it here, in words.
pub fn missing() -> Option<String> {
    if !program().is_file() {
        return Some("no kube-router: `cargo xtask judges kube-router` builds it".into());
    }
    let programs = ["iptables", "ipset"].into_iter();
    let missing: Vec<&str> = programs.filter(|name| on_path(name).is_none()).collect();
    (!missing.is_empty()).then(|| format!("missing: apt-get install {}", missing.join(" ")))
}

fn program() -> PathBuf {
    judges::directory(NAME).join(NAME)
}

/// kube-router on a node. It and its rules are removed when this value is dropped.
pub struct Process {
    child: Child,
    node: Node,
}

impl Process {
    /// Starts it, and waits until its rules are there.
    pub fn start(node: Node) -> Result<Self> {
        let mut command = node.command(program())?;
        let path = env::var("PATH").unwrap_or_default();
        command
            .arg(format!("--kubeconfig={}", place::admin_config().display()))
            .arg(format!("--hostname-override={}", node.name()))
            .args(["--run-firewall=true", "--run-router=false"])
            .args(["--run-service-proxy=false", "--run-loadbalancer=false"])
            // With IPv6, version 2.1.0 gives ip6tables-restore sets that do not exist, and stops.
            .args(["--enable-cni=false", "--enable-ipv6=false"])
            .arg(format!("--service-cluster-ip-range={}", SERVICE_RANGES[0]))
            .args(["--iptables-sync-period=1m", "--health-port=0", "-v=1"])
            // It looks for iptables and ipset, which users may not have on the search path.
            .env("PATH", format!("{path}:/usr/sbin:/sbin"));
        let child = node::spawn(node, &mut command, "kube-router.log")?;
        let process = Self { child, node };
        eventually(Duration::from_mins(1), || {
            let rules = rules(node)?;
            ensure!(
                rules.contains("KUBE-ROUTER-FORWARD"),
                "{}: kube-router has made no rules; see kube-router.log",
                node.name()
            );
            Ok(())
        })?;
        Ok(process)
    }

    fn end(&mut self) -> Result<()> {
        node::end(&mut self.child, Signal::SIGTERM)?;
        let rules = rules(self.node)?;
        let is_its = |line: &str| CHAINS.iter().any(|chain| line.contains(chain));
        let mut others: String = rules
            .lines()
            .filter(|line| !is_its(line))
            .fold(String::new(), |text, line| text + line + "\n");
        // An empty text is no table.
        if !others.contains("COMMIT") {
            others = "*filter\nCOMMIT\n".into();
        }
        let mut restore = self.node.command("iptables-restore")?;
        let mut restore = restore.stdin(Stdio::piped()).spawn()?;
        let mut stdin = restore.stdin.take().context("a standard input")?;
        stdin.write_all(others.as_bytes())?;
        drop(stdin);
        let status = restore.wait()?;
        ensure!(status.success(), "iptables-restore failed: {status}");
        output(self.node.command("ipset")?.arg("destroy")).map(drop)
    }
}

/// Returns the node's rules in the table `filter`, as iptables-save prints them.
fn rules(node: Node) -> Result<String> {
    output(node.command("iptables-save")?.args(["-t", "filter"]))
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            anstream::eprintln!("kube-router on {}: {error:#}", self.node.name());
        }
    }
}
