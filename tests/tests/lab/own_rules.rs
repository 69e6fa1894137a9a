//! Pods with rules of their own: the rules see the VIP, as they do with kube-proxy, and not an endpoint.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Host, Lab, is_long, patience};
use kernel::pods::ByPackets;
use serde_json::json;

use crate::{
    cluster::{Cluster, TCP, UDP, eventually, reaches},
    manifest::{Config, Service},
};

scenarios! {
    Dataplane:
    rules_of_a_pod_see_the_vip,
    rules_around_a_nested_namespace_see_the_vip,
    rules_are_noticed_within_a_second,
    the_operator_chooses_who_is_served_by_packets,
    a_pod_says_how_it_is_served,
}

const VIPS: [&str; 2] = ["10.96.0.10", "fd00:96::10"];
const OTHERS: [&str; 2] = ["10.96.0.11", "fd00:96::11"];

fn services(lab: &Lab) -> Vec<Service> {
    let service = |name, vips: &[&str]| {
        let service = Service::new(name, vips).port("tcp", 80, TCP);
        service.port("udp", 53, UDP).endpoints(&[lab.pod("near")])
    };
    vec![service("web", &VIPS), service("other", &OTHERS)]
}

fn run(host: &Host, script: &str) -> Result<String> {
    Ok(host.command("sh").args(["-c", script]).run()?)
}

/// Rules that send packets for the first service's VIPs to another pod, at a hook.
fn rules(hook: &str, to: &Host) -> String {
    let (v4, v6) = (to.ipv4(), to.ipv6());
    let [vip4, vip6] = VIPS;
    format!(
        "nft -f - <<'END'
table inet own {{
  chain translate {{
    type nat hook {hook} priority -100;
    ip daddr {vip4} tcp dport 80 dnat ip to {v4}:{TCP}
    ip daddr {vip4} udp dport 53 dnat ip to {v4}:{UDP}
    ip6 daddr {vip6} tcp dport 80 dnat ip6 to [{v6}]:{TCP}
    ip6 daddr {vip6} udp dport 53 dnat ip6 to [{v6}]:{UDP}
  }}
}}
END
"
    )
}

const HOWS: [(u16, &str); 3] = [
    (80, "connect --timeout-ms 500"),
    (53, "udp --timeout-ms 500"),
    (53, "udp --unconnected --timeout-ms 500"),
];

/// Checks that this endpoint answers a client at these VIPs, by every kind of socket.
fn answers(client: &Host, vips: [&str; 2], endpoint: &str) -> Result<()> {
    for vip in vips {
        for (port, how) in HOWS {
            let to = std::net::SocketAddr::new(vip.parse()?, port).to_string();
            reaches(client, &to, how, &[endpoint])?;
        }
    }
    Ok(())
}

/// The pods that `status` lists as served by packets only: the interface, and why.
fn listed(cluster: &Cluster) -> Result<Vec<(String, String)>> {
    let status = cluster.status()?;
    let all = status["by_packets"].as_array().context("by_packets")?;
    let word = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    Ok(all
        .iter()
        .map(|pod| (word(&pod["interface"]), word(&pod["reason"])))
        .collect())
}

fn is_listed(cluster: &Cluster, interface: &str, why: &str) -> Result<()> {
    let all = listed(cluster)?;
    let found = all
        .iter()
        .any(|(name, reason)| name == interface && reason.contains(why));
    ensure!(found, "{interface} is not listed because of {why}: {all:?}");
    Ok(())
}

fn rules_of_a_pod_see_the_vip() -> Result<()> {
    let cluster = Cluster::start(services)?;
    let (client, other) = (cluster.client(), cluster.lab.pod("near2"));
    answers(client, VIPS, "near")?;
    ensure!(listed(&cluster)?.is_empty());
    // A table without a rule at that hook does not count.
    run(
        client,
        "nft add table ip filter && nft add chain ip filter out '{ type nat hook output priority 0; }'",
    )?;
    run(client, &rules("output", other))?;
    eventually(|| answers(client, VIPS, "near2"))?;
    // VIPs that the rules leave alone are served.
    answers(client, OTHERS, "near")?;
    is_listed(&cluster, "veth-sleep", "output hook")?;
    ensure!(listed(&cluster)?.len() == 1, "{:?}", listed(&cluster)?);
    run(client, "nft delete table inet own")?;
    eventually(|| {
        let all = listed(&cluster)?;
        ensure!(all.is_empty(), "{all:?}");
        Ok(())
    })?;
    answers(client, VIPS, "near")?;
    legacy_rules_are_those_of_the_pod(&cluster)
}

/// The node's own legacy rules, which kube-proxy may have written there, do not count as a pod's.
fn legacy_rules_are_those_of_the_pod(cluster: &Cluster) -> Result<()> {
    let (client, other) = (cluster.client(), cluster.lab.pod("near2"));
    // A table of 40 MB without a rule at that hook: it is not read.
    let many = "{ echo '*nat'; yes -- '-A PREROUTING -d 192.0.2.1 -j ACCEPT' | head -n 250000; echo COMMIT; } | \
                iptables-legacy-restore --noflush";
    // The peak is that of the start. It begins anew (CLEAR_REFS_MM_HIWATER_RSS in fs/proc/task_mmu.c).
    std::fs::write(format!("/proc/{}/clear_refs", cluster.agent.id()), "5")?;
    let before = cluster.agent.memory("VmHWM")?;
    run(client, many)?;
    // Two looks later.
    thread::sleep(Duration::from_secs(3));
    let after = cluster.agent.memory("VmHWM")?;
    ensure!(after < before + 20_000, "{before} KiB, then {after} KiB");
    ensure!(listed(cluster)?.is_empty(), "{:?}", listed(cluster)?);
    run(client, "iptables-legacy -t nat -F")?;
    let [vip, _] = VIPS;
    let rule = format!(
        "iptables-legacy -t nat -A OUTPUT -p tcp -d {vip} --dport 80 -j DNAT --to {}:{TCP}",
        other.ipv4()
    );
    run(cluster.lab.node("node2"), &rule)?;
    run(client, &rule)?;
    let to = format!("{vip}:80");
    eventually(|| reaches(client, &to, HOWS[0].1, &["near2"]).map(drop))?;
    is_listed(cluster, "veth-sleep", "output hook")?;
    ensure!(listed(cluster)?.len() == 1, "{:?}", listed(cluster)?);
    Ok(())
}

/// A network namespace in a pod, such as a container's of a runtime that is itself in a container.
fn rules_around_a_nested_namespace_see_the_vip() -> Result<()> {
    let cluster = Cluster::start(services)?;
    let (pod, other) = (cluster.client(), cluster.lab.pod("near2"));
    run(pod, &rules("prerouting", other))?;
    let masquerade = "nft add chain inet own out '{ type nat hook postrouting priority 100; }' && \
                      nft add rule inet own out oifname eth0 masquerade";
    run(pod, masquerade)?;
    pod.sysctl("ipv4/ip_forward", "1")?;
    pod.sysctl("ipv6/conf/all/forwarding", "1")?;
    // Its parent is a process of the pod's.
    let inner = "unshare -n sh -c 'echo $$; exec sleep 1000' & wait";
    let mut inner = pod
        .command("sh")
        .args(["-c", inner])
        .stdout_piped()
        .spawn()?;
    let process = inner.wait_for_line()?;
    let process = process.trim();
    let setup = format!(
        "ip link add in0 type veth peer name in1 netns {process} &&
         ip addr add 172.31.0.1/24 dev in0 && ip -6 addr add fd31::1/64 dev in0 nodad && ip link set in0 up &&
         enter() {{ nsenter -t {process} -n \"$@\"; }} &&
         enter ip link set lo up && enter ip link set in1 up && enter ip addr add 172.31.0.2/24 dev in1 &&
         enter ip -6 addr add fd31::2/64 dev in1 nodad &&
         enter ip route add default via 172.31.0.1 && enter ip -6 route add default via fd31::1"
    );
    run(pod, &setup)?;
    let asks = |vips: [&str; 2], endpoint: &str| -> Result<()> {
        for vip in vips {
            for (port, how) in HOWS {
                let to = std::net::SocketAddr::new(vip.parse()?, port);
                let probe = cluster.lab.programs().probe()?.display().to_string();
                let (subcommand, more) = how.split_once(' ').unwrap_or((how, ""));
                let line = format!("nsenter -t {process} -n {probe} {subcommand} --to {to} {more}");
                let report: dataplane_tests::report::Report =
                    serde_json::from_str(&run(pod, &line)?)?;
                ensure!(
                    report.answered == report.attempts && report.endpoints.keys().eq([endpoint]),
                    "{line}: {report:?}"
                );
            }
        }
        Ok(())
    };
    eventually(|| asks(VIPS, "near2"))?;
    asks(OTHERS, "near")?;
    is_listed(&cluster, "veth-sleep", "nested")?;
    // The pod's own sockets do not pass such a rule.
    answers(pod, VIPS, "near")?;
    ensure!(listed(&cluster)?.len() == 1, "{:?}", listed(&cluster)?);
    inner.kill();
    Ok(())
}

/// Rules of one pod that come and go are noticed within a second, on a node with as many pods as the kubelet allows by
/// default. The other pods have no processes: the agent finds their network namespaces by their names.
///
/// The limit is absolute, because it is promised. A machine that runs several scenarios for each processor may stop
/// the agent for longer, so the median of five has to keep the limit. There are 110 pods only in the long form: a look
/// may then take so long that the agent rests longer after it.
fn rules_are_noticed_within_a_second() -> Result<()> {
    const TIMES: usize = 5;
    let others = if is_long() { 107 } else { 27 };
    let builder = Lab::builder()
        .node("node2")
        .pod("node2", "near", "10.244.1.10")
        .pod("node2", "near2", "10.244.1.11")
        .pod("node2", "sleep", "10.244.1.8");
    let lab = (0..others).fold(builder, |builder, number| {
        let address = format!("10.244.1.{}", 100 + number);
        builder.pod("node2", &format!("idle{number}"), &address)
    });
    let cluster = Cluster::start_in(lab.build()?, &["near"], services, &[])?;
    let (client, other) = (cluster.client(), cluster.lab.pod("near2"));
    let table = ByPackets::open(cluster.agent.bpffs(), false)?;
    let takes = |script: &str, namespaces: usize| -> Result<Duration> {
        run(client, script)?;
        let start = Instant::now();
        while table.all()?.len() != namespaces {
            let passed = start.elapsed();
            ensure!(passed < patience(Duration::from_secs(30)), "not noticed");
            thread::sleep(Duration::from_millis(5));
        }
        Ok(start.elapsed())
    };
    let (mut coming, mut going) = (Vec::new(), Vec::new());
    for _ in 0..TIMES {
        coming.push(takes(&rules("output", other), 1)?);
        going.push(takes("nft delete table inet own", 0)?);
    }
    for mut all in [coming, going] {
        all.sort();
        ensure!(all[TIMES / 2] < patience(Duration::from_secs(1)), "{all:?}");
    }
    Ok(())
}

fn the_operator_chooses_who_is_served_by_packets() -> Result<()> {
    let config = Config::new(r#"packets: {packetsOnly: ["veth-near2", "!veth-sleep"]}"#)?;
    let cluster = Cluster::start_with(services, &config.arguments())?;
    let (client, other) = (cluster.client(), cluster.lab.pod("near2"));
    eventually(|| is_listed(&cluster, "veth-near2", "packetsOnly"))?;
    run(client, &rules("output", other))?;
    // Two looks later.
    thread::sleep(Duration::from_secs(2));
    answers(client, VIPS, "near")?;
    answers(other, VIPS, "near")?;
    ensure!(listed(&cluster)?.len() == 1, "{:?}", listed(&cluster)?);
    Ok(())
}

fn a_pod_says_how_it_is_served() -> Result<()> {
    let cluster = Cluster::start(services)?;
    let (client, other) = (cluster.client(), cluster.lab.pod("near2"));
    let say = |name: &str, word: &str| -> Result<()> {
        let pod = cluster.lab.pod(name);
        let addresses = pod.addresses().map(|ip| json!({ "ip": ip }));
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": "default",
                "annotations": { "dataplane.io/packets-only": word },
            },
            "spec": { "nodeName": "node2", "containers": [] },
            "status": { "podIPs": addresses },
        });
        Ok(cluster
            .manifests
            .write_with(&services(&cluster.lab), &[pod])?)
    };
    say("near2", "true")?;
    eventually(|| is_listed(&cluster, "veth-near2", "annotation"))?;
    answers(other, VIPS, "near")?;
    run(client, &rules("output", other))?;
    eventually(|| answers(client, VIPS, "near2"))?;
    say("sleep", "false")?;
    eventually(|| answers(client, VIPS, "near"))
}
