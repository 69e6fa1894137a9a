//! Sysctls of the kernel's own conntrack, which the agent sets on request (`kernel.conntrack`).

use std::{fs, thread, time::Duration};

use anyhow::{Result, ensure};
use dataplane_tests::{Agent, Host, Lab};

use crate::{
    cluster::{Cluster, TCP, eventually, reaches, serve},
    manifest::{Manifests, Service},
    metrics::Metrics,
    outcome::{http, run},
};

scenarios! {
    Dataplane:
    they_are_set_and_kept,
    they_are_left_alone_unless_asked_for,
    the_maximum_cannot_be_set_outside_of_the_first_namespace,
    in_a_container_they_take_a_mount,
    they_are_set_as_soon_as_the_module_is_there,
}

const TO: &str = "10.96.0.10:80";
const CLOSE_WAIT: &str = "netfilter/nf_conntrack_tcp_timeout_close_wait";

/// A service with one endpoint.
struct World {
    lab: Lab,
    manifests: Manifests,
}

impl World {
    fn new() -> Result<Self> {
        let lab = Cluster::lab()?;
        let web = Service::new("web", &["10.96.0.10"])
            .port("tcp", 80, TCP)
            .endpoints(&[lab.pod("near")]);
        let manifests = Manifests::new(&[web])?;
        Ok(Self { lab, manifests })
    }

    fn node(&self) -> &Host {
        self.lab.node("node2")
    }

    fn get(&self, name: &str) -> Result<String> {
        let file = format!("/proc/sys/net/{name}");
        let said = self.node().command("cat").args([file]).run()?;
        Ok(said.trim_end().to_owned())
    }

    /// Something that the agent is told of, so that it looks at the node's network.
    fn poke(&self) -> Result<()> {
        for verb in ["add", "del"] {
            let words = ["address", verb, "192.0.2.77/32", "dev", "lo"];
            self.node().command("ip").args(words).run()?;
        }
        Ok(())
    }

    /// The agent serves, and is ready, and not healthy by this.
    fn says_and_serves(&self, agent: &Agent, words: &[&str]) -> Result<()> {
        eventually(|| run(agent, "status")?.exits(1)?.says(words).map(drop))?;
        let _server = serve(self.lab.pod("near"))?;
        reaches(self.lab.pod("sleep"), TO, "connect --count 3", &["near"])?;
        let (ext, node) = (self.lab.external("ext"), self.node());
        let (status, body) = http(ext, &format!("http://{}:15021/healthz/ready", node.ipv4()))?;
        ensure!(status == 200, "{status} {body}");
        let metrics = Metrics::scrape(node)?;
        ensure!(metrics.sum("dataplane_problems", &[]) > 0.5);
        Ok(())
    }
}

fn they_are_set_and_kept() -> Result<()> {
    let world = World::new()?;
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("dataplane.yaml");
    // A maximum that every machine has.
    let text = "kernel:\n  conntrack:\n    maxPerCore: 1\n    tcpEstablishedTimeout: 24h\n    \
                tcpCloseWaitTimeout: 1h\n    tcpBeLiberal: true\n    udpTimeout: 20s\n";
    fs::write(&file, text)?;
    let agent = world
        .lab
        .agent("node2")
        .manifests(world.manifests.path())
        .args(["--config".as_ref(), file.as_os_str()])
        .args(["--nf-conntrack-udp-timeout-stream", "1m40s"])
        .args(["--nf-conntrack-udp-timeout", "25s"]);
    let agent = agent.start()?;
    for (name, value) in [
        ("tcp_timeout_established", "86400"),
        ("tcp_timeout_close_wait", "3600"),
        ("tcp_be_liberal", "1"),
        ("udp_timeout", "25"),
        ("udp_timeout_stream", "100"),
        // Not asked for.
        ("tcp_timeout_time_wait", "120"),
    ] {
        let found = world.get(&format!("netfilter/nf_conntrack_{name}"))?;
        ensure!(found == value, "{name}: {found} in place of {value}");
    }
    // Somebody else writes to it.
    world.node().sysctl(CLOSE_WAIT, "7")?;
    world.poke()?;
    eventually(|| {
        let found = world.get(CLOSE_WAIT)?;
        ensure!(found == "3600", "{found}");
        Ok(())
    })?;
    let log = agent.log();
    ensure!(
        log.contains("another program set net.netfilter.nf_conntrack_tcp_timeout_close_wait to 7"),
        "{log}"
    );
    run(&agent, "status")?.exits(0)?;
    // What was asked for stays, as with kube-proxy.
    drop(agent);
    ensure!(world.get(CLOSE_WAIT)? == "3600");
    Ok(())
}

fn they_are_left_alone_unless_asked_for() -> Result<()> {
    let world = World::new()?;
    world.node().sysctl(CLOSE_WAIT, "61")?;
    let _agent = world
        .lab
        .agent("node2")
        .manifests(world.manifests.path())
        .start()?;
    world.poke()?;
    thread::sleep(Duration::from_secs(1));
    ensure!(world.get(CLOSE_WAIT)? == "61");
    Ok(())
}

/// `nf_conntrack_standalone_init_sysctl`: read-only elsewhere.
fn the_maximum_cannot_be_set_outside_of_the_first_namespace() -> Result<()> {
    let world = World::new()?;
    let mut agent = world
        .lab
        .agent("node2")
        .manifests(world.manifests.path())
        .args(["--nf-conntrack-min", "2147483647"])
        .args(["--nf-conntrack-tcp-timeout-close-wait", "1h"])
        .prepare()?;
    agent.launch()?;
    let words = [
        "error: kernel.conntrack: cannot set net.netfilter.nf_conntrack_max, net.netfilter.nf_conntrack_buckets: \
         Permission denied",
        "hostNetwork: true",
    ];
    world.says_and_serves(&agent, &words)?;
    ensure!(world.get(CLOSE_WAIT)? == "3600", "the others are set");
    Ok(())
}

fn in_a_container_they_take_a_mount() -> Result<()> {
    let world = World::new()?;
    let agent = || {
        let agent = world.lab.agent("node2").manifests(world.manifests.path());
        let agent = agent.args(["--nf-conntrack-tcp-timeout-close-wait", "1h"]);
        agent.args(["--nf-conntrack-udp-timeout", "20s"])
    };
    let before = world.get(CLOSE_WAIT)?;
    let mut without = agent().read_only_settings().prepare()?;
    without.launch()?;
    let words = [
        "error: kernel.conntrack: cannot set net.netfilter.nf_conntrack_tcp_timeout_close_wait, \
         net.netfilter.nf_conntrack_udp_timeout: Read-only file system",
        "component `conntrack`",
    ];
    world.says_and_serves(&without, &words)?;
    ensure!(world.get(CLOSE_WAIT)? == before);
    drop(without);
    // As the component mounts it.
    let directory = tempfile::tempdir()?;
    let place = directory.path().display();
    let mounts = format!(
        "mount --bind /proc/sys/net {place} && mount --bind /proc/sys /proc/sys && \
         mount -o remount,bind,ro /proc/sys"
    );
    let _with = agent().mounts(&mounts).start()?;
    ensure!(world.get(CLOSE_WAIT)? == "3600");
    Ok(())
}

/// The files are not there, as if the module were not loaded; then they are.
fn they_are_set_as_soon_as_the_module_is_there() -> Result<()> {
    let world = World::new()?;
    let mut agent = world
        .lab
        .agent("node2")
        .manifests(world.manifests.path())
        .args(["--nf-conntrack-tcp-timeout-close-wait", "1h"])
        .mounts("mount -t tmpfs none /proc/sys/net/netfilter")
        .prepare()?;
    agent.launch()?;
    let words = [
        "error: kernel.conntrack: cannot set net.netfilter.nf_conntrack_tcp_timeout_close_wait: the kernel's \
         module nf_conntrack is not loaded",
        "modprobe nf_conntrack",
    ];
    world.says_and_serves(&agent, &words)?;
    let namespace = format!("--mount=/proc/{}/ns/mnt", agent.id());
    let umount = world.node().command("nsenter");
    umount
        .args([&namespace, "umount", "/proc/sys/net/netfilter"])
        .run()?;
    world.poke()?;
    eventually(|| run(&agent, "status")?.exits(0).map(drop))?;
    ensure!(world.get(CLOSE_WAIT)? == "3600");
    Ok(())
}
