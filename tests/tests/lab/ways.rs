//! Missing ways, neighbours that move, and packets that are too long for their way.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    os::fd::AsRawFd as _,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::{
    Addr, Reason,
    packet::{PacketConfig, SourceKey},
};
use dataplane_proof::campaign::{Scene, plain_config};
use dataplane_tests::{Host, Lab};
use kernel::{packet::PacketTables, trial};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, setsockopt, socket, sockopt,
};

use crate::{
    cluster::{Cluster, POD_CIDRS, TCP, UDP, eventually},
    crafted::{OUTSIDE, ip, packet},
    explain::packet_reason,
    features::on,
    manifest::Service,
    outcome::run,
    routes::release,
    sockets::{address, answered, ask, bytes, link, tcp, transfer, udp},
};

scenarios! {
    Dataplane:
    a_flow_waits_for_its_route,
    addresses_of_the_host_are_known_by_its_routes,
    an_idle_neighbour_that_moves_is_found,
    few_packets_are_left_to_the_kernel,
    segments_are_compared_to_the_mtu,
    what_may_be_fragmented_is,
    big_tcp_passes,
    refusals_are_limited_as_the_kernel_limits_them,
}

/// Services at a cluster IP and node ports, for the virtual machine `sleep` and for `ext`.
fn services(lab: &Lab) -> Vec<Service> {
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
}

fn cluster() -> Result<Cluster> {
    Cluster::start_in(
        Cluster::lab_of_packets()?,
        &["near", "far"],
        services,
        &POD_CIDRS,
    )
}

/// Waits until every cached way has expired: 16 jiffies, of which a second has 100 at least.
pub fn forgotten() {
    thread::sleep(Duration::from_millis(200));
}

/// Has routes allow 1400 bytes to the endpoint `far`, and more on the way back.
pub fn narrow(node: &Host) -> Result<()> {
    node.ip("route replace 10.244.1.0/24 via 192.168.77.1 mtu lock 1400")?;
    node.ip("-6 route replace fd00:10:244:1::/64 via fd77::1 mtu lock 1400")?;
    forgotten();
    Ok(())
}

/// A datagram socket with a short timeout: for datagrams without an answer. `eventually` repeats a question with an
/// answer.
fn hasty(host: &Host, v4: bool) -> Result<UdpSocket> {
    let socket = udp(host, (address(host, v4), 0))?;
    socket.set_read_timeout(Some(Duration::from_millis(300)))?;
    Ok(socket)
}

/// While no route leads to the endpoint, the packet path drops a client's packets and begins no flow. Once a
/// route exists, the next packet of this client begins the flow, as if it were the first.
fn a_flow_waits_for_its_route() -> Result<()> {
    let cluster = cluster()?;
    let (node, ext) = (cluster.lab.node("node2"), cluster.lab.external("ext"));
    for (v4, family, network, via) in [
        (true, "", "10.244.1.0/24", "192.168.77.1"),
        (false, "-6 ", "fd00:10:244:1::/64", "fd77::1"),
    ] {
        let to = SocketAddr::from((address(node, v4), 30051));
        for (change, back) in [
            ("del", "replace"),
            ("replace throw", "del throw"),
            ("replace unreachable", "del unreachable"),
        ] {
            let socket = hasty(ext, v4)?;
            let route = format!("{network} via {via}");
            let what = if change == "del" { &route } else { network };
            if change != "del" {
                node.ip(&format!("{family}route del {route}"))?;
            }
            node.ip(&format!("{family}route {change} {what}"))?;
            forgotten();
            let refused = cluster.verdicts(Reason::NoRoute)?;
            for _ in 0..3 {
                ensure!(ask(&socket, to, b"lost").is_err(), "{change}: answered");
            }
            let counted = cluster.verdicts(Reason::NoRoute)? - refused;
            ensure!(counted == 3, "{change}, {to}: counted {counted}");
            let client = SocketAddr::from((address(ext, v4), 4000));
            let explained = || {
                let to = format!("{to}/udp");
                packet_reason(&cluster.agent, "eth0", client, &to, 0)
            };
            let reason = explained()?;
            ensure!(reason == "no-route", "{change}, {to}: {reason}");
            if change != "del" {
                node.ip(&format!("{family}route {back} {network}"))?;
            }
            node.ip(&format!("{family}route replace {route}"))?;
            eventually(|| {
                let who = ask(&socket, to, b"found")?;
                ensure!(who == "far", "{who}");
                Ok(())
            })?;
            let reason = explained()?;
            ensure!(reason == "masqueraded", "{to}: {reason}");
        }
    }
    Ok(())
}

/// Addresses that `ip route add local` makes the host's are the host's to the programs, and no longer than the route is
/// there.
fn addresses_of_the_host_are_known_by_its_routes() -> Result<()> {
    let cluster = cluster()?;
    let node = cluster.lab.node("node2");
    let is_host = |addr: &str, wanted: bool| {
        eventually(|| {
            let tables = PacketTables::open(cluster.agent.bpffs())?;
            let addr = Addr::from(addr.parse::<IpAddr>()?);
            let found = tables.sources().contains(SourceKey::HOST, addr)?;
            ensure!(found == wanted, "{addr:?}: {found}");
            Ok(())
        })
    };
    for addr in ["127.0.0.7", "::1", "192.168.77.2", "fd77::2"] {
        is_host(addr, true)?;
    }
    for (family, network, addr) in [
        ("", "10.66.0.0/16", "10.66.3.4"),
        ("-6 ", "fd66::/16", "fd66::7"),
    ] {
        is_host(addr, false)?;
        node.ip(&format!("{family}route add local {network} dev lo"))?;
        is_host(addr, true)?;
        node.ip(&format!("{family}route del local {network} dev lo"))?;
        is_host(addr, false)?;
    }
    Ok(())
}

/// A next hop that sends nothing by itself gets another link-layer address. The kernel's entry of it is stale, and the
/// kernel notices because packets of services ask for it, too.
fn an_idle_neighbour_that_moves_is_found() -> Result<()> {
    let cluster = cluster()?;
    let (hop, node) = (cluster.lab.node("node1"), cluster.lab.node("node2"));
    let ext = cluster.lab.external("ext");
    let mac = |mac: [u8; 6]| mac.map(|byte| format!("{byte:02x}")).join(":");
    // The kernel's own times, made short: 5 s, then three times one second.
    for (key, value) in [
        ("delay_first_probe_time", "1"),
        ("ucast_solicit", "1"),
        ("retrans_time_ms", "100"),
    ] {
        for family in ["ipv4", "ipv6"] {
            node.sysctl(&format!("{family}/neigh/eth0/{key}"), value)?;
        }
    }
    let own = mac(link(node, "eth0")?);
    for (v4, family, there, here) in [
        (true, "", "192.168.77.1", "192.168.77.2"),
        (false, "-6 ", "fd77::1", "fd77::2"),
    ] {
        let to = SocketAddr::from((address(node, v4), 30051));
        let socket = hasty(ext, v4)?;
        eventually(|| {
            ensure!(ask(&socket, to, b"before")? == "far");
            Ok(())
        })?;
        // It sends no solicitation, which would tell its new address.
        hop.ip(&format!(
            "{family}neigh replace {here} lladdr {own} dev eth0 nud permanent"
        ))?;
        let before = mac(link(hop, "eth0")?);
        let after = if v4 {
            "02:00:00:00:77:04"
        } else {
            "02:00:00:00:77:06"
        };
        hop.ip(&format!("link set eth0 address {after}"))?;
        hop.ip(&format!(
            "{family}neigh replace {here} lladdr {own} dev eth0 nud permanent"
        ))?;
        node.ip(&format!(
            "{family}neigh replace {there} lladdr {before} dev eth0 nud stale"
        ))?;
        ensure!(
            ask(&socket, to, b"lost").is_err(),
            "answered by the old address"
        );
        eventually(|| {
            ensure!(ask(&socket, to, b"found")? == "far");
            Ok(())
        })?;
    }
    Ok(())
}

/// Most packets leave with the link-layer address of the kernel's table of neighbours, with cached ways as with a
/// lookup for each packet.
fn few_packets_are_left_to_the_kernel() -> Result<()> {
    const PACKETS: u32 = 2000;
    const PATIENCE: Duration = Duration::from_secs(6);
    Scene::new()?.inside(|scene| {
        let ways = PacketConfig::WAYS_BY_ADDRESS;
        for flags in [plain_config().flags | ways, plain_config().flags & !ways] {
            let config = PacketConfig {
                flags,
                ..plain_config()
            };
            scene.world.configure(&mut scene.rig, config)?;
            for v4 in [true, false] {
                let client = (ip(v4, OUTSIDE[0], OUTSIDE[1]), 2000);
                let vip = (ip(v4, "10.96.0.4", "fd00:96::4"), 80);
                let frame = packet(false, client, vip, 0).frame();
                let started = Instant::now();
                let mut left = 0;
                let mut thrown = 0;
                // A moment lasts 256 jiffies: 2.6 s where a second has 100 of them. The first packets may come within a
                // moment in which a packet was left to the kernel already.
                while thrown < PACKETS || (left == 0 && started.elapsed() < PATIENCE) {
                    thrown += 1;
                    let (output, _) = scene.throw("eth0", false, &frame)?;
                    let out = output.frame.context("a frame")?;
                    let sent = out[..6] == [2, 0, 0, 0, 0xfe, 0xfe];
                    left += u32::from(!sent);
                }
                // One in 256 jiffies on each CPU, of which a second has 1000 at most.
                let moments = u32::try_from(started.elapsed().as_millis() / 256)? + 2;
                let cpus = u32::try_from(thread::available_parallelism()?.get())?;
                ensure!(
                    left > 0 && left <= moments * cpus && left < thrown / 4,
                    "{left} of {thrown} were left to the kernel, in {moments} moments"
                );
            }
        }
        Ok(())
    })
}

/// Segments that are longer than the way's MTU, of a packet that is yet to be segmented: their sender gets an error, as
/// for a single packet.
fn segments_are_compared_to_the_mtu() -> Result<()> {
    let cluster = cluster()?;
    let client = cluster.client();
    narrow(cluster.lab.node("node2"))?;
    // With several segments, only TCP over IPv4 sets "don't fragment".
    let told = cluster.verdicts(Reason::TooBig)?;
    let stream = tcp(client, "10.96.0.11:80".parse()?)?;
    ensure!(transfer(&stream, &bytes(2_000_000, 7))? == "far");
    ensure!(cluster.verdicts(Reason::TooBig)? > told, "nobody was told");

    let vip: SocketAddr = "[fd00:96::11]:53".parse()?;
    let socket = hasty(client, false)?;
    setsockopt(&socket, sockopt::UdpGsoSegment, &(1500 - 48))?;
    let data = bytes(3 * (1500 - 48), 5);
    let told = cluster.verdicts(Reason::TooBig)?;
    socket.send_to(&data, vip)?;
    eventually(|| {
        let counted = cluster.verdicts(Reason::TooBig)? - told;
        ensure!(counted > 0, "it was sent on");
        // The kernel keeps the MTU from the error for the destination.
        ensure!(socket.send_to(&data, vip).is_err(), "nobody was told");
        Ok(())
    })?;
    // Segments that fit pass.
    setsockopt(&socket, sockopt::UdpGsoSegment, &(1400 - 48))?;
    let data = bytes(1400 - 48, 6);
    socket.send_to(&data.repeat(3), vip)?;
    for _ in 0..3 {
        ensure!(answered(&socket, vip, &data)? == "far");
    }
    Ok(())
}

/// IPv4 without "don't fragment": the node sends it on in fragments, as a router does.
fn what_may_be_fragmented_is() -> Result<()> {
    let cluster = cluster()?;
    let (node, client) = (cluster.lab.node("node2"), cluster.client());
    // For sockets that are made from now on.
    client.sysctl("ipv4/ip_no_pmtu_disc", "1")?;
    narrow(node)?;
    let socket = udp(client, (client.ipv4(), 0))?;
    let vip = "10.96.0.11:53".parse()?;
    let told = cluster.verdicts(Reason::TooBig)?;
    eventually(|| {
        ensure!(ask(&socket, vip, &bytes(1472, 8))? == "far");
        Ok(())
    })?;
    ensure!(
        cluster.verdicts(Reason::TooBig)? == told,
        "somebody was told"
    );
    // The node cannot fragment it if it is masqueraded: its source would be the node's own address.
    let ext = cluster.lab.external("ext");
    ext.sysctl("ipv4/ip_no_pmtu_disc", "1")?;
    let socket = udp(ext, (ext.ipv4(), 0))?;
    let to = SocketAddr::from((node.ipv4(), 30051));
    socket.send_to(&bytes(1472, 9), to)?;
    eventually(|| {
        ensure!(cluster.verdicts(Reason::TooBig)? > told, "nobody was told");
        Ok(())
    })?;
    for (length, wanted) in [(1400, "masqueraded"), (1401, "too-big")] {
        let (client, to) = (SocketAddr::from((ext.ipv4(), 4000)), format!("{to}/udp"));
        let reason = packet_reason(&cluster.agent, "eth0", client, &to, length)?;
        ensure!(reason == wanted, "{length}: {reason}");
    }
    for (source, length, said) in [
        (
            "[fd77::201]:4000",
            0,
            "a packet's addresses are of one family",
        ),
        ("192.168.77.201:4000", 3001, "more than 3000 bytes"),
    ] {
        let command = format!("explain --iface eth0 --length {length} {source} {to}/udp");
        run(&cluster.agent, &command)?.exits(1)?.says(&[said])?;
    }
    Ok(())
}

/// Packets above 64 KiB, whose headers cannot hold their length, between devices that allow them.
fn big_tcp_passes() -> Result<()> {
    const BIG: u32 = 180_000;
    let cluster = cluster()?;
    let (node, client) = (cluster.lab.node("node2"), cluster.client());
    let near = cluster.lab.pod("near");
    for host in [client, near, node] {
        let set = on(host, |_| {
            for interface in &nix::net::if_::if_nameindex()? {
                let name = interface.name().to_string_lossy();
                if name != "lo" {
                    trial::set_big(&name, BIG).with_context(|| name.into_owned())?;
                }
            }
            Ok(())
        });
        if let Err(error) = set {
            println!("skipped ways::big_tcp_passes: this kernel has no BIG TCP: {error:#}");
            return Ok(());
        }
    }
    for v4 in [true, false] {
        if v4 && release()? < (6, 3) {
            println!("skipped ways::big_tcp_passes: IPv4: this kernel has BIG TCP for IPv6 alone");
            continue;
        }
        let vip = if v4 {
            "10.96.0.10:80"
        } else {
            "[fd00:96::10]:80"
        };
        let node_port = SocketAddr::from((address(node, v4), 30080));
        for to in [vip.parse()?, node_port] {
            let malformed = cluster.verdicts(Reason::Malformed)?;
            let done = AtomicBool::new(false);
            let longest = thread::scope(|scope| {
                let watch = scope.spawn(|| longest(node, &done));
                let transferred = (|| {
                    let stream = tcp(client, to)?;
                    ensure!(transfer(&stream, &bytes(30_000_000, 3))? == "near", "{to}");
                    Ok(())
                })();
                done.store(true, Ordering::Relaxed);
                let longest = watch.join().expect("it does not panic")?;
                transferred.map(|()| longest)
            })?;
            ensure!(
                longest > 70_000,
                "{to}: no packet was longer than {longest}"
            );
            let counted = cluster.verdicts(Reason::Malformed)? - malformed;
            ensure!(counted == 0, "{to}: {counted} were malformed");
        }
    }
    Ok(())
}

/// The length of the longest packet at any of a host's interfaces, until it is done.
fn longest(host: &Host, done: &AtomicBool) -> Result<usize> {
    on(host, |_| {
        let all = SockProtocol::EthAll;
        let flags = SockFlag::SOCK_NONBLOCK;
        let tap = socket(AddressFamily::Packet, SockType::Raw, flags, all)?;
        let mut longest = 0;
        while !done.load(Ordering::Relaxed) {
            let mut start = [0; 64];
            match recv(tap.as_raw_fd(), &mut start, MsgFlags::MSG_TRUNC) {
                Ok(length) => longest = longest.max(length),
                Err(_) => thread::sleep(Duration::from_millis(1)),
            }
        }
        Ok(longest)
    })
}

/// The agent reads the kernel's limits, and the programs keep them: six errors at once to a client, then one a second.
/// Without them each datagram is refused.
fn refusals_are_limited_as_the_kernel_limits_them() -> Result<()> {
    const DATAGRAMS: u64 = 30;
    let lab = Cluster::lab_of_packets()?;
    let limit = |node: &Host, value: &str| -> Result<()> {
        node.sysctl("ipv4/icmp_ratelimit", value)?;
        node.sysctl("ipv6/icmp/ratelimit", value)?;
        Ok(())
    };
    limit(lab.node("node2"), "60000")?;
    let cluster = Cluster::start_in(lab, &["near", "far"], services, &[])?;
    let (node, ext) = (cluster.lab.node("node2"), cluster.lab.external("ext"));
    let refuse = |v4: bool| -> Result<u64> {
        let limited = cluster.verdicts(Reason::ErrorLimited)?;
        let refused = cluster.verdicts(Reason::NoEndpoints)?;
        for _ in 0..DATAGRAMS {
            let socket = udp(ext, (address(ext, v4), 0))?;
            socket.send_to(b"anybody?", (address(node, v4), 30052))?;
        }
        eventually(|| {
            let counted = cluster.verdicts(Reason::NoEndpoints)? - refused;
            ensure!(counted == DATAGRAMS, "{counted} were refused");
            Ok(())
        })?;
        Ok(cluster.verdicts(Reason::ErrorLimited)? - limited)
    };
    for v4 in [true, false] {
        let limited = refuse(v4)?;
        ensure!(
            limited == DATAGRAMS - 6,
            "IPv4 {v4}: {limited} of {DATAGRAMS}"
        );
    }
    limit(node, "0")?;
    // No message reports that: the agent looks with any other change.
    node.ip("link add other type veth peer name another")?;
    eventually(|| {
        let errors = PacketTables::open(cluster.agent.bpffs())?.config().errors;
        ensure!(errors.v4_ms == 0 && errors.v6_ms == 0, "{errors:?}");
        Ok(())
    })?;
    for v4 in [true, false] {
        // All errors together have a bucket of 50 (icmp_msgs_burst), which fills by one a millisecond.
        thread::sleep(Duration::from_millis(100));
        ensure!(refuse(v4)? == 0, "IPv4 {v4}: limited without a limit");
    }
    Ok(())
}
