//! Sources that begin flows, compared with the kernel: each packet is sent twice from the same forged source, once to the
//! endpoint itself, which the stack forwards or drops, and once to the service, which the packet path translates or drops.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd as _, OwnedFd},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use dataplane_proof::wire::{Packet, Payload};
use dataplane_tests::Host;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, setsockopt, socket, sockopt,
};

use crate::{
    cluster::{Cluster, UDP, eventually, reaches},
    features::on,
    manifest::Service,
    sockets::{address, inject, link},
};

scenarios! {
    Dataplane:
    sources_that_the_kernel_refuses_begin_no_flow,
}

const VIPS: [&str; 2] = ["10.96.0.10", "fd00:96::10"];

/// A source, and at which of the node's interfaces its packets arrive.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// From a pod; otherwise from another machine.
    from_pod: bool,
    src: &'static str,
    /// The packet path refuses it although the kernel may take it (`docs/architecture.md`, "Packet path").
    stricter: bool,
}

const fn case(from_pod: bool, src: &'static str, stricter: bool) -> Case {
    Case {
        from_pod,
        src,
        stricter,
    }
}

/// Node2 has 192.168.77.2 and 10.244.2.1; its pods are `near` (10), `near2` (11), which sends, and `sleep` (8).
const CASES: [Case; 38] = [
    // From other machines: themselves, pods of other nodes, and addresses that no route leads to.
    case(false, "192.168.77.201", false),
    case(false, "fd77::201", false),
    case(false, "10.244.1.5", false),
    case(false, "fd00:10:244:1::5", false),
    case(false, "198.51.100.7", false),
    case(false, "fd98::7", false),
    case(false, "10.9.0.1", false),
    case(false, "fd09::1", false),
    // As a pod of the node, as the node, and as a service.
    case(false, "10.244.2.11", false),
    case(false, "fd00:10:244:2::11", false),
    case(false, "192.168.77.2", false),
    case(false, "fd77::2", true),
    case(false, "10.244.2.1", false),
    case(false, "fd00:10:244:2::1", true),
    case(false, "10.96.0.10", true),
    case(false, "fd00:96::10", true),
    // As nobody.
    case(false, "127.0.0.1", false),
    case(false, "::1", false),
    case(false, "0.0.0.0", false),
    case(false, "224.0.0.1", false),
    case(false, "ff02::1", false),
    case(false, "255.255.255.255", false),
    case(false, "192.168.77.255", false),
    case(false, "fe80::99", false),
    case(false, "::ffff:192.168.77.201", true),
    // From a pod: itself, another pod of this node and of another, another machine, the node, a service, nobody.
    case(true, "10.244.2.11", false),
    case(true, "fd00:10:244:2::11", false),
    case(true, "10.244.2.8", true),
    case(true, "fd00:10:244:2::8", true),
    case(true, "10.244.1.5", true),
    case(true, "fd00:10:244:1::5", true),
    case(true, "192.168.77.201", true),
    case(true, "192.168.77.2", true),
    case(true, "fd77::2", true),
    case(true, "10.96.0.10", true),
    case(true, "fd00:96::10", true),
    case(true, "198.51.100.7", true),
    case(true, "127.0.0.1", false),
];

/// What is found in a frame that was sent for a case.
const MAGIC: [u8; 4] = *b"\x5aSrc";

/// A datagram of a case, to the endpoint itself or to the service.
fn datagram(links: [[u8; 6]; 2], src: IpAddr, to: (IpAddr, u16), mark: [u8; 2]) -> Vec<u8> {
    let packet = Packet {
        link: links,
        ..Packet::new(
            src,
            to.0,
            Payload::Udp {
                ports: [20_000, to.1],
                summed: true,
                data: [&MAGIC[..], &mark].concat(),
            },
        )
    };
    packet.frame()
}

/// Sees every frame that arrives at a host.
fn tap(host: &Host) -> Result<OwnedFd> {
    on(host, |_| {
        let flags = SockFlag::SOCK_NONBLOCK;
        let all = SockProtocol::EthAll;
        let tap = socket(AddressFamily::Packet, SockType::Raw, flags, all)?;
        setsockopt(&tap, sockopt::RcvBuf, &(1 << 20))?;
        Ok(tap)
    })
}

/// Adds the marks of the frames that have come.
fn read(tap: &OwnedFd, arrived: &mut BTreeSet<[u8; 2]>) {
    let mut frame = [0; 2048];
    while let Ok(length) = recv(tap.as_raw_fd(), &mut frame, MsgFlags::empty()) {
        let frame = &frame[..length];
        if let Some(at) = frame.windows(MAGIC.len()).position(|part| part == MAGIC)
            && let Some(mark) = frame.get(at + MAGIC.len()..at + MAGIC.len() + 2)
        {
            arrived.insert([mark[0], mark[1]]);
        }
    }
}

/// With each `rp_filter`: what the stack drops of packets to the endpoint begins no flow to the service, and what the stack
/// takes does, unless the packet path is stricter.
fn sources_that_the_kernel_refuses_begin_no_flow() -> Result<()> {
    for reverse_path in 0..=2 {
        compare(reverse_path).with_context(|| format!("rp_filter {reverse_path}"))?;
    }
    Ok(())
}

fn compare(reverse_path: u8) -> Result<()> {
    const DIRECT: u8 = 0;
    const SERVICE: u8 = 1;
    /// Of the packets that are sent last, from sources that all take.
    const LAST: u8 = u8::MAX;
    let lab = Cluster::lab()?;
    let node = lab.node("node2");
    node.ip("route add blackhole 10.9.0.0/16")?;
    node.ip("-6 route add blackhole fd09::/16")?;
    for interface in ["eth0", "veth-near2"] {
        let key = format!("ipv4/conf/{interface}/rp_filter");
        node.sysctl(&key, &reverse_path.to_string())?;
    }
    let web = |lab: &dataplane_tests::Lab| {
        let web = Service::new("web", &VIPS).port("udp", 53, UDP);
        vec![web.endpoints(&[lab.pod("near")])]
    };
    let cluster = Cluster::start_in(lab, &["near"], web, &[])?;
    let lab = &cluster.lab;
    let (node, near) = (lab.node("node2"), lab.pod("near"));
    let ext = lab.external("ext");
    for to in near.addresses() {
        // The node then knows its neighbour.
        let to = SocketAddr::from((to, UDP)).to_string();
        reaches(cluster.client(), &to, "udp", &["near"])?;
    }
    let senders = [false, true].map(|from_pod| {
        if from_pod {
            (lab.pod("near2"), "veth-near2")
        } else {
            (ext, "eth0")
        }
    });
    let tap = tap(near)?;
    let mut wrong = Vec::new();
    for (host, at) in senders {
        let links = [link(node, at)?, link(host, "eth0")?];
        let mut frames = Vec::new();
        let mut both = |src: IpAddr, number: u8| -> Result<()> {
            let v4 = src.is_ipv4();
            let vip = VIPS[usize::from(!v4)].parse()?;
            for (to, kind) in [(address(near, v4), DIRECT), (vip, SERVICE)] {
                frames.push(datagram(links, src, (to, UDP), [number, kind]));
            }
            Ok(())
        };
        for (number, case) in CASES.iter().enumerate() {
            if case.from_pod == (at != "eth0") {
                both(case.src.parse()?, u8::try_from(number)?)?;
            }
        }
        for own in host.addresses() {
            both(own, LAST)?;
        }
        inject(host, "eth0", &frames)?;
        let mut last = BTreeSet::new();
        eventually(|| {
            read(&tap, &mut last);
            ensure!(last.contains(&[LAST, SERVICE]), "{last:?} have arrived");
            Ok(())
        })?;
        std::thread::sleep(Duration::from_millis(100));
        read(&tap, &mut last);
        for (number, case) in CASES.iter().enumerate() {
            if case.from_pod != (at != "eth0") {
                continue;
            }
            let [kernel, service] = [DIRECT, SERVICE]
                .map(|kind| last.contains(&[u8::try_from(number).unwrap_or(LAST), kind]));
            if service != (kernel && !case.stricter) {
                let what =
                    format!("{case:?}: the kernel takes it: {kernel}, the packet path: {service}");
                wrong.push(what);
            }
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}
