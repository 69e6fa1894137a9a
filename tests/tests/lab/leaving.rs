//! kube-proxy's rules are removed from a node that has no other NAT rules (docs/kubernetes.md, "Migration from
//! kube-proxy"): which connections hang and end then, and that `dataplane keep-nat` prevents it.

use std::{iter, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{
    Host, Process, patience,
    report::{LoadReport, Report},
};

use crate::{
    cluster::{Cluster, TCP, eventually, serve},
    manifest::{Manifests, Service},
    moving::Rules,
    outcome::run,
};

scenarios! {
    Dataplane:
    kube_proxys_rules_go_without_a_hang,
    connections_hang_where_nothing_keeps_nat,
}

const TO: &str = "10.96.0.10:80";

/// Errors of a client while the rules went.
#[derive(Debug)]
struct Noticed {
    /// Connections that failed, or whose first packet was lost.
    hung: bool,
    /// The connection that kube-proxy translated ended.
    ended: bool,
}

/// Another user of conntrack, as any firewall is.
const FIREWALL: &str = "add table ip firewall; \
    add chain ip firewall forward { type filter hook forward priority 10; }; \
    add rule ip firewall forward ct state invalid counter";

fn nft(node: &Host, rules: &str) -> Result<String> {
    Ok(node.command("nft").args([rules]).run()?)
}

/// Has clients connect through kube-proxy's rules, then through the agent beside them, then removes the rules. `keep`:
/// by the steps of docs/kubernetes.md. `firewall`: with another user of conntrack.
fn leave(keep: bool, firewall: bool) -> Result<Noticed> {
    let lab = Cluster::lab()?;
    let _server = serve(lab.pod("far"))?;
    let web = Service::new("web", &["10.96.0.10"])
        .port("tcp", 80, TCP)
        .endpoints(&[lab.pod("far")]);
    let manifests = Manifests::new(&[web])?;
    let (client, node) = (lab.pod("sleep"), lab.node("node2"));
    // So few source ports that each is used again soon, also on a slow machine.
    client.sysctl("ipv4/ip_local_port_range", "20000 20399")?;
    client.sysctl("ipv4/tcp_tw_reuse", "1")?;
    if firewall {
        nft(node, FIREWALL)?;
    }
    Rules::of(&lab, &manifests)?.write(node)?;
    // Translated connections are forgotten soon after their end.
    node.sysctl("netfilter/nf_conntrack_tcp_timeout_time_wait", "8")?;
    let held = client.hold(TO)?;
    let start = || Load::start(client);
    let load = start()?;
    thread::sleep(Duration::from_secs(2));
    load.fine().context("served by kube-proxy")?;

    let mut agent = lab.agent("node2").manifests(manifests.path()).start()?;
    if keep {
        let without = run(&agent, "status")?.exits(0)?;
        without.says(&["Keep-NAT", "no nftables table inet dataplane-keep-nat"])?;
        let said = run(&agent, "keep-nat")?.exits(0)?;
        said.says(&["inet dataplane-keep-nat: added", "translated connections"])?;
        let again = run(&agent, "keep-nat")?.exits(0)?;
        again.says(&["inet dataplane-keep-nat: is there"])?;
        let with = run(&agent, "status")?.exits(0)?;
        with.says(&["inet dataplane-keep-nat is there", "keep-nat --release"])?;
        let json = run(&agent, "status -o json")?.json()?;
        ensure!(json["keep_nat"] == true, "{json:#}");
        let table = nft(node, "list table inet dataplane-keep-nat")?;
        for words in [
            "type nat hook postrouting priority srcnat; policy accept;",
            "ct state new counter",
            "comment \"keeps conntrack and NAT on: dataplane keep-nat\"",
        ] {
            ensure!(table.contains(words), "no {words:?} in {table}");
        }
    }
    let load = start()?;
    thread::sleep(Duration::from_millis(300));
    Rules::remove(node)?;
    thread::sleep(Duration::from_secs(2));
    let noticed = Noticed {
        hung: load.fine().is_err(),
        ended: ended(held)?,
    };
    if !keep || noticed.hung || noticed.ended {
        return Ok(noticed);
    }

    // The table goes when no translated connection is left, and no client fails.
    let early = run(&agent, "keep-nat --release")?.exits(1)?;
    early.says(&["still translates", "--now"])?;
    thread::sleep(patience(Duration::from_secs(9)));
    let held = client.hold(TO)?;
    let load = start()?;
    eventually(|| run(&agent, "keep-nat --release")?.exits(0).map(drop))?;
    ensure!(!nft(node, "list tables")?.contains("keep-nat"));
    thread::sleep(Duration::from_secs(1));
    load.fine().context("after the release")?;
    ensure!(!ended(held)?, "a connection ended at the release");

    // `cleanup` removes a table that was not released.
    run(&agent, "keep-nat")?.exits(0)?;
    run(&agent, "keep-nat --release --now")?
        .exits(0)?
        .says(&["removed"])?;
    run(&agent, "keep-nat --release")?
        .exits(0)?
        .says(&["is not there"])?;
    run(&agent, "keep-nat")?.exits(0)?;
    agent.stop()?;
    let table = "nft:inet dataplane-keep-nat";
    run(&agent, "cleanup --dry-run")?.exits(0)?.says(&[table])?;
    run(&agent, "cleanup -o json")?.exits(0)?.says(&[table])?;
    ensure!(!nft(node, "list tables")?.contains("keep-nat"));
    run(&agent, "keep-nat")?.exits(0)?;
    // Also when nothing else of the dataplane is left.
    run(&agent, "cleanup -o json")?.exits(0)?.says(&[table])?;
    run(&agent, "cleanup")?.exits(0)?.says(&["Nothing"])?;
    Ok(noticed)
}

/// Clients that connect all the time.
struct Load {
    process: Process,
    client: Host,
    /// How many SYNs had been sent again before.
    before: u64,
}

impl Load {
    fn start(client: &Host) -> Result<Self> {
        Ok(Self {
            before: sent_again(client)?,
            process: client.load(&["--to", TO, "--threads", "2", "--pause-us", "2000"])?,
            client: client.clone(),
        })
    }

    /// Wants all their connections made, and by the first SYN: a connection that hangs loses its first SYN, and both clients then
    /// wait a second. How long a connection takes tells nothing on a busy machine.
    fn fine(self) -> Result<()> {
        let report: LoadReport = self.process.wait_json()?;
        let again = sent_again(&self.client)? - self.before;
        ensure!(
            report.errors.is_empty() && again == 0 && report.answered > 100,
            "{} answered, {again} SYNs sent again, the slowest in {:?}, {:?}",
            report.answered,
            Duration::from_nanos(report.connect_ns.max),
            report.errors
        );
        Ok(())
    }
}

/// How many SYNs a host has sent again so far.
fn sent_again(host: &Host) -> Result<u64> {
    let text = host.command("cat").args(["/proc/net/netstat"]).run()?;
    let mut lines = text.lines().filter(|line| line.starts_with("TcpExt:"));
    let (names, values) = (lines.next(), lines.next());
    let mut both = iter::zip(
        names.context("no names")?.split_whitespace(),
        values.context("no values")?.split_whitespace(),
    );
    let found = both.find(|(name, _)| *name == "TCPSynRetrans");
    Ok(found.context("no TCPSynRetrans")?.1.parse()?)
}

/// Whether a connection broke.
fn ended(held: Process) -> Result<bool> {
    let report: Report = held.wait_json()?;
    ensure!(
        report.answered > 10,
        "too little to mean anything: {report:?}"
    );
    Ok(!report.errors.is_empty())
}

fn kube_proxys_rules_go_without_a_hang() -> Result<()> {
    for firewall in [false, true] {
        let noticed = leave(true, firewall)?;
        ensure!(
            !noticed.hung && !noticed.ended,
            "another user of conntrack: {firewall}: {noticed:?}"
        );
    }
    Ok(())
}

/// The failure that the other scenario prevents: unless connections fail here, that one shows nothing.
fn connections_hang_where_nothing_keeps_nat() -> Result<()> {
    let noticed = leave(false, true)?;
    ensure!(noticed.hung && noticed.ended, "{noticed:?}");
    let noticed = leave(false, false)?;
    ensure!(noticed.ended, "{noticed:?}");
    Ok(())
}
