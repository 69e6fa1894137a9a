//! Sources that begin flows, compared with the kernel: each packet is sent twice from the same forged source, once to the
//! endpoint itself, which the stack forwards or drops, and once to the service, which the packet path translates or drops.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    os::fd::OwnedFd,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::{Addr, Reason};
use dataplane_proof::wire::{Packet, Payload};
use dataplane_tests::{Host, is_long};

use crate::{
    cluster::{Cluster, UDP, ask, eventually, fails, reaches},
    explain::packet_reason,
    manifest::{Config, Service},
    sockets::{address, arrived, inject, link, tap},
};

scenarios! {
    Dataplane:
    sources_that_the_kernel_refuses_begin_no_flow,
    any_next_hop_of_several_is_right,
    pods_of_every_bridge_reach_services,
    a_pod_that_is_routed_elsewhere_is_named,
    who_may_only_reach_the_node_speaks_for_nobody_else,
    a_local_default_route_makes_no_address_the_nodes_own,
    a_new_pod_is_nobody_else_while_no_agent_runs,
    no_socket_speaks_as_somebody_else,
    no_forged_datagram_takes_a_service_from_a_client,
}

const VIPS: [&str; 2] = ["10.96.0.10", "fd00:96::10"];

/// A source, and at which of the node's interfaces its packets arrive.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// From a pod; otherwise from another machine.
    from_pod: bool,
    src: &'static str,
    /// The packet path refuses it although the kernel may take it (`dataplane-ebpf/src/packet/README.md`, "Source checks").
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
const CASES: &[Case] = &[
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
    // As an address that is no host's.
    case(false, "127.0.0.1", false),
    case(false, "::1", false),
    case(false, "0.0.0.0", false),
    case(false, "224.0.0.1", false),
    case(false, "ff02::1", false),
    case(false, "255.255.255.255", false),
    case(false, "192.168.77.255", false),
    case(false, "fe80::99", false),
    case(false, "::ffff:192.168.77.201", true),
    // From a pod: itself, another pod of this node and of another, another machine, the node, a service, and no host.
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

/// Marks a frame that was sent for a case.
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

/// Adds the marks of the frames that have come.
fn read(tap: &OwnedFd, marks: &mut BTreeSet<[u8; 2]>) {
    for frame in arrived(tap) {
        if let Some(at) = frame.windows(MAGIC.len()).position(|part| part == MAGIC)
            && let Some(mark) = frame.get(at + MAGIC.len()..at + MAGIC.len() + 2)
        {
            marks.insert([mark[0], mark[1]]);
        }
    }
}

/// With each `rp_filter`: a packet to the endpoint that the stack drops begins no flow to the service either, and one
/// that the stack takes does, unless the packet path is stricter.
fn sources_that_the_kernel_refuses_begin_no_flow() -> Result<()> {
    for reverse_path in 0..=2 {
        let prepare = |node: &Host| {
            node.ip("route add blackhole 10.9.0.0/16")?;
            node.ip("-6 route add blackhole fd09::/16")?;
            Ok(())
        };
        compare(reverse_path, CASES, prepare)
            .with_context(|| format!("rp_filter {reverse_path}"))?;
    }
    Ok(())
}

/// Of several next hops to a source the kernel takes any with `rp_filter` 1, and so does the packet path, which learns one.
fn any_next_hop_of_several_is_right() -> Result<()> {
    const SOURCES: [&str; 8] = [
        "203.0.113.1",
        "203.0.113.2",
        "203.0.113.3",
        "203.0.113.4",
        "203.0.113.5",
        "203.0.113.6",
        "203.0.113.7",
        "203.0.113.8",
    ];
    let prepare = |node: &Host| {
        node.ip("link add up1 type veth peer name up2")?;
        for end in ["up1", "up2"] {
            node.ip(&format!("link set {end} up"))?;
        }
        node.ip("addr add 10.98.0.1/24 dev up1")?;
        let hops = "nexthop via 192.168.77.201 dev eth0 nexthop via 10.98.0.2 dev up1";
        node.ip(&format!("route add 203.0.113.0/24 {hops}"))?;
        Ok(())
    };
    compare(1, &SOURCES.map(|src| case(false, src, false)), prepare)
}

fn compare(
    reverse_path: u8,
    cases: &[Case],
    prepare: impl FnOnce(&Host) -> Result<()>,
) -> Result<()> {
    const DIRECT: u8 = 0;
    const SERVICE: u8 = 1;
    /// Of the packets that are sent last, from sources that all take.
    const LAST: u8 = u8::MAX;
    let lab = Cluster::lab()?;
    let node = lab.node("node2");
    prepare(node)?;
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
        for (number, case) in cases.iter().enumerate() {
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
        for (number, case) in cases.iter().enumerate() {
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
            // `explain` loads a program for each case, which takes a while: it runs for each case with one value of `rp_filter`.
            if !is_long() && number % 3 != usize::from(reverse_path) {
                continue;
            }
            let src: IpAddr = case.src.parse()?;
            let vip: IpAddr = VIPS[usize::from(src.is_ipv6())].parse()?;
            let to = format!("{}/udp", SocketAddr::from((vip, UDP)));
            let from = SocketAddr::from((src, 20_001));
            let reason = packet_reason(&cluster.agent, at, from, &to, 0)?;
            let wanted = match src {
                _ if service => ["translated", "masqueraded"],
                IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some() => ["not-service"; 2],
                _ if Addr::from(src).is_nobody() => ["not-service"; 2],
                // The kernel forwards no packet with such a source.
                IpAddr::V6(v6) if v6.is_unicast_link_local() => ["no-route"; 2],
                _ => ["source-forged"; 2],
            };
            if !wanted.contains(&&*reason) {
                wrong.push(format!("{case:?}: {service}, but explained as {reason}"));
            }
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// Where the pod `near2` is plugged in, and as which others it may begin flows: as a host outside, and as the pod
/// `sleep`, which has an interface of its own. As the node or a service it never may.
#[derive(Debug)]
struct Shape {
    name: &'static str,
    /// For `ip`, on the node.
    script: &'static str,
    /// The agent's configuration file.
    config: &'static str,
    as_outside: bool,
    as_sleep: bool,
    /// Its text in `status`.
    said: Option<&'static str>,
}

const SHAPES: [Shape; 5] = [
    Shape {
        name: "its own interface",
        script: "route add 10.244.2.11 dev veth-near2
                 -6 route add fd00:10:244:2::11 dev veth-near2",
        config: "",
        as_outside: false,
        as_sleep: false,
        said: None,
    },
    Shape {
        name: "a bridge with the uplink",
        script: "link add br0 up type bridge
                 addr flush dev eth0 scope global
                 link set eth0 master br0
                 addr add 192.168.77.2/24 dev br0
                 -6 addr add fd77::2/64 dev br0 nodad
                 link set veth-near2 master br0
                 route add 10.244.2.11 dev br0
                 -6 route add fd00:10:244:2::11 dev br0",
        config: "",
        as_outside: true,
        as_sleep: false,
        said: None,
    },
    Shape {
        name: "a bridge with a pair to the node",
        script: "link add br2 up type bridge
                 link set veth-near2 master br2
                 link add gateway type veth peer name leg
                 link set gateway up
                 link set leg up master br2
                 addr add 10.97.0.1/24 dev gateway
                 route add 10.244.2.11 dev gateway
                 -6 route add fd00:10:244:2::11 dev gateway",
        config: "",
        as_outside: false,
        as_sleep: false,
        said: None,
    },
    Shape {
        name: "a bridge without the node",
        script: "link add br3 up type bridge
                 link set veth-near2 master br3",
        config: "",
        as_outside: true,
        as_sleep: false,
        said: Some("interfaces veth-near2: the source addresses of their pods are not checked"),
    },
    Shape {
        name: "an interface that is excluded",
        script: "route add 10.244.2.11 dev veth-near2
                 -6 route add fd00:10:244:2::11 dev veth-near2",
        config: "packets: {noSourceCheck: [veth-near2]}",
        as_outside: true,
        as_sleep: true,
        said: None,
    },
];

/// A pod on any bridge reaches services as itself; and as others only where the programs cannot tell, or the operator
/// has allowed it.
fn pods_of_every_bridge_reach_services() -> Result<()> {
    for shape in &SHAPES {
        reach(shape).with_context(|| shape.name)?;
    }
    Ok(())
}

fn reach(shape: &Shape) -> Result<()> {
    const LAST: u8 = u8::MAX;
    let lab = Cluster::lab()?;
    let node = lab.node("node2");
    let script = format!(
        "route del 10.244.2.11 dev veth-near2
         -6 route del fd00:10:244:2::11 dev veth-near2
         addr flush dev veth-near2 scope global
         {}
         route add default via 192.168.77.201
         -6 route add default via fd77::201",
        shape.script
    );
    for line in script.lines() {
        node.ip(line.trim())
            .with_context(|| line.trim().to_owned())?;
    }
    let web = |lab: &dataplane_tests::Lab| {
        let web = Service::new("web", &VIPS).port("udp", 53, UDP);
        vec![web.endpoints(&[lab.pod("near")])]
    };
    let config = Config::new(shape.config)?;
    let cluster = Cluster::start_in(lab, &["near"], web, &config.arguments())?;
    let lab = &cluster.lab;
    let (node, near, pod) = (lab.node("node2"), lab.pod("near"), lab.pod("near2"));
    for to in near.addresses() {
        let to = SocketAddr::from((to, UDP)).to_string();
        reaches(cluster.client(), &to, "udp", &["near"])?;
    }
    let (tap, links) = (tap(near)?, [link(node, "veth-near2")?, link(pod, "eth0")?]);
    let sources = [
        (["198.51.100.7", "fd98::7"], shape.as_outside),
        (["10.244.2.8", "fd00:10:244:2::8"], shape.as_sleep),
        (["192.168.77.2", "fd77::2"], false),
        (VIPS, false),
    ];
    let mut frames = Vec::new();
    for (family, vip) in VIPS.into_iter().enumerate() {
        let vip = vip.parse()?;
        for (number, (sources, _)) in (0..).zip(&sources) {
            let src = sources[family].parse()?;
            let mark = [number, u8::try_from(family)?];
            frames.push(datagram(links, src, (vip, UDP), mark));
        }
        let own = address(pod, family == 0);
        frames.push(datagram(
            links,
            own,
            (vip, UDP),
            [LAST, u8::try_from(family)?],
        ));
    }
    inject(pod, "eth0", &frames)?;
    let mut arrived = BTreeSet::new();
    eventually(|| {
        read(&tap, &mut arrived);
        let own = [0, 1].map(|family| arrived.contains(&[LAST, family]));
        ensure!(own == [true, true], "its own have arrived: {own:?}");
        Ok(())
    })?;
    std::thread::sleep(Duration::from_millis(100));
    read(&tap, &mut arrived);
    for (number, (sources, passes)) in (0..).zip(&sources) {
        for (family, src) in (0..).zip(sources) {
            let passed = arrived.contains(&[number, family]);
            ensure!(passed == *passes, "{src} begins a flow: {passed}");
        }
    }
    let status = cluster.status()?.to_string();
    let said = "source addresses of their pods are not checked";
    ensure!(
        status.contains(shape.said.unwrap_or(said)) == shape.said.is_some(),
        "{status}"
    );
    Ok(())
}

/// Where the node's route to its own pod leads to an uplink, the pod's packets to services are dropped, and `status` says so.
fn a_pod_that_is_routed_elsewhere_is_named() -> Result<()> {
    let lab = Cluster::lab()?;
    let node = lab.node("node2");
    node.ip("route del 10.244.2.11 dev veth-near2")?;
    node.ip("route add 10.244.2.11 via 192.168.77.201")?;
    let web = |lab: &dataplane_tests::Lab| {
        let web = Service::new("web", &VIPS).port("udp", 53, UDP);
        vec![web.endpoints(&[lab.pod("near"), lab.pod("near2")])]
    };
    let cluster = Cluster::start_in(lab, &["near"], web, &[])?;
    let wanted = "the node's route to its own pod 10.244.2.11 leads to the uplink eth0: ";
    // The agent looks some seconds after its start, and a minute later, or later if the machine is busy: a pod whose
    // interface is gone looks alike. The log costs nothing to ask until then.
    let named = || {
        eventually(|| {
            let log = cluster.agent.log();
            ensure!(log.contains(wanted), "{log}");
            Ok(())
        })
    };
    let mut last = named();
    for _ in 0..29 {
        last = last.or_else(|_| named());
    }
    last?;
    let status = cluster.status()?.to_string();
    ensure!(status.contains(wanted), "{status}");
    Ok(())
}

/// If a pod's interface does not forward, the pod's packets reach the node only. `bpf_fib_lookup`, the helper that asks
/// the routes, then gives this answer for every source address.
fn who_may_only_reach_the_node_speaks_for_nobody_else() -> Result<()> {
    let lab = Cluster::lab()?;
    let node = lab.node("node2");
    for family in ["ipv4", "ipv6"] {
        node.sysctl(&format!("{family}/conf/veth-near2/forwarding"), "0")?;
    }
    let at_node = |lab: &dataplane_tests::Lab| {
        let web = Service::new("web", &VIPS).port("udp", 53, UDP);
        let node = lab.node("node2").addresses();
        let at = |service: Service, address| service.endpoint_at(address, "node2");
        vec![node.iter().copied().fold(web, at)]
    };
    let cluster = Cluster::start_in(lab, &[], at_node, &[])?;
    let lab = &cluster.lab;
    let (node, pod) = (lab.node("node2"), lab.pod("near2"));
    let links = [link(node, "veth-near2")?, link(pod, "eth0")?];
    let send = |sources: [&str; 2]| {
        let frames = VIPS.iter().zip(sources).map(|(vip, src)| {
            let to = (vip.parse()?, UDP);
            Ok(datagram(links, src.parse()?, to, [0, 0]))
        });
        inject(pod, "eth0", &frames.collect::<Result<Vec<_>>>()?)
    };
    let are = |reason, wanted| {
        eventually(|| {
            let count = cluster.verdicts(reason)?;
            ensure!(count == wanted, "{reason:?}: {count}, not {wanted}");
            Ok(())
        })
    };
    send(["10.244.2.8", "fd00:10:244:2::8"])?;
    are(Reason::SourceForged, 2)?;
    send(["198.51.100.7", "fd98::7"])?;
    are(Reason::SourceForged, 4)?;
    send(["10.244.2.11", "fd00:10:244:2::11"])?;
    are(Reason::Translated, 2)
}

/// Transparent proxies, and capture by packets, have such a route in a table that only marked packets reach.
fn a_local_default_route_makes_no_address_the_nodes_own() -> Result<()> {
    let lab = Cluster::lab()?;
    let node = lab.node("node2");
    // Otherwise the answer for an IPv4 source may be the kernel's own.
    for which in ["all", "default", "eth0"] {
        node.sysctl(&format!("ipv4/conf/{which}/rp_filter"), "0")?;
    }
    for family in ["-4", "-6"] {
        node.ip(&format!(
            "{family} route add local default dev lo table 100"
        ))?;
        let text = if family == "-4" { "0x77" } else { "0x78" };
        node.ip(&format!("{family} rule add fwmark {text} lookup 100"))?;
    }
    let services = |lab: &dataplane_tests::Lab| {
        vec![
            Service::new("web", &VIPS)
                .node_port("tcp", 80, 7, 30080)
                .endpoints(&[lab.pod("near")]),
            Service::new("lost", &["10.96.0.11", "fd00:96::11"])
                .node_port("tcp", 80, 7, 30081)
                .endpoint_at("198.18.7.7".parse().unwrap_or([0; 4].into()), "node1")
                .endpoint_at("fd98::7".parse().unwrap_or([0; 4].into()), "node1"),
        ]
    };
    let cluster = Cluster::start_in(lab, &["near"], services, &["--packet-path", "fast"])?;
    let outside = cluster.lab.external("ext");
    for to in ["192.168.77.2", "fd77::2"] {
        let to: IpAddr = to.parse()?;
        let at = |port: u16| SocketAddr::from((to, port)).to_string();
        reaches(outside, &at(30080), "connect --count 5", &["near"])?;
        let before = cluster.verdicts(Reason::NoRoute)?;
        fails(outside, &at(30081), "connect", "TIMEOUT")?;
        let counted = cluster.verdicts(Reason::NoRoute)? - before;
        ensure!(
            counted >= 1,
            "{to}: no route leads to the endpoint, but {counted} packets counted"
        );
    }
    ensure!(
        cluster.verdicts(Reason::SourceForged)? == 0,
        "sources count as forged"
    );
    Ok(())
}

/// A pod's socket that is bound to an address of others, or names one, or gets one by the pod's routes or NAT rules, reaches no
/// endpoint through a service. The kernel would forward its packets: by IPv6 always, by IPv4 without `rp_filter`.
fn no_socket_speaks_as_somebody_else() -> Result<()> {
    let lab = Cluster::lab()?;
    for which in ["all", "default", "veth-near2"] {
        let key = format!("ipv4/conf/{which}/rp_filter");
        lab.node("node2").sysctl(&key, "0")?;
    }
    let services = |lab: &dataplane_tests::Lab| {
        let hosts = ["near", "far"].map(|name| lab.pod(name).clone());
        let number = |n: u8| [format!("10.96.0.2{n}"), format!("fd00:96::2{n}")];
        let service = |n: u8, host: &Host| {
            let vips = number(n);
            Service::new(host.name(), &[&vips[0], &vips[1]])
                .port("tcp", 80, 7)
                .port("udp", 53, UDP)
                .endpoints(&[host])
        };
        vec![service(0, &hosts[0]), service(1, &hosts[1])]
    };
    let cluster = Cluster::start_in(lab, &["near", "far"], services, &[])?;
    let lab = &cluster.lab;
    let client = lab.pod("near2");
    let [own4, own6] = client.addresses();
    for (n, endpoint) in ["near", "far"].into_iter().enumerate() {
        let tap = tap(lab.pod(endpoint))?;
        let v4 = (
            format!("10.96.0.2{n}"),
            own4,
            "10.244.2.8 192.168.77.2 198.51.100.7",
        );
        let v6 = (
            format!("[fd00:96::2{n}]"),
            own6,
            "fd00:10:244:2::8 fd77::2 2001:db8::7",
        );
        for (vip, own, others) in [v4, v6] {
            let ways = |source: IpAddr| {
                [
                    (80, format!("connect --feign --local {source}")),
                    (
                        80,
                        format!("connect --feign --local {source} --local-port 4100"),
                    ),
                    (53, format!("udp --feign --local {source}")),
                    (53, format!("udp --feign --local {source} --unconnected")),
                    (53, format!("udp --feign --source {source}")),
                    (53, format!("udp --feign --source {source} --unconnected")),
                ]
            };
            for (port, how) in ways(own) {
                reaches(client, &format!("{vip}:{port}"), &how, &[endpoint])?;
            }
            arrived(&tap);
            let reaches_nobody = |source: IpAddr, port: u16, how: &str| -> Result<()> {
                let before = cluster.verdicts(Reason::SourceForged)?;
                let how = format!("{how} --timeout-ms 150");
                let report = ask(client, &format!("{vip}:{port}"), &how)?;
                let what = || format!("{how} from {client:?} to {vip}:{port}: {report:?}");
                ensure!(report.answered == 0, "answered: {}", what());
                let counted = cluster.verdicts(Reason::SourceForged)? > before;
                ensure!(counted, "not counted: {}", what());
                let is_from = |frame: &Vec<u8>| match source {
                    IpAddr::V4(v4) => frame.get(26..30) == Some(&v4.octets()[..]),
                    IpAddr::V6(v6) => frame.get(22..38) == Some(&v6.octets()[..]),
                };
                let seen = arrived(&tap).iter().filter(|frame| is_from(frame)).count();
                ensure!(seen == 0, "{seen} packets arrive: {}", what());
                Ok(())
            };
            for source in others.split(' ') {
                let source: IpAddr = source.parse()?;
                for (port, how) in ways(source) {
                    reaches_nobody(source, port, &how)?;
                }
            }
            // Not the process, but the pod's rules or routes choose the source.
            let source: IpAddr = others.split(' ').next().context("a source")?.parse()?;
            let unbound = [(80, "connect"), (53, "udp"), (53, "udp --unconnected")];
            let (family, bits) = if source.is_ipv4() {
                ("ip", 32)
            } else {
                ("ip6", 128)
            };
            let rules = format!(
                "add table {family} feign; \
                 add chain {family} feign out {{ type nat hook postrouting priority srcnat; }}; \
                 add rule {family} feign out oifname eth0 snat to {source}"
            );
            client.command("nft").args([&rules]).run()?;
            for (port, how) in unbound {
                reaches_nobody(source, port, how)?;
            }
            let rules = format!("delete table {family} feign");
            client.command("nft").args([&rules]).run()?;

            let flag = if source.is_ipv4() { "-4" } else { "-6" };
            let show = [flag, "route", "show", "default"];
            let route = client.command("ip").args(show).run()?;
            let route = route.replace("pref medium", "");
            client.ip(&format!("addr add {source}/{bits} dev lo"))?;
            client.ip(&format!(
                "{flag} route replace {} src {source}",
                route.trim()
            ))?;
            for (port, how) in unbound {
                reaches_nobody(source, port, how)?;
            }
            client.ip(&format!("{flag} route replace {}", route.trim()))?;
            client.ip(&format!("addr del {source}/{bits} dev lo"))?;
        }
    }
    Ok(())
}

/// A pod sends a datagram from a service's address and port to a client, as if the client had asked for it by way of this node. The
/// client's requests would be taken for the answers to it.
fn no_forged_datagram_takes_a_service_from_a_client() -> Result<()> {
    let lab = Cluster::lab()?;
    for which in ["all", "default", "veth-near2"] {
        let key = format!("ipv4/conf/{which}/rp_filter");
        lab.node("node2").sysctl(&key, "0")?;
    }
    let vips = ["203.0.113.50", "2001:db8:113::50"];
    let services = |lab: &dataplane_tests::Lab| {
        let service = Service::new("sip", &VIPS).set("externalIPs", vips.to_vec());
        vec![service.port("udp", 5060, UDP).endpoints(&[lab.pod("far")])]
    };
    let cluster = Cluster::start_in(lab, &["far"], services, &[])?;
    let lab = &cluster.lab;
    let (node, pod, ext) = (lab.node("node2"), lab.pod("near2"), lab.external("ext"));
    ext.ip(&format!("route add {} via {}", vips[0], node.ipv4()))?;
    ext.ip(&format!("-6 route add {} via {}", vips[1], node.ipv6()))?;
    for (vip, client) in vips.into_iter().zip(ext.addresses()) {
        let vip: IpAddr = vip.parse()?;
        let to = SocketAddr::new(vip, 5060).to_string();
        reaches(ext, &to, "udp --local-port 5059", &["far"])?;
        let before = cluster.verdicts(Reason::SourceForged)?;
        let forged = Packet {
            link: [link(node, "veth-near2")?, link(pod, "eth0")?],
            ..Packet::new(
                vip,
                client,
                Payload::Udp {
                    ports: [5060, 5061],
                    summed: true,
                    data: MAGIC.to_vec(),
                },
            )
        };
        inject(pod, "eth0", &[forged.frame()])?;
        eventually(|| {
            let counted = cluster.verdicts(Reason::SourceForged)?;
            ensure!(counted == before + 1, "{to}: not counted");
            Ok(())
        })?;
        reaches(ext, &to, "udp --local-port 5061", &["far"])?;
    }
    Ok(())
}

/// The agent that would tell the programs of a new pod does not run. The pod's address is still not free for others.
fn a_new_pod_is_nobody_else_while_no_agent_runs() -> Result<()> {
    let lab = Cluster::lab()?;
    let services = |lab: &dataplane_tests::Lab| {
        vec![
            Service::new("web", &VIPS)
                .port("udp", 53, UDP)
                .endpoints(&[lab.pod("near")]),
        ]
    };
    let mut cluster = Cluster::start_in(lab, &["near"], services, &[])?;
    cluster.agent.kill();
    let lab = &cluster.lab;
    let (node, pod) = (lab.node("node2"), lab.pod("near2"));
    node.ip("link add veth-new type veth peer name veth-peer")?;
    node.ip("link set veth-new up")?;
    node.ip("link set veth-peer up")?;
    node.ip("route add 10.244.2.77/32 dev veth-new")?;
    node.ip("-6 route add fd00:10:244:2::77/128 dev veth-new")?;
    let links = [link(node, "veth-near2")?, link(pod, "eth0")?];
    let near = tap(lab.pod("near"))?;
    let send = |sources: [&str; 2], mark: u8| -> Result<usize> {
        for (vip, src) in VIPS.iter().zip(sources) {
            let to = (vip.parse()?, 53);
            inject(pod, "eth0", &[datagram(links, src.parse()?, to, [mark, 0])])?;
        }
        let mut marks = BTreeSet::new();
        let mut count = 0;
        for _ in 0..30 {
            std::thread::sleep(Duration::from_millis(10));
            marks.clear();
            read(&near, &mut marks);
            count += marks.len();
        }
        Ok(count)
    };
    let own = send(["10.244.2.11", "fd00:10:244:2::11"], 1)?;
    ensure!(own >= 1, "the pod's own datagrams do not arrive");
    let forged = send(["10.244.2.77", "fd00:10:244:2::77"], 2)?;
    ensure!(
        forged == 0,
        "{forged} datagrams arrive as if from the new pod"
    );
    Ok(())
}
