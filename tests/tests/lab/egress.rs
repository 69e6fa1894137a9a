//! Programs and rules of others on the way out of a pod's interface: they see packets through services, like all
//! others.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::Host;
use kernel::{tc::Hook, trial};
use serde_json::Value;

use crate::{
    cluster::{Cluster, TCP, UDP, eventually, fails, reaches},
    features::on,
    manifest::Service,
};

scenarios! {
    Dataplane:
    whatever_others_put_on_the_way_out_of_a_pods_interface_sees_its_packets,
}

const POD_SIDE: &str = "veth-near";

/// An obstacle that drops every packet, the commands that add and remove it, and the output of `status` about it.
struct Obstacle {
    name: &'static str,
    put: &'static str,
    take: &'static str,
    said: &'static str,
}

const OBSTACLES: [Obstacle; 2] = [
    // No packet is as small as its bucket.
    Obstacle {
        name: "a queueing discipline",
        put: "tc qdisc add dev veth-near root tbf rate 8kbit burst 20 latency 1ms",
        take: "tc qdisc del dev veth-near root",
        said: "queueing discipline tbf",
    },
    Obstacle {
        name: "a filter of clsact",
        put: "tc qdisc add dev veth-near clsact && tc filter add dev veth-near egress protocol all bpf bytecode '1,6 0 0 2' direct-action",
        take: "tc qdisc del dev veth-near clsact",
        said: "filters of clsact",
    },
];

fn run(node: &Host, script: &str) -> Result<()> {
    node.command("sh").args(["-c", script]).run()?;
    Ok(())
}

/// Returns how packets are delivered to a pod's interface, and the output of `status` about it.
fn delivery(cluster: &Cluster, interface: &str) -> Result<(String, Vec<String>)> {
    let status = cluster.status()?;
    let all = status["interfaces"].as_array().context("interfaces")?;
    let pod = all.iter().find(|i| i["name"] == interface);
    let pod = pod.context("the pod's interface")?;
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let others = pod["egress_of_others"].as_array().context("others")?;
    Ok((word(&pod["delivery"]), others.iter().map(word).collect()))
}

/// Ways by which packets reach the pod: from outside by a node port, and from a virtual machine by a cluster IP.
const WAYS: [(&str, &str, &str); 4] = [
    ("ext", "NODE:30080", "connect"),
    ("ext", "NODE:30053", "udp"),
    ("sleep", "10.96.0.14:80", "connect"),
    ("sleep", "[fd00:96::14]:80", "connect"),
];

struct World {
    cluster: Cluster,
}

impl World {
    fn client(&self, name: &str) -> &Host {
        match name {
            "ext" => self.cluster.lab.external(name),
            name => self.cluster.lab.pod(name),
        }
    }

    fn to(&self, to: &str) -> String {
        to.replace("NODE", &self.node().ipv4().to_string())
    }

    fn node(&self) -> &Host {
        self.cluster.lab.node("node2")
    }

    fn serves(&self) -> Result<()> {
        for (from, to, how) in WAYS {
            let how = format!("{how} --timeout-ms 5000");
            reaches(self.client(from), &self.to(to), &how, &["near"])?;
        }
        Ok(())
    }

    /// The node's own connection to the pod shows that the obstacle works.
    fn is_in_the_way(&self) -> Result<()> {
        let direct = format!("{}:{TCP}", self.cluster.lab.pod("near").ipv4());
        fails(self.node(), &direct, "connect --timeout-ms 200", "TIMEOUT")?;
        for (from, to, how) in WAYS {
            let how = format!("{how} --timeout-ms 200");
            fails(self.client(from), &self.to(to), &how, "TIMEOUT")?;
        }
        Ok(())
    }

    fn tries(&self, name: &str, said: &str, put: impl FnOnce() -> Result<()>) -> Result<()> {
        let begins = Instant::now();
        put()?;
        // Each try takes as long as the client waits: the window is shorter.
        eventually(|| self.is_in_the_way()).context(name.to_owned())?;
        let took = begins.elapsed();
        ensure!(took < Duration::from_secs(30), "{name}: {took:?}");
        let (how, others) = delivery(&self.cluster, POD_SIDE)?;
        ensure!(
            how == "egress" && others.iter().any(|other| other.contains(said)),
            "{name}: {how} {others:?}"
        );
        let (how, others) = delivery(&self.cluster, "veth-sleep")?;
        ensure!(
            how == "peer" && others.is_empty(),
            "{name}, at another pod: {how} {others:?}"
        );
        Ok(())
    }

    fn is_gone(&self, name: &str) -> Result<()> {
        eventually(|| {
            let (how, others) = delivery(&self.cluster, POD_SIDE)?;
            ensure!(
                how == "peer" && others.is_empty(),
                "{name}: {how} {others:?}"
            );
            Ok(())
        })?;
        self.serves()
    }
}

fn whatever_others_put_on_the_way_out_of_a_pods_interface_sees_its_packets() -> Result<()> {
    let door = |lab: &dataplane_tests::Lab| {
        let door = Service::new("door", &["10.96.0.14", "fd00:96::14"]);
        let door = door.node_port("tcp", 80, TCP, 30080);
        vec![
            door.node_port("udp", 53, UDP, 30053)
                .endpoints(&[lab.pod("near")]),
        ]
    };
    let lab = Cluster::lab_of_packets()?;
    let world = World {
        cluster: Cluster::start_in(lab, &["far", "near"], door, &[])?,
    };
    world.serves()?;
    world.is_gone("nothing")?;
    for obstacle in OBSTACLES {
        let put = || run(world.node(), obstacle.put);
        world.tries(obstacle.name, obstacle.said, put)?;
        run(world.node(), obstacle.take)?;
        world.is_gone(obstacle.name)?;
    }
    // Such a chain sees no packet that a program sends on, but packets that the stack sends.
    let chain = "nft add table netdev pods && nft add chain netdev pods out \
                 '{ type filter hook egress device veth-near priority 0; policy drop; }'";
    if run(world.node(), chain).is_ok() {
        eventually(|| world.is_in_the_way()).context("a chain of nf_tables")?;
        let status = world.cluster.status()?.to_string();
        ensure!(status.contains("nft chain netdev pods out"), "{status}");
        run(world.node(), "nft delete table netdev pods")?;
        world.is_gone("a chain of nf_tables")?;
    }
    limits_what_the_pod_sends(&world)?;
    if Hook::of_kernel() != Hook::Tcx {
        return Ok(());
    }
    let mut link = None;
    let put = || {
        link = Some(on(world.node(), |_| {
            let index = nix::net::if_::if_nametoindex(POD_SIDE)?;
            Ok(trial::drop_at_egress(index)?)
        })?);
        Ok(())
    };
    world.tries("a program", "at TCX", put)?;
    drop(link);
    world.is_gone("a program")
}

/// As the CNI plug-in `bandwidth` limits it (`egressRate`): a filter on the way in of the pod's interface leads its packets to
/// an IFB with a limit, by which no packet passes here.
fn limits_what_the_pod_sends(world: &World) -> Result<()> {
    let put = "ip link add ifb-near type ifb && ip link set ifb-near up && \
               tc qdisc add dev ifb-near root tbf rate 8kbit burst 20 latency 1ms && \
               tc qdisc add dev veth-near ingress && tc filter add dev veth-near parent ffff: protocol all \
               u32 match u32 0 0 action mirred egress redirect dev ifb-near";
    if let Err(error) = run(world.node(), put) {
        println!("skipped an IFB, which this kernel has not: {error:#}");
        return Ok(());
    }
    eventually(|| world.is_in_the_way()).context("an IFB")?;
    let status = world.cluster.status()?.to_string();
    ensure!(
        status.contains("filters on the way in of interface veth-near"),
        "{status}"
    );
    run(world.node(), "tc qdisc del dev ifb-near root")?;
    world.serves().context("an IFB without a limit")?;
    let sent = world
        .node()
        .command("ip")
        .args(["-s", "link", "show", "ifb-near"])
        .run()?;
    ensure!(!sent.contains(" 0 0 "), "no packet passed the IFB: {sent}");
    run(
        world.node(),
        "tc qdisc del dev veth-near ingress && ip link del ifb-near",
    )?;
    world.is_gone("an IFB")
}
