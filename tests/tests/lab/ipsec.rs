//! IPsec policies of the node: packets that a policy covers never leave in clear. The fast path refuses them; the path
//! through the stack, which the agent chooses beside such a policy, has the kernel encrypt them.
//!
//! Most policies here have templates but no association, so the kernel itself sends no covered packet, whether or not
//! it has ESP: any packet that arrives left in clear. On a kernel with ESP, such as the guest's, one scenario has
//! associations.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Result, ensure};
use dataplane_common::Reason;
use dataplane_tests::{Host, patience};

use crate::{
    cluster::{Cluster, TCP, UDP, eventually, fails, reaches},
    manifest::Service,
    sockets::{address, arrived, ask, bytes, tap, tcp, transfer, udp},
    stack::takes,
};

scenarios! {
    Dataplane:
    what_a_policy_covers_is_refused,
    what_a_policy_lets_pass_is_served,
    a_tunnel_encrypts_what_is_no_services_and_nothing_leaves_in_clear,
    a_tunnel_encrypts_services_through_the_stack,
    a_policy_has_the_stack_send_what_it_covers,
}

/// Fields of a policy: between which ends, and how the kernel is to encrypt its packets.
const TUNNEL: &str = "tmpl src 192.168.77.2 dst 192.168.77.1 proto esp mode tunnel";
const TUNNEL6: &str = "tmpl src fd77::2 dst fd77::1 proto esp mode tunnel";

/// How a client asks when it expects no answer and no error.
const CONNECT: &str = "connect --timeout-ms 1000";
const DATAGRAM: &str = "udp --timeout-ms 1000";

fn cluster(path: &str) -> Result<Cluster> {
    let lab = Cluster::lab_of_packets()?;
    let services = |lab: &dataplane_tests::Lab| {
        let service = |name: &str, number: u16, pod: &str| {
            let vips = [format!("10.96.0.{number}"), format!("fd00:96::{number}")];
            let [v4, v6] = vips.each_ref().map(String::as_str);
            Service::new(name, &[v4, v6])
                .node_port("tcp", 80, TCP, 30070 + number)
                .node_port("udp", 53, UDP, 30040 + number)
                .endpoints(&[lab.pod(pod)])
        };
        vec![service("far", 10, "far"), service("near", 11, "near")]
    };
    Cluster::start_in(
        lab,
        &["far", "near"],
        services,
        &["--pod-cidr", "10.244.0.0/16", "--packet-path", path],
    )
}

/// Why the node's kernel takes no policies; `None` if it does.
fn refusal(node: &Host) -> Option<String> {
    let error = node.ip("xfrm policy").err()?;
    Some(format!("this kernel takes no IPsec policies: {error:#}"))
}

/// Adds a policy, or deletes it.
fn policy(node: &Host, what: &str, rest: &str) -> Result<()> {
    node.ip(&format!("xfrm policy {what} {rest}"))?;
    Ok(())
}

/// The output of `dataplane status`, which may report errors.
fn status(cluster: &Cluster) -> Result<serde_json::Value> {
    let output = cluster.agent.dataplane(["status", "-o", "json"]).output()?;
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// The errors that `dataplane status` reports of IPsec.
fn said(cluster: &Cluster) -> Result<Vec<String>> {
    let status = status(cluster)?;
    let findings = status["findings"].as_array().into_iter().flatten();
    let errors = findings.filter(|finding| finding["severity"] == "error");
    let texts = errors.filter_map(|finding| finding["text"].as_str());
    Ok(texts
        .filter(|text| text.contains("IPsec"))
        .map(str::to_owned)
        .collect())
}

/// How many packets were refused so far.
fn refused(cluster: &Cluster) -> Result<u64> {
    cluster.verdicts(Reason::IpsecPolicy)
}

/// Flows that begin and flows that exist; by the endpoint's address, by that of the service in replies, and by the
/// node's address that flows are masqueraded to; both families. Flows that the policy does not cover go on.
fn what_a_policy_covers_is_refused() -> Result<()> {
    let cluster = cluster("fast")?;
    let node = cluster.lab.node("node2");
    if let Some(why) = refusal(node) {
        println!("skipped ipsec::what_a_policy_covers_is_refused: {why}");
        return Ok(());
    }
    let (client, ext) = (cluster.client(), cluster.lab.external("ext"));
    for (policy_of, template, vip, direct, unspecified) in [
        (
            "src 10.244.2.0/24 dst 10.244.1.0/24",
            TUNNEL,
            "10.96.0.10",
            "10.244.1.5",
            "0.0.0.0",
        ),
        (
            "src fd00:10:244:2::/64 dst fd00:10:244:1::/64",
            TUNNEL6,
            "fd00:96::10",
            "fd00:10:244:1::5",
            "::",
        ),
    ] {
        for direction in ["out", "fwd"] {
            let what = format!("{policy_of} dir {direction}");
            let at = |port| SocketAddr::new(vip.parse().expect("an address"), port);
            let stream = tcp(client, at(80))?;
            transfer(&stream, &bytes(1000, 1))?;
            let socket = udp(client, SocketAddr::new(unspecified.parse()?, 0))?;
            ask(&socket, at(53), b"before")?;
            policy(node, "add", &format!("{what} {template}"))?;
            // The kernel itself refuses an address that no program translates.
            let direct = SocketAddr::new(direct.parse()?, TCP).to_string();
            fails(client, &direct, CONNECT, "TIMEOUT")?;
            let said = said(&cluster)?;
            let named = policy_of.replace("src ", "").replace("dst", "to");
            ensure!(
                said.len() == 1 && said[0].contains(&format!("{direction} {named}")),
                "{what}: {said:?}"
            );
            let source = SocketAddr::new(address(client, vip.contains('.')), 9);
            let (source, to) = (source.to_string(), at(80).to_string());
            let question = ["explain", "--iface", "eth0", &source, &to, "-o", "json"];
            let told: serde_json::Value = cluster.agent.dataplane(question).json()?;
            ensure!(told["reason"] == Reason::IpsecPolicy.word(), "{told:#}");
            let before = refused(&cluster)?;
            // Longer than an answer took before, and no packet may come.
            let moment = Some(patience(Duration::from_secs(2)));
            socket.set_read_timeout(moment)?;
            stream.set_read_timeout(moment)?;
            ensure!(
                ask(&socket, at(53), b"after").is_err(),
                "{what}: a flow that was there before goes on in clear"
            );
            ensure!(
                transfer(&stream, &bytes(1000, 2)).is_err(),
                "{what}: a connection that was there before goes on in clear"
            );
            fails(client, &at(80).to_string(), CONNECT, "TIMEOUT")?;
            fails(client, &at(53).to_string(), DATAGRAM, "TIMEOUT")?;
            ensure!(refused(&cluster)? > before, "{what}: nothing was counted");
            // Through an endpoint that the policy does not cover.
            let near = vip
                .replace("10.96.0.10", "10.96.0.11")
                .replace("::10", "::11");
            let near = SocketAddr::new(near.parse()?, 80).to_string();
            reaches(client, &near, "connect --count 3", &["near"])?;
            policy(node, "delete", &what)?;
            eventually(|| reaches(client, &at(80).to_string(), "connect", &["far"]).map(drop))?;
        }
    }
    let said = said(&cluster)?;
    ensure!(said.is_empty(), "still: {said:?}");
    // A policy that only replies match, by the service's own address as their source; and one that only masqueraded
    // packets match.
    let to = "192.168.77.2:30081";
    for covered in [
        "src 192.168.77.2/32 dst 192.168.77.0/24 proto tcp dir out",
        "src 10.244.2.1/32 dst 10.244.2.0/24 proto tcp dir out",
    ] {
        reaches(ext, to, "connect --count 3", &["near"])?;
        policy(node, "add", &format!("{covered} {TUNNEL}"))?;
        eventually(|| fails(ext, to, CONNECT, "TIMEOUT"))?;
        policy(node, "delete", covered)?;
        eventually(|| reaches(ext, to, "connect", &["near"]).map(drop))?;
    }
    Ok(())
}

/// A policy without templates lets the packets that it covers pass, where it comes before policies that have some.
fn what_a_policy_lets_pass_is_served() -> Result<()> {
    let cluster = cluster("fast")?;
    let node = cluster.lab.node("node2");
    if let Some(why) = refusal(node) {
        println!("skipped ipsec::what_a_policy_lets_pass_is_served: {why}");
        return Ok(());
    }
    let client = cluster.client();
    let all = "src 0.0.0.0/0 dst 0.0.0.0/0 dir out";
    policy(node, "add", &format!("{all} priority 50 {TUNNEL}"))?;
    for vip in ["10.96.0.10:80", "10.96.0.11:80"] {
        eventually(|| fails(client, vip, CONNECT, "TIMEOUT"))?;
    }
    reaches(client, "[fd00:96::10]:80", "connect", &["far"])?;
    let all6 = format!("src ::/0 dst ::/0 dir out priority 50 {TUNNEL6}");
    policy(node, "delete", all)?;
    policy(node, "add", &all6)?;
    eventually(|| fails(client, "[fd00:96::10]:80", CONNECT, "TIMEOUT"))?;
    reaches(client, "10.96.0.10:80", "connect", &["far"])?;
    policy(node, "add", &format!("{all} priority 50 {TUNNEL}"))?;
    eventually(|| fails(client, "10.96.0.10:80", CONNECT, "TIMEOUT"))?;
    // The flow's addresses: of the client, the service and the endpoint, there and back.
    let pods = ["10.244.0.0/16", "10.96.0.0/12"];
    for src in pods {
        for dst in pods {
            let pass = format!("src {src} dst {dst} dir out priority 10");
            policy(node, "add", &pass)?;
        }
    }
    for (vip, endpoint) in [("10.96.0.10:80", "far"), ("10.96.0.11:80", "near")] {
        eventually(|| reaches(client, vip, "connect", &[endpoint]).map(drop))?;
    }
    // The kernel itself lets it pass, too.
    reaches(client, "10.244.1.5:7", "connect", &["far"])?;
    // Then with a narrower policy that blocks.
    let block = "src 10.244.2.0/24 dst 10.244.1.5/32 dir out";
    policy(node, "add", &format!("{block} priority 5 action block"))?;
    eventually(|| fails(client, "10.96.0.10:80", CONNECT, "TIMEOUT"))?;
    reaches(client, "10.96.0.11:80", "connect", &["near"])?;
    policy(node, "delete", block)?;
    eventually(|| reaches(client, "10.96.0.10:80", "connect", &["far"]).map(drop))?;
    // Without any policy: the default blocks all that no policy allows.
    policy(node, "flush", "")?;
    if node.ip("xfrm policy setdefault fwd block").is_ok() {
        eventually(|| fails(client, "10.96.0.10:80", CONNECT, "TIMEOUT"))?;
        eventually(|| fails(client, "[fd00:96::10]:80", CONNECT, "TIMEOUT"))?;
        node.ip("xfrm policy setdefault fwd accept")?;
        eventually(|| reaches(client, "10.96.0.10:80", "connect", &["far"]).map(drop))?;
    } else {
        println!("ipsec: this kernel has no default policies");
    }
    Ok(())
}

/// The tunnel's associations and policies, on one of its ends.
fn tunnel(node: &Host, [local, remote]: [&Net; 2]) -> Result<()> {
    for (from, to, spi) in [(local, remote, local.spi), (remote, local, remote.spi)] {
        node.ip(&format!(
            "xfrm state add src {} dst {} proto esp spi {spi} mode tunnel aead rfc4106(gcm(aes)) {KEY} 128",
            from.node, to.node
        ))?;
    }
    for (direction, from, to) in [
        ("out", local, remote),
        ("in", remote, local),
        ("fwd", remote, local),
    ] {
        let template = format!(
            "tmpl src {} dst {} proto esp mode tunnel",
            from.node, to.node
        );
        for (from_pods, to_pods) in [(from.pods, to.pods), (from.pods6, to.pods6)] {
            policy(
                node,
                "add",
                &format!("src {from_pods} dst {to_pods} dir {direction} {template}"),
            )?;
        }
    }
    Ok(())
}

/// One end of a tunnel.
struct Net {
    node: &'static str,
    pods: &'static str,
    pods6: &'static str,
    /// The SPI of outgoing packets.
    spi: u32,
}

/// A key for AES with 128 bits, and its salt.
const KEY: &str = "0x0102030405060708090a0b0c0d0e0f1011121314";

/// Packets between pods pass the tunnel, as they would without us; packets to services which the tunnel's policies
/// cover are refused; and of both, no packet arrives that was not encrypted.
fn a_tunnel_encrypts_what_is_no_services_and_nothing_leaves_in_clear() -> Result<()> {
    beside_a_tunnel("fast")
}

/// Likewise, but packets to services pass the tunnel, too.
fn a_tunnel_encrypts_services_through_the_stack() -> Result<()> {
    beside_a_tunnel("auto")
}

fn beside_a_tunnel(path: &str) -> Result<()> {
    let cluster = cluster(path)?;
    let nodes = ["node1", "node2"].map(|name| cluster.lab.node(name));
    let ends = [
        Net {
            node: "192.168.77.1",
            pods: "10.244.1.0/24",
            pods6: "fd00:10:244:1::/64",
            spi: 0x1001,
        },
        Net {
            node: "192.168.77.2",
            pods: "10.244.2.0/24",
            pods6: "fd00:10:244:2::/64",
            spi: 0x1002,
        },
    ];
    if let Some(why) = refusal(nodes[1]) {
        println!("skipped the tunnel of ipsec: {why}");
        return Ok(());
    }
    let [one, two] = &ends;
    if let Err(error) = tunnel(nodes[0], [one, two]) {
        println!("skipped the tunnel of ipsec: this kernel takes no ESP associations: {error:#}");
        return Ok(());
    }
    // Pods' packets that arrive at the other node in clear. (Decrypted packets have a security path, XFRM's.)
    let clear = "add table inet clear; \
        add chain inet clear in { type filter hook prerouting priority -300; }; \
        add rule inet clear in ip saddr 10.244.2.0/24 ip daddr 10.244.1.0/24 meta secpath missing counter; \
        add rule inet clear in ip6 saddr fd00:10:244:2::/64 ip6 daddr fd00:10:244:1::/64 meta secpath missing counter";
    nodes[0].command("nft").arg(clear).run()?;
    let arrived_in_clear = || -> Result<Vec<u64>> {
        let list = nodes[0]
            .command("nft")
            .args(["-j", "list", "table", "inet", "clear"]);
        let list: serde_json::Value = list.json()?;
        let rules = list["nftables"].as_array().into_iter().flatten();
        let counters = rules.filter_map(|item| {
            let expressions = item["rule"]["expr"].as_array()?;
            expressions
                .iter()
                .find_map(|e| e["counter"]["packets"].as_u64())
        });
        Ok(counters.collect())
    };
    let client = cluster.client();
    let covered = ["10.96.0.10:80", "[fd00:96::10]:80"];
    let pods = ["10.244.1.5:7", "[fd00:10:244:1::5]:7"];
    for (vip, pod) in covered.into_iter().zip(pods) {
        reaches(client, pod, "connect --count 3", &["far"])?;
        reaches(client, vip, "connect --count 3", &["far"])?;
    }
    let before = arrived_in_clear()?;
    ensure!(
        before.len() == 2 && before.iter().all(|packets| *packets > 0),
        "without a tunnel they arrive in clear: {before:?}"
    );
    tunnel(nodes[1], [two, one])?;
    if path == "fast" {
        eventually(|| fails(client, covered[0], "connect --timeout-ms 300", "TIMEOUT"))?;
    } else {
        takes(&cluster.agent, "stack")?;
    }
    let begun = arrived_in_clear()?;
    for (vip, pod) in covered.into_iter().zip(pods) {
        reaches(client, pod, "connect --count 20", &["far"])?;
        reaches(client, pod, "udp --count 20", &["far"])?;
        let udp = vip.replace(":80", ":53");
        if path == "fast" {
            fails(client, vip, "connect --timeout-ms 300", "TIMEOUT")?;
            fails(client, &udp, "udp --timeout-ms 300", "TIMEOUT")?;
        } else {
            reaches(client, vip, "connect --count 20", &["far"])?;
            reaches(client, &udp, "udp --count 20", &["far"])?;
        }
    }
    reaches(client, "10.96.0.11:80", "connect --count 3", &["near"])?;
    let after = arrived_in_clear()?;
    ensure!(
        after == begun,
        "{begun:?} became {after:?}: packets left in clear"
    );
    ensure!(
        path != "fast" || refused(&cluster)? > 0,
        "nothing was counted"
    );
    // A pod with an association of its own: the kernel may send parts of a socket's flow there.
    client.ip(&format!(
        "xfrm state add src 10.244.2.9 dst 10.96.0.10 proto esp spi 1 mode tunnel aead rfc4106(gcm(aes)) {KEY} 128"
    ))?;
    eventually(|| {
        let status = status(&cluster)?;
        let reason = &status["by_packets"][0]["reason"];
        ensure!(
            reason.as_str().is_some_and(|why| why.contains("IPsec")),
            "{reason}"
        );
        Ok(())
    })
}

/// A policy without an association: the kernel sends no packet that the policy covers, and neither do our programs. From
/// a virtual machine and from outside, in both families; flows that the policy does not cover go on.
fn a_policy_has_the_stack_send_what_it_covers() -> Result<()> {
    let cluster = cluster("auto")?;
    let (node, far) = (cluster.lab.node("node2"), cluster.lab.pod("far"));
    if let Some(why) = refusal(node) {
        println!("skipped ipsec::a_policy_has_the_stack_send_what_it_covers: {why}");
        return Ok(());
    }
    let (client, ext) = (cluster.client(), cluster.lab.external("ext"));
    let elsewhere = tap(cluster.lab.node("node1"))?;
    // Whether a frame has a packet for the endpoint. ARP and neighbour discovery do not count.
    let is_clear = |frame: &&Vec<u8>| {
        let is = |at: usize, bytes: &[u8]| frame.get(at..at + bytes.len()) == Some(bytes);
        let v4 = is(12, &[0x08, 0]) && is(30, &far.ipv4().octets());
        v4 || (is(12, &[0x86, 0xdd]) && is(38, &far.ipv6().octets()) && !is(20, &[58]))
    };
    for (policy_of, template, vip, near, outside) in [
        (
            "src 0.0.0.0/0 dst 10.244.1.0/24",
            TUNNEL,
            "10.96.0.10:80",
            "10.96.0.11:80",
            "192.168.77.2:30080",
        ),
        (
            "src ::/0 dst fd00:10:244:1::/64",
            TUNNEL6,
            "[fd00:96::10]:80",
            "[fd00:96::11]:80",
            "[fd77::2]:30080",
        ),
    ] {
        takes(&cluster.agent, "fast")?;
        arrived(&elsewhere);
        reaches(client, vip, "connect --count 3", &["far"])?;
        reaches(ext, outside, "connect --count 3", &["far"])?;
        let clear = arrived(&elsewhere).iter().filter(is_clear).count();
        ensure!(
            clear > 0,
            "{policy_of}: without it, nothing leaves in clear"
        );
        let what = format!("{policy_of} dir out");
        policy(node, "add", &format!("{what} {template}"))?;
        takes(&cluster.agent, "stack")?;
        arrived(&elsewhere);
        fails(client, vip, CONNECT, "TIMEOUT")?;
        fails(ext, outside, CONNECT, "TIMEOUT")?;
        let clear = arrived(&elsewhere).iter().filter(is_clear).count();
        ensure!(clear == 0, "{policy_of}: {clear} packets left in clear");
        reaches(client, near, "connect --count 3", &["near"])?;
        let said = said(&cluster)?;
        ensure!(said.is_empty(), "{policy_of}: {said:?}");
        policy(node, "delete", &what)?;
        eventually(|| reaches(client, vip, "connect", &["far"]).map(drop))?;
    }
    Ok(())
}
