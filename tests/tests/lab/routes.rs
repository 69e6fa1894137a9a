//! Ways by which the packet path cannot send packets on by itself.

use std::{
    fs::{self, File},
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, SocketAddr},
    os::fd::AsFd as _,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::{Reason, packet::PacketConfig};
use dataplane_proof::{
    campaign::{Scene, plain_config},
    wire::{Packet, Payload, flags},
};
use dataplane_tests::{Host, Lab};
use kernel::{packet::PacketTables, rig::SkbContext, tc::Direction, trial};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::{
    cluster::{Cluster, TCP, UDP, eventually, fails, peer_is, reaches, refused, sources_are},
    explain::packet_reason,
    features::on,
    manifest::Service,
    sockets::{ask, bytes, tcp, transfer, udp},
};

scenarios! {
    Dataplane:
    the_stack_encapsulates_what_a_route_says,
    interfaces_without_a_link_layer_are_ways_too,
    interfaces_without_a_link_layer_are_ways_of_the_stack,
    rules_of_routing_count,
    ways_are_kept_for_a_moment,
    ports_in_rules_are_noticed,
}

const TUNNEL: &str = "type vxlan dstport 4789 external";

/// A route that encapsulates (LWT), from a pod's node to the endpoint's: the programs translate packets to the
/// endpoint, and leave them to the stack. Packets that would get another source are refused.
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
    let client = SocketAddr::from((outside.ipv4(), 4000));
    let to = "192.168.77.2:30080";
    let reason = packet_reason(&cluster.agent, "eth0", client, to, 0)?;
    ensure!(reason == "no-route", "{reason}");
    Ok(())
}

/// A cable between two hosts, of which each has an end without any link-layer header, as WireGuard's
/// and other tunnels' are: `tun0`.
struct Cable {
    cut: Arc<AtomicBool>,
    carrier: Option<JoinHandle<()>>,
}

impl Cable {
    fn lay(hosts: [&Host; 2]) -> Result<Self> {
        let [mut a, mut b] = [
            on(hosts[0], |_| Ok(trial::tun("tun0")?))?,
            on(hosts[1], |_| Ok(trial::tun("tun0")?))?,
        ];
        let cut = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&cut);
        let carrier = thread::spawn(move || {
            while !until.load(Ordering::Relaxed) {
                let mut ends = [&a, &b].map(|end| PollFd::new(end.as_fd(), PollFlags::POLLIN));
                if poll(&mut ends, PollTimeout::from(20_u8)).is_err() {
                    return;
                }
                carry(&mut a, &mut b);
                carry(&mut b, &mut a);
            }
        });
        Ok(Self {
            cut,
            carrier: Some(carrier),
        })
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        self.cut.store(true, Ordering::Relaxed);
        if let Some(carrier) = self.carrier.take() {
            let _ = carrier.join();
        }
    }
}

/// Copies packets to the other end. A packet that the other end does not take is lost, as on any cable.
fn carry(from: &mut File, to: &mut File) {
    // More than the devices' MTU.
    let mut packet = [0; 2048];
    loop {
        match from.read(&mut packet) {
            Ok(length) => drop(to.write(&packet[..length])),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// Nodes that reach each other by a tunnel: endpoints behind it, clients that come by it, and refusals
/// that go back by it.
fn interfaces_without_a_link_layer_are_ways_too() -> Result<()> {
    without_link_layer("fast")
}

fn interfaces_without_a_link_layer_are_ways_of_the_stack() -> Result<()> {
    without_link_layer("stack")
}

fn without_link_layer(path: &str) -> Result<()> {
    let lab = Cluster::lab_of_packets()?;
    let nodes = [lab.node("node1"), lab.node("node2")];
    let _cable = match Cable::lay(nodes) {
        Ok(cable) => cable,
        Err(error) => {
            println!("skipped interfaces without a link layer, {path}: {error:#}");
            return Ok(());
        }
    };
    for (node, number, other) in [(nodes[0], 1, 2), (nodes[1], 2, 1)] {
        node.ip(&format!("addr add 10.99.0.{number}/24 dev tun0"))?;
        node.ip(&format!("-6 addr add fd99::{number}/64 dev tun0 nodad"))?;
        node.ip("link set tun0 up")?;
        node.ip(&format!("route replace 10.244.{other}.0/24 dev tun0"))?;
        node.ip(&format!(
            "-6 route replace fd00:10:244:{other}::/64 dev tun0"
        ))?;
    }
    let services = |lab: &Lab| {
        let service = |name: &str, number: u16| {
            let vips = [format!("10.96.0.{number}"), format!("fd00:96::{number}")];
            let [v4, v6] = vips.each_ref().map(String::as_str);
            Service::new(name, &[v4, v6])
                .node_port("tcp", 80, TCP, 30070 + number)
                .node_port("udp", 53, UDP, 30040 + number)
        };
        vec![
            service("near", 10).endpoints(&[lab.pod("near")]),
            service("far", 11).endpoints(&[lab.pod("far")]),
            service("nobody", 12),
        ]
    };
    let arguments = [
        "--pod-cidr",
        "10.244.0.0/16,fd00:10:244::/48",
        "--nodeport-addresses",
        "10.99.0.0/24,fd99::/64,192.168.77.0/24,fd77::/64",
        "--packet-path",
        path,
    ];
    let cluster = Cluster::start_in(lab, &["near", "far"], services, &arguments)?;
    let status = cluster.status()?;
    let tun0 = status["interfaces"].as_array().into_iter().flatten();
    let tun0: Vec<_> = tun0.filter(|i| i["name"] == "tun0").collect();
    ensure!(
        tun0.len() == 1 && tun0[0]["role"] == "uplink",
        "{:#}",
        status["interfaces"]
    );

    // From a pod whose sockets no program sees, through the tunnel.
    for vip in ["10.96.0.11", "[fd00:96::11]"] {
        let client = cluster.client();
        let report = reaches(client, &format!("{vip}:80"), "connect --count 5", &["far"])?;
        sources_are(&report, &client.addresses())?;
        reaches(client, &format!("{vip}:53"), "udp --count 5", &["far"])?;
    }
    // From the tunnel's other end, and from outside: to a pod, and (back) through the tunnel.
    let (there, ext) = (cluster.lab.node("node1"), cluster.lab.external("ext"));
    for (client, node, unspecified) in [
        (there, "10.99.0.2", "0.0.0.0"),
        (there, "fd99::2", "::"),
        (ext, "192.168.77.2", "0.0.0.0"),
        (ext, "fd77::2", "::"),
    ] {
        let node: IpAddr = node.parse()?;
        let unspecified: IpAddr = unspecified.parse()?;
        for (number, endpoint) in [(10, "near"), (11, "far")] {
            let to: SocketAddr = (node, 30070 + number).into();
            let stream = tcp(client, to)?;
            ensure!(transfer(&stream, &bytes(200_000, 3))? == endpoint, "{to}");
            let to: SocketAddr = (node, 30040 + number).into();
            let socket = udp(client, (unspecified, 0))?;
            ensure!(ask(&socket, to, &bytes(4000, 4))? == endpoint, "{to}");
        }
        let nobody = SocketAddr::from((node, 30082));
        refused(client, &nobody.to_string(), "connect")?;
    }
    Ok(())
}

/// The kernel's version: two numbers of its release.
pub fn release() -> Result<(u32, u32)> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let numbers = release.split(['.', '-']).map(str::parse::<u32>);
    let [major, minor] = numbers.take(2).collect::<Result<Vec<_>, _>>()?[..] else {
        anyhow::bail!("no release: {release}");
    };
    Ok((major, minor))
}

/// The programs look up routing rules as the stack would once the destination is translated; with the packet's mark
/// where the kernel lets programs do so.
fn rules_of_routing_count() -> Result<()> {
    let by_mark = release()? >= (6, 10);
    Scene::new()?.inside(|scene| {
        scene.world.configure(&mut scene.rig, plain_config())?;
        let node = scene.lab.node("node1");
        for (rule, matches) in [
            ("from 192.168.77.201", true),
            ("from 192.168.77.202", false),
            ("iif eth0", true),
            ("iif veth-near", false),
            // The endpoint's port, not the service's. 6 is TCP: its name takes an /etc/protocols.
            ("ipproto 6 dport 80", true),
            ("ipproto 6 dport 30013", false),
            ("fwmark 7", by_mark),
            ("fwmark 8", false),
        ] {
            // 2 is `TC_ACT_SHOT`, 7 `TC_ACT_REDIRECT`.
            let is = |wanted: i32| -> Result<()> {
                let (verdict, _) = syn(scene, 7)?;
                ensure!(verdict == wanted, "{rule}: {verdict}, not {wanted}");
                Ok(())
            };
            is(7)?;
            let refused = scene.rig.reasons()?[Reason::NoRoute as usize];
            let rule = format!("pref 100 {rule} to 10.244.1.12 prohibit");
            node.ip(&format!("rule add {rule}"))?;
            is(if matches { 2 } else { 7 })?;
            let counted = scene.rig.reasons()?[Reason::NoRoute as usize] - refused;
            ensure!(counted == u64::from(matches), "{rule}: counted {counted}");
            node.ip(&format!("rule del {rule}"))?;
        }
        Ok(())
    })
}

/// The way for a packet's addresses is cached for the next packets, unless the agent forbids it or they bear a mark;
/// and the programs notice a change within moments, without a message.
fn ways_are_kept_for_a_moment() -> Result<()> {
    const MARK: u32 = 0;
    let forwarding = |on: bool| {
        fs::write(
            "/proc/sys/net/ipv4/conf/eth0/forwarding",
            if on { "1" } else { "0" },
        )
    };
    Scene::new()?.inside(|scene| {
        scene.world.configure(&mut scene.rig, plain_config())?;
        let node = scene.lab.node("node1");
        let becomes = |wanted: i32, link: Option<[u8; 6]>| {
            eventually(|| {
                let (verdict, to) = syn(scene, MARK)?;
                ensure!(verdict == wanted, "{verdict}, not {wanted}");
                ensure!(link.is_none_or(|link| link == to), "to {to:02x?}");
                Ok(())
            })
        };
        let (first, before) = syn(scene, MARK)?;
        ensure!(first == 7, "{first}");
        // The kernel finds no way for packets that arrive where it does not forward.
        let is_kept = |mark: u32| -> Result<bool> {
            syn(scene, mark)?;
            forwarding(false)?;
            let (verdict, _) = syn(scene, mark)?;
            becomes(2, None)?;
            forwarding(true)?;
            becomes(7, Some(before))?;
            Ok(verdict == 7)
        };
        // A moment may have ended in between.
        let mut several = (0..5).map(|_| is_kept(MARK));
        ensure!(
            several.any(|kept| kept.is_ok_and(|kept| kept)),
            "no way was kept"
        );
        for _ in 0..5 {
            ensure!(!is_kept(7)?, "the way of a marked packet was kept");
        }
        for rule in ["", "from 192.168.77.201", "iif eth0"] {
            let rule = format!("pref 100 {rule} to 10.244.1.12 prohibit");
            node.ip(&format!("rule add {rule}"))?;
            becomes(2, None)?;
            node.ip(&format!("rule del {rule}"))?;
            becomes(7, Some(before))?;
        }
        let neighbour = |link: &str, state: &str| {
            let to = "10.244.1.12 dev veth-small";
            node.ip(&format!("neigh replace {to} lladdr {link} nud {state}"))
        };
        neighbour("02:00:00:00:00:99", "permanent")?;
        becomes(7, Some([2, 0, 0, 0, 0, 0x99]))?;
        let link = before.map(|byte| format!("{byte:02x}")).join(":");
        neighbour(&link, "reachable")?;
        becomes(7, Some(before))
    })
}

/// The agent hears of rules that ask for ports, and of next hops that are chosen by them: ways are not cached by
/// addresses alone then.
fn ports_in_rules_are_noticed() -> Result<()> {
    let lab = Lab::builder()
        .node("node1")
        .node("node2")
        .pod("node2", "near", "10.244.2.10")
        .vm("node2", "sleep", "10.244.2.8")
        .build()?;
    let services = |lab: &Lab| {
        vec![
            Service::new("web", &["10.96.0.10"])
                .node_port("tcp", 80, TCP, 30080)
                .endpoints(&[lab.pod("near")]),
        ]
    };
    let cluster = Cluster::start_in(lab, &["near"], services, &[])?;
    let (node, client) = (cluster.lab.node("node2"), cluster.client());
    let by_address = |wanted: bool| {
        eventually(|| {
            let flags = PacketTables::open(cluster.agent.bpffs())?.config().flags;
            ensure!(
                (flags & PacketConfig::WAYS_BY_ADDRESS != 0) == wanted,
                "{flags}"
            );
            Ok(())
        })
    };
    by_address(true)?;
    reaches(client, "10.96.0.10:80", "connect --count 5", &["near"])?;
    // 6 is TCP: its name takes an /etc/protocols. The endpoint's port.
    for (family, to) in [("", "10.244.2.10"), ("-6 ", "fd00:10:244:2::10")] {
        let rule = format!("pref 100 ipproto 6 dport {TCP} to {to} prohibit");
        node.ip(&format!("{family}rule add {rule}"))?;
        by_address(false)?;
        if family.is_empty() {
            fails(client, "10.96.0.10:80", "connect", "TIMEOUT")?;
        }
        node.ip(&format!("{family}rule del {rule}"))?;
        by_address(true)?;
    }
    reaches(client, "10.96.0.10:80", "connect --count 5", &["near"])?;
    for (family, policy) in [("ipv4", "1"), ("ipv6", "1"), ("ipv4", "0"), ("ipv6", "0")] {
        node.sysctl(&format!("{family}/fib_multipath_hash_policy"), policy)?;
        // No message reports that: the agent looks with any other change.
        node.ip("link add other type veth peer name another")?;
        by_address(family == "ipv6" && policy == "0")?;
        node.ip("link del other")?;
    }
    Ok(())
}

/// A client outside begins a flow to the one pod of a node port: the program's verdict on its SYN, which bears a mark,
/// and the link-layer destination.
fn syn(scene: &Scene, mark: u32) -> Result<(i32, [u8; 6])> {
    scene.forget()?;
    let (ifindex, mac) = scene.world.interface("eth0");
    let payload = Payload::Tcp {
        ports: [20_000, 30_013],
        flags: flags::SYN,
        options: Vec::new(),
        data: Vec::new(),
    };
    let packet = Packet::new("192.168.77.201".parse()?, "192.168.77.1".parse()?, payload);
    let packet = Packet {
        link: [mac, [2, 8, 8, 8, 8, 8]],
        ..packet
    };
    let mut out = [0; 256];
    let context = SkbContext::new(ifindex, 0).marked(mark);
    let ran = scene
        .rig
        .run(Direction::Ingress, &context, &packet.frame(), &mut out)
        .context("run the program")?;
    Ok((ran.verdict, *out.first_chunk().context("no frame")?))
}
