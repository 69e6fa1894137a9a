//! Ways that the packet path cannot send packets on by itself.

use anyhow::{Result, ensure};
use dataplane_common::Reason;
use dataplane_tests::Lab;

use crate::{
    cluster::{Cluster, TCP, UDP, fails, peer_is, reaches, sources_are},
    manifest::Service,
};

scenarios! {
    Dataplane:
    the_stack_encapsulates_what_a_route_says,
}

const TUNNEL: &str = "type vxlan dstport 4789 external";

/// A route that encapsulates (LWT), from a pod's node to the endpoint's: the packets to the endpoint
/// are translated and left to the stack. Those that would get another source are refused.
fn the_stack_encapsulates_what_a_route_says() -> Result<()> {
    let lab = Lab::builder()
        .node("node1")
        .node("node2")
        .pod("node1", "far", "10.244.1.5")
        .vm("node2", "sleep", "10.244.2.8")
        .external("ext")
        .build()?;
    let (there, here) = (lab.node("node1"), lab.node("node2"));
    let trial = here.ip(&format!("link add vx0 {TUNNEL}"));
    if trial.is_err_and(|error| error.to_string().contains("Unknown device type")) {
        println!(
            "skipped routes::the_stack_encapsulates_what_a_route_says: this kernel has no VXLAN"
        );
        return Ok(());
    }
    there.ip(&format!("link add vx0 address 02:00:00:00:00:22 {TUNNEL}"))?;
    for node in [here, there] {
        node.ip("link set vx0 up")?;
        node.sysctl("ipv4/conf/all/rp_filter", "0")?;
        node.sysctl("ipv4/conf/vx0/rp_filter", "0")?;
    }
    here.ip("neigh add 10.99.0.1 lladdr 02:00:00:00:00:22 dev vx0 nud permanent")?;
    here.ip(
        "route replace 10.244.1.0/24 encap ip id 7 dst 192.168.77.1 via 10.99.0.1 dev vx0 onlink",
    )?;
    let service = |lab: &Lab| {
        vec![
            Service::new("web", &["10.96.0.10"])
                .node_port("tcp", 80, TCP, 30080)
                .node_port("udp", 53, UDP, 30053)
                .endpoints(&[lab.pod("far")]),
        ]
    };
    let arguments = ["--pod-cidr", "10.244.0.0/16"];
    let cluster = Cluster::start_in(lab, &["far"], service, &arguments)?;
    let client = cluster.client();
    for (to, how) in [("10.96.0.10:80", "connect"), ("10.96.0.10:53", "udp")] {
        let report = reaches(client, to, &format!("{how} --count 5"), &["far"])?;
        peer_is(&report, to)?;
        sources_are(&report, &client.addresses())?;
    }
    let refused = cluster.verdicts(Reason::NoRoute)?;
    let outside = cluster.lab.external("ext");
    fails(outside, "192.168.77.2:30080", "connect", "TIMEOUT")?;
    ensure!(
        cluster.verdicts(Reason::NoRoute)? > refused,
        "what would be masqueraded was not refused"
    );
    Ok(())
}
