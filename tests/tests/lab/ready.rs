//! Pods that start: an endpoint that is in the tables before its pod's interface has programs.

use std::net::Ipv4Addr;

use anyhow::{Result, ensure};
use dataplane_tests::report::Report;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    cluster::{Cluster, TCP, UDP, ask, eventually, reaches},
    manifest::Service,
};

scenarios! {
    Dataplane:
    an_endpoint_whose_interface_is_not_ready_is_passed_over,
}

/// The agent is stopped while a pod's interface appears, so that the interface has no programs meanwhile. The endpoint
/// sees clients' own addresses, so its answers would go to them untranslated.
fn an_endpoint_whose_interface_is_not_ready_is_passed_over() -> Result<()> {
    let late = Ipv4Addr::new(10, 244, 2, 100);
    let cluster = Cluster::start(|lab| {
        let door = Service::new("door", &["10.96.0.14"]).set("externalTrafficPolicy", "Local");
        let door = door.node_port("tcp", 80, TCP, 30080);
        let door = door.node_port("udp", 53, UDP, 30053);
        vec![
            door.endpoints(&[lab.pod("near")])
                .endpoint_at(late.into(), "node2"),
        ]
    })?;
    let (node, ext) = (cluster.lab.node("node2"), cluster.lab.external("ext"));
    let pod = cluster.lab.pod("near2");
    pod.ip(&format!("addr add {late}/32 dev lo"))?;
    let at = |port| format!("{late}:{port}");
    let _server = pod.serve_as("late", &["--tcp", &at(TCP), "--udp", &at(UDP)])?;
    let agent = Pid::from_raw(cluster.agent.id().try_into()?);
    kill(agent, Signal::SIGSTOP)?;
    // Its answers leave by the interface that the request came by.
    node.ip(&format!(
        "link add veth-late type veth peer name late0 netns {}",
        pod.netns()
    ))?;
    node.ip("link set veth-late up")?;
    node.ip(&format!("route add {late}/32 dev veth-late"))?;
    pod.ip("link set late0 up")?;
    let gateway = pod.gateway4();
    pod.ip(&format!(
        "route add default via {gateway} dev late0 onlink table 100"
    ))?;
    pod.ip(&format!("rule add from {late} lookup 100"))?;
    let asks = |answered: &[&str]| -> Result<()> {
        for (port, how) in [(30080, "connect"), (30053, "udp")] {
            let to = format!("{}:{port}", node.ipv4());
            let how = format!("{how} --count 30 --timeout-ms 500");
            let report: Report = ask(ext, &to, &how)?;
            ensure!(
                report.answered == report.attempts && report.endpoints.keys().eq(answered),
                "{how} {to}: {report:?}"
            );
        }
        Ok(())
    };
    let stopped = asks(&["near"]);
    kill(agent, Signal::SIGCONT)?;
    stopped?;
    eventually(|| asks(&["late", "near"]))?;
    reaches(
        ext,
        &format!("{}:30080", node.ipv4()),
        "connect --count 30",
        &["late", "near"],
    )
    .map(drop)
}
