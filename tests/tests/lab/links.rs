//! Links that go down and come up, and other changes of an interface while connections go on through it.

use std::{net::SocketAddr, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Host, Lab, report::LoadReport};

use crate::{
    cluster::{Cluster, TCP, lived, reaches},
    manifest::Service,
};

scenarios! {
    Dataplane:
    links_that_go_down_and_up_lose_no_connection,
}

/// Changes to the node's interface: each script runs several times, and leaves it as it was.
const SCRIPTS: [(&str, &str); 6] = [
    ("down and up", "link set eth0 down; link set eth0 up"),
    (
        "the network is restarted",
        "addr flush dev eth0 scope global; link set eth0 down; link set eth0 up; \
         addr add V4/24 dev eth0; -6 addr add V6/64 dev eth0 nodad",
    ),
    (
        "the network is restarted slowly",
        "addr flush dev eth0 scope global; link set eth0 down; sleep 0.3; link set eth0 up; sleep 0.3; \
         addr add V4/24 dev eth0; -6 addr add V6/64 dev eth0 nodad; sleep 1",
    ),
    (
        "renamed",
        "link set eth0 down; link set eth0 name lan0; link set lan0 up; sleep 0.2; \
         link set lan0 down; link set lan0 name eth0; link set eth0 up",
    ),
    (
        "its MTU",
        "link set eth0 mtu 1400; sleep 0.1; link set eth0 mtu 1500",
    ),
    ("not ARP", "link set eth0 arp off; link set eth0 arp on"),
];

/// The pauses between the changes are of many lengths, so that the changes meet all phases of the agent's work.
fn links_that_go_down_and_up_lose_no_connection() -> Result<()> {
    let door = |lab: &Lab| {
        let door = Service::new("door", &["10.96.0.14", "fd00:96::14"]);
        let door = door.node_port("tcp", 80, TCP, 30080);
        vec![door.endpoints(&[lab.pod("near")])]
    };
    let cluster = Cluster::start(door)?;
    let (node, ext) = (cluster.lab.node("node2"), cluster.lab.external("ext"));
    // Without this setting, a link that goes down loses its addresses of IPv6 for good.
    node.sysctl("ipv6/conf/eth0/keep_addr_on_down", "1")?;
    let to = node
        .addresses()
        .map(|ip| SocketAddr::new(ip, 30080).to_string());
    for to in &to {
        reaches(ext, to, "connect --count 3", &["near"])?;
    }
    for (what, script) in SCRIPTS {
        change(node, ext, &to, script).context(what)?;
    }
    Ok(())
}

fn change(node: &Host, ext: &Host, to: &[String; 2], script: &str) -> Result<()> {
    let [v4, v6] = node.addresses().map(|ip| ip.to_string());
    let script = script.replace("V4", &v4).replace("V6", &v6);
    let [to4, to6] = to;
    let held = [ext.hold(to4)?, ext.hold(to6)?];
    let how = "--threads 4 --pause-us 500";
    let load: Vec<&str> = ["--to", to4, "--to", to6]
        .into_iter()
        .chain(how.split(' '))
        .collect();
    let load = ext.load(&load)?;
    for round in 0..4 {
        for step in script.split(';').map(str::trim) {
            match step.strip_prefix("sleep ") {
                Some(seconds) => thread::sleep(Duration::from_secs_f32(seconds.parse()?)),
                None => node.ip(step)?,
            }
        }
        // Lost packets are sent again by then.
        thread::sleep(Duration::from_millis(1000 + 50 * round));
    }
    let report: LoadReport = load.wait_json()?;
    ensure!(
        report.errors.is_empty() && report.answered > 10,
        "{report:?}"
    );
    held.into_iter().try_for_each(lived)
}
