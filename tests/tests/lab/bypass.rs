//! Flows that belong to no service bypass the node's stack, where nothing there must see them. The kernel's own conntrack judges
//! which packets pass the stack.

use std::{
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    thread,
    time::Duration,
};

use anyhow::{Result, bail, ensure};
use dataplane_tests::{Host, Lab};
use nix::sys::socket::{setsockopt, sockopt};

use crate::{
    cluster::{Cluster, POD_CIDRS, TCP, UDP, eventually, reaches, serve},
    differential::world::unlimited_icmp,
    features::on,
    iptables::load,
    manifest::Config,
    sockets::{address, bytes, tcp, transfer, udp},
    stack::{PLUGIN, Tracked, takes, tracked},
};

scenarios! {
    Dataplane:
    flows_between_pods_leave_no_trace_in_the_kernels_conntrack,
    a_new_destination_is_never_taken_for_a_flow_that_is_known,
    rules_of_nat_hold,
    connections_to_host_ports_of_others_are_translated_back,
    pods_that_rules_exchange_stay_exchanged,
    errors_come_from_the_stack,
    errors_of_routers_reach_connections_that_bypass_rules_that_came_later,
    errors_of_the_node_pass_its_rules,
    rules_that_only_count_see_all_packets,
    the_switch_is_off,
}

/// How many flows each way gets.
const FLOWS: u64 = 40;
/// How many of them may show the way: the stack sees one flow in 4 to 8 seconds.
const SHOW: usize = 4;

fn start(arguments: &[&str]) -> Result<Cluster> {
    let lab = Cluster::lab()?;
    load(lab.node("node2"), "nft -f -", PLUGIN)?;
    let arguments = [&POD_CIDRS, arguments].concat();
    let cluster = Cluster::start_in(lab, &["far", "near"], |_| Vec::new(), &arguments)?;
    takes(&cluster.agent, "fast")?;
    Ok(cluster)
}

/// Begins flows of TCP and UDP to a pod. Every one has to be answered, and the pod has to see this client.
fn flows(from: &Host, to: &Host, v4: bool, client: IpAddr) -> Result<()> {
    let count = FLOWS.to_string();
    for (how, port) in [("connect", TCP), ("udp", UDP)] {
        let at = SocketAddr::new(address(to, v4), port).to_string();
        let how = format!("{how} --count {count}");
        let report = reaches(from, &at, &how, &[to.name()])?;
        let sources = &report.endpoints[to.name()].sources;
        ensure!(
            sources.keys().eq([&client]),
            "{} saw {sources:?} instead of {client}",
            to.name()
        );
    }
    Ok(())
}

/// How many flows between two hosts the kernel's conntrack of node2 has.
fn known(lab: &Lab, ends: [IpAddr; 2]) -> Result<usize> {
    let all = tracked(lab.node("node2"))?;
    let both = |flow: &&Tracked| ends.iter().all(|end| flow.ends.contains(end));
    Ok(all.iter().filter(both).count())
}

fn flows_between_pods_leave_no_trace_in_the_kernels_conntrack() -> Result<()> {
    let cluster = start(&[])?;
    let lab = &cluster.lab;
    let ways = [("sleep", "near"), ("sleep", "far"), ("far", "near")];
    for (from, to) in ways {
        let (from, to) = (lab.pod(from), lab.pod(to));
        for v4 in [true, false] {
            let ends = [address(from, v4), address(to, v4)];
            flows(from, to, v4, ends[0])?;
            let known = known(lab, ends)?;
            let from_outside = usize::from(from.name() == "far");
            // Datagrams from outside pass the stack.
            let most = 2 * SHOW + from_outside * usize::try_from(FLOWS)?;
            ensure!(
                (1..=most).contains(&known),
                "of {} flows {ends:?} conntrack knows {known}, not 1 to {most}",
                2 * FLOWS
            );
        }
    }
    Ok(())
}

/// Whichever place in the table of UDP flows a datagram's hash leads to, a known flow between the same pods is there. The stack still
/// sees the first datagram to each port.
fn a_new_destination_is_never_taken_for_a_flow_that_is_known() -> Result<()> {
    const NEW: std::ops::Range<u16> = 5400..5420;
    let cluster = start(&[])?;
    let lab = &cluster.lab;
    let (sleep, near) = (lab.pod("sleep"), lab.pod("near"));
    let [from, to] = [address(sleep, true), address(near, true)];
    flows(sleep, near, true, from)?;
    on(sleep, |_| {
        for port in 10_000..40_000 {
            UdpSocket::bind((from, port))?.send_to(b"?", (to, UDP))?;
        }
        let socket = UdpSocket::bind((from, 0))?;
        for port in NEW {
            socket.send_to(b"?", (to, port))?;
        }
        Ok(())
    })?;
    let all = tracked(lab.node("node2"))?;
    for port in NEW {
        let has_port = |flow: &Tracked| flow.line.contains(&format!(" dport={port} "));
        ensure!(
            all.iter().any(has_port),
            "the stack has not seen {to}:{port}"
        );
    }
    Ok(())
}

fn rules_of_nat_hold() -> Result<()> {
    let cluster = start(&[])?;
    let lab = &cluster.lab;
    let (sleep, near, far, node) = (
        lab.pod("sleep"),
        lab.pod("near"),
        lab.pod("far"),
        lab.node("node2"),
    );
    let ext = lab.external("ext");
    let _server = serve(ext)?;
    // What leaves the cluster is masqueraded.
    for v4 in [true, false] {
        flows(sleep, ext, v4, address(node, v4))?;
    }
    // A rule that comes later, for what did not need it before.
    flows(sleep, far, true, address(sleep, true))?;
    flows(sleep, near, true, address(sleep, true))?;
    let rule = format!(
        "add rule inet plugin post ip saddr {} ip daddr {} meta l4proto {{ tcp, udp }} masquerade",
        sleep.ipv4(),
        far.ipv4()
    );
    load(node, "nft -f -", &rule)?;
    // The stack shows the next flow's way within 9 s, also while flows begin all the time.
    eventually(|| flows(sleep, far, true, address(node, true)))?;
    flows(sleep, near, true, address(sleep, true))
}

/// Rules of others that translate destinations, as the CNI plug-in portmap has them: neither an earlier connection to the pod itself
/// with the same ports, nor one that goes on meanwhile, takes the answers.
fn connections_to_host_ports_of_others_are_translated_back() -> Result<()> {
    let cluster = start(&[])?;
    let lab = &cluster.lab;
    let (sleep, near, node) = (lab.pod("sleep"), lab.pod("near"), lab.node("node2"));
    let rules = format!(
        "add table inet portmap\n\
         add chain inet portmap pre {{ type nat hook prerouting priority dstnat; }}\n\
         add rule inet portmap pre ip daddr {} tcp dport 4000 dnat ip to {}:{TCP}",
        node.ipv4(),
        near.ipv4(),
    );
    load(node, "nft -f -", &rules)?;
    let pod = SocketAddr::new(address(near, true), TCP).to_string();
    let port = format!("{}:4000", node.ipv4());
    // The same ports of the client, by turns.
    for _ in 0..3 {
        for to in [&pod, &port] {
            for local in 40_000..40_010 {
                let how = format!("connect --local-port {local}");
                reaches(sleep, to, &how, &["near"])?;
            }
        }
    }
    // Many connections to both at the same time, beyond the moment at which the stack shows the way again.
    for _ in 0..20 {
        for to in [&pod, &port] {
            reaches(sleep, to, "connect --count 20", &["near"])?;
        }
        thread::sleep(Duration::from_millis(500));
    }
    Ok(())
}

/// Rules of others that exchange two pods: a packet that leaves the stack for one of them was sent to the other.
fn pods_that_rules_exchange_stay_exchanged() -> Result<()> {
    let cluster = start(&[])?;
    let lab = &cluster.lab;
    let (sleep, near, far) = (lab.pod("sleep"), lab.pod("near"), lab.pod("far"));
    let rule = |from: &Host, to: &Host| {
        format!(
            "add rule inet exchange pre ip daddr {} tcp dport {TCP} dnat ip to {}\n",
            from.ipv4(),
            to.ipv4()
        )
    };
    let rules = format!(
        "add table inet exchange\n\
         add chain inet exchange pre {{ type nat hook prerouting priority dstnat; }}\n{}{}",
        rule(near, far),
        rule(far, near)
    );
    load(lab.node("node2"), "nft -f -", &rules)?;
    for _ in 0..20 {
        for (to, reached) in [(near, "far"), (far, "near")] {
            let to = SocketAddr::new(address(to, true), TCP).to_string();
            reaches(sleep, &to, "connect --count 5", &[reached])?;
        }
    }
    Ok(())
}

fn errors_come_from_the_stack() -> Result<()> {
    let cluster = start(&[])?;
    let lab = &cluster.lab;
    let (sleep, near) = (lab.pod("sleep"), lab.pod("near"));
    flows(sleep, near, true, address(sleep, true))?;
    let to = SocketAddr::new(address(near, true), UDP);
    let socket = udp(sleep, (address(sleep, true), 0))?;
    socket.connect(to)?;
    socket.set_ttl(1)?;
    setsockopt(&socket, sockopt::Ipv4RecvErr, &true)?;
    eventually(|| {
        // The error of the datagram before.
        let sent = socket.send(b"x").and_then(|_| socket.recv(&mut [0; 100]));
        let error = sent.err().and_then(|error| error.raw_os_error());
        ensure!(
            error == Some(nix::libc::EHOSTUNREACH),
            "the error is {error:?}, not that the time to live is over"
        );
        Ok(())
    })
}

/// Gives a node's way to a pod of another node a small MTU, which no other host knows.
fn narrow(node: &Host, to: &Host, via: &[String]) -> Result<()> {
    for (v4, via) in [true, false].into_iter().zip(via) {
        let to = address(to, v4);
        node.ip(&format!("route replace {to} {via} mtu lock 1280"))?;
    }
    Ok(())
}

/// Begins a connection that bypasses node2's stack.
fn bypassing(lab: &Lab, from: &Host, to: &Host, v4: bool) -> Result<TcpStream> {
    let ends = [address(from, v4), address(to, v4)];
    for _ in 0..5 {
        let before = known(lab, ends)?;
        let stream = tcp(from, SocketAddr::new(ends[1], TCP))?;
        if known(lab, ends)? == before {
            return Ok(stream);
        }
    }
    bail!("each connection {ends:?} passes the stack")
}

/// A router behind the node reports that packets of a connection are too large. As beside kube-proxy, rules drop what conntrack does not
/// know; but conntrack would know what such an error is about, had it seen the connection.
fn errors_of_routers_reach_connections_that_bypass_rules_that_came_later() -> Result<()> {
    const LATER: &str = "table inet late { chain KUBE-FORWARD { ct state invalid counter drop; }\n\
        chain forward { type filter hook forward priority filter; policy accept\njump KUBE-FORWARD; }\n}";
    let cluster = start(&[])?;
    let lab = &cluster.lab;
    let (sleep, far, router) = (lab.pod("sleep"), lab.pod("far"), lab.node("node1"));
    unlimited_icmp(router)?;
    narrow(
        router,
        far,
        &["dev veth-far".to_owned(), "dev veth-far".to_owned()],
    )?;
    let streams = [true, false].map(|v4| bypassing(lab, sleep, far, v4));
    load(lab.node("node2"), "nft -f -", LATER)?;
    eventually(|| {
        let status = cluster.status()?;
        ensure!(status["bypass"] == false, "{status:#}");
        Ok(())
    })?;
    for stream in streams {
        let who = transfer(&stream?, &bytes(300_000, 5))?;
        ensure!(who == "far", "{who} answered");
    }
    Ok(())
}

/// The node itself reports it, and its rules for packets that it sends drop what conntrack does not know.
fn errors_of_the_node_pass_its_rules() -> Result<()> {
    const OUTPUT: &str = "table inet own { chain output { type filter hook output priority filter; policy accept\n\
        ct state invalid counter drop; }\n}";
    let cluster = start(&[])?;
    let lab = &cluster.lab;
    let (sleep, far, node) = (lab.pod("sleep"), lab.pod("far"), lab.node("node2"));
    unlimited_icmp(node)?;
    load(node, "nft -f -", OUTPUT)?;
    eventually(|| {
        let status = cluster.status()?;
        let path = &status["packet_path"];
        ensure!(status["bypass"] == false && path == "fast", "{status:#}");
        Ok(())
    })?;
    let via = [true, false].map(|v4| format!("via {}", address(lab.node("node1"), v4)));
    narrow(node, far, &via)?;
    for v4 in [true, false] {
        flows(sleep, far, v4, address(sleep, v4))?;
        let stream = tcp(sleep, SocketAddr::new(address(far, v4), TCP))?;
        let who = transfer(&stream, &bytes(300_000, 5))?;
        ensure!(who == "far", "{who} answered");
    }
    Ok(())
}

fn rules_that_only_count_see_all_packets() -> Result<()> {
    let cluster = start(&[])?;
    let lab = &cluster.lab;
    let (sleep, near, node) = (lab.pod("sleep"), lab.pod("near"), lab.node("node2"));
    let ends = [address(sleep, true), address(near, true)];
    let rules = format!(
        "table inet accounts {{ chain forward {{ type filter hook forward priority filter; policy accept;\n\
         ip saddr {} counter\n}}\n}}",
        sleep.ipv4()
    );
    load(node, "nft -f -", &rules)?;
    eventually(|| {
        let status = cluster.status()?;
        ensure!(
            status["bypass"] == false && status["packet_path"] == "fast",
            "{status:#}"
        );
        Ok(())
    })?;
    flows(sleep, near, true, ends[0])?;
    let known = known(lab, ends)?;
    ensure!(
        known >= 2 * usize::try_from(FLOWS)?,
        "conntrack knows {known} flows"
    );
    // A chain at an interface must see packets of services, too.
    let rules = "add table netdev limits\nadd chain netdev limits arrives { type filter hook ingress device veth-sleep priority 0; }";
    load(node, "nft -f -", rules)?;
    takes(&cluster.agent, "stack")
}

fn the_switch_is_off() -> Result<()> {
    let config = Config::new("packets: { bypass: false }\n")?;
    let cluster = start(&config.arguments())?;
    let lab = &cluster.lab;
    let (sleep, near) = (lab.pod("sleep"), lab.pod("near"));
    let ends = [address(sleep, true), address(near, true)];
    flows(sleep, near, true, ends[0])?;
    let known = known(lab, ends)?;
    ensure!(
        known == 2 * usize::try_from(FLOWS)?,
        "conntrack knows {known} of {} flows",
        2 * FLOWS
    );
    Ok(())
}
