//! The kubelet's probes: connections of processes in its cgroup reach the application, and those of others from the same
//! address go to the proxy.

use std::{fs, net::IpAddr, path::PathBuf};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use dataplane_tests::{Command, report::Report};
use serde_json::json;

use super::{World, foreign};
use crate::{
    cluster::{TCP, eventually, reaches, refused},
    manifest::{Manifests, Service},
};

scenarios! {
    Dataplane:
    probes_of_the_kubelet_reach_the_application,
    probes_need_no_proxy,
    a_kubelet_that_starts_again_is_found,
    one_that_only_has_the_nodes_address_is_no_kubelet,
}

/// A place for processes like the kubelet's, on node1.
pub(super) struct Kubelet<'a> {
    world: &'a World,
    cgroup: PathBuf,
}

impl<'a> Kubelet<'a> {
    /// Makes its cgroup, as systemd does for the unit.
    pub(super) fn start(world: &'a World) -> Result<Self> {
        let slice = world.lab.node_cgroup("node1").join("system.slice");
        let cgroup = slice.join("kubelet.service");
        fs::create_dir_all(&cgroup).with_context(|| format!("{}", cgroup.display()))?;
        Ok(Self { world, cgroup })
    }

    fn stop(self) -> Result<()> {
        Ok(fs::remove_dir(self.cgroup)?)
    }

    fn probe(&self, arguments: &[&str]) -> Result<Report> {
        let (lab, netns) = (&self.world.lab, self.world.lab.node("node1").netns());
        let program = lab.programs().probe()?;
        let probe = Command::in_place(lab.programs(), netns, &self.cgroup, program)?;
        Ok(probe.args(arguments).json()?)
    }

    /// Probes `app` by TCP and HTTP, in both families, five times each: every probe reaches the application, which sees
    /// an address of the node. Returns how many probes were made.
    pub(super) fn probes(&self) -> Result<u64> {
        let gateways: [IpAddr; 2] = {
            let app = self.world.app();
            [app.gateway4().into(), app.gateway6().into()]
        };
        let mut made = 0;
        for (how, to) in [
            ("connect", "10.244.1.8:7"),
            ("connect", "[fd00:10:244:1::8]:7"),
            ("http", "10.244.1.8:80"),
            ("http", "[fd00:10:244:1::8]:80"),
        ] {
            let report = self.probe(&[how, "--to", to, "--count", "5"])?;
            ensure!(
                report.answered == 5 && report.endpoints.keys().eq(["app"]),
                "{how} {to}: {report:?}"
            );
            let mut sources = report.endpoints["app"].sources.keys();
            let is_nodes = sources.all(|source| gateways.contains(source));
            ensure!(is_nodes, "{how} {to}: {report:?}");
            made += report.answered;
        }
        Ok(made)
    }

    /// Probes, and wants all of it to be left alone.
    fn is_left_alone(&self) -> Result<()> {
        let before = self.world.verdicts(Reason::CapturedInbound)?;
        let (made, counted) = self
            .world
            .counted(Reason::ExcludedProbe, || self.probes())?;
        ensure!(counted == made, "{counted} of {made} were known as probes");
        let captured = self.world.verdicts(Reason::CapturedInbound)? - before;
        ensure!(captured == 0, "{captured} were captured");
        Ok(())
    }
}

/// Also at a port that the configuration names to be captured; a process in another cgroup of the node is captured.
fn probes_of_the_kubelet_reach_the_application() -> Result<()> {
    for rules in [
        json!({ "mode": "proxy" }),
        json!({ "mode": "proxy", "egress": "deny", "includeInboundPorts": [7, 80] }),
    ] {
        let mut world = World::new()?;
        Kubelet::start(&world)?;
        world.capture(json!({}), rules)?;
        Kubelet::start(&world)?.is_left_alone()?;
        let node = world.lab.node("node1");
        for to in ["10.244.1.8:7", "[fd00:10:244:1::8]:7"] {
            let probes = world.verdicts(Reason::ExcludedProbe)?;
            let (_, counted) = world.counted(Reason::CapturedInbound, || {
                reaches(node, to, "connect --count 5", &["app"])
            })?;
            ensure!(counted == 5, "{to}: {counted} of 5 were captured");
            ensure!(world.verdicts(Reason::ExcludedProbe)? == probes, "{to}");
        }
    }
    // Without a proxy, no probe is refused, either.
    let mut world = World::new()?;
    Kubelet::start(&world)?;
    world.capture(json!({}), json!({ "mode": "kernel" }))?;
    Kubelet::start(&world)?.probes()?;
    Ok(())
}

/// Nobody listens at the proxy's port, so a connection that is answered has reached the application directly.
fn probes_need_no_proxy() -> Result<()> {
    let mut world = World::new()?;
    Kubelet::start(&world)?;
    world.capture(foreign(), json!({}))?;
    Kubelet::start(&world)?.is_left_alone()?;
    for from in [world.lab.node("node1"), world.lab.pod("one")] {
        refused(from, "10.244.1.8:7", "connect --count 2")?;
        refused(from, "[fd00:10:244:1::8]:7", "connect --count 2")?;
    }
    // The configuration names no kubelet.
    let mut config = super::mesh(foreign(), json!({}));
    config["probes"] = json!({ "cgroups": [] });
    world.agent_with(&config, &[])?;
    let report = Kubelet::start(&world)?.probe(&["connect", "--to", "10.244.1.8:7"])?;
    ensure!(report.answered == 0, "{report:?}");
    Ok(())
}

/// systemd makes a new cgroup for a unit that starts again; a new agent finds the earlier agent's programs there.
fn a_kubelet_that_starts_again_is_found() -> Result<()> {
    let mut world = World::new()?;
    world.capture(foreign(), json!({}))?;
    for _ in 0..2 {
        let kubelet = Kubelet::start(&world)?;
        eventually(|| kubelet.is_left_alone())?;
        kubelet.stop()?;
    }
    let kubelet = Kubelet::start(&world)?;
    eventually(|| kubelet.is_left_alone())?;
    world.capture(foreign(), json!({}))?;
    Kubelet::start(&world)?.is_left_alone()
}

/// A client outside of the cluster comes by a node port, and the node masquerades it.
fn one_that_only_has_the_nodes_address_is_no_kubelet() -> Result<()> {
    let mut world =
        World::with(|lab| lab.pod("node1", "app", "10.244.1.8").external("ext"))?.by_packets();
    let app = world.app().clone();
    let service = Service::new("app", &["10.96.0.40", "fd00:96::40"])
        .node_port("tcp", 80, TCP, 30080)
        .endpoints(&[&app]);
    world.manifests = Manifests::new(&[service])?;
    Kubelet::start(&world)?;
    world.capture(json!({}), json!({ "mode": "proxy" }))?;
    Kubelet::start(&world)?.is_left_alone()?;
    let probes = world.verdicts(Reason::ExcludedProbe)?;
    let to = format!("{}:30080", world.lab.node("node1").ipv4());
    let (report, counted) = world.counted(Reason::CapturedInbound, || {
        reaches(
            world.lab.external("ext"),
            &to,
            "connect --count 5",
            &["app"],
        )
    })?;
    ensure!(counted == 5, "{counted} of 5 were captured");
    ensure!(world.verdicts(Reason::ExcludedProbe)? == probes);
    let mut sources = report.endpoints["app"].sources.keys();
    let is_nodes = sources.all(|source| *source == IpAddr::from(app.gateway4()));
    ensure!(is_nodes, "not masqueraded: {report:?}");
    Ok(())
}
