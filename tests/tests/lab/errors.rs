//! ICMP errors through the translation: paths whose MTU must be found, ports without a listener, and hops that run out.
//! With kube-proxy's rules and with the dataplane.

use std::{
    io::IoSliceMut,
    net::{IpAddr, SocketAddr, SocketAddrV4, SocketAddrV6},
    os::fd::AsRawFd as _,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use dataplane_peers::Mode;
use dataplane_tests::{Host, Lab, is_long, patience};
use kernel::trial::{Offload, set_offload};
use nix::{
    cmsg_space,
    errno::Errno,
    libc::{sock_extended_err, sockaddr_in6},
    sys::socket::{
        ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, setsockopt,
        sockopt::{Ipv4RecvErr, Ipv4Ttl, Ipv6RecvErr, Ipv6Ttl},
    },
};

use crate::{
    differential::{
        case::Numbered,
        world::{Settings, Worker, World, unlimited_icmp},
    },
    features::on,
    sockets::{address, ask, bytes, enough, tcp, transfer, udp},
};

scenarios! {
    Dataplane:
    the_mtu_of_a_path_is_found,
    errors_are_whole_whoever_makes_checksums_and_segments,
    errors_reach_the_clients_socket,
}

const WORKERS: [Worker; 3] = [
    Worker::KubeProxy(Mode::IptablesNft),
    Worker::Dataplane,
    Worker::Strict,
];

/// The client's addresses, behind `ext`.
const BEHIND: [&str; 2] = ["192.0.2.2", "fd79::2"];

/// A client behind a router, on a link with a small MTU that no other host knows; and an endpoint behind another
/// router. Each direction's packets are as large as a usual link allows, and a router on the way reports that they are
/// too large.
fn small_links(world: &World) -> Result<()> {
    let (ext, ext2, node) = (world.host("ext"), world.host("ext2"), world.host("node1"));
    ext.sysctl("ipv4/ip_forward", "1")?;
    ext.sysctl("ipv6/conf/all/forwarding", "1")?;
    ext.sysctl("ipv4/conf/all/send_redirects", "0")?;
    unlimited_icmp(ext)?;
    ext.ip(&format!(
        "link add p0 mtu 1300 type veth peer name p1 mtu 1300 netns {}",
        ext2.netns()
    ))?;
    for (host, link, addresses) in [
        (ext, "p0", ["192.0.2.1/24", "fd79::1/64"]),
        (ext2, "p1", ["192.0.2.2/24", "fd79::2/64"]),
    ] {
        for address in addresses {
            let nodad = if address.contains(':') { "nodad" } else { "" };
            host.ip(&format!("addr add {address} dev {link} {nodad}"))?;
        }
        host.ip(&format!("link set {link} up"))?;
    }
    ext2.ip("link set eth0 down")?;
    // It advertises a larger size than its link allows.
    ext2.ip("route add default via 192.0.2.1 advmss 1460")?;
    ext2.ip("-6 route add default via fd79::1 advmss 1440")?;
    node.ip(&format!("route add 192.0.2.0/24 via {}", ext.ipv4()))?;
    node.ip(&format!("-6 route add fd79::/64 via {}", ext.ipv6()))?;
    // Towards its endpoint, the node's own route has the small MTU.
    let e1 = world.host("e1");
    for (family, address, source) in [
        ("-4", IpAddr::from(e1.ipv4()), IpAddr::from(e1.gateway4())),
        ("-6", e1.ipv6().into(), e1.gateway6().into()),
    ] {
        node.ip(&format!(
            "{family} route replace {address} dev veth-e1 src {source} mtu lock 1280"
        ))?;
    }
    Ok(())
}

fn the_mtu_of_a_path_is_found() -> Result<()> {
    let numbered = |name, number| Numbered { name, number };
    let services = |lab: &Lab| {
        vec![
            numbered("masqueraded", 1)
                .service()
                .endpoints(&[lab.pod("e1")]),
            numbered("elsewhere", 2)
                .service()
                .endpoints(&[lab.pod("e3")]),
            numbered("local", 3)
                .service()
                .endpoints(&[lab.pod("e1"), lab.pod("e3")])
                .set("externalTrafficPolicy", "Local"),
        ]
    };
    for worker in WORKERS {
        let world = World::start(worker, &Settings::base(), &services)?;
        small_links(&world)?;
        let client = world.host("ext2");
        for v4 in [true, false] {
            for (number, endpoint) in [(1, "e1"), (2, "e3"), (3, "e1")] {
                let node = address(world.lab.node("node1"), v4);
                let to: SocketAddr = (node, 30_000 + number).into();
                let what = || format!("{worker:?}: {to}, to {endpoint}");
                let stream = tcp(client, to).with_context(what)?;
                let who = transfer(&stream, &bytes(300_000, 5)).with_context(what)?;
                ensure!(who == endpoint, "{who} answered: {}", what());
                // A datagram is not sent again; the next one is sent with the new MTU.
                let to = (node, 30_000 + number).into();
                let socket = udp(client, (BEHIND[usize::from(!v4)].parse::<IpAddr>()?, 0))?;
                let data = bytes(4000, 6);
                let mut tries = (1..=12).map(|n| {
                    socket.set_read_timeout(Some(patience(Duration::from_millis(300 * n))))?;
                    ask(&socket, to, &data)
                });
                let who = tries.find_map(Result::ok).with_context(what)?;
                ensure!(who == endpoint, "{who} answered: {}", what());
            }
        }
    }
    Ok(())
}

/// Errors about packets whose checksums or segments are left to a device, at either side, or that a device has put
/// together: each connection finds the path's MTU anew, and a socket gets the error of a closed port.
fn errors_are_whole_whoever_makes_checksums_and_segments() -> Result<()> {
    use Offload::{Checksum, Receive, Segments};
    const DEAF: u16 = 4444;
    let numbered = |name, number| Numbered { name, number };
    let services = |lab: &Lab| {
        vec![
            numbered("near", 1).service().endpoints(&[lab.pod("e1")]),
            numbered("far", 2).service().endpoints(&[lab.pod("e3")]),
            crate::manifest::Service::new("deaf", &["10.96.0.9", "fd00:10:96::9"])
                .node_port("udp", 80, DEAF, 30_009)
                .endpoints(&[lab.pod("e1")]),
        ]
    };
    let set = |host: &Host, interface: &str, what: Offload, to: bool| {
        on(host, |_| {
            set_offload(interface, what, to).with_context(|| format!("{what:?} of {interface}"))
        })
    };
    for worker in WORKERS {
        let world = World::start(worker, &Settings::base(), &services)?;
        small_links(&world)?;
        let [ext, client, node, e1] = ["ext", "ext2", "node1", "e1"].map(|name| world.host(name));
        let theirs = [(ext, "p0"), (ext, "eth0"), (client, "p1"), (e1, "eth0")];
        let ours = [(node, "eth0"), (node, "veth-e1")];
        // Through the stack, where the kernel's own code makes checksums and segments, a few of them are enough.
        let few = [0, 3, 7, 11, 15];
        let is_tried = |bits: &u8| worker != Worker::Strict || is_long() || few.contains(bits);
        for bits in (0..16_u8).filter(is_tried) {
            let [their_sums, our_sums, segments, receive] = [1, 2, 4, 8].map(|bit| bits & bit != 0);
            for (devices, sums) in [(&theirs[..], their_sums), (&ours[..], our_sums)] {
                for (host, interface) in devices {
                    set(host, interface, Checksum, sums)?;
                    set(host, interface, Segments, segments && sums)?;
                    set(host, interface, Receive, receive)?;
                }
            }
            for v4 in [true, false] {
                for (number, endpoint) in [(1, "e1"), (2, "e3")] {
                    for host in [client, e1, ext, node] {
                        host.ip("route flush cache")?;
                        host.ip("-6 route flush cache")?;
                    }
                    let to: SocketAddr = (address(node, v4), 30_000 + number).into();
                    let what = || {
                        format!(
                            "{worker:?}: {to}, to {endpoint}; checksums by devices there: {their_sums}, here: {our_sums}; \
                             segments {segments}, GRO {receive}"
                        )
                    };
                    let stream = tcp(client, to).with_context(what)?;
                    let who = transfer(&stream, &bytes(100_000, 5)).with_context(what)?;
                    ensure!(who == endpoint, "{who} answered: {}", what());
                }
                let to: SocketAddr = (address(node, v4), 30_009).into();
                let told = try_to_reach(&world, to, 64)?;
                ensure!(told.error == Errno::ECONNREFUSED, "{worker:?}: {told:?}");
            }
        }
    }
    Ok(())
}

/// A socket's error: its number, the kind of ICMP message, and its sender.
#[derive(Debug, PartialEq, Eq)]
struct SocketError {
    error: Errno,
    kind: [u8; 2],
    from: Option<IpAddr>,
}

fn told(error: &sock_extended_err, from: Option<IpAddr>) -> SocketError {
    SocketError {
        error: Errno::from_raw(error.ee_errno.cast_signed()),
        kind: [error.ee_type, error.ee_code],
        from,
    }
}

fn address_of(offender: &sockaddr_in6) -> IpAddr {
    IpAddr::from(offender.sin6_addr.s6_addr)
}

/// The next error of a socket.
fn error_of(socket: &std::net::UdpSocket) -> Result<SocketError> {
    let limit = Instant::now() + enough();
    loop {
        let mut data = [0; 2048];
        let mut buffers = [IoSliceMut::new(&mut data)];
        let mut control = cmsg_space!(sock_extended_err, sockaddr_in6);
        let flags = MsgFlags::MSG_ERRQUEUE | MsgFlags::MSG_DONTWAIT;
        match recvmsg::<SockaddrStorage>(
            socket.as_raw_fd(),
            &mut buffers,
            Some(&mut control),
            flags,
        ) {
            Ok(message) => {
                for part in message.cmsgs()? {
                    match part {
                        ControlMessageOwned::Ipv4RecvErr(error, from) => {
                            let from = from.map(|a| IpAddr::from(a.sin_addr.s_addr.to_ne_bytes()));
                            return Ok(told(&error, from));
                        }
                        ControlMessageOwned::Ipv6RecvErr(error, from) => {
                            return Ok(told(&error, from.as_ref().map(address_of)));
                        }
                        _ => {}
                    }
                }
                bail!("an error without a reason");
            }
            Err(Errno::EAGAIN) if Instant::now() < limit => {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(error) => return Err(error).context("nothing was told"),
        }
    }
}

/// Returns the error that a client's socket gets for a datagram with so many hops.
fn try_to_reach(world: &World, to: SocketAddr, hops: i32) -> Result<SocketError> {
    let client = world.host("ext");
    let socket = udp(client, (address(client, to.is_ipv4()), 0))?;
    if to.is_ipv4() {
        setsockopt(&socket, Ipv4RecvErr, &true)?;
        setsockopt(&socket, Ipv4Ttl, &hops)?;
    } else {
        setsockopt(&socket, Ipv6RecvErr, &true)?;
        setsockopt(&socket, Ipv6Ttl, &hops)?;
    }
    socket.connect(to)?;
    socket.send(b"anybody?")?;
    error_of(&socket).with_context(|| format!("{to} with {hops} hops"))
}

/// A port of an endpoint without a listener, and hops that run out behind the node, and on it: the socket that asked
/// gets the error, from the address that it asked. This also proves that the quotation inside is right, because the
/// kernel finds the socket by the quotation.
fn errors_reach_the_clients_socket() -> Result<()> {
    const DEAF: u16 = 4444;
    let services = |lab: &Lab| {
        let deaf = |name: &str, n: u8, endpoint: &str| {
            let vips = [format!("10.96.0.{n}"), format!("fd00:10:96::{n}")];
            crate::manifest::Service::new(name, &[&vips[0], &vips[1]])
                .node_port("udp", 80, DEAF, 30_000 + u16::from(n))
                .endpoints(&[lab.pod(endpoint)])
        };
        vec![
            deaf("here", 1, "e1"),
            deaf("elsewhere", 2, "e3"),
            deaf("local", 3, "e2").set("externalTrafficPolicy", "Local"),
        ]
    };
    let mut seen: Vec<Vec<SocketError>> = Vec::new();
    for worker in WORKERS {
        let world = World::start(worker, &Settings::base(), &services)?;
        unlimited_icmp(world.lab.node("node2"))?;
        let mut all = Vec::new();
        for v4 in [true, false] {
            let node = address(world.lab.node("node1"), v4);
            for number in [1, 2, 3] {
                let to: SocketAddr = match node {
                    IpAddr::V4(node) => SocketAddrV4::new(node, 30_000 + number).into(),
                    IpAddr::V6(node) => SocketAddrV6::new(node, 30_000 + number, 0, 0).into(),
                };
                let deaf = try_to_reach(&world, to, 64).with_context(|| format!("{worker:?}"))?;
                ensure!(
                    deaf.error == Errno::ECONNREFUSED && deaf.from == Some(node),
                    "{worker:?}: {to}: {deaf:?}"
                );
                all.push(deaf);
            }
            // Behind node1, on node2; and on node1.
            let elsewhere: SocketAddr = (node, 30_002).into();
            for hops in [2, 1] {
                let lost =
                    try_to_reach(&world, elsewhere, hops).with_context(|| format!("{worker:?}"))?;
                ensure!(
                    lost.kind == if v4 { [11, 0] } else { [3, 0] } && lost.from == Some(node),
                    "{worker:?}: {elsewhere}: {lost:?}"
                );
                all.push(lost);
            }
        }
        seen.push(all);
    }
    for ours in &seen[1..] {
        ensure!(seen[0] == *ours, "{:?}\nis not {ours:?}", seen[0]);
    }
    Ok(())
}
